"""What a run says of a kernel: an object, from which the first lines that its author reads are made, and JSON."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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
    """What a run says of its kernels, in the order of their first records.

    Args:
        run: its records.
        command: runs it again.
        failures: what fails it though no cell fell.
    """
    kernels = grouped(run.records, lambda record: (record.backend, record.kernel))
    return [_Kernel(*names, records, run).verdict(command, failures) for names, records in kernels.items()]


@dataclass(frozen=True)
class _Kernel:
    """One kernel on one backend, as a run has it."""

    backend: str
    kernel: str
    records: Sequence[Record]  # its own
    run: Run

    def verdict(self, command: str, failures: Sequence[str]) -> Verdict:
        """What there is to say of it."""
        run, asked = self.run, self._asked
        fell = tuple(
            FallenCell(record.id, record.outcome, record.reasons, runnable(record.command))
            for record in self.records
            if record.fails
        )
        explained, cells = self._explanation, Counter(record.outcome for record in self._begun)
        extent, fallen = self._extent(sum(cells.values())), self._fallen(failures)
        return Verdict(
            headline=f"{self.kernel} on {run.backend_text(self.backend)}, {', '.join(self._formats)}: "
            f"{extent}{fallen}{self._statement}",
            severity=self._severity,
            kernel=self.kernel,
            backend=run.backend_text(self.backend),
            formats=self._formats,
            ok=self._enough and self._severity != DID_NOT_RUN and not fell and not failures,
            complete=run.complete,
            inputs=len(asked),
            biased=len(self._failing(BIASED)),
            nonfinite=len(self._failing(NONFINITE)),
            # What crashed, or has too few heads, is no sign of health.
            unknown=sum(record.verdict in (None, UNDECIDED) for record in asked),
            tied=self._tied,
            findings=tuple(self._findings()),
            fell=fell,
            failures=tuple(failures),
            plan=explained,
            declared=self._declared or None,
            in_training=self._contained,
            share=explained.share if explained is not None else self._agreed,
            cells=dict(cells),
            left=self._left,
            seed=self.records[0].seed,
            versions={name: str(run.platform[name]) for name in _SOFTWARE if run.platform.get(name)},
            command=command,
        )

    @cached_property
    def _severity(self) -> str | None:
        if all(record.shown is None and record.outcome != FELL for record in self.records):
            return DID_NOT_RUN
        if self._wrong:
            return WRONG
        if self._untold:
            return NOT_TOLD
        if biased := len(self._failing(BIASED)):
            return TIED if self._tied == biased and not self._failing(NONFINITE) else BIASED
        if self._failing(NONFINITE):  # as a case claims of its kind
            return BIASED
        told = all(record.verdict == UNBIASED for record in self._asked)
        return None if not self._asked else FAIR if told else NOT_TOLD

    @property
    def _statement(self) -> str:
        """The worst that there is to say of it."""
        if self._severity == DID_NOT_RUN:
            return self._never_ran()
        if cells := self._wrong or self._untold:
            worst = max(cells, key=lambda record: len(self._unmet(record)))  # the first of equals
            inputs = counted(sum(record.outcome != SKIPPED for record in self.records), "input")
            word = "WRONG" if self._wrong else "NOT TOLD"
            return f"{word} on {len(cells)} of {inputs} ({worst.case}: {self._brief(worst)})"
        if not self._asked:
            return NOT_ASKED
        words = {verdict: len(self._failing(verdict)) for verdict in (BIASED, NONFINITE, UNBIASED)}
        said = [f"{'NaN or Inf' if verdict == NONFINITE else verdict} on {number}" for verdict, number in words.items()
                if number and (verdict != UNBIASED or number == sum(words.values()))]  # fmt: skip
        unknown = len(self._asked) - sum(words.values())
        told = f"{' and '.join(said) or 'unbiased on 0'} of {counted(len(self._asked), 'failure input')}"
        return f"{told}{f', {unknown} not known' if unknown else ''}{self._doing(words[BIASED])}"

    def _never_ran(self) -> str:
        """Why there is no result at all."""
        reasons = Counter("; ".join(record.reasons) for record in self.records)
        ended = Counter("; ".join(record.reasons) for record in self.records if record.outcome != SKIPPED)
        word = "never ran" if ended else "INCOMPLETE, no cell ran"
        return f"{word}: {(ended or reasons).most_common(1)[0][0]}"

    def _doing(self, biased: int) -> str:
        """Whose doing the bias is."""
        if not biased or self._tied is None:
            return ""
        if self._tied in (0, biased):
            return f", {_OWN if self._tied == 0 else _TIED}"
        return f": {self._tied} {_TIED}, {biased - self._tied} {_OWN}"

    def _extent(self, done: int) -> str:
        """How much of the work was not done, where some was left."""
        if not self._left or not done:
            return ""
        word, why = "" if self._enough else "INCOMPLETE, ", "in its budget" if self.run.complete else "done"
        return f"{word}{done} of {counted(done + self._left, 'cell')} {why}: "

    def _fallen(self, failures: Sequence[str]) -> str:
        """That the run fell, where it did for another reason than the worst that there is to say."""
        fell = [record for record in self.records if record.fails]
        if self._severity in FAILING or not (fell or failures):
            return ""
        checks = dict.fromkeys(name for record in fell for name in self._unmet(record))
        why = f"by {', '.join(checks)} on {counted(len(fell), 'input')}" if fell else f"({_first_clause(failures[0])})"
        return f"FELL {why}, "

    @property
    def _wrong(self) -> list[Record]:
        """Cells in which it computes something else than attention, or nothing."""
        wrong = {name for name, check in self.run.checks.items() if check.wrong}
        return [record for record in self.records if record.fails and wrong & set(self._unmet(record))]

    @property
    def _untold(self) -> list[Record]:
        return [record for record in self.records if record.fails and record.outcome == INCONCLUSIVE]

    @staticmethod
    def _unmet(record: Record) -> list[str]:
        """Checks that it does not meet; where it meets none, those that are not told."""
        unmet = [name for name, answer in record.answers.items() if answer.met is False]
        return unmet or [name for name, answer in record.answers.items() if answer.met is None]

    def _brief(self, record: Record) -> str:
        """What is wrong in a cell: the error of O where that is large, and the first clause of a reason."""
        clause = _first_clause(record.answers[self._unmet(record)[-1]].why)
        if record.shown is None or record.verdict == UNBIASED:
            return clause
        unit = self.run.measures[record.shown.kind].unit if record.shown.kind in self.run.measures else ""
        return f"{' '.join(filter(None, (_number(record), unit)))}, {clause}"

    @property
    def _formats(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(record.format for record in self.records))

    @property
    def _asked(self) -> list[Record]:
        return [record for record in self._failure_inputs if record.outcome != SKIPPED]

    @property
    def _begun(self) -> list[Record]:
        return [record for record in self.records if record.skipped != NO_TIME]

    @property
    def _tied(self) -> int | None:
        """Of the inputs on which it is biased: those where O itself ties; None: not looked at."""
        tied = [record.tied for record in self._failing(BIASED)]
        return None if None in tied else sum(map(bool, tied))

    @property
    def _left(self) -> int:
        """Cells that were not done."""
        beginning = f"{self.backend}-{self.kernel}-"
        return sum(name.startswith(beginning) for name in (*self.run.not_run, *self.run.running)) + len(self._left_out)

    @property
    def _enough(self) -> bool:
        """Whether all was run that a verdict needs."""
        return self.run.complete and not any(self.run.cases[record.case].needed for record in self._left_out)

    def _findings(self) -> Iterator[Finding]:
        news = self._severity in (BIASED, TIED)
        ended = [record for record in self.records if record.outcome in (CRASHED, TIMED_OUT)]  # no result, and no pass
        if slip := self._slip():
            yield Finding("looks like", slip)
        if self._severity != DID_NOT_RUN and (fell := self._fell()):
            yield Finding("fell", fell)
        if self._severity != DID_NOT_RUN and ended:
            yield _of_cells("ended", ended)
        if in_training := "; ".join(filter(None, (self._in_gradients(), self._in_runs()))):
            yield Finding("in training", in_training)
        listed = {
            "biased": self._failing(BIASED),
            "NaN": self._failing(NONFINITE),
            "not known": self._failing(UNDECIDED),
            "elsewhere": self._elsewhere,
        }
        texts: dict[str, Callable[[], str]] = {
            "fix": self._fix if news else str,
            "checks": self._checks,
            "rounding": self._rounding,
            "backward": self._backward,
            "rules": self._rules,
            "skipped": self._skipped,
        }
        yield from (_of_cells(name, records) for name, records in listed.items() if records)
        yield from (
            Finding(record.case, text, (record.case,)) for record in self.records if (text := finding_text(record))
        )
        yield from (Finding(name, text) for name, tell in texts.items() if (text := tell()))
        if left_out := [record.case for record in self._left_out]:
            yield Finding("left out", first_few(left_out, _LISTED), tuple(left_out))

    @property
    def _left_out(self) -> list[Record]:
        return [record for record in self.records if record.skipped == NO_TIME]

    @property
    def _failure_inputs(self) -> list[Record]:
        cases = self.run.cases
        return [record for record in self.records if record.case in cases and cases[record.case].failure]

    def _failing(self, verdict: str) -> list[Record]:
        return [record for record in self._failure_inputs if record.verdict == verdict]

    @property
    def _elsewhere(self) -> list[Record]:
        """Biased, or NaN and Inf, on inputs that are not known to fail."""
        failure = self._failure_inputs
        return [record for record in self.records if record.verdict in (BIASED, NONFINITE) and record not in failure]

    def _fix(self) -> str:
        """Whether the shift that it follows is a fix for ties, and where that fails."""
        judged = [record for record in self._failure_inputs if record.verdict is not None]
        failing = [record for record in judged if record.verdict in (BIASED, NONFINITE)]
        plans = self._plans()
        if not plans:
            declared = self._declared
            return f"not known: it {f'is not what {declared} predicts' if declared else 'follows no known plan'}"
        rules = sorted({plan.rule for plan in plans})
        if not any(plan.fix for plan in plans):
            return "none for ties: each row is shifted by its maximum, also where the maximum repeats"
        if not all(plan.fix for plan in plans):
            return f"not known: these cases do not tell {' from '.join(rules)}"
        held = len(judged) - len(failing)
        return f"partial: {' or '.join(rules)}; fails on the {counted(len(failing), 'input')} above, holds on {held}"

    def _plans(self) -> list[PlanRecord]:
        """What it may follow: by its bits, or as it declares where that predicts it."""
        explained = self._explanation
        if self._declared and all(record.met(PREDICTION) for record in self._predicted):
            names: Sequence[str] = (self._declared,)
        else:
            names = () if explained is None or explained.state == UNEXPLAINED else explained.plans
        return [self.run.plans[name] for name in names if name in self.run.plans]

    @property
    def _explanation(self) -> Explanation | None:
        return self.run.explanations.get(f"{self.backend}-{self.kernel}")

    @property
    def _declared(self) -> str:
        """The one plan that it declares, and that something was predicted from."""
        plans = {record.plan for record in self._predicted}
        return plans.pop() or "" if len(plans) == 1 else ""

    @property
    def _predicted(self) -> list[Record]:
        return [record for record in self.records if PREDICTION in record.answers]

    @property
    def _agreed(self) -> float | None:
        """The share of bits that agree with what it declares."""
        measures = {name: kind.agreement for name, kind in self.run.experiments.items()}
        numbers = (record.number(measures.get(record.experiment) or "") for record in self._predicted)
        shares = [share for share in numbers if share is not None]
        return sum(shares) / len(shares) if shares else None

    def _slip(self) -> str:
        """The usual mistake that explains the wrong outputs of most cells, then of most bits."""
        found: dict[str, list[float]] = {}
        for record in self.records:
            for about, share in record.evidence.get("slips", {}).items():
                found.setdefault(about, []).append(share)
        if not found:
            return ""
        about, shares = max(found.items(), key=lambda pair: (len(pair[1]), sum(pair[1])))
        return f"{about} ({percent(sum(shares) / len(shares))} of bits in {counted(len(shares), 'cell')})"

    def _fell(self) -> str:
        """Checks that were not met, with where."""
        unmet = grouped(
            ((name, record.case) for record in self.records for name in record.answers if record.met(name) is False),
            lambda pair: pair[0],
        )
        return "; ".join(f"{name} in {first_few([case for _, case in own], _LISTED)}" for name, own in unmet.items())

    def _checks(self) -> str:
        """Checks that were met wherever they were asked."""
        asked, met = Counter[str](), Counter[str]()
        for record in self.records:
            asked.update(record.answers.keys())
            met.update(name for name, answer in record.answers.items() if answer.met)
        held = [f"{name} {number}" for name, number in asked.items() if met[name] == number]
        return f"met wherever asked: {', '.join(held)} cells" if held else ""

    @property
    def _contained(self) -> str | None:
        """Whether gradients or training runs contain a bias: the worst of what they say."""
        verdicts = [record.in_training for record in self.records if record.in_training is not None]
        return max(verdicts, key=VERDICTS.index, default=None)

    def _in_gradients(self) -> str:
        """Whether its gradients contain the bias of O, on the inputs where it is biased."""
        biased = self._failing(BIASED)
        measured = [record for record in biased if record.in_training is not None]
        contained = [record for record in measured if record.in_training == BIASED]
        if contained:
            shares = [f"{100 * (self._carried(record) or 0.0):+.2g} % in {record.case}" for record in contained]
            return f"its gradients contain it: delta is off by {first_few(shares, _LISTED)}"
        if any(record.in_training == UNDECIDED for record in measured):
            return "not known: too few heads to tell whether its gradients contain it"
        if measured:
            largest = 100 * max(abs(self._carried(record) or 0.0) for record in measured)
            return f"harmless: its gradients don't contain it, delta is off by {largest:.1g} % at most"
        return self._unmeasured() if biased else ""

    def _unmeasured(self) -> str:
        """Why nothing is known of its gradients where it is biased."""
        ran = self._ran_backward
        if not ran:
            return "not measured: no input was run backward"
        if any(self._carried(record) is not None for record in ran):
            return "not measured: no input on which it is biased was run backward"
        failed = any(record.fails for record in ran)
        return f"not measured: {'its backward pass gave no gradients' if failed else 'it has no backward pass'}"

    @property
    def _ran_backward(self) -> list[Record]:
        """Cells that ask for gradients."""
        backward = [name for name, case in self.run.cases.items() if case.backward]
        return [record for record in self.records if record.case in backward and record.outcome != SKIPPED]

    def _carried(self, record: Record) -> float | None:
        """How much of a bias of O its gradients contain, as a share."""
        kind = self.run.experiments.get(record.experiment)
        return record.number(kind.carried) if kind is not None and kind.carried else None

    def _in_runs(self) -> str:
        """Whether short training runs drift as with kernels whose bias training feels."""
        pooled = [record for record in self.records if record.experiment in self.run.pooled]
        ran = [record for record in pooled if record.in_training is not None]
        if not ran:
            return ""
        words = ((BIASED, "drifts in"), (UNDECIDED, "not known in"))
        texts = []
        for verdict, word in words:
            names = [f"{record.case} {plain_text(record)}" for record in ran if record.in_training == verdict]
            texts += (
                [f"{word} {len(names)} of {counted(len(ran), 'training run')}: {', '.join(names)}"] if names else []
            )
        return "; ".join(texts) or f"no drift in {counted(len(ran), 'training run')}"

    def _rounding(self) -> str:
        if self._explanation is not None:
            return explanation_text(self._explanation)
        if not self._declared:
            return ""
        met = sum(record.met(PREDICTION) is True for record in self._predicted)
        bits = "" if self._agreed is None else f", {percent(self._agreed)} of bits"
        return f"declares {self._declared}; as predicted in {met} of {len(self._predicted)} cells{bits}"

    def _backward(self) -> str:
        """Which known backward pass its gradients come from."""
        cells = [record.evidence["backward"] for record in self.records if record.evidence.get("backward")]
        if not cells:
            ran = self._ran_backward
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
        """Which acceptance rules in public use it passes."""
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


def _first_clause(reason: str) -> str:
    return shorten(reason.partition("; ")[0], _BRIEF, placeholder=" ...")


def _of_cells(name: str, records: Sequence[Record]) -> Finding:
    texts = [f"{record.case} {_number(record)}" for record in records]
    return Finding(name, first_few(texts, _LISTED), tuple(record.case for record in records))


def _number(record: Record) -> str:
    """What tables show without the verdict, which its line says."""
    return plain_text(record) if record.shown is None else shown_text(replace(record.shown, verdict=None))
