"""Judging a record anew, without its device: by its own numbers, and by what the emulation makes of its cell.

Of a record someone may have changed a number, an answer, or taken an answer out. A cell of the emulation can be run
again anywhere. Of a device's cell that was held to a prediction, the prediction can.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from random import Random
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from tiebreak.backends.backend import EMULATION
from tiebreak.backends.registry import BACKENDS
from tiebreak.cases.case import Case
from tiebreak.cases.claims import ROWS_ERR_APART, ROWS_ERR_TOGETHER, Claim, predicted
from tiebreak.cases.errors import Errors, merge
from tiebreak.cases.gpt2.snippets import SNIPPETS
from tiebreak.cases.gpt2.variants import VARIANTS
from tiebreak.cases.measures import Observed, call_measures
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.cases.verdicts import LOOKS, Interval, Verdict, judge
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.formats import parse_format
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionOutput
from tiebreak.kernels.kernel import Declaration
from tiebreak.kernels.roster import composed_kernel
from tiebreak.matrix.candidates import tilings
from tiebreak.matrix.checks import checks
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.experiments.call import Call, digest, shown, where_bias_is
from tiebreak.matrix.recording import recorded
from tiebreak.matrix.result import Result
from tiebreak.matrix.run import run_cell
from tiebreak.matrix.settings import Settings
from tiebreak.matrix.workbench import Workbench
from tiebreak.reports.records.record import CLAIM, PREDICTION, Estimate, Record, Shown, Value
from tiebreak.reports.tables.marks import plain_text

_CASES = {case.name: case for case in SCRIPTED}
_FORMATS = frozenset(fmt.name for fmt in TORCH_DTYPES)
_MEASURED = (
    "accuracy",
    "finite",
    "bound",
    "range",
    "gradients",
    "loss",
)  # checks that ask a result for its measures alone
_OF_A_BACKWARD_PASS = "delta_bias"  # the delta that it used; equal bits are those of O alone
_CLOSE = 1e-6  # as a share, and in ulps: what another order of summation in fp64 may change of a mean


def contradictions(record: Record) -> Iterator[str]:
    """What of a record does not follow from its own numbers, or from what its case is, a line each.

    Args:
        record: one with a result; of any other nothing is told.

    Returns:
        A verdict that its bias does not come to, a text that tables do not show of it, a check that its measures answer
        otherwise, a check that was not asked and should have been.
    """
    if record.shown is None:
        return
    if record.format not in _FORMATS:
        yield f"format: {record.format}: no kernel is run in it"
        return
    case = _CASES.get(record.case)
    try:
        waived = waived_checks(record, case)
    except ValueError as error:
        yield f"plan: {error}"
        return
    if case is not None:
        yield from _of_a_call(record, case)
    elif (snippet := SNIPPETS.get(record.case)) is not None:
        headline = record.number(snippet.headline)
        drifts = snippet.drifts({snippet.headline: math.nan if headline is None else headline})
        yield from _of_the_place(record, None, drifts and drifts.value)
    yield from _of_measures(record, waived)


def waived_checks(record: Record, case: Case | None) -> frozenset[str]:
    """Checks that need not be met, since the case claims of such a kernel that they are not.

    Raises:
        ValueError: the plan that it declares is none.
    """
    if case is None:
        return _waived_in_training(record)
    fmt, known = parse_format(record.format), declaration_of(record)
    if known is None and record.plan is not None:  # a user's: which of the tiles it works in is not recorded
        claims = [case.claim_about(tiled, fmt) for tiled in tilings(parse_declaration(record.plan))]
    else:
        claims = [case.claim_about(known, fmt)]
    return frozenset().union(*(claim.expectation.waives for claim in claims if claim is not None))


def _waived_in_training(record: Record) -> frozenset[str]:
    snippet, variant = SNIPPETS.get(record.case), VARIANTS.get(record.kernel)
    if snippet is None or variant is None:
        return frozenset(_MEASURED)  # a user's kernel may be held to what is claimed of another: not known here
    return frozenset().union(*(claim.waives for claim in snippet.claims_about(variant)))


def declaration_of(record: Record) -> Declaration | None:
    """What a kernel of the suite, or of the backend's own, declares; None of any other."""
    try:
        return composed_kernel(record.kernel).declaration
    except ValueError:
        backend = BACKENDS.get(record.backend)
    own = backend.vendor_kernels() if backend else ()
    declared = [kernel.declaration for kernel in own if kernel.name == record.kernel]
    # On another processor it may declare another plan.
    return next((each for each in declared if each is not None and each.label == record.plan), None)


