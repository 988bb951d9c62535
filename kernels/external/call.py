"""One call of a kernel that someone else wrote, step by step: where its arguments lie, its O, its gradients."""

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from tiebreak.kernels.external.options import AUTOGRAD, Convention
from tiebreak.kernels.features import ALWAYS_GIVEN, CAUSAL, KEY_PADDING, OWN_ENDS, Feature
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionInputs
from tiebreak.kernels.kernel import Blame, CannotRunError

FULL = "bhnd"  # a layout without a dimension left out
SHAPE = "returned shape"  # how a contract is broken by an O that is too large or too small

_LOG = logging.getLogger("tiebreak.calls")

Triple = tuple[Tensor, Tensor, Tensor]
Made = tuple[Tensor, ...]  # dQ, dK and dV and, where autograd gives it, dSink
#: Returns the same numbers in another place in memory: other strides, or a storage that goes on behind them.
Placing = Callable[[Tensor], Tensor]


def called(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Call a user's function; log, at level debug, what it is given, how long it takes and what it returns."""
    if not _LOG.isEnabledFor(logging.DEBUG):
        return function(*arguments, **keywords)
    began, came = time.perf_counter(), "an error"
    try:
        returned = function(*arguments, **keywords)
        came = _shown(returned, digest=True)
        return returned
    finally:
        took, name = 1e3 * (time.perf_counter() - began), getattr(function, "__qualname__", type(function).__name__)
        given = [*map(_shown, arguments), *(f"{word}={_shown(value)}" for word, value in keywords.items())]
        _LOG.debug("%s(%s) -> %s in %.1f ms", name, ", ".join(given), came, took)


def _shown(value: object, *, digest: bool = False) -> str:
    """Return a tensor's format and shape, perhaps with a digest of its bits; any other value as it is."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_shown(each, digest=digest) for each in value)})"
    if not isinstance(value, Tensor):
        return repr(value)
    shape = f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    bits = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() if digest else b""
    return f"{shape} {hashlib.sha256(bits).hexdigest()[:12]}" if digest else shape


def broken(how: str) -> CannotRunError:
    """Return the error of a kernel that breaks its contract; `how` continues a sentence that begins with `it`."""
    return CannotRunError(how, Blame.KERNEL)


@dataclass(frozen=True)
class Places:
    """The placement of a call's arguments in memory."""

    q: Placing | None = None  # None: contiguous
    k: Placing | None = None
    v: Placing | None = None
    do: Placing | None = None
    v_in_k: bool = False  # whether V is the first columns of K, and lies there: a latent cache

    @classmethod
    def all(cls, placing: Placing) -> "Places":
        """Return the same placement for all arguments."""
        return cls(placing, placing, placing, placing)


CONTIGUOUS = Places()


@dataclass(frozen=True)
class Placed:
    """The arguments of a call, in the kernel's layout and format, placed in memory."""

    leaves: Triple  # q, k and v that autograd's gradients are of
    arguments: Triple  # those that the function gets
    do: Tensor
    sink: Tensor | None = None  # one that autograd's gradient is of


@dataclass(frozen=True)
class Call:
    """One call in the kernel's own layout."""

    function: Callable[..., Any]
    convention: Convention
    inputs: AttentionInputs

    @property
    def _dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.inputs.formats.inputs]

    @property
    def _layout(self) -> str:
        return self.convention.options.layout

    @property
    def _letters(self) -> str:
        """The kernel's order of dimensions, with those that it leaves out in front."""
        return "".join(letter for letter in FULL if letter not in self._layout) + self._layout

    @property
    def _trains(self) -> bool:
        """True if K and V can have gradients: they are neither paged nor in 8 bits."""
        return all(feature.trains for feature in self.inputs.required_features())

    def placed(self, places: Places = CONTIGUOUS, *, gradients: bool) -> Placed:
        """Return copies of the inputs, which a kernel may spoil, placed as `places` say; `gradients` may follow."""
        inputs = self.inputs
        held = {"q": (inputs.q, None), "k": inputs.stored("k"), "v": inputs.stored("v"), "do": (inputs.do, None)}
        laid = {name: self.laid(*tensor) for name, tensor in held.items()}
        q, k, v, do = (place(x) if (place := getattr(places, name)) else x for name, x in laid.items())
        v = k[..., : v.shape[-1]] if places.v_in_k else v
        if not (gradients and self._trains and self.convention.options.backward == AUTOGRAD):
            return Placed((q, k, v), (q, k, v), do)
        sink = None if inputs.sink is None else inputs.sink.to(self._dtype, copy=True).requires_grad_()
        leaves = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
        # Not the leaves themselves: of a kernel that writes into its inputs the message says so, and is not
        # autograd's. A copy would lie elsewhere, though.
        return Placed(leaves, (q.clone(), k.clone(), v.clone()) if places is CONTIGUOUS else leaves, do, sink)

    def laid(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a copy of (batch, heads, N, d) in the kernel's order of dimensions and its format, contiguous."""
        x = x.to(dtype or self._dtype, copy=True)
        return x.permute([FULL.index(letter) for letter in self._letters]).contiguous()

    def restored(self, x: Tensor) -> Tensor:
        """Return a tensor in the kernel's order of dimensions as (batch, heads, N, d), in fp32."""
        return x.detach().permute([self._letters.index(letter) for letter in FULL]).float()

    def forward(self, placed: Placed) -> Tensor:
        """Return O in the kernel's layout, a call for each index of the dimensions it lacks; CannotRunError: no O."""
        inputs = self.inputs if placed.sink is None else replace(self.inputs, sink=placed.sink)
        return self._forward(placed.arguments, inputs, len(FULL) - len(self._layout))

    def _forward(self, arguments: Triple, part: AttentionInputs, left_out: int) -> Tensor:
        """Return O of a part of the call, whose arguments have `left_out` more dimensions than the kernel takes."""
        if left_out == 0:
            return self._checked(self._returned(arguments, part), arguments, self._shape_of_o(arguments[0], part))
        q, k, v = arguments
        paged, by_batch = part.block_table is not None, "b" not in self._layout and q.dim() == len(FULL)
        outputs = []
        for index in range(q.shape[0]):
            of_keys = index if by_batch else index // part.groups
            cut, cut_keys = slice(index, index + 1), slice(of_keys, of_keys + 1)
            portion = part.part(cut) if by_batch else part.part(heads=cut, key_heads=cut_keys)
            # A pool of pages is for all of a batch.
            own_k, own_v = (x if paged and by_batch else x.select(1 if paged else 0, of_keys) for x in (k, v))
            outputs.append(self._forward((q[index], own_k, own_v), portion, left_out - 1))
        return torch.stack(outputs)

    def _shape_of_o(self, q: Tensor, part: AttentionInputs) -> tuple[int, ...]:
        """Return the shape of an argument q, with the head dimension of V."""
        d = self._layout.index("d")
        return (*q.shape[:d], part.v.shape[3], *q.shape[d + 1 :])

    def returned(self, placed: Placed) -> Any:
        """Return all that one call returns, of a kernel that takes all dimensions."""
        return self._returned(placed.arguments, self.inputs)

    def _returned(self, arguments: Triple, part: AttentionInputs) -> Any:
        keywords, out = self.keywords(part), self.convention.out
        if out is not None:  # NaN: an element that the kernel does not write shows
            keywords[out] = arguments[0].new_full(self._shape_of_o(arguments[0], part), torch.nan)
        written = keywords.get(out or "")
        after, keywords = self.convention.arguments(keywords)
        returned = called(self.function, *arguments, *after, **keywords)
        if written is None:
            return returned
        return (written, *returned[1:]) if isinstance(returned, (tuple, list)) else written

    def keywords(self, inputs: AttentionInputs) -> dict[str, Any]:
        """Return causal flag, mask, scale and other values of a call or a part of it, by the kernel's keywords."""
        convention, given = self.convention, {*ALWAYS_GIVEN, *inputs.required_features()} - {KEY_PADDING}
        lengths = convention.lengths(padded=inputs.key_padding is not None, paged=inputs.block_table is not None)
        keywords: dict[str, Any] = {
            keyword: self._converted(feature, inputs.value_of(feature, keyword))
            for keyword, feature in convention.values.items()
            if feature in given or keyword == lengths or keyword in convention.required
        }
        by_value = set(convention.values.values()) - ({KEY_PADDING} if convention.mask else set())
        masks = {feature: mask for feature, mask in inputs.masks().items() if feature not in by_value}
        fits = inputs.q.shape[2] == inputs.k.shape[2] or not convention.causal_where_square
        flagged = convention.causal is not None and masks.keys() <= {CAUSAL, OWN_ENDS} and fits
        if convention.causal is not None:
            keywords[convention.causal] = inputs.causal and flagged
        if convention.mask is not None:
            keywords[convention.mask] = None  # it may have no default
        if masks and convention.mask is not None and not flagged:
            visible = ~reduce(or_, masks.values()).to(inputs.q.device)
            keywords[convention.mask] = visible.expand(-1, -1, inputs.q.shape[2], -1)
        return keywords

    def _converted(self, feature: Feature, value: object) -> object:
        """Return a feature's value as kernels get it: numbers of a tensor in the format of q, unless they are fp32."""
        if feature.in_fp32 or not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return value.to(self._dtype)

    def backward(self, placed: Placed, o: Tensor) -> Made | None:
        """Return dQ, dK and dV in the kernel's layout, or None; CannotRunError: what it returns are not gradients."""
        backward, gradients = self.convention.options.backward, None
        if backward == AUTOGRAD and o.requires_grad:
            leaves = placed.leaves if placed.sink is None else (*placed.leaves, placed.sink)
            gradients = called(torch.autograd.grad, o, leaves, placed.do, allow_unused=True)
            names = zip(("q", "k", "v", "the sink"), gradients, strict=False)
            if missing := [name for name, gradient in names if gradient is None]:
                raise broken(f"has no gradient of {' and '.join(missing)}")
        elif callable(backward) and self._trains:
            after, keywords = self.convention.arguments(self.keywords(self.inputs))
            gradients = called(backward, placed.do, *placed.arguments, o, *after, **keywords)
            if not isinstance(gradients, (tuple, list)) or len(gradients) < 3:
                raise broken("returned no (dQ, dK, dV)")
            gradients = tuple(gradients[: 3 if self.inputs.sink is None else 4])
        if gradients is None:
            return None
        for name, gradient, leaf in zip("QKV", gradients[:3], placed.arguments, strict=True):
            if not isinstance(gradient, Tensor) or gradient.shape != leaf.shape:
                received = tuple(gradient.shape) if isinstance(gradient, Tensor) else type(gradient).__name__
                raise broken(f"returned {received} for d{name}, expected {tuple(leaf.shape)}")
            if gradient.dtype != leaf.dtype:
                raise broken(f"returned {gradient.dtype} for d{name}, expected {leaf.dtype}")
        made: Made = gradients
        return made

    def _checked(self, returned: object, arguments: Sequence[Tensor], expected: tuple[int, ...]) -> Tensor:
        """Return O, which is the returned value or the first of several, such as (O, log-sum-exp), checked."""
        q = arguments[0]
        out = returned[0] if isinstance(returned, (tuple, list)) and returned else returned
        if not isinstance(out, Tensor):
            raise broken(f"returned {type(returned).__name__}, not a tensor")
        if out.shape != expected:
            raise broken(f"{SHAPE} {tuple(out.shape)}, expected {expected}")
        if out.dtype != q.dtype:
            raise broken(f"returned {out.dtype}, expected {q.dtype}")
        if out.device != q.device:
            raise broken(f"returned a tensor on {out.device}, expected {q.device}")
        for name, argument in zip("qkv", arguments, strict=True):
            if out.numel() and 0 != _address(out) == _address(argument):
                raise broken(f"returned a view of its input {name}")
        return out


def _address(x: Tensor) -> int:
    """Return the address of a tensor's storage; 0 where its device reports none."""
    try:
        return x.untyped_storage().data_ptr()
    except RuntimeError:
        return 0
