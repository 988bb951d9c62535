"""Products of four warps: layouts of operands as the PTX ISA draws them, and what has to be waited for."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tiebreak.backends.ptx.memory import SharedMemoryError
from tiebreak.kernels.kernel import CannotRunError

Executed = Callable[..., torch.Tensor]
THREADS, M, N, K = 128, 64, 16, 16
MODES = {16: 0, 32: 3, 64: 2, 128: 1}  # of a descriptor, by the bytes of a swizzled row
A_AT, B_AT, SHARED = 0, 16384, 20480  # bytes
SUMS = "{" + ", ".join(f"%d{at}" for at in range(N // 2)) + "}"
FIRST = f"wgmma.mma_async.sync.aligned.m64n{N}k{K}.f32.bf16.bf16 {SUMS}, %a, %b, 0, 1, 1"
FENCES, DONE = "fence.proxy.async; bar.sync 0; wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"
WAIT, STORE = "wgmma.wait_group.sync.aligned 0;", "mov.b32 %r2, %d0;"


def place(outer: int, k: int, width: int, turned: bool, leading: int, stride: int) -> int:
    """Of a number of two bytes (Shared Memory Matrix Layout, Strides): chunks of 16 bytes are swizzled by their row."""
    along, across = (outer, k) if turned else (k, outer)  # along a row of `width` bytes, and across such rows
    matrix, byte, row = along * 2 // width, along * 2 % width, across % 8
    chunk = (byte // 16) ^ (row * width // 128 % (width // 16))
    # Without a swizzle the leading dimension is the one along k, otherwise the one along rows.
    along_stride, across_stride = (stride, leading) if turned and width == 16 else (leading, stride)
    return matrix * along_stride + across // 8 * across_stride + row * width + chunk * 16 + byte % 16


def laid_out(matrix: NDArray[np.int64], width: int, turned: bool) -> tuple[NDArray[np.uint16], int]:
    """Bits of bf16 as they lie in shared memory, and the descriptor without its address."""
    count = matrix.shape[0]
    matrices = (2 * count if turned else 2 * K) // width or 1
    across = 8 * width  # bytes of a matrix
    leading, stride = (across, across * matrices) if not (turned and width == 16) else (across * matrices, across)
    bits = torch.from_numpy(matrix).bfloat16().view(torch.int16).numpy().view(np.uint16)
    memory = np.zeros(8192, np.uint16)
    for outer in range(count):
        for k in range(K):
            memory[place(outer, k, width, turned, leading, stride) // 2] = bits[outer, k]
    return memory, leading >> 4 << 16 | stride >> 4 << 32 | MODES[width] << 62


def filled(a: NDArray[np.uint16], b: NDArray[np.uint16]) -> tuple[torch.Tensor, str]:
    """A kernel's input, and what brings it to shared memory."""
    words = torch.from_numpy(np.concatenate([a, b[: (SHARED - B_AT) // 2]]).view(np.int32))
    row = 4 * THREADS
    moves = (
        f"ld.global.b32 %r3, [%rd0+{row * at}]; st.shared.b32 [%r1+{row * at}], %r3;" for at in range(SHARED // row)
    )
    return words, ".reg .b32 %d<8>; .reg .b64 %a; .reg .b64 %b;" + "".join(moves)


def sums(values: torch.Tensor) -> NDArray[np.float32]:
    """The matrix that registers hold (Register Fragments for wgmma.m64nNk16, matrix D)."""
    held, matrix = values.view(torch.float32).numpy().reshape(N // 2, THREADS), np.zeros((M, N), np.float32)
    for thread in range(THREADS):
        for at in range(N // 2):
            row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (at // 2 % 2)
            matrix[row, 8 * (at // 4) + 2 * (thread % 4) + at % 2] = held[at, thread]
    return matrix


def operands(a: int = 0, b: int = 0) -> str:
    return f"mov.b64 %a, {a | A_AT >> 4}; mov.b64 %b, {b | B_AT >> 4};"


@pytest.mark.parametrize("width", MODES)
@pytest.mark.parametrize(("a_turned", "b_turned"), [(False, False), (True, False), (False, True)])
def test_operands_lie_as_descriptors_say(width: int, a_turned: bool, b_turned: bool, executed: Executed) -> None:
    """In small integers, so that sums are exact; and once more added to what there is."""
    random = np.random.default_rng(width)
    a, b = random.integers(-8, 9, (M, K)), random.integers(-8, 9, (N, K))
    (in_a, of_a), (in_b, of_b) = (
        laid_out(a, width, a_turned),
        laid_out(b, min(width, 2 * N) if b_turned else width, b_turned),
    )
    words, moves = filled(in_a, in_b)
    turned = f", {int(a_turned)}, {int(b_turned)};"
    again = FIRST.replace(" 0, 1, 1", " 1, 1, 1")
    row = 4 * THREADS
    stores = "".join(f"st.global.b32 [%rd1+{row * at}], %d{at};" for at in range(1, N // 2))
    body = f"{moves} {operands(of_a, of_b)} {FENCES} {FIRST}{turned} {again}{turned} {DONE} {WAIT} {STORE} {stores}"
    found = executed(body, words, THREADS, "sm_90", outputs=N // 2, shared=SHARED)
    assert np.array_equal(sums(found), 2 * a @ b.T)


def simple(between: str = "", *, fences: str = FENCES, done: str = DONE, wait: str = WAIT, after: str = STORE) -> str:
    """A product of what lies there, without one of its parts."""
    zeros = np.zeros(8192, np.uint16)
    _, moves = filled(zeros, zeros)
    return f"{moves} {operands()} {fences} {FIRST}, 0, 0; {between} {done} {wait} {after}"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (simple(wait=""), r"mov\.b32 .* reads %d0, which a product is bringing"),
        (simple(done=""), r"reads %d0, which a product is bringing"),
        (simple(wait=WAIT.replace("0;", "1;")), r"reads %d0, which a product is bringing"),
        (simple("mov.b32 %d1, 0;"), r"writes %d1, which a product is bringing"),
        (simple("st.shared.b32 [%r1], %r0;"), r"st\.shared\.b32 .* writes what a product may still read: byte 0"),
        (simple(fences=FENCES.replace("fence.proxy.async;", "")), r"no fence\.proxy\.async since"),
        (simple(fences=FENCES.replace("bar.sync 0;", "")), r"reads what another thread wrote and no barrier"),
        (simple(fences=FENCES.replace("wgmma.fence.sync.aligned;", "")), r"takes %d0 and no wgmma\.fence"),
        (simple(fences=f"{FENCES} mov.b32 %d3, 0;"), r"takes %d3 and no wgmma\.fence lies between"),
        (simple(fences=f"mov.b64 %b, 2048; {FENCES}"), r"goes beyond the shared memory"),
    ],
)
def test_what_a_product_has_not_done_or_does_not_see_is_an_error(body: str, message: str, executed: Executed) -> None:
    zeros, _ = filled(*[np.zeros(8192, np.uint16)] * 2)
    assert executed(simple(), zeros, THREADS, "sm_90", shared=SHARED).tolist() == [0] * THREADS
    with pytest.raises(SharedMemoryError, match=message):
        executed(body, zeros, THREADS, "sm_90", shared=SHARED)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (simple().replace("0, 1, 1", "0, -1, 1"), r"instruction wgmma\.mma_async"),
        (simple(fences=f"mov.b64 %b, {1 << 49}; {FENCES}"), r"instruction wgmma\.mma_async"),
        (
            simple(fences=f"{FENCES} setp.lt.s32 %p0, %r0, 32; @%p0 bra $L0;", after=f"$L0: {STORE}"),
            r"of a block alone",
        ),
    ],
)
def test_what_is_not_known_of_a_product_is_refused(body: str, message: str, executed: Executed) -> None:
    zeros, _ = filled(*[np.zeros(8192, np.uint16)] * 2)
    with pytest.raises(CannotRunError, match=message):
        executed(body, zeros, THREADS, "sm_90", shared=SHARED)


@pytest.mark.parametrize("loaded", ["", ".trans"])
@pytest.mark.parametrize("stored", ["", ".trans"])
@pytest.mark.parametrize("names", [("%r5",), ("%r5", "%r6"), ("%r5", "%r6", "%r7", "%r8")])
def test_matrices_are_stored_as_they_are_loaded(
    loaded: str, stored: str, names: tuple[str, ...], executed: Executed
) -> None:
    """What `ldmatrix` brings, `stmatrix` puts elsewhere: as it was, or turned where one of them turns it."""
    matrices = torch.arange(256, dtype=torch.int32) * 65537 * 3  # of 64 threads: four of each warp
    moves = "".join(f"ld.global.b32 %r4, [%rd0+{256 * at}]; st.shared.b32 [%r1+{256 * at}], %r4;" for at in range(4))
    count, registers = len(names), "{" + ", ".join(names) + "}"
    body = f"""{moves} shl.b32 %r3, %r0, 4; mov.b32 %r2, -1; bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x{count}{loaded}.shared.b16 {registers}, [%r3];
    stmatrix.sync.aligned.m8n8.x{count}{stored}.shared.b16 [%r3+1024], {registers};
    bar.sync 0; setp.lt.s32 %p0, %r0, {32 * count}; @%p0 ld.shared.b32 %r2, [%r1+1024];"""
    words = min(64, 32 * count)  # of the first warp's
    squares = matrices[:words].numpy().view(np.int16).reshape(-1, 8, 8)
    expected = squares if loaded == stored else squares.swapaxes(1, 2)
    found = executed(body, matrices, shared=2048)[:words].numpy().view(np.int16).reshape(-1, 8, 8)
    assert np.array_equal(found, expected)
