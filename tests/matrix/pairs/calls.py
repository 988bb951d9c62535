"""Calls: the same inputs through both kernels of a pair, case by case, and what tells the two outputs apart."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tiebreak.cases.bounds import UNDECLARED
from tiebreak.cases.captured import CANCELLED
from tiebreak.cases.errors import Errors, by_key_head, in_units, merge
from tiebreak.cases.verdicts import (
    LIMIT,
    LOOKS,
    ROUNDED_ONCE,
    BiasVerdict,
    Interval,
    batches_of,
    heads_to_tell,
    interval,
    judge,
)
from tiebreak.kernels.inputs import AttentionOutput, Gradients
from tiebreak.kernels.kernel import Declaration, is_random, tilings
from tiebreak.kernels.reference import log_sum_exp
from tiebreak.matrix.identification.asking import ProbedKernel
from tiebreak.matrix.identification.attribution import slip_bits
from tiebreak.matrix.measures import ratio_of_means
from tiebreak.matrix.pairs import Side
from tiebreak.matrix.trial import raised
from tiebreak.matrix.workbench import CaseBench, equal_bits
from tiebreak.reports.pairs.log_probabilities import SIDES, A, B
from tiebreak.reports.pairs.verdict import APART, ROUNDINGS, SAME, CallRecord, GradientRecord
from tiebreak.reports.records.record import UNDECIDED, Estimate, finite

_GRADIENTS = {"dQ": "dq", "dK": "dk", "dV": "dv"}


class _LeftOutError(Exception):
    """A side has no answer: the severity, if it is the kernel's fault, and why."""


def _bound(side: Side) -> Declaration:
    """Return the plan whose error bounds a side is held to, in the smallest tiles that it may work in."""
    return tilings(side.plan)[-1] if side.plan and side.known else UNDECLARED


