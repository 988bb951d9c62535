"""Judging records without their device: by the suite's own checks of their numbers, and by the emulation."""

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from random import Random
from types import SimpleNamespace
from typing import cast

from msgspec import structs

from tiebreak.backends.backend import BITS_OF_INSTRUCTIONS, EMULATION, Backend
from tiebreak.backends.registry import BACKENDS
from tiebreak.backends.torch_device import PREFIX, torch_device
from tiebreak.cases.bounds import UNDECLARED
from tiebreak.cases.case import HEADS_PER_BATCH, JOINED, Case
from tiebreak.cases.claims import ROWS_ERR_APART, ROWS_ERR_TOGETHER, predicted
from tiebreak.cases.errors import Errors, merge
from tiebreak.cases.verdicts import LOOKS, BiasVerdict, Interval, judge
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.formats import Format
from tiebreak.kernels.inputs import TORCH_DTYPES
from tiebreak.kernels.kernel import Kernel, tilings
from tiebreak.laboratory.statement.format import Profile, is_users
from tiebreak.laboratory.statement.profiles import ABSENT
from tiebreak.matrix.checks import ACCURACY, GRADIENTS, ask_all
from tiebreak.matrix.experiment import Cell, Experiment
from tiebreak.matrix.experiments import kinds, offered
from tiebreak.matrix.experiments.call import FAIR_CLAIM, NO_WORSE, OneCall, shown, where_bias_is
from tiebreak.matrix.experiments.features import added_to
from tiebreak.matrix.experiments.training import MEASURED, TrainingRun, training_result
from tiebreak.matrix.measures import MORE_OF_O, OF_GRADIENTS, OF_O
from tiebreak.matrix.options import narrowing, refuse_wrong, stated
from tiebreak.matrix.record_collector import described
from tiebreak.matrix.result import Claimed, Result
from tiebreak.matrix.run import blank_record, run_cell
from tiebreak.matrix.workbench import Settings, Workbench
from tiebreak.programs.files.backend import FILES, device_text
from tiebreak.reports.errors import UsageError
from tiebreak.reports.gate.consistency import contradictions, differing
from tiebreak.reports.records.record import CLAIM, NONFINITE, PREDICTION, SKIPPED, Estimate, Record, Run, Value

_IDENTITY = ("id", "case_version", "seed", "plan", "command")  # of a record: what follows from its cell
_CLONE = frozenset({"", ".", "..", "tests", "matrix"})  # parts of the path by which pytest finds the cells in a clone
_INSTALLED = ("-p", "tiebreak.matrix.plugin", "--pyargs", "tiebreak.matrix")  # how it finds them elsewhere
_AFTER_KERNEL = frozenset({"--fair", "--no-worse-than", "--rules", "--cases"})  # what a command has behind --kernel
_OF_PREDICTION = frozenset({"predicted_bias", "prediction_difference", "equal_bits"})
_OF_EVERY_CALL = (OF_O.keys() | MORE_OF_O.keys()) - {*_OF_PREDICTION, "rounded_bias"}
_OF_GRADIENTS = frozenset({"delta_bias", *OF_GRADIENTS})
_SAID = {True: frozenset({"rules"}), False: frozenset[str]()}  # evidence that is not asked again: of --rules
_NOISE = 1e-6  # what fp64 sums leave of a number that should be 0
_WORDS = {True: "passed", False: "failed", None: "undecided"}


@dataclass(frozen=True)
class Judged:
    """A record with the cell that it says it is of."""

    record: Record
    cell: Cell
    settings: Settings  # of its run

    @property
    def is_predicted(self) -> bool:
        """True if it is of a call on a device that is compared with its plan's prediction."""
        call, declared = self.cell.experiment, self.cell.kernel.declaration
        if not isinstance(call, OneCall) or declared is None:
            return False
        return not (self.cell.backend.predicts or call.case.cancels or call.case.chaotic)

    @property
    def is_recomputable(self) -> bool:
        """True if the emulation can check its numbers: a call of a kernel of the suite, with a result."""
        emulated = self.cell.backend.predicts and isinstance(self.cell.experiment, OneCall)
        return self.record.shown is not None and not self.cell.kernel.external and (emulated or self.is_predicted)


