"""Matrix products of a warp: which register holds which element, one by one as the PTX ISA writes it down."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tiebreak.backends.emulation.tensor_cores import core_of, tensor_core_matmul
from tiebreak.backends.ptx.products import multiplied

Executed = Callable[..., torch.Tensor]
THREADS = 64
MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
A, B, C = (tuple(f"%r{at}" for at in some) for some in (range(5, 9), range(9, 11), range(11, 15)))
OTHER_B, SUMS, OTHERS = (tuple(f"%r{at}" for at in some) for some in (range(15, 17), range(17, 21), range(21, 25)))


def braces(names: tuple[str, ...]) -> str:
    return "{" + ", ".join(names) + "}"


def a_element(lane: int, at: int) -> tuple[int, int]:
    """OpcodeRow and column (Matrix Fragments for mma.m16n8k16)."""
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


def test_products_of_a_warp_are_those_of_its_tiles_each_after_the_sum_that_it_needs(executed: Executed) -> None:
    """Three: the second needs the first's sum, the third does not. In small integers, so that sums are exact."""
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


@pytest.mark.parametrize("kind", ["fp16", "fp8_e4m3"])  # terms of the second keep fewer bits than a sum
@pytest.mark.parametrize("unusual", [0.0, np.inf])
def test_rows_that_are_alike_or_add_nothing_get_the_bits_of_the_others(kind: str, unusual: float) -> None:
    """Most are padding: rows and columns of zeros, rows that repeat; sums have 0 of both signs, tiny ones and Inf."""
    random, core = np.random.default_rng(0), core_of("sm_89", kind)
    left, right = (random.integers(-3, 4, (6, n, 32)).astype(np.float32) for n in (16, 8))
    sums = random.standard_normal((24, 16, 8)).astype(np.float32) * 2.0 ** random.integers(-9, 9, (24, 16, 8))
    sums = sums.astype(np.float32)
    left[2:5], left[:2, 4:], right[1], right[:, 3] = left[4, 0], 0, 0, 0
    right[5], sums[3:20], sums[:, 2:5] = right[4], sums[0, 0], [[[-0.0], [1e-44], [np.inf]]]
    right[2, 5, 6] = unusual
    pairs = np.arange(24) // 4 % 6, np.arange(24) // 2 % 6
    a, b, c = (torch.from_numpy(x) for x in (left[pairs[0]], right[pairs[1]].swapaxes(1, 2), sums))
    expected = tensor_core_matmul(a, b, c, core).numpy()
    made = multiplied(left, right, pairs, sums, core)
    assert np.array_equal(np.isnan(made), np.isnan(expected))
    assert (made.view(np.uint32) == expected.view(np.uint32))[~np.isnan(made)].all()
