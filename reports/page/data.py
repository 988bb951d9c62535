"""The data of the page's script, as compressed JSON: every cell once for all platforms."""

import base64
import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tiebreak.reports.records.decode import encode
from tiebreak.reports.records.order import cases_of
from tiebreak.reports.records.record import (
    NONFINITE,
    SHRUNK,
    Estimate,
    HistogramRecord,
    Record,
    RuleAnswer,
    Run,
    number_of,
)
from tiebreak.reports.tables.compare import Row, compare
from tiebreak.reports.tables.texts import cell_text, changes_text, explanation_texts

_DIGITS = 5  # significant ones of a number on the page: the files have them all
_FITS = 3  # plans that are named of those that a kernel's bits were held against
_OF_ANSWERS = ("passed", "asked", "why")
_DRAWN = frozenset({"trace", "series"})  # evidence that the figures draw


def _rules_text(answers: Mapping[str, RuleAnswer]) -> str:
    """Return the rules' verdicts on one record, in a line."""
    verdicts = [answer.passed for answer in answers.values() if answer.passed is not None]
    failed = ", ".join(name for name, answer in answers.items() if answer.passed is False)
    return f"passes {sum(verdicts)} of {len(verdicts)} acceptance rules{f'; turned down by {failed}' if failed else ''}"


_TEXTS: Mapping[str, Callable[[Any], str]] = {"changes": changes_text, "rules": _rules_text}  # evidence put in words


def page_data(runs: Sequence[Run], labels: Sequence[str]) -> str:
    """Return the cells of all runs as JSON, compressed by gzip, in base64, which browsers of 2023 and later unpack."""
    text = json.dumps(plain(runs, labels), separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def plain(runs: Sequence[Run], labels: Sequence[str]) -> dict[str, Any]:
    """Return platforms, cases and measures; and every cell with its data by platform.

    The data are null where a platform lacks the cell, or the number of a platform whose data are equal.
    """
    cases = cases_of(runs)
    measures = {name: about for run in reversed(runs) for name, about in run.measures.items()}
    headlines = {name: about.headline for run in reversed(runs) for name, about in run.experiments.items()}
    words = ("about", "source", "group", "unclaimed", "headline")
    columns = {name for name, about in measures.items() if about.column} | set(headlines.values())
    return {
        "platforms": [_platform(run, label) for run, label in zip(runs, labels, strict=True)],
        "pooled": sorted({name for run in runs for name in run.pooled}),
        "cases": [
            {"name": name, "failure": about.failure, **{field: getattr(about, field) or "" for field in words}}
            for name, about in cases.items()
        ],
        "measures": [
            {"name": name, "unit": about.unit, "about": about.about, "column": name in columns}
            for name, about in measures.items()
        ],
        "cells": [_cell(row, list(cases), headlines) for row in compare(runs, labels).rows],
    }


def _cell(row: Row, cases: Sequence[str], headlines: Mapping[str, str | None]) -> dict[str, Any]:
    first = row.record
    distinct: list[Any] = []
    for record in row.records:
        data = None if record is None else _record(record, headlines.get(record.experiment))
        distinct.append(data if data is None or data not in distinct else distinct.index(data))
    return {
        **{field: getattr(first, field) for field in ("backend", "format", "kernel", "experiment")},
        "place": cases.index(first.case),
        "agreement": row.agreement.mark,
        "bits": row.letters,
        "records": distinct,
    }


def _record(record: Record, headline: str | None) -> dict[str, Any]:
    """Return the data of one cell on one platform."""
    # The number that colours a cell: where it is shown, and has a verdict; what cancels or shrank has none.
    shrank = record.shown is not None and record.shown.kind == SHRUNK
    toned = headline is not None and record.verdict not in (None, NONFINITE) and not shrank
    strings = ("outcome", "verdict", "plan", "excused", "skipped", "command", "digest")
    return {
        **{field: getattr(record, field) or "" for field in strings},
        "text": cell_text(record),
        "seed": record.seed,
        "heads": record.heads,
        "version": record.case_version,
        "tone": _short(record.number(headline)) if toned and headline is not None else None,
        "answers": [
            {"check": check, **{field: getattr(answer, field) for field in _OF_ANSWERS}, "source": answer.source or ""}
            for check, answer in record.answers.items()
        ],
        "measures": [
            [name, _short(number_of(value)), _short(value.half_width) if isinstance(value, Estimate) else None]
            for name, value in record.measures.items()
        ],
        "evidence": _evidence(record),
    }


def _evidence(record: Record) -> dict[str, Any]:
    """Return the histogram, the plans whose bits the kernel's were held against, and what else a record carries."""
    carried: dict[str, Any] = {"more": []}
    for name, value in record.evidence.items():
        if isinstance(value, HistogramRecord):
            carried["histogram"] = [value.low, value.width, value.outside, value.counts]
        elif name == "fits":
            shares = [(plan, fit.bits) for plan, fit in value.items() if fit.bits is not None]
            shares.sort(key=lambda pair: -pair[1])
            carried["fits"] = [[plan, _short(bits)] for plan, bits in shares[:_FITS]]
        elif name in _TEXTS:
            carried["more"].append([name, _TEXTS[name](value)])
        elif name not in _DRAWN:
            carried["more"].append([name, value if isinstance(value, str) else encode(value)])
    return carried


def _platform(run: Run, label: str) -> dict[str, Any]:
    """Return the page's description of a platform, without its label."""
    facts = {name: str(value) for name, value in run.platform.items() if isinstance(value, str | int | float)}
    facts |= {f"backend {name}": assumption for name, assumption in run.platform.get("assumed", {}).items()}
    return {"label": label, "facts": facts, "explanations": explanation_texts(run)}


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{_DIGITS}g}")
