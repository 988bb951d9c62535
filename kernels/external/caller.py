"""One call of a kernel that someone else wrote: its arguments, and what is read from its results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tiebreak.kernels.external.conventions import ALWAYS, Convention
from tiebreak.kernels.external.dummies import Needs
from tiebreak.kernels.external.errors import ContractError
from tiebreak.kernels.external.isolation import kept_state
from tiebreak.kernels.external.options import AUTOGRAD, NO_BACKWARD
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionInputs, AttentionOutput, Gradients
from tiebreak.kernels.kernel import CannotRunError
from tiebreak.kernels.reference import reference

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_FULL = "bhnd"
_LAYOUTS = ("bhnd", "bnhd")  # that most people's kernels have
_NO_DRIVER = "0 active drivers"  # Triton's message on a machine without a GPU


@dataclass(frozen=True)
class Caller:
    """A function, and how it is called."""

    function: Callable[..., Any]
    convention: Convention

    @cached_property
    def needs(self) -> Needs:
        """What the function needs of a call's shape."""
        convention, options = self.convention, self.convention.options
        always = convention.causal == ALWAYS
        return Needs(
            options.square or always,
            options.multiple_of,
            causal=always,
            has_causal=convention.causal is not None,
            # With a mask of scores to say it by, the flag need not.
            causal_where_square=convention.causal_where_square and convention.mask is None,
            has_padding=convention.mask is not None,
        )

    def missing_requirement(self, inputs: AttentionInputs) -> str | None:
        """None, or why the function can't take some inputs though it takes their every feature, in one line."""
        dims, d = self.convention.options.head_dims, inputs.q.shape[3]
        if dims and d not in dims:
            return f"it has head dimensions {', '.join(map(str, dims))}, not {d}"
        try:
            self.needs.arrange(inputs)
        except ValueError as error:
            return str(error)
        return None

    def keywords(self, inputs: AttentionInputs) -> dict[str, Any]:
        """The keyword arguments of a call that needs no dummies."""
        return _Call(self, inputs).keywords(slice(None))

    def returns_several(self, inputs: AttentionInputs) -> bool:
        """Whether it returns more than O; by calling it."""
        with torch.no_grad():
            return isinstance(_Call(self, inputs).returned(), (tuple, list))

    def run(self, inputs: AttentionInputs, *, gradients: bool) -> AttentionOutput:
        """Call it.

        Args:
            inputs: q, k, v, dO and masks, on the device; they are copied.
            gradients: whether its backward pass is wanted too.

        Returns:
            O in fp32 and, if wanted and if it has a backward pass, the gradients.

        Raises:
            ContractError: the function broke its contract.
            CannotRunError: the function raised NotImplementedError, or needs a GPU.
            Exception: whatever else the function raises.
        """
        arranged = self.needs.arrange(inputs)
        call, wanted = _Call(self, arranged.inputs), gradients and arranged.keys is not None
        # Outside: that the kernel changes the grad mode is to be seen.
        with torch.set_grad_enabled(wanted and self.convention.options.backward == AUTOGRAD), kept_state() as changed:
            try:
                o, returned_gradients, failure = self._call(call, gradients=wanted)
            except NotImplementedError as error:
                reason = " ".join(str(error).split()) or "no reason given"
                raise CannotRunError(f"NotImplementedError: {reason}") from error
            except RuntimeError as error:
                if _NO_DRIVER in str(error):
                    reason = "it launches a Triton kernel, which --backend interpreter runs here"
                    raise CannotRunError(reason) from error
                raise
            except SystemExit as error:
                raise ContractError(f"called sys.exit({error.code!r})") from error
        if changed:
            raise ContractError(f"changed {', '.join(changed)}")
        if returned_gradients is None or arranged.keys is None:
            return AttentionOutput(arranged.rows(o), backward_error=failure)
        dq, dk, dv = returned_gradients
        return AttentionOutput(
            arranged.rows(o), gradients=Gradients(arranged.rows(dq), arranged.keys(dk), arranged.keys(dv))
        )

    def _call(self, call: "_Call", *, gradients: bool) -> "_Returned":
        """Call it; what it raises has a note if another layout would do."""
        try:
            return call.run(gradients=gradients)
        except (CannotRunError, NotImplementedError):
            raise
        except Exception as error:
            for layout in _LAYOUTS:
                if layout != self.convention.options.layout and self._attends_in(layout, call.inputs):
                    error.add_note(f"in the layout {layout} it computes attention: --declare layout={layout}")
            raise

    def _attends_in(self, layout: str, inputs: AttentionInputs) -> bool:
        """Whether it computes attention if dimensions are in this order."""
        # Of V with independent elements a mean over other rows, as the wrong dimension gives, has nothing in common
        # with the right one: the squares of their difference are twice as large, and of a format's errors far smaller.
        noise = torch.randn(inputs.v.shape, generator=torch.Generator().manual_seed(0))
        inputs = replace(inputs, v=noise.to(inputs.v))
        options = replace(self.convention.options, layout=layout, backward=NO_BACKWARD)
        try:
            o, _, _ = _Call(replace(self, convention=replace(self.convention, options=options)), inputs).run(
                gradients=False
            )
            expected = reference(inputs).o
            error = o.to(expected) - expected
        except Exception:  # it fails so too
            return False
        return bool(error.square().sum() < expected.square().sum() / 4)


