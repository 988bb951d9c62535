"""Rounding a million values: ours against gfloat's. Run with ``pytest -o python_files='bench_*.py' tests/bench``."""

import gfloat  # type: ignore[import-untyped]
import gfloat.formats  # type: ignore[import-untyped]
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from tiebreak.backends.emulation.rounding import round_to
from tiebreak.kernels.formats import BF16, FP16, Format

IN_GFLOAT = {BF16: gfloat.formats.format_info_bfloat16, FP16: gfloat.formats.format_info_binary16}


@pytest.mark.parametrize("implementation", ["tiebreak", "gfloat"])
@pytest.mark.parametrize("fmt", IN_GFLOAT, ids=lambda fmt: fmt.name)
def test_round_a_million(benchmark: BenchmarkFixture, fmt: Format, implementation: str) -> None:
    # Some of them, unlike most of what a kernel rounds, are subnormal in fp16.
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    benchmark.group = f"round 1e6 fp32 values to {fmt.name}"
    expected = torch.from_numpy(gfloat.round_ndarray(IN_GFLOAT[fmt], x.numpy())).to(torch.float32)
    if implementation == "tiebreak":
        rounded = benchmark(round_to, x, fmt)
    else:
        rounded = torch.from_numpy(benchmark(gfloat.round_ndarray, IN_GFLOAT[fmt], x.numpy())).to(torch.float32)
    assert torch.equal(rounded.view(torch.int32), expected.view(torch.int32))
