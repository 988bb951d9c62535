"""Copies of boxes, the barriers that they and roles of warps meet at, and a user's kernel that has its tensors so."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tiebreak.backends.interpreter.assumptions import CARDS
from tiebreak.backends.interpreter.memory import KernelMemory, arguments_of
from tiebreak.backends.interpreter.session import interpreting
from tiebreak.backends.ptx import CARDS as SHARED
from tiebreak.backends.ptx.execution import Program
from tiebreak.backends.ptx.memory import SharedMemoryError
from tiebreak.backends.ptx.session import executing
from tiebreak.backends.ptx.threads import Launch, TensorMap
from tiebreak.kernels.kernel import CannotRunError

THREADS, BARRIER, ROWS = 64, 8192, 16  # threads of a block, a byte of its shared memory, rows of a box
SHAPE = 3, 24, 80  # of the tensor that boxes are taken of
KERNEL = """
.extern .shared .align 128 .b8 mine[];
.visible .entry kernel(.param .align 64 .b8 from[128], .param .align 64 .b8 into[128], .param .align 8 .b8 more[24])
{
    .reg .pred %p<9>; .reg .b32 %r<19>; .reg .b64 %rd<9>;
    mov.b64 %rd5, from;
    cvta.param.u64 %rd0, %rd5;
    mov.b64 %rd6, into;
    cvta.param.u64 %rd1, %rd6;
    ld.param.v2.b32 {%r3, %r4}, [more+8];
    ld.param.b64 %rd2, [more];
    mov.b32 %r5, 1;
    mov.u32 %r0, %tid.x;
    mov.b32 %r1, mine;
    add.s32 %r2, %r1, 8192;
    shl.b32 %r6, %r0, 2;
    setp.eq.b32 %p0, %r0, 0;
    setp.lt.u32 %p1, %r0, 32;
    @%p0 mbarrier.init.shared::cta.b64 [%r2],
        1;
    bar.sync 0;
BODY
    ret;
}
"""
LOAD = """@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], BYTES;
    @%p0 cp.async.bulk.tensor.3d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd0, {%r3, %r4, %r5}], [%r2];
"""
WAIT = """$WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0, 10000000;
    @!%p2 bra $WAIT;
