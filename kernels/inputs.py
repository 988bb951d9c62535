"""The inputs and outputs of an attention kernel."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce
from itertools import pairwise
from operator import or_

import torch
from torch import Tensor
from torch.nn.functional import pad

from tiebreak.kernels import features
from tiebreak.kernels.features import Feature
from tiebreak.kernels.formats import BF16, FP16, FP32, Format, Formats

# Formats that torch devices compute in.
TORCH_DTYPES: Mapping[Format, torch.dtype] = {BF16: torch.bfloat16, FP16: torch.float16, FP32: torch.float32}

# The first dimensions of a call's tensors: b batch, h heads, g key heads. One that is 1 applies to all.
_DIMENSIONS: Mapping[str, str] = {
    **dict.fromkeys(("q", "do", "dlse", "bias", "alibi", "block_mask"), "bh"),
    **dict.fromkeys(("k", "v", "k_descale", "v_descale"), "bg"),
    **dict.fromkeys(("key_padding", "block_table"), "b"),
    "sink": "h",
}
_EVERY = slice(None)
# The fields of a call that are None where it does not ask for a feature.
_ALIKE = (features.SINK, features.BIAS, features.ALIBI, features.LENGTHS, features.BLOCK_MASK)
_OTHERS = {features.KEY_PADDING: "key_padding", features.PAGES: "block_table", features.DESCALE: "k_descale"}
_FIELDS: Mapping[Feature, str] = {each: each.taken for each in _ALIKE} | _OTHERS

_KEPT = 2**20  # elements of a call's tiles, at most, that are kept for later use: long sequences have too many

Sides = tuple[int | None, int | None]  # of a window: keys before a row's own and behind it; None: all
#: Where packed sequences begin, in the queries and in the keys, and where the last one ends
Lengths = tuple[tuple[int, ...], tuple[int, ...]]


@lru_cache(maxsize=2)
def _ahead(queries: int, keys: int, lengths: Lengths | None) -> Tensor:
    """Return how many keys each lies behind a row's own, the last of the last row; Inf: it is of another sequence."""
    ahead = torch.full((queries, keys), torch.inf)
    for (first, end), (key, last) in zip(*map(pairwise, lengths or ((0, queries), (0, keys))), strict=True):
        ahead[first:end, key:last] = (torch.arange(key, last) - torch.arange(last - end + first, last)[:, None]).float()
    return ahead


