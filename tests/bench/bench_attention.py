"""Emulated attention beside native attention, in one run: rows and multiply-adds a second.

Run with ``make bench``.
"""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from tiebreak.backends.backend import CPU, EMULATION, Backend
from tiebreak.cases.case import Case
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.kernels.formats import BF16

CASE: Case = next(case for case in SCRIPTED if case.name == "tied_maxima[k=2]")
HEADS = 256

CONTENDERS = {
    "emulation": (EMULATION, "flash@paper"),
    "emulation-fair": (EMULATION, "fair"),
    "cpu": (CPU, "flash@paper"),
    "cpu-sdpa_flash": (CPU, "sdpa_flash"),
}


@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "forward+backward"])
@pytest.mark.parametrize(("backend", "name"), CONTENDERS.values(), ids=CONTENDERS)
def test_attention(
    benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], backend: Backend, name: str, gradients: bool
) -> None:
    inputs = CASE.make(1, 0, HEADS, BF16)
    kernel = backend.kernel(name)
    output = benchmark(backend.run, kernel, inputs, gradients=gradients)
    batch, heads, queries, d = inputs.q.shape
    rows = batch * heads * queries
    products = 7 if gradients else 2  # S, PV; S again, dV, dP, dQ, dK
    assert benchmark.stats is not None
    seconds = benchmark.stats.stats.median
    benchmark.group = "forward+backward" if gradients else "forward"
    millions, billions = rows / seconds / 1e6, products * rows * inputs.k.shape[2] * d / seconds / 1e9
    with capsys.disabled():
        print(f"\n{backend.name} {name}: {millions:.3f} M rows/s, {billions:.2f} G multiply-adds/s (median)")
    assert output.o.isfinite().all()
