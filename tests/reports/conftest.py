"""Made-up runs and audits: what the reports are tested with needs no kernel."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tiebreak.reports import audit as records
from tiebreak.reports import store
from tiebreak.reports.audit import Audit, Audits
from tiebreak.reports.records import (
    ClaimRecord,
    Estimate,
    HistogramRecord,
    MeasuresRecord,
    PredictionRecord,
    Record,
    Run,
    TraceRecord,
    TrainingRecord,
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
MEASURES = MeasuresRecord(
    bias=Estimate(0.01, 0.02),
    rms_ulps=0.35,
    max_ulps=1.5,
    error_over_bound=0.4,
    gain=1.0,
    delta_bias=Estimate(1e-5, 2e-5),
    left_out=0,
    nonfinite=0,
    elements=65536,
    gradients={"dq": 0.1},
    repeatable=True,
)


def make_record(
    kernel: str = "flash@paper", case: str = "random", *, measures: dict[str, Any] | None = None, **fields: Any
) -> Record:
    """A record of a cell that held; what differs is named. A cell without measures has `measures=None` in `fields`."""
    backend = fields.setdefault("backend", "cpu")
    base = Record(
        id=f"{backend}-{kernel}-{case}-bf16",
        backend=backend,
        kernel=kernel,
        case=case,
        case_version=1,
        format="bf16",
        seed=1,
        heads=256,
        outcome="held",
        reasons=(),
        command=f"pytest tests/matrix --kernels {kernel} --cases '{case}'",
        plan="flash@paper",
        verdict="unbiased",
        measures=replace(MEASURES, **(measures or {})),
        claim=ClaimRecord("unbiased", "section 4", True),
        prediction=PredictionRecord("flash@paper", Estimate(0.01, 0.02), Estimate(0.0, 0.001), 1.0, True),
        digest="0123456789abcdef",
    )
    return replace(base, **fields)


def make_skip(kernel: str = "flash@paper", case: str = "random", outcome: str = "skipped", **fields: Any) -> Record:
    """A record of a cell that gave no numbers."""
    empty = {"measures": None, "verdict": None, "claim": None, "prediction": None, "digest": None}
    record = make_record(kernel, case, outcome=outcome, reasons=("no backward pass",), **fields)
    return replace(record, **empty)  # type: ignore[arg-type]


def make_run(*records: Record, **fields: Any) -> Run:
    """A complete run of these records, of one cell without any."""
    given = records or (make_record(),)
    platform = PLATFORM | fields.pop("platform", {})
    options = OPTIONS | fields.pop("options", {})
    seconds = {record.id: 0.25 for record in given}
    return replace(Run(platform, options, given, seconds=seconds, run="a" * 32), **fields)


def make_trained(
    kernel: str = "flash@train", case: str = "train_drift", value: float | None = 2e-3, **fields: Any
) -> Record:
    """The record of a training run that held."""
    shown = "nan" if value is None else f"{value:+.1e}"
    claim = ClaimRecord("0.0012 < delta_error_mean", "section 3", True)
    training = TrainingRecord(
        label="A",
        about="delta errs",
        amplified=False,
        headline="delta_error_mean",
        shown=shown,
        stable=False,
        measures={"delta_error_mean": value},
        claims=(claim,),
        steps=(0, 1, 2),
        series={"delta_error": (2e-3, None, 1e-3), "wq_norm": (1.0, 2.0, 4.0)},
    )
    held = {"outcome": "held", "reasons": (), "heads": 0, "claim": claim, "digest": "fedcba9876543210"}
    return replace(make_skip(kernel, case), **(held | {"training": training} | fields))  # type: ignore[arg-type]


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
    found = (audit(target="sm_80"), skip, audit(), audit(kernel="fp8/forward"), amd, replace(amd, kernel="fp8/forward"))
    return Audits(records.SCHEMA, "3.9.0", CARDS, found)


@pytest.fixture
def keep_audits(tmp_path: Path) -> Callable[[Audits, str], Path]:
    """Writes audits under a name."""

    def write(audits: Audits, name: str) -> Path:
        path = tmp_path / f"{name}.json"
        records.write(audits, path)
        return path

    return write


@pytest.fixture
def trained() -> Callable[..., Record]:
    return make_trained


@pytest.fixture
def record() -> Callable[..., Record]:
    return make_record


@pytest.fixture
def skip() -> Callable[..., Record]:
    return make_skip


@pytest.fixture
def run() -> Callable[..., Run]:
    return make_run


@pytest.fixture
def telling() -> Run:
    """A run with a bit of everything that a report shows."""
    traced = TraceRecord((0.0, 0.001, -0.002, None), (1, 2))
    histogram = HistogramRecord(-2.0, 0.5, (0, 1, 5, 40, 30, 20, 4, 0), 3)
    tied = [
        make_record("flash@paper", f"tied_maxima[k={k}]", backend="emulation", verdict="biased",
                    measures={"bias": Estimate(0.46 / k, 0.01)},
                    **({"trace": traced, "histogram": histogram} if k == 2 else {}))
        for k in (2, 3, 4, 8, 16)
    ]  # fmt: skip
    fair = [
        make_record("fair", f"tied_maxima[k={k}]", backend="emulation", measures={"bias": Estimate(0.001, 0.01)},
                    **({"trace": traced, "histogram": histogram} if k == 2 else {}))
        for k in (2, 3, 4, 8, 16)
    ]  # fmt: skip
    fell = make_record("sdpa", "no_tail", outcome="fell", verdict="biased", reasons=("claim fell: unbiased",),
                       measures={"bias": Estimate(0.23, 0.01)})  # fmt: skip
    nan = make_record("sdpa", "huge", verdict="nonfinite", outcome="fell", reasons=("NaN",),
                      measures={"bias": Estimate(None, None), "nonfinite": 7, "max_ulps": None})  # fmt: skip
    trained = (make_trained(), make_trained("sdpa"), make_trained("sdpa", "train_lm", None, outcome="fell"))
    return make_run(*tied, *fair, fell, nan, make_skip("sdpa", "random"), make_skip("sdpa", "odd", "crashed"),
                    *trained)  # fmt: skip


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
