"""Made-up runs and audits: what reports are tested with needs no kernel."""

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from tiebreak.reports.records.record import (
    CLAIM,
    NO_NUMBER,
    NONFINITE,
    PREDICTION,
    Answer,
    CaseRecord,
    CheckRecord,
    Estimate,
    ExperimentRecord,
    LimitRecord,
    MeasureRecord,
    Narrowing,
    Record,
    Run,
    SeriesFigure,
    SeriesRecord,
    Shown,
    kept,
    outcome_of,
    verdict_of,
)

PLATFORM = {
    "machine": "x86_64",
    "cpu": "Made-up 9000",
    "cpu_features": ["avx2", "fma"],
    "cores": 4,
    "memory_gib": 8.0,
    "aten_cpu_capability": "AVX2",
    "onednn_max_cpu_isa": None,
    "python": "3.11.7",
    "torch": "2.13.0",
    "numpy": "2.4.6",
    "os": "Linux 6.1",
    "commit": None,
    "level": "native",
}
OPTIONS = {"backend": None, "kernels": None, "cases": None, "dtype": "bf16", "seed": "1", "heads": "256"}
MEASURES = {
    "bias": Estimate(0.01, 0.02),
    "apart": Estimate(0.001, 0.002),
    "rms_ulps": 0.35,
    "max_ulps": 1.5,
    "error_over_bound": 0.4,
    "gain": 1.0,
    "delta_bias": Estimate(1e-5, 2e-5),
    "left_out": 0,
    "nonfinite": 0,
    "elements": 65536,
    "dq_relative_error": 0.1,
}
# As the suite describes its own measures; what is not in here is a plain number that the gate does not hold.
DESCRIBED = {
    "bias": MeasureRecord("mean signed error of O", "ulp", worse="farther", limit=0.02, margin=0.05, column=True),
    "rms_ulps": MeasureRecord("root mean square error of O", "ulp", worse="more", column=True),
    "max_ulps": MeasureRecord("largest error of O", "ulp", worse="more", limit=1.0, share=0.1, column=True),
    "delta_bias": MeasureRecord("error of delta", worse="farther", column=True),
    "rounded_bias": MeasureRecord("bias of O rounded once", "ulp", of_biased=True),
    "nonfinite": MeasureRecord("NaN or Inf", worse="more", limit=0.0, per="elements", portable=True, column=True),
}
CHECKS = {
    "bound": CheckRecord("bound", limits=(LimitRecord("error_over_bound", 1.0),)),
    CLAIM: CheckRecord(CLAIM, judges=True),
    PREDICTION: CheckRecord(PREDICTION, judges=True, limits=(LimitRecord("apart", 0.05, size=True),), more=True),
}
ANSWERS = {
    "repeatable": Answer(True, "the same bits twice"),
    CLAIM: Answer(True, "as claimed", source="section 4"),
    PREDICTION: Answer(True, "what flash@paper predicts"),
}


def shown_of(measures: Mapping[str, Any], verdict: str | None) -> Shown:
    """A bias with its verdict, or NaN, as the matrix shows a call."""
    bias = measures["bias"].mean
    if measures["nonfinite"] or bias is None:
        return Shown(NONFINITE if measures["nonfinite"] else NO_NUMBER)
    return Shown("bias", bias, verdict=verdict)


def record(
    kernel: str = "flash@paper",
    case: str = "random",
    *,
    measures: Mapping[str, Any] | None = None,
    answers: Mapping[str, Answer | None] | None = None,
    **fields: Any,
) -> Record:
    """A record of a cell that passed; what differs is named. An answer that is None was not asked for.

    Verdict, outcome and whether it is within its bound are what its numbers and answers come to, and other numbers have
    other bits, unless something else is said.
    """
    backend = fields.setdefault("backend", "cpu")
    values = {**MEASURES, **(measures or {})}
    within = kept(CHECKS["bound"].limits, values)
    bound = Answer(within, "within its bound", "" if within else "beyond its bound")
    asked = {name: it for name, it in {**ANSWERS, "bound": bound, **(answers or {})}.items() if it is not None}
    bits = hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()[:16]
    base = Record(
        id=f"{backend}-{kernel}-{case}-bf16",
        backend=backend,
        kernel=kernel,
        case=case,
        case_version=1,
        format="bf16",
        seed=1,
        heads=256,
        experiment="call",
        outcome=outcome_of(asked, (CLAIM, PREDICTION)),
        command=f"pytest tests/matrix --kernels {kernel} --cases '{case}'",
        plan="flash@paper",
        measures=values,
        answers=asked,
        digest=bits if measures else "0123456789abcdef",
    )
    verdict = fields.setdefault("verdict", verdict_of(base, DESCRIBED))
    return replace(base, **{"shown": shown_of(values, verdict), **fields})


