"""A device in tiebreak's matrix: a simulated one, whose products of matrices keep their sum in bf16."""

import torch
from torch import Tensor

from tiebreak.backends.backend import Backend
from tiebreak.backends.torch_arithmetic import TorchArithmetic
from tiebreak.kernels.plans import Accumulator, Cast
from tiebreak.matrix.checks import Check
from tiebreak.matrix.result import Result
from tiebreak.reports.records.record import Answer, CheckRecord


class ShortSums(TorchArithmetic):
    """Torch's own operations but one."""

    def matmul(self, a: Tensor, b: Tensor, cast: Cast, accumulator: Accumulator) -> Tensor:
        """Round the sum after each 32 terms."""
        total = torch.zeros(())
        for terms in torch.split(torch.arange(a.shape[-1]), 32):
            total = (total + super().matmul(a[..., terms], b[..., terms, :], cast, accumulator)).bfloat16().float()
        return total


DEVICE = Backend("my_device", "a simulated device", "cpu", ShortSums(), lambda: None, lambda: ())


def my_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Call the device's own kernel: it is given tensors that lie there."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)


def _within(result: Result) -> Answer | None:
    rms = result.number("rms_ulps")
    return None if rms is None else Answer(rms <= 0.5, LIMIT.described.about, f"rms error of {rms:.2f} ulp")


LIMIT = Check("my_limit", _within, CheckRecord("an rms error of O of at most 0.5 ulp, as the data sheet says"))
