"""`varlen_attn`, PyTorch's attention over packed sequences, on a GPU: FlashAttention-2. Not run on one yet."""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor

from tiebreak.kernels.features import BLIND_ROWS, CAUSAL, GROUPED, LENGTHS, OBLONG_CAUSAL, OWN_SCALE, WINDOW
from tiebreak.kernels.formats import BF16, FP16
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import Kernel
from tiebreak.kernels.sdpa import FLASH_2_BLOCK
from tiebreak.kernels.vendor import empty, fused_on_gpu, through_autograd

# A causal mask is a window there. Pages and lengths of a cache are for inference alone.
_BY_KEYWORD = frozenset({GROUPED, LENGTHS, OWN_SCALE, WINDOW})
_TAKES = _BY_KEYWORD | {CAUSAL, OBLONG_CAUSAL, BLIND_ROWS}


def varlen() -> Kernel:
    """Return PyTorch's varlen_attn; a batch that is not packed is packed for it."""
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
        parameters = inspect.signature(_function()).parameters
    except ImportError:
        return "this PyTorch has no torch.nn.attention.varlen: install 2.10 or newer"
    if inputs.formats.inputs not in (BF16, FP16):
        return f"varlen_attn takes {BF16.name} and {FP16.name}, not {inputs.formats.inputs.name}"
    for feature in _BY_KEYWORD.intersection(_as_packed(inputs).required_features()) if empty(inputs) is None else ():
        if parameters.keys().isdisjoint(feature.keywords):
            return f"varlen_attn knows no {feature.words} here: install a newer release"
    return empty(inputs)


def _as_packed(inputs: AttentionInputs) -> AttentionInputs:
    """Return the call that is made: a batch as sequences of one, a causal mask as a window without keys behind."""
    if inputs.causal:
        inputs = replace(inputs, causal=False, window=(inputs.window[0], 0))
    if inputs.lengths is not None:
        return inputs
    batch, sizes = inputs.q.shape[0], (inputs.q.shape[2], inputs.k.shape[2])
    q, k, v, do = map(_in_one, (inputs.q, inputs.k, inputs.v, inputs.do))
    of_queries, of_keys = (tuple(range(0, batch * n + 1, n)) for n in sizes)
    return replace(inputs, q=q, k=k, v=v, do=do, lengths=(of_queries, of_keys))


def _in_one(x: Tensor) -> Tensor:
    """Return (batch, heads, N, d) as (1, heads, batch N, d)."""
    return x.transpose(0, 1).flatten(1, 2)[None]


def _call(inputs: AttentionInputs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    function, called = _function(), _as_packed(inputs)
    features = _BY_KEYWORD.intersection(called.required_features())
    words = [(feature, word) for feature in features for word in feature.keywords]
    parameters = inspect.signature(function).parameters
    options = {word: called.value_of(feature, word) for feature, word in words if word in parameters}
    o = function(*(_in_one(tensor)[0].transpose(0, 1) for tensor in (q, k, v)), **options).transpose(0, 1)
    heads, rows, d = o.shape
    return o.reshape(heads, q.shape[0], rows // q.shape[0], d).transpose(0, 1)
