"""What acceptance rules in public use say of kernels: a row each, kernels across, this suite's own verdict above."""

import math
from collections.abc import Mapping

from tiebreak.reports.records.order import grouped
from tiebreak.reports.records.record import Record, RuleAnswer, RuleReading, Run
from tiebreak.reports.tables.grids import Grid, Part
from tiebreak.reports.tables.texts import plain_text

LEGEND = (
    "A number is the largest that a rule looks at, as a share of its limit; FAILS: the rule turns the kernel down;"
    "\nneeds: it lacks what it takes. Rules see the heads drawn at first. tiebreak: the bias in ulps, B: biased."
)


def rules_tables(run: Run) -> list[Part]:
    """Return the tables of a run, one a backend, format and case; records that no rule was asked of are left out."""
    asked = [record for record in run.records if answers_of(record)]
    parts: list[Part] = []
    for (backend, fmt, case), records in grouped(asked, lambda each: (each.backend, each.format, each.case)).items():
        told = [(name, answer) for record in records for name, answer in answers_of(record).items()]
        rows = [["tiebreak", *map(plain_text, records)]]
        for name in dict.fromkeys(name for name, _ in told):
            rows.append([name, *(_text(answers_of(record).get(name)) for record in records)])
        headers = ["rule", *(record.kernel for record in records)]
        parts.append(Grid(headers, rows, f"{run.backend_text(backend)}, {fmt}: {case}"))
        parts += dict.fromkeys(f"{name} needs {answer.needs}" for name, answer in told if answer.needs)
    return [*parts, LEGEND] if parts else []


def answers_of(record: Record) -> dict[str, RuleAnswer]:
    """Return what rules said of a record; empty where none was asked."""
    return dict(record.evidence.get("rules", {}))


def _text(answer: RuleAnswer | None) -> str:
    return "" if answer is None else f"{share_text(answer)}{' FAILS' if answer.passed is False else ''}"


def rules_text(answers: Mapping[str, RuleAnswer]) -> str:
    """Return what the rules said of one record, in a line."""
    told = [answer.passed for answer in answers.values() if answer.passed is not None]
    failed = ", ".join(name for name, answer in answers.items() if answer.passed is False)
    return f"passes {sum(told)} of {len(told)} acceptance rules{f'; turned down by {failed}' if failed else ''}"


def share_text(answer: RuleAnswer) -> str:
    """Return the largest number that a rule looks at, as a share of its limit."""
    if answer.passed is None:
        return "needs"
    share = max(map(_share, answer.readings.values()))
    return "NaN" if math.isinf(share) else f"{share:.2f}"


def _share(reading: RuleReading) -> float:
    """Of its limit, that a number has reached; infinite for NaN, and for anything where the limit is 0."""
    if reading.number is None or reading.limit is None:
        return math.inf
    return reading.number / reading.limit if reading.limit else math.inf if reading.number else 0.0
