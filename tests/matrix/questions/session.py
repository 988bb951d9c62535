"""A kernel that a question is asked of: its inputs, and its calls, whole or step by step."""

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from numpy.random import Generator, Philox, SeedSequence
from torch import Tensor

from tiebreak.backends.backend import EMULATION, Backend, to_device
from tiebreak.cases.bounds import UNDECLARED
from tiebreak.cases.case import HEADS_PER_BATCH, Draw, Shape
from tiebreak.cases.verdicts import WAYS, WORSE
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.external.call import CONTIGUOUS, Call, Made, Placed, Places
from tiebreak.kernels.external.kernels import UserKernel
from tiebreak.kernels.external.options import NO_BACKWARD, KernelOptions, convention
from tiebreak.kernels.formats import FP32, Format, Formats
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import (
    Blame,
    CannotRunError,
    Declaration,
    Kernel,
    NotAskedError,
    in_one_line,
    run_backward,
    run_forward,
)
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.questions.comparison import BATCH, HEADS, PARTS, Answers, O, exact, worst_head
from tiebreak.matrix.trial import failed_trial
from tiebreak.matrix.workbench import Settled

SHARE = 2  # of the heads of a batch, 1 in so many, where each is called dozens of times
_DO = 4.0  # of this size P dP leaves fp16 where dO is a thousand times as large
Material = Callable[[Draw, Shape], AttentionInputs]  # what is put into large calls


@dataclass(frozen=True)
class Question:
    """A question: two calls whose answers should agree."""

    name: str  # of its cells
    about: str  # one line
    ask: Callable[["Session", Any], None]  # makes the calls of one batch, and has its table's rule compare them
    source: str = "this suite"
    version: int = 1  # raised when the calls change: records of other versions are not comparable


@dataclass(frozen=True)
class CallShape(Shape):
    """The shape of a small call."""

    causal: bool = False


#: The first that a kernel takes: no size is a multiple of a tile, if that may be.
SHAPES = (
    CallShape(16, 100, 40),
    CallShape(16, 100, 64),
    CallShape(64, 64, 64),
    CallShape(100, 100, 64, causal=True),
    CallShape(128, 128, 128),
)


@dataclass(frozen=True)
class PlacedCall:
    """A call whose arguments have a given placement in memory, to be made step by step."""

    session: "Session"
    call: Call
    placed: Placed
    gradients: bool  # whether they are wanted

    def forward(self) -> Tensor:
        """Return O, in the kernel's own layout."""
        with self.session.calling(gradients=self.gradients):
            return self.call.forward(self.placed)

    def backward(self, o: Tensor) -> Made:
        """Return the gradients in the kernel's layout; none if it has none, which the check `gradients` reports."""
        if not (self.gradients and self.session.has_gradients):
            return ()
        with self.session.calling(gradients=self.gradients):
            return self.call.backward(self.placed, o) or ()

    def collected(self, o: Tensor, gradients: Made) -> Answers:
        """Return the results of the steps by part, in the form in which answers are compared."""
        return dict(zip(PARTS, (self.call.restored(x).cpu() for x in (o, *gradients[:3])), strict=False))

    def answers(self) -> Answers:
        """Make both steps and return what they give, by part."""
        o = self.forward()
        return self.collected(o, self.backward(o))


