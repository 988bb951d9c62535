"""How a kernel that someone else wrote is called: arranged as it needs it, in a process that stays as it was.

A row of attention knows nothing of other rows, and a key whose P is 0 adds an exact 0. So a kernel that needs more rows
gets dummies, and one that needs more keys gets them where its own mask hides them, or a causal one: behind the last key
that a row sees. One whose head dimensions are larger gets columns of zeros before those of the call, and q times a
power of two, so that its scale is that of the call. No bit of the others changes.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import pad

from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.external.call import Call, Placed, broken
from tiebreak.kernels.external.isolation import CLOCK, kept_state
from tiebreak.kernels.external.options import AUTOGRAD, NO_BACKWARD, Convention, KernelOptions
from tiebreak.kernels.features import ALIBI, CAPPED_BIAS, LENGTHS, OBLONG_CAUSAL, OWN_SCALE, PAGES, PLACED, WINDOW
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput, Gradients
from tiebreak.kernels.kernel import Blame, CannotRunError, in_one_line
from tiebreak.kernels.triton.loading import Tuning, is_interpreting

_USUAL_D, _USUAL_KEYS = 64, 64  # the head dimension, and what the number of keys is a multiple of, in most cases
_NO_DRIVER = "0 active drivers"  # Triton's message on a machine without a GPU
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_LAYOUT = "q, k and v were (batch, heads, N, d): another order is declared, such as --declare layout={}"
_OF_SHAPES = re.compile(r"\b(shape|size|dim(ension)?)s?\b|broadcast|unpack|must match|out of (bounds|range)", re.I)
_WRAP = "write a function around it that has every row last in a causal sequence (docs/your-kernel.md#wrappers)"


@dataclass(frozen=True)
class Arranged:
    """A call that a kernel can take instead of another."""

    inputs: AttentionInputs
    rows: slice  # of its queries, those of the other call
    keys: slice  # the same of its keys
    column: int = 0  # of q and k, at which the other call begins
    column_of_v: int = 0  # the same of V, dO and O
    factor: float = 1.0  # that q was multiplied by


@dataclass(frozen=True)
class Caller:
    """A function, and the convention by which it is called."""

    function: Callable[..., Any]
    convention: Convention

    @property
    def code(self) -> CodeType | None:
        """The place of the function's code; None: it is not written in Python."""
        function = inspect.unwrap(self.function)
        code: CodeType | None = getattr(function, "__code__", None)
        return code or getattr(type(function).__call__, "__code__", None)

    def missing_requirement(self, inputs: AttentionInputs) -> str | None:
        """Return None, or why the function can't take some inputs though it takes all their features, in one line."""
        causal = inputs.causal or inputs.window[1] == 0
        if inputs.window != (None, None) and "sliding_window" in self.convention.values and not causal:
            return "its sliding_window is that of a causal mask"
        values, needed = self.convention.values, self.convention.required
        table = next((word for word, feature in values.items() if feature is PAGES and word in needed), None)
        if table is not None and inputs.block_table is None:
            return f"it needs a {table}, which a call without pages does not have: --features pages asks those that do"
        uncapped = inputs.softcap and inputs.added is not None and not inputs.capped_bias
        if uncapped and CAPPED_BIAS in self.convention.takes:
            return "takes=capped_bias: it adds a bias before the soft cap"
        if inputs.key_padding is not None and (reason := self._not_by_lengths(inputs, inputs.key_padding)):
            return reason
        try:
            self.arranged(inputs)
        except ValueError as error:
            return str(error)
        return None

    def _not_by_lengths(self, inputs: AttentionInputs, seen: Tensor) -> str | None:
        """Return None, or why numbers of keys, which the function takes, can't express which of (batch, keys) count."""
        convention, paged = self.convention, inputs.block_table is not None
        word = convention.lengths(padded=True, paged=paged)
        if word is not None and (seen.int().diff() > 0).any():
            return f"its {word} counts the first keys, and others are seen"
        if word is None or convention.mask is not None:
            return None
        if (inputs.causal and not inputs.own_ends) or not {ALIBI, WINDOW}.isdisjoint(inputs.required_features()):
            return f"its {word} ends a sequence, and so moves a causal mask, a window or a distance"
        # With a table of pages it may count keys in pages only.
        of_pages = PAGES in convention.takes
        return f"its {word} counts keys in pages" if of_pages and not paged else None

    def undeclared(self, inputs: AttentionInputs) -> str | None:
        """Return None, or the unusual features of some inputs, in words, that neither signature nor options mention."""
        options, (_, _, queries, d), keys = self.convention.options, inputs.q.shape, inputs.k.shape[2]
        # A flag does not say how it is aligned.
        tried = self.convention.tried | ({OBLONG_CAUSAL} - options.features_in("takes"))
        unusual = [feature.words for feature in inputs.required_features() if feature in tried]
        if d != _USUAL_D and not options.head_dims:
            unusual.append(f"d = {d}")
        if keys % _USUAL_KEYS and options.multiple_of == 1:
            unusual.append(f"{queries} queries and {keys} keys")
        return " and ".join(unusual) or None

    def arranged(self, inputs: AttentionInputs) -> Arranged:
        """Return the call to make: these inputs, or larger ones with dummies if needed; ValueError: there is none."""
        wide, factor = self._widened(inputs)
        longer = self._lengthened(wide)
        added, of_v = (now.shape[3] - before.shape[3] for now, before in ((wide.q, inputs.q), (wide.v, inputs.v)))
        return replace(longer, column=added, column_of_v=of_v, factor=factor)

    def _widened(self, inputs: AttentionInputs) -> tuple[AttentionInputs, float]:
        """Return the inputs in a head dimension that the kernel has, and the factor of q; ValueError: it has none."""
        dims, d = self.convention.options.head_dims, inputs.q.shape[3]
        if not dims or d in dims:
            return inputs, 1.0
        wider = min((dim for dim in dims if dim > d), default=d)
        factor = math.sqrt(wider / d) if inputs.softmax_scale is None else 1.0
        if math.log2(factor) % 1:  # q times it would be rounded: the kernel has to be given the scale
            inputs, factor = replace(inputs, softmax_scale=inputs.scale), 1.0
        takes_scale = OWN_SCALE in self.convention.values.values()
        if wider == d or (inputs.softmax_scale is not None and not takes_scale):
            raise ValueError(f"it has head dimensions {', '.join(map(str, dims))}, not {d}")
        q, k, v, do = (
            (x, (wider - d if x.shape[3] == d else 0, 0)) for x in (inputs.q * factor, inputs.k, inputs.v, inputs.do)
        )
        return replace(inputs, q=pad(*q), k=pad(*k), v=pad(*v), do=pad(*do)), factor

    def _lengthened(self, inputs: AttentionInputs) -> Arranged:
        """Return the inputs with the rows and keys that the kernel needs."""
        (queries, keys), options = (inputs.q.shape[2], inputs.k.shape[2]), self.convention.options
        rows, columns = (-(-length // options.multiple_of) * options.multiple_of for length in (queries, keys))
        # With a mask of scores to say it by, a causal flag that is right in square calls alone need not.
        if options.square or (inputs.causal and self.convention.causal_where_square and self.convention.mask is None):
            rows = columns = max(rows, columns)
        if (rows, columns) == (queries, keys):
            return Arranged(inputs, slice(None), slice(None))
        if placed := [feature.words for feature in inputs.required_features() if feature in PLACED]:
            raise ValueError(f"with a {placed[0]} there is no place for dummy rows or keys")
        before = keys - queries if inputs.causal else 0  # rows that a causal mask has the others behind
        if before < 0:
            raise ValueError("a row without a visible key is no row of a square causal call")
        if inputs.causal:
            rows = columns
        if columns > keys and not (inputs.causal and inputs.key_padding is None):
            inputs = self._with_hidden_keys(inputs, columns - keys)
        q, do = (pad(x, (0, 0, before, rows - queries - before)) for x in (inputs.q, inputs.do))
        k, v = (pad(x, (0, 0, 0, columns - keys)) for x in (inputs.k, inputs.v))
        return Arranged(replace(inputs, q=q, k=k, v=v, do=do), slice(before, before + queries), slice(0, keys))

    def _with_hidden_keys(self, inputs: AttentionInputs, added: int) -> AttentionInputs:
        """Return the inputs with a mask that hides `added` keys after their own."""
        (batch, _, keys, _), step = inputs.k.shape, self.convention.options.multiple_of
        if self.convention.mask is None:
            square = f"it needs as many keys as queries, {keys} are not {inputs.q.shape[2]}"
            needed = f"{keys} keys are no multiple of {step}" if keys % step else square
            raise ValueError(f"{needed}, and it has no attn_mask to hide dummy keys: {_WRAP}")
        mask = inputs.key_padding
        if mask is None:
            mask = torch.ones(batch, keys, dtype=torch.bool, device=inputs.k.device)
        return replace(inputs, key_padding=pad(mask, (0, added)))

    def call(self, inputs: AttentionInputs) -> Call:
        """Return a call that needs no dummies, to be made step by step."""
        return Call(self.function, self.convention, inputs)

    def compute(self, inputs: AttentionInputs, arithmetic: Arithmetic, gradients: bool) -> AttentionOutput:
        """Call the function, as `Compute` of a kernel: O in fp32 and, if wanted and it has them, the gradients.

        CannotRunError: the function broke its contract, raised NotImplementedError, needs a GPU, has no config, or
        launched nothing where launches are run in an absent card's place. Whatever else it raises is raised.
        """
        del arithmetic  # it brings its own
        options, Tuning.taken, before = self.convention.options, False, Tuning.launches
        run = self.started(inputs, gradients=gradients)
        output = run.finished() if gradients else AttentionOutput(run.o)
        if before is not None and before == Tuning.launches:
            raise CannotRunError("it launched no kernel that this backend runs: what it returns is other code's")
        whole = gradients or options.backward == NO_BACKWARD  # else the kernel may be its backward pass's
        if options.config and not (Tuning.taken or (is_interpreting() and not whole)):
            raise CannotRunError(
                f"config={options.config}: no such kernel was launched; --backend interpreter and ptx take one"
            )
        return output

    def started(self, inputs: AttentionInputs, *, gradients: bool) -> "StartedRun":
        """Run the forward pass, as `compute` does; a backward pass may follow at any time, if `gradients`."""
        arranged = self.arranged(inputs)
        call = self.call(arranged.inputs)
        with self.enforcing_contract(gradients=gradients):
            placed = call.placed(gradients=gradients)
            copies = [tensor.detach().clone() for tensor in placed.arguments]
            try:
                returned = call.forward(placed)
            except Exception as error:
                usual = self.convention.options.layout == KernelOptions.layout and inputs.q.shape != inputs.k.shape
                usual = usual and self.convention.tried.isdisjoint(inputs.required_features())
                if usual and _OF_SHAPES.search(str(error)):
                    packed = not self.convention.required.isdisjoint(LENGTHS.keywords)
                    error.add_note(_LAYOUT.format("nhd" if packed else "bnhd"))
                raise
            started = StartedRun(self, inputs, arranged, call, placed, copies, returned)
            started.check_inputs()
        return started

    @contextmanager
    def calling(self, *, gradients: bool) -> Iterator[list[str]]:
        """Prepare the process for calls, with autograd if `gradients`, and restore it afterwards.

        It yields a list that at the end holds the names of the settings which the calls changed. Raises CannotRunError:
        the kernel called sys.exit, raised NotImplementedError, or needs a GPU.
        """
        # The grad mode first: that the kernel changes it is to be seen.
        with (
            torch.set_grad_enabled(gradients and self.convention.options.backward == AUTOGRAD),
            kept_state() as changed,
            CLOCK.running(),
            patch.object(Tuning, "chosen", self.convention.options.config),
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

    @contextmanager
    def enforcing_contract(self, *, gradients: bool) -> Iterator[None]:
        """Prepare the process as `calling` does, for calls that break the contract where they change the process."""
        changed: list[str] = []
        try:
            with self.calling(gradients=gradients) as changed:
                yield
        except Exception as error:
            if changed:
                raise broken(f"changed {', '.join(changed)}") from error
            raise
        if changed:
            raise broken(f"changed {', '.join(changed)}")


@dataclass(frozen=True)
class StartedRun:
    """A call whose forward pass has been run, and the inputs of its backward pass."""

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
        return self.call.restored(self.returned)[:, :, self.arranged.rows, self.arranged.column_of_v :]

    def finished(self, do: Tensor | None = None) -> AttentionOutput:
        """Return O and, if there is a backward pass, the gradients of this dO or the inputs'; raise like `compute`."""
        placed, made, failure, cause = self.placed, None, None, None
        if do is not None:
            placed = replace(placed, do=self.call.laid(self.caller.arranged(replace(self.inputs, do=do)).inputs.do))
        with self.caller.enforcing_contract(gradients=True):
            # An error of the backward pass concerns the gradients: O counts.
            try:
                made = self.call.backward(placed, self.returned)
            except NotImplementedError:
                raise
            except CannotRunError as error:  # of a call that is none for this kernel nothing is known
                failure = str(error) if error.blame is Blame.KERNEL else None
            except Exception as error:
                failure, cause = f"raised {in_one_line(error)}", error
            self.check_inputs()
        if made is None:
            return AttentionOutput(self.o, backward_error=failure, backward_raised=cause)
        (dq, dk, dv), dsink = map(self.call.restored, made[:3]), (x.detach().float() for x in made[3:])
        at = self.arranged
        dq, dk = at.factor * dq[:, :, at.rows, at.column :], dk[:, :, at.keys, at.column :]
        gradients = Gradients(dq, dk, dv[:, :, at.keys, at.column_of_v :], None, *dsink)
        return AttentionOutput(self.o, gradients=gradients)

    def check_inputs(self) -> None:
        """Raise CannotRunError where the kernel has written into its arguments."""
        for name, now, before in zip("qkv", self.placed.arguments, self.copies, strict=True):
            # Bits, so that NaN inputs compare equal to themselves.
            bits = _BITS[now.element_size()]
            if not bool((now.detach().view(bits) == before.view(bits)).all()):
                raise broken(f"changed its input {name}")