def _of_a_call(record: Record, case: Case) -> Iterator[str]:
    nonfinite = record.number("nonfinite")
    bias, gain = _interval(record.measures.get("bias")), record.number("gain")
    verdict = Verdict.NONFINITE if nonfinite else judge(bias)
    comes_to = None if case.cancels else verdict.value
    if record.verdict != comes_to:
        yield f"verdict: {record.verdict}, and its bias comes to {comes_to}"
    fmt = case.formats(parse_format(record.format)).output
    tied, in_training = where_bias_is(comes_to, {name: _value(value) for name, value in record.measures.items()}, fmt)
    yield from _of_the_place(record, tied, in_training)
    expected_shown = shown(nonfinite or 0.0, math.nan if gain is None else gain, bias.mean, comes_to)
    if record.shown != expected_shown:
        text = plain_text(structs.replace(record, shown=expected_shown))
        yield f"shown: {plain_text(record)!r}, and its measures come to {text!r}"
    expected, difference = (
        _interval(record.measures.get(name)) for name in ("predicted_bias", "prediction_difference")
    )
    answer = record.answers.get(PREDICTION)
    if not nonfinite and abs(bias.mean - expected.mean - difference.mean) > _CLOSE:
        yield "measures: bias less predicted_bias is not prediction_difference"
    elif not nonfinite and answer is not None and answer.met is not predicted(difference):
        yield f"answers.prediction: {_in_words(answer.met)}, and its measures say {_in_words(predicted(difference))}"
    declaration = declaration_of(record)
    if declaration is None:
        return
    if record.plan != declaration.label:
        yield f"plan: {record.plan}, and {record.kernel} declares {declaration.label}"
    yield from _of_the_claim(record, case.claim_about(declaration, parse_format(record.format)))
    backend = BACKENDS.get(record.backend)
    predicts = backend is None or backend.predicts
    if not predicts and not case.cancels and not case.chaotic and PREDICTION not in record.answers:
        yield "answers.prediction: not asked, and the kernel's plan predicts this case"


def _of_the_place(record: Record, tied: bool | None, in_training: str | None) -> Iterator[str]:
    """What it says of where a bias comes from, and of where it goes."""
    if record.tied is not tied:
        yield f"tied: {record.tied}, and its measures come to {tied}"
    if record.in_training != in_training:
        yield f"in_training: {record.in_training}, and its measures come to {in_training}"


def _of_the_claim(record: Record, claim: Claim | None) -> Iterator[str]:
    answer = record.answers.get(CLAIM)
    if (claim and claim.expectation.name) != (answer and answer.asked):
        yield f"answers.claim: {answer and answer.asked}, and the case claims {claim and claim.expectation.name}"
    elif claim is not None and answer is not None and claim.expectation not in (ROWS_ERR_TOGETHER, ROWS_ERR_APART):
        # Of rows a record has the means alone, without their interval.
        met = claim.expectation.met(_as_recorded(record))
        if met is not answer.met:
            yield f"answers.claim: {_in_words(answer.met)}, and its measures say {_in_words(met)}"


@dataclass(frozen=True)
class _Recorded(Errors):
    """Errors as a record has them: the bias with its interval, and not the samples that it is of."""

    recorded_bias: Interval = field(default_factory=lambda: _interval(None))

    @property
    def bias(self) -> Interval:
        """As recorded."""
        return self.recorded_bias


def _as_recorded(record: Record) -> Errors:
    values: dict[str, Any] = {each.name: record.number(each.name) for each in fields(Errors)}
    # Claims ask of the sizes for their ratio, and whether that of O is 0.
    values |= {"output_size": record.number("gain"), "reference_size": 1.0}
    unknown: dict[Any, Any] = {Tensor: torch.zeros(0), int: 0, float: math.nan}
    values |= {each.name: unknown[each.type] for each in fields(Errors) if values[each.name] is None}
    return _Recorded(**values, recorded_bias=_interval(record.measures.get("bias")))


def _of_measures(record: Record, waived: frozenset[str]) -> Iterator[str]:
    """Checks that its measures answer otherwise than it says."""
    result = Result({name: _value(value) for name, value in record.measures.items()}, Shown(""), bound_of=record.plan)
    for name in _MEASURED:
        answer, recorded = checks()[name].ask(result), record.answers.get(name)
        if answer is None:
            continue
        if recorded is None:
            if name not in waived and answer.met is not True:
                yield f"answers.{name}: not asked, and its measures do not meet it: {answer.why}"
        elif recorded.met is not answer.met and not (name == "gradients" and recorded.met is False):
            yield f"answers.{name}: {_in_words(recorded.met)}, and its measures say {_in_words(answer.met)}"


def _in_words(met: bool | None) -> str:
    return {True: "met", False: "not met", None: "not told"}[met]


def _value(value: Value) -> Interval | float | None:
    return _interval(value) if isinstance(value, Estimate) else value


def _interval(value: Value) -> Interval:
    mean, width = (value.mean, value.half_width) if isinstance(value, Estimate) else (None, None)
    return Interval(math.nan if mean is None else mean, math.inf if width is None else width)