def cells_and_faults(run: Run, profile: Profile) -> tuple[list[Judged], list[str]]:
    """Find the cells of a run's records, and what is wrong with it, a line each; the profile says seed and heads."""
    settings, kernels = _settings(run, profile), dict[tuple[str, str], Kernel]()
    cells, faults = list[Judged](), list[str]()
    for record in run.records:
        try:
            cells.append(Judged(record, _cell(record, run, kernels), settings))
        except ValueError as error:
            faults.append(f"{record.id}: {error}")
    faults += _run_faults(run, cells)
    return cells, faults + [f"{judged.record.id}: {text}" for judged in cells for text in _record_faults(judged, run)]


def _settings(run: Run, profile: Profile) -> Settings:
    """Return the command-line settings that all cells of a run share."""
    words = run.records[0].command.split() if run.records else []
    where = words[1 : words.index("--backend")] if "--backend" in words else []
    fair, rounded = bool(run.options.get("fair")), run.options.get("no-worse-than") == "rounded"
    timeout = str(run.options.get("cell-timeout") or "")
    seconds = float(timeout) if re.fullmatch(r"[0-9]+(\.[0-9]+)?", timeout) else None
    return Settings(profile.seed, profile.heads, fair, rounded, "--rules" in words, seconds, tuple(where))


def _cell(record: Record, run: Run, kernels: dict[tuple[str, str], Kernel]) -> Cell:
    """Return the cell of a record, or ValueError; `kernels` are those of the run so far, as first declared."""
    formats = {fmt.name: fmt for fmt in TORCH_DTYPES}
    of_torch = {record.backend: torch_device(record.backend)} if record.backend.startswith(PREFIX) else {}
    backends = {**BACKENDS, **of_torch}
    for field, cells in (("backend", backends), ("experiment", kinds()), ("format", formats)):
        if (value := getattr(record, field)) not in cells:
            raise ValueError(f"{field}: {value}: the suite has no such {field}")
    name, *features = record.case.split(JOINED)
    experiment = _offered(record.experiment).get(name)
    if experiment is not None and features:
        experiment = added_to(experiment, features)
    if experiment is None:
        raise ValueError(f"case: {record.case}: not one of the suite's, so it can't be verified")
    backend, card = backends[record.backend], run.options.get("as")
    backend = backend.assuming(str(card)) if card else backend
    key = record.backend, record.kernel
    kernels[key] = kernels.get(key) or _kernel(record, backend)
    return Cell(backend, kernels[key], experiment, formats[record.format])


@cache
def _offered(kind: str) -> Mapping[str, Experiment]:
    return {each.name: each for each in offered(cases_named=True) if each.kind == kind}


def _kernel(record: Record, backend: Backend) -> Kernel:
    """Return the kernel of a record; a user's, or another machine's, is replaced by its declaration."""
    words, stand_in = shlex.split(record.command), ABSENT
    origin: Sequence[str] = ()
    if is_users(record):
        begins = words.index("--kernel")
        ends = next((at for at, word in enumerate(words) if at > begins and word in _AFTER_KERNEL), len(words))
        origin = words[begins:ends]
    else:
        with suppress(ValueError):
            stand_in = kinds()[record.experiment].kernels(backend).get(record.kernel) or backend.kernel(record.kernel)
    if stand_in.composed:
        return stand_in
    declared = stand_in.declaration
    if record.plan != (declared and declared.label):  # as a vendor's may on another processor
        declared = None if record.plan is None else parse_declaration(record.plan)
    return replace(stand_in, name=record.kernel, declaration=declared, external=bool(origin), origin=tuple(origin))


