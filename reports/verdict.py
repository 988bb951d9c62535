"""The verdict of a run on a kernel: an object from which the first lines for its author, and JSON, are made."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from textwrap import shorten
from typing import Annotated

from msgspec.structs import replace

from tiebreak.reports.names import first_few
from tiebreak.reports.records import record as records
from tiebreak.reports.records.decode import SCHEMA, Count, Data, FileData, Schema, encode, one_of
from tiebreak.reports.records.order import grouped
from tiebreak.reports.records.record import Record, Run
from tiebreak.reports.tables.run import again, counted
from tiebreak.reports.tables.texts import answers_of, changes_text, explanation_text, percent, plain_text, shown_text
from tiebreak.reports.terminal import runnable

# Severities of a kernel, the worst first. A run fails with any of the first three.
DID_NOT_RUN, WRONG, UNDECIDED, TIED = "did not run", "wrong", records.UNDECIDED, "biased where O itself ties"
MARGIN, FAIR = "at the margin", "fair"
SEVERITIES = (DID_NOT_RUN, WRONG, UNDECIDED, records.BIASED, TIED, MARGIN, FAIR)
FAILING = SEVERITIES[:3]
NOT_ASKED = "no failure input was run, nothing is known of its bias"
SeverityName = Annotated[str, one_of(SEVERITIES)]
_ALL = "--budget none"
_LISTED = 8  # cases of a list that are named; the table has them all
_WIDTH = 11
_TIED, _OWN = "where O itself ties", "by its own rounding"  # whose doing a bias is
_BRIEF = 100  # characters of a reason, in a line of many
_SOFTWARE = ("python", "torch", "numpy", "triton", "cpu", "level")  # of a platform, what a verdict says of it


class Finding(Data, frozen=True, omit_defaults=False):
    """One statement about a kernel."""

    name: str  # a word or two, by which it is looked up
    text: str  # in words
    cases: tuple[str, ...] = ()  # that it is about, if it is about some


class FailedCell(Data, frozen=True, omit_defaults=False):
    """A cell that fails the run."""

    cell: str  # backend-kernel-case-format
    outcome: str  # failed, undecided, crashed, timed_out
    reasons: tuple[str, ...]  # why
    command: str  # runs it again
    debug: str = ""  # runs it again and ends in the debugger, in the user's code that raised
    script: str = ""  # writes a script that shows it with torch alone
    traceback: str = ""  # of what the kernel raised, from the first frame of the user's on


class Verdict(Data, frozen=True, omit_defaults=False):
    """The verdict of a run on one kernel on one backend."""

    headline: str  # the result, the names, and the most serious finding, in one line
    result: records.ResultName  # as the exit code has it: FAIL and UNDECIDED are 1; INCOMPLETE 130, or 0 in its budget
    severity: SeverityName | None  # of it; None: no failure input was run, so nothing is known of a bias
    kernel: str  # its name
    backend: str  # with what was assumed of a device that was not there
    formats: tuple[str, ...]  # of q, k, v and O
    ok: bool  # as the exit code: the run ended, some of it ran, and nothing failed; a bias alone fails nothing
    complete: bool  # False: the run was interrupted
    inputs: Count  # failure inputs, on which rounding is known to fail, that were run
    biased: Count  # of them: the mean error of O is not 0, beyond the margin, at 99.9 % confidence
    nonfinite: Count  # of them: NaN or Inf where the exact result is finite
    tied: Count | None  # of the biased: as biased as a correctly rounded O, since O itself ties; None: not looked at
    unknown: Count  # of them: too few heads to tell, or no result
    findings: tuple[Finding, ...]  # what there is to say, the worst first
    failed: tuple[FailedCell, ...] = ()  # cells that fail the run
    failures: tuple[str, ...] = ()  # what fails the run though no cell failed, as the gate
    plan: records.Explanation | None = None  # that explains the bits of a kernel that declares none
    declared: str | None = None  # the plan that it declares
    in_training: records.VerdictName | None = None  # whether its gradients, or short training runs, contain the bias
    share: float | None = None  # of bits that agree with the plan, mean over the cells that were compared
    cells: Mapping[str, Count] = {}  # by outcome
    left: Count = 0  # cells that were not done: the run was interrupted, or its budget was spent
    seed: Count = 0  # of all inputs
    versions: Mapping[str, str] = {}  # of the software, and what it ran on
    command: str = ""  # runs all of it again

    @property
    def statement(self) -> str:
        """The headline without the names of kernel, backend and formats."""
        return self.headline.replace(f" {_names(self.kernel, self.backend, self.formats)}", " ", 1)

    def __str__(self) -> str:
        """Return the lines that `tiebreak check` prints: the headline, and a line for each finding."""
        return "\n".join([self.headline, *(f"  {finding.name:{_WIDTH}} {finding.text}" for finding in self.findings)])


class Verdicts(FileData, frozen=True):
    """The contents of `tiebreak check --json`."""

    schema: Schema  # version of this layout
    ok: bool  # of all of them, and there are some
    verdicts: tuple[Verdict, ...]  # one a kernel and backend


def _failed_cell(cell: Record) -> FailedCell:
    told = dict(line.split(": ", 1) for line in again(cell))
    traceback = cell.evidence.get(records.TRACEBACK, "")
    words = (told["rerun"], told.get("debug", ""), told.get("script", ""), traceback)
    return FailedCell(cell.id, cell.outcome, cell.reasons, *words)


def as_json(verdicts: Sequence[Verdict]) -> str:
    """Return the text of `tiebreak check --json`."""
    ok = bool(verdicts) and all(verdict.ok for verdict in verdicts)
    return encode(Verdicts(SCHEMA, ok, tuple(verdicts)), indent=2) + "\n"


def verdicts(run: Run, command: str = "", failures: Sequence[str] = ()) -> list[Verdict]:
    """Return a run's verdicts on its kernels, the worst first.

    `command` runs it again; `failures` are the reasons why the run fails though no cell does.
    """
    kernels = grouped(run.records, lambda record: (record.backend, record.kernel))
    return worst_first(_Kernel(*names, cells, run, failures).verdict(command) for names, cells in kernels.items())


def worst_first(judged: Iterable[Verdict]) -> list[Verdict]:
    """Return verdicts in order: those that fail a run, then the severest, then those about most cells."""

    def rank(verdict: Verdict) -> tuple[bool, int, int, int]:
        return verdict.ok, (*SEVERITIES, None).index(verdict.severity), -len(verdict.failed), -verdict.biased

    return sorted(judged, key=rank)


class _Kernel:
    """One kernel on one backend, as a run has it."""

    def __init__(self, backend: str, kernel: str, cells: Sequence[Record], run: Run, failures: Sequence[str]) -> None:
        self.cells, self.run, self.failures = cells, run, failures
        self.explanation = run.explanations.get(f"{backend}-{kernel}")
        self.ran = [cell for cell in cells if cell.outcome != records.SKIPPED]
        self.bits = run.evidence(backend)
        self.failure = {name for name, case in run.cases.items() if case.failure}
        backward = {name for name, case in run.cases.items() if case.backward}
        self.asked = [cell for cell in self.ran if cell.case in self.failure]
        self.biased = [cell for cell in self.asked if cell.verdict == records.BIASED]
        self.margin = [cell for cell in self.asked if cell.verdict == records.UNDECIDED]
        self.nonfinite = [cell for cell in self.asked if cell.verdict == records.NONFINITE]
        self.ran_backward = [cell for cell in self.ran if cell.case in backward]
        self.failed = [cell for cell in cells if cell.fails]
        wrong = {name for name, check in run.checks.items() if check.wrong}
        self.wrong = [
            cell for cell in self.failed if any(cell.passed(name) is False for name in wrong & cell.answers.keys())
        ]
        self.undecided = [cell for cell in self.failed if cell.outcome == records.UNDECIDED]
        self.left_out = [cell for cell in cells if cell.skipped == records.NO_TIME]
        unfinished = [name for name in (*run.not_run, *run.running) if name.startswith(f"{backend}-{kernel}-")]
        self.left = len(unfinished) + len(self.left_out)
        # Of the inputs on which it is biased, those where O itself ties; None: not looked at.
        tied = [cell.tied for cell in self.biased]
        self.tied = None if None in tied else sum(map(bool, tied))
        # The one plan that it declares, and that something was predicted from; the share of bits that agree with it.
        self.predicted = [cell for cell in cells if records.PREDICTION in cell.answers]
        plans = {cell.plan for cell in self.predicted}
        self.declared = plans.pop() if len(plans) == 1 else None
        shares = [share for cell in self.predicted if (share := run.number(cell, "agreement")) is not None]
        self.agreed = sum(shares) / len(shares) if shares else None
        self.severity = self._severity()
        self.ok = self.run.complete and self.severity != DID_NOT_RUN and not self.failed and not failures
        self.result = self._result()
        # The cell that the first line is about, if it fails: the one that is farthest off, the first of equals.
        failed = self.ran if self.severity == DID_NOT_RUN else self.wrong or self.undecided
        self.worst = max(failed, key=lambda cell: (_share_off(cell), len(_not_passed(cell))), default=None)

    def verdict(self, command: str) -> Verdict:
        """Return the verdict on it."""
        run, first, explained = self.run, self.cells[0], self.explanation
        backend, formats = run.backend_text(first.backend), tuple(dict.fromkeys(cell.format for cell in self.cells))
        done = Counter(cell.outcome for cell in self.cells if cell.skipped != records.NO_TIME)
        # The worst of the answers whether gradients or training runs contain a bias.
        contained = [cell.in_training for cell in self.cells if cell.in_training is not None]
        return Verdict(
            headline=f"{self.result}: {_names(first.kernel, backend, formats)}{self._statement(done.total())}",
            result=self.result,
            severity=self.severity,
            kernel=first.kernel,
            backend=backend,
            formats=formats,
            ok=self.ok,
            complete=run.complete,
            inputs=len(self.asked),
            biased=len(self.biased),
            nonfinite=len(self.nonfinite),
            # A crashed cell, or one with too few heads, is no sign of health.
            unknown=sum(cell.verdict in (None, records.UNDECIDED) for cell in self.asked),
            tied=self.tied,
            findings=self._findings(),
            failed=tuple(map(_failed_cell, self.failed)),
            failures=tuple(self.failures),
            plan=explained,
            declared=self.declared,
            in_training=max(contained, key=records.VERDICTS.index, default=None),
            share=self.agreed if explained is None else explained.share,
            cells=dict(done),
            left=self.left,
            seed=first.seed,
            versions={name: str(run.platform[name]) for name in _SOFTWARE if run.platform.get(name)},
            command=command,
        )

    def _severity(self) -> str | None:
        """Return the severity of the most serious finding; None where no failure input was run."""
        if all(cell.shown is None and cell.outcome != records.FAILED for cell in self.cells):
            return DID_NOT_RUN
        if self.wrong or self.undecided:
            return WRONG if self.wrong else UNDECIDED
        if self.biased and self.tied == len(self.biased) and not self.nonfinite:
            return TIED
        if self.biased or self.nonfinite:  # NaN that fails nothing is as a case claims of its kind
            return records.BIASED
        all_unbiased = all(cell.verdict == records.UNBIASED for cell in self.asked)
        return None if not self.asked else FAIR if all_unbiased else MARGIN

    def _result(self) -> str:
        """Return the first word of its verdict; what fails for sure comes before what too few heads can tell."""
        if self.severity == DID_NOT_RUN or self.wrong or self.failures or len(self.failed) > len(self.undecided):
            return records.FAIL
        return records.UNDECIDED.upper() if self.undecided else records.INCOMPLETE if self.left else records.PASS

    def _statement(self, done: int) -> str:
        """Return the most serious finding, what else made the run fail, and how much of the work was left."""
        text = self._finding()
        if self.severity not in (DID_NOT_RUN, WRONG) and (also := self._failed_otherwise()):
            text = f"{also}, {text}"
        if self.left and done:
            why = "in its budget" if self.run.complete else "done"
            text = f"{text}; {done} of {counted(done + self.left, 'cell')} {why}"
        return text

    def _failed_otherwise(self) -> str:
        """Return what made the run fail that is neither wrong nor undecided; empty if nothing did."""
        cells = [cell for cell in self.failed if cell not in self.wrong and cell not in self.undecided]
        if not cells:
            return f"({_first_clause(self.failures[0])})" if self.failures else ""
        checks = dict.fromkeys(name for cell in cells for name in _not_passed(cell))
        return f"by {', '.join(checks)} on {counted(len(cells), 'input')}"

    def _finding(self) -> str:
        """Return the most serious finding."""
        if self.severity == DID_NOT_RUN:
            reasons = Counter("; ".join(cell.reasons) for cell in self.ran or self.cells)
            return f"{'never ran' if self.ran else 'no cell ran'}: {reasons.most_common(1)[0][0]}"
        if self.worst is not None:
            word, cells = (WRONG, self.wrong) if self.wrong else (UNDECIDED, self.undecided)
            where = f"{self.worst.case}: {self._brief(self.worst)}"
            return f"{word} on {len(cells)} of {counted(len(self.ran), 'input')} ({where})"
        if not self.asked:
            passed = sorted({name for cell in self.ran for name in cell.answers if cell.passed(name)})
            return f"{NOT_ASKED}; {first_few(passed, _LISTED)} passed" if passed else NOT_ASKED
        unbiased = sum(cell.verdict == records.UNBIASED for cell in self.asked)
        words = {"biased": len(self.biased), "NaN or Inf": len(self.nonfinite)}
        counts = [f"{word} on {number}" for word, number in words.items() if number]
        near = [self._interval(cell) for cell in self.margin]
        unknown = len(self.asked) - unbiased - sum(words.values()) - len(near)
        left = f", {len(near)} at the margin ({first_few(near, 1)})" if near else ""
        left += f", {unknown} not known" if unknown else ""
        text = f"{' and '.join(counts) or f'unbiased on {unbiased}'} of {counted(len(self.asked), 'failure input')}"
        biased, tied, origin = len(self.biased), self.tied, ""
        if biased and tied is not None:
            both = f": {tied} {_TIED}, {biased - tied} {_OWN}"
            origin = both if 0 < tied < biased else f", {_TIED if tied else _OWN}"
        return f"{text}{left}{origin}"

    def _interval(self, cell: Record) -> str:
        """Return a case with its headline and the interval of that."""
        headline = self.run.experiments[cell.experiment].headline or ""
        value = cell.measures.get(headline)
        width = value.half_width if isinstance(value, records.Estimate) else None
        text = f"{cell.case} {_number(cell.number(headline))}"
        return f"{text}, one sample" if width is None else f"{text} +- {_number(width).lstrip('+')}"

    def _margin(self) -> str:
        """Return the failure inputs whose interval reaches over the margin, and how many heads would tell."""
        needed = [heads for cell in self.margin if (heads := cell.evidence.get("heads_to_tell"))]
        more = f"; --heads {max(needed)} would tell, about" if needed and len(needed) == len(self.margin) else ""
        return f"{first_few([self._interval(cell) for cell in self.margin], _LISTED)}{more}"

    def _brief(self, cell: Record) -> str:
        """Return what is wrong in a cell: the largest error, or the bias with the first clause of a reason."""
        if off := cell.evidence.get("off"):
            return str(next(iter(off)))
        not_passed = _not_passed(cell)
        clause = _first_clause(cell.answers[not_passed[-1]].why if not_passed else cell.outcome)
        if cell.shown is None or cell.verdict in (None, records.UNBIASED):
            return clause
        unit = self.run.measures[cell.shown.kind].unit if cell.shown.kind in self.run.measures else ""
        return f"{' '.join(filter(None, (_bare(cell), unit)))}, {clause}"

    def _findings(self) -> tuple[Finding, ...]:
        failing, without_result = (records.BIASED, records.NONFINITE), (records.CRASHED, records.TIMED_OUT)
        findings, (failed, passed) = [Finding("looks like", self._slip()), self._told("wrong where")], self._checks()
        if self.worst is not None:
            text = f"rerun {self.worst.case} alone: {runnable(self.worst.command)}"
            findings.append(Finding("next", text, (self.worst.case,)))
        if self.severity != DID_NOT_RUN:
            ended = [cell for cell in self.cells if cell.outcome in without_result]
            findings += [Finding("failed", failed), _listed("ended", ended)]
        elsewhere = [cell for cell in self.ran if cell.verdict in failing and cell.case not in self.failure]
        left_out = tuple(cell.case for cell in self.left_out)
        reasons = Counter(cell.skipped for cell in self.cells if cell.skipped not in (None, records.NO_TIME))
        skipped = [f"{counted(number, 'cell')}: {why}" for why, number in reasons.items()]
        findings += [
            Finding("in training", "; ".join(filter(None, (self._in_gradients(), self._in_runs())))),
            _listed("biased", self.biased),
            _listed("NaN", self.nonfinite),
            Finding("margin", self._margin(), tuple(cell.case for cell in self.margin)),
            _listed("elsewhere", elsewhere),
            *(Finding(cell.case, _changes(cell), (cell.case,)) for cell in self.cells),
            Finding("fix", self._fix() if self.severity in (records.BIASED, TIED) else ""),
            Finding("ties", self._away()),
            Finding("checks", passed if self.ok else ""),
            Finding("rounding", self._rounding()),
            *map(self._told, ("not given", records.CAPTURED, "assumed")),
            Finding("backward", self._backward()),
            Finding("rules", self._rules()),
            Finding("skipped", shorten("; ".join(skipped), _BRIEF, placeholder=" ...")),
            Finding("left out", f"{first_few(left_out, _LISTED)}; {_ALL} runs all" if left_out else "", left_out),
        ]
        return tuple(finding for finding in findings if finding.text)

    def _told(self, name: str) -> Finding:
        """Return the evidence of this name that some cells have."""
        return Finding(name, "; ".join(sorted({told for cell in self.cells if (told := cell.evidence.get(name))})))

    def _fix(self) -> str:
        """Return whether the shift that it follows, by its bits or as it declares, is a fix for ties, and fails."""
        plans = self._plans()
        if not plans:
            predicts = f"is not what {self.declared} predicts" if self.declared else "follows no known plan"
            return f"not known: it {predicts}"
        rules = sorted({plan.rule for plan in plans})
        if not any(plan.fix for plan in plans):
            return "none for ties: each row is shifted by its maximum, also where the maximum repeats"
        if not all(plan.fix for plan in plans):
            return f"not known: these cases do not tell {' from '.join(rules)}"
        failing = len(self.biased) + len(self.nonfinite)
        holds = sum(cell.verdict is not None for cell in self.asked) - failing
        return f"partial: {' or '.join(rules)}; fails on the {counted(failing, 'input')} above, holds on {holds}"

    def _plans(self) -> list[records.PlanRecord]:
        """Return the plans that it follows, by its bits or as it declares."""
        explained, names = self.explanation, tuple[str, ...]()
        if self.declared and all(cell.passed(records.PREDICTION) for cell in self.predicted):
            names = (self.declared,)
        elif explained is not None and explained.state != records.UNEXPLAINED:
            names = explained.plans
        return [self.run.plans[name] for name in names if name in self.run.plans]

    def _away(self) -> str:
        """Return where it rounds ties away from zero, as all plans that it may follow do."""
        plans = self._plans()
        points = [point for point in (plans[0].away if plans else ()) if all(point in plan.away for plan in plans)]
        return f"of {', '.join(points)} go away from zero (RTNA, not RNE): a bias where they are many" if points else ""

    def _slip(self) -> str:
        """Return the usual mistake that explains what is wrong in most cells, then most of it."""
        slips = [pair for cell in self.wrong for pair in cell.evidence.get("slips", {}).items()]
        if not slips:
            return ""
        by_slip = {about: [share for _, share in each] for about, each in grouped(slips, lambda pair: pair[0]).items()}
        about, shares = max(by_slip.items(), key=lambda pair: (len(pair[1]), sum(pair[1])))
        return f"{about} (explains {percent(sum(shares) / len(shares))} in {counted(len(shares), 'cell')})"

    def _checks(self) -> tuple[str, str]:
        """Return the checks that failed, with where, and those that passed wherever they were asked."""
        answers = grouped(((name, cell) for cell in self.cells for name in cell.answers), lambda pair: pair[0])
        not_passed = {
            name: [cell.case for _, cell in cells if cell.passed(name) is False] for name, cells in answers.items()
        }
        failed = [f"{name} in {first_few(cases, _LISTED)}" for name, cases in not_passed.items() if cases]
        passed = [
            f"{name} {len(cells)}" for name, cells in answers.items() if all(cell.passed(name) for _, cell in cells)
        ]
        return "; ".join(failed), f"passed wherever asked: {', '.join(passed)} cells" if passed else ""

    def _in_gradients(self) -> str:
        """Return whether its gradients contain the bias of O, on the inputs where it is biased."""
        measured = [cell for cell in self.biased if cell.in_training is not None]
        contained = [cell for cell in measured if cell.in_training == records.BIASED]
        if contained:
            shares = [f"{100 * (self._carried(cell) or 0.0):+.2g} % in {cell.case}" for cell in contained]
            return f"its gradients contain it: delta is off by {first_few(shares, _LISTED)}"
        if any(cell.in_training == records.UNDECIDED for cell in measured):
            return "not known: too few heads to tell whether its gradients contain it"
        if measured:
            if not self.ok:  # nothing that reassures is below a failure
                return ""
            largest = 100 * max(abs(self._carried(cell) or 0.0) for cell in measured)
            return f"harmless: its gradients don't contain it, delta is off by {largest:.1g} % at most"
        ran, why = self.ran_backward, "no input was run backward"
        if any(self._carried(cell) is not None for cell in ran):
            why = "no input on which it is biased was run backward"
        elif ran:
            failed = any(cell.fails for cell in ran)
            why = "its backward pass gave no gradients" if failed else "it has no backward pass"
        return f"not measured: {why}" if self.biased else ""

    def _carried(self, cell: Record) -> float | None:
        """Return how much of a bias of O its gradients contain, as a share."""
        return self.run.number(cell, "carried")

    def _in_runs(self) -> str:
        """Return whether short training runs drift as with kernels whose bias training feels."""
        pooled = [cell for cell in self.cells if cell.experiment in self.run.pooled and cell.in_training is not None]
        if not pooled:
            return ""
        runs, texts = counted(len(pooled), "training run"), []
        for verdict, word in ((records.BIASED, "drifts in"), (records.UNDECIDED, "not known in")):
            if names := [f"{cell.case} {plain_text(cell)}" for cell in pooled if cell.in_training == verdict]:
                texts.append(f"{word} {len(names)} of {runs}: {', '.join(names)}")
        return "; ".join(texts) or (f"no drift in {runs}" if self.ok else "")

    def _rounding(self) -> str:
        if self.explanation is not None:
            return explanation_text(self.explanation, self.bits)
        if not self.declared:
            return ""
        predicted = sum(cell.passed(records.PREDICTION) is True for cell in self.predicted)
        bits = "" if self.agreed is None else f", {percent(self.agreed)} of {self.bits}"
        return f"declares {self.declared}; as predicted in {predicted} of {len(self.predicted)} cells{bits}"

    def _backward(self) -> str:
        """Return which known backward pass its gradients come from."""
        cells = [cell.evidence["backward"] for cell in self.cells if cell.evidence.get("backward")]
        if not cells:
            is_known = any(cell.fails or self._carried(cell) is not None for cell in self.ran_backward)
            return "none: autograd has no gradients of what it returns" if self.ran_backward and not is_known else ""
        common = [name for name in cells[0] if all(name in cell for cell in cells)]
        shares = {name: [share for cell in cells for share in cell[name].values()] for name in common}
        follows = {name: min(values) >= records.FOLLOWED_BACKWARD for name, values in shares.items()}
        nearest = max(shares, key=lambda name: (follows[name], sum(shares[name])))
        agreed = f"{percent(sum(shares[nearest]) / len(shares[nearest]))} of bits in {counted(len(cells), 'cell')}"
        prefix = f"follows {nearest}: " if follows[nearest] else f"unexplained: nearest is {nearest} with "
        return prefix + agreed

    def _rules(self) -> str:
        """Return which acceptance rules in public use it passes."""
        answers = [(name, cell.case, answer.passed) for cell in self.cells for name, answer in answers_of(cell).items()]
        failed = grouped((each for each in answers if each[2] is False), lambda each: each[0])
        passed = {name for name, _, passes in answers if passes} - failed.keys()
        if not passed and not failed:
            return ""
        where = {name: hits[0][1] if len(hits) == 1 else counted(len(hits), "input") for name, hits in failed.items()}
        texts = [f"{name} ({at})" for name, at in where.items()]
        turned = f"; turned down by {first_few(texts, _LISTED)}" if texts else ""
        return f"passes {len(passed)} of {counted(len(passed) + len(failed), 'acceptance rule')} on every input{turned}"


def _names(kernel: str, backend: str, formats: Sequence[str]) -> str:
    return f"{kernel} on {backend}, {', '.join(formats)}: "


def _number(number: float | None) -> str:
    return "nan" if number is None else f"{number:+.3f}"


def _first_clause(reason: str) -> str:
    return shorten(reason.partition("; ")[0], _BRIEF, placeholder=" ...")


def _share_off(cell: Record) -> float:
    """Return by what share of the reference a cell is off: all of it where there is no result, infinite for a NaN."""
    shares = cell.evidence.get("off", {}).values()
    return max((inf if share is None else float(share) for share in shares), default=float(cell.shown is None))


def _not_passed(cell: Record) -> list[str]:
    """Return the checks that a cell fails; where there are none, those that are undecided."""
    return [name for name in cell.not_passed if cell.passed(name) is False] or cell.not_passed


def _changes(cell: Record) -> str:
    """Return the results of a call that was compared with itself; empty for a cell of another kind."""
    changes = cell.evidence.get("changes")
    undecided = [answer.why for answer in cell.answers.values() if answer.passed is None]
    return "" if not changes else f"not known: {undecided[0]}" if undecided else changes_text(changes)


def _listed(name: str, cells: Sequence[Record]) -> Finding:
    """Return a finding about some cells: their cases, with what tables show of them."""
    texts = [f"{cell.case} {_bare(cell)}" for cell in cells]
    return Finding(name, first_few(texts, _LISTED), tuple(cell.case for cell in cells))


def _bare(cell: Record) -> str:
    """Return a cell's text in tables without the verdict, which its line says."""
    return plain_text(cell) if cell.shown is None else shown_text(replace(cell.shown, verdict=None))
