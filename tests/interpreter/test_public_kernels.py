"""Kernels of packages, as the examples run them, and what their imports get."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tiebreak.backends.interpreter import INTERPRETER
from tiebreak.backends.interpreter.assumptions import EXACT
from tiebreak.backends.interpreter.session import interpreting
from tiebreak.kernels.external import external_kernel
from tiebreak.reports.records.record import SKIPPED
from tiebreak.studies.cells import judged

EXAMPLES = Path(__file__).parents[2] / "examples" / "public-kernels"
FILE = """
import torch
import triton
import triton.language as tl

from around.server import registered, settings
from around.helpers import doubled
from . import beside

CAPABILITY = torch.cuda.get_device_capability()


@registered("attention")
@triton.jit
def kernel(X, scale: tl.constexpr):
    at = tl.arange(0, 16)
    tl.store(X + at, doubled(tl.load(X + at)) * scale)


def launch(x):
    assert x.is_cuda
    scratch = torch.empty(1, device="cuda")
    kernel[(1,)](x, 1.5 if not settings.fast else 0.0)
    return scratch
"""
HELPERS = """
from around.triton_utils import tl, triton


@triton.jit
def doubled(x):
    return x + x
"""


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The loader of examples/public-kernels/, with a folder of sources of its own."""
    spec = importlib.util.spec_from_file_location("public_sources", EXAMPLES / "public_sources.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("TIEBREAK_SOURCES", str(tmp_path))
    return module


@pytest.fixture
def file(sources: Any, tmp_path: Path) -> Any:
    """A file of a package whose own import fails, with another that it takes a function from."""
    folder = tmp_path / "checkout" / "src" / "around"
    folder.mkdir(parents=True)
    for name, text in (("__init__", "raise RuntimeError('no driver')"), ("kernel", FILE), ("helpers", HELPERS)):
        (folder / f"{name}.py").write_text(text)
    return sources.source("around.kernel", also=("around.helpers",))


def test_a_kernel_whose_file_is_not_here_is_skipped_with_the_place_it_should_have(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TIEBREAK_SOURCES", str(tmp_path))
    target = external_kernel(f"{EXAMPLES / 'public_kernels.py'}:aiter_mha")
    record = judged(target, "no_tail", 2, backend=INTERPRETER)
    assert record.outcome == SKIPPED
    assert "there is no aiter/ops/triton/attention/mha.py" in str(record.skipped)


def test_a_file_runs_without_the_package_around_it(file: Any, launch: Callable[..., None]) -> None:
    assert file.CAPABILITY == (8, 0)
    x = torch.arange(16.0)
    launch(file.kernel, x, scale=1.5)
    assert torch.equal(x, torch.arange(16.0) * 3)
    assert "around" not in sys.modules
    assert torch.empty.__module__ != "public_sources"


def test_a_launcher_is_given_a_tensor_that_says_that_it_is_on_a_gpu(sources: Any, file: Any) -> None:
    x = torch.ones(16)
    with interpreting(EXACT):
        scratch = file.launch(sources.as_if_on_a_gpu(x))
    assert scratch.device.type == "cpu"
    assert torch.equal(x, torch.full((16,), 3.0))


def test_a_stand_in_never_stands_for_a_kernel(sources: Any) -> None:
    """Or a launch of it would do nothing, and O would be what lay in memory."""
    with pytest.raises(TypeError):
        sources.StandIn("package.kernel")[(1,)]
