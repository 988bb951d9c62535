"""How a kernel that someone else wrote is called: arranged as it needs it, in a process that stays as it was."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.external.call import Call, Made, Placed, broken
from tiebreak.kernels.external.clock import CLOCK
from tiebreak.kernels.external.conventions import Convention
from tiebreak.kernels.external.dummies import Arranged, arrange
from tiebreak.kernels.external.isolation import kept_state
from tiebreak.kernels.external.options import AUTOGRAD, KernelOptions
from tiebreak.kernels.features import OBLONG_CAUSAL
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput, Gradients
from tiebreak.kernels.kernel import CannotRunError, Whose

_USUAL_D, _USUAL_KEYS = 64, 64  # the head dimension, and what the number of keys is a multiple of, in most cases
_NO_DRIVER = "0 active drivers"  # Triton's message on a machine without a GPU
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_LAYOUT = "q, k and v were (batch, heads, N, d): another order is declared, such as --declare layout=bnhd"


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

    def missing_requirement(self, inputs: AttentionInputs) -> str | None:
        """None, or why the function can't take some inputs though it takes their every feature, in one line."""
        dims, d = self.convention.options.head_dims, inputs.q.shape[3]
        if dims and d not in dims:
            return f"it has head dimensions {', '.join(map(str, dims))}, not {d}"
        causal = inputs.causal or inputs.window[1] == 0
        if inputs.window != (None, None) and "sliding_window" in self.convention.values and not causal:
            return "its sliding_window is that of a causal mask"
        try:
            self.arranged(inputs)
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

    def arranged(self, inputs: AttentionInputs) -> Arranged:
        """The call that is made of some inputs, with the dummies that the function needs.

        Raises:
            ValueError: there is no such call; one line.
        """
        return arrange(inputs, self.convention)

    def call(self, inputs: AttentionInputs) -> Call:
        """A call that needs no dummies, to be made step by step."""
        return Call(self.function, self.convention, inputs)

    def compute(self, inputs: AttentionInputs, arithmetic: Arithmetic, gradients: bool) -> AttentionOutput:
        """Call it: `Compute` of a kernel.

        Args:
            inputs: q, k, v, dO and masks, on the device; they are copied.
            arithmetic: not used: the function brings its own.
            gradients: whether its backward pass is wanted too.

        Returns:
            O in fp32 and, if wanted and if it has a backward pass, the gradients.

        Raises:
            CannotRunError: the function broke its contract, raised NotImplementedError, or needs a GPU.
            Exception: whatever else the function raises.
        """
        del arithmetic
        run = self.started(inputs, gradients=gradients)
        return run.finished() if gradients else AttentionOutput(run.o)

    def started(self, inputs: AttentionInputs, *, gradients: bool) -> "StartedRun":
        """Its forward pass, after which its backward pass may follow whenever it will; it raises what `compute` does.

        Args:
            inputs: as of `compute`.
            gradients: whether a backward pass will.
        """
        arranged = self.arranged(inputs)
        call = self.call(arranged.inputs)
        with self.calling(gradients=gradients) as changed:
            placed = call.placed(gradients=gradients)
            copies = [tensor.detach().clone() for tensor in placed.arguments]
            started = StartedRun(self, inputs, arranged, call, placed, copies, self._forward(call, placed))
            started.check_inputs()
        _refuse(changed)
        return started

    def _forward(self, call: Call, placed: Placed) -> Tensor:
        """O; what an undeclared layout may be to blame for has a note of it."""
        try:
            return call.forward(placed)
        except (CannotRunError, NotImplementedError):
            raise
        except Exception as error:
            if self.convention.options.layout == KernelOptions.layout and call.inputs.q.shape != call.inputs.k.shape:
                error.add_note(_LAYOUT)
            raise

    @contextmanager
    def calling(self, *, gradients: bool) -> Iterator[list[str]]:
        """What its calls are made within: it may raise anything, and the process is put back as it was.

        Args:
            gradients: whether autograd is to follow.

        Yields:
            A list that holds, once all is done, the names of what the calls had changed.

        Raises:
            CannotRunError: it called sys.exit, raised NotImplementedError, or needs a GPU.
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
                raise broken(f"called sys.exit({error.code!r})") from error


@dataclass(frozen=True)
class StartedRun:
    """A call whose forward pass has been made, and what its backward pass needs."""

    caller: Caller
    inputs: AttentionInputs
    arranged: Arranged  # what the kernel was given in their place
    call: Call
    placed: Placed  # its arguments
    copies: Sequence[Tensor]  # of q, k and v, as they were
    returned: Tensor  # O in the kernel's layout

    @property
    def o(self) -> Tensor:
        """O, (batch, heads, N, d) in fp32."""
        return self.call.restored(self.returned)[:, :, self.arranged.rows]

    def finished(self, do: Tensor | None = None) -> AttentionOutput:
        """O and, if it has a backward pass, the gradients; it raises what `Caller.compute` does.

        Args:
            do: another dO than that of the inputs.
        """
        placed = self.placed
        if do is not None:
            arranged = self.caller.arranged(replace(self.inputs, do=do))
            placed = replace(placed, do=self.call.laid(arranged.inputs.do))
        with self.caller.calling(gradients=True) as changed:
            made, failure = self._backward(placed)
            self.check_inputs()
        _refuse(changed)
        if made is None:
            return AttentionOutput(self.o, backward_error=failure)
        (dq, dk, dv), dsink = map(self.call.restored, made[:3]), (x.detach().float() for x in made[3:])
        rows, keys = self.arranged.rows, self.arranged.keys
        gradients = Gradients(dq[:, :, rows], dk[:, :, keys], dv[:, :, keys], None, *dsink)
        return AttentionOutput(self.o, gradients=gradients)

    def _backward(self, placed: Placed) -> tuple[Made | None, str | None]:
        """Gradients as the kernel returns them, None where there are none; what was wrong, if anything was."""
        try:
            return self.call.backward(placed, self.returned), None
        except NotImplementedError:
            raise
        except CannotRunError as error:  # of another call nothing is known of its gradients, and its O stands
            return None, str(error) if error.whose is Whose.KERNEL else None
        except Exception as error:  # its O is its own: what is wrong with the backward pass is the gradients' matter
            return None, " ".join(f"raised {type(error).__name__}: {error}".split())

    def check_inputs(self) -> None:
        """Raise CannotRunError where the kernel has written into its arguments."""
        for name, now, before in zip("qkv", self.placed.arguments, self.copies, strict=True):
            # Bits, so that NaN inputs compare equal to themselves.
            bits = _BITS[now.element_size()]
            if not bool((now.detach().view(bits) == before.view(bits)).all()):
                raise broken(f"changed its input {name}")


def _refuse(changed: list[str]) -> None:
    if changed:
        raise broken(f"changed {', '.join(changed)}")
