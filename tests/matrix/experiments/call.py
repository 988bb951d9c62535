"""One call of attention on scripted or captured input."""

import hashlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import process_time
from typing import Any, ClassVar

import torch

from tiebreak.backends.registry import target_of
from tiebreak.cases.bounds import UNDECLARED
from tiebreak.cases.case import JOINED, Case
from tiebreak.cases.claims import UNBIASED, Claim, bias_text, claim, comes_of_ties, predicted
from tiebreak.cases.errors import Errors, difference
from tiebreak.cases.gradients import contains_bias
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.cases.verdicts import LOOKS, MOST_HEADS, BiasVerdict, Interval, Value, batches_of, heads_to_tell
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.external.kernels import UserKernel
from tiebreak.kernels.features import HIDDEN_NAN, SCRIPTABLE
from tiebreak.kernels.flash import BLOCK
from tiebreak.kernels.formats import Format, Formats
from tiebreak.kernels.inputs import AttentionOutput
from tiebreak.kernels.kernel import Declaration, Kernel, NotAskedError, delta_alone, tilings
from tiebreak.kernels.roster import roster_labels
from tiebreak.matrix.checks import ACCURACY, CONTRACT, GRADIENTS, checks, contract_broken, looks
from tiebreak.matrix.experiment import Cell, Experiment, Kind, SelectionContext, time_limit
from tiebreak.matrix.measures import CALL_MEASURES, values_of
from tiebreak.matrix.off import gradient_off, o_off
from tiebreak.matrix.resolver import BackwardPasses, plan_of, resolver
from tiebreak.matrix.result import Claimed, HeldTo, Result, recorded
from tiebreak.matrix.sample import OnTheWhole, Sample
from tiebreak.matrix.trial import refusal
from tiebreak.matrix.workbench import CaseBench, Settled, Workbench
from tiebreak.reports.errors import UsageError
from tiebreak.reports.records import record as records

NO_WORSE = "no more bias than a correctly rounded O", "--no-worse-than rounded"  # what is claimed, and who claims it
_LONG = 600.0  # seconds that a call which is run on request may take
_NEXT_LOOK = 3.0  # times the time so far: when one more look is done, for gradients too
FAIR_CLAIM = claim(UNBIASED, "--fair: no bias on any failure input", formats="bf16 fp16")
_SHRUNK = 0.9  # an output of less than this share of the reference is shown as such