def _call_of_device(backend: Backend, kernel: Kernel, inputs: AttentionInputs) -> Call:
    """Return a call of a device's own kernel in the steps of a user's; a composed one is computed on fp32 numbers."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        output = backend.run(kernel, replace(inputs, q=q, k=k, v=v), gradients=False)
        return output.o.to(q), output.lse

    def backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> Made:
        del o  # the forward pass is run once more
        output = backend.run(kernel, replace(inputs, q=q, k=k, v=v, do=do), gradients=True)
        return tuple(x.to(q) for x in _gradients(output))

    called = convention(forward, KernelOptions(backward=backward if kernel.has_backward else NO_BACKWARD))
    return Call(forward, called, replace(inputs, formats=Formats.of(FP32)) if kernel.composed else inputs)


@lru_cache(maxsize=32)  # what cells of one question share; as many as one draws
def _drawn(entropy: tuple[int, ...], material: Material, shape: Shape, heads: int, fmt: Format) -> AttentionInputs:
    return material(Draw(Generator(Philox(SeedSequence(entropy))), Formats.of(fmt), heads, entropy[-1]), shape)


@dataclass
class Session:
    """The calls of one cell: inputs are drawn, placed in memory and given to the kernel."""

    cell: Cell
    seed: int
    heads: int  # of a batch of large calls
    settle: Callable[[], Settled]  # what is known of the kernel's plan: few questions ask
    index: int = 0  # of the batch
    refused: dict[str, None] = field(default_factory=dict)  # reasons why calls were left out
    held: list[Placed] = field(default_factory=list)  # arguments of all calls: freed ones would lend their addresses
    has_gradients: bool = True  # until the first small call shows that there are none
    rows: int = 0  # keys of a row that is long enough to be split; 0: not looked for yet
    _taken: dict[tuple[object, ...], bool] = field(default_factory=dict)

    @property
    def kernel(self) -> Kernel:
        """The kernel of the cell."""
        return self.cell.kernel

    @property
    def options(self) -> KernelOptions:
        """The options of a user's kernel; the defaults for any other."""
        return self.kernel.caller.convention.options if isinstance(self.kernel, UserKernel) else KernelOptions()

    def takes(self, *calls: AttentionInputs) -> bool:
        """Return whether the kernel can make some calls as they are, without dummies; if not, keep the reason."""
        for inputs in calls:
            key = (inputs.q.shape, inputs.k.shape, tuple(feature.name for feature in inputs.required_features()))
            if key not in self._taken:
                reason = self.kernel.refusal(to_device(inputs, self.cell.backend.device))
                if reason is None and self.arranged(inputs) is not inputs:
                    reason = "it is given dummy queries or keys"
                reason = reason or failed_trial(self.cell.backend, self.kernel, inputs)
                self._taken[key] = reason is None
                self.refused |= {} if reason is None else {reason: None}
            if not self._taken[key]:
                return False
        return True

    @contextmanager
    def leaving_out(self, words: str = "") -> Iterator[None]:
        """Leave the rest of the block out, and keep why, where the kernel refuses a call in it.

        With `words`, where it raises at all: it says that it takes no such call, and computes nothing wrong.
        """
        try:
            yield
        except Exception as error:
            refuses = isinstance(error, CannotRunError) and error.blame is not Blame.KERNEL
            if words:
                refuses = not self.cell.backend.poisoned() and not isinstance(error, NotAskedError)
            if not refuses:
                raise
            self.refused[f"{words}: {in_one_line(error)}" if words else str(error)] = None

    # Large calls, of which a batch has as many heads as a run says.

    def draw(self, name: str, material: Material, shape: Shape, share: int = SHARE) -> AttentionInputs:
        """Return heads of a material, 1 in `share` of a run's batch; every name and every index has its own."""
        entropy = (self.seed, *map(zlib.crc32, (self.cell.experiment.name.encode(), name.encode())), self.index)
        return _drawn(entropy, material, shape, max(2 * HEADS_PER_BATCH, self.heads // share), self.cell.fmt)

    def run(self, inputs: AttentionInputs, kernel: Kernel | None = None, *, gradients: bool = True) -> Answers:
        """Return the answer of a call, as any cell runs a kernel; gradients are wanted where it has a backward pass."""
        kernel, run = kernel or self.kernel, self.cell.backend.run
        gradients = gradients and kernel.has_backward
        # With gradients to come others may compute O in another way; a composed kernel's backward pass is apart.
        output = run(kernel, inputs, gradients=gradients and kernel.composed)
        made: AttentionOutput = output if kernel.composed or not gradients else run(kernel, inputs, gradients=True)
        return dict(zip(PARTS, (x.detach().float() for x in (output.o, *_gradients(made))), strict=False))

    # Small calls on normal numbers.

    def small_draw(self, index: int = 0) -> Draw:
        """Return the source of random numbers for a small call."""
        stream = SeedSequence([self.seed, zlib.crc32(self.cell.experiment.name.encode()), index])
        return Draw(Generator(Philox(stream)), Formats.of(self.cell.fmt), BATCH * HEADS, index)

    def draw_small(self, shape: CallShape, index: int = 0, batch: int = BATCH, heads: int = HEADS) -> AttentionInputs:
        """Return normal numbers in this shape."""
        draw = self.small_draw(index)
        rows, keys = (batch, heads, shape.queries, shape.d), (batch, heads, shape.keys, shape.d)
        q, k, v, do = (draw.rounded(draw.normal(*size)) for size in (rows, keys, keys, rows))
        return AttentionInputs(q, k, v, _DO * do, draw.formats, causal=shape.causal)

    @cached_property
    def _first(self) -> tuple[CallShape, Answers]:
        """The first shape in which the kernel can be called, and that call's answer; without one its last error."""
        failure: Exception | None = None
        dims = self.options.head_dims
        for shape in (replace(shape, d=dims[0]) for shape in SHAPES) if dims else SHAPES:
            inputs = self.draw_small(shape)
            refusal = self.kernel.refusal(to_device(inputs, self.cell.backend.device))
            if refusal is not None:
                failure = failure or CannotRunError(refusal)
                continue
            try:
                call = self.place(self.arranged(inputs))
                o = call.forward()
            except Exception as error:  # perhaps it takes another shape
                if self.cell.backend.poisoned():
                    raise
                failure = error
                continue
            gradients: Made = ()
            # The check `gradients` of other cells tells what is wrong with a backward pass that raises.
            with suppress(Exception):
                gradients = call.backward(o)
            self.has_gradients = bool(gradients)
            return shape, call.collected(o, gradients)
        assert failure is not None
        raise failure

    @property
    def shape(self) -> CallShape:
        """The first shape that the kernel takes."""
        return self._first[0]

    @property
    def plain(self) -> Answers:
        """The answer of the very first call, whose inputs are `inputs(0)`."""
        return self._first[1]

    def inputs(self, index: int = 0) -> AttentionInputs:
        """Return normal numbers in the first shape; of index 0 those of `plain`."""
        return self.arranged(self.draw_small(self.shape, index))

    def arranged(self, inputs: AttentionInputs) -> AttentionInputs:
        """Return inputs with the dummies that the kernel needs, as if they were part of the call."""
        return self.kernel.caller.arranged(inputs).inputs if isinstance(self.kernel, UserKernel) else inputs

    @contextmanager
    def calling(self, *, gradients: bool) -> Iterator[None]:
        """Prepare the process for a step of a user's kernel; a call of a device's own kernel does that itself."""
        if isinstance(self.kernel, UserKernel):
            with self.cell.backend.in_use(), self.kernel.caller.calling(gradients=gradients):
                yield
        else:
            yield

    def call(self, inputs: AttentionInputs) -> Call:
        """Return a call of the kernel on these inputs, which are moved to its device."""
        on_device, kernel = to_device(inputs, self.cell.backend.device), self.kernel
        if isinstance(kernel, UserKernel):
            return kernel.caller.call(on_device)
        return _call_of_device(self.cell.backend, kernel, on_device)

    def place(
        self, given: AttentionInputs | Call, places: Places = CONTIGUOUS, *, gradients: bool = True
    ) -> PlacedCall:
        """Return a call with its arguments placed as `places` say, at addresses that no other call has."""
        call, gradients = given if isinstance(given, Call) else self.call(given), gradients and self.kernel.has_backward
        with self.calling(gradients=gradients):
            self.held.append(call.placed(places, gradients=gradients))
        return PlacedCall(self, call, self.held[-1], gradients)

    def answers(self, inputs: AttentionInputs) -> Answers:
        """Return the answer of a call on these inputs, by part."""
        return self.place(inputs).answers()

    @cached_property
    def followed(self) -> Declaration:
        """The plan that the kernel declares, or a known one that it follows; else the least accurate one."""
        name = None if self.kernel.declaration else self.settle().followed
        return self.kernel.declaration or (UNDECLARED if name is None else parse_declaration(name))

    def emulated(self, inputs: AttentionInputs, plan: Declaration | None = None, *, gradients: bool = True) -> Answers:
        """Return the answer of an emulation of a plan, the declared one; without one, of the least accurate plan."""
        plan = plan or self.kernel.declaration or UNDECLARED
        arithmetic, wanted = EMULATION.arithmetic, gradients and self.has_gradients
        output = run_forward(plan, inputs, arithmetic)
        made = replace(output, gradients=run_backward(plan, inputs, output, arithmetic)) if wanted else output
        return dict(zip(PARTS, (output.o, *_gradients(made)), strict=False))

    @cached_property
    def levels(self) -> Mapping[str, float]:
        """How much of an emulation's mean squared error counts, by part: what the kernel had of it in its first call.

        For O it is at most 1. For gradients it is at least `WAYS`: autograd's, with P in 16 bits, had 5.3 times the
        error of FlashAttention-2's where scores are large, those for another parameter 1,000 times. Beyond `WAYS` times
        `WORSE` the first call is wrong itself, which is no reason to let others be.
        """
        inputs, ours = self.inputs(), self.plain
        theirs, levels = self.emulated(inputs, gradients=len(ours) > 1), {}
        for part, x in ours.items():
            ours_squared, theirs_squared = (worst_head(each, exact(inputs, part)) for each in (x, theirs[part]))
            ratio = ours_squared / theirs_squared if theirs_squared else 1.0
            levels[part] = min(1.0, ratio) if part == O else min(max(1.0, ratio), WAYS * WORSE) * WAYS
        return levels

    def multiple(self, size: int) -> int:
        """Return the least number of rows or keys that is at least `size` and that the kernel takes."""
        return -(-size // self.options.multiple_of) * self.options.multiple_of

    def answers_with_placement(self, inputs: AttentionInputs, places: Places, *, gradients: bool = True) -> Answers:
        """Return the answer of a call with its arguments placed elsewhere; none where the kernel refuses that."""
        with self.leaving_out("takes no such view, contiguous=true says so"):
            return self.place(inputs, places, gradients=gradients).answers()
        return {}


def _gradients(output: AttentionOutput) -> tuple[Tensor, ...]:
    given = output.gradients
    return () if given is None else (given.dq, given.dk, given.dv)
