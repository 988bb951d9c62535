"""Made-up runs and audits: what the reports are tested with needs no kernel."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tiebreak.reports.audit.record import Audit, Audits
from tiebreak.reports.records import store
from tiebreak.reports.records.decode import SCHEMA
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
    HistogramRecord,
    MeasureRecord,
    Narrowing,
    Record,
    Run,
    SeriesFigure,
    SeriesRecord,
    Shown,
    TraceRecord,
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
    "nonfinite": MeasureRecord("NaN or Inf", worse="more", limit=0.0, per="elements", portable=True, column=True),
}
ANSWERS = {
    "repeatable": Answer(True, "the same bits twice"),
    CLAIM: Answer(True, "unbiased", source="section 4"),
    PREDICTION: Answer(True, "what flash@paper predicts"),
}


def shown(measures: Mapping[str, Any], verdict: str | None) -> Shown:
    """A bias with its verdict, or NaN, as the matrix shows a call."""
    bias = measures["bias"].mean
    if measures["nonfinite"] or bias is None:
        return Shown(NONFINITE if measures["nonfinite"] else NO_NUMBER)
    return Shown("bias", bias, verdict=verdict)


def make_record(
    kernel: str = "flash@paper",
    case: str = "random",
    *,
    measures: Mapping[str, Any] | None = None,
    answers: Mapping[str, Answer | None] | None = None,
    **fields: Any,
) -> Record:
    """A record of a cell that held; what differs is named. An answer that is None was not asked for.

    Its verdict is what its numbers come to, and other numbers have other bits, unless something else is said.
    """
    backend = fields.setdefault("backend", "cpu")
    values = {**MEASURES, **(measures or {})}
    asked = {**ANSWERS, **(answers or {})}
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
        outcome="held",
        command=f"pytest tests/matrix --kernels {kernel} --cases '{case}'",
        plan="flash@paper",
        measures=values,
        answers={name: answer for name, answer in asked.items() if answer is not None},
        digest=bits if measures else "0123456789abcdef",
    )
    verdict = fields.setdefault("verdict", verdict_of(base, DESCRIBED))
    return replace(base, **{"shown": shown(values, verdict), **fields})


def make_fallen(
    kernel: str = "flash@paper", case: str = "random", why: str = "claim fell: unbiased", **fields: Any
) -> Record:
    """A record of a cell whose claim is not met."""
    answers = {CLAIM: Answer(False, "unbiased", why, "section 4")} | fields.pop("answers", {})
    return make_record(kernel, case, answers=answers, **({"outcome": "fell"} | fields))


def make_skip(kernel: str = "flash@paper", case: str = "random", outcome: str = "skipped", **fields: Any) -> Record:
    """A record of a cell that gave no numbers."""
    why = "no backward pass"
    empty: dict[str, Any] = {"measures": {}, "answers": {}, "verdict": None, "shown": None, "digest": None}
    if outcome == "skipped":
        empty["skipped"] = why
    else:
        check = "in_time" if outcome == "timed_out" else "runs"
        empty["answers"] = {check: Answer(False, "an end", why)}
    return replace(make_record(kernel, case, outcome=outcome), **(empty | fields))


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


def make_run(*records: Record, **fields: Any) -> Run:
    """A complete run of these records, of one cell without any, which describes what they have."""
    given = records or (make_record(),)
    platform = PLATFORM | fields.pop("platform", {})
    options = OPTIONS | fields.pop("options", {})
    measures = {name: DESCRIBED.get(name, MeasureRecord(name)) for cell in given for name in cell.measures}
    described = {
        "measures": measures | fields.pop("measures", {}),
        "checks": {name: CheckRecord(name, name in (CLAIM, PREDICTION)) for cell in given for name in cell.answers},
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


def make_trained(
    kernel: str = "flash@train", case: str = "train_drift", value: float | None = 2e-3, **fields: Any
) -> Record:
    """The record of a training run that held."""
    held: dict[str, Any] = {
        "experiment": "training",
        "outcome": "held",
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
    return replace(make_skip(kernel, case, skipped=None), **(held | fields))


ONE = Audit(
    target="sm_90",
    kernel="flash/forward",
    skipped=None,
    products=("wgmma k16 bf16*bf16 -> f32",),
    operand_casts=("cvt.rn.bf16x2.f32",),
    output_casts=("cvt.rn.bf16x2.f32",),
    exponential=("ex2.approx.ftz.f32",),
    exponent=("add",),
    logarithm=(),
    division=("div.rn.f32",),
    contraction=(),
    flushes=("ex2",),
    mode="to even",
    fused=0,
    separate=7,
)
CARDS = {"sm_80": "A100", "sm_90": "H100, H200", "gfx942": "MI300"}


@pytest.fixture
def audit() -> Callable[..., Audit]:
    """Makes the audit of a kernel that was compiled; what differs is named."""
    return lambda **fields: replace(ONE, **fields)


@pytest.fixture
def audits(audit: Callable[..., Audit]) -> Audits:
    """Two kernels on three GPUs, one of them not compiled for one."""
    products = ("mfma k8 bf16*bf16 -> f32", "mfma k8 f16*f16 -> f32")
    amd = audit(target="gfx942", products=products, output_casts=("v_add3_u32 0x7fff + last bit",))
    skip = Audit.skip("sm_80", "fp8/forward", "no fp8 there")
    audited = (
        audit(target="sm_80"),
        skip,
        audit(),
        audit(kernel="fp8/forward"),
        amd,
        replace(amd, kernel="fp8/forward"),
    )
    return Audits(SCHEMA, "3.9.0", CARDS, audited)


@pytest.fixture
def keep_audits(tmp_path: Path) -> Callable[[Audits, str], Path]:
    """Writes audits under a name."""

    def write(audits: Audits, name: str) -> Path:
        path = tmp_path / f"{name}.json"
        store.write(audits, path)
        return path

    return write


@pytest.fixture
def trained() -> Callable[..., Record]:
    return make_trained


@pytest.fixture
def record() -> Callable[..., Record]:
    return make_record


@pytest.fixture
def fallen() -> Callable[..., Record]:
    return make_fallen


@pytest.fixture
def skip() -> Callable[..., Record]:
    return make_skip


@pytest.fixture
def run() -> Callable[..., Run]:
    return make_run


@pytest.fixture
def telling() -> Run:
    """A run with a bit of everything that a report shows."""
    trace = TraceRecord((0.0, 0.001, -0.002, None), (1, 2))
    drawn = {"trace": trace, "histogram": HistogramRecord(-2.0, 0.5, (0, 1, 5, 40, 30, 20, 4, 0), 3)}
    tied = [
        make_record(
            kernel,
            f"tied_maxima[k={k}]",
            backend="emulation",
            verdict=verdict,
            measures={"bias": Estimate(bias * (1 - k / 40), 0.01)},
            evidence=drawn if k == 2 else {},
        )
        for kernel, verdict, bias in (("flash@paper", "biased", 0.24), ("fair", "unbiased", 0.002))
        for k in (2, 3, 4, 8, 16)
    ]
    fell = make_fallen("sdpa", "no_tail", verdict="biased", measures={"bias": Estimate(0.23, 0.01)})
    nan = make_fallen("sdpa", "huge", "NaN", verdict="nonfinite",
                      measures={"bias": Estimate(None, None), "nonfinite": 7, "max_ulps": None})  # fmt: skip
    trained = (
        make_trained(),
        make_trained("sdpa"),
        make_trained("sdpa", "train_lm", None, outcome="fell", answers={CLAIM: Answer(False, "a number", "none")}),
    )
    return make_run(*tied, fell, nan, make_skip("sdpa", "random"), make_skip("sdpa", "odd", "crashed"), *trained)


@pytest.fixture
def keep(tmp_path: Path) -> Callable[[Run, str], Path]:
    """Writes a run under a name; each gets a name of its own, as runs do."""

    def write(run: Run, name: str) -> Path:
        path = tmp_path / f"{name}.json"
        store.write(run if run.run != "a" * 32 else replace(run, run=name), path)
        return path

    return write


def rewrite(path: Path, steps: Sequence[str | int], value: Any) -> None:
    """Change one value in a JSON file; ... removes it."""
    plain = json.loads(path.read_text(encoding="utf-8"))
    at = plain
    for step in steps[:-1]:
        at = at[step]
    if value is ...:
        del at[steps[-1]]
    else:
        at[steps[-1]] = value
    path.write_text(json.dumps(plain), encoding="utf-8")


@pytest.fixture
def change() -> Callable[[Path, Sequence[str | int], Any], None]:
    return rewrite
