"""A sample: a kernel's outputs for the heads of a case drawn so far, of which measures are taken."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from tiebreak.cases.claims import Claim, no_worse, predicted
from tiebreak.cases.errors import Errors, by_key_head, difference, in_units, merge
from tiebreak.cases.gradients import GradientErrors, delta_errors_of, equation_cosines
from tiebreak.cases.verdicts import BiasVerdict, judge
from tiebreak.kernels.algorithms import FLASH_ATTENTION
from tiebreak.kernels.inputs import AttentionOutput, Gradients
from tiebreak.kernels.kernel import Declaration
from tiebreak.kernels.plans import FP32_INSIDE
from tiebreak.kernels.shift_rules import SHIFT_RULES
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.result import HeldTo
from tiebreak.matrix.workbench import CaseBench, Fit, SharedBatch, equal_bits

#: O in fp32 throughout, rounded once: what no deterministic kernel of that output format does better.
ROUNDED = Declaration(FLASH_ATTENTION, FP32_INSIDE, SHIFT_RULES["safe"])


@dataclass(frozen=True)
class HeadErrors:
    """The errors of a gradient and of the known backward pass that it is held to, by key head, (heads,) each.

    The reference is the gradient of that pass without rounding, so that errors from O are left out.
    """

    square: Tensor  # mean squared error over mean square
    their_square: Tensor
    gain: Tensor  # sum(error * exact) / sum(exact^2)
    their_gain: Tensor

    def joined(self, more: "HeadErrors") -> "HeadErrors":
        """Return both as one."""
        return HeadErrors(*(torch.cat([mine, vars(more)[name]]) for name, mine in vars(self).items()))


def _gains(groups: int, ours: Tensor, exact: Tensor) -> Tensor:
    """Return the gain errors of one entry of a batch, which stays in a core's cache, (key heads,)."""
    return by_key_head(((ours - exact) * exact)[None], groups) / by_key_head(exact.square()[None], groups)


@dataclass(frozen=True)
class OnTheWhole:
    """The factor by which the gradients of a batch are too large, by key head, (heads,) each."""

    delta: Tensor  # see `delta_errors_of`
    gains: tuple[Tensor, ...]  # sum(error * reference) / sum(reference^2) of dQ, dK and dV

    @classmethod
    def of(cls, gradients: Gradients, batch: SharedBatch) -> "OnTheWhole":
        """Return the factors of a batch."""
        exact, groups = batch.gradients.gradients, (batch.inputs.groups, 1, 1)  # K and V have key heads alone
        pairs = zip((gradients.dq, gradients.dk, gradients.dv), exact, groups, strict=True)
        gains = (torch.cat(list(map(partial(_gains, n), ours, x))) for ours, x, n in pairs)
        return cls(delta_errors_of(gradients.dq, batch.inputs, batch.ref, exact[0]), tuple(gains))


