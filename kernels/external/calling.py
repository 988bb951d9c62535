"""One call of a kernel that someone else wrote: what it is given, and what is taken from what it returns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tiebreak.kernels.external.conventions import ALWAYS, Convention
from tiebreak.kernels.external.declaring import AUTOGRAD
from tiebreak.kernels.external.dummies import Needs
from tiebreak.kernels.external.errors import ContractError
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionInputs, AttentionOutput, Gradients
from tiebreak.kernels.isolation import kept_state
from tiebreak.kernels.kernel import CannotRunError

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_FULL = "bhnd"


_NO_DRIVER = "0 active drivers"  # what Triton says of a machine without a GPU


@dataclass(frozen=True)
class Caller:
    """A function, and how it is called."""

    function: Callable[..., Any]
    how: Convention

    @cached_property
    def needs(self) -> Needs:
        """What it needs of a call's shape."""
        how, said = self.how, self.how.said
        always = how.causal == ALWAYS
        return Needs(
            said.square or always,
            said.multiple_of,
            causal=always,
            has_causal=how.causal is not None,
            # With a mask of scores to say it by, the flag need not.
            causal_where_square=how.causal_where_square and how.mask is None,
            has_padding=how.mask is not None,
        )

    def missing_requirement(self, inputs: AttentionInputs) -> str | None:
        """None, or why it can't take some inputs whose every feature it takes, in one line."""
        dims, d = self.how.said.head_dims, inputs.q.shape[3]
        if dims and d not in dims:
            return f"it has head dimensions {', '.join(map(str, dims))}, not {d}"
        try:
            self.needs.arrange(inputs)
        except ValueError as error:
            return str(error)
        return None

    def keywords(self, inputs: AttentionInputs) -> dict[str, Any]:
        """What it is told beside q, k and v in a call that needs no dummies."""
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
            ContractError: it broke its contract.
            CannotRunError: it says that it has no such thing.
            Exception: whatever else it raises.
        """
        arranged = self.needs.arrange(inputs)
        call, wanted = _Call(self, arranged.inputs), gradients and arranged.keys is not None
        # Outside: that the kernel changes the grad mode is to be seen.
        with torch.set_grad_enabled(wanted and self.how.said.backward == AUTOGRAD), kept_state() as changed:
            try:
                o, found, raised = call.run(gradients=wanted)
            except NotImplementedError as error:
                told = " ".join(str(error).split()) or "no reason given"
                raise CannotRunError(f"NotImplementedError: {told}") from error
            except RuntimeError as error:
                if _NO_DRIVER in str(error):
                    told = "it launches a Triton kernel, which --backend interpreter runs here"
                    raise CannotRunError(told) from error
                raise
            except SystemExit as error:
                raise ContractError(f"called sys.exit({error.code!r})") from error
        if changed:
            raise ContractError(f"changed {', '.join(changed)}")
        if found is None or arranged.keys is None:
            return AttentionOutput(arranged.rows(o), backward_error=raised)
        dq, dk, dv = found
        return AttentionOutput(
            arranged.rows(o), gradients=Gradients(arranged.rows(dq), arranged.keys(dk), arranged.keys(dv))
        )


@dataclass(frozen=True)
class _Call:
    """One call in the kernel's own layout."""

    caller: Caller
    inputs: AttentionInputs

    @property
    def _dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.inputs.formats.inputs]

    def run(self, *, gradients: bool) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None, str | None]:
        """O and the gradients, all (batch, heads, N, d) in fp32, and what the backward pass raised."""
        inputs, backward = self.inputs, self.caller.how.said.backward
        # Copies, in fp32 too: a kernel that writes into its inputs must not spoil those of the other cells.
        leaves = tuple(self._laid(one.to(self._dtype, copy=True)) for one in (inputs.q, inputs.k, inputs.v))
        kept = tuple(one.clone() for one in leaves)
        differentiable = gradients and backward == AUTOGRAD
        # Not the leaves themselves: a kernel that writes into its inputs is to be told so, not what autograd thinks.
        given = tuple(one.requires_grad_().clone() for one in leaves) if differentiable else leaves
        o = self._forward(given)
        _hold_inputs(given, kept)
        found, raised = None, None
        try:
            if differentiable and o.requires_grad:
                found = self._by_autograd(o, leaves)
            elif gradients and callable(backward):
                found = self._by_function(backward, o, given)
        except (ContractError, NotImplementedError):
            raise
        except CannotRunError:
            pass  # nothing is known of its gradients, and its O stands
        except Exception as error:  # its O is its own: what is wrong with the backward pass is the gradients' matter
            raised = " ".join(f"{type(error).__name__}: {error}".split())
        if found is not None:
            _hold_inputs(given, kept)
            _hold_gradients(found, given)
        back = None if found is None else tuple(self._unlaid(one.detach()).float() for one in found)
        return self._unlaid(o.detach()).float(), back, raised  # type: ignore[return-value]

    def _laid(self, x: Tensor) -> Tensor:
        """(batch, heads, N, d) in the kernel's order of dimensions, contiguous; all it leaves out stay in front."""
        layout = self.caller.how.said.layout
        order = [_FULL.index(letter) for letter in (*(one for one in _FULL if one not in layout), *layout)]
        return x.permute(order).contiguous()

    def _unlaid(self, x: Tensor) -> Tensor:
        layout = self.caller.how.said.layout
        order = [*(one for one in _FULL if one not in layout), *layout]
        return x.permute([order.index(letter) for letter in _FULL])

    def _forward(self, given: Sequence[Tensor]) -> Tensor:
        """O in the kernel's layout, one call for every index of the dimensions that it leaves out."""
        outer = 4 - len(self.caller.how.said.layout)
        if outer == 0:
            return self._one(given, slice(None))
        q, k, v = given
        batches = []
        for batch in range(q.shape[0]):
            if outer == 1:
                batches.append(self._one((q[batch], k[batch], v[batch]), slice(batch, batch + 1)))
                continue
            heads = [
                self._one(
                    (q[batch, head], *(one[batch, head // self.inputs.groups] for one in (k, v))),
                    slice(batch, batch + 1),
                )
                for head in range(q.shape[1])
            ]
            batches.append(torch.stack(heads))
        return torch.stack(batches)

    def _one(self, given: Sequence[Tensor], batch: slice) -> Tensor:
        return _held(self._returned(given, batch), given)

    def returned(self) -> Any:
        """All that one call returns, of a kernel that takes all dimensions."""
        inputs = self.inputs
        return self._returned([self._laid(one.to(self._dtype)) for one in (inputs.q, inputs.k, inputs.v)], slice(None))

    def _returned(self, given: Sequence[Tensor], batch: slice) -> Any:
        after, keywords = self.caller.how.arguments(self.keywords(batch))
        return self.caller.function(*given, *after, **keywords)

    def keywords(self, batch: slice) -> dict[str, Any]:
        """Causal flag, scale, mask and whether heads are grouped, as the kernel calls them."""
        how, inputs = self.caller.how, self.inputs
        found: dict[str, Any] = {}
        if how.scale is not None:
            found[how.scale] = inputs.scale
        if how.grouped is not None:
            found[how.grouped] = inputs.groups > 1
        square = inputs.q.shape[2] == inputs.k.shape[2]
        flagged = how.causal is not None and inputs.key_padding is None and (square or not how.causal_where_square)
        if how.causal not in (None, ALWAYS):
            found[str(how.causal)] = inputs.causal and flagged
        if how.mask is not None:
            found[how.mask] = None  # it may have no default
        hidden = inputs.hidden()
        if hidden is not None and how.mask is not None and not flagged:
            seen = ~hidden.to(inputs.q.device)[batch if hidden.shape[0] > 1 else slice(None)]
            found[how.mask] = seen.expand(-1, -1, inputs.q.shape[2], -1)
        return found

    def _by_autograd(self, o: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        do = self._laid(self.inputs.do.to(self._dtype))
        found = torch.autograd.grad(o, leaves, do, allow_unused=True)
        missing = [name for name, one in zip("qkv", found, strict=True) if one is None]
        if missing:
            raise ContractError(f"its backward pass has no gradient of {' and '.join(missing)}")
        return found

    def _by_function(self, backward: Callable[..., Any], o: Tensor, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        do = self._laid(self.inputs.do.to(self._dtype))
        after, keywords = self.caller.how.arguments(self.keywords(slice(None)))
        found = backward(do, *given, o, *after, **keywords)
        if not isinstance(found, (tuple, list)) or len(found) < 3:
            raise ContractError("its backward function returned no (dQ, dK, dV)")
        return tuple(found[:3])


def _held(returned: object, given: Sequence[Tensor]) -> Tensor:
    """O of what was returned: it, or the first of several, such as (O, log-sum-exp).

    Raises:
        ContractError: no tensor, or not as O has to be.
    """
    q = given[0]
    out = returned[0] if isinstance(returned, (tuple, list)) and returned else returned
    if not isinstance(out, Tensor):
        raise ContractError(f"returned {type(returned).__name__}, not a tensor")
    if out.shape != q.shape:
        raise ContractError(f"returned shape {tuple(out.shape)}, expected {tuple(q.shape)}")
    if out.dtype != q.dtype:
        raise ContractError(f"returned {out.dtype}, expected {q.dtype}")
    if out.device != q.device:
        raise ContractError(f"returned a tensor on {out.device}, expected {q.device}")
    for name, one in zip("qkv", given, strict=True):
        if out.numel() and out.untyped_storage().data_ptr() == one.untyped_storage().data_ptr():
            raise ContractError(f"returned a view of its input {name}")
    return out


def _hold_inputs(given: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
    for name, now, before in zip("qkv", given, kept, strict=True):
        # Bits, so that NaN inputs compare equal to themselves.
        bits = _BITS[now.element_size()]
        if not bool((now.detach().view(bits) == before.view(bits)).all()):
            raise ContractError(f"changed its input {name}")


def _hold_gradients(found: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    for name, gradient, leaf in zip("qkv", found, given, strict=True):
        if not isinstance(gradient, Tensor) or gradient.shape != leaf.shape:
            told = tuple(gradient.shape) if isinstance(gradient, Tensor) else type(gradient).__name__
            raise ContractError(f"returned {told} for d{name.upper()}, expected {tuple(leaf.shape)}")
