"""Edits of a file: what a gate, or whoever verifies a statement, has to find out.

Of any one leaf: the leaves are walked, so that a field that records get is edited without a word here. And of a number
or an answer with all that follows from it, so that the record agrees with itself.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from random import Random
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from tiebreak.reports.records.record import (
    BIASED,
    NO_NUMBER,
    NONFINITE,
    REPLACED,
    SKIPPED,
    Answer,
    Estimate,
    Record,
    Run,
    Shown,
    Value,
    kept,
    outcome_of,
    verdict_of,
)

Step = str | int
Path = tuple[Step, ...]
GONE = object()  # in the place of a value: the leaf is taken out

#: Leaves of a run that anybody may edit, by patterns of their names, and why that does not matter.
FREE = {
    "run": "a name that tells runs apart",
    "seconds*": "how long cells took: nothing is held to it",
    "unavailable*": "why a backend could not run: its cells are missing all the same",
    "explanations*": "made of the records' evidence, for the report: the records are judged",
    "options.*": "what was typed: what came of it is in the records; another seed or number of heads is refused",
}


def plain_of(value: Any) -> Any:
    """Return what JSON has of data, fields at their defaults too."""
    if isinstance(value, Struct):
        return {name: plain_of(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, Mapping):
        return {name: plain_of(part) for name, part in value.items()}
    return [plain_of(part) for part in value] if isinstance(value, tuple) else value


def leaves(value: Any, at: Path = ()) -> Iterator[Path]:
    """Walk the path of every leaf, and of everything that can be taken out, of what JSON has."""
    if isinstance(value, (dict, list)):
        for step, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(part, (*at, step))
    if at:
        yield at


def found(plain: Any, path: Path) -> Any:
    """Return the value at a path."""
    for step in path:
        plain = plain[step]
    return plain


def name_of(path: Path) -> str:
    """Return a path as messages have it, such as `records[3].measures.bias`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)[1:]


def edits(value: Any, others: list[Any], chance: Random) -> list[Any]:
    """Draw other values for a leaf, by its type.

    Args:
        value: of the leaf.
        others: values of its kind elsewhere in the file.
        chance: decides.
    """
    swapped = [chance.choice(others)] if others else []
    if isinstance(value, bool):
        return [not value, None, GONE]
    if isinstance(value, (int, float)):
        sizes = [-value, 0, value + 1, value * 2, value * 1e6, value / 3, None, "NaN"]
        return [chance.choice(sizes), *swapped, GONE]
    if isinstance(value, str):
        return [chance.choice([f"{value}x", "", value[:-1], None]), *swapped, GONE]
    if value is None:
        return [chance.choice([0.0, "x", True, 1]), *swapped]
    return [GONE, type(value)()]


def alike(plain: Any, path: Path) -> list[Any]:
    """Return what stands at the same place in other records."""
    if path[0] != "records" or len(path) < 3:
        return []
    values = []
    for record in plain["records"]:
        try:
            values.append(found(record, path[2:]))
        except (KeyError, IndexError, TypeError):
            continue
    return [value for value in values if value != found(plain, path)]


def edited(plain: dict[str, Any], path: Path, value: Any) -> dict[str, Any]:
    """Return a copy with another value at a path, or with none."""
    made = copy.copy(plain)
    at: Any = made
    for step in path[:-1]:
        at[step] = copy.copy(at[step])
        at = at[step]
    if value is GONE:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return made


def unnoticed(
    plain: dict[str, Any], paths: Iterable[Path], chance: Random, passes: Callable[[dict[str, Any]], bool]
) -> Iterator[tuple[Path, Any]]:
    """Yield the edits of single leaves, where and to what, with which a file passes."""
    for path in paths:
        for value in edits(found(plain, path), alike(plain, path), chance):
            if passes(edited(plain, path, value)):
                yield path, value


def following(record: Record, run: Run) -> Record:
    """Return a record with the answers, the verdict, the outcome and what is shown that its numbers come to."""
    limits = {name: kept(run.checks[name].limits, record.measures) for name in record.answers}
    decided = {
        name for name, passed in limits.items() if run.checks[name].limits and not (run.checks[name].more and passed)
    }
    decided = {name for name in decided if record.answers[name].passed is not limits[name]}
    whys = {True: "", False: "made up", None: "made up"}
    given = {name: replace(record.answers[name], passed=limits[name], why=whys[limits[name]]) for name in decided}
    answers = {**record.answers, **given}
    verdict, tied = record.verdict and verdict_of(record, run.measures), (record.tied, record.in_training)
    made = {"answers": answers, "verdict": verdict, "shown": _shown(record, run, verdict)}
    if verdict not in (None, BIASED):
        tied = None, None
    outcome = outcome_of(answers, [name for name, check in run.checks.items() if check.judges])
    outcome = SKIPPED if record.outcome == SKIPPED else outcome
    return replace(record, **made, tied=tied[0], in_training=tied[1], outcome=outcome)


def _shown(record: Record, run: Run, verdict: str | None) -> Shown | None:
    shown = record.shown
    if shown is None or verdict == NONFINITE:
        return shown and Shown(NONFINITE)
    kind = run.experiments[record.experiment].headline if shown.kind in REPLACED else shown.kind
    number = record.number(kind or "")
    if kind is None or number is None:
        return Shown(NO_NUMBER)
    return Shown(kind, 100 * number if shown.unit == "%" else number, shown.unit, verdict, shown.spec)


def consistent_edits(record: Record, run: Run, chance: Random) -> Iterator[tuple[str, Record]]:
    """Yield a record with another number, or another answer, and all that follows; and what was edited."""
    for name, value in record.measures.items():
        number = 0.0 if isinstance(value, Estimate) or value is None else value
        size = chance.choice([1e-3, 0.5, 2.0, 102.0, 1e6])
        others: list[Value] = [number + size, number - size, None, 0.0]
        if isinstance(value, Estimate):
            mean, width = value.mean or 0.0, value.half_width or 0.0
            pairs = (mean + size, width), (mean - size, width), (mean, width + size), (mean, 0.0), (None, None)
            others = [Estimate(*pair) for pair in pairs]
        for other in (other for other in others if other != value):
            yield f"measures.{name}", following(replace(record, measures={**record.measures, name: other}), run)
        yield f"measures.{name}", following(replace(record, measures=_without(record.measures, name)), run)
    for name, answer in record.answers.items():
        for passed in {True, False, None} - {answer.passed}:
            other_answer = Answer(passed, answer.asked, "" if passed else "made up", answer.source)
            yield f"answers.{name}", following(replace(record, answers={**record.answers, name: other_answer}), run)
        yield f"answers.{name}", following(replace(record, answers=_without(record.answers, name)), run)


def _without(there: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {each: value for each, value in there.items() if each != name}