def failing(
    kernel: str = "flash@paper", case: str = "random", why: str = "claim failed: unbiased", **fields: Any
) -> Record:
    """A record of a cell whose claim failed."""
    answers = {CLAIM: Answer(False, "as claimed", why, "section 4")} | fields.pop("answers", {})
    return record(kernel, case, answers=answers, **fields)


def skip(kernel: str = "flash@paper", case: str = "random", outcome: str = "skipped", **fields: Any) -> Record:
    """A record of a cell that gave no numbers."""
    why = "no backward pass"
    empty: dict[str, Any] = {"measures": {}, "answers": {}, "verdict": None, "shown": None, "digest": None}
    if outcome == "skipped":
        empty["skipped"] = why
    else:
        check = "in_time" if outcome == "timed_out" else "runs"
        empty["answers"] = {check: Answer(False, "an end", why)}
    return replace(record(kernel, case, outcome=outcome), **(empty | fields))


DRIFT = SeriesFigure("delta_error", "delta's error", "Summed up.", "sum", summed=True)

CASES = {
    "train_drift": CaseRecord("delta errs", label="A", headline="delta_error_mean", figure=DRIFT),
    "train_lm": CaseRecord("a language model", label="L", headline="delta_error_mean"),
    **{f"tied_maxima[k={k}]": CaseRecord("ties", family="tied maxima", at=k) for k in (2, 3, 4, 8, 16)},
}
EXPERIMENTS = {
    "call": ExperimentRecord(
        "one call", "bias of O in ulps", headline="bias", largest="max_ulps", agreement="equal_bits"
    ),
    "training": ExperimentRecord("a short training run", "What differs is the kernel.", pooled=True),
}


def run(*records: Record, **fields: Any) -> Run:
    """A complete run of these records, of one cell without any, which describes what they have."""
    given = records or (record(),)
    platform = PLATFORM | fields.pop("platform", {})
    options = OPTIONS | fields.pop("options", {})
    measures = {name: DESCRIBED.get(name, MeasureRecord(name)) for cell in given for name in cell.measures}
    described = {
        "measures": measures | fields.pop("measures", {}),
        "checks": {name: CHECKS.get(name, CheckRecord(name)) for cell in given for name in cell.answers},
        "cases": {cell.case: CASES.get(cell.case, CaseRecord(cell.case)) for cell in given} | fields.pop("cases", {}),
        "experiments": {
            cell.experiment: EXPERIMENTS.get(cell.experiment, ExperimentRecord("made up")) for cell in given
        }
        | fields.pop("experiments", {}),
    }
    seconds = {record.id: 0.25 for record in given}
    narrowing = (Narrowing(("--dtype bf16",), "format", ("bf16",)),)
    return replace(
        Run(platform, options, given, narrowing=narrowing, seconds=seconds, run="a" * 32, **described), **fields
    )


def trained(
    kernel: str = "flash@train", case: str = "train_drift", value: float | None = 2e-3, **fields: Any
) -> Record:
    """The record of a training run that passed."""
    passed: dict[str, Any] = {
        "experiment": "training",
        "outcome": "passed",
        "heads": 0,
        "shown": Shown.of("delta_error_mean", math.nan if value is None else value, spec="+.1e"),
        "measures": {"delta_error_mean": value},
        "answers": {CLAIM: Answer(True, "0.0012 < delta_error_mean", source="section 3")},
        "digest": "fedcba9876543210",
        "evidence": {
            "series": SeriesRecord((0, 1, 2), {"delta_error": (2e-3, None, 1e-3), "wq_norm": (1.0, 2.0, 4.0)}),
            "paper": "fails",
        },
    }
    return replace(skip(kernel, case, skipped=None), **(passed | fields))


CARDS = {"sm_80": "A100", "sm_90": "H100, H200", "gfx942": "MI300"}


class Told(NamedTuple):
    """What a call of the command came to."""

    code: int
    out: str
    err: str


Call = Callable[..., Told]