def _run_faults(run: Run, cells: Sequence[Judged]) -> Iterator[str]:
    """Yield statements of a run that neither its records nor the suite support."""
    where = cells[0].settings.matrix if cells else _INSTALLED
    if where != _INSTALLED and (len(where) != 1 or {*where[0].split("/")} - _CLONE):
        yield f"command: pytest {' '.join(where)}: not where the cells are"
    named, brought = run.options.get("kernel"), any(map(is_users, run.records))
    if bool(named) is not brought:
        yield f"options.kernel: {named}, and {'a' if brought else 'no'} record is of such a kernel"
    for backend in {judged.cell.backend.name: judged.cell.backend for judged in cells}.values():
        either = {BITS_OF_INSTRUCTIONS: backend.bits}  # which of them, the processor tells
        in_record, ours = (either.get(text, text) for text in (run.evidence(backend.name), backend.evidence))
        if in_record != ours:
            yield f"platform.evidence.{backend.name}: {in_record}, and the suite says {ours}"
    if any(judged.cell.backend.name == FILES.name for judged in cells):
        device, text = run.platform.get("stated"), run.platform.get("assumed", {}).get(FILES.name)
        if not isinstance(device, Mapping) or text != device_text(device):
            yield f"platform.stated: {device}, and platform.assumed.{FILES.name}: {text}"
        if measured := [name for name in ("gpu", "device") if run.platform.get(name)]:
            yield f"platform.{measured[0]}: outputs from files are of a device that is stated, not measured"
    try:
        refuse_wrong(stated(run.options))
    except UsageError as error:
        yield f"options: {error}"
    if len(cells) == len(run.records):  # else it can't be described
        expected = described(run, {each.record.id: each.cell for each in cells})
        for table in ("measures", "checks", "cases", "experiments", "explanations", "plans"):
            ours, theirs = getattr(expected, table), getattr(run, table)
            for name in sorted(ours.keys() | theirs.keys()):
                if ours.get(name) != theirs.get(name):
                    yield f"{table}.{name}: not as the suite describes it"
        yield from _narrowing_faults(run, cells)


def _narrowing_faults(run: Run, cells: Sequence[Judged]) -> Iterator[str]:
    """Yield narrowings of a run that its options, or the cells that pytest's own leave, do not explain."""
    of_pytest = [frozenset(each.names) for each in run.narrowing if each.field == "id"]
    if of_pytest not in ([], [frozenset(record.id for record in run.records)]):
        yield "narrowing: its cells are not those of the records"
    implied = {each.field: each for each in narrowing(stated(run.options), [judged.cell for judged in cells], ())}
    in_file = {each.field: each for each in run.narrowing if each.field != "id"}
    for field in sorted(implied.keys() | in_file.keys()):
        ours, theirs = implied.get(field), in_file.get(field)
        if ours is None or theirs is None or ours.given != theirs.given:
            yield f"narrowing: {field}: not what the options come to"
        elif extra := {*theirs.names} - {*ours.names} if not of_pytest else {*ours.names} - {*theirs.names}:
            yield f"narrowing: {field}: {', '.join(sorted(extra))}: not of this run"


def _record_faults(judged: Judged, run: Run) -> Iterator[str]:
    """Yield statements of a record that neither its cell nor its own numbers support."""
    record, cell, settings = judged.record, judged.cell, judged.settings
    blank = blank_record(cell, settings, record.outcome)
    for name in _IDENTITY:
        if getattr(record, name) != getattr(blank, name):
            yield f"{name}: {getattr(record, name)}, and its cell has {getattr(blank, name)}"
    yield from contradictions(record, run)
    if record.excused is not None and all(answer.passed for answer in record.answers.values()):
        yield "excused: and nothing failed"
    answered = isinstance(cell.experiment, OneCall | TrainingRun)  # of other kinds running it alone tells
    if record.outcome == SKIPPED and cell.kernel.composed and answered:
        here = replace(cell, backend=replace(cell.backend, device="cpu"))
        if cell.experiment.refusal(here, Workbench(Settings(settings.seed, HEADS_PER_BATCH))) != record.skipped:
            yield f"skipped: {record.skipped}, and it can be run"
    if record.shown is None:
        return
    if record.digest is None and answered:
        yield "digest: missing"
    if isinstance(cell.experiment, OneCall):
        yield from _number_faults(judged, cell.experiment.case)
        yield from _answer_faults(record, _call_result(judged, cell.experiment.case))
    elif isinstance(cell.experiment, TrainingRun):
        yield from (f"measures.{name}: missing" for name in sorted(MEASURED.keys() - record.measures.keys()))
        measures = {name: _number(record, name) for name in MEASURED}
        yield from _answer_faults(record, training_result(cell.experiment.case, cell.kernel, settings, measures))