def recomputable(record: Record) -> bool:
    """Whether the emulation can say anything of a record: a call of a kernel of the suite, with a result."""
    if record.shown is None or record.case not in _CASES or declaration_of(record) is None:
        return False
    if record.format not in _FORMATS:
        return False
    return record.backend == EMULATION.name or "predicted_bias" in record.measures


def sample(records: list[Record], size: int, seed: int) -> list[Record]:
    """Some of the records that the emulation can say anything of, case by case.

    Args:
        records: of a statement.
        size: how many at most.
        seed: another one draws others.
    """
    known = sorted((record for record in records if recomputable(record)), key=lambda record: record.id)
    chosen = Random(seed).sample(known, min(size, len(known)))
    return sorted(chosen, key=lambda record: (record.case, record.id))


def could_run(record: Record, bench: Workbench) -> bool:
    """Whether a cell of the emulation, which has no result, can be run anywhere."""
    if record.backend != EMULATION.name or record.case not in _CASES:
        return False
    cell = Cell(EMULATION, composed_kernel(record.kernel), Call(_CASES[record.case]), parse_format(record.format))
    return cell.experiment.refusal(cell, bench) is None


def recomputed(record: Record, heads: int, bench: Workbench | None = None) -> Iterator[str]:
    """Where the emulation does not come to what a record says, a line each.

    Args:
        record: one that is `recomputable`.
        heads: that a batch of the run had.
        bench: shares inputs with other records of the seed; None: a new one.
    """
    bench = bench or Workbench(Settings(record.seed, heads))
    if record.backend == EMULATION.name:
        cell = Cell(EMULATION, composed_kernel(record.kernel), Call(_CASES[record.case]), parse_format(record.format))
        yield from _differences(record, run_cell(cell, bench))
        return
    yield from _prediction(record, bench)


def _differences(record: Record, again: Record) -> Iterator[str]:
    for name in ("digest", "heads", "outcome", "verdict"):
        ours, theirs = getattr(again, name), getattr(record, name)
        if ours != theirs:
            yield f"{name}: {theirs}, recomputed {ours}"
    if plain_text(again) != plain_text(record):
        yield f"shown: {plain_text(record)}, recomputed {plain_text(again)}"
    for name, value in again.measures.items():
        yield from _of_measure(name, value, record)
    met = {name: answer.met for name, answer in again.answers.items()}
    if met != {name: answer.met for name, answer in record.answers.items()}:
        yield f"answers: recomputed {', '.join(f'{name} {_in_words(holds)}' for name, holds in met.items())}"


def _prediction(record: Record, bench: Workbench) -> Iterator[str]:
    """Of a device's cell: what its plan predicts on as many heads; where all bits are equal, the device's bits too."""
    case, declaration = _CASES[record.case], declaration_of(record)
    assert declaration is not None
    fmt = parse_format(record.format)
    most = bench.settings.heads * 2 ** (LOOKS - 1)
    if not 0 < record.heads <= most:
        yield f"heads: {record.heads}, and a cell draws at most {most}"
        return
    outputs: list[AttentionOutput] = []
    batches: list[Errors] = []
    drawn = 0
    while drawn < record.heads:
        output, errors = bench.case(case, fmt).emulated(len(batches), declaration)
        outputs.append(replace(output, gradients=None))  # the device's are its own
        batches.append(errors)
        drawn += output.o.shape[0] * output.o.shape[1]
    bias = merge(batches).bias
    yield from _of_measure("predicted_bias", Estimate.of(bias.mean, bias.half_width), record)
    if record.number("equal_bits") != 1.0:
        return
    first = digest(outputs[0])
    if record.digest != first:
        yield f"digest: {record.digest}, and equal_bits says that it is the emulation's, recomputed {first}"
    made_from = [bench.case(case, fmt).batch(index) for index in range(len(outputs))]
    observed = Observed(merge(batches), outputs, made_from, declaration, merge(batches), 1.0)
    for name, measure in call_measures().items():
        value = measure.of(observed)
        if value is not None and name != _OF_A_BACKWARD_PASS:
            yield from _of_measure(name, recorded(value), record)


def _of_measure(name: str, value: Value, record: Record) -> Iterator[str]:
    if not _same(value, record.measures.get(name)):
        yield f"measures.{name}: {_number(record.measures.get(name))}, recomputed {_number(value)}"


def _same(ours: Value, theirs: Value) -> bool:
    if isinstance(ours, Estimate) and isinstance(theirs, Estimate):
        return _near(ours.mean, theirs.mean) and _near(ours.half_width, theirs.half_width)
    if isinstance(ours, Estimate) or isinstance(theirs, Estimate):
        return False
    return _near(ours, theirs)


def _near(ours: float | None, theirs: float | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return math.isclose(ours, theirs, rel_tol=_CLOSE, abs_tol=_CLOSE)


def _number(value: Value) -> str:
    mean = value.mean if isinstance(value, Estimate) else value
    return "none" if mean is None else f"{mean:.6g}"
