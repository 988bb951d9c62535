"""What goes into an attention kernel and what comes out of it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce
from operator import or_

import torch
from torch import Tensor

from tiebreak.kernels.features import (
    BLIND_ROWS,
    CAUSAL,
    GROUPED,
    KEY_PADDING,
    MIXED_FORMATS,
    OBLONG_CAUSAL,
    OWN_SCALE,
    SINK,
    SOFTCAP,
    VALUE_DIM,
    WINDOW,
    Feature,
)
from tiebreak.kernels.formats import BF16, FP16, FP32, Format, Formats

# Formats that torch devices compute in.
TORCH_DTYPES: Mapping[Format, torch.dtype] = {BF16: torch.bfloat16, FP16: torch.float16, FP32: torch.float32}

# What the first dimensions of a call's tensors are: b batch, h heads, g key heads. One that is 1 stands for all.
_DIMENSIONS: Mapping[str, str] = {
    **dict.fromkeys(("q", "do"), "bh"),
    **dict.fromkeys(("k", "v"), "bg"),
    "key_padding": "b",
    "sink": "h",
}
_EVERY = slice(None)

_KEPT = 2**20  # elements of a call's tiles, at most, that are kept for later use: long sequences have too many


@lru_cache(maxsize=4)
def _outside(queries: int, keys: int, left: int | None, right: int | None) -> Tensor:
    """Bool (1, 1, queries, keys): True where a window hides a key; made once for all steps of a training.

    Args:
        queries: rows; the last one's own key is the last.
        keys: columns.
        left: keys that a row sees before its own; None: all. Causal attention is a window of all of them ...
        right: ... and of 0 behind its own.
    """
    every = torch.ones(queries, keys, dtype=torch.bool)
    behind = torch.zeros_like(every) if right is None else every.triu(keys - queries + right + 1)
    before = torch.zeros_like(every) if left is None else every.tril(keys - queries - left - 1)
    return (behind | before)[None, None]


@dataclass(frozen=True)
class AttentionInputs:
    """One call of attention. Tensors hold values of `formats` in fp32, on the host."""

    q: Tensor  # (batch, heads, queries, d)
    k: Tensor  # (batch, key heads, keys, d); heads is a multiple of key heads (grouped-query attention)
    v: Tensor  # (batch, key heads, keys, d of V)
    do: Tensor  # (batch, heads, queries, d of V), the upstream gradient
    formats: Formats  # of q, k, v and dO, and of what is made of them
    causal: bool = False  # query i sees keys 0 .. i + keys - queries
    key_padding: Tensor | None = None  # bool (batch, keys), True where a key takes part
    noise_seed: int = 0  # seeds the dither and the stochastic casts
    softmax_scale: float | None = None  # alpha, what Q K^T is multiplied by; None: 1/sqrt(d)
    #: Keys that a query sees before its own, i + keys - queries, and behind it; None: all
    window: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0  # c: scores s become c tanh(s / c); 0: they don't
    sink: Tensor | None = None  # (heads,), a logit a head that takes part in the row's sum alone, with no V

    def __post_init__(self) -> None:
        """Refuse shapes that no attention kernel could take."""
        batch, heads, queries, d = self.q.shape
        if self.k.shape[:3] != self.v.shape[:3] or self.k.shape[0] != batch or self.k.shape[3] != d:
            raise ValueError(f"q {tuple(self.q.shape)}, k {tuple(self.k.shape)}, v {tuple(self.v.shape)} do not fit")
        if heads % self.k.shape[1]:
            raise ValueError(f"{heads} query heads are no multiple of {self.k.shape[1]} key heads")
        if self.do.shape != (batch, heads, queries, self.v.shape[3]):
            raise ValueError(f"dO {tuple(self.do.shape)} does not go with q {tuple(self.q.shape)}")
        if any(side is not None and side < 0 for side in self.window):
            raise ValueError(f"window {self.window}: its sides are 0 or more keys, or None for all")
        if not 0.0 <= self.softcap < math.inf:
            raise ValueError(f"softcap {self.softcap}: expected a positive number, or 0 for none")
        if self.sink is not None and self.sink.shape != (heads,):
            raise ValueError(f"sink {tuple(self.sink.shape)}: expected one logit for each of {heads} heads")

    @property
    def scale(self) -> float:
        """alpha: 1/sqrt(d) unless the inputs say otherwise."""
        return 1.0 / math.sqrt(self.q.shape[-1]) if self.softmax_scale is None else self.softmax_scale

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.q.shape[1] // self.k.shape[1]

    def asks(self) -> tuple[Feature, ...]:
        """What a kernel has to take to run these inputs; one that doesn't would leave it out and answer wrongly."""
        needed = {
            GROUPED: self.groups > 1,
            CAUSAL: self.causal,
            OBLONG_CAUSAL: self.causal and self.q.shape[2] != self.k.shape[2],
            KEY_PADDING: self.key_padding is not None,
            BLIND_ROWS: self._blind(),
            OWN_SCALE: self.softmax_scale not in (None, 1.0 / math.sqrt(self.q.shape[-1])),
            MIXED_FORMATS: {self.formats.operands, self.formats.output} != {self.formats.inputs},
            VALUE_DIM: self.v.shape[3] != self.q.shape[3],
            WINDOW: self.window != (None, None),
            SOFTCAP: self.softcap > 0.0,
            SINK: self.sink is not None,
        }
        return tuple(feature for feature, needed in needed.items() if needed)

    def value_of(self, feature: Feature, keyword: str) -> object:
        """What a kernel is given of a feature that goes by a value.

        Args:
            feature: has this keyword.
            keyword: one of the common ones; a sliding window is a number of keys, the row's own among them.
        """
        left, right = (-1 if side is None else side for side in self.window)
        window = (left + 1 or None) if keyword == "sliding_window" else (left, right)
        values = {GROUPED: self.groups > 1, OWN_SCALE: self.scale, WINDOW: window, SOFTCAP: self.softcap}
        return {**values, SINK: self.sink}[feature]

    def part(self, batch: slice = _EVERY, *, heads: slice = _EVERY, key_heads: slice = _EVERY) -> "AttentionInputs":
        """Some entries of the batch and some heads of it, with all that goes with them."""
        cuts = {"b": batch, "h": heads, "g": key_heads}
        tensors = ((name, of_name, getattr(self, name)) for name, of_name in _DIMENSIONS.items())
        parts = {
            name: tensor[tuple(cuts[of] if n > 1 else _EVERY for of, n in zip(of_name, tensor.shape, strict=False))]
            for name, of_name, tensor in tensors
            if tensor is not None
        }
        return replace(self, **parts)

    def _blind(self) -> bool:
        hidden = self.hidden()
        return hidden is not None and bool(hidden.all(-1).any())

    def expanded_k(self) -> Tensor:
        """K with every key head repeated for its query heads, (batch, heads, keys, d)."""
        return self.k.repeat_interleave(self.groups, 1) if self.groups > 1 else self.k

    def expanded_v(self) -> Tensor:
        """V with every key head repeated for its query heads, (batch, heads, keys, d)."""
        return self.v.repeat_interleave(self.groups, 1) if self.groups > 1 else self.v

    def hidden(self) -> Tensor | None:
        """Bool, broadcastable to (batch, heads, queries, keys): True where a score is masked out; None if nowhere."""
        masks = self.masks().values()
        return reduce(or_, masks) if masks else None

    def masks(self) -> dict[Feature, Tensor]:
        """What hides scores: of each feature that does, as `hidden` has them together."""
        sizes, masks = (self.q.shape[-2], self.k.shape[-2]), {}
        if self.causal:
            masks[CAUSAL] = _outside(*sizes, None, 0).to(self.q.device)
        if self.window != (None, None):
            masks[WINDOW] = _outside(*sizes, *self.window).to(self.q.device)
        if self.key_padding is not None:
            masks[KEY_PADDING] = ~self.key_padding[:, None, None, :]
        return masks


