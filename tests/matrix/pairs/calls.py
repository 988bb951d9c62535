"""Calls: the same inputs through both kernels of a pair, case by case, and what tells the two outputs apart."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tiebreak.cases.bounds import UNDECLARED
from tiebreak.cases.errors import Errors, by_key_head, in_units, merge
from tiebreak.cases.measures.accuracy import LIMIT, ROUNDED_ONCE, ratio_of_means
from tiebreak.cases.verdicts import LOOKS, Interval, Verdict, heads_to_tell, interval, judge
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput, Gradients
from tiebreak.kernels.kernel import Declaration
from tiebreak.matrix.attribution import slip_bits
from tiebreak.matrix.bits import same_bits
from tiebreak.matrix.candidates import accepted, drawn, on_device, tilings
from tiebreak.matrix.identification.asking import Asked
from tiebreak.matrix.pairs.side import Side
from tiebreak.matrix.trial import raised
from tiebreak.matrix.workbench import CaseBench
from tiebreak.reports.pairs.verdict import APART, NOT_TOLD, ROUNDINGS, SAME, A, B, CallRecord, GradientRecord
from tiebreak.reports.records.record import Estimate, finite

_OF_GRADIENTS = {"dQ": "dq", "dK": "dk", "dV": "dv"}


class _LeftOutError(Exception):
    """A side has no answer: the severity of that, if it says anything of a kernel, and why."""


@dataclass(frozen=True)
class Sided:
    """A side as it is asked."""

    letter: str  # A or B
    side: Side
    asked: Asked
    shares: list[float] = field(default_factory=list)  # of bits of O that its plan has, case by case

    @property
    def bound(self) -> Declaration:
        """Whose rounding-error bounds it is held to, in the smallest tiles that it may work in."""
        return tilings(self.side.plan)[-1] if self.side.plan and self.side.known else UNDECLARED

    def o(self, name: str, inputs: AttentionInputs) -> Tensor:
        """O of a call, fp32; a `_LeftOutError` where there is none."""
        kernel = self.asked.kernel
        try:
            answer = self.asked.answer(name, inputs)
        except Exception as error:  # whatever the kernel raises
            if self.asked.backend.poisoned():
                raise
            raise _LeftOutError(NOT_TOLD, f"{self.letter} raised {raised(error, kernel)}") from error
        if answer is None:
            raise _LeftOutError(None, f"{self.letter}: {self.asked.refused.pop(name)}")
        return answer.o


@dataclass(frozen=True)
class _Drawn:
    """One batch of heads through both; what has an entry a head has one a key head."""

    errors: tuple[Errors, Errors]  # of both sides
    same: float  # share of elements of O with equal bits
    lost: int  # elements that are finite in one alone
    difference: Tensor  # mean of B less A in ulps, away from zero
    square: Tensor  # its mean square
    plans: Tensor | None  # mean squared errors of both plans, added up; None: one has no plan, or bits tell nothing
    predicted: Tensor | None  # mean square of the difference of both plans


@dataclass
class PairedCall:
    """One case through both, on as many heads as have been drawn."""

    bench: CaseBench
    sides: tuple[Sided, Sided]
    drawn: list[_Drawn] = field(default_factory=list)

    def record(self) -> CallRecord:
        """Draw ever more heads until all is told; what a kernel refuses or raises is in the record."""
        try:
            for look in range(LOOKS):
                self.drawn += [self._batch(index) for index in range(2**look // 2, 2**look) if self.bench.has(index)]
                if self._settled or not self.bench.has(len(self.drawn)):
                    break
        except _LeftOutError as left:
            severity, why = left.args
            return CallRecord(self.bench.case.name, severity, why)
        return self._told()

    def _batch(self, index: int) -> _Drawn:
        batch, name, tells = self.bench.batch(index), self.bench.case.name, self.bench.case.bits_tell
        ours, theirs = (sided.o(name, batch.inputs) for sided in self.sides)
        pairs = zip(self.sides, (ours, theirs), strict=True)
        errors = [self.bench.measure(index, AttentionOutput(o), sided.bound) for sided, o in pairs]
        if index == 0:
            self._first = ours, theirs
        difference = in_units(theirs.double() - ours.double(), batch.units)
        plans = predicted = None
        emulated = [self.bench.emulated(index, s.side.plan) for s in self.sides if s.side.plan is not None and tells]
        if len(emulated) == len(self.sides):
            (one, error), (other, other_error) = emulated
            plans = error.head_square + other_error.head_square
            apart = in_units(other.o.double() - one.o.double(), batch.units)
            predicted = by_key_head(apart.square(), batch.inputs.groups)
        return _Drawn(
            (errors[0], errors[1]),
            same=same_bits(ours, theirs).double().mean().item(),
            lost=int((ours.isfinite() != theirs.isfinite()).sum()),
            difference=by_key_head(difference, batch.inputs.groups),
            square=by_key_head(difference.square(), batch.inputs.groups),
            plans=plans,
            predicted=predicted,
        )

    def _all(self, name: str) -> Tensor:
        """One number a key head, of all that were drawn; empty where nothing is known."""
        known = [x for each in self.drawn if (x := getattr(each, name)) is not None]
        return torch.cat(known) if known else torch.empty(0)

    def _mean(self, name: str) -> Interval:
        samples = self._all(name)
        return interval(samples[samples.isfinite()])

    @property
    def _ratio(self) -> Interval | None:
        """Mean square of the difference over what both plans' errors add up to, where they are independent.

        A sound side's mean square is at most `LIMIT` times its plan's, whatever its tiles and sums: so is the two's.
        """
        plans = self._all("plans")
        return ratio_of_means(self._all("square"), plans, 2 * ROUNDED_ONCE) if len(plans) else None

    @property
    def _settled(self) -> bool:
        if not self.bench.case.bits_tell or any(each.lost for each in self.drawn):
            return True
        ratio = self._ratio
        told = ratio is None or ratio.low > LIMIT or ratio.high <= LIMIT
        return told and judge(self._mean("difference")) is not Verdict.INCONCLUSIVE

    def _told(self) -> CallRecord:
        errors = [merge([each.errors[at] for each in self.drawn]) for at in range(2)]
        difference, ratio = self._mean("difference"), self._ratio
        gradients, faults = self._gradients()
        same = min([each.same for each in self.drawn] + [each.bits for each in gradients.values()])
        faults = [*filter(None, map(self._fault, self.sides, self._first, errors)), *faults]
        severity, why, wrong = self._said(same, faults, difference, ratio)
        gain = interval(errors[1].head_square - errors[0].head_square)
        shares = [self._share(sided, o) for sided, o in zip(self.sides, self._first, strict=True)]
        for sided, share in zip(self.sides, shares, strict=True):
            sided.shares.extend([] if share is None else [share])
        return CallRecord(
            self.bench.case.name,
            severity,
            why,
            wrong,
            heads=sum(len(each.square) for each in self.drawn) * self.bench.batch(0).inputs.groups,
            bits=sum(each.same for each in self.drawn) / len(self.drawn),
            difference=Estimate.of(difference.mean, difference.half_width),
            verdict=judge(difference).value if self.bench.case.bits_tell else None,
            rms=_rms(self._all("square")),
            predicted=_rms(self._all("predicted")),
            ratio=finite(ratio.mean) if ratio else None,
            errors=(finite(errors[0].rms_ulps), finite(errors[1].rms_ulps)),
            nearer=A if gain.low > 0.0 else B if gain.high < 0.0 else None,
            gradients=gradients,
        )

    def _said(
        self, same: float, faults: list[str], difference: Interval, ratio: Interval | None
    ) -> tuple[str, str, bool]:
        """The severity, why, and whether a side is wrong."""
        if same == 1.0:
            return SAME, "", False
        if lost := sum(each.lost for each in self.drawn):
            return APART, f"{lost} elements are NaN or Inf in one alone", True
        if faults:
            return APART, "; ".join(faults), True
        if not self.bench.case.bits_tell:
            return NOT_TOLD, "nothing is predicted of such inputs, and bits differ", False
        if (verdict := judge(difference)) is Verdict.BIASED:
            return APART, f"B - A is biased, {difference.mean:+.3f} +- {difference.half_width:.3f} ulp", False
        if ratio is None:
            return NOT_TOLD, "no plan of one side is known, so that nothing says how far two roundings differ", False
        if ratio.low > LIMIT:
            least = f"at least {ratio.low:.3g}, {LIMIT} is allowed"
            return APART, f"mean square {ratio.mean:.3g} times what both plans' errors add up to ({least})", False
        if verdict is Verdict.UNBIASED and ratio.high <= LIMIT:
            return ROUNDINGS, "", False
        drawn = len(self._all("square"))
        return NOT_TOLD, f"{drawn} heads do not settle it: --heads {heads_to_tell(difference, drawn)}, about", False

    def _fault(self, sided: Sided, o: Tensor, errors: Errors) -> str | None:
        """Why a side is another function, with the usual mistake that explains it; None: it is none."""
        share = max(errors.error_over_bound, errors.outside_values)
        if share <= 1.0 and not errors.nonfinite and not errors.missed:
            return None
        batch = self.bench.batch(0)
        slips = slip_bits(o, batch, accepted(on_device(sided.asked.backend), batch.inputs.formats))
        what = f"its largest error is {share:.3g} times its bound" if share > 1.0 else "NaN or Inf"
        return f"{sided.letter} is another function: {'; '.join(slips) or what}"

    def _share(self, sided: Sided, o: Tensor) -> float | None:
        """Of bits of O that its plan has; None where bits tell nothing."""
        plan = sided.side.plan
        if plan is None or drawn(plan) or not self.bench.case.bits_tell:
            return None
        return same_bits(o, self.bench.emulated(0, plan)[0].o).double().mean().item()

    def _gradients(self) -> tuple[Mapping[str, GradientRecord], list[str]]:
        """What both make of gradients of the first batch, and what is wrong with them."""
        batch, (ours, theirs) = self.bench.batch(0), self.sides
        if not self.bench.case.gradients or not all(sided.asked.kernel.has_backward for sided in self.sides):
            return {}, []
        faults, made = list[str](), list[Gradients]()
        for sided in self.sides:
            output = sided.asked.backend.run(sided.asked.kernel, batch.inputs, gradients=True)
            if output.gradients is None:
                faults += (
                    [f"{sided.letter}: its backward pass {output.backward_error}"] if output.backward_error else []
                )
                return {}, faults
            made.append(output.gradients)
            bounds = batch.gradient_bounds.of(batch.clipped(sided.bound))
            found = batch.gradients.errors(output.gradients, bounds, batch.inputs.groups).faults
            if found.nonfinite or found.over_bound > 1.0:
                faults.append(f"{sided.letter} has wrong gradients, {found.over_bound:.3g} times their bound")
        return dict(_compared(*made, batch.gradients.gradients)), faults


def _compared(ours: Gradients, theirs: Gradients, exact: tuple[Tensor, ...]) -> Iterator[tuple[str, GradientRecord]]:
    for (name, attribute), reference in zip(_OF_GRADIENTS.items(), exact, strict=True):
        one, other = getattr(ours, attribute), getattr(theirs, attribute)
        rms = ((other.double() - one.double()).square().mean() / reference.square().mean()).sqrt().item()
        yield name, GradientRecord(same_bits(one, other).double().mean().item(), finite(rms))


def _rms(squares: Tensor) -> float | None:
    return finite(squares.nanmean().sqrt().item()) if len(squares) else None