@dataclass(frozen=True)
class Sample:
    """A cell's outputs for all heads drawn so far, and the judgements that follow from them.

    A chaotic or cancelling case predicts nothing: its records say that no prediction was made, not that one passed.
    """

    cell: Cell
    bench: CaseBench  # of its case, in its format
    declaration: Declaration  # whose bounds the kernel is held to, in the tiles that it turns out to work in
    claim: Claim | None  # of the case, about such a kernel
    outputs: tuple[AttentionOutput, ...] = ()  # one a batch
    batch_errors: tuple[Errors, ...] = ()  # of them
    exhausted: bool = False  # whether the case has no more heads than have been drawn
    out_of_time: bool = False  # whether there is no time for one more look
    fits: Mapping[str, Fit] | None = None  # of known plans, where the kernel declares none; None: not looked for yet
    held_to: HeldTo | None = None  # None: its errors are compared with those of no plan
    backward_heads: Mapping[str, HeadErrors] | None = None  # of dq, dk and dv, on as many heads as tell; None: no pass
    worst_gradient: float | None = None  # largest ratio of a head's squares to those of the pass that errs most there
    more_gradients: tuple[OnTheWhole, ...] = ()  # of batches after the first, as many as it takes

    @property
    def heads(self) -> int:
        """The number of heads drawn so far."""
        return sum(output.o.shape[0] * output.o.shape[1] for output in self.outputs)

    @property
    def first(self) -> SharedBatch:
        """The first batch, the only one on which gradients are bounded and rows examined."""
        return self.bench.batch(0)

    @cached_property
    def errors(self) -> Errors:
        """The errors of O on all heads."""
        return merge(list(self.batch_errors))

    def emulated(self, declaration: Declaration) -> Errors:
        """Return the errors of a declaration's emulation, on all heads."""
        return merge([self.bench.emulated(index, declaration)[1] for index in range(len(self.outputs))])

    @cached_property
    def plan_errors(self) -> Errors | None:
        """The errors of the plan that it is held to, on the same heads; None: there is none."""
        return None if self.held_to is None else self.emulated(self.held_to.declaration)

    @cached_property
    def prediction(self) -> Errors | None:
        """The errors of the kernel's declaration; None: nothing is predicted, or the emulation itself was run."""
        kernel, backend = self.cell.kernel, self.cell.backend
        if kernel.declaration is None or backend.predicts or not self.bench.case.bits_tell:
            return None
        return self.emulated(self.declaration)

    @cached_property
    def equal_bits(self) -> float | None:
        """The share of elements of O that agree with the prediction to the bit."""
        if self.prediction is None:
            return None
        emulated = [self.bench.emulated(index, self.declaration)[0].o for index in range(len(self.outputs))]
        pairs = zip(self.outputs, emulated, strict=True)
        return sum(equal_bits(output.o.float(), o) for output, o in pairs) / len(emulated)

    @cached_property
    def rounded(self) -> Errors | None:
        """The errors of a correctly rounded O, for a user's kernel biased on a failure input or compared with one."""
        failing_of_users = self.cell.kernel.external and self.bench.case.failure
        is_wanted = self.bench.settings.as_rounded or self.verdict is BiasVerdict.BIASED
        return self.emulated(ROUNDED) if failing_of_users and is_wanted else None

    @cached_property
    def row_errors(self) -> Tensor:
        """The signed errors in ulps of the first batch, a row a line, (rows, d); NaN where an element is left out."""
        return in_units(self.outputs[0].o.double() - self.first.ref.o, self.first.units).flatten(0, -2)

    @cached_property
    def gradient_errors(self) -> GradientErrors | None:
        """The errors of the gradients of the first batch; None: there are none."""
        gradients, kernel = self.outputs[0].gradients, self.cell.kernel
        if gradients is None:
            return None
        emulated = self.cell.backend.predicts and kernel.declaration is not None
        return self.bench.gradient_errors(gradients, self.declaration, emulated=emulated)

    @cached_property
    def equation_cosines(self) -> tuple[float, float] | None:
        """The cosines of the paper's equations 1 and 2 for the first batch."""
        errors, batch = self.gradient_errors, self.first
        return None if errors is None else equation_cosines(self.outputs[0], errors.dq, batch.inputs, batch.ref)

    @cached_property
    def predicted_gradients(self) -> OnTheWhole | None:
        """The gradients of the first batch that a suite kernel's declaration predicts on normal numbers."""
        if self.cell.kernel.external or self.prediction is None or not self.bench.case.normal:
            return None
        emulated = self.bench.emulated(0, self.declaration)[0].gradients
        return None if emulated is None else OnTheWhole.of(emulated, self.first)

    @property
    def gradient_heads(self) -> int:
        """The number of heads that gradients were measured on."""
        inputs = self.first.inputs
        key_heads = inputs.k.shape[0] * inputs.k.shape[1] + sum(len(more.delta) for more in self.more_gradients)
        return inputs.groups * key_heads

    @property
    def has_cancelled(self) -> bool:
        """True if no element of O has an error in ulps."""
        return self.errors.left_out == self.errors.elements

    @cached_property
    def verdict(self) -> BiasVerdict | None:
        """The verdict on the bias; None where the mean error in ulps means nothing in this case."""
        if self.bench.case.cancels:
            return None
        return BiasVerdict.NONFINITE if self.errors.nonfinite else judge(self.errors.bias)

    @property
    def claim_passed(self) -> bool | None:
        """True if what the case claims is so; None: the data do not tell."""
        return self.claim is None or self.claim.expectation.passed(self.errors)

    @cached_property
    def prediction_passed(self) -> bool | None:
        """True if the output is what the declaration predicts; None: the data do not tell."""
        errors, prediction = self.errors, self.prediction
        if prediction is None:
            return True
        if errors.nonfinite or prediction.nonfinite:
            # Underflow sits on an edge that the exponential's last bit decides.
            return abs(errors.nonfinite - prediction.nonfinite) <= errors.elements // 100
        return predicted(difference(errors, prediction))

    @cached_property
    def rounded_passed(self) -> bool | None:
        """True if the output is no more biased than a correctly rounded O; None: the data do not tell."""
        return not self.bench.settings.as_rounded or self.rounded is None or no_worse(self.errors, self.rounded)

    @property
    def is_settled(self) -> bool:
        """True if more heads would say nothing more of O."""
        answers = (self.claim_passed, self.prediction_passed, self.rounded_passed)
        return None not in answers and self.verdict is not BiasVerdict.UNDECIDED

    @property
    def obstacle(self) -> str:
        """Why more heads can't be drawn by a larger --heads, and what to do about it; empty if they can."""
        if self.out_of_time:
            return f"time for {self.heads} heads and no more: raise --cell-timeout"
        if not self.exhausted:
            return ""
        if self.has_cancelled:
            return "every element of O has cancelled: no kernel's bias shows on this input"
        more = "capture more sequences a batch"
        return f"the case has no more: {more}" if self.bench.case.fixed_heads else "no more were exported"

    def with_batch(self, output: AttentionOutput, errors: Errors) -> "Sample":
        """Return the same with one more batch."""
        return replace(self, outputs=(*self.outputs, output), batch_errors=(*self.batch_errors, errors))