def _number_faults(judged: Judged, case: Case) -> Iterator[str]:
    """Yield where the numbers of a call contradict each other."""
    record, fmt = judged.record, judged.cell.fmt
    needed = _OF_EVERY_CALL | (_OF_PREDICTION if judged.is_predicted else frozenset())
    yield from (f"measures.{name}: missing" for name in sorted(needed - record.measures.keys()))
    first, there_are = _heads_at_once(case, judged.settings), case.fixed_heads.heads if case.fixed_heads else math.inf
    drawn = list(dict.fromkeys(min(first << look, there_are) for look in range(LOOKS)))
    if record.heads not in drawn:
        yield f"heads: {record.heads}, and a cell draws {', '.join(map(str, drawn))}"
    elif record.number("elements") != record.heads * _elements(case, fmt):
        yield f"measures.elements: {record.number('elements')}, and {record.heads} heads have others"
    bias, foretold, apart = (_number(record, name) for name in ("bias", "predicted_bias", "prediction_difference"))
    if judged.is_predicted and not record.number(NONFINITE) and abs(bias - foretold - apart) > _NOISE:
        yield "measures: bias less predicted_bias is not prediction_difference"


def _heads_at_once(case: Case, settings: Settings) -> int:
    """Return how many heads a cell draws at first."""
    most = case.fixed_heads.heads if case.fixed_heads else case.most_heads
    return settings.heads if most is None else min(settings.heads, most)


@cache
def _elements(case: Case, fmt: Format) -> int:
    """Return how many elements of O a head has."""
    return math.prod(case.make(1, 0, HEADS_PER_BATCH, fmt).do.shape[2:])


def _answer_faults(record: Record, result: Result) -> Iterator[str]:
    """Yield where a record is not what its numbers imply."""
    for name in ("verdict", "tied", "in_training", "shown", "heads"):
        if getattr(record, name) != getattr(result, name):
            yield f"{name}: {getattr(record, name)}, and its measures come to {getattr(result, name)}"
    answers = ask_all(result)
    yield from (f"answers.{name}: asked, and such a cell is not" for name in record.answers if name not in answers)
    for name, answer in answers.items():
        given = record.answers.get(name)
        if given is None:
            yield f"answers.{name}: not asked, and such a cell is: {answer.why or answer.asked}"
        elif given.passed is not answer.passed:
            yield f"answers.{name}: {_WORDS[given.passed]}, and its measures say {_WORDS[answer.passed]}"
        elif (given.asked, given.source) != (answer.asked, answer.source) and name != ACCURACY:
            yield f"answers.{name}: asks for {given.asked}, and such a cell for {answer.asked}"


def _call_result(judged: Judged, case: Case) -> Result:
    """Return the result that a call's measures imply; what only its device shows is as in the record."""
    record, cell, declared = judged.record, judged.cell, judged.cell.kernel.declaration
    measures = {name: _interval(it) if isinstance(it, Estimate) else _number(record, name)
                for name, it in record.measures.items()}  # fmt: skip
    nonfinite, bias = record.number(NONFINITE) or 0.0, _interval(record.measures.get("bias"))
    verdict = None if case.cancels else (BiasVerdict.NONFINITE if nonfinite else judge(bias)).value
    tied, in_training = where_bias_is(verdict, measures, case.formats(cell.fmt).output)
    backward = record.answers.get(GRADIENTS)
    raised = backward is not None and backward.passed is False and "gradients_nonfinite" not in measures
    prediction = None
    if judged.is_predicted and declared is not None:  # how many elements of it are lost is not recorded
        apart = _interval(record.measures.get("prediction_difference"))
        passed = record.passed(PREDICTION) if nonfinite else predicted(apart)
        prediction = Claimed(f"what {declared.label} predicts", "", passed, "")
    return Result(
        measures=measures,
        shown=shown(nonfinite, _number(record, "gain"), bias.mean, verdict),
        verdict=verdict,
        tied=tied,
        in_training=in_training,
        claims=tuple(_claims(judged, case)),
        prediction=prediction,
        backward_error=backward.why if backward is not None and raised else None,
        external=cell.kernel.external,
        bound_of=(declared or UNDECLARED).plan.name,
        heads=record.heads,
    )


