"""A kernel that leaves something behind at every call is told so in its own cell; one that keeps things once is not."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tiebreak.kernels.external import external_kernel
from tiebreak.matrix.experiments.contract import CALLS, CASES, Contract, left_behind, mallinfo
from tiebreak.reports.records.record import FAILED, MEASURED, Record
from tiebreak.studies.cells import judged

KERNEL = """
import threading
from functools import lru_cache

import torch
from torch.nn.functional import scaled_dot_product_attention

kept, stop = [], threading.Event()


@lru_cache
def mask(*shape):
    return torch.zeros(*shape)


class Knot:
    def __init__(self, o):
        self.o, self.me = o, self


def attention(q, k, v, *, causal=False, scale=None):
    o = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    {body}
    return o
"""
needs_glibc = pytest.mark.skipif(mallinfo() is None, reason="this C library does not count its memory")
needs_linux = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="this system does not list threads")


def record(folder: Path, body: str) -> Record:
    (folder / "mine.py").write_text(KERNEL.format(body=body), encoding="utf-8")
    kernel = external_kernel(f"{folder / 'mine.py'}:attention")
    return judged(kernel, Contract(CASES[0]))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        pytest.param("kept.append(o.clone())", "bytes", marks=needs_glibc),
        pytest.param("threading.Thread(target=stop.wait, daemon=True).start()", "1 threads", marks=needs_linux),
        pytest.param("kept.append(open('/dev/null'))", "1 open files", marks=needs_linux),
    ],
    ids=["memory", "threads", "files"],
)
def test_a_kernel_that_leaks_fails_and_what_it_leaks_is_told(tmp_path: Path, body: str, message: str) -> None:
    result = record(tmp_path, body)
    assert result.outcome == FAILED
    why = result.answers["contract"].why
    assert why.startswith(f"leaks: each of {CALLS} calls in a row left at least ")
    assert message in why
    assert result.passed("repeatable")


@pytest.mark.parametrize(
    "body",
    [
        "mask(*q.shape, 64)",  # larger than O, once
        "kept[:] = [*kept[-3:], o.clone()]",
        "Knot(o.clone())",  # garbage until someone collects it
    ],
    ids=["cached", "few", "garbage"],
)
def test_what_is_kept_once_is_no_leak(tmp_path: Path, body: str) -> None:
    result = record(tmp_path, body)
    assert result.outcome == MEASURED
    assert result.passed("contract")


@needs_glibc
def test_as_much_as_o_at_every_call_is_a_leak_and_less_is_none() -> None:
    outputs: list[torch.Tensor] = []

    def keeping(size: int) -> Callable[[], str]:
        def call() -> str:
            outputs.append(torch.zeros(size, dtype=torch.uint8))
            return "returned"

        return call

    returned, reason = left_behind(keeping(2**16), 2**16)
    assert returned == "returned"
    assert reason is not None
    assert 2**16 <= int(reason.split("at least ")[1].split(" ")[0].replace(",", "")) < 2**16 + 2**12
    assert len(outputs) == CALLS
    assert left_behind(keeping(2**15), 2**16) == ("returned", None)
    assert len(outputs) == CALLS + 1
