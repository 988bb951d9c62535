"""A device's own kernels called as users' kernels are, so that they can be asked how they are used."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tiebreak.backends.backend import Backend
from tiebreak.kernels.external.caller import Caller
from tiebreak.kernels.external.conventions import convention
from tiebreak.kernels.external.kernels import UserKernel, users_kernel
from tiebreak.kernels.external.options import NO_BACKWARD, KernelOptions
from tiebreak.kernels.formats import Format, Formats
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import Kernel


@dataclass(frozen=True)
class _AsFunction:
    """A kernel as a function of q, k and v."""

    kernel: Kernel
    backend: Backend
    fmt: Format  # of q, k, v and O

    def _output(
        self, qkv: tuple[Tensor, ...], do: Tensor | None, causal: bool, attn_mask: Tensor | None
    ) -> AttentionOutput:
        q, k, v = qkv
        # The masks that are asked about are of keys: the same in every row.
        padding = None if attn_mask is None else attn_mask[:, 0, 0].expand(len(q), -1)
        formats = Formats.of(self.fmt)
        inputs = AttentionInputs(q, k, v, q if do is None else do, formats, causal=causal, key_padding=padding)
        return self.kernel.compute(inputs, self.backend.arithmetic, do is not None)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool = False, attn_mask: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """O, and the log-sum-exp if the kernel returns one."""
        output = self._output((q, k, v), None, causal, attn_mask)
        o = output.o.to(q.dtype)
        return o if output.lse is None else (o, output.lse.squeeze(-1))

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        causal: bool = False,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """dQ, dK and dV; its forward pass is run once more."""
        del o
        with torch.enable_grad():
            gradients = self._output((q, k, v), do, causal, attn_mask).gradients
        assert gradients is not None
        return tuple(each.to(q.dtype) for each in (gradients.dq, gradients.dk, gradients.dv))


def called_as_users(kernel: Kernel, backend: Backend, fmt: Format) -> UserKernel:
    """A device's own kernel as one that can be called step by step.

    Args:
        kernel: as the backend has it.
        backend: that it runs on.
        fmt: of q, k, v and O.
    """
    function = _AsFunction(kernel, backend, fmt)
    options = KernelOptions(backward=function.backward if kernel.has_backward else NO_BACKWARD)
    made = users_kernel(kernel.name, Caller(function, convention(function, options)))
    return replace(made, takes=kernel.takes, missing_requirement=kernel.missing_requirement)
