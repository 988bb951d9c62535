"""Kernels of a few lines, to be interpreted."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tiebreak.kernels.triton.loading import not_interpreting

if (reason := not_interpreting()) is not None:
    pytest.skip(reason, allow_module_level=True)

import triton

from tiebreak.backends.interpreter.assumptions import EXACT, Assumptions
from tiebreak.backends.interpreter.session import interpreting

Launch = Callable[..., None]


@pytest.fixture
def card() -> Assumptions:
    """What is assumed of a card; a test may ask for another."""
    return EXACT


@pytest.fixture
def launch(card: Assumptions) -> Launch:
    """Interprets one program of a function, or a grid of them; before and after it Triton is upstream's."""

    def launched(function: Any, *args: object, grid: tuple[int, ...] = (1,), **constants: object) -> None:
        kernel = function if hasattr(function, "run") else triton.jit(function)
        with interpreting(card):
            kernel[grid](*args, **constants)

    return launched


@pytest.fixture
def contracting() -> Assumptions:
    """A card that contracts, and is exact otherwise."""
    return replace(EXACT, name="contracting", contracts=True)


KERNEL = """
import torch
import triton
import triton.language as tl

{names}

@triton.jit
def forward(Q, K, V, O, keys, scale, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    head = tl.program_id(0)
    row, column, d = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[:, None], tl.arange(0, D)[None, :]
    q = tl.load(Q + (head * ROWS + row) * D + d)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    o = tl.zeros([ROWS, D], tl.float32)
    for start in range(0, keys, COLUMNS):
        at = (head * keys + start + column) * D + d
        s = tl.dot(q, tl.trans(tl.load(K + at))) * (scale * 1.44269504)
        new = tl.maximum(m, tl.max(s, 1))
        p = {exponential}
        shrink = tl.math.exp2(m - new)
        l = l * shrink + tl.sum(p, 1)
        o = tl.dot(p.to(V.dtype.element_ty), tl.load(V + at), o * shrink[:, None])
        m = new
    tl.store(O + (head * ROWS + row) * D + d, (o / l[:, None]).to(O.dtype.element_ty))


def attention(q, k, v, *, causal=False, scale=None):
    if causal or q.shape[-1] != 64 or q.shape[2] & (q.shape[2] - 1):
        raise NotImplementedError("a kernel of few words")
    q, k, v = (one.contiguous() for one in (q, k, v))
    o = torch.empty_like(q)
    grid = (q.shape[0] * q.shape[1],)
    forward[grid](q, k, v, o, k.shape[2], scale or 0.125, D=64, ROWS=q.shape[2], COLUMNS=min(64, k.shape[2]))
    return o
"""


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., str]:
    """A file with a Triton kernel, as a target."""

    def written(exponential: str = "tl.math.exp2(s - new[:, None])", names: str = "") -> str:
        path = tmp_path / "mine.py"
        path.write_text(KERNEL.format(exponential=exponential, names=names))
        return f"{path}:attention"

    return written
