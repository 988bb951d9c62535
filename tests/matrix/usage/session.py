"""A kernel that is called in several ways on normal numbers, small calls all: what questions about its use share."""

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from numpy.random import Generator, Philox, SeedSequence
from torch import Tensor

from tiebreak.backends.backend import to_device
from tiebreak.cases.case import Draw
from tiebreak.kernels.external.call import CONTIGUOUS, Call, Placed, Places
from tiebreak.kernels.external.kernels import UserKernel
from tiebreak.kernels.formats import Format, Formats
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import CannotRunError
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.result import Relation
from tiebreak.matrix.usage.relations import Answers, Difference, differences, exact_answers

BATCH, HEADS = 2, 4
_FEW = 16  # queries and keys where there are many heads
_DO = 4.0  # of this size P dP leaves fp16 where dO is a thousand times as large
Cut = Callable[[Answers], Answers]


@dataclass(frozen=True)
class CallShape:
    """Sizes of a call, and its mask."""

    queries: int
    keys: int
    d: int
    causal: bool = False


#: The first that a kernel takes: no size is a multiple of a tile, if that may be.
SHAPES = (
    CallShape(16, 100, 40),
    CallShape(16, 100, 64),
    CallShape(64, 64, 64),
    CallShape(100, 100, 64, causal=True),
    CallShape(128, 128, 128),
)


class RefusedViewError(CannotRunError):
    """A kernel raises an error at arguments that lie otherwise in memory: it says so, and computes nothing wrong."""