@lru_cache(maxsize=4)
def _outside(queries: int, keys: int, sides: Sides, lengths: Lengths | None) -> Tensor:
    """Return a bool (1, 1, queries, keys), True where a window hides a key; cached for all steps of a training."""
    ahead, (left, right) = _ahead(queries, keys, lengths), (queries + keys if side is None else side for side in sides)
    return ((ahead < -left) | (ahead > right))[None, None]


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
    own_ends: bool = False  # query i sees keys 0 .. i + n - queries of the n that are a sequence's own, by key_padding
    noise_seed: int = 0  # seeds the dither and the stochastic casts
    softmax_scale: float | None = None  # alpha, what Q K^T is multiplied by; None: 1/sqrt(d)
    window: Sides = (None, None)  # keys that a query sees before its own, which is i + keys - queries, and behind it
    softcap: float = 0.0  # c: scores s become c tanh(s / c); 0: they don't
    sink: Tensor | None = None  # (heads,), a logit a head that takes part in the row's sum alone, with no V
    bias: Tensor | None = None  # finite, added to the scores; broadcastable to (batch, heads, queries, keys), of 4
    capped_bias: bool = False  # whether the bias is added before the soft cap
    alibi: Tensor | None = None  # (heads,) or (batch, heads), slopes: what scores lose by key apart from a row's own
    lengths: Lengths | None = None  # of sequences packed into a batch of 1: each sees its own keys alone
    block_mask: Tensor | None = None  # bool (batch or 1, heads or 1, blocks of queries, of keys), True where they see
    block_size: tuple[int, int] = (64, 64)  # queries and keys of a block of it
    block_table: Tensor | None = None  # int (batch, pages of a sequence): which pages of a pool hold its K and V
    page_size: int = 16  # keys of a page
    pool_pages: int = 0  # of the pool
    poison: float = 240.0  # what the pool holds where no key lies: a K or a V that shows, and any 8 bits hold
    k_descale: Tensor | None = None  # (batch, key heads), fp32: what K, numbers of e4m3, is multiplied by
    v_descale: Tensor | None = None  # the same of V
    dlse: Tensor | None = None  # (batch, heads, queries, 1), the upstream gradient of the log-sum-exp; None: 0

    def __post_init__(self) -> None:
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
        if self.page_size < 1:
            raise ValueError(f"page size {self.page_size}: expected 1 key or more")

    @property
    def scale(self) -> float:
        """alpha: 1/sqrt(d) unless the inputs say otherwise."""
        return 1.0 / math.sqrt(self.q.shape[-1]) if self.softmax_scale is None else self.softmax_scale

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.q.shape[1] // self.k.shape[1]

    def required_features(self) -> tuple[Feature, ...]:
        """Return the features that a kernel must take to run these inputs; without one it would answer wrongly."""
        queries, keys = self.lengths or ((0, self.q.shape[2]), (0, self.k.shape[2]))
        hidden, formats = self.hidden(), self.formats
        needed = {
            features.GROUPED: self.groups > 1,
            features.CAUSAL: self.causal,
            features.OBLONG_CAUSAL: self.causal and queries != keys,  # in every sequence as many of both, or not
            features.OWN_ENDS: self.causal and self.own_ends,
            features.BLIND_ROWS: hidden is not None and bool(hidden.all(-1).any()),
            features.OWN_SCALE: self.softmax_scale not in (None, 1.0 / math.sqrt(self.q.shape[-1])),
            features.MIXED_FORMATS: {formats.operands, formats.output} != {formats.inputs},
            features.VALUE_DIM: self.v.shape[3] != self.q.shape[3],
            features.WINDOW: self.window != (None, None),
            features.SOFTCAP: self.softcap > 0.0,
            features.CAPPED_BIAS: self.capped_bias and self.softcap > 0.0 and self.added is not None,
            features.OWN_SLOPES: self.alibi is not None and self.alibi.dim() > 1,
            **{feature: getattr(self, field) is not None for feature, field in _FIELDS.items()},
        }
        return tuple(feature for feature in features.FEATURES if needed.get(feature))

    def value_of(self, feature: Feature, keyword: str) -> object:
        """Return a feature's value under one of a kernel's keywords; `sliding_window` counts the row's own key."""
        if feature in (features.LENGTHS, features.PAGES, features.KEY_PADDING):
            return self._of_sequences(feature, keyword)
        if feature in _FIELDS:  # of two fields the keyword names one
            return getattr(self, keyword if hasattr(self, keyword) else _FIELDS[feature])
        left, right = (-1 if side is None else side for side in self.window)
        return {
            features.GROUPED: self.groups > 1,
            features.OWN_SCALE: self.scale,
            features.WINDOW: (left + 1 or None) if keyword == "sliding_window" else (left, right),
            features.SOFTCAP: self.softcap,
        }[feature]

    def _of_sequences(self, feature: Feature, keyword: str) -> object:
        """Return where packed sequences begin, how long they are, or which pages they are in."""
        sizes, device, of_keys = (self.q.shape[2], self.k.shape[2]), self.q.device, keyword.endswith("_k")
        if feature is features.LENGTHS:
            begins = self.lengths[of_keys] if self.lengths else (0, sizes[of_keys])
            longest = max(end - begin for begin, end in pairwise(begins))
            return longest if keyword.startswith("max") else torch.tensor(begins, dtype=torch.int32, device=device)
        if feature is features.KEY_PADDING:
            lengths = [sizes[1]] * len(self.q) if self.key_padding is None else self.key_padding.sum(-1).tolist()
            return torch.tensor(lengths, dtype=torch.int32, device=device)
        return None if self.block_table is None else self.block_table.to(torch.int32)

    def stored(self, name: str) -> tuple[Tensor, torch.dtype]:
        """Return K or V, by its name, as kernels get it, and its format: in 8 bits, or in a pool of pages."""
        held: Tensor = getattr(self, name)
        dtype = torch.float8_e4m3fn if self.is_rescaled else TORCH_DTYPES[self.formats.inputs]
        return (held if self.block_table is None else self._pooled(held, self.block_table)), dtype

    def _pooled(self, x: Tensor, block_table: Tensor) -> Tensor:
        """Return (pages of the pool, key heads, page size, d), with poison where no key lies."""
        batch, key_heads, keys, d = x.shape
        pages = -(-keys // self.page_size)
        filled = pad(x, (0, 0, 0, pages * self.page_size - keys), value=self.poison)
        pool = x.new_full((self.pool_pages, key_heads, self.page_size, d), self.poison)
        by_page = filled.reshape(batch, key_heads, pages, self.page_size, d).transpose(1, 2)
        pool[block_table.long().flatten()] = by_page.flatten(0, 1)
        return pool

    def part(self, batch: slice = _EVERY, *, heads: slice = _EVERY, key_heads: slice = _EVERY) -> "AttentionInputs":
        """Return some entries of the batch and some heads of it, with all fields that belong to them."""
        cuts = {"b": batch, "h": heads, "g": key_heads}
        parts, tensors = {}, ((name, of, getattr(self, name)) for name, of in _DIMENSIONS.items())
        for name, letters, tensor in tensors:
            if tensor is not None:
                sizes = zip(letters[-tensor.dim() :], tensor.shape, strict=False)  # slopes may be (heads,)
                parts[name] = tensor[tuple(cuts[of] if n > 1 else _EVERY for of, n in sizes)]
        return replace(self, **parts)

    def expanded(self, x: Tensor) -> Tensor:
        """Repeat the values of key heads, (batch, key heads, ...), for their query heads, (batch, heads, ...)."""
        return x.repeat_interleave(self.groups, 1) if self.groups > 1 else x

    @property
    def is_rescaled(self) -> bool:
        """True if K and V are stored with factors that multiply them in every call."""
        return self.k_descale is not None

    @property
    def whole_k(self) -> Tensor:
        """The K that is meant, (batch, key heads, keys, d), exact: in fp64 where it is stored with factors."""
        return _descaled(self.k, self.k_descale)

    @property
    def whole_v(self) -> Tensor:
        """The V that is meant, (batch, key heads, keys, d of V), as `whole_k`."""
        return _descaled(self.v, self.v_descale)

    def gradients_as_stored(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of K and V as stored, from those of the K and V that are meant."""
        return _descaled(dk, self.k_descale), _descaled(dv, self.v_descale)

    def expanded_k(self) -> Tensor:
        """Return `whole_k` with every key head repeated for its query heads, (batch, heads, keys, d)."""
        return self.expanded(self.whole_k)

    def expanded_v(self) -> Tensor:
        """Return `whole_v` likewise, (batch, heads, keys, d of V)."""
        return self.expanded(self.whole_v)

    @property
    def added(self) -> Tensor | None:
        """The sum of the bias and of ALiBi's, in the bias' shape, as it is added to the scores."""
        if self.alibi is None:
            return self.bias
        apart = _ahead(self.q.shape[2], self.k.shape[2], self.lengths).to(self.q.device).abs().nan_to_num(posinf=0.0)
        bias = -self.alibi.view(-1, self.q.shape[1], 1, 1) * apart
        return bias if self.bias is None else bias + self.bias

    def hidden(self) -> Tensor | None:
        """Return a bool tensor that broadcasts to (batch, heads, queries, keys), True at masked scores, or None."""
        masks = self.masks().values()
        return reduce(or_, masks) if masks else None

    def visible(self, s: Tensor) -> Tensor:
        """Return scores, (batch, heads, queries, keys), with -Inf at masked ones."""
        return s if (hidden := self.hidden()) is None else s.masked_fill(hidden, -torch.inf)

    def masks(self) -> dict[Feature, Tensor]:
        """Return the mask of each feature that hides scores; `hidden` combines them."""
        queries, keys, device, masks = self.q.shape[-2], self.k.shape[-2], self.q.device, {}
        if self.causal and self.own_ends and self.key_padding is not None:
            sequences = (_outside(queries, n, (None, 0), None) for n in self.key_padding.sum(-1).tolist())
            masks[features.OWN_ENDS] = torch.cat([pad(x, (0, keys - x.shape[3]), value=True) for x in sequences]).to(
                device
            )
        elif self.causal:
            masks[features.CAUSAL] = _outside(queries, keys, (None, 0), self.lengths).to(device)
        if self.window != (None, None):
            masks[features.WINDOW] = _outside(queries, keys, self.window, self.lengths).to(device)
        if self.lengths is not None:
            masks[features.LENGTHS] = _outside(queries, keys, (None, None), self.lengths).to(device)
        if self.key_padding is not None:
            masks[features.KEY_PADDING] = ~self.key_padding[:, None, None, :]
        if self.block_mask is not None:
            rows = (~self.block_mask).repeat_interleave(self.block_size[0], 2)[:, :, :queries]
            masks[features.BLOCK_MASK] = rows.repeat_interleave(self.block_size[1], 3)[..., :keys]
        return masks


GRADIENT_NAMES = ("dq", "dk", "dv")  # those that every backward pass gives, as fields of the next


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
        """Return one tile, made if it is not kept; callers must not write to it."""
        at = (name, rows.start, rows.stop, keys.start, keys.stop)
        if at in self.tensors:
            return self.tensors[at]
        tile = make()
        if len(self.tensors) * tile.numel() < _KEPT:  # tiles are alike, but for the last one of a row
            self.tensors[at] = tile
        return tile


@dataclass(frozen=True)
class AttentionOutput:
    """The tensors that a kernel returned."""

    o: Tensor  # (batch, heads, queries, d of V)
    lse: Tensor | None = None  # (batch, heads, queries, 1), log-sum-exp of the scores, where the kernel returns it
    gradients: Gradients | None = None  # where a backward pass was asked for and exists
    backward_error: str | None = None  # what a backward pass that was asked for did wrong, in one line: raised ...
    backward_raised: Exception | None = None  # by it, if it did
    tiles: Tiles | None = None  # what a declared kernel's backward pass may use again, until it has run
    assumed: str = ""  # what was assumed, as it ran, of a device that was not there


def _descaled(x: Tensor, factors: Tensor | None) -> Tensor:
    """Return (batch, key heads, N, d) times factors (batch, key heads), exact in fp64; unchanged without any."""
    return x if factors is None else x.double() * factors.double()[..., None, None]


def sum_groups(gradient: Tensor, groups: int) -> Tensor:
    """Add up the gradients of the query heads that share a key head: (batch, heads, ...) -> (batch, key heads, ...)."""
    if groups == 1:
        return gradient
    batch, heads, *rest = gradient.shape
    return gradient.reshape(batch, heads // groups, groups, *rest).sum(2)
