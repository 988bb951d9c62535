"""What threads do together: branches, barriers, shared memory, copies; and what is refused rather than guessed."""

from collections.abc import Callable
from functools import reduce

import numpy as np
import pytest
import torch

from tiebreak.backends.ptx.memory import SharedMemoryError
from tiebreak.kernels.kernel import CannotRunError, OutOfBoundsError

Executed = Callable[..., torch.Tensor]
LANES = torch.arange(64)
WRITE, READ = "st.shared.b32 [%r1], %r0;", "xor.b32 %r3, %r1, 4; ld.shared.b32 %r2, [%r3];"  # own; the neighbour's
OTHER_WARP = READ.replace("4", "128")
# One word; at the second place by one warp alone where %p1 guards it.
ALL_READ = f"{WRITE} bar.sync 0; mov.b32 %r5, 0; setp.ge.s32 %p1, %r0, 32; ld.shared.b32 %r2, [%r5];"
ONE_WRITES = "setp.eq.s32 %p0, %r0, 62; @%p0 st.shared.b32 [%r5], %r0;"
COPY = "cvt.u32.u64 %r4, %rd2; cp.async.ca.shared.global [%r1], [%rd0], 4; cp.async.commit_group;"
WAIT = "cp.async.wait_group 0;"


def test_threads_that_part_meet_again(executed: Executed) -> None:
    """A loop whose trips differ by thread, with one that leaves it early; then a sum that all add to."""
    loop = """
    mov.b32 %r2, 0; mov.b32 %r3, 0;
    $L0: setp.ge.s32 %p0, %r3, %r0; @%p0 bra $L1;
    add.s32 %r2, %r2, %r3; add.s32 %r3, %r3, 1; setp.gt.s32 %p1, %r2, 100; @!%p1 bra $L0;
    add.s32 %r2, %r2, 1000;
    $L1: add.s32 %r2, %r2, 1; bar.sync 0;
    """
    expected = []
    for thread in range(64):
        total = 0
        for trip in range(thread):
            total += trip
            if total > 100:
                total += 1000
                break
        expected.append(total + 1)
    assert executed(loop).tolist() == expected


def test_who_comes_early_to_a_barrier_waits_for_who_stands_behind_it_in_the_text(executed: Executed) -> None:
    body = """setp.lt.s32 %p0, %r0, 32; mov.b32 %r2, 0; @%p0 bra $L2;
    $L1: bar.sync 0; ld.shared.b32 %r2, [%r1+128]; bra $L3;
    $L2: add.s32 %r4, %r0, 100; st.shared.b32 [%r1+256], %r4; st.shared.b32 [%r1+128], %r4; bra $L1;
    $L3:
    { bra $L4; add.s32 %r2, %r2, 1000; $L4:
    }
    add.s32 %r2, %r2, 7;
    { bra $L4; add.s32 %r2, %r2, 5000; $L4:
    }"""
    assert executed(body).tolist() == [*range(107, 139), *range(107, 139)]


SPINNING = """mov.b32 %r2, 0; ld.param.b64 %rd3, [kernel_param_1]; setp.ge.u32 %p0, %r0, 32; @%p0 bra $GIVE;
    $SPIN: ld.global.acquire.gpu.b32 %r2, [%rd3+256]; setp.ne.b32 %p1, %r2, 32; @%p1 bra $SPIN; bra $END;
    $GIVE: red.release.gpu.global.add.s32 [%rd3+256], 1;
    $END: ;"""


def test_who_reads_the_same_again_and_again_waits_for_others(executed: Executed) -> None:
    """As a block that waits for its turn: those that it waits for stand behind it in the text."""
    assert executed(SPINNING, outputs=2).tolist() == [32] * 32 + [0] * 32 + [32] + [0] * 63
    with pytest.raises(SharedMemoryError, match=r"wait for one another: 32 at ld\.global\.acquire"):
        executed(SPINNING.replace("%p1, %r2, 32", "%p1, %r2, 33"), outputs=2)


