"""One call of a kernel that someone else wrote, step by step: where its arguments lie, its O, its gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from tiebreak.kernels.external.conventions import ALWAYS, Convention
from tiebreak.kernels.external.errors import ContractError, ShapeError
from tiebreak.kernels.external.options import AUTOGRAD
from tiebreak.kernels.features import ALWAYS_GIVEN, CAUSAL, Feature
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionInputs
from tiebreak.kernels.kernel import CannotRunError

FULL = "bhnd"  # a layout without a dimension left out
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}

Triple = tuple[Tensor, Tensor, Tensor]
Made = tuple[Tensor, ...]  # dQ, dK and dV and, where autograd gives it, dSink
#: Gives the same numbers in a place of its own: other strides, or a storage that goes on behind them.
Placing = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Places:
    """Where the arguments of a call lie."""

    q: Placing | None = None  # None: contiguous
    k: Placing | None = None
    v: Placing | None = None
    do: Placing | None = None

    @classmethod
    def all(cls, placing: Placing) -> "Places":
        """All alike."""
        return cls(placing, placing, placing, placing)


CONTIGUOUS = Places()


class NoGradientsError(Exception):
    """What a backward pass has returned is no dQ, dK and dV of its inputs; the message goes on after `it`."""


@dataclass(frozen=True)
class Placed:
    """What a call is given, in the kernel's layout and format, where it lies in memory."""

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

    def started(self, *, gradients: bool) -> "Started":
        """Its forward pass; with `gradients` its backward pass may follow."""
        placed = self.placed(gradients=gradients)
        copies = [tensor.detach().clone() for tensor in placed.arguments]
        started = Started(self, placed, copies, self.forward(placed))
        started.check_inputs()
        return started

    def placed(self, places: Places = CONTIGUOUS, *, gradients: bool) -> Placed:
        """Copies of the inputs: a kernel that writes into its own must not spoil those of the other cells.

        Args:
            places: where they lie.
            gradients: whether its backward pass is to follow.
        """
        q, k, v, do = (
            place(self._held(name))
            for name, place in ((each.name, getattr(places, each.name) or _as_it_is) for each in fields(places))
        )
        leaves, sink = (q, k, v), None
        arguments = leaves
        if gradients and self._trains and self.convention.options.backward == AUTOGRAD:
            sink = None if self.inputs.sink is None else self.inputs.sink.to(self._dtype, copy=True).requires_grad_()
            leaves = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
            # Not the leaves themselves: of a kernel that writes into its inputs the message says so, and is not
            # autograd's. A copy would lie elsewhere, though.
            arguments = (q.clone(), k.clone(), v.clone()) if places is CONTIGUOUS else leaves
        return Placed(leaves, arguments, do, sink)

    @property
    def _trains(self) -> bool:
        """Whether K and V are what gradients can be of: neither paged nor in 8 bits."""
        return all(feature.trains for feature in self.inputs.asks())

    def _held(self, name: str) -> Tensor:
        """q, K, V or dO as the kernel gets it: K and V in a pool of pages, or in 8 bits, where the inputs say so."""
        if name in ("k", "v"):
            return self.laid(*self.inputs.held(name))
        return self.laid(getattr(self.inputs, name))

    @property
    def _letters(self) -> str:
        """The kernel's order of dimensions, those that it leaves out in front."""
        layout = self.convention.options.layout
        return "".join(letter for letter in FULL if letter not in layout) + layout

    def laid(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A copy of (batch, heads, N, d) in the kernel's order of dimensions and its format, contiguous."""
        x = x.to(dtype or self._dtype, copy=True)
        return x.permute([FULL.index(letter) for letter in self._letters]).contiguous()

    def restored(self, x: Tensor) -> Tensor:
        """From the kernel's order of dimensions to (batch, heads, N, d), in fp32."""
        return x.detach().permute([self._letters.index(letter) for letter in FULL]).float()

    def forward(self, placed: Placed) -> Tensor:
        """O in the kernel's layout, one call for every index of the dimensions that it leaves out.

        Raises:
            ContractError: no tensor, or not as O has to be.
            Exception: whatever the kernel raises.
        """
        outer = len(FULL) - len(self.convention.options.layout)
        q, k, v = placed.arguments
        inputs = self.inputs if placed.sink is None else replace(self.inputs, sink=placed.sink)
        if outer == 0:
            return self._output((q, k, v), inputs)
        batches = []
        for batch in range(q.shape[0]):
            own_k, own_v = (x if inputs.block_table is not None else x[batch] for x in (k, v))  # a pool is for all
            if outer == 1:
                batches.append(self._output((q[batch], own_k, own_v), inputs.part(_at(batch))))
                continue
            heads = []
            for head in range(q.shape[1]):
                shared = head // inputs.groups
                part = inputs.part(_at(batch), heads=_at(head), key_heads=_at(shared))
                of_head = (x.select(1 if inputs.block_table is not None else 0, shared) for x in (own_k, own_v))
                heads.append(self._output((q[batch, head], *of_head), part))
            batches.append(torch.stack(heads))
        return torch.stack(batches)

    def _output(self, arguments: Sequence[Tensor], part: AttentionInputs) -> Tensor:
        return _checked_output(self._returned(arguments, part), arguments, self._shape_of_o(arguments[0], part))

    def _shape_of_o(self, q: Tensor, part: AttentionInputs) -> tuple[int, ...]:
        """That of an argument q, with the head dimension of V."""
        d = self.convention.options.layout.index("d")
        return (*q.shape[:d], part.v.shape[3], *q.shape[d + 1 :])

    def returned(self, placed: Placed) -> Any:
        """All that one call returns, of a kernel that takes all dimensions."""
        return self._returned(placed.arguments, self.inputs)

    def _returned(self, arguments: Sequence[Tensor], part: AttentionInputs) -> Any:
        keywords, out = self.keywords(part), self.convention.out
        if out is None:
            after, keywords = self.convention.arguments(keywords)
            return self.function(*arguments, *after, **keywords)
        # NaN: an element that the kernel does not write shows.
        written = arguments[0].new_full(self._shape_of_o(arguments[0], part), torch.nan)
        after, keywords = self.convention.arguments(keywords | {out: written})
        returned = self.function(*arguments, *after, **keywords)
        return (written, *returned[1:]) if isinstance(returned, (tuple, list)) else written

    def keywords(self, inputs: AttentionInputs) -> dict[str, Any]:
        """Causal flag, mask, scale and what else goes by a value, as the kernel calls them.

        Args:
            inputs: those of the call, or a part of them.
        """
        convention = self.convention
        given = {*ALWAYS_GIVEN, *inputs.asks()}
        keywords: dict[str, Any] = {
            keyword: self._given(feature, inputs.value_of(feature, common))
            for keyword, (feature, common) in convention.values.items()
            if feature in given or keyword in convention.required
        }
        square = inputs.q.shape[2] == inputs.k.shape[2]
        fits = square or not convention.causal_where_square
        by_value = {feature for feature, _ in convention.values.values()}
        masks = {feature: mask for feature, mask in inputs.masks().items() if feature not in by_value}
        flagged = convention.causal is not None and masks.keys() <= {CAUSAL} and fits
        if convention.causal not in (None, ALWAYS):
            keywords[str(convention.causal)] = inputs.causal and flagged
        if convention.mask is not None:
            keywords[convention.mask] = None  # it may have no default
        if masks and convention.mask is not None and not flagged:
            visible = ~reduce(or_, masks.values()).to(inputs.q.device)
            keywords[convention.mask] = visible.expand(-1, -1, inputs.q.shape[2], -1)
        return keywords

    def _given(self, feature: Feature, value: object) -> object:
        """A value of a feature as kernels get it: numbers of a tensor in the format of q, unless they are fp32."""
        if feature.in_fp32 or not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return value.to(self._dtype)

    def backward(self, placed: Placed, o: Tensor) -> Made | None:
        """dQ, dK and dV in the kernel's layout; None where it has no backward pass, or K and V take no gradient.

        Raises:
            NoGradientsError: it has returned something else.
            Exception: whatever it raises.
        """
        backward = self.convention.options.backward
        if backward == AUTOGRAD and o.requires_grad:
            gradients = self._by_autograd(placed, o)
        elif callable(backward) and self._trains:
            gradients = self._by_function(backward, placed, o)
        else:
            return None
        _check_gradients(gradients[:3], placed.arguments)
        return gradients

    def _by_autograd(self, placed: Placed, o: Tensor) -> Made:
        leaves = placed.leaves if placed.sink is None else (*placed.leaves, placed.sink)
        gradients = torch.autograd.grad(o, leaves, placed.do, allow_unused=True)
        names = ("q", "k", "v", "the sink")
        missing = [name for name, gradient in zip(names, gradients, strict=False) if gradient is None]
        if missing:
            raise NoGradientsError(f"has no gradient of {' and '.join(missing)}")
        return gradients

    def _by_function(self, backward: Callable[..., Any], placed: Placed, o: Tensor) -> Made:
        after, keywords = self.convention.arguments(self.keywords(self.inputs))
        gradients = backward(placed.do, *placed.arguments, o, *after, **keywords)
        if not isinstance(gradients, (tuple, list)) or len(gradients) < 3:
            raise NoGradientsError("returned no (dQ, dK, dV)")
        return tuple(gradients[: 3 if self.inputs.sink is None else 4])


@dataclass(frozen=True)
class Started:
    """A forward pass that has been made, and what its backward pass needs."""

    call: Call
    placed: Placed  # its arguments
    copies: Sequence[Tensor]  # of q, k and v, as they were
    returned: Tensor  # O in the kernel's layout

    @property
    def o(self) -> Tensor:
        """O, (batch, heads, N, d) in fp32."""
        return self.call.restored(self.returned)

    def gradients(self, do: Tensor | None = None) -> tuple[Made | None, str | None]:
        """dQ, dK and dV, all (batch, heads, N, d) in fp32, None where there are none; what was wrong, if anything was.

        Behind them dSink, (heads,), where it gives that.

        Args:
            do: another dO than the inputs', (batch, heads, N, d).
        """
        placed, computed, failure = self.placed, None, None
        if do is not None:
            placed = replace(placed, do=self.call.laid(do))
        try:
            computed = self.call.backward(placed, self.returned)
        except NotImplementedError:
            raise
        except CannotRunError:
            pass  # nothing is known of its gradients, and its O stands
        except Exception as error:  # its O is its own: what is wrong with the backward pass is the gradients' matter
            kind = "" if isinstance(error, NoGradientsError) else f"raised {type(error).__name__}: "
            failure = " ".join(f"{kind}{error}".split())
        self.check_inputs()
        if computed is None:
            return None, failure
        return (*map(self.call.restored, computed[:3]), *(x.detach().float() for x in computed[3:])), failure

    def check_inputs(self) -> None:
        """Raise ContractError where the kernel has written into its arguments."""
        for name, now, before in zip("qkv", self.placed.arguments, self.copies, strict=True):
            # Bits, so that NaN inputs compare equal to themselves.
            bits = _BITS[now.element_size()]
            if not bool((now.detach().view(bits) == before.view(bits)).all()):
                raise ContractError(f"changed its input {name}")


def _at(index: int) -> slice:
    return slice(index, index + 1)


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _checked_output(returned: object, arguments: Sequence[Tensor], expected: tuple[int, ...]) -> Tensor:
    """O of what was returned: it, or the first of several, such as (O, log-sum-exp).

    Args:
        returned: by the kernel.
        arguments: q, k and v.
        expected: shape of O.

    Raises:
        ContractError: no tensor, or not as O has to be.
    """
    q = arguments[0]
    out = returned[0] if isinstance(returned, (tuple, list)) and returned else returned
    if not isinstance(out, Tensor):
        raise ContractError(f"returned {type(returned).__name__}, not a tensor")
    if out.shape != expected:
        raise ShapeError(f"returned shape {tuple(out.shape)}, expected {expected}")
    if out.dtype != q.dtype:
        raise ContractError(f"returned {out.dtype}, expected {q.dtype}")
    if out.device != q.device:
        raise ContractError(f"returned a tensor on {out.device}, expected {q.device}")
    for name, argument in zip("qkv", arguments, strict=True):
        if out.numel() and out.untyped_storage().data_ptr() == argument.untyped_storage().data_ptr():
            raise ContractError(f"returned a view of its input {name}")
    return out


def _check_gradients(gradients: Sequence[Tensor], arguments: Sequence[Tensor]) -> None:
    for name, gradient, leaf in zip("qkv", gradients, arguments, strict=True):
        if not isinstance(gradient, Tensor) or gradient.shape != leaf.shape:
            received = tuple(gradient.shape) if isinstance(gradient, Tensor) else type(gradient).__name__
            raise NoGradientsError(f"returned {received} for d{name.upper()}, expected {tuple(leaf.shape)}")
        if gradient.dtype != leaf.dtype:
            raise NoGradientsError(f"returned {gradient.dtype} for d{name.upper()}, expected {leaf.dtype}")