"""
STORE = """@%p0 cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%rd1, {%r3, %r4, %r5}], [%r1];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
"""
READ, WRITE = "add.s32 %r7, %r1, %r6; ld.shared.b32 %r8, [%r7];", "add.s32 %r7, %r1, %r6; st.shared.b32 [%r7], %r6;"
FILL = WRITE + "".join(f"st.shared.b32 [%r7+{at}], %r6;" for at in range(256, 2048, 256))


def executed(body: str, swizzle: int = 3, corner: tuple[int, int] = (0, 0), size: int = 2, **maps: Any) -> Any:
    """The tensor that boxes are loaded from, and the one they are stored into; every thread has %rd2 for its words."""
    columns = (128 if swizzle == 0 else 16 << swizzle) // size
    given = torch.from_numpy(np.random.default_rng(0).integers(1, 2 ** (8 * size - 1), SHAPE, f"i{size}"))
    into, words = torch.zeros_like(given), torch.zeros(ROWS * columns * size // 4, dtype=torch.int32)
    strides = tuple(size * stride for stride in given.stride()[::-1])
    of = TensorMap(given.data_ptr(), SHAPE[::-1], strides, (columns, ROWS, 1), swizzle)
    memory = KernelMemory("kernel", tuple(arguments_of({"X": given, "Y": into, "Z": words})))
    more = words.data_ptr().to_bytes(8, "little") + np.array(corner, np.int32).tobytes() + bytes(8)
    text = KERNEL.replace("BODY", body).replace("BYTES", str(ROWS * columns * size))
    of_launch = [replace(of, **maps), replace(of, start=into.data_ptr())]
    Program(text, "sm_90").run(Launch((1, 1, 1), THREADS, 1 << 14, (0, 1, more), memory, of_launch))
    return given, into, words


@pytest.mark.quick
@pytest.mark.parametrize("corner", [(0, 0), (-8, 16), (40, -3)])
@pytest.mark.parametrize("swizzle", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [2, 4])
def test_a_box_lies_swizzled_in_shared_memory_and_is_stored_from_there(
    size: int, swizzle: int, corner: tuple[int, int]
) -> None:
    """Chunks of 16 bytes change places by the number of their row of 128 bytes (Tensors, Swizzle Modes)."""
    rows = 16 << swizzle if swizzle else 128  # bytes
    moves = (f"ld.shared.b32 %r8, [%r7+{at}]; st.global.b32 [%rd3+{at}], %r8;" for at in range(0, ROWS * rows, 256))
    out = f"add.s32 %r7, %r1, %r6; cvt.u64.u32 %rd4, %r6; add.s64 %rd3, %rd2, %rd4; {''.join(moves)}"
    given, into, words = executed(LOAD + WAIT + STORE + out, swizzle, corner, size)
    columns = rows // size
    box, padded = np.zeros((ROWS, columns), f"i{size}"), np.zeros_like(given.numpy())
    for row in range(ROWS):
        for column in range(columns):
            x, y = column + corner[0], row + corner[1]
            if 0 <= x < SHAPE[2] and 0 <= y < SHAPE[1]:
                box[row, column] = padded[1, y, x] = given[1, y, x]
    assert np.array_equal(into.numpy(), padded)
    found, flat = words.numpy().view(f"i{size}"), box.ravel()
    for at in range(flat.size):
        byte = at * size
        chunk = byte // 16 ^ (byte // 128 % (rows // 16) if swizzle else 0)
        assert found[(chunk * 16 + byte % 16) // size] == flat[at]


def test_every_byte_of_a_box_is_there() -> None:
    executed(f"{LOAD} {WAIT} add.s32 %r7, %r1, 1; ld.shared.b8 %r8, [%r7];")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (LOAD + READ, "reads what an asynchronous copy is bringing"),
        (LOAD + WRITE, "writes what an asynchronous copy is bringing"),
        (LOAD + STORE, "reads what an asynchronous copy is bringing"),
        (LOAD + WAIT.replace(", 0,", ", -1,") + READ, r"wait for one another: 64 at mbarrier\.try_wait"),
        (WAIT.replace(", 0,", ", 1,") + LOAD + READ, "reads what an asynchronous copy is bringing"),
        (
            LOAD.replace(".expect_tx", "").replace(", BYTES", ", 1") + WAIT + READ,
            "a copy is bringing|asynchronous copy",
        ),
        (LOAD.replace("BYTES", "BYTES0") + WAIT, r"wait for one another: 64 at mbarrier\.try_wait"),
        (LOAD[LOAD.index("\n") :] + WAIT, r"wait for one another: 64 at mbarrier\.try_wait"),
        ("bra $WAIT;" + WAIT, r"wait for one another"),
        (LOAD.replace("[%r2]", "[%r2+8]") + WAIT, "finds no barrier at byte 8200"),
        (WRITE + LOAD + WAIT, "writes what another thread wrote"),
        (FILL + "bar.sync 0;" + STORE, "reads what was written, and no fence.proxy.async since"),
        (FILL + "fence.proxy.async;" + STORE, "reads what another thread wrote"),
        (STORE, "reads what no thread has written"),
        (LOAD + WAIT + STORE[: STORE.index("cp.async.bulk.wait")] + WRITE, "writes what a product may still read"),
    ],
)
def test_what_a_copy_has_not_brought_or_may_still_read_is_an_error(body: str, message: str) -> None:
    with pytest.raises(SharedMemoryError, match=message):
        executed(body)


# Bytes in a line: from %rd0's words into shared memory and, as fp32, added to them.
LINE = """@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 256;
    mov.u32 %r9, %cluster_ctarank; mapa.shared::cluster.u32 %r10, %r1, %r9; mov.b32 %r11, 256;
    @%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r10], [%rd2], %r11, [%r2];
"""
ADDED = """@%p0 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd2], [%r1], 256;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
"""
FLOATS = """griddepcontrol.wait; add.s32 %r7, %r1, %r6; cvt.rn.f32.s32 %r8, %r0; st.shared.b32 [%r7], %r8;
    fence.proxy.async; bar.sync 0;
"""


@pytest.mark.quick
def test_bytes_in_a_line_are_copied_and_added() -> None:
    """Twice the thread's number is added to zeros, then that is brought back and added (cp.reduce.async.bulk)."""
    first = FLOATS + ADDED * 2
    words = executed(f"{first} bar.sync 0; {LINE} {WAIT} {ADDED}")[2]
    assert words.view(torch.float32)[:64].tolist() == [4.0 * number for number in range(64)]
    small = torch.tensor([2.0**-127, -(2.0**-127)]).view(torch.int32).tolist()
    first = first.replace("cvt.rn.f32.s32 %r8, %r0", f"mov.b32 %r8, {small[0]}")
    assert not executed(first)[2].any()  # subnormal numbers are flushed


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (LINE + READ, "reads what an asynchronous copy is bringing"),
        (LINE.replace(", 256;", ", 128;", 1) + WAIT + READ, r"wait for one another: 64 at mbarrier\.try_wait"),
        (FILL + "bar.sync 0;" + ADDED, "reads what was written, and no fence.proxy.async since"),
        (LINE + WAIT + ADDED.replace("cp.async.bulk.wait_group 0;", WRITE), "writes what a product may still read"),
    ],
)
def test_what_bytes_in_a_line_have_not_brought_or_may_still_be_read_is_an_error(body: str, message: str) -> None:
    with pytest.raises(SharedMemoryError, match=message):
        executed(body)