def test_numbers_are_added_to_a_place_thread_by_thread(executed: Executed) -> None:
    """Each sum is rounded, and subnormal numbers are flushed (Parallel Synchronization, red)."""
    given = torch.from_numpy(np.random.default_rng(0).normal(size=64).astype(np.float32))
    given[7:9] = torch.tensor([2.0**-127, 1e4])
    body = """ld.global.b32 %r3, [%rd0]; mov.b32 %r2, 0; ld.param.b64 %rd3, [kernel_param_1];
    red.global.add.f32 [%rd3+256], %r3; setp.eq.u32 %p0, %r0, 7; @%p0 red.global.add.f32 [%rd3+260], %r3;"""
    totals = [reduce(np.add, numbers, np.float32(0)) for numbers in (given.numpy(), given.numpy()[::-1])]
    assert executed(body, given, outputs=2).view(torch.float32)[64:66].tolist() == [totals[0], 0]
    assert totals[0] != totals[1]


BRANCHES = """and.b32 %r3, %r0, 3; mov.b32 %r2, 0;
    $T: .branchtargets
        $L1,
        $L2, $L3, $L1;
    brx.idx %r3, $T;
    $L1: add.s32 %r2, %r2, 100; bra $L3;
    $L2: add.s32 %r2, %r2, 7;
    $L3: bar.sync 0;"""


def test_a_table_says_where_each_thread_goes(executed: Executed) -> None:
    assert executed(BRANCHES).tolist() == [100, 7, 0, 100] * 16
    with pytest.raises(CannotRunError, match=r"instruction brx\.idx"):
        executed(BRANCHES.replace("$L3, $L1", "$L3"))


@pytest.mark.parametrize(
    ("body", "sources"),
    [
        ("shfl.sync.bfly.b32 %r2, %r0, 5, 31, -1;", LANES ^ 5),
        ("shfl.sync.idx.b32 %r2, %r0, %r1, 31, -1;", (LANES & ~31) + (4 * LANES & 31)),
        ("shfl.sync.up.b32 %r2, %r0, 3, 0, -1;", torch.where(LANES % 32 < 3, LANES, LANES - 3)),
        ("shfl.sync.down.b32 %r2, %r0, 3, 31, -1;", torch.where(LANES % 32 > 28, LANES, LANES + 3)),
        (f"{WRITE} bar.sync 0; {OTHER_WARP}", LANES ^ 32),
        (f"{WRITE} bar.sync 0; {OTHER_WARP}".replace("shared", "shared::cta"), LANES ^ 32),  # as Triton 3.8 writes it
        (f"{WRITE} bar.warp.sync -1; {READ}", LANES ^ 1),
        (f"{COPY} {WAIT} bar.sync 0; {OTHER_WARP}", LANES ^ 32),
        (f"{WRITE} bar.sync 0; {READ} bar.sync 0; {WRITE}", LANES ^ 1),
    ],
)
def test_threads_see_what_others_had(body: str, sources: torch.Tensor, executed: Executed) -> None:
    assert executed(body).tolist() == sources.tolist()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (READ, r"ld\.shared\.b32 \(line \d+.*\) reads what no thread has written: byte 4 of the block's"),
        (f"{WRITE} {READ}", r"ld\.shared\.b32 .* reads what another thread wrote and no barrier lies between"),
        (f"{WRITE} bar.warp.sync -1; {OTHER_WARP}", r"reads what another thread wrote"),
        (f"{WRITE} bar.sync 0; {READ} {WRITE}", r"st\.shared\.b32 .* writes what another thread read"),
        (f"{WRITE} bar.sync 0; {OTHER_WARP} bar.warp.sync -1; {WRITE}", r"writes what another thread read"),
        (f"{ALL_READ} {ONE_WRITES}", r"writes what another thread read"),
        (f"{ALL_READ} bar.warp.sync -1; {ONE_WRITES}", r"writes what another thread read"),
        (f"{ALL_READ} bar.warp.sync -1; {ONE_WRITES.replace('62', '30')}", r"writes what another thread read"),
        (f"{ALL_READ.replace('ld', '@%p1 ld')} {ONE_WRITES}", r"writes what another thread read"),
        (f"{WRITE} xor.b32 %r3, %r1, 8; st.shared.b32 [%r3], %r0;", r"writes what another thread wrote"),
        (f"{COPY} {READ}", r"reads what an asynchronous copy is bringing"),
        (f"{COPY} bar.sync 0; ld.shared.b32 %r2, [%r1];", r"reads what an asynchronous copy is bringing"),
        (f"{COPY} {WAIT} {READ}", r"reads what another thread wrote"),
        (f"{COPY} {WRITE}", r"writes what an asynchronous copy is bringing"),
        (
            "setp.gt.s32 %p0, %r0, 5; @%p0 bra $L0; bar.sync 0; bra $L1; $L0: bar.sync 0; $L1:",
            r"wait for one another: 6 at bar\.sync \(line \d+ .*\), 58 at bar\.sync",
        ),
        ("setp.gt.s32 %p0, %r0, 5; @%p0 bra $L0; bar.sync 0; $L0:", r"wait for one another: 6 at bar\.sync"),
        ("st.shared.b32 [%r1+1000], %r0;", r"beyond the shared memory"),
        ("st.shared.b32 [%r1+2], %r0;", r"not aligned"),
    ],
)
def test_a_race_and_a_word_that_nobody_wrote_are_errors_that_name_the_instruction(
    body: str, message: str, executed: Executed
) -> None:
    with pytest.raises(SharedMemoryError, match=message):
        executed(body)