@dataclass
class Session:
    """One cell: its kernel and its inputs, and what came of the calls so far."""

    cell: Cell
    kernel: UserKernel
    seed: int
    relations: list[Relation] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    measures: dict[str, float] = field(default_factory=dict)  # beside those of the differences
    held: list[Placed] = field(default_factory=list)  # arguments of all calls: freed ones would lend their addresses
    unit: str = ""  # behind the number that tables show
    plain: Answers = field(default_factory=dict)  # of the very first call, whose inputs are `inputs(0)`
    has_gradients: bool = False  # whether that gave dQ, dK and dV

    @property
    def fmt(self) -> Format:
        """Of q, k, v, dO and O."""
        return self.cell.fmt

    @contextmanager
    def calling(self) -> Iterator[None]:
        """What all calls are made within."""
        with self.cell.backend.in_use(), self.kernel.caller.calling(gradients=self.kernel.has_backward):
            yield

    def draw(self, shape: CallShape, index: int = 0, batch: int = BATCH, heads: int = HEADS) -> AttentionInputs:
        """Normal numbers, others for every index."""
        stream = SeedSequence([self.seed, zlib.crc32(self.cell.experiment.name.encode()), index])
        draw = Draw(Generator(Philox(stream)), Formats.of(self.fmt), batch * heads)
        rows, keys = (batch, heads, shape.queries, shape.d), (batch, heads, shape.keys, shape.d)
        q, k, v, do = (draw.rounded(draw.normal(*size)) for size in (rows, keys, keys, rows))
        return AttentionInputs(q, k, v, _DO * do, draw.formats, causal=shape.causal)

    def refusal(self, inputs: AttentionInputs) -> str | None:
        """None, or why the kernel can't take some inputs."""
        return self.kernel.refusal(to_device(inputs, self.cell.backend.device))

    def call(self, inputs: AttentionInputs) -> Call:
        """A call of these inputs, which the kernel takes."""
        return self.kernel.caller.call(to_device(inputs, self.cell.backend.device))

    @cached_property
    def shape(self) -> CallShape:
        """The first in which the kernel can be called; `plain` is that call.

        Raises:
            Exception: what it raised in the last of them.
        """
        failure: Exception | None = None
        for shape in SHAPES:
            inputs = self.draw(shape)
            refusal = self.refusal(inputs)
            if refusal is not None:
                failure = failure or CannotRunError(refusal)
                continue
            try:
                self.plain = self._first_answers(inputs)
            except Exception as error:  # perhaps it takes another shape
                if self.cell.backend.poisoned():
                    raise
                failure = error
                continue
            return shape
        assert failure is not None
        raise failure

    def _first_answers(self, inputs: AttentionInputs) -> Answers:
        call = self.call(self.arranged(inputs))
        placed = self.placed(call)
        o = call.forward(placed)
        gradients: tuple[Tensor, ...] = ()
        # The check `gradients` of other cells tells what is wrong with a backward pass that raises.
        with suppress(Exception):
            gradients = call.backward(placed, o) or ()
        self.has_gradients = bool(gradients)
        return self.collected(call, o, gradients)

    def inputs(self, index: int = 0) -> AttentionInputs:
        """Normal numbers in that shape; of index 0 those of `plain`."""
        return self.arranged(self.draw(self.shape, index))

    def inputs_of(self, batch: int, heads: int) -> AttentionInputs:
        """The same with another number of heads, and fewer keys, without dummies."""
        shape = self.shape
        if not self.kernel.caller.convention.options.multiple_of > 1:
            shape = replace(shape, queries=min(shape.queries, _FEW), keys=_FEW)
        return self.draw(shape, 0, batch, heads)

    def arranged(self, inputs: AttentionInputs) -> AttentionInputs:
        """With the dummies that the kernel needs, as if they were part of the call."""
        return self.kernel.caller.needs.arrange(inputs).inputs

    def answers(self, inputs: AttentionInputs, places: Places = CONTIGUOUS) -> Answers:
        """What a new call gives.

        Raises:
            RefusedViewError: the kernel raised an error at arguments that are not contiguous.
        """
        call = self.call(inputs)
        placed = self.placed(call, places)
        if places is CONTIGUOUS:
            return self.answers_of(call, placed)
        try:
            return self.answers_of(call, placed)
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise RefusedViewError(f"takes no such view, contiguous=true says so: {reason}") from error

    def placed(self, call: Call, places: Places = CONTIGUOUS) -> Placed:
        """The arguments of a call, at addresses that no other call of the cell has."""
        self.held.append(call.placed(places, gradients=self.kernel.has_backward))
        return self.held[-1]

    def answers_of(self, call: Call, placed: Placed) -> Answers:
        """O and the gradients of a call whose arguments lie where they do."""
        o = call.forward(placed)
        return self.collected(call, o, self.backward(call, placed, o))

    def backward(self, call: Call, placed: Placed, o: Tensor) -> tuple[Tensor, ...]:
        """Gradients; none where there are none to be had, which is told elsewhere."""
        if not self.has_gradients:
            return ()
        return call.backward(placed, o) or ()

    @staticmethod
    def collected(call: Call, o: Tensor, gradients: tuple[Tensor, ...]) -> Answers:
        """As answers are compared."""
        tensors = dict(zip(("O", "dQ", "dK", "dV"), (o, *gradients), strict=False))
        return {name: call.restored(tensor).cpu() for name, tensor in tensors.items()}

    @property
    def measured(self) -> Mapping[str, float]:
        """What the cell measures, what tables show first."""
        if self.measures:
            return self.measures
        return {
            "other_bits": max((each.share for each in self.differences), default=0.0),
            "difference_ulps": max((each.ulps for each in self.differences), default=0.0),
            "error_ratio": max((each.worse for each in self.differences), default=1.0),
        }

    def same_in(self, views: Mapping[str, Places], plain: Answers, inputs: AttentionInputs) -> None:
        """Ask whether the answers are the same where the arguments lie elsewhere, in every place that is not refused.

        Args:
            views: places, by what must be so.
            plain: the answers in contiguous tensors.
            inputs: of the call.

        Raises:
            RefusedViewError: the kernel refused them all.
        """
        refused: list[RefusedViewError] = []
        for asked, places in views.items():
            try:
                answers = self.answers(inputs, places)
            except RefusedViewError as error:
                refused.append(error)
            else:
                self.same(asked, answers, plain, inputs)
        if len(refused) == len(views):
            raise refused[0]

    def same(
        self,
        asked: str,
        ours: Answers,
        plain: Answers,
        inputs: AttentionInputs,
        *,
        again: Answers | None = None,
        cut: Cut = dict,
    ) -> None:
        """Ask whether two answers are the same, and take down what is so.

        Args:
            asked: what must be so; goes on `: dQ differs in ...` where it is not.
            ours: of the call in question.
            plain: of the call that it must agree with.
            inputs: of the latter.
            again: of one more plain call: if O has its bits, it must have them in `ours` too. Gradients need not: where
                they are added up by atomics, two calls agree by chance.
            cut: the part of the answers that is compared.
        """
        ours, plain = cut(ours), cut(plain)
        exact = cut(exact_answers(inputs)) if any(not torch.equal(ours[name], plain[name]) for name in ours) else plain
        differing = differences(ours, plain, exact, self.fmt)
        repeats = again is not None and torch.equal(cut(again)["O"], plain["O"])
        wrong = [each for each in differing if (repeats and each.what == "O") or not each.harmless]
        self.differences += differing
        others = f" ({', '.join(each.what for each in wrong[1:])} too)" if wrong[1:] else ""
        why = f"{asked}: {wrong[0].text}{others}" if wrong else ""
        self.relations.append(Relation(asked, why))


def visible_keys(keys: slice, rows: slice) -> Cut:
    """Rows and keys that are compared, where a mask hides the others."""
    parts: Mapping[str, slice] = {"O": rows, "dQ": rows, "dK": keys, "dV": keys}
    return lambda answers: {name: tensor[:, :, parts[name]] for name, tensor in answers.items()}
