"""Older schemas, brought up to date one version at a time.

1 -> 2: `run` tells runs apart; measures say whether the cell is `repeatable`; a traced case has a `histogram`, and its
`trace` is null where there is none.

2 -> 3: a record of a short training run has `training`.

3 -> 4: a record has an `experiment`, `answers` to checks in the place of `claim`, `prediction`, `repeatable` and
`reasons`, and what is there to be drawn as `evidence`; measures, those of training runs and gradients among them, are
one mapping, and the file says what they are. A cell that held although nothing was asked of its rounding was
`measured`.

4 -> 5: an interrupted run says which cells were `running`.

5 -> 6: a case says which `group` of cases it belongs to.

6 -> 7: `narrowing` says which cells the options left out. What tables show of a record, and which plan explains a
kernel, are data; until then they were sentences, which are read here and nowhere else. The file says what the `plans`
are that it names; of older files that is not known. Two plans are called for where they differ.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tiebreak.reports.names import split
from tiebreak.reports.records.record import (
    AMBIGUOUS,
    BEHAVES_LIKE,
    BIASED,
    CLAIM,
    CRASHED,
    FOLLOWS,
    IN_TIME,
    INCONCLUSIVE,
    MEASURED,
    NO_NUMBER,
    NONFINITE,
    PREDICTION,
    RUNS,
    SCHEMA,
    SHRUNK,
    UNDECIDED,
    UNEXPLAINED,
    WHOLE,
)


def upgrade(plain: dict[str, Any], schema: int) -> None:
    """Bring a file of an older schema up to date, in place; what is wrong with it is left for the reader to find.

    Args:
        plain: the whole file as JSON has it.
        schema: the version it was written in, 1 to the present one.
    """
    for version in range(schema, SCHEMA):
        _STEPS[version](plain)
    plain["schema"] = SCHEMA


def _to_2(plain: dict[str, Any]) -> None:
    plain.setdefault("run", None)
    for record in _records(plain):
        record["trace"] = record.get("trace") or None
        record.setdefault("histogram", None)
        if isinstance(measures := record.get("measures"), dict):
            measures.setdefault("repeatable", None)


def _to_3(plain: dict[str, Any]) -> None:
    for record in _records(plain):
        record.setdefault("training", None)


_CALL, _TRAINING = "call", "training"
# What the gate of schema 3 held measures to.
_MEASURES: dict[str, dict[str, Any]] = {
    "bias": {"about": "mean signed error of O", "unit": "ulp", "worse": "farther", "limit": 0.02, "column": True},
    "rms_ulps": {"about": "root mean square error of O", "unit": "ulp", "column": True},
    "max_ulps": {"about": "largest error of O", "unit": "ulp", "worse": "more", "limit": 1.0, "share": 0.1,
                 "column": True},
    "error_over_bound": {"about": "largest error as a share of the plan's rounding-error bound"},
    "gain": {"about": "sum |O| / sum |reference|", "column": True},
    "delta_bias": {"about": "mean of delta_lp - delta_hp, relative to mean |delta_hp|", "column": True},
    "left_out": {"about": "elements whose reference is 0"},
    "nonfinite": {"about": "elements that are NaN or Inf where the reference is finite", "worse": "more", "limit": 0.0,
                  "per": "elements", "portable": True, "column": True},
    "elements": {"about": "elements of O"},
}  # fmt: skip
_CHECKS: dict[str, dict[str, Any]] = {
    RUNS: {"about": "the kernel ran to its end"},
    IN_TIME: {"about": "the kernel ran in its time"},
    "finite": {"about": "finite where the reference is"},
    "bound": {"about": "largest error within the plan's bound"},
    "repeatable": {"about": "two runs on the same input give the same bits"},
    CLAIM: {"about": "what the case claims", "judges": True},
    PREDICTION: {"about": "what the declared plan predicts", "judges": True},
    WHOLE: {"about": "what a file of schema 3 says of the cell as a whole"},
}

_EXPERIMENTS: dict[str, dict[str, Any]] = {
    _CALL: {"about": "one call of attention", "headline": "bias"},
    _TRAINING: {"about": "a short training run"},
}


def _to_4(plain: dict[str, Any]) -> None:
    plain.update(cases={}, not_run=[])
    for record in _records(plain):
        trained = str(record.get("case")).startswith("train_")
        record["experiment"] = _TRAINING if trained else _CALL
        record["evidence"] = {}
        about = _training(record) if trained else None
        plain["cases"].setdefault(str(record.get("case")), about or {"about": ""})
        _of_call(record)
        _answers(record)
    found = list(_records(plain))
    plain["measures"] = _described(_MEASURES, [record["measures"] for record in found])
    plain["checks"] = _described(_CHECKS, [record["answers"] for record in found])
    plain["experiments"] = _described(_EXPERIMENTS, [{record["experiment"]: None} for record in found])


def _described(known: Mapping[str, dict[str, Any]], used: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """What the names that records use stand for, as far as that is known; a record may have anything in their place."""
    names = dict.fromkeys(name for each in used if isinstance(each, dict) for name in each)
    return {name: known.get(name, {"about": ""}) for name in names}


def _taken(record: dict[str, Any], name: str) -> dict[str, Any] | None:
    """An object that is moved out of a record; what is none is left there, for the reader to complain about."""
    found = record.get(name)
    if found is not None and not isinstance(found, dict):
        return None
    taken: dict[str, Any] | None = record.pop(name, None)
    return taken


def _training(record: dict[str, Any]) -> dict[str, Any] | None:
    """Move what a training run measured; what its case is, where it ran."""
    found = _taken(record, "training")
    if found is None:
        return None
    record["measures"], record["shown"] = found.get("measures"), found.get("shown")
    record["evidence"]["series"] = {"steps": found.get("steps"), "values": found.get("series")}
    if isinstance(stable := found.get("stable"), bool):
        record["evidence"]["paper"] = "stable" if stable else "fails"
    return {name: found.get(name) for name in ("about", "label", "headline")}


def _of_call(record: dict[str, Any]) -> None:
    """Flatten the measures of a call, and gather what is drawn."""
    if record["experiment"] == _CALL and record.get("training") is None:
        record.pop("training", None)
    evidence = record["evidence"]
    for name in ("trace", "histogram", "fits"):
        if value := record.pop(name, None):
            evidence[name] = value
    if record.get("measures") is None:
        record["measures"] = {}
    measures = record["measures"]
    if not isinstance(measures, dict) or not measures:
        return
    if gradients := _taken(measures, "gradients"):
        measures.update(gradients)
    if (repeatable := measures.pop("repeatable", None)) is not None:
        record["repeatable"] = repeatable
    if record["experiment"] == _CALL:
        record["shown"] = _shown(measures, record.get("verdict"))


def _shown(measures: dict[str, Any], verdict: Any) -> str:
    """As tables showed the measures of a call."""
    bias, gain = measures.get("bias"), _number(measures.get("gain"))
    mean = _number(bias.get("mean")) if isinstance(bias, dict) else None
    if measures.get("nonfinite"):
        return "NaN"
    if gain is not None and gain < 0.9:
        return f"x{gain:.2g}" if gain >= 0.01 else "x0"
    if mean is None:
        return "none"
    return f"{mean:+.2f}" + {BIASED: " B", UNDECIDED: " ?"}.get(str(verdict), "")


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and abs(value) <= sys.float_info.max else None


def _answers(record: dict[str, Any]) -> None:
    """From claim, prediction, repeatability and reasons to answers."""
    told = record.get("reasons") or []
    if isinstance(told, list) and all(isinstance(text, str) for text in told):
        record.pop("reasons", None)
    else:
        told = []
    found: dict[str, Any] = {}
    outcome = record.get("outcome")
    if claim := _taken(record, "claim"):
        found[CLAIM] = {"met": claim.get("met"), "asked": claim.get("expectation"), "source": claim.get("source")}
    if prediction := _taken(record, "prediction"):
        found[PREDICTION] = {"met": prediction.get("met"), "asked": f"what {prediction.get('plan')} predicts"}
        if isinstance(measures := record["measures"], dict):
            measures["predicted_bias"] = prediction.get("bias")
            measures["prediction_difference"] = prediction.get("difference")
            measures["equal_bits"] = prediction.get("equal_bits")
    repeatable = record.pop("repeatable", None)
    if repeatable is not None:
        found["repeatable"] = {"met": repeatable, "asked": "the same bits twice"}
    why = "; ".join(told)
    match outcome:
        case "skipped":
            record["skipped"] = why
        case "crashed" | "timed_out":
            found[RUNS if outcome == CRASHED else IN_TIME] = {"met": False, "asked": "an end", "why": why}
        case "fell" | "inconclusive":
            _blame(found, told, outcome)
        case "held" if found.keys().isdisjoint({CLAIM, PREDICTION}):
            record["outcome"] = MEASURED
    record["answers"] = found


_BEGINNINGS = (
    ("claim fell", CLAIM), ("not what ", PREDICTION), ("not repeatable", "repeatable"), ("largest error is", "bound"),
)  # fmt: skip


def _blame(found: dict[str, Any], told: list[str], outcome: str) -> None:
    """Give every reason to the check that it speaks of."""
    met = None if outcome == INCONCLUSIVE else False
    for text in told:
        name = next((check for beginning, check in _BEGINNINGS if beginning in text), "")
        if not name:
            name = "finite" if "NaN or Inf" in text else WHOLE
        answer = found.setdefault(name, {"met": met, "asked": name})
        answer["met"] = met
        answer["why"] = "; ".join(part for part in (answer.get("why"), text) if part)
    if met not in [answer.get("met") for answer in found.values()]:
        found[WHOLE] = {"met": met, "asked": "the outcome", "why": outcome}


def _records(plain: dict[str, Any]) -> Iterator[dict[str, Any]]:
    found = plain.get("records")
    return (record for record in (found if isinstance(found, list) else ()) if isinstance(record, dict))


def _to_5(plain: dict[str, Any]) -> None:
    plain.setdefault("running", [])


def _to_6(plain: dict[str, Any]) -> None:
    """Nothing to do: what an older file does not tell is empty."""


_NARROWING = {"backend": "backend", "kernels": "kernel", "cases": "case", "dtype": "format"}  # option: field, then


def _to_7(plain: dict[str, Any]) -> None:
    options = plain.get("options")
    words = {name: str(value) for name, value in options.items() if value} if isinstance(options, dict) else {}
    plain["narrowing"] = [
        {"given": [f"--{name} {words[name]}"], "field": field, "names": split(words[name])}
        for name, field in _NARROWING.items()
        if name in words
    ]
    if "captured" in words and "cases" not in words:  # they ran alone
        cases = list(dict.fromkeys(str(record.get("case")) for record in _records(plain)))
        plain["narrowing"] += [{"given": [f"--captured {words['captured']}"], "field": "case", "names": cases}]
    _to_data(plain)
    _rename(plain)


_NEW_OF_EXPERIMENTS: dict[str, dict[str, Any]] = {
    _CALL: {"largest": "max_ulps", "agreement": "equal_bits"},
    _TRAINING: {"pooled": True},
}
_FIGURES: dict[str, dict[str, Any]] = {
    "delta_error_mean": {"series": "delta_error", "title": "Training: delta's error summed up",
                         "note": "A straight line is a bias. The kernels that err most and least.",
                         "y_label": "sum of delta's error", "summed": True},
    "wq_norm_growth": {"series": "wq_norm", "title": "Training: W_Q's norm",
                       "note": "Spectral norm. The most growth and the least.", "y_label": "spectral norm"},
}  # fmt: skip
_MARKS = {BIASED: "B", UNDECIDED: "?"}
_NUMBER = re.compile(r"(?P<number>(?P<sign>[+-]?)\d+(\.(?P<digits>\d+))?(?P<power>e[+-]\d+)?) ?(?P<unit>.*)", re.DOTALL)
_SHARE = r"(?P<share>[\d.]+) % of bits in (?P<cells>\d+) cells?"
_EXPLAINED = (
    (FOLLOWS, re.compile(rf"follows (?P<plans>.+?) \({_SHARE}\)")),
    (AMBIGUOUS, re.compile(rf"can't tell apart: (?P<plans>.+?) on these cases \({_SHARE}\)")),
    (BEHAVES_LIKE, re.compile(r"behaves like (?P<plans>.+?) in (?P<cells>\d+) cells? \(.*\)")),
    (UNEXPLAINED, re.compile(rf".*; nearest is (?P<plans>.+?) with {_SHARE} \((?P<worst>.*?)(?:, \.\.\.)?\)")),
)  # fmt: skip


_RENAMED = {"fused_half_up": "fused_p_bar_away", "fused_ties_away": "fused_p_bar_o_away"}  # plans
_OLD_NAME = re.compile(rf"\b({'|'.join(_RENAMED)})\b")


def _rename(plain: dict[str, Any]) -> None:
    """Plans in all that names them: kernels, cells, commands, fits, options."""
    text = json.dumps(plain)
    if _OLD_NAME.search(text):
        plain.update(json.loads(_OLD_NAME.sub(lambda name: _RENAMED[name[1]], text)))


def _to_data(plain: dict[str, Any]) -> None:
    """Explanations and what tables show, from words."""
    plain["plans"] = {}
    explained, experiments = plain.get("explanations"), plain.get("experiments")
    if isinstance(explained, dict):
        plain["explanations"] = {name: _explanation(text) for name, text in explained.items()}
    for name, about in _NEW_OF_EXPERIMENTS.items():
        if isinstance(experiments, dict) and isinstance(kind := experiments.get(name), dict):
            kind.update(about)
    cases = plain.get("cases")
    for case in cases.values() if isinstance(cases, dict) else ():
        if isinstance(case, dict) and isinstance(headline := case.get("headline"), str) and headline in _FIGURES:
            case["figure"] = _FIGURES[headline]
    for record in _records(plain):
        if isinstance(text := record.get("shown"), str):
            record["shown"] = _as_shown(text, record, _headline(record, plain))


def _explanation(text: Any) -> Any:
    """A sentence as data; what is none is left for the reader to complain about."""
    for state, pattern in _EXPLAINED:
        if isinstance(text, str) and (told := pattern.fullmatch(text)):
            parts = told.groupdict()
            shares = (pair.rsplit(" ", 2)[:2] for pair in (parts.get("worst") or "").split(", ") if pair)
            return {
                "state": state,
                "plans": re.split(", | or ", parts["plans"]),
                "cells": int(parts["cells"]),
                "share": float(parts["share"]) / 100 if parts.get("share") else None,
                "worst": {case: float(share) / 100 for case, share in shares},
            }
    return text


def _headline(record: dict[str, Any], plain: dict[str, Any]) -> str:
    """The measure that tables showed of a record; empty where the file does not tell."""
    for kind, name in (("cases", "case"), ("experiments", "experiment")):
        described = plain.get(kind)
        about = described.get(str(record.get(name))) if isinstance(described, dict) else None
        if isinstance(about, dict) and isinstance(headline := about.get("headline"), str):
            return headline
    return ""


def _as_shown(text: str, record: dict[str, Any], headline: str) -> dict[str, Any]:
    """What tables showed as data that are written the same."""
    if text in ("NaN", "nan", "+nan", "+inf", "-inf", "inf"):
        return {"kind": NONFINITE}
    measures = record.get("measures")
    values = measures if isinstance(measures, dict) else {}
    if text.startswith("x"):
        return {"kind": SHRUNK, "number": _number(values.get("gain"))}
    told = _NUMBER.fullmatch(text)
    if told is None:
        return {"kind": NO_NUMBER}
    value = values.get(headline)
    digits, power, unit = min(len(told["digits"] or ""), 6), told["power"], told["unit"]
    spec = f"{'+' if told['sign'] else ''}.{digits}{'e' if power else 'f'}"
    number = _number(value.get("mean") if isinstance(value, dict) else value)
    if number is None or format(number, spec) != told["number"]:
        number = float(told["number"])
    verdict = record.get("verdict")
    marked = unit == _MARKS.get(str(verdict), "") and verdict is not None
    shown = {"kind": headline, "number": number, "spec": spec}
    return shown | ({"verdict": verdict} if marked else {"unit": unit})


_STEPS: dict[int, Callable[[dict[str, Any]], None]] = {1: _to_2, 2: _to_3, 3: _to_4, 4: _to_5, 5: _to_6, 6: _to_7}