LAST = "mov.u32 %r9, %ctaid.x; setp.eq.s32 %p8, %r9, 2;"  # of three blocks


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (f"{WRITE} {LAST} @%p8 bra $L9; bar.sync 0; $L9: {OTHER_WARP}", "reads what another thread wrote"),
        (f"{WRITE} bar.sync 0; {READ} {LAST} @!%p8 bra $L9; {WRITE} $L9:", "writes what another thread read"),
        (f"{LAST} @!%p8 st.shared.b32 [%r1], %r0; ld.shared.b32 %r2, [%r1];", "reads what no thread has written"),
        (f"{COPY} {LAST} @%p8 bra $L9; {WAIT} $L9: ld.shared.b32 %r2, [%r1];", "reads what an asynchronous copy"),
    ],
)
def test_what_one_block_alone_does_wrong_is_missed(body: str, message: str, executed: Executed) -> None:
    """Blocks run together, and those that do the same have one history."""
    executed(body, blocks=2)
    with pytest.raises(SharedMemoryError, match=message):
        executed(body, blocks=3)


def test_a_block_may_go_another_way_than_its_like(executed: Executed) -> None:
    body = f"{WRITE} bar.sync 0; {LAST} mov.b32 %r2, %r0; @!%p8 bra $L9; xor.b32 %r3, %r1, 8; bar.sync 0;"
    assert (
        executed(f"{body} st.shared.b32 [%r3], %r0; bar.sync 0; $L9: {READ}", blocks=3).tolist() == (LANES ^ 3).tolist()
    )


def test_a_matrix_that_nobody_wrote_is_nan_and_lanes_vote(executed: Executed) -> None:
    """Who multiplies rows beyond the end of a tensor need not keep the products."""
    loaded = "shl.b32 %r3, %r0, 4; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, [%r3];"
    assert executed(loaded, threads=32).tolist() == [-1] * 32
    largest = "cvt.rn.f32.s32 %r3, %r0; redux.sync.max.f32 %r3, %r3, -1; cvt.rzi.s32.f32 %r2, %r3;"
    assert executed(largest).tolist() == [31] * 32 + [63] * 32
    voted = "and.b32 %r3, %r0, 33; setp.eq.s32 %p0, %r3, 33; vote.sync.ballot.b32 %r2, %p0, -1;"
    assert executed(voted).tolist() == [0] * 32 + [0xAAAAAAAA - 2**32] * 32


