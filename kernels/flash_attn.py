"""The flash-attn package's FlashAttention-2, where it is installed. Not run on a GPU yet."""

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from functools import cache, partial

from torch import Tensor

from tiebreak.kernels.features import COMMON, KEY_PADDING, SINK, SOFTCAP, WINDOW, Feature
from tiebreak.kernels.formats import BF16, FP16
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import Kernel
from tiebreak.kernels.sdpa import FLASH_2_BLOCK
from tiebreak.kernels.vendor import empty, fused_on_gpu, through_autograd

LARGEST_HEAD = 256  # of the head dimension
_BY_KEYWORD = frozenset({WINDOW, SOFTCAP, SINK})  # that a release takes where its signature has a keyword of theirs


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


def _function() -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = importlib.import_module("flash_attn").flash_attn_func
    return function


@cache
def _keywords() -> Mapping[Feature, str]:
    """What its signature calls the features that go by a keyword, of those that it has."""
    parameters = inspect.signature(_function()).parameters
    known = {feature: [word for word in feature.keywords if word in parameters] for feature in _BY_KEYWORD}
    return {feature: words[0] for feature, words in known.items() if words}


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
    return missing() or empty(inputs) or _unnamed(inputs)


def _unnamed(inputs: AttentionInputs) -> str | None:
    """None, or what its signature has no parameter for."""
    unnamed = [feature.words for feature in inputs.asks() if feature in _BY_KEYWORD - _keywords().keys()]
    return f"flash_attn_func has no parameter for a {unnamed[0]} here: install a newer flash-attn" if unnamed else None


def _call(inputs: AttentionInputs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # Its layout is (batch, N, heads, d). From 2.1 on its causal mask is this suite's: query i sees keys up to
    # i + keys - queries. Deterministic: its gradients would else be added up in whatever order blocks end.
    transposed = (tensor.transpose(1, 2) for tensor in (q, k, v))
    options = {"causal": inputs.causal, "softmax_scale": inputs.softmax_scale, "deterministic": True}
    asked = {word: inputs.value_of(feature, word) for feature, word in _keywords().items() if feature in inputs.asks()}
    return _function()(*transposed, **options, **asked).transpose(1, 2)