@dataclass(frozen=True)
class Gradients:
    """Gradients of the inputs, in the inputs' shapes, and the row term they were computed with."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    delta: Tensor | None = None  # (batch, heads, queries, 1) as the kernel used it; None where it doesn't tell
    dsink: Tensor | None = None  # (heads,), where the inputs have a sink and the kernel gives its gradient


@dataclass(frozen=True)
class Tiles:
    """Intermediates of one call, such as S, that its two passes share, tile by tile, as far as they are small."""

    tensors: dict[tuple[str, int, int, int, int], Tensor] = field(default_factory=dict)  # by name, rows and keys

    def shared(self, name: str, rows: slice, keys: slice, make: Callable[[], Tensor]) -> Tensor:
        """One tile, made if it is not kept; nobody may write to it."""
        at = (name, rows.start, rows.stop, keys.start, keys.stop)
        if at in self.tensors:
            return self.tensors[at]
        tile = make()
        if tile.numel() + sum(other.numel() for other in self.tensors.values()) <= _KEPT:
            self.tensors[at] = tile
        return tile


@dataclass(frozen=True)
class AttentionOutput:
    """What a kernel returned."""

    o: Tensor  # (batch, heads, queries, d of V)
    lse: Tensor | None = None  # (batch, heads, queries, 1), log-sum-exp of the scores, where the kernel returns it
    gradients: Gradients | None = None  # where a backward pass was asked for and exists
    backward_error: str | None = None  # what a backward pass that was asked for did wrong, in one line: raised ...
    tiles: Tiles | None = None  # what a declared kernel's backward pass may use again, until it has run


def sum_groups(gradient: Tensor, groups: int) -> Tensor:
    """Add up the gradients of the query heads that share a key head: (batch, heads, ...) -> (batch, key heads, ...)."""
    if groups == 1:
        return gradient
    batch, heads, *rest = gradient.shape
    return gradient.reshape(batch, heads // groups, groups, *rest).sum(2)