UPDATED = "setp.eq.s32 %p0, %r0, 9; mov.b32 %r5, 0; @%p0 st.shared.b32 [%r5], %r0; bar.sync 0; and.b32 %r4, %r0, 31;"
MAXIMUM = f"{UPDATED} atom.shared.cta.max.u32 %r2, [%r5], %r4;"


def test_threads_update_a_word_one_after_the_other_and_without_a_race(executed: Executed) -> None:
    assert executed(MAXIMUM).tolist() == [*[9] * 11, *range(10, 31), *[31] * 32]
    assert executed(f"{MAXIMUM} bar.sync 0; ld.shared.b32 %r2, [%r5];").tolist() == [31] * 64
    for raced in (
        MAXIMUM.replace("bar.sync 0;", ""),
        f"{MAXIMUM} ld.shared.b32 %r2, [%r5];",
        f"{MAXIMUM} {ONE_WRITES}",
    ):
        with pytest.raises(SharedMemoryError, match="another thread wrote"):
            executed(raced)
    with pytest.raises(SharedMemoryError, match="writes what another thread read"):
        executed(MAXIMUM.replace("atom", "ld.shared.b32 %r3, [%r5]; atom"))


def test_with_groups_of_copies_on_their_way_the_earlier_ones_are_there(executed: Executed) -> None:
    first = COPY + COPY.replace("[%r1]", "[%r1+256]")
    assert executed(f"{first} cp.async.wait_group 1; ld.shared.b32 %r2, [%r1];").tolist() == LANES.tolist()
    with pytest.raises(SharedMemoryError, match="asynchronous copy"):
        executed(f"{first} cp.async.wait_group 1; ld.shared.b32 %r2, [%r1+256];")


def test_memory_that_was_not_given_is_not_touched(executed: Executed) -> None:
    with pytest.raises(OutOfBoundsError, match="kernel reads outside of all of its arguments: X, Y"):
        executed("ld.global.b32 %r2, [%rd0+1048576];")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("lop3.b32 %r2, %r0, %r1, %r1, 150;", r"the PTX instruction lop3\.b32 is not executed here"),
        ("add.sat.s32 %r2, %r0, %r1;", r"instruction add\.sat\.s32"),
        ("add.rz.f32 %r2, %r0, %r1;", r"instruction add\.rz\.f32"),
        ("tcgen05.cp.cta_group::1.128x256b [%r0], %rd0;", r"instruction tcgen05\.cp\."),
        ("mov.u32 %r2, %clock;", r"names %clock, which is not known here"),
        ("mov.u32 %r2, elsewhere;", r"mov\.u32 \(line \d+ .*\) names elsewhere"),
        ("shfl.sync.bfly.b32 %r2, %r0, 1, 7199, -1;", r"instruction shfl\.sync\.bfly\.b32"),
        ("shfl.sync.bfly.b32 %r2, %r0, 1;", r"instruction shfl\.sync\.bfly\.b32"),
        ("ld.shared.b32 %r2, %r1;", r"instruction ld\.shared\.b32"),
        ("mov.u32 elsewhere, %r1;", r"instruction mov\.u32"),
        ("bar.red.popc.u32 %r2, 0, %p0;", r"instruction bar\.red\.popc\.u32"),
        ("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%r2}, {%r0}, {%r1}, {%r2};", r"instruction mma\.sync"),
        ("setp.gt.s32 %p0, %r0, 5; @%p0 shfl.sync.bfly.b32 %r2, %r0, 1, 31, -1;", r"some threads of a warp alone"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(body: str, message: str, executed: Executed) -> None:
    with pytest.raises(CannotRunError, match=message):
        executed(body)