@dataclass
class PairedCall:
    """One case through both sides, on all heads drawn so far. Of answers from elsewhere each may have its own inputs.

    What exact attention makes of that is then no part of the difference.
    """

    benches: tuple[CaseBench, CaseBench]  # of A and B: one, unless their inputs differ
    sides: tuple[Side, Side]
    outputs: list[list[Tensor]] = field(default_factory=list)  # O of A and of B, fp32, a batch

    @property
    def bench(self) -> CaseBench:
        """The bench of A, in whose units all is."""
        return self.benches[0]

    def record(self) -> CallRecord:
        """Draw more heads until all is settled; a refusal or an error of a kernel is in the record."""
        try:
            for look in range(LOOKS):
                for index in batches_of(look):
                    if self.bench.has_batch(index):
                        self.outputs.append([*map(self._o, SIDES, self.sides, self.benches)])
                if self._verdict()[0] != UNDECIDED:
                    break
            return self._settled()
        except _LeftOutError as left:
            severity, why = left.args
            return CallRecord(self.bench.case.name, severity, why)

    def _o(self, letter: str, side: Side, bench: CaseBench) -> Tensor:
        probed, name, index = ProbedKernel(side.backend, side.kernel, bench.fmt), bench.case.name, len(self.outputs)
        shapes = [[list(getattr(each.batch(index).inputs, part).shape) for part in "qkv"] for each in self.benches]
        if shapes[0] != shapes[1]:
            raise _LeftOutError(UNDECIDED, f"q, k and v are {shapes[0]} in A, {shapes[1]} in B")
        try:
            answer = probed.answer(name, bench.batch(index))
        except Exception as error:  # whatever the kernel raises
            if side.backend.poisoned():
                raise
            raise _LeftOutError(UNDECIDED, f"{letter} raised {raised(error, side.kernel)}") from error
        if answer is None:
            raise _LeftOutError(None, f"{letter}: {probed.refused[name]}")
        return answer.o

    def _heads(self, batches: Iterable[Tensor]) -> Tensor:
        """Return means by key head, of all batches."""
        groups = self.bench.batch(0).inputs.groups
        return torch.cat([by_key_head(batch, groups) for batch in batches])

    @property
    def _apart(self) -> list[Tensor]:
        """B less A of each batch, in ulps away from zero."""
        return [self._in_units(index, b.double() - a.double()) for index, (a, b) in enumerate(self.outputs)]

    def _in_units(self, index: int, apart: Tensor) -> Tensor:
        """Return a difference in ulps, less that of the exact O; NaN where O of captured tensors has cancelled."""
        a, b = (bench.batch(index).ref for bench in self.benches)
        apart = in_units(apart if a is b else apart - (b.o - a.o), self.bench.batch(index).units)
        captured = self.bench.case.fixed_heads is not None
        return apart.masked_fill(a.o.abs() < CANCELLED * a.magnitude, torch.nan) if captured else apart

    def _plans_apart(self) -> Iterator[Tensor]:
        """Yield the same of both sides' plans."""
        for index in range(len(self.outputs)):
            both = zip(self.benches, self.sides, strict=True)
            a, b = (bench.emulated(index, side.plan)[0].o.double() for bench, side in both if side.plan)
            yield self._in_units(index, b - a)

    def _emulated(self, side: Side, bench: CaseBench) -> Errors | None:
        """Return errors of a side's plan; None where it has none, or no plan's bits can be compared."""
        if side.plan is None or not bench.case.bits_tell:
            return None
        return merge([bench.emulated(index, side.plan)[1] for index in range(len(self.outputs))])

    def _ratio(self) -> Interval | None:
        """Return the mean square of the difference over the sum of both plans' errors, as if they were independent.

        A sound side's mean square is at most `LIMIT` times its plan's, whatever its tiles and sums; so is that of both.
        """
        a, b = map(self._emulated, self.sides, self.benches)
        if a is None or b is None:
            return None
        squares = self._heads(apart.square() for apart in self._apart)
        return ratio_of_means(squares, a.head_square + b.head_square, 2 * ROUNDED_ONCE)

    def _difference(self) -> Interval:
        samples = self._heads(self._apart)
        return interval(samples[samples.isfinite()])

    def _verdict(self) -> tuple[str, str]:
        """Return the severity that all heads of O show, and why."""
        if all(equal_bits(a, b) == 1.0 for a, b in self.outputs):
            return SAME, ""
        apart, ratio = self._difference(), self._ratio()
        if self.bench.case.bits_tell and (verdict := judge(apart)) is BiasVerdict.BIASED:
            return APART, f"B - A is biased, {apart.mean:+.3f} +- {apart.half_width:.3f} ulp"
        if ratio is None:
            return UNDECIDED, "of no two plans is known how far they differ here"
        if ratio.low > LIMIT:
            least = f"at least {ratio.low:.3g}, {LIMIT} is allowed"
            return APART, f"mean square {ratio.mean:.3g} times what both plans' errors add up to ({least})"
        if verdict is BiasVerdict.UNBIASED and ratio.high <= LIMIT:
            return ROUNDINGS, ""
        more = f"--heads {heads_to_tell(apart, self._drawn)} would, about"
        more = more if self.bench.case.fixed_heads is None else "the case has no more"
        return UNDECIDED, f"{self._drawn} heads do not settle it: {more}"

    @property
    def _drawn(self) -> int:
        return sum(a.shape[0] * a.shape[1] for a, _ in self.outputs)

    def _settled(self) -> CallRecord:
        """Return the record of all heads drawn so far."""
        batches, all_emulated = list(enumerate(self.outputs)), None not in map(self._emulated, self.sides, self.benches)
        errors = [
            merge([self.benches[at].measure(index, AttentionOutput(o[at]), _bound(side)) for index, o in batches])
            for at, side in enumerate(self.sides)
        ]
        gradients, of_gradients = self._gradients()
        slips = [*map(self._slips, self.sides, self.benches, self.outputs[0], errors)]
        faults = [*filter(None, map(_fault, SIDES, errors, slips)), *of_gradients]
        (severity, why), apart = self._verdict(), self._difference()
        if severity != SAME or any(gradient.bits < 1.0 for gradient in gradients.values()):
            if severity == SAME:
                severity, why = ROUNDINGS, "gradients differ"
            severity, why = (APART, "; ".join(faults)) if faults else (severity, why)
        gain = errors[1].head_square - errors[0].head_square
        nearer = interval(gain[gain.isfinite()])
        return CallRecord(
            self.bench.case.name,
            severity,
            why,
            wrong=bool(faults),
            slips=(*slips[0], *slips[1]) if faults else (),
            heads=self._drawn,
            bits=sum(equal_bits(a, b) for a, b in self.outputs) / len(batches),
            difference=Estimate.of(apart.mean, apart.half_width),
            verdict=None if self.bench.case.cancels else judge(apart).value,
            rms=_rms(self._heads(each.square() for each in self._apart)),
            predicted=_rms(self._heads(each.square() for each in self._plans_apart())) if all_emulated else None,
            errors=(finite(errors[0].rms_ulps), finite(errors[1].rms_ulps)),
            biases=(finite(errors[0].bias.mean), finite(errors[1].bias.mean)),
            nearer=A if nearer.low > 0.0 else B if nearer.high < 0.0 else None,
            gradients=gradients,
            plan_bits=(self._plan_bits(0), self._plan_bits(1)),
            inputs=self._inputs_apart(),
            lse=self._lse_apart() if self.bench.case.fixed_heads else None,
        )

    def _inputs_apart(self) -> dict[str, float]:
        """Return the rms difference of q, k and v of both sides, as a share of A's, where it is not 0."""
        a, b = ([getattr(bench.batch(0).inputs, part).double() for part in "qkv"] for bench in self.benches)
        squares = {
            part: (y - x).square().mean() / (x.square().mean() or y.square().mean())
            for part, x, y in zip("qkv", a, b, strict=True)
            if not torch.equal(x, y)
        }
        return {part: square.sqrt().item() for part, square in squares.items()}

    def _lse_apart(self) -> Estimate | None:
        """Return the mean difference of the log-sum-exp, B less A less that of the exact ones; None: one has none."""
        made = list[Tensor]()
        for side, bench in zip(self.sides, self.benches, strict=True):
            batch = bench.batch(0)
            lse = side.backend.run(side.kernel, batch.inputs, gradients=False).lse
            if lse is None:
                return None
            made.append(lse.double() - log_sum_exp(batch.inputs, batch.ref))
        apart = interval(by_key_head(made[1] - made[0], self.bench.batch(0).inputs.groups))
        return Estimate.of(apart.mean, apart.half_width)

    def _slips(self, side: Side, bench: CaseBench, o: Tensor, errors: Errors) -> Sequence[str]:
        """Return the usual mistakes that explain errors beyond the bounds; several may have the bits of one input."""
        if _share_of_bounds(errors) <= 1.0:
            return ()
        mistakes = slip_bits(o, bench.batch(0), side.backend)
        return sorted(mistakes, key=mistakes.__getitem__, reverse=True)

    def _plan_bits(self, at: int) -> float | None:
        """Return the share of bits of O that a side's plan has; None where bits tell nothing."""
        plan = self.sides[at].plan
        if plan is None or is_random(plan) or not self.bench.case.bits_tell:
            return None
        return equal_bits(self.outputs[0][at], self.benches[at].emulated(0, plan)[0].o)

    def _gradients(self) -> tuple[dict[str, GradientRecord], list[str]]:
        """Return both sides' gradients of the first batch compared, and what is wrong with them."""
        batch, made, faults = self.bench.batch(0), list[Gradients](), list[str]()
        if not self.bench.case.gradients or not all(side.kernel.has_backward for side in self.sides):
            return {}, []
        for letter, side in zip(SIDES, self.sides, strict=True):
            output = side.backend.run(side.kernel, batch.inputs, gradients=True)
            if output.gradients is None:
                why = [f"{letter}: its backward pass {output.backward_error}"] if output.backward_error else []
                return {}, [*faults, *why]
            made.append(output.gradients)
            bounds = batch.gradient_bounds.of(batch.clipped(_bound(side)))
            faults_of_side = batch.gradients.errors(output.gradients, bounds, batch.inputs.groups).faults
            if faults_of_side.nonfinite or faults_of_side.over_bound > 1.0:
                faults.append(f"gradients of {letter} are wrong, by {faults_of_side.over_bound:.3g} times their bound")
        records = {}
        for (name, key), exact in zip(_GRADIENTS.items(), batch.gradients.gradients, strict=True):
            a, b = (getattr(each, key) for each in made)
            rms = ((b.double() - a.double()).square().mean() / exact.square().mean()).sqrt().item()
            records[name] = GradientRecord(equal_bits(a, b), finite(rms))
        return records, faults


def _share_of_bounds(errors: Errors) -> float:
    return max(errors.error_over_bound, errors.outside_values)


def _fault(letter: str, errors: Errors, slips: Sequence[str]) -> str | None:
    """Return why a side is another function; None: it is none."""
    if (share := _share_of_bounds(errors)) > 1.0:
        named = " or ".join(slips) or f"its largest error is {share:.3g} times its bound"
        return f"{letter} is another function: {named}"
    lost = errors.nonfinite + errors.missed
    return f"{letter} differs from the exact answer in what is NaN or Inf, in {lost} elements" if lost else None


def _rms(squares: Tensor) -> float | None:
    return finite(squares.nanmean().sqrt().item())
