"""Files of made-up runs and audits, and a run with a bit of everything."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tiebreak.defects.made_up import CARDS, Call, Told, failing, record, run, skip, trained
from tiebreak.laboratory.audit.records import Audit, Audits
from tiebreak.reports import cli
from tiebreak.reports.records import store
from tiebreak.reports.records.decode import SCHEMA
from tiebreak.reports.records.record import CLAIM, Answer, Estimate, HistogramRecord, Run, TraceRecord

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


@pytest.fixture
def audits() -> Audits:
    """Two kernels on three GPUs, one of them not compiled for one."""
    products = ("mfma k8 bf16*bf16 -> f32", "mfma k8 f16*f16 -> f32")
    amd = replace(ONE, target="gfx942", products=products, output_casts=("v_add3_u32 0x7fff + last bit",))
    skip = Audit.skip("sm_80", "fp8/forward", "no fp8 there")
    one, other = (replace(each, kernel="fp8/forward") for each in (ONE, amd))
    return Audits(SCHEMA, "3.9.0", CARDS, (replace(ONE, target="sm_80"), skip, ONE, one, amd, other))


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
    failed = failing("sdpa", "no_tail", verdict="biased", measures={"bias": Estimate(0.23, 0.01)})
    nan = failing("sdpa", "huge", "NaN", verdict="nonfinite",
                      measures={"bias": Estimate(None, None), "nonfinite": 7, "max_ulps": None})  # fmt: skip
    runs = (
        trained(),
        trained("sdpa"),
        trained("sdpa", "train_lm", None, outcome="failed", answers={CLAIM: Answer(False, "a number", "none")}),
    )
    return run(*tied, failed, nan, skip("sdpa", "random"), skip("sdpa", "odd", "crashed"), *runs)


@pytest.fixture
def keep(tmp_path: Path) -> Callable[[Run | Audits, str], Path]:
    """Writes a run, or audits, under a name; each run gets a name of its own, as runs do."""

    def write(data: Run | Audits, name: str) -> Path:
        path = tmp_path / f"{name}.json"
        store.write(replace(data, run=name) if isinstance(data, Run) and data.run == "a" * 32 else data, path)
        return path

    return write


@pytest.fixture
def tiebreak(
    keep: Callable[[Run | Audits, str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Call:
    """Calls the command in a folder of its own; data among its words is in a file there, by its place: 1.json."""
    monkeypatch.chdir(tmp_path)

    def call(*words: Any) -> Told:
        named = [keep(word, str(at)).name if isinstance(word, Run | Audits) else word for at, word in enumerate(words)]
        capsys.readouterr()
        return Told(cli.main([str(word) for word in named]), *capsys.readouterr())

    return call
