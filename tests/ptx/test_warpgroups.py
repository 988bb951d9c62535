"""Products of four warps, and of one thread: operands as the PTX ISA draws them, and what has to be waited for."""

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
    """Return where a number of two bytes lies (Shared Memory Matrix Layout, Strides): rows swizzle 16-byte chunks."""
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
    unused = "".join(f"mov.b32 %d{at}, 1065353216;" for at in range(N // 2))  # the first product does not add to it
    products = f"{FENCES} {FIRST}{turned} {again}{turned} {DONE} {WAIT}"
    body = f"{moves} {operands(of_a, of_b)} {unused} {products} {STORE} {stores}"
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
        (simple(fences=f"{FENCES} setp.lt.s32 %p0, %r0, 32; @%p0 bra $L0;", after=f"$L0: {STORE}"), r"96 at wgmma"),
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
    """`stmatrix` stores what `ldmatrix` loads: as it was, or transposed where one of them transposes it."""
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


# One thread's products, whose sums are in tensor memory.
ALLOCATED, BARRIER, BLACKWELLS = SHARED, SHARED + 8, SHARED + 16
ELECTED = "elect.sync %r12|%p2, -1; setp.lt.u32 %p0, %r0, 32; and.pred %p3, %p2, %p0;"
PREPARED = f"""mov.b32 %r9, {ALLOCATED}; mov.b32 %r11, {BARRIER}; setp.lt.u32 %p0, %r0, 32; setp.eq.u32 %p1, %r0, 0;
@%p0 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r9], 64;
@%p1 mbarrier.init.shared::cta.b64 [%r11], 1; bar.sync 0; ld.shared.b32 %r10, [%r9];
shr.u32 %r15, %r0, 5; shl.b32 %r15, %r15, 21; add.s32 %r14, %r10, %r15; mov.pred %p4, 0; mov.pred %p5, -1;"""
COMMIT = "@%p3 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r11];"
AWAITED = "$W: mbarrier.try_wait.parity.shared::cta.b64 %p6, [%r11], 0; @!%p6 bra $W;"
TURNED_A, TURNED_B = 1 << 15, 1 << 16
ROWS = "{" + ", ".join(f"%d{at}" for at in range(8)) + "}"
LOADED = f"tcgen05.ld.sync.aligned.16x32bx2.x8.b32 {ROWS}, [%r14], 8; tcgen05.wait::ld.sync.aligned;"
STORED = f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%r14+32], {ROWS};"
ONCE, LATER = "tcgen05.mma.cta_group::1.kind::f16", LOADED.replace("%r14]", "%r14+16]")
STORED_IS_THERE, NEXT = "tcgen05.wait::st.sync.aligned;", "fence.proxy.async; bar.sync 0;"


def shape(m: int) -> int:
    """The instruction descriptor: sums in fp32, operands in bf16, N columns and m rows."""
    return 1 << 4 | 1 << 7 | 1 << 10 | N // 8 << 17 | m // 16 << 24


def asked(descriptor: int, a: str = "%a") -> str:
    """A product and the same once more, added to it, by one thread."""
    product = "@%p3 tcgen05.mma.cta_group::1.kind::f16 [%r10]"
    return f"mov.b32 %r13, {descriptor}; {ELECTED} {product}, {a}, %b, %r13, %p4; {product}, {a}, %b, %r13, %p5;"


def on_blackwell(m: int, executed: Executed, body: str, words: torch.Tensor) -> NDArray[np.float32]:
    """The sums that registers hold in the end: of 64 rows half of every warp's lanes have half of the columns."""
    row, count = 4 * THREADS, N if m == 128 else N // 2
    stores = "".join(f"st.global.b32 [%rd1+{row * at}], %d{at};" for at in range(1, count))
    body = f"{body} {STORE} {stores}".replace("%d<8>", "%d<16>")
    found = executed(body, words, THREADS, "sm_100", outputs=count, shared=BLACKWELLS)
    held = found.view(torch.float32).numpy().reshape(count, THREADS).T
    if m == 128:
        return held
    halves = held.reshape(4, 2, 16, 8)
    return np.concatenate([halves[:, 0], halves[:, 1]], -1).reshape(m, N)


@pytest.mark.parametrize("width", MODES)
@pytest.mark.parametrize(("a_turned", "b_turned"), [(False, False), (True, True)])
@pytest.mark.parametrize("m", [64, 128])
def test_a_thread_multiplies_into_tensor_memory(
    m: int, width: int, a_turned: bool, b_turned: bool, executed: Executed
) -> None:
    random = np.random.default_rng(width)
    a, b = random.integers(-8, 9, (m, K)), random.integers(-8, 9, (N, K))
    in_a, of_a = laid_out(a, width, a_turned)
    in_b, of_b = laid_out(b, min(width, 2 * N) if b_turned else width, b_turned)
    words, moves = filled(in_a, in_b)
    # Modes of a descriptor there are bits 61 to 63, and bit 46 is set.
    described = operands(of_a | 1 << 46, of_b | 1 << 46)
    flags = TURNED_A * a_turned | TURNED_B * b_turned
    every = "{" + ", ".join(f"%d{at}" for at in range(N)) + "}"
    load = LOADED if m == 64 else f"tcgen05.ld.sync.aligned.32x32b.x{N}.b32 {every}, [%r14];"
    body = f"{moves} {described} {PREPARED} {NEXT} {asked(shape(m) | flags)} {COMMIT} {AWAITED} {load}"
    assert np.array_equal(on_blackwell(m, executed, body, words), 2 * a @ b.T)


def from_memory(*, there: str = STORED_IS_THERE, between: str = NEXT, behind: str = "", wait: str = AWAITED) -> str:
    """A product whose A is in tensor memory, a row of 16 numbers in eight columns of a lane."""
    _, moves = filled(*[np.zeros(8192, np.uint16)] * 2)
    rows = "".join(f"ld.shared.b32 %d{at}, [%r4+{4 * at}];" for at in range(8))
    stored = f"bar.sync 0; shl.b32 %r4, %r0, 5; {rows} {STORED} {there} {between}"
    every = "{" + ", ".join(f"%d{at}" for at in range(N)) + "}"
    load = f"tcgen05.ld.sync.aligned.32x32b.x{N}.b32 {every}, [%r14];"
    return f"""{moves} {operands(0, laid_out(np.zeros((N, K), np.int64), 32, False)[1] | 1 << 46)} {PREPARED} {stored}
    {asked(shape(128), "[%r10+32]")} {COMMIT} {behind} {wait} {load}"""


def rows_in_memory() -> tuple[NDArray[np.int64], NDArray[np.int64], torch.Tensor]:
    random = np.random.default_rng(0)
    a, b = random.integers(-8, 9, (128, K)), random.integers(-8, 9, (N, K))
    bits = torch.from_numpy(a).bfloat16().view(torch.int16).numpy().view(np.uint16).ravel()
    words, _ = filled(np.concatenate([bits, np.zeros(8192 - bits.size, np.uint16)]), laid_out(b, 32, False)[0])
    return a, b, words


def test_a_product_takes_rows_from_tensor_memory(executed: Executed) -> None:
    a, b, words = rows_in_memory()
    assert np.array_equal(on_blackwell(128, executed, from_memory(), words), 2 * a @ b.T)
    hinting = from_memory().replace("kind::f16", "kind::f16.collector::a::discard")
    showing = hinting.replace("%r13, %p", "%r13, {%r16, %r16, %r16, %r16}, %p").replace(
        ELECTED, f"mov.b32 %r16, 0; {ELECTED}"
    )
    assert np.array_equal(on_blackwell(128, executed, showing, words), 2 * a @ b.T)
    with pytest.raises(CannotRunError, match=r"instruction tcgen05\.mma"):  # lanes that are left as they are
        on_blackwell(128, executed, showing.replace("%r16, 0;", "%r16, 1;"), words)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (from_memory(there=""), r"tcgen05\.mma.* reads what was stored, and no tcgen05\.wait::st since"),
        (
            from_memory(between="fence.proxy.async;"),
            r"tcgen05\.mma.* reads what other threads stored, and no barrier lies between",
        ),
        (from_memory(between="bar.sync 0;"), r"tcgen05\.mma.* no fence\.proxy\.async since"),
        (from_memory(behind=STORED), r"tcgen05\.st.* writes what a product may still read, in tensor memory"),
        (from_memory(behind="bar.sync 0; st.shared.b32 [%r1+16384], %r0;"), r"writes what a product may still read"),
        (from_memory(wait=""), r"tcgen05\.ld.* reads what a product is bringing"),
        (from_memory().replace("[%r10+32]", "[%r10+40]"), r"reads what nobody has written, in tensor memory"),
        (  # of a product that was asked for after the commit
            from_memory(behind=f"@%p3 {ONCE} [%r10+16], [%r10+32], %b, %r13, %p4;", wait=f"{AWAITED} {LATER}"),
            r"tcgen05\.ld.* reads what a product is bringing",
        ),
        (from_memory(wait=AWAITED.replace(", 0;", ", 1;")), r"wait for one another: 128 at mbarrier"),
        (from_memory().replace(COMMIT, ""), r"wait for one another: 128 at mbarrier\.try_wait"),
        (from_memory().replace("@%p1 mbarrier.init.shared::cta.b64 [%r11], 1;", ""), r"finds no barrier at byte 20488"),
    ],
)
def test_what_tensor_memory_does_not_have_yet_is_an_error(body: str, message: str, executed: Executed) -> None:
    with pytest.raises(SharedMemoryError, match=message):
        on_blackwell(128, executed, body, rows_in_memory()[2])


def test_tensor_memory_that_nobody_has_written_is_nan(executed: Executed) -> None:
    """A compiler begins a loop that may not be entered, and drops what it read."""
    words = rows_in_memory()[2]
    found = on_blackwell(128, executed, f"{from_memory()} {LOADED.replace('%r14]', '%r14+40]')}", words)
    assert np.isnan(found[:, :8]).all()
    assert not np.isnan(found[:, 8:]).any()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (str(shape(128)), str(shape(128) | 1 << 13)),  # a negated A
        (str(shape(128)), str(shape(256))),
        ("and.pred %p3, %p2, %p0;", "mov.pred %p3, %p0;"),  # more than one thread
        ("b32 [%r9], 64;", "b32 [%r9], 1024;"),
    ],
)
def test_what_is_not_known_of_tensor_memory_is_refused(old: str, new: str, executed: Executed) -> None:
    with pytest.raises(CannotRunError, match=r"instruction tcgen05\."):
        on_blackwell(128, executed, from_memory().replace(old, new), rows_in_memory()[2])
