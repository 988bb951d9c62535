"""Matrix products of a warp: which register holds which element, one by one as the PTX ISA writes it down."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tiebreak.backends.ptx import products

Executed = Callable[..., torch.Tensor]
THREADS = 64
MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
A, B, C = (tuple(f"%r{at}" for at in some) for some in (range(5, 9), range(9, 11), range(11, 15)))
OTHER_B, SUMS, OTHERS = (tuple(f"%r{at}" for at in some) for some in (range(15, 17), range(17, 21), range(21, 25)))


def braces(names: tuple[str, ...]) -> str:
    return "{" + ", ".join(names) + "}"


def a_element(lane: int, at: int) -> tuple[int, int]:
    """Row and column (Matrix Fragments for mma.m16n8k16)."""
    group, within = lane >> 2, lane % 4
    return (group if at in (0, 1, 4, 5) else group + 8), within * 2 + (at & 1) + (0 if at < 4 else 8)


def b_element(lane: int, at: int) -> tuple[int, int]:
    return (lane % 4) * 2 + (at & 1) + (0 if at < 2 else 8), lane >> 2


def c_element(lane: int, at: int) -> tuple[int, int]:
    return (lane >> 2) + (0 if at < 2 else 8), (lane % 4) * 2 + (at & 1)


def tiles(values: NDArray[np.float32], element: Callable[[int, int], tuple[int, int]]) -> NDArray[np.float32]:
    """Every warp's tile of (threads, elements of a thread)."""
    places = {element(lane, at): (lane, at) for lane in range(32) for at in range(values.shape[1])}
    rows, columns = (1 + max(place[axis] for place in places) for axis in (0, 1))
    tile = np.zeros((len(values) // 32, rows, columns), np.float32)
    for (row, column), (lane, at) in places.items():
        tile[:, row, column] = values.reshape(-1, 32, values.shape[1])[:, lane, at]
    return tile


@pytest.mark.parametrize("alike", [False, True])
def test_products_of_a_warp_are_those_of_its_tiles_each_after_the_sum_that_it_needs(
    alike: bool, executed: Executed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three: the second needs the first's sum, the third does not. In small integers, so that sums are exact."""
    if alike:  # every tile looks like the first until it is compared
        monkeypatch.setattr(products, "_MIXING", products._MIXING * 0)
    random = np.random.default_rng(0)
    a, b, other, c = (random.integers(-4, 5, (THREADS, n)).astype(np.float32) for n in (8, 4, 4, 4))
    narrow = (torch.from_numpy(x).bfloat16().view(torch.int32) for x in (a, b, other))
    registers = torch.cat([*narrow, torch.from_numpy(c).view(torch.int32)], 1)
    names = (*A, *B, *OTHER_B, *C)
    loads = "".join(f"ld.global.b32 {name}, [%rd0+{4 * THREADS * at}];" for at, name in enumerate(names))
    body = f"""{loads}
    {MMA} {braces(SUMS)}, {braces(A)}, {braces(B)}, {braces(C)};
    {MMA} {braces(OTHERS)}, {braces(A)}, {braces(OTHER_B)}, {braces(SUMS)};
    {MMA} {braces(C)}, {braces(A)}, {braces(B)}, {braces(C)};
    """
    left, right, second, sums = (
        tiles(x, element) for x, element in ((a, a_element), (b, b_element), (other, b_element), (c, c_element))
    )
    first = left @ right + sums
    for found, expected in ((SUMS, first), (OTHERS, left @ second + first), (C, first)):
        columns = [executed(f"{body} mov.b32 %r2, {name};", registers.T.contiguous()) for name in found]
        made = torch.stack(columns, -1).view(torch.float32).numpy()
        assert np.array_equal(tiles(made, c_element), expected)