def _claims(judged: Judged, case: Case) -> Iterator[Claimed]:
    """Yield a case's claims about a kernel. A record does not tell a user's tiles, which may decide them."""
    record, kernel, answer = judged.record, judged.cell.kernel, judged.record.answers.get(CLAIM)
    tiled = tilings(kernel.declaration) if kernel.declaration is not None and kernel.external else [kernel.declaration]
    claims = [claim for each in tiled if (claim := case.claim_about(each, judged.cell.fmt)) is not None]
    of_users = kernel.external and case.failure
    if of_users and judged.settings.fair:
        claims = [FAIR_CLAIM]
    elif kernel.external and kernel.declaration is not None:
        wording = answer.asked.removesuffix(f", {NO_WORSE[0]}") if answer is not None else ""
        claims = [claim for claim in claims if claim.expectation.name == wording]
    for claim in claims[:1]:
        expectation = claim.expectation
        # A record has only the means of rows, without their interval.
        rows = expectation in (ROWS_ERR_TOGETHER, ROWS_ERR_APART)
        passed = record.passed(CLAIM) if rows else expectation.passed(_errors(record))
        yield Claimed(expectation.name, claim.source, passed, "", expectation.waives)
    if of_users and judged.settings.as_rounded:
        yield Claimed(
            *NO_WORSE, record.passed(CLAIM), ""
        )  # the difference from what it is compared with is not recorded


def _errors(record: Record) -> Errors:
    """Return the errors that claims need, from the numbers of a record; NaN where it has none."""
    numbers = {each.name: _number(record, each.name) for each in fields(Errors)}
    # Claims need the ratio of the sizes, and whether that of O is 0.
    numbers |= dict.fromkeys(("gain", "output_size"), _number(record, "gain"))
    return cast(Errors, SimpleNamespace(**numbers, bias=_interval(record.measures.get("bias"))))


def _number(record: Record, name: str) -> float:
    number = record.number(name)
    return math.nan if number is None else number


def _interval(value: Value) -> Interval:
    mean, width = (value.mean, value.half_width) if isinstance(value, Estimate) else (None, None)
    return Interval(math.nan if mean is None else mean, math.inf if width is None else width)


def sample(cells: Iterable[Judged], size: int, seed: int) -> list[Judged]:
    """Draw as many records that the emulation can check, or all, case by case; another seed draws others."""
    able = sorted((judged for judged in cells if judged.is_recomputable), key=lambda each: each.record.id)
    chosen = Random(seed).sample(able, min(size, len(able)))
    return sorted(chosen, key=lambda each: (each.record.case, each.record.id))


def recomputed(judged: Judged, bench: Workbench) -> Iterator[str]:
    """Run the cell of a recomputable record again on the emulation; yield where the result differs.

    For a device's cell this gives the plan's prediction; where all bits are equal, all measures of O.
    """
    record, cell = judged.record, replace(judged.cell, backend=EMULATION)
    if judged.cell.backend.predicts:
        again = run_cell(cell, bench)
        for part in ("measures", "answers", "evidence"):
            more = getattr(record, part).keys() - getattr(again, part).keys() - _SAID[judged.settings.rules]
            yield from (f"{part}.{name}: recomputed, there is none" for name in sorted(more))
    else:
        measures: dict[str, Value] = {"predicted_bias": _predicted_bias(judged, bench)}
        again = record
        if record.number("equal_bits") == 1.0:
            again = run_cell(cell, bench)
            measures |= {name: value for name, value in again.measures.items() if name not in _OF_GRADIENTS}
        of_o = {name: getattr(again, name) for name in ("digest", "heads", "verdict", "shown")}
        drawn = {name: again.evidence.get(name, value) for name, value in record.evidence.items()}
        again = structs.replace(record, measures=measures, evidence=drawn, **of_o)
        record = structs.replace(record, measures={name: record.measures.get(name) for name in measures})
    for at, ours, theirs in differing(again, record):
        yield f"{at[1:]}: {theirs}, recomputed {ours}"


def _predicted_bias(judged: Judged, bench: Workbench) -> Estimate:
    """Return the bias of the plan that a kernel declares, on the heads that its cell has drawn."""
    call, declared = judged.cell.experiment, judged.cell.kernel.declaration
    assert isinstance(call, OneCall)
    assert declared is not None
    batches = -(-judged.record.heads // _heads_at_once(call.case, bench.settings))
    case = bench.case(call.case, judged.cell.fmt)
    bias = merge([case.emulated(index, declared)[1] for index in range(batches)]).bias
    return Estimate.of(bias.mean, bias.half_width)
