"""Files of made-up runs and audits, and a run with a bit of everything."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tiebreak.defects.made_up import CARDS, ONE, fallen, record, run, skip, trained
from tiebreak.reports.audit.record import Audit, Audits
from tiebreak.reports.records import store
from tiebreak.reports.records.decode import SCHEMA
from tiebreak.reports.records.record import CLAIM, Answer, Estimate, HistogramRecord, Run, TraceRecord


@pytest.fixture
def audits() -> Audits:
    """Two kernels on three GPUs, one of them not compiled for one."""
    products = ("mfma k8 bf16*bf16 -> f32", "mfma k8 f16*f16 -> f32")
    amd = replace(ONE, target="gfx942", products=products, output_casts=("v_add3_u32 0x7fff + last bit",))
    skip = Audit.skip("sm_80", "fp8/forward", "no fp8 there")
    audited = (
        replace(ONE, target="sm_80"),
        skip,
        ONE,
        replace(ONE, kernel="fp8/forward"),
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
def telling() -> Run:
    """A run with a bit of everything that a report shows."""
    trace = TraceRecord((0.0, 0.001, -0.002, None), (1, 2))
    drawn = {"trace": trace, "histogram": HistogramRecord(-2.0, 0.5, (0, 1, 5, 40, 30, 20, 4, 0), 3)}
    tied = [
        record(
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
    fell = fallen("sdpa", "no_tail", verdict="biased", measures={"bias": Estimate(0.23, 0.01)})
    nan = fallen("sdpa", "huge", "NaN", verdict="nonfinite",
                      measures={"bias": Estimate(None, None), "nonfinite": 7, "max_ulps": None})  # fmt: skip
    runs = (
        trained(),
        trained("sdpa"),
        trained("sdpa", "train_lm", None, outcome="fell", answers={CLAIM: Answer(False, "a number", "none")}),
    )
    return run(*tied, fell, nan, skip("sdpa", "random"), skip("sdpa", "odd", "crashed"), *runs)


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