@dataclass(frozen=True)
class OneCall(Experiment):
    """One call on the input of a case, with heads added until claim, verdict and prediction are settled."""

    kind: ClassVar[str] = "call"
    case: Case
    plain: Case | None = None  # the same without the features that were added; None: none was

    @property
    def options(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.case.fixed_heads.options if self.case.fixed_heads else ()

    @property
    def time_limit(self) -> float:  # type: ignore[override]
        return _LONG if self.case.on_request else Experiment.time_limit

    @property
    def tags(self) -> frozenset[str]:
        if self.case.needs:
            return frozenset()  # profiles are of kernels without features
        failing, backward = {"failure"} if self.case.failure else set(), {"backward"} if self.case.gradients else set()
        return frozenset({"call"} | failing | backward)

    def described(self) -> records.CaseRecord:
        case = self.case
        of, at = case.family or (None, None)
        return records.CaseRecord(
            case.about,
            case.source,
            unclaimed=case.unclaimed,
            family=of,
            at=at,
            failure=case.failure,
            seen=case.seen,
            group=case.group,
            backward=case.gradients,
        )

    def formats(self) -> Sequence[Format] | None:
        return self.case.fixed_heads.formats if self.case.fixed_heads else None

    def on_another(self, change: Callable[[Case], Case]) -> "OneCall":
        return OneCall(change(self.case), self.case)

    def check(self, fmt: Format) -> None:
        """Read captured tensors once, and add features to a few heads."""
        fixed = self.case.fixed_heads
        if fixed is None and JOINED not in self.name:
            return
        try:
            self.case.make(0, 0, fixed.heads if fixed else 1, fmt)
        except ValueError as error:
            raise UsageError(str(error) if fixed else f"--features: {self.name}: {error}") from error

    def group(self, fmt: Format) -> str | None:
        """Return the case, whose cells share inputs, references and the emulation's outputs."""
        return f"{self.name}-{fmt.name}"

    def input_kind(self, fmt: Format) -> str | None:
        formats = self.case.formats(fmt)
        return "calls" if formats == Formats.of(fmt) else f"calls with V in {formats.v.name}"

    def is_for(self, kernel: Kernel, context: SelectionContext) -> bool:
        case, plan = self.case, kernel.declaration
        native = kernel.caller.convention.native if isinstance(kernel, UserKernel) else frozenset()
        if kernel.unsuited(case.formats(context.fmt)) is not None:
            return False
        if not context.cases_named and (not case.needs <= native or (case.study and kernel.external)):
            return False
        if not case.only_claimed or context.kernels_named or plan is None or plan.label not in roster_labels():
            return True
        return case.claim_about(plan) is not None  # in bf16: another format has the same kernels

    def refusal(self, cell: Cell, bench: Workbench) -> str | None:
        inputs, plain = bench.case(self.case, cell.fmt).batch(0).inputs, self.plain
        if plain is not None and plain.make(0, 0, 1, cell.fmt).required_features() == inputs.required_features():
            return f"{plain.name} has {self.name.removeprefix(plain.name + JOINED)} already"
        if HIDDEN_NAN in self.case.needs - cell.kernel.takes:
            return f"takes no {HIDDEN_NAN.words}"
        return refusal(cell.backend, cell.kernel, inputs)

    def refused(self, cell: Cell) -> bool:
        case = self.case
        return case.fixed_heads is None and cell.kernel.refusal(case.make(0, 0, 1, cell.fmt)) is not None

    def run(self, cell: Cell, bench: Workbench) -> Result:
        plan = plan_of(cell, bench)
        sample, backward = _with_gradients(_until_settled(cell, bench.case(self.case, cell.fmt), plan), plan)
        measures, errors = values_of(sample), sample.errors
        verdict = None if sample.verdict is None else sample.verdict.value
        tied, in_training = where_bias_is(verdict, measures, self.case.formats(cell.fmt).output)
        return Result(
            measures=measures,
            shown=shown(errors.nonfinite, errors.gain, errors.bias.mean, verdict),
            verdict=verdict,
            tied=tied,
            in_training=in_training,
            claims=tuple(_claims(sample)),
            prediction=_prediction(sample),
            answers={CONTRACT: contract_broken(plan.wrong)} if plan.wrong else {},
            backward_error=sample.outputs[0].backward_error,
            backward_raised=sample.outputs[0].backward_raised,
            held_to=sample.held_to,
            backward_held_to=backward.name if backward else None,
            gradient_heads=sample.gradient_heads,
            external=cell.kernel.external,
            bound_of=sample.declaration.plan.name,
            heads=sample.heads,
            obstacle=sample.obstacle,
            digest=digest(sample.outputs[0]),
            off=lambda of_gradients: gradient_off(sample, measures) if of_gradients else o_off(sample),
            evidence=_evidence(sample, backward),
        )


def _until_settled(cell: Cell, bench: CaseBench, plan: Settled) -> Sample:
    """Add heads until O's verdicts are settled, no heads are left, the cap is reached or time is short.

    A look draws as many heads as all looks before it, and takes as long. The kernel's plan is known from the first.
    """
    began, limit = process_time(), time_limit(cell, bench.settings.cell_timeout)
    output = _output(cell, bench, 0)
    declaration = _in_its_tiles(cell, bench, output)
    sample = Sample(cell, bench, declaration, _claim(cell, bench, declaration))
    try:
        for look in range(LOOKS):
            for index in batches_of(look):
                if bench.has_batch(index):
                    output = _output(cell, bench, index) if index else output
                    sample = sample.with_batch(output, _errors(cell, bench, index, output, declaration))
            if not look:
                sample = _held_to_a_plan(sample, plan)
            exhausted = not bench.has_batch(len(sample.outputs))
            out_of_time = limit is not None and _NEXT_LOOK * (process_time() - began) > limit
            sample = replace(sample, exhausted=exhausted, out_of_time=out_of_time and not exhausted)
            if exhausted or out_of_time or (sample.is_settled and _is_settled(ACCURACY, sample)):
                break
    except NotAskedError:  # of more heads
        return replace(sample, exhausted=True)
    return sample


def _held_to_a_plan(sample: Sample, plan: Settled) -> Sample:
    """Return the sample with the plan that O is held to: that which its kernel declares, or follows.

    None where the emulation tells nothing: it is what was run, or the case is chaotic or cancels.
    """
    if sample.cell.kernel.declaration is None:
        return resolver().resolved(sample, plan)
    declared = HeldTo(sample.declaration.label, sample.declaration)
    return sample if sample.prediction is None else replace(sample, held_to=declared)


def _output(cell: Cell, bench: CaseBench, index: int) -> AttentionOutput:
    """Run a kernel on one batch. Gradients are measured on the first alone."""
    kernel, gradients = cell.kernel, bench.case.gradients and cell.kernel.has_backward
    if kernel.declaration is not None and cell.backend.predicts:
        return bench.emulated(index, kernel.declaration)[0]
    run = kernel if index == 0 else delta_alone(kernel)
    return cell.backend.run(run, bench.batch(index).inputs, gradients=gradients)


def _errors(cell: Cell, bench: CaseBench, index: int, output: AttentionOutput, declaration: Declaration) -> Errors:
    if cell.kernel.declaration is not None and cell.backend.predicts:
        return bench.emulated(index, declaration)[1]
    return bench.measure(index, output, declaration)


def _in_its_tiles(cell: Cell, bench: CaseBench, output: AttentionOutput) -> Declaration:
    """Return the declaration whose bounds a kernel is held to: a user's with the tiles that it works in.

    A bound grows with the number of tiles, and a kernel that declares nothing may work in the smallest.
    """
    declaration = cell.kernel.declaration or UNDECLARED
    if not cell.kernel.external:
        return declaration
    tiled = tilings(declaration)
    if cell.kernel.declaration is None or len(tiled) == 1:
        return tiled[-1]
    named = {str(each.block): each for each in tiled}
    fits = bench.batch(0).fits(output.o, named)
    return named[max(fits, key=lambda name: fits[name].bits)]  # the first of equals


def _claim(cell: Cell, bench: CaseBench, tiled: Declaration) -> Claim | None:
    """Return the claim of the case, or of --fair, about such a kernel."""
    case, kernel = bench.case, cell.kernel
    if kernel.external and bench.settings.fair and case.failure:
        return FAIR_CLAIM
    if kernel.declaration is None or not kernel.external:
        return case.claim_about(kernel.declaration, cell.fmt)
    # Where a case cuts its rows into tiles, what it claims is of kernels that cut them too.
    keys = bench.batch(0).inputs.k.shape[-2]
    uncut = tiled.algorithm.tiled and keys > BLOCK.keys and tiled.block.keys > BLOCK.keys
    return None if uncut else case.claim_about(tiled, cell.fmt)


def _is_settled(check: str, sample: Sample) -> bool:
    """Return whether each interval that a check limits is on one side of its limit: more heads change nothing."""
    limits = checks()[check].described.limits
    numbers = recorded(
        values_of(sample, {name for limit in limits for name in (limit.measure, limit.or_within) if name})
    )
    return all(limit.kept(numbers) is not None for limit in limits)


def _with_gradients(sample: Sample, plan: Settled) -> tuple[Sample, BackwardPasses | None]:
    """Add heads until it is settled whether gradients err too much; a user's are held to a known backward pass."""
    cell, bench, first, held_to = sample.cell, sample.bench, sample.outputs[0], sample.held_to
    compared = bench.case.normal or bench.case.fixed_heads is not None  # with known backward passes
    if held_to is None or first.gradients is None or not compared:
        return sample, None
    backward = resolver().backward(sample, held_to, plan) if cell.kernel.external else None
    if backward is not None:
        sample = backward.added_to(sample, first.gradients, first.o, bench.batch(0))
    with suppress(NotAskedError):
        for look in range(1, LOOKS):
            if sample.out_of_time or not bench.has_batch(batches_of(look).start) or _is_settled(GRADIENTS, sample):
                break
            for batch in (bench.batch(index) for index in batches_of(look) if bench.has_batch(index)):
                output = cell.backend.run(cell.kernel, batch.inputs, gradients=True)
                if output.gradients is None:
                    continue
                more = (*sample.more_gradients, OnTheWhole.of(output.gradients, batch))
                sample = replace(sample, more_gradients=more)
                if backward is not None:
                    sample = backward.added_to(sample, output.gradients, output.o, batch)
    return sample, backward


def _script(sample: Sample) -> str | None:
    """Return the command that writes a script of a wrong call with torch alone; None: it can't express such a call."""
    cell, inputs, settings = sample.cell, sample.first.inputs, sample.bench.settings
    origin, backend, name = cell.kernel.origin, cell.backend, cell.experiment.name
    if len(origin) != 2 or backend.options or JOINED in name or not set(inputs.required_features()) <= SCRIPTABLE:
        return None
    words = ["tiebreak", "shrink", origin[1], "--case", name, *cell.experiment.options, "--dtype", cell.fmt.name]
    words += ["--backend", target_of(backend.name), "--seed", str(settings.seed), "--heads", str(settings.heads)]
    return shlex.join(words)


def _evidence(sample: Sample, backward: BackwardPasses | None) -> dict[str, Any]:
    """Return a record's evidence from the first batch."""
    assumed, evidence = sample.outputs[0].assumed, dict[str, Any]()
    if sample.fits:
        evidence["fits"] = {
            name: records.FitRecord(*map(records.finite, (fit.difference.mean, fit.difference.half_width, fit.bits)))
            for name, fit in sample.fits.items()
        }
    wrong = sample.errors.error_over_bound > 1.0 or sample.errors.nonfinite
    slips = backward.slips if backward is not None else {}
    slips = resolver().slips(sample) if wrong and sample.cell.kernel.external else slips
    evidence |= {"slips": slips} if slips else {}
    if (wrong or sample.verdict is BiasVerdict.BIASED) and (script := _script(sample)):
        evidence[records.SCRIPT] = script
    evidence |= {} if backward is None else {"backward": backward.bits}
    evidence |= {"assumed": assumed} if assumed else {}
    if isinstance(kernel := sample.cell.kernel, UserKernel) and (names := kernel.caller.convention.never_given):
        evidence["not given"] = ", ".join(names) + " (dropout is not judged)" * ("dropout" in " ".join(names))
    heads = heads_to_tell(sample.errors.bias, sample.heads)
    if sample.verdict is BiasVerdict.UNDECIDED and heads < MOST_HEADS and not sample.exhausted:
        evidence["heads_to_tell"] = heads
    for look in looks().values():
        evidence |= look.looks(sample)
    return evidence


def _claims(sample: Sample) -> Iterator[Claimed]:
    if sample.claim is not None:
        expectation = sample.claim.expectation
        values_of = expectation.text(sample.errors)
        yield Claimed(expectation.name, sample.claim.source, sample.claim_passed, values_of, expectation.waives)
    if sample.bench.settings.as_rounded and sample.rounded is not None:
        values_of = f"{bias_text(sample.errors)} measured, {bias_text(sample.rounded)} of O rounded once"
        yield Claimed(*NO_WORSE, sample.rounded_passed, values_of)


def _prediction(sample: Sample) -> Claimed | None:
    """Answer whether the prediction passed; if not, also whether it would be if the plan named the device's sums."""
    if sample.prediction is None:
        return None
    label, backend = sample.declaration.label, sample.cell.backend
    values_of = f"{bias_text(sample.errors)} measured, {bias_text(sample.prediction)} emulated"
    products = backend.plan_changes() if sample.prediction_passed is False else ()
    if products:
        plan = ",".join([label, *products])
        if predicted(difference(sample.errors, sample.emulated(parse_declaration(plan)))):
            values_of += f"; {plan}, as this device multiplies, does"
    return Claimed(f"what {label} predicts", "", sample.prediction_passed, values_of)


def where_bias_is(verdict: str | None, measures: Mapping[str, Value], fmt: Format) -> tuple[bool | None, str | None]:
    """Return, for a biased cell, whether O itself ties there and whether gradients contain the bias, if measured."""
    bias, rounded, delta = (measures.get(name) for name in ("bias", "rounded_bias", KIND.described.carried or ""))
    if verdict != BiasVerdict.BIASED.value or not isinstance(bias, Interval):
        return None, None
    tied = comes_of_ties(bias, rounded) if isinstance(rounded, Interval) else None
    return tied, contains_bias(delta, fmt).value if isinstance(delta, Interval) else None


def shown(nonfinite: float, gain: float, bias: float, verdict: str | None) -> records.Shown:
    """Return what tables show of a call: the bias in ulps with its verdict, or what there is instead.

    Instead, there may be NaN or Inf where the reference is finite, or a too small gain, sum |O| / sum |reference|.
    """
    if nonfinite:
        return records.Shown(records.NONFINITE)
    if gain < _SHRUNK:
        return records.Shown(records.SHRUNK, gain)
    if records.finite(bias) is None:
        return records.Shown(records.NO_NUMBER)
    return records.Shown.of(KIND.described.headline or "", bias, verdict=verdict)


def digest(output: AttentionOutput) -> str:
    """Return a digest of the bits of O, as records have it. All NaN count as one: sign and payload vary by device."""
    o = output.o.float().contiguous()
    bits = o.view(torch.int32).masked_fill(o.isnan(), -1)
    return hashlib.sha256(bits.numpy().tobytes()).hexdigest()[:16]


def calls_on(cases: Sequence[Case], captured: str | None, *, cases_named: bool) -> list[OneCall]:
    """Return the calls of a run on cases of the suite; captured tensors run alone unless --cases is given."""
    own = cases if captured is None or cases_named else ()
    return [OneCall(case) for case in own if cases_named or not case.on_request]


class _CallKind(Kind):
    def offered(self, captured: str | None, *, cases_named: bool) -> Sequence[Experiment]:
        return calls_on(SCRIPTED, captured, cases_named=cases_named)


KIND = _CallKind(
    OneCall.kind,
    records.ExperimentRecord(
        "one call of attention on scripted or captured input",
        "bias of O in ulps, + away from zero. B: biased (99.9 % beyond 0.05 ulp), ?: not known yet, neither:"
        " unbiased;\nNaN: NaN or Inf where the reference is finite; x..: the output shrinks to that share.",
        headline="bias",
        largest="max_ulps",
        agreement="equal_bits",
        carried="delta_bias_in_dq",
    ),
    measured={name: measure.described for name, measure in CALL_MEASURES.items()},
    advice="triton_fp8 runs in the cases called fp8_... alone",
)
