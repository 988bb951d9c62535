"""What a run says of each kernel, in words: the first lines that its author wants to read."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tiebreak.reports.records.record import (
    BIASED,
    CRASHED,
    NONFINITE,
    PREDICTION,
    SKIPPED,
    TIMED_OUT,
    UNDECIDED,
    UNEXPLAINED,
    Explanation,
    PlanRecord,
    Record,
    Run,
)
from tiebreak.reports.tables.marks import plain_text, shown_text
from tiebreak.reports.tables.plans import explanation_text, percent

_LISTED = 8  # cases of a list that are named; the table has them all
_WIDTH = 12


@dataclass(frozen=True)
class Verdict:
    """What a run says of one kernel on one backend."""

    backend: str
    kernel: str
    records: Sequence[Record]  # its own
    run: Run

    @property
    def text(self) -> str:
        """A headline, and a line for each thing that there is to say."""
        parts: list[tuple[str, Callable[[], str]]] = [
            ("biased", lambda: _cases(self._failing(BIASED))),
            ("NaN", lambda: _cases(self._failing(NONFINITE))),
            ("not known", lambda: _cases(self._failing(UNDECIDED))),
            ("elsewhere", lambda: _cases(self._elsewhere)),
            ("fix", self._fix),
            ("fell", self._fell),
            ("checks", self._checks),
            *((kind, partial(self._headlines, kind)) for kind in sorted(self.run.pooled)),
            ("rounding", self._plan),
            ("skipped", self._skipped),
            ("ended", self._ended),
        ]
        lines = [f"  {name:{_WIDTH}}{told}" for name, tell in parts if (told := tell())]
        return "\n".join([self.headline, *lines])

    @property
    def headline(self) -> str:
        """On how many failure inputs it is biased."""
        formats = ", ".join(dict.fromkeys(record.format for record in self.records))
        name = f"{self.kernel} on {self.run.told_of(self.backend)}, {formats}"
        asked = [record for record in self._failure_inputs if record.outcome != SKIPPED]
        if not asked:
            return f"{name}: no failure input was run, nothing is known of its bias"
        failing = [*self._failing(BIASED), *self._failing(NONFINITE)]
        # What crashed, or has too few heads, is no sign of health.
        unknown = [record for record in asked if record.verdict in (None, UNDECIDED)]
        told = f", {len(unknown)} not known" if unknown else ""
        if failing:
            return f"{name}: BIASED OR LOST on {len(failing)} of {len(asked)} failure inputs{told}"
        return f"{name}: unbiased on {len(asked) - len(unknown)} of {len(asked)} failure inputs{told}"

    @property
    def _failure_inputs(self) -> list[Record]:
        cases = self.run.cases
        return [one for one in self.records if one.case in cases and cases[one.case].failure]

    def _failing(self, verdict: str) -> list[Record]:
        return [record for record in self._failure_inputs if record.verdict == verdict]

    @property
    def _elsewhere(self) -> list[Record]:
        """Biased or lost on inputs that are not known to fail."""
        failure = self._failure_inputs
        return [one for one in self.records if one.verdict in (BIASED, NONFINITE) and one not in failure]

    def _fix(self) -> str:
        """Whether the shift that it follows is a fix, and where that fails."""
        judged = [record for record in self._failure_inputs if record.verdict is not None]
        failing = [record for record in judged if record.verdict in (BIASED, NONFINITE)]
        if not judged:
            return ""
        if not failing:
            return "needs none on these inputs"
        plans = self._plans()
        if not plans:
            declared = self._declared
            return f"not known: it {f'is not what {declared} predicts' if declared else 'follows no known plan'}"
        rules = sorted({plan.rule for plan in plans})
        if not any(plan.fix for plan in plans):
            return "absent: it shifts a row by its maximum, whatever repeats"
        if not all(plan.fix for plan in plans):
            return f"not known: these cases do not tell {' from '.join(rules)}"
        told = f"it fails on the {len(failing)} inputs above and holds on {len(judged) - len(failing)}"
        return f"partial: {' or '.join(rules)}; {told}"

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

    def _fell(self) -> str:
        """Checks that were not met, with where."""
        found: dict[str, list[str]] = {}
        for record in self.records:
            for name, answer in record.answers.items():
                if answer.met is False:
                    found.setdefault(name, []).append(record.case)
        return "; ".join(f"{name} in {_some(cases)}" for name, cases in found.items())

    def _checks(self) -> str:
        """Checks that were met wherever they were asked."""
        asked, met = Counter[str](), Counter[str]()
        for record in self.records:
            asked.update(record.answers.keys())
            met.update(name for name, answer in record.answers.items() if answer.met)
        held = [f"{name} {number}" for name, number in asked.items() if met[name] == number]
        return f"met wherever asked: {', '.join(held)} cells" if held else ""

    def _headlines(self, kind: str) -> str:
        """What the headline of every case of a kind of experiment came to."""
        cases = self.run.cases
        known = [
            record for record in self.records if record.experiment == kind and record.case in cases and record.shown
        ]
        return ", ".join(f"{record.case} {cases[record.case].headline} {plain_text(record)}" for record in known)

    def _plan(self) -> str:
        if self._explanation is not None:
            return explanation_text(self._explanation)
        if not self._declared:
            return ""
        met = sum(record.met(PREDICTION) is True for record in self._predicted)
        measures = {name: kind.agreement for name, kind in self.run.experiments.items()}
        numbers = (record.number(measures.get(record.experiment) or "") for record in self._predicted)
        shares = [share for share in numbers if share is not None]
        bits = f", {percent(sum(shares) / len(shares))} of bits" if shares else ""
        return f"declares {self._declared}; as predicted in {met} of {len(self._predicted)} cells{bits}"

    def _skipped(self) -> str:
        found = Counter(one.skipped for one in self.records if one.outcome == SKIPPED)
        return "; ".join(f"{number} cell{'' if number == 1 else 's'}: {why}" for why, number in found.items())

    def _ended(self) -> str:
        """Cells that came to no result, and are no pass."""
        found = [one for one in self.records if one.outcome in (CRASHED, TIMED_OUT)]
        return _cases(found)


def verdicts(run: Run) -> list[Verdict]:
    """What a run says of its kernels, in the order of their first records."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in run.records:
        found.setdefault((record.backend, record.kernel), []).append(record)
    return [Verdict(backend, kernel, records, run) for (backend, kernel), records in found.items()]


def _cases(records: Sequence[Record]) -> str:
    return _some([f"{record.case} {_number(record)}" for record in records])


def _number(record: Record) -> str:
    """What tables show without the verdict, which its line says."""
    return plain_text(record) if record.shown is None else shown_text(replace(record.shown, verdict=None))


def _some(names: Sequence[str]) -> str:
    more = f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
