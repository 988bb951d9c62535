"""The measures of one call of attention: a number each, described once.

A measure is a module of this folder, or an entry in one: it is found by being here. Records, tables, gate, CSV, JUnit's
XML, the page and the JSON Schema read its description and know no measure by name.
"""

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import import_module
from typing import Literal

import torch
from torch import Tensor

from tiebreak.cases.batch import Batch
from tiebreak.cases.errors import Errors, by_key_head, in_units
from tiebreak.cases.gradients import GradientErrors, delta_errors_of, equation_cosines
from tiebreak.cases.verdicts import Interval
from tiebreak.kernels.inputs import AttentionOutput, Gradients
from tiebreak.kernels.kernel import Declaration

Value = Interval | float | None  # None: there is no such number here


@dataclass(frozen=True)
class Measure:
    """What a measure is, and how the gate holds it."""

    name: str
    about: str  # one line
    unit: str = ""  # ulp; empty: a plain number
    worse: Literal["more", "less", "farther"] | None = None  # which way it is worse; farther: from 0; None: neither
    limit: float | None = None  # how much worse it may get, in its unit, beyond the intervals of both numbers
    margin: float | None = None  # within this of 0 it is none: the verdict is on it; None: there is no verdict on it
    share: float = 0.0  # of itself, that it may get worse by; both have to be passed
    per: str | None = None  # the measure that it is held as a share of
    portable: bool = False  # whether it is held between platforms too
    column: bool = False  # whether the page's table of all cells has a column of it


@dataclass(frozen=True)
class HeadErrors:
    """How much a gradient and that of the known backward pass it is held to err, by key head, (heads,) each.

    Errors are measured from the gradient of that pass without a rounding: those that come of O are left out.
    """

    square: Tensor  # mean squared error over mean square
    their_square: Tensor
    gain: Tensor  # sum(error * exact) / sum(exact^2)
    their_gain: Tensor

    def joined(self, more: "HeadErrors") -> "HeadErrors":
        """Return both as one."""
        return HeadErrors(*(torch.cat([mine, vars(more)[name]]) for name, mine in vars(self).items()))


@dataclass(frozen=True)
class MoreGradients:
    """What gradients of one more batch say on the whole, by key head, (heads,) each."""

    delta: Tensor  # see `delta_errors_of`
    gains: Sequence[Tensor]  # sum(error * reference) / sum(reference^2) of dQ, dK and dV

    @classmethod
    def of(cls, gradients: Gradients, batch: Batch) -> "MoreGradients":
        """Return those of a batch."""
        exact, groups = batch.gradients.gradients, (batch.inputs.groups, 1, 1)  # K and V have key heads alone
        pairs = zip((gradients.dq, gradients.dk, gradients.dv), exact, groups, strict=True)
        gains = [by_key_head((ours - x) * x, n) / by_key_head(x.square(), n) for ours, x, n in pairs]
        return cls(delta_errors_of(gradients.dq, batch.inputs, batch.ref, exact[0]), gains)


@dataclass(frozen=True)
class Observed:
    """A kernel's outputs for a case's heads, batch by batch, and the prediction of them."""

    errors: Errors  # of all batches
    outputs: Sequence[AttentionOutput]  # one a batch
    batches: Sequence[Batch]  # what they were made from
    declaration: Declaration  # the plan whose bounds the kernel is held to
    predicted: Errors | None = None  # of the emulation's output on the same heads; None: none is made
    equal_bits: float | None = None  # share of elements of O that agree with the prediction to the bit
    rounded: Errors | None = None  # of a correctly rounded O on the same heads, where a user's kernel is biased
    held_to: tuple[Errors, Errors] | None = None  # of O and of the plan that it is held to, on the same heads
    normal: bool = False  # whether the case has normal numbers
    equal_gradients: float | None = None  # share of elements of dQ, dK, dV that a second run gave to the bit
    #: Of each run, by dq, dk and dv; of the first run on as many heads as it takes to tell whether they err too much.
    backward_heads: Sequence[Mapping[str, HeadErrors]] = ()
    more_gradients: Sequence[MoreGradients] = ()  # of batches after the first, as many as it takes
    predicted_gradients: MoreGradients | None = None  # of the first batch, emulated as a kernel of the suite declares
    worst_gradient: float | None = None  # see `tiebreak.cases.measures.accuracy`

    @cached_property
    def row_errors(self) -> Tensor:
        """Signed errors in ulps of the first batch, a row a line, (rows, d); NaN where an element is left out."""
        output, batch = self.outputs[0], self.batches[0]
        return in_units(output.o.double() - batch.ref.o, batch.units).flatten(0, -2)

    @cached_property
    def gradient_errors(self) -> GradientErrors | None:
        """Of the first batch. None where there are no gradients."""
        gradients, batch = self.outputs[0].gradients, self.batches[0]
        if gradients is None:
            return None
        return batch.gradients.errors(gradients, batch.gradient_bounds.of(self.declaration), batch.inputs.groups)

    @cached_property
    def equation_cosines(self) -> tuple[float, float] | None:
        """Of the first batch, of the paper's equations 1 and 2."""
        output, batch, errors = self.outputs[0], self.batches[0], self.gradient_errors
        return None if errors is None else equation_cosines(output, errors.dq, batch.inputs, batch.ref)


@dataclass(frozen=True)
class CallMeasure(Measure):
    """A measure of one call."""

    of: Callable[[Observed], Value] = field(kw_only=True)  # how it is computed


@cache
def call_measures() -> Mapping[str, CallMeasure]:
    """Every measure of a call by name: those of `core`, then module after module."""
    names = sorted((module.name for module in pkgutil.iter_modules(__path__)), key=lambda name: (name != "core", name))
    modules = [import_module(f"{__name__}.{name}") for name in names]
    measures: list[CallMeasure] = [measure for module in modules for measure in module.MEASURES]
    return {measure.name: measure for measure in measures}
