"""Older schemas, brought up to date.

1 to 3 -> 4: a record has an `experiment`, `answers` to checks in the place of `claim`, `prediction`, `repeatable` and
`reasons`, and what is there to be drawn as `evidence`; measures, those of training runs and gradients among them, are
one mapping, and the file says what they are. A cell that held although nothing was asked of its rounding was
`measured`. What 2 and 3 brought, names of runs, histograms and training runs, a file of 1 lacks, as it may.

4 to 6 -> 7: `narrowing` says which cells the options left out. What tables show of a record, and which plan explains a
kernel, are data; until then they were sentences, which are read here and nowhere else. The file says what the `plans`
are that it names; of older files that is not known. Two plans are called for where they differ. What 5 and 6 brought,
cells that were `running` and the `group` of a case, older files lack, as they may.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
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
    """Bring a file of an older schema up to date, in place; what is wrong with it is left for the reader to find."""
    if schema < 4:
        _to_4(plain)
    if schema < SCHEMA:
        _to_7(plain)
    plain["schema"] = SCHEMA


_CALL, _TRAINING = "call", "training"
# What the gate of schema 3 held measures to.
_MEASURES: dict[str, dict[str, Any]] = {
    "bias": {"about": "mean signed error of O", "unit": "ulp", "worse": "farther", "limit": 0.02, "margin": 0.05,
             "column": True},
    "rms_ulps": {"about": "root mean square error of O", "unit": "ulp", "worse": "more", "column": True},
    "max_ulps": {"about": "largest error of O", "unit": "ulp", "worse": "more", "limit": 1.0, "share": 0.1,
                 "column": True},
    "error_over_bound": {"about": "largest error as a share of the plan's rounding-error bound",
                         "worse": "more"},
    "gain": {"about": "sum |O| / sum |reference|", "column": True},
    "delta_bias": {"about": "mean of delta_lp - delta_hp, relative to mean |delta_hp|", "worse": "farther",
                   "column": True},
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
    records = list(_records(plain))
    for record in records:
        trained = str(record.get("case")).startswith("train_")
        record["experiment"] = _TRAINING if trained else _CALL
        record["evidence"] = {}
        about = _training(record) if trained else None
        plain["cases"].setdefault(str(record.get("case")), about or {"about": ""})
        _of_call(record)
        _answers(record)
    plain["measures"] = _described(_MEASURES, (name for record in records for name in _object(record["measures"])))
    plain["checks"] = _described(_CHECKS, (name for record in records for name in record["answers"]))
    plain["experiments"] = _described(_EXPERIMENTS, (record["experiment"] for record in records))


def _object(value: Any) -> dict[str, Any]:
    """An object of the file; a file may have anything in its place, and then there is nothing in it."""
    return value if isinstance(value, dict) else {}


def _described(known: Mapping[str, dict[str, Any]], used: Iterable[str]) -> dict[str, dict[str, Any]]:
    """What the names that records use stand for, as far as that is known."""
    return {name: known.get(name, {"about": ""}) for name in used}


def _taken(record: dict[str, Any], name: str) -> dict[str, Any] | None:
    """An object that is moved out of a record; what is none is left there, for the reader to complain about."""
    value = record.get(name)
    return record.pop(name, None) if value is None or isinstance(value, dict) else None


def _training(record: dict[str, Any]) -> dict[str, Any] | None:
    """Move what a training run measured; what its case is, where it ran."""
    training = _taken(record, "training")
    if training is None:
        return None
    record["measures"], record["shown"] = training.get("measures"), training.get("shown")
    record["evidence"]["series"] = {"steps": training.get("steps"), "values": training.get("series")}
    if isinstance(stable := training.get("stable"), bool):
        record["evidence"]["paper"] = "stable" if stable else "fails"
    return {name: training.get(name) for name in ("about", "label", "headline")}


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
    measures = _object(record["measures"])
    if not measures:
        return
    if gradients := _taken(measures, "gradients"):
        measures.update(gradients)
    if (repeatable := measures.pop("repeatable", None)) is not None:
        record["repeatable"] = repeatable
    if record["experiment"] == _CALL:
        record["shown"] = _shown(measures, record.get("verdict"))


def _shown(measures: dict[str, Any], verdict: Any) -> str:
    """As tables showed the measures of a call."""
    mean, gain = _number(_object(measures.get("bias")).get("mean")), _number(measures.get("gain"))
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
    reasons = record.get("reasons") or []
    if isinstance(reasons, list) and all(isinstance(text, str) for text in reasons):
        record.pop("reasons", None)
    else:
        reasons = []
    answers: dict[str, Any] = {}
    outcome = record.get("outcome")
    if claim := _taken(record, "claim"):
        answers[CLAIM] = {"met": claim.get("met"), "asked": claim.get("expectation"), "source": claim.get("source")}
    if prediction := _taken(record, "prediction"):
        answers[PREDICTION] = {"met": prediction.get("met"), "asked": f"what {prediction.get('plan')} predicts"}
        _object(record["measures"]).update(
            predicted_bias=prediction.get("bias"),
            prediction_difference=prediction.get("difference"),
            equal_bits=prediction.get("equal_bits"),
        )
    if (repeatable := record.pop("repeatable", None)) is not None:
        answers["repeatable"] = {"met": repeatable, "asked": "the same bits twice"}
    why = "; ".join(reasons)
    match outcome:
        case "skipped":
            record["skipped"] = why
        case "crashed" | "timed_out":
            answers[RUNS if outcome == CRASHED else IN_TIME] = {"met": False, "asked": "an end", "why": why}
        case "fell" | "inconclusive":
            _blame(answers, reasons, outcome)
        case "held" if answers.keys().isdisjoint({CLAIM, PREDICTION}):
            record["outcome"] = MEASURED
    record["answers"] = answers


# Words of a reason, and the check that it speaks of.
_BLAMED = {"claim fell": CLAIM, "not what ": PREDICTION, "not repeatable": "repeatable", "largest error is": "bound",
           "NaN or Inf": "finite", "": WHOLE}  # fmt: skip


def _blame(answers: dict[str, Any], reasons: list[str], outcome: str) -> None:
    """Give every reason to the check that it speaks of."""
    met = None if outcome == INCONCLUSIVE else False
    for text in reasons:
        name = next(check for words, check in _BLAMED.items() if words in text)
        answer = answers.setdefault(name, {"asked": name})
        answer["met"] = met
        answer["why"] = "; ".join(part for part in (answer.get("why"), text) if part)
    if met not in [answer.get("met") for answer in answers.values()]:
        answers[WHOLE] = {"met": met, "asked": "the outcome", "why": outcome}


def _records(plain: dict[str, Any]) -> Iterator[dict[str, Any]]:
    records = plain.get("records")
    return (record for record in (records if isinstance(records, list) else ()) if isinstance(record, dict))


_NARROWING = {"backend": "backend", "kernels": "kernel", "cases": "case", "dtype": "format"}  # option: field, then


def _to_7(plain: dict[str, Any]) -> None:
    words = {name: str(value) for name, value in _object(plain.get("options")).items() if value}
    plain["narrowing"] = [
        {"given": [f"--{name} {words[name]}"], "field": field, "names": split(words[name])}
        for name, field in _NARROWING.items()
        if name in words and not (name == "kernels" and "kernel" in words)
    ]
    own = {"kernel": "kernel"} | ({} if "cases" in words else {"captured": "case"})  # they ran alone, or beside others
    for name, field in ((name, field) for name, field in own.items() if name in words):
        names = list(dict.fromkeys(str(record.get(field)) for record in _records(plain)))
        plain["narrowing"] += [{"given": [f"--{name} {words[name]}"], "field": field, "names": names}]
    plain["plans"] = {}
    if isinstance(explained := plain.get("explanations"), dict):
        plain["explanations"] = {name: _explanation(text) for name, text in explained.items()}
    experiments, cases = _object(plain.get("experiments")), _object(plain.get("cases"))
    for name, about in _NEW_OF_EXPERIMENTS.items():
        _object(experiments.get(name)).update(about)
    for case in map(_object, cases.values()):
        if isinstance(headline := case.get("headline"), str) and headline in _FIGURES:
            case["figure"] = _FIGURES[headline]
    for record in _records(plain):
        if isinstance(text := record.get("shown"), str):
            described = (cases.get(str(record.get("case"))), experiments.get(str(record.get("experiment"))))
            headlines = (each["headline"] for each in map(_object, described) if isinstance(each.get("headline"), str))
            record["shown"] = _as_shown(text, record, next(headlines, ""))
    _rename(plain)


_NEW_OF_EXPERIMENTS: dict[str, dict[str, Any]] = {
    _CALL: {"largest": "max_ulps", "agreement": "equal_bits", "carried": "delta_bias_in_dq"},
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


def _explanation(text: Any) -> Any:
    """A sentence as data; what is none is left for the reader to complain about."""
    for state, pattern in _EXPLAINED:
        if isinstance(text, str) and (match := pattern.fullmatch(text)):
            parts = match.groupdict()
            shares = (pair.rsplit(" ", 2)[:2] for pair in (parts.get("worst") or "").split(", ") if pair)
            return {
                "state": state,
                "plans": re.split(", | or ", parts["plans"]),
                "cells": int(parts["cells"]),
                "share": float(parts["share"]) / 100 if parts.get("share") else None,
                "worst": {case: float(share) / 100 for case, share in shares},
            }
    return text


def _as_shown(text: str, record: dict[str, Any], headline: str) -> dict[str, Any]:
    """What tables showed as data that are written the same."""
    if text in ("NaN", "nan", "+nan", "+inf", "-inf", "inf"):
        return {"kind": NONFINITE}
    values = _object(record.get("measures"))
    if text.startswith("x"):
        return {"kind": SHRUNK, "number": _number(values.get("gain"))}
    match = _NUMBER.fullmatch(text)
    if match is None:
        return {"kind": NO_NUMBER}
    value = values.get(headline)
    digits, power, unit = min(len(match["digits"] or ""), 6), match["power"], match["unit"]
    spec = f"{'+' if match['sign'] else ''}.{digits}{'e' if power else 'f'}"
    number = _number(value.get("mean") if isinstance(value, dict) else value)
    if number is None or format(number, spec) != match["number"]:
        number = float(match["number"])
    verdict = record.get("verdict")
    marked = unit == _MARKS.get(str(verdict), "") and verdict is not None
    shown = {"kind": headline, "number": number, "spec": spec}
    return shown | ({"verdict": verdict} if marked else {"unit": unit})