class _NoGradientsError(Exception):
    """What a backward pass has returned is no dQ, dK and dV of its inputs; the message goes on after `it`."""


_Returned = tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None, str | None]


@dataclass(frozen=True)
class _Call:
    """One call in the kernel's own layout."""

    caller: Caller
    inputs: AttentionInputs

    @property
    def _dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.inputs.formats.inputs]

    def run(self, *, gradients: bool) -> _Returned:
        """O and the gradients, all (batch, heads, N, d) in fp32, and what was wrong with the backward pass."""
        inputs, backward = self.inputs, self.caller.convention.options.backward
        # Copies, in fp32 too: a kernel that writes into its inputs must not spoil those of the other cells.
        leaves = tuple(self._laid(tensor.to(self._dtype, copy=True)) for tensor in (inputs.q, inputs.k, inputs.v))
        copies = tuple(tensor.clone() for tensor in leaves)
        differentiable = gradients and backward == AUTOGRAD
        # Not the leaves themselves: of a kernel that writes into its inputs the message says so, and is not autograd's.
        arguments = tuple(tensor.requires_grad_().clone() for tensor in leaves) if differentiable else leaves
        o = self._forward(arguments)
        _check_inputs(arguments, copies)
        computed, failure = None, None
        try:
            if differentiable and o.requires_grad:
                computed = self._by_autograd(o, leaves)
            elif gradients and callable(backward):
                computed = self._by_function(backward, o, arguments)
            if computed is not None:
                _check_gradients(computed, arguments)
        except NotImplementedError:
            raise
        except CannotRunError:
            pass  # nothing is known of its gradients, and its O stands
        except Exception as error:  # its O is its own: what is wrong with the backward pass is the gradients' matter
            kind = "" if isinstance(error, _NoGradientsError) else f"raised {type(error).__name__}: "
            computed, failure = None, " ".join(f"{kind}{error}".split())
        if gradients:
            _check_inputs(arguments, copies)
        back = None if computed is None else tuple(self._unlaid(gradient.detach()).float() for gradient in computed)
        return self._unlaid(o.detach()).float(), back, failure  # type: ignore[return-value]

    @property
    def _letters(self) -> str:
        """The kernel's order of dimensions, those that it leaves out in front."""
        layout = self.caller.convention.options.layout
        return "".join(letter for letter in _FULL if letter not in layout) + layout

    def _laid(self, x: Tensor) -> Tensor:
        """(batch, heads, N, d) in the kernel's order of dimensions, contiguous."""
        return x.permute([_FULL.index(letter) for letter in self._letters]).contiguous()

    def _unlaid(self, x: Tensor) -> Tensor:
        return x.permute([self._letters.index(letter) for letter in _FULL])

    def _forward(self, arguments: Sequence[Tensor]) -> Tensor:
        """O in the kernel's layout, one call for every index of the dimensions that it leaves out."""
        outer = 4 - len(self.caller.convention.options.layout)
        if outer == 0:
            return self._output(arguments, slice(None))
        q, k, v = arguments
        batches = []
        for batch in range(q.shape[0]):
            if outer == 1:
                batches.append(self._output((q[batch], k[batch], v[batch]), slice(batch, batch + 1)))
                continue
            heads = [
                self._output(
                    (q[batch, head], *(tensor[batch, head // self.inputs.groups] for tensor in (k, v))),
                    slice(batch, batch + 1),
                )
                for head in range(q.shape[1])
            ]
            batches.append(torch.stack(heads))
        return torch.stack(batches)

    def _output(self, arguments: Sequence[Tensor], batch: slice) -> Tensor:
        return _checked_output(self._returned(arguments, batch), arguments)

    def returned(self) -> Any:
        """All that one call returns, of a kernel that takes all dimensions."""
        inputs = self.inputs
        arguments = [self._laid(tensor.to(self._dtype)) for tensor in (inputs.q, inputs.k, inputs.v)]
        return self._returned(arguments, slice(None))

    def _returned(self, arguments: Sequence[Tensor], batch: slice) -> Any:
        after, keywords = self.caller.convention.arguments(self.keywords(batch))
        return self.caller.function(*arguments, *after, **keywords)

    def keywords(self, batch: slice) -> dict[str, Any]:
        """Causal flag, scale, mask and whether heads are grouped, as the kernel calls them."""
        convention, inputs = self.caller.convention, self.inputs
        keywords: dict[str, Any] = {}
        if convention.scale is not None:
            keywords[convention.scale] = inputs.scale
        if convention.grouped is not None:
            keywords[convention.grouped] = inputs.groups > 1
        square = inputs.q.shape[2] == inputs.k.shape[2]
        fits = square or not convention.causal_where_square
        flagged = convention.causal is not None and inputs.key_padding is None and fits
        if convention.causal not in (None, ALWAYS):
            keywords[str(convention.causal)] = inputs.causal and flagged
        if convention.mask is not None:
            keywords[convention.mask] = None  # it may have no default
        hidden = inputs.hidden()
        if hidden is not None and convention.mask is not None and not flagged:
            visible = ~hidden.to(inputs.q.device)[batch if hidden.shape[0] > 1 else slice(None)]
            keywords[convention.mask] = visible.expand(-1, -1, inputs.q.shape[2], -1)
        return keywords

    def _by_autograd(self, o: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        do = self._laid(self.inputs.do.to(self._dtype))
        gradients = torch.autograd.grad(o, leaves, do, allow_unused=True)
        missing = [name for name, gradient in zip("qkv", gradients, strict=True) if gradient is None]
        if missing:
            raise _NoGradientsError(f"has no gradient of {' and '.join(missing)}")
        return gradients

    def _by_function(self, backward: Callable[..., Any], o: Tensor, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
        do = self._laid(self.inputs.do.to(self._dtype))
        after, keywords = self.caller.convention.arguments(self.keywords(slice(None)))
        gradients = backward(do, *arguments, o, *after, **keywords)
        if not isinstance(gradients, (tuple, list)) or len(gradients) < 3:
            raise _NoGradientsError("returned no (dQ, dK, dV)")
        return tuple(gradients[:3])


def _checked_output(returned: object, arguments: Sequence[Tensor]) -> Tensor:
    """O of what was returned: it, or the first of several, such as (O, log-sum-exp).

    Raises:
        ContractError: no tensor, or not as O has to be.
    """
    q = arguments[0]
    out = returned[0] if isinstance(returned, (tuple, list)) and returned else returned
    if not isinstance(out, Tensor):
        raise ContractError(f"returned {type(returned).__name__}, not a tensor")
    if out.shape != q.shape:
        raise ContractError(f"returned shape {tuple(out.shape)}, expected {tuple(q.shape)}")
    if out.dtype != q.dtype:
        raise ContractError(f"returned {out.dtype}, expected {q.dtype}")
    if out.device != q.device:
        raise ContractError(f"returned a tensor on {out.device}, expected {q.device}")
    for name, argument in zip("qkv", arguments, strict=True):
        if out.numel() and out.untyped_storage().data_ptr() == argument.untyped_storage().data_ptr():
            raise ContractError(f"returned a view of its input {name}")
    return out


def _check_inputs(arguments: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    for name, now, before in zip("qkv", arguments, copies, strict=True):
        # Bits, so that NaN inputs compare equal to themselves.
        bits = _BITS[now.element_size()]
        if not bool((now.detach().view(bits) == before.view(bits)).all()):
            raise ContractError(f"changed its input {name}")


def _check_gradients(gradients: Sequence[Tensor], arguments: Sequence[Tensor]) -> None:
    for name, gradient, leaf in zip("qkv", gradients, arguments, strict=True):
        if not isinstance(gradient, Tensor) or gradient.shape != leaf.shape:
            received = tuple(gradient.shape) if isinstance(gradient, Tensor) else type(gradient).__name__
            raise _NoGradientsError(f"returned {received} for d{name.upper()}, expected {tuple(leaf.shape)}")
