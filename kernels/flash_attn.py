"""The flash-attn package's FlashAttention-2, where it is installed. Not run on a GPU yet."""

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache, partial

from torch import Tensor

from tiebreak.kernels.features import COMMON, KEY_PADDING, LENGTHS, SINK, SOFTCAP, WINDOW
from tiebreak.kernels.formats import BF16, FP16
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import Kernel
from tiebreak.kernels.sdpa import FLASH_2_BLOCK
from tiebreak.kernels.vendor import asked_for, empty, fused_on_gpu, through_autograd, unnamed

LARGEST_HEAD = 256  # of the head dimension
_BY_KEYWORD = frozenset({WINDOW, SOFTCAP, SINK, LENGTHS})  # where its signature has a word of theirs


@cache
def missing() -> str | None:
    """None, or why there is no flash-attn here, in one line."""
    if importlib.util.find_spec("flash_attn") is None:
        return "flash-attn is not installed: pip install flash-attn --no-build-isolation"
    try:
        _function()
    except (ImportError, AttributeError) as error:  # built for another PyTorch, or version 4 alone
        return f"flash-attn has no flash_attn_func here: {' '.join(str(error).split())}"
    return None


def _function(inputs: AttentionInputs | None = None) -> Callable[..., Tensor]:
    """What is called: of packed sequences the function for them."""
    name = "flash_attn_func" if inputs is None or inputs.lengths is None else "flash_attn_varlen_func"
    function: Callable[..., Tensor] = getattr(importlib.import_module("flash_attn"), name)
    return function


def flash_attn() -> Kernel:
    """FlashAttention-2. Where it is missing it skips its cells, and no training run has it."""
    return Kernel(
        "flash_attn",
        partial(through_autograd, _call),
        fused_on_gpu(FLASH_2_BLOCK, contracted=True),
        has_backward=missing() is None,
        takes=COMMON - {KEY_PADDING} | _BY_KEYWORD,  # no signature of it has a mask
        missing_requirement=_missing_requirement,
    )


def _missing_requirement(inputs: AttentionInputs) -> str | None:
    if inputs.formats.inputs not in (BF16, FP16):
        return f"flash-attn takes {BF16.name} and {FP16.name}, not {inputs.formats.inputs.name}"
    if inputs.q.shape[3] > LARGEST_HEAD:
        return f"flash-attn takes head dimensions up to {LARGEST_HEAD}, not {inputs.q.shape[3]}"
    return missing() or empty(inputs) or unnamed(_function(inputs), _BY_KEYWORD, inputs)


def _call(inputs: AttentionInputs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # Its layout is (batch, N, heads, d), packed (N, heads, d). From 2.1 on its causal mask is this suite's: query i
    # sees keys up to i + keys - queries. Deterministic: gradients would else be added up in whatever order blocks end.
    rows, function = (tensor.transpose(1, 2) for tensor in (q, k, v)), _function(inputs)
    options = {"causal": inputs.causal, "softmax_scale": inputs.softmax_scale, "deterministic": True}
    options |= asked_for(function, _BY_KEYWORD, inputs)
    if inputs.lengths is None:
        return function(*rows, **options).transpose(1, 2)
    return function(*(each[0] for each in rows), **options)[None].transpose(1, 2)
