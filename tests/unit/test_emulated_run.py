"""A dozen cells on an emulated processor, where QEMU and a Python for it are ready: nothing is downloaded here."""

import os
import subprocess
from pathlib import Path

import pytest

from tiebreak.laboratory.levels import sysroot
from tiebreak.reports.errors import UsageError
from tiebreak.reports.records import store

HOME = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tiebreak" / "aarch64"


def _python() -> Path:
    """The Python that `tiebreak levels --arch aarch64` has prepared before."""
    if not (list(HOME.glob("debs-*")) and list(HOME.glob("wheels-*"))):
        pytest.skip(f"nothing prepared in {HOME}: `tiebreak levels --arch aarch64` does that")
    try:
        return sysroot.python("aarch64", tell=lambda line: pytest.skip(f"not prepared with today's pins: {line}"))
    except UsageError as error:
        pytest.skip(str(error))


def test_arm_rounds_as_its_plans_predict(tmp_path: Path) -> None:
    python = _python()
    words = [str(python), "-m", "pytest", "-q", "-n", "0", "-p", "tiebreak.matrix.plugin", "--pyargs"]
    words += ["tiebreak.matrix.test_cells", "--backend", "cpu", "--heads", "16", "--out", str(tmp_path / "out")]
    words += ["--kernels", "flash@paper_bfmmla,flash@fused,standard,sdpa_flash"]
    words += ["--cases", "faint_tail,no_tail,tied_maxima[k=2]"]
    environment = os.environ | {"QEMU_CPU": "max"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    run = store.read(tmp_path / "out" / "last.json")
    assert run.platform["cpu"] == "max (emulated processor)"
    assert "bf16" in run.platform["cpu_features"]
    assert run.platform["fingerprint"]["cpu"]["batched_matmul_rounds_after"] == "512 terms"
    by_cell = {(record.kernel, record.case): record for record in run.records}
    assert len(by_cell) == 12
    assert by_cell["flash@paper_bfmmla", "faint_tail"].verdict == "biased"  # where no other processor is
    assert {record.outcome for record in run.records} <= {"passed", "measured", "undecided"}, done.stdout
