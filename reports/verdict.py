"""What a run says of a kernel: an object, from which the first lines that its author reads are made, and JSON."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from textwrap import shorten
from typing import Annotated

from msgspec.structs import replace

from tiebreak.reports.names import first_few
from tiebreak.reports.records.decode import SCHEMA, Count, Data, FileData, Schema, decode, encode, one_of
from tiebreak.reports.records.order import grouped
from tiebreak.reports.records.record import (
    BIASED,
    CRASHED,
    FELL,
    FOLLOWED_BACKWARD,
    INCONCLUSIVE,
    NO_TIME,
    NONFINITE,
    PREDICTION,
    SKIPPED,
    TIMED_OUT,
    UNBIASED,
    UNDECIDED,
    UNEXPLAINED,
    VERDICTS,
    Explanation,
    PlanRecord,
    Record,
    Run,
    VerdictName,
)
from tiebreak.reports.tables.changes import finding_text
from tiebreak.reports.tables.marks import plain_text, shown_text
from tiebreak.reports.tables.plans import explanation_text, percent
from tiebreak.reports.tables.rerun import runnable
from tiebreak.reports.tables.rules import answers_of
from tiebreak.reports.tables.run import counted

# What there is to say of a kernel, the worst first. A run falls with any of the first three.
DID_NOT_RUN, WRONG, NOT_TOLD, TIED, FAIR = "did not run", "wrong", "not told", "biased where O itself ties", "fair"
SEVERITIES = (DID_NOT_RUN, WRONG, NOT_TOLD, BIASED, TIED, FAIR)
FAILING = SEVERITIES[:3]
NOT_ASKED = "no failure input was run, nothing is known of its bias"
SeverityName = Annotated[str, one_of(SEVERITIES)]
_LISTED = 8  # cases of a list that are named; the table has them all
_WIDTH = 11
_TIED, _OWN = "where O itself ties", "by its own rounding"  # whose doing a bias is
_BRIEF = 100  # characters of a reason, in a line of many
_SOFTWARE = ("python", "torch", "numpy", "triton", "cpu", "level")  # of a platform, what a verdict says of it


class Finding(Data, frozen=True, omit_defaults=False):
    """One thing that there is to say of a kernel."""

    name: str  # a word or two, by which it is looked up
    text: str  # in words
    cases: tuple[str, ...] = ()  # that it is about, if it is about some


class FallenCell(Data, frozen=True, omit_defaults=False):
    """A cell that fails the run."""

    cell: str  # backend-kernel-case-format
    outcome: str  # fell, inconclusive, crashed, timed_out
    reasons: tuple[str, ...]  # why
    command: str  # runs it again


class Verdict(Data, frozen=True, omit_defaults=False):
    """What a run says of one kernel on one backend."""

    headline: str  # the worst that there is to say, in one line; a word in capitals where `ok` is False
    severity: SeverityName | None  # of it; None: no failure input was run, so nothing is known of a bias
    kernel: str  # its name
    backend: str  # with what was assumed of a device that was not there
    formats: tuple[str, ...]  # of q, k, v and O
    ok: bool  # as the exit code: enough ran, and nothing fell; a bias that nobody has claimed away falls nothing
    complete: bool  # False: the run was interrupted
    inputs: Count  # failure inputs, on which rounding is known to fail, that were run
    biased: Count  # of them: the mean error of O is not 0, beyond the margin, at 99.9 % confidence
    nonfinite: Count  # of them: NaN or Inf where the exact result is finite
    tied: Count | None  # of the biased: as biased as a correctly rounded O, since O itself ties; None: not looked at
    unknown: Count  # of them: too few heads to tell, or no result
    findings: tuple[Finding, ...]  # what there is to say, the worst first
    fell: tuple[FallenCell, ...] = ()  # cells that fail the run
    failures: tuple[str, ...] = ()  # what fails the run though no cell fell, as the gate
    plan: Explanation | None = None  # that explains the bits of a kernel that declares none
    declared: str | None = None  # the plan that it declares
    in_training: VerdictName | None = None  # whether its gradients, or short training runs, contain the bias
    share: float | None = None  # of bits that agree with the plan, mean over the cells that were compared
    cells: Mapping[str, Count] = {}  # by outcome
    left: Count = 0  # cells that were not done: the run was interrupted, or its budget was spent
    seed: Count = 0  # of all inputs
    versions: Mapping[str, str] = {}  # of the software, and what it ran on
    command: str = ""  # runs all of it again

    @property
    def statement(self) -> str:
        """The headline without the names that it begins with."""
        return self.headline.removeprefix(_names(self.kernel, self.backend, self.formats))

    @property
    def text(self) -> str:
        """A headline, and a line for each finding."""
        return "\n".join([self.headline, *(f"  {finding.name:{_WIDTH}} {finding.text}" for finding in self.findings)])

    def __str__(self) -> str:
        """As `tiebreak check` prints it."""
        return self.text


class Verdicts(FileData, frozen=True):
    """What `tiebreak check --json` writes."""

    schema: Schema  # version of this layout
    ok: bool  # of all of them, and there are some
    verdicts: tuple[Verdict, ...]  # one a kernel and backend


def as_json(verdicts: Sequence[Verdict]) -> str:
    """Return what `tiebreak check --json` writes."""
    ok = bool(verdicts) and all(verdict.ok for verdict in verdicts)
    return encode(Verdicts(SCHEMA, ok, tuple(verdicts)), indent=2) + "\n"


def from_json(text: str) -> list[Verdict]:
    """Return the verdicts that `as_json` wrote."""
    return list(decode(text, Verdicts).verdicts)


def verdicts(run: Run, command: str = "", failures: Sequence[str] = ()) -> list[Verdict]:
    """Return what a run says of its kernels, in the order of their first records.

    Args:
        run: its records.
        command: runs it again.
        failures: what fails it though no cell fell.
    """
    kernels = grouped(run.records, lambda record: (record.backend, record.kernel))
    return [_Kernel(*names, records, run).verdict(command, failures) for names, records in kernels.items()]


class _Kernel:
    """One kernel on one backend, as a run has it."""

    def __init__(self, backend: str, kernel: str, records: Sequence[Record], run: Run) -> None:
        self.name, self.backend, self.records, self.run = kernel, run.backend_text(backend), records, run
        self.formats = tuple(dict.fromkeys(record.format for record in records))
        self.explanation = run.explanations.get(f"{backend}-{kernel}")
        failure = {name for name, case in run.cases.items() if case.failure}
        backward = {name for name, case in run.cases.items() if case.backward}
        wrong = {name for name, check in run.checks.items() if check.wrong}
        ran = [record for record in records if record.outcome != SKIPPED]
        self.asked = [record for record in ran if record.case in failure]
        self.biased = [record for record in self.asked if record.verdict == BIASED]
        self.nonfinite = [record for record in self.asked if record.verdict == NONFINITE]
        self.elsewhere = [
            record for record in ran if record.case not in failure and record.verdict in (BIASED, NONFINITE)
        ]
        self.ran_backward = [record for record in ran if record.case in backward]
        self.predicted = [record for record in records if PREDICTION in record.answers]
        self.fell = [record for record in records if record.fails]
        self.wrong = [record for record in self.fell if wrong & set(_unmet(record))]
        self.untold = [record for record in self.fell if record.outcome == INCONCLUSIVE]
        self.left_out = [record for record in records if record.skipped == NO_TIME]
        self.enough = run.complete and not any(run.cases[record.case].needed for record in self.left_out)
        unfinished = [name for name in (*run.not_run, *run.running) if name.startswith(f"{backend}-{kernel}-")]
        self.left = len(unfinished) + len(self.left_out)
        # Of the inputs on which it is biased, those where O itself ties; None: not looked at.
        tied = [record.tied for record in self.biased]
        self.tied = None if None in tied else sum(map(bool, tied))
        # The one plan that it declares, and that something was predicted from.
        plans = {record.plan for record in self.predicted}
        self.declared = (plans.pop() or "") if len(plans) == 1 else ""
        # The share of bits that agree with that.
        shares = [self._number(record, "agreement") for record in self.predicted]
        told = [share for share in shares if share is not None]
        self.agreed = sum(told) / len(told) if told else None
        self.severity = self._severity()

    def verdict(self, command: str, failures: Sequence[str]) -> Verdict:
        """Return what there is to say of it."""
        run, explained = self.run, self.explanation
        cells = Counter(record.outcome for record in self.records if record.skipped != NO_TIME)
        named = _names(self.name, self.backend, self.formats)
        # Whether gradients or training runs contain a bias: the worst of what they say.
        contained = [record.in_training for record in self.records if record.in_training is not None]
        return Verdict(
            headline=f"{named}{self._extent(cells.total())}{self._fallen(failures)}{self._statement()}",
            severity=self.severity,
            kernel=self.name,
            backend=self.backend,
            formats=self.formats,
            ok=self.enough and self.severity != DID_NOT_RUN and not self.fell and not failures,
            complete=run.complete,
            inputs=len(self.asked),
            biased=len(self.biased),
            nonfinite=len(self.nonfinite),
            # What crashed, or has too few heads, is no sign of health.
            unknown=sum(record.verdict in (None, UNDECIDED) for record in self.asked),
            tied=self.tied,
            findings=tuple(self._findings()),
            fell=tuple(FallenCell(each.id, each.outcome, each.reasons, runnable(each.command)) for each in self.fell),
            failures=tuple(failures),
            plan=explained,
            declared=self.declared or None,
            in_training=max(contained, key=VERDICTS.index, default=None),
            share=self.agreed if explained is None else explained.share,
            cells=dict(cells),
            left=self.left,
            seed=self.records[0].seed,
            versions={name: str(run.platform[name]) for name in _SOFTWARE if run.platform.get(name)},
            command=command,
        )

    def _severity(self) -> str | None:
        if all(record.shown is None and record.outcome != FELL for record in self.records):
            return DID_NOT_RUN
        if self.wrong or self.untold:
            return WRONG if self.wrong else NOT_TOLD
        if self.biased and self.tied == len(self.biased) and not self.nonfinite:
            return TIED
        if self.biased or self.nonfinite:  # NaN that fells nothing is as a case claims of its kind
            return BIASED
        told = all(record.verdict == UNBIASED for record in self.asked)
        return None if not self.asked else FAIR if told else NOT_TOLD

    def _statement(self) -> str:
        """Return the worst that there is to say of it."""
        if self.severity == DID_NOT_RUN:
            return self._never_ran()
        if cells := self.wrong or self.untold:
            worst = max(cells, key=lambda record: len(_unmet(record)))  # the first of equals
            inputs = counted(sum(record.outcome != SKIPPED for record in self.records), "input")
            word = "WRONG" if self.wrong else "NOT TOLD"
            return f"{word} on {len(cells)} of {inputs} ({worst.case}: {self._brief(worst)})"
        if not self.asked:
            return NOT_ASKED
        unbiased = sum(record.verdict == UNBIASED for record in self.asked)
        words = {"biased": len(self.biased), "NaN or Inf": len(self.nonfinite)}
        said = [f"{word} on {number}" for word, number in words.items() if number]
        unknown = len(self.asked) - unbiased - sum(words.values())
        told = f"{' and '.join(said) or f'unbiased on {unbiased}'} of {counted(len(self.asked), 'failure input')}"
        return f"{told}{f', {unknown} not known' if unknown else ''}{self._doing()}"

    def _never_ran(self) -> str:
        """Return why there is no result at all."""
        reasons = Counter("; ".join(record.reasons) for record in self.records)
        ended = Counter("; ".join(record.reasons) for record in self.records if record.outcome != SKIPPED)
        word = "never ran" if ended else "INCOMPLETE, no cell ran"
        return f"{word}: {(ended or reasons).most_common(1)[0][0]}"

    def _doing(self) -> str:
        """Return whose doing the bias is."""
        biased, tied = len(self.biased), self.tied
        if not biased or tied is None:
            return ""
        if tied in (0, biased):
            return f", {_OWN if tied == 0 else _TIED}"
        return f": {tied} {_TIED}, {biased - tied} {_OWN}"

    def _extent(self, done: int) -> str:
        """Return how much of the work was not done, where some was left."""
        if not self.left or not done:
            return ""
        word, why = "" if self.enough else "INCOMPLETE, ", "in its budget" if self.run.complete else "done"
        return f"{word}{done} of {counted(done + self.left, 'cell')} {why}: "

    def _fallen(self, failures: Sequence[str]) -> str:
        """Return that the run fell, where it did for another reason than the worst that there is to say."""
        if self.severity in FAILING or not (self.fell or failures):
            return ""
        checks = dict.fromkeys(name for record in self.fell for name in _unmet(record))
        by = f"by {', '.join(checks)} on {counted(len(self.fell), 'input')}"
        return f"FELL {by if self.fell else f'({_first_clause(failures[0])})'}, "

    def _brief(self, record: Record) -> str:
        """Return what is wrong in a cell: the error of O where that is large, and the first clause of a reason."""
        unmet = _unmet(record)
        clause = _first_clause(record.answers[unmet[-1]].why if unmet else record.outcome)
        if record.shown is None or record.verdict == UNBIASED:
            return clause
        unit = self.run.measures[record.shown.kind].unit if record.shown.kind in self.run.measures else ""
        return f"{' '.join(filter(None, (_bare(record), unit)))}, {clause}"

    def _findings(self) -> Iterator[Finding]:
        ran, news = self.severity != DID_NOT_RUN, self.severity in (BIASED, TIED)
        ended = [record for record in self.records if record.outcome in (CRASHED, TIMED_OUT)]  # no result, and no pass
        undecided = [record for record in self.asked if record.verdict == UNDECIDED]
        yield from _told({"looks like": self._slip(), "fell": self._unmet_checks() if ran else ""})
        yield from _of_cells({"ended": ended if ran else []})
        yield from _told({"in training": "; ".join(filter(None, (self._in_gradients(), self._in_runs())))})
        yield from _of_cells({"biased": self.biased, "NaN": self.nonfinite, "not known": undecided,
                              "elsewhere": self.elsewhere})  # fmt: skip
        for record in self.records:
            if text := finding_text(record):
                yield Finding(record.case, text, (record.case,))
        yield from _told(
            {
                "fix": self._fix() if news else "",
                "checks": self._met_checks(),
                "rounding": self._rounding(),
                "backward": self._backward(),
                "rules": self._rules(),
                "skipped": self._skipped(),
            }
        )
        if left_out := tuple(record.case for record in self.left_out):
            yield Finding("left out", first_few(left_out, _LISTED), left_out)

    def _fix(self) -> str:
        """Return whether the shift that it follows is a fix for ties, and where that fails."""
        failing = len(self.biased) + len(self.nonfinite)
        plans, declared = self._plans(), self.declared
        if not plans:
            return f"not known: it {f'is not what {declared} predicts' if declared else 'follows no known plan'}"
        rules = sorted({plan.rule for plan in plans})
        if not any(plan.fix for plan in plans):
            return "none for ties: each row is shifted by its maximum, also where the maximum repeats"
        if not all(plan.fix for plan in plans):
            return f"not known: these cases do not tell {' from '.join(rules)}"
        held = sum(record.verdict is not None for record in self.asked) - failing
        return f"partial: {' or '.join(rules)}; fails on the {counted(failing, 'input')} above, holds on {held}"

    def _plans(self) -> list[PlanRecord]:
        """Return what it may follow: by its bits, or as it declares where that predicts it."""
        explained, names = self.explanation, list[str]()
        if self.declared and all(record.met(PREDICTION) for record in self.predicted):
            names = [self.declared]
        elif explained is not None and explained.state != UNEXPLAINED:
            names = list(explained.plans)
        return [self.run.plans[name] for name in names if name in self.run.plans]

    def _slip(self) -> str:
        """Return the usual mistake that explains the wrong outputs of most cells, then of most bits."""
        found: dict[str, list[float]] = {}
        for record in self.records:
            for about, share in record.evidence.get("slips", {}).items():
                found.setdefault(about, []).append(share)
        if not found:
            return ""
        about, shares = max(found.items(), key=lambda pair: (len(pair[1]), sum(pair[1])))
        return f"{about} ({percent(sum(shares) / len(shares))} of bits in {counted(len(shares), 'cell')})"

    def _unmet_checks(self) -> str:
        """Checks that were not met, with where."""
        unmet = grouped(
            ((name, record.case) for record in self.records for name in record.answers if record.met(name) is False),
            lambda pair: pair[0],
        )
        return "; ".join(f"{name} in {first_few([case for _, case in own], _LISTED)}" for name, own in unmet.items())

    def _met_checks(self) -> str:
        """Checks that were met wherever they were asked."""
        asked, met = Counter[str](), Counter[str]()
        for record in self.records:
            asked.update(record.answers.keys())
            met.update(name for name, answer in record.answers.items() if answer.met)
        held = [f"{name} {number}" for name, number in asked.items() if met[name] == number]
        return f"met wherever asked: {', '.join(held)} cells" if held else ""

    def _in_gradients(self) -> str:
        """Return whether its gradients contain the bias of O, on the inputs where it is biased."""
        measured = [record for record in self.biased if record.in_training is not None]
        contained = [record for record in measured if record.in_training == BIASED]
        if contained:
            shares = [f"{100 * (self._carried(record) or 0.0):+.2g} % in {record.case}" for record in contained]
            return f"its gradients contain it: delta is off by {first_few(shares, _LISTED)}"
        if any(record.in_training == UNDECIDED for record in measured):
            return "not known: too few heads to tell whether its gradients contain it"
        if measured:
            largest = 100 * max(abs(self._carried(record) or 0.0) for record in measured)
            return f"harmless: its gradients don't contain it, delta is off by {largest:.1g} % at most"
        return self._unmeasured() if self.biased else ""

    def _unmeasured(self) -> str:
        """Return why nothing is known of its gradients where it is biased."""
        ran = self.ran_backward
        if not ran:
            return "not measured: no input was run backward"
        if any(self._carried(record) is not None for record in ran):
            return "not measured: no input on which it is biased was run backward"
        failed = any(record.fails for record in ran)
        return f"not measured: {'its backward pass gave no gradients' if failed else 'it has no backward pass'}"

    def _carried(self, record: Record) -> float | None:
        """Return how much of a bias of O its gradients contain, as a share."""
        return self._number(record, "carried")

    def _number(self, record: Record, role: str) -> float | None:
        """Return the number of the measure that has a role in a record's kind of experiment, such as `carried`."""
        name: str | None = getattr(self.run.experiments.get(record.experiment), role, None)
        return record.number(name) if name else None

    def _in_runs(self) -> str:
        """Return whether short training runs drift as with kernels whose bias training feels."""
        pooled = [record for record in self.records if record.experiment in self.run.pooled]
        ran = [record for record in pooled if record.in_training is not None]
        if not ran:
            return ""
        words = ((BIASED, "drifts in"), (UNDECIDED, "not known in"))
        texts = []
        for verdict, word in words:
            names = [f"{record.case} {plain_text(record)}" for record in ran if record.in_training == verdict]
            if names:
                texts.append(f"{word} {len(names)} of {counted(len(ran), 'training run')}: {', '.join(names)}")
        return "; ".join(texts) or f"no drift in {counted(len(ran), 'training run')}"

    def _rounding(self) -> str:
        if self.explanation is not None:
            return explanation_text(self.explanation)
        if not self.declared:
            return ""
        met = sum(record.met(PREDICTION) is True for record in self.predicted)
        bits = "" if self.agreed is None else f", {percent(self.agreed)} of bits"
        return f"declares {self.declared}; as predicted in {met} of {len(self.predicted)} cells{bits}"

    def _backward(self) -> str:
        """Return which known backward pass its gradients come from."""
        cells = [record.evidence["backward"] for record in self.records if record.evidence.get("backward")]
        if not cells:
            ran = self.ran_backward
            silent = ran and not any(record.fails or self._carried(record) is not None for record in ran)
            return "none: autograd has no gradients of what it returns" if silent else ""
        common = [name for name in cells[0] if all(name in cell for cell in cells)]
        shares = {name: [share for cell in cells for share in cell[name].values()] for name in common}
        nearest = max(shares, key=lambda name: (min(shares[name]) >= FOLLOWED_BACKWARD, sum(shares[name])))
        agreed = f"{percent(sum(shares[nearest]) / len(shares[nearest]))} of bits in {counted(len(cells), 'cell')}"
        if min(shares[nearest]) >= FOLLOWED_BACKWARD:
            return f"follows {nearest}: {agreed}"
        return f"unexplained: nearest is {nearest} with {agreed}"

    def _rules(self) -> str:
        """Return which acceptance rules in public use it passes."""
        told = [(record.case, name, answer) for record in self.records for name, answer in answers_of(record).items()]
        failed = grouped(((name, case) for case, name, answer in told if answer.passed is False), lambda pair: pair[0])
        passed = {name for _, name, answer in told if answer.passed} - failed.keys()
        if not passed and not failed:
            return ""
        texts = [
            f"{name} ({own[0][1] if len(own) == 1 else counted(len(own), 'input')})" for name, own in failed.items()
        ]
        turned = f"; turned down by {first_few(texts, _LISTED)}" if texts else ""
        return f"passes {len(passed)} of {counted(len(passed) + len(failed), 'acceptance rule')} on every input{turned}"

    def _skipped(self) -> str:
        skipped = (record.skipped for record in self.records if record.outcome == SKIPPED)
        reasons = Counter(why for why in skipped if why != NO_TIME)
        texts = [f"{counted(number, 'cell')}: {why}" for why, number in reasons.items()]
        return shorten("; ".join(texts), _BRIEF, placeholder=" ...")


def _names(kernel: str, backend: str, formats: Sequence[str]) -> str:
    return f"{kernel} on {backend}, {', '.join(formats)}: "


def _first_clause(reason: str) -> str:
    return shorten(reason.partition("; ")[0], _BRIEF, placeholder=" ...")


def _unmet(record: Record) -> list[str]:
    """Checks that a cell does not meet; where it meets none, those that are not told."""
    unmet = [name for name, answer in record.answers.items() if answer.met is False]
    return unmet or [name for name, answer in record.answers.items() if answer.met is None]


def _told(texts: Mapping[str, str]) -> Iterator[Finding]:
    yield from (Finding(name, text) for name, text in texts.items() if text)


def _of_cells(named: Mapping[str, Sequence[Record]]) -> Iterator[Finding]:
    for name, records in named.items():
        texts = [f"{record.case} {_bare(record)}" for record in records]
        if texts:
            yield Finding(name, first_few(texts, _LISTED), tuple(record.case for record in records))


def _bare(record: Record) -> str:
    """Return what tables show without the verdict, which its line says."""
    return plain_text(record) if record.shown is None else shown_text(replace(record.shown, verdict=None))
