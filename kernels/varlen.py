"""`varlen_attn`, PyTorch's attention over packed sequences, on a GPU: FlashAttention-2. Not run on one yet."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor

from tiebreak.kernels.features import BLIND_ROWS, CAUSAL, GROUPED, LENGTHS, OBLONG_CAUSAL, OWN_SCALE, WINDOW
from tiebreak.kernels.formats import BF16, FP16
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import Kernel
from tiebreak.kernels.sdpa import FLASH_2_BLOCK
from tiebreak.kernels.vendor import apart, asked_for, empty, fused_on_gpu, in_one, packed, through_autograd, unnamed

# A causal mask is a window there. Pages and lengths of a cache are for inference alone.
_BY_KEYWORD = frozenset({GROUPED, LENGTHS, OWN_SCALE, WINDOW})
_TAKES = _BY_KEYWORD | {CAUSAL, OBLONG_CAUSAL, BLIND_ROWS}


def varlen() -> Kernel:
    """PyTorch's varlen_attn; a batch that is not packed is packed for it."""
    return Kernel(
        "varlen",
        partial(through_autograd, _call),
        fused_on_gpu(FLASH_2_BLOCK),
        takes=_TAKES,
        missing_requirement=_missing_requirement,
    )


def _function() -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    return function


def _missing_requirement(inputs: AttentionInputs) -> str | None:
    try:
        function = _function()
    except ImportError:
        return "this PyTorch has no torch.nn.attention.varlen: install 2.10 or newer"
    if inputs.formats.inputs not in (BF16, FP16):
        return f"varlen_attn takes {BF16.name} and {FP16.name}, not {inputs.formats.inputs.name}"
    return empty(inputs) or unnamed(function, _BY_KEYWORD, _windowed(inputs))


def _windowed(inputs: AttentionInputs) -> AttentionInputs:
    """The call that is made: packed, a causal mask as a window without keys behind."""
    left, _ = inputs.window
    plain = packed(inputs)
    return plain if not inputs.causal else replace(plain, causal=False, window=(left, 0))


def _call(inputs: AttentionInputs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = (in_one(tensor)[0].transpose(0, 1) for tensor in (q, k, v))
    function = _function()
    o = function(*rows, **asked_for(function, _BY_KEYWORD, _windowed(inputs)))
    return apart(o.transpose(0, 1)[None], q.shape[0])
