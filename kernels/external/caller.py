"""How a kernel that someone else wrote is called: arranged as it needs it, in a process that stays as it was."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from tiebreak.kernels.external.call import Call, Started
from tiebreak.kernels.external.clock import CLOCK
from tiebreak.kernels.external.conventions import ALWAYS, Convention
from tiebreak.kernels.external.dummies import Arranged, Needs
from tiebreak.kernels.external.errors import ContractError
from tiebreak.kernels.external.isolation import kept_state
from tiebreak.kernels.external.options import AUTOGRAD, NO_BACKWARD
from tiebreak.kernels.features import OBLONG_CAUSAL
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput, Gradients
from tiebreak.kernels.kernel import CannotRunError
from tiebreak.kernels.reference import reference

_LAYOUTS = ("bhnd", "bnhd")  # that most people's kernels have
_USUAL_D, _USUAL_KEYS = 64, 64  # the head dimension, and what the number of keys is a multiple of, in most cases
_NO_DRIVER = "0 active drivers"  # Triton's message on a machine without a GPU


@dataclass(frozen=True)
class Caller:
    """A function, and how it is called."""

    function: Callable[..., Any]
    convention: Convention

    @property
    def code(self) -> CodeType | None:
        """Of the function: where it stands; None: it is not written in Python."""
        function = inspect.unwrap(self.function)
        code: CodeType | None = getattr(function, "__code__", None)
        return code or getattr(type(function).__call__, "__code__", None)

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
        causal = inputs.causal or inputs.window[1] == 0
        if inputs.window != (None, None) and "sliding_window" in self.convention.values and not causal:
            return "its sliding_window is that of a causal mask"
        try:
            self.needs.arrange(inputs)
        except ValueError as error:
            return str(error)
        return None

    def undeclared(self, inputs: AttentionInputs) -> str | None:
        """None, or what is unusual about some inputs, in words, that neither signature nor options speak of."""
        options, (_, _, queries, d), keys = self.convention.options, inputs.q.shape, inputs.k.shape[2]
        tried = self.convention.tried | ({OBLONG_CAUSAL} - options.features)  # a flag does not say how it is aligned
        unusual = [feature.words for feature in inputs.asks() if feature in tried]
        if d != _USUAL_D and not options.head_dims:
            unusual.append(f"d = {d}")
        if keys % _USUAL_KEYS and options.multiple_of == 1:
            unusual.append(f"{queries} queries and {keys} keys")
        return " and ".join(unusual) or None

    def call(self, inputs: AttentionInputs) -> Call:
        """A call that needs no dummies, to be made step by step."""
        return Call(self.function, self.convention, inputs)

    def returns_several(self, inputs: AttentionInputs) -> bool:
        """Whether it returns more than O; by calling it."""
        call = self.call(inputs)
        with torch.no_grad():
            return isinstance(call.returned(call.placed(gradients=False)), (tuple, list))

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
        run = self.started(inputs, gradients=gradients)
        return run.finished() if gradients else AttentionOutput(run.o)

    def started(self, inputs: AttentionInputs, *, gradients: bool) -> "StartedRun":
        """Its forward pass, after which its backward pass may follow whenever it will; it raises what `run` does.

        Args:
            inputs: as of `run`.
            gradients: whether a backward pass will.
        """
        arranged = self.needs.arrange(inputs)
        wanted = gradients and arranged.keys is not None
        with self.calling(gradients=wanted) as changed:
            started = self._started(self.call(arranged.inputs), gradients=wanted)
        _refuse(changed)
        return StartedRun(self, inputs, arranged, started)

    @contextmanager
    def calling(self, *, gradients: bool) -> Iterator[list[str]]:
        """What its calls are made within: it may raise anything, and the process is put back as it was.

        Args:
            gradients: whether autograd is to follow.

        Yields:
            A list that holds, once all is done, the names of what the calls had changed.

        Raises:
            ContractError: it called sys.exit.
            CannotRunError: it raised NotImplementedError, or needs a GPU.
        """
        # Outside: that the kernel changes the grad mode is to be seen.
        with (
            torch.set_grad_enabled(gradients and self.convention.options.backward == AUTOGRAD),
            kept_state() as changed,
            CLOCK.running(),
        ):
            try:
                yield changed
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

    def _started(self, call: Call, *, gradients: bool) -> Started:
        """Call it; what it raises has a note if another layout would do."""
        try:
            return call.started(gradients=gradients)
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
            o = Call(self.function, replace(self.convention, options=options), inputs).started(gradients=False).o
            expected = reference(inputs).o
            error = o.to(expected) - expected
        except Exception:  # it fails so too
            return False
        return bool(error.square().sum() < expected.square().sum() / 4)


@dataclass(frozen=True)
class StartedRun:
    """A call whose forward pass has been made."""

    caller: Caller
    inputs: AttentionInputs
    arranged: Arranged  # what the kernel was given in their place
    started: Started

    @property
    def o(self) -> Tensor:
        """O in fp32."""
        return self.arranged.rows(self.started.o)

    def finished(self, do: Tensor | None = None) -> AttentionOutput:
        """O and, if it has a backward pass, the gradients; it raises what `Caller.run` does.

        Args:
            do: another dO than that of the inputs.
        """
        if self.arranged.keys is None:
            return AttentionOutput(self.o)
        if do is not None:
            do = self.caller.needs.arrange(replace(self.inputs, do=do)).inputs.do
        with self.caller.calling(gradients=True) as changed:
            gradients, failure = self.started.gradients(do)
        _refuse(changed)
        if gradients is None:
            return AttentionOutput(self.o, backward_error=failure)
        dq, dk, dv, *dsink = gradients
        made = Gradients(self.arranged.rows(dq), self.arranged.keys(dk), self.arranged.keys(dv), None, *dsink)
        return AttentionOutput(self.o, gradients=made)


def _refuse(changed: list[str]) -> None:
    if changed:
        raise ContractError(f"changed {', '.join(changed)}")