@pytest.mark.parametrize(
    ("change", "body"),
    [
        ({"nan": True}, LOAD),
        ({"box": (32, ROWS, 1)}, LOAD),
        ({"box": (64, ROWS)}, LOAD),
        ({}, LOAD.replace(".mbarrier::complete_tx::bytes", ".im2col.mbarrier::complete_tx::bytes")),
        ({}, LOAD.replace("complete_tx::bytes ", "complete_tx::bytes.multicast::cluster ")),
    ],
)
def test_a_copy_that_is_not_known_is_refused_by_name(change: dict[str, Any], body: str) -> None:
    with pytest.raises(CannotRunError, match=r"instruction cp\.async\.bulk\.tensor\.3d"):
        executed(body, **change)


ROLES = """@%p1 bra $FIRST;
    st.shared.b32 [%r1], 7;
    bar.arrive 3, 64;
    bar.sync 4, 64;
    bra $END;
$FIRST: bar.sync 3, 64;
    ld.shared.b32 %r8, [%r1];
    bar.arrive 4, 64;
$END: ;
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("", "", ""),
        ("bar.arrive 3, 64;", "", r"wait for one another: 32 at bar\.sync .*, 32 at bar\.sync"),
        ("bar.arrive 4, 64;", "bar.arrive 5, 64;", r"wait for one another: 32 at bar\.sync"),
        ("bar.sync 3, 64;", "", "reads what another thread wrote"),
        ("bar.sync 3, 64;", "bar.sync 3;", ""),
    ],
)
def test_roles_of_warps_meet_at_barriers_by_number(old: str, new: str, message: str) -> None:
    """One writes and goes on, and the other reads once that has come; without a count all of a block meet."""
    body = ROLES.replace("st.shared", "setp.eq.b32 %p3, %r0, 32; @%p3 st.shared").replace(old, new)
    with pytest.raises(SharedMemoryError, match=message) if message else nullcontext():
        executed(body)


@pytest.fixture(scope="module")
def boxes(module_at: Callable[[Path], Any]) -> Any:
    return module_at(Path(__file__).with_name("few_boxes.py"))


def inputs(dtype: torch.dtype, keys: int = 128) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn((1, 2, n, 64), generator=generator).to(dtype) for n in (128, keys, keys)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("card", ["sm_80", "sm_90", "sm_100"])
def test_a_kernel_of_descriptors_has_the_interpreters_bits(card: str, dtype: torch.dtype, boxes: Any) -> None:
    given = inputs(dtype)
    with executing(card, SHARED[card]):
        compiled = boxes.attention(*given)
    with interpreting(CARDS[card]):
        assert torch.equal(boxes.attention(*given), compiled)


@pytest.mark.skipif(not version("triton").startswith("3.9."), reason="roles of warps as Triton 3.9 compiles them")
@pytest.mark.parametrize(("card", "queries"), [("sm_90", 64), ("sm_100", 128)])
def test_warps_with_roles_of_their_own_have_the_interpreters_bits(
    card: str, queries: int, boxes: Any, compiled: list[str]
) -> None:
    """One brings boxes and others multiply, or one asks for products and others take powers."""
    q, k, v = inputs(torch.bfloat16, 192)
    few = q[:, :, :queries]
    with executing(card, SHARED[card]):
        found = boxes.attention(few, k, v, parted=True)
        if card == "sm_90":
            with pytest.raises(CannotRunError, match="does not compile it for this card: PassManager"):
                boxes.attention(q, k, v, parted=True)
    assert compiled[0].count("setmaxnreg.inc") > 1
    with interpreting(CARDS[card]):
        assert torch.equal(boxes.attention(few, k, v), found)


@pytest.mark.parametrize("card", ["sm_90", "sm_100"])
def test_what_is_left_out_around_a_copy_is_missed(card: str, boxes: Any, left_out: Callable[..., Any]) -> None:
    """Leave out each thing that orders a copy and the products around it, once; a wait is then taken for done."""
    given = inputs(torch.bfloat16)

    def launch() -> None:
        with executing(card, SHARED[card]):
            boxes.attention(*given)

    names = r"mbarrier\.try_wait|mbarrier\.arrive\.expect_tx|mbarrier\.init|fence\.proxy\.async|cp\.async\.bulk\.tensor"
    tried = left_out(launch, card, names, every=False)
    assert {name for name, missed in tried if missed} == set(names.replace("\\", "").split("|"))
