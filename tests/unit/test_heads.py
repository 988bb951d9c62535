"""No interval that tells nothing passes: faults in some heads, at any number of them. Sound loops are not blamed."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tiebreak.defects.loops import detached
from tiebreak.kernels.external.kernels import external_kernel, users_kernel
from tiebreak.kernels.external.options import KernelOptions
from tiebreak.kernels.kernel import Kernel
from tiebreak.matrix.workbench import Named, Settings, Settled, Workbench
from tiebreak.reports.records.record import Record
from tiebreak.studies.cells import judged

LOOPS = Path(detached.__code__.co_filename)
#: Which heads of a call are wrong.
WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "the first": lambda heads: heads == 0,
    "two": lambda heads: (heads == 0) | (heads == 5),
    "every eighth": lambda heads: heads % 8 == 0,
    "half of them": lambda heads: heads % 2 == 0,
}


def wrong(which: str, factor: float) -> Kernel:
    """A sound loop, of which some heads of O are so many times too large."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
        factors = torch.ones(q.shape[0] * q.shape[1])
        factors[WRONG[which](torch.arange(len(factors)))] = factor
        return (detached(q, k, v, causal=causal, scale=scale) * factors.reshape(q.shape[0], -1, 1, 1)).to(q.dtype)

    return users_kernel(f"{which} times {factor}", attention, KernelOptions(backward="none"))


@cache
def _settled(seed: int) -> dict[Named, Settled]:
    """The plans of kernels, which no number of heads changes."""
    return {}


@cache
def _bench(heads: int, seed: int) -> Workbench:
    return Workbench(Settings(seed=seed, heads=heads), settled=_settled(seed))


def run(kernel: Kernel, case: str, heads: int, seed: int = 1) -> Record:
    return judged(kernel, case, bench=_bench(heads, seed))


@pytest.mark.parametrize("heads", [16, 32, 64, 256])
@pytest.mark.parametrize("which", WRONG)
def test_heads_that_are_wrong_never_pass(which: str, heads: int) -> None:
    record = run(wrong(which, 1.02), "random_odd", heads)
    assert record.fails
    assert record.passed("accuracy") is False


@pytest.mark.parametrize("which", WRONG)
def test_nor_do_they_where_no_head_is_asked_alone(which: str) -> None:
    """Their interval tells nothing of 128 heads: the answer is undecided, which fails the run."""
    record = run(wrong(which, 1.02), "sink_tie", 16)
    assert record.fails
    assert record.passed("accuracy") is not True


@pytest.mark.parametrize(("which", "factor"), [("half of them", 1.004), ("the first", 1.01)])
def test_nor_do_small_faults(which: str, factor: float) -> None:
    assert run(wrong(which, factor), "random_odd", 32).fails


@pytest.mark.parametrize(("factor", "passes"), [(1.0, True), (1.02, False)])
def test_nor_in_a_kernel_that_takes_pages_alone(factor: float, *, passes: bool) -> None:
    """No plain input asks it for its plan: it is held to what its bits on pages leave open."""

    def paged(q: Tensor, k: Tensor, v: Tensor, block_table: Tensor, cache_seqlens: Tensor) -> Tensor:
        keys = slice(int(cache_seqlens[0]))
        k, v = (pool[block_table].transpose(1, 2).flatten(2, 3)[:, :, keys] for pool in (k, v))
        o = detached(q, k, v)
        o[:, ::8] *= factor
        return o.to(q.dtype)

    assert run(users_kernel("paged", paged, KernelOptions(backward="none")), "paged_ties", 64).passes is passes


@pytest.mark.parametrize(
    ("kernel", "case", "seed"), [("attention", "random_scaled", 2), ("detached", "random_wide", 3)]
)
def test_a_sound_loop_whose_largest_head_is_far_out_passes(kernel: str, case: str, seed: int) -> None:
    """One known pass errs a fourth to an eleventh as much in one head; the others, as sound, do not."""
    record = run(external_kernel(f"{LOOPS}:{kernel}"), case, 256, seed)
    assert record.passes, record.reasons
    assert 0.5 < (record.number("worst_gradient") or 0.0) <= 4.0
