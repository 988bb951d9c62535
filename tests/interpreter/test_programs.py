"""Programs that run together leave the bits that they leave one after the other; where they can't, they don't."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from tiebreak.backends.interpreter.assumptions import CARDS, EXACT
from tiebreak.backends.interpreter.programs import Together
from tiebreak.backends.interpreter.session import interpreting
from tiebreak.backends.interpreter.tape import Tape
from tiebreak.kernels.kernel import OutOfBoundsError

N, PROGRAMS = 16, 24


def _numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _rows(X: Any, Y: Any, P: Any, n: Any, N: tl.constexpr) -> None:
    """Whose last row is shorter, by a mask that differs among programs, and is rounded by a vendor's function."""
    row, column = tl.program_id(0) * 4 + tl.arange(0, 4)[:, None], tl.arange(0, N)[None, :]
    shown = (row < n) & (column < N - 3)
    x = tl.load(X + row * N + column, mask=shown, other=2.5)
    tl.store(Y + row * N + column, libdevice.rint(x * 9) / tl.sum(x, 1)[:, None] + tl.program_id(0), mask=shown)


def _loops(X: Any, Y: Any, P: Any, n: Any, N: tl.constexpr) -> None:
    """Of as many steps as a program's id says, as a causal kernel's; and ways that numbers from memory choose."""
    program, index = tl.program_id(0), tl.arange(0, N)
    total = tl.zeros([N], tl.float32)
    for step in range(program // 5, program // 3 + 1):
        total += tl.load(X + (program * 4 + step % 4) * N + index) * step
    if tl.load(P + program) % 3 == 1:
        total = -total
    left = tl.load(P + program) % 4
    while left > 0:
        total = total * 1.5
        left -= 1
    tl.store(Y + program * N + index, total)


def _pages(X: Any, Y: Any, P: Any, n: Any, N: tl.constexpr) -> None:
    """Rows wherever a table says."""
    program, index = tl.program_id(0), tl.arange(0, N)
    page = tl.load(P + (program + tl.arange(0, 4)) % 24)
    x = tl.load(X + page[:, None] * N + index[None, :])
    tl.store(Y + (program * 4 + tl.arange(0, 4))[:, None] * N + index[None, :], x + program)


def _tiles(X: Any, Y: Any, P: Any, n: Any, N: tl.constexpr) -> None:
    """Of program-wide and of shared operands: products, changes of shape, sorts, scans, reductions."""
    program, index = tl.program_id(0), tl.arange(0, N)
    shared = tl.load(X + index[:, None] * N + index[None, :])
    own = tl.load(X + (program * 2 + index[:, None]) * N + index[None, :])
    x = tl.dot(shared, own, tl.dot(shared, shared.T), input_precision="ieee") + tl.dot(own.T, shared)
    x = tl.where(program % 2 == 0, x, tl.trans(x))
    low, high = tl.split(tl.reshape(tl.join(x, shared), [N, N, 2]))
    row = tl.cumsum(low + high, 1) + tl.sort(x) + tl.sum(x, 0, keep_dims=True) + tl.max(x)
    row += tl.gather(x, tl.argmax(x, 1)[:, None] + (index * 0)[None, :], 1)
    both = tl.cat(tl.sum(row, 1), tl.sum(shared, 1), can_reorder=True)
    counts = tl.histogram((index + program) % 7, 8)
    tl.store(Y + program * 4 * N + tl.arange(0, 2 * N), both.to(tl.bfloat16).to(tl.float32))
    tl.store(Y + program * 4 * N + 2 * N + tl.arange(0, 8), counts.to(tl.float32))
    tl.store(Y + program * 4 * N + 3 * N, tl.sum(tl.sum(row, 1), 0))


def _described(X: Any, Y: Any, P: Any, n: Any, N: tl.constexpr) -> None:
    program = tl.program_id(0)
    source = tl.make_tensor_descriptor(X + program * 4 * N, [4, N], [N, 1], [2, 8])
    target = tl.make_tensor_descriptor(Y, [n, N], [N, 1], [2, 8])
    target.store([program * 4, 8], source.load([2, 0]) + source.load([3, 8]))


def _in_place(X: Any, Y: Any, P: Any, n: Any, N: tl.constexpr) -> None:
    """Each program its own row, read and written twice."""
    at = Y + tl.program_id(0) * N + tl.arange(0, N)
    for _ in range(2):
        tl.store(at, tl.load(at) + tl.load(X + tl.arange(0, N)))


def _swapped(X: Any, Y: Any, P: Any, n: Any, N: tl.constexpr) -> None:
    """Each program's rows, which it has read before it writes over them."""
    at = tl.program_id(0) * N + tl.arange(0, N)
    x, y = tl.load(X + at), tl.load(Y + at)
    tl.store(X + at, y)
    tl.store(Y + at, x)


def _same_place(X: Any, Y: Any, P: Any, n: Any, N: tl.constexpr) -> None:
    """The last program's number stays."""
    tl.store(Y + tl.arange(0, N) + tl.program_id(0) % 3, tl.load(X + tl.program_id(0) * N + tl.arange(0, N)))
    tl.store(Y + 64, tl.program_id(0))
    rows = tl.arange(0, N)[:, None] * 0 + tl.arange(0, N)[None, :]  # all of them one place
    tl.store(Y + 80 + tl.program_id(0) * N + rows, tl.load(X + tl.arange(0, N)[:, None] * N + rows))


def _added(X: Any, Y: Any, P: Any, n: Any, N: tl.constexpr) -> None:
    """Sums in fp32, in the order of programs, as each adds but once."""
    at = tl.arange(0, N)
    old = tl.atomic_add(Y + at, tl.load(X + tl.program_id(0) * N + at))
    tl.store(Y + 64 + tl.program_id(0) * N + at, old)


def _passed_on(X: Any, Y: Any, P: Any, n: Any, N: tl.constexpr) -> None:
    """Each program reads what the one before it wrote."""
    at = tl.arange(0, N)
    x = tl.load(Y + tl.program_id(0) * N + at) * 0.5
    tl.store(Y + (tl.program_id(0) + 1) * N + at, x + tl.load(X + at))


def _ahead(X: Any, Y: Any, P: Any, n: Any, N: tl.constexpr) -> None:
    """Each program reads a row that the one behind it writes to later."""
    at = Y + tl.program_id(0) * N + tl.arange(0, N)
    tl.store(at, tl.program_id(0))
    tl.store(X + tl.program_id(0) * N + tl.arange(0, N), tl.load(at + N))


def _beside(X: Any, Y: Any, P: Any, n: Any, N: tl.constexpr) -> None:
    """Each program writes its row, and then half of the next one's, which that one writes over."""
    for step in range(2):
        tl.store(Y + tl.program_id(0) * N + step * N // 2 + tl.arange(0, N), tl.program_id(0) + step * 0.5)


def _crossing(X: Any, Y: Any, P: Any, n: Any, N: tl.constexpr) -> None:
    """Sums in fp32, whose order is the programs', though at the same time they are elsewhere."""
    for step in range(4):
        tl.atomic_add(Y + (tl.program_id(0) + step) % 4 * N + tl.arange(0, N), tl.load(X + tl.program_id(0)) + step)


def _locked(X: Any, Y: Any, P: Any, n: Any, N: tl.constexpr) -> None:
    """One after the other, by a lock."""
    while tl.atomic_cas(P + 23, 5, 6) == 6:
        pass
    tl.store(Y + tl.arange(0, N), tl.load(Y + tl.arange(0, N)) * 0.5 + tl.program_id(0))
    tl.atomic_xchg(P + 23, 5)


def _counted(X: Any, Y: Any, P: Any, n: Any, N: tl.constexpr) -> None:
    """The way depends on who came before."""
    if tl.atomic_add(P, 1) % 3 == 0:
        tl.store(Y + tl.program_id(0) * N + tl.arange(0, N), 1.0)


def _tallied(X: Any, Y: Any, P: Any, n: Any, N: tl.constexpr) -> None:
    """Each counts for itself, before they go different ways."""
    tl.atomic_add(P + tl.program_id(0), 1)
    if tl.load(X + tl.program_id(0)) > 0.0:
        tl.store(Y + tl.program_id(0) * N + tl.arange(0, N), 1.0)


def _printing(X: Any, Y: Any, P: Any, n: Any, N: tl.constexpr) -> None:
    tl.device_print("x", tl.load(X + tl.program_id(0) * N + tl.arange(0, 4)))
    print(tl.program_id(0), tl.load(X + tl.arange(0, 2)))


Function = Callable[..., None]
TOGETHER = [_rows, _loops, _pages, _tiles, _described, _in_place, _swapped, _same_place, _added]
APART = [_passed_on, _ahead, _beside, _crossing, _locked, _counted, _tallied, _printing]


def _launched(
    function: Function, monkeypatch: pytest.MonkeyPatch, card: str, *, seed: int, plain: bool = False
) -> list[Any]:
    """What memory holds then, and whether programs ran together; `plain`: each by its source, one after the other."""
    x, y = _numbers(PROGRAMS * 4, N, seed=seed), _numbers(PROGRAMS * 4, N, seed=seed + 1)
    table = torch.arange(PROGRAMS, dtype=torch.int32) * (7 if seed == 1 else 11) % PROGRAMS
    table[-1] = 5
    ran: list[bool] = []
    run = Together.run

    def counting(self: Together, *args: Any) -> bool:
        ran.append(not plain and run(self, *args))
        return ran[-1]

    with monkeypatch.context() as patch, interpreting(CARDS[card]):
        patch.setattr(Together, "run", counting)
        if plain:
            patch.setattr(Tape, "play", lambda *_: False)
        triton.jit(function)[(PROGRAMS,)](x, y, table, PROGRAMS * 4 - 2 - seed, N=N)
    return [x, y, table, ran[0]]


@pytest.mark.parametrize("card", ["exact", "sm_80"])
@pytest.mark.parametrize("function", TOGETHER + APART, ids=lambda function: function.__name__)
def test_programs_leave_what_they_leave_one_after_the_other(
    function: Function, card: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The first is written down, as its plain one was the first; the third has other numbers than the second, played.
    for seed, most in ((1, 2**20), (2, 2**20), (1, 2**20), (1, 1000)):
        *alone, _ = _launched(function, monkeypatch, card, seed=seed, plain=True)
        printed = capsys.readouterr().out
        monkeypatch.setattr("tiebreak.backends.interpreter.programs._MOST_AT_ONCE", most)
        *memory, ran = _launched(function, monkeypatch, card, seed=seed)
        assert all(map(torch.equal, memory, alone))
        assert ran == (function in TOGETHER)
        assert capsys.readouterr().out == printed


READ: list[int] = []


def _scaled(X: Any, Y: Any, n: Any, N: tl.constexpr) -> None:
    READ.append(1)
    x = tl.load(X + tl.arange(0, N))
    for _ in range(n):
        x *= 2.0
    tl.store(Y + tl.arange(0, N), x)


def test_a_way_is_written_down_once_and_asked_for_each_time() -> None:
    x, y = torch.ones(N), torch.zeros(N)
    with interpreting(EXACT):
        for n, times in ((1, 1), (1, 2), (3, 3), (1, 3), (3, 3), (0, 4)):  # the first time nothing is written down
            triton.jit(_scaled)[(1,)](n * x, y, n, N=N)
            assert torch.equal(y, n * x * 2**n)
            assert len(READ) == times


def _beyond(X: Any, Y: Any, P: Any, n: Any, N: tl.constexpr) -> None:
    program = tl.program_id(0)
    tl.store(Y + program * N + tl.arange(0, N), 7.0)
    tl.store(Y + program * N * 8 + tl.arange(0, N), 8.0)


def test_an_error_comes_when_it_should_and_leaves_what_was_done_before_it() -> None:
    x, y, table = torch.zeros(N), torch.zeros(PROGRAMS * 4, N), torch.zeros(N)
    with (
        interpreting(EXACT),
        pytest.raises(OutOfBoundsError, match=r"_beyond writes outside of its argument Y: element 1551"),
    ):
        triton.jit(_beyond)[(PROGRAMS,)](x, y, table, 0, N=N)
    expected = torch.zeros(PROGRAMS * 4, N)
    for program in range(13):
        expected[program] = 7
        if program < 12:
            expected[8 * program] = 8
    assert torch.equal(y, expected)
