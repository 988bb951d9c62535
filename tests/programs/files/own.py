"""A Triton kernel of tiebreak's for the runner: python run.py FOLDER --kernel NAME.py, the folder tiebreak/ beside it.

The name of this file is that of the kernel. It needs torch, triton and packaging.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tiebreak.kernels.external.options import kernel
from tiebreak.kernels.formats import BF16, FP16, Formats
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.triton.launch import run
from tiebreak.kernels.triton.roster import DECLARATIONS


def _run(q: Tensor, k: Tensor, v: Tensor, do: Tensor | None, causal: bool, scale: float | None) -> AttentionOutput:
    formats = Formats.of(BF16 if q.dtype == torch.bfloat16 else FP16)
    inputs = AttentionInputs(q, k, v, q if do is None else do, formats, causal, softmax_scale=scale)
    return run(inputs, None, do is not None, declaration=DECLARATIONS[Path(__file__).stem])


def backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
    """Return dQ, dK and dV, from a forward pass of its own."""
    del o
    made = _run(q, k, v, do, causal, scale).gradients
    assert made is not None
    return made.dq, made.dk, made.dv


@kernel(takes="gqa blind_rows", backward=backward)
def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Any:
    """Return O and the log-sum-exp."""
    made = _run(q, k, v, None, causal, scale)
    assert made.lse is not None
    return made.o, made.lse[..., 0]
