"""Kernels at the matrix' usual shape, 256 heads: interpreted here, one of few lines by Triton's own interpreter too."""

import importlib.util
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from tiebreak.kernels.triton.compiling import not_interpreting

if (reason := not_interpreting()) is not None:
    pytest.skip(reason, allow_module_level=True)

if "triton" not in sys.modules:  # whose own functions upstream interprets only if it was imported so
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

from tiebreak.backends.interpreter import INTERPRETER
from tiebreak.backends.interpreter.assumptions import CARDS
from tiebreak.backends.interpreter.session import interpreting
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.kernels.formats import BF16

FILE = Path(__file__).parents[1] / "interpreter" / "few_lines.py"
HEADS = 256


def _loaded(monkeypatch: pytest.MonkeyPatch, switch: str) -> ModuleType:
    monkeypatch.setenv("TRITON_INTERPRET", switch)
    spec = importlib.util.spec_from_file_location(f"few_lines_{switch}", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("how", ["upstream", "exact", "sm_90"])
def test_interpreted(
    how: str, dtype: torch.dtype, benchmark: BenchmarkFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel of few lines in formats that upstream's has right: 4 queries, 128 keys, d = 64."""
    if how == "upstream" and isinstance(tl.sum, triton.JITFunction):
        pytest.skip("triton was imported before, to be compiled: run this file alone")
    torch.set_num_threads(1)
    module = _loaded(monkeypatch, "1" if how == "upstream" else "0")
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, HEADS, n, 64, generator=generator).to(dtype) for n in (4, 128, 128))
    attention: Callable[..., torch.Tensor] = module.attention

    def call() -> torch.Tensor:
        with nullcontext() if how == "upstream" else interpreting(CARDS[how]):
            return attention(q, k, v)

    o = benchmark.pedantic(call, rounds=5, warmup_rounds=1)  # type: ignore[no-untyped-call]
    exact = torch.softmax(q.double() @ k.double().mT / 8, -1) @ v.double()
    assert (o.double() - exact).abs().max() < 2e-3


@pytest.mark.parametrize("name", ["triton_flash", "triton_standard"])
@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "both passes"])
def test_the_suites_own(name: str, gradients: bool, benchmark: BenchmarkFixture) -> None:
    """The same shape, in bf16: what a cell of the matrix spends most of its time on."""
    torch.set_num_threads(1)
    kernel, case = INTERPRETER.kernel(name), next(case for case in SCRIPTED if case.name == "tied_maxima[k=2]")
    inputs = case.make(1, 0, HEADS, BF16)
    with INTERPRETER.in_use():
        output = benchmark.pedantic(  # type: ignore[no-untyped-call]
            kernel.compute, (inputs, INTERPRETER.arithmetic, gradients), rounds=9, warmup_rounds=1
        )
    assert output.o.isfinite().all()
