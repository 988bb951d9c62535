"""Instructions as functions of threads: rows of those that memory and other threads take part in."""

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import cache

import numpy as np

from tiebreak.backends.interpreter.numbers import Array
from tiebreak.backends.ptx.barriers import ROWS as OF_BARRIERS
from tiebreak.backends.ptx.blackwell import ROWS as OF_BLACKWELL
from tiebreak.backends.ptx.bulk import ROWS as OF_BOXES
from tiebreak.backends.ptx.memory import COPIES, STORES, WARP, WARPGROUP
from tiebreak.backends.ptx.operands import OpcodeRow, Run, bound_to, idle, names_of, reader, writer
from tiebreak.backends.ptx.operations import OPERATIONS, TYPES
from tiebreak.backends.ptx.parsing import Address, Instruction
from tiebreak.backends.ptx.products import KINDS, Product, load_matrices, matrix_rows, multiplied, product_of
from tiebreak.backends.ptx.threads import Threads
from tiebreak.backends.ptx.warpgroups import ROWS as OF_WARPGROUPS

_MMA = re.compile(rf"mma\.sync\.aligned\.m16n8k(?P<k>\d+)\.row\.col\.f32\.{KINDS}\.f32")
_LANE = np.arange(WARP)
_SOURCES: Mapping[str, Callable[[Array], Array]] = {  # lanes that a shuffle takes from; beyond the warp's end its own
    "bfly": lambda by: _LANE ^ by,
    "idx": lambda by: by & 31,
    "up": lambda by: np.where(by <= _LANE, _LANE - by, _LANE),
    "down": lambda by: np.where(_LANE + by < WARP, _LANE + by, _LANE),
}


def bound(instructions: Sequence[Instruction], targets: Container[int], card: str) -> list[Run | None]:
    """Return the effect of every instruction on threads, None for a branch; `targets` are the places of labels.

    Of several `mma.sync` one after the other that don't need one another's sums, the first has the effect of all.

    Raises:
        CannotRunError: One isn't supported.
    """
    runs: list[list[Instruction]] = []
    for place, at in enumerate(instructions):
        if not runs or place in targets or not _independent(runs[-1], at):
            runs.append([])
        runs[-1].append(at)
    return [effect for run in runs for effect in (_effect(run, card), *[idle] * (len(run) - 1))]


def _independent(run: Sequence[Instruction], at: Instruction) -> bool:
    """Return whether an instruction is a product of the same kind as some others and needs no sum of theirs."""
    if at.opcode != run[0].opcode or not at.opcode.startswith("mma.") or at.guard or run[0].guard:
        return False
    sums = {name for earlier in run for name in names_of(earlier.operands[0])}
    return not any(sums.intersection(names_of(operand)) for operand in at.operands[1:])


def _effect(run: Sequence[Instruction], card: str) -> Run | None:
    at = run[0]
    if at.branches or at.opcode == "ret":
        return None
    if at.opcode in OPERATIONS:
        return _calculation(at)
    if match := _MMA.fullmatch(at.opcode):
        return _products(run, product_of(card, **match.groupdict()))
    if (found := _row(at.opcode)) is not None:
        return bound_to(found[0], at, **found[1])
    raise at.refused()


@cache
def _row(opcode: str) -> tuple[OpcodeRow, Mapping[str, str | None]] | None:
    found = ((row, re.fullmatch(row.name, opcode)) for row in _ROWS)
    return next(((row, match.groupdict()) for row, match in found if match), None)


def _calculation(at: Instruction) -> Run:
    operation, write = OPERATIONS[at.opcode], writer(at.operands[0], at)
    kinds = operation.sources + operation.sources[-1:] * len(at.operands)
    reads = [reader(operand, kind, at) for operand, kind in zip(at.operands[1:], kinds, strict=False)]
    return lambda threads, mask: write(threads, operation.compute(*(read(threads) for read in reads)), mask)


def _products(run: Sequence[Instruction], product: Product) -> Run:
    """Bind some `mma.sync` of one kind, of which several have one A or one B."""
    writes = [writer(at.operands[0], at) for at in run]
    names = [[names_of(at.operands[of]) for at in run] for of in (1, 2, 3)]
    once = [list(dict.fromkeys(operands)) for operands in names[:2]]
    which = [np.array([some.index(name) for name in operands]) for some, operands in zip(once, names, strict=False)]
    reads = [[[reader(name, "u32", run[0]) for name in each] for each in some] for some in (*once, names[2])]

    def multiply(threads: Threads, mask: Array) -> None:
        threads.warps(mask)
        left, right, sums = (
            np.concatenate([take([threads.full(read(threads)) for read in each]) for each in some])
            for take, some in zip((product.left, product.right, product.sums), reads, strict=True)
        )
        warps = len(sums) // len(run)
        of_left, of_right = ((warps * each[:, None] + np.arange(warps)).ravel() for each in which)
        d = multiplied(left, right, (of_left, of_right), sums, product.core)
        for write, made in zip(writes, np.split(d, len(run)), strict=True):
            write(threads, product.registers(made, threads.shape), mask)

    return multiply


# Memory.


def _load(threads: Threads, mask: Array, first: Array, *, space: str, kind: str) -> Iterator[Array]:
    """Load adjacent numbers."""
    dtype, memory = TYPES[kind], threads.shared if space == "shared" else threads.memory
    for number in range(len(names_of(threads.instruction.operands[0]))):
        yield memory.read(first + number * dtype.itemsize, mask, np.dtype(f"u{dtype.itemsize}")).view(dtype)


def _store(threads: Threads, mask: Array, first: Array, values: Sequence[Array], *, space: str, kind: str) -> None:
    """Store adjacent numbers."""
    size, memory = TYPES[kind].itemsize, threads.shared if space == "shared" else threads.memory
    for number, value in enumerate(values):
        memory.write(first + number * size, mask, value.view(f"u{size}"))


def _load_acquired(threads: Threads, mask: Array, write: Callable[..., None], addresses: Array) -> Array:
    """Load a number by which another block is waited for: who reads there what it has read before waits."""
    found = np.stack([addresses, threads.memory.read(addresses, mask, TYPES["u32"]).astype(np.int64)])
    before = threads.acquired.setdefault(threads.instruction.line, np.full_like(found, -1))
    again: Array = mask & (found == before).all(0)
    np.copyto(before, found, where=mask)
    write(threads, found[1].astype(np.uint32), mask & ~again)
    return again


def _add(threads: Threads, mask: Array, addresses: Array, values: Array, *, kind: str) -> None:
    threads.memory.add(addresses, mask, values, kind)


def _update(threads: Threads, mask: Array, addresses: Array, values: Array, *, operation: str) -> Array:
    return threads.shared.update(addresses, mask, values, OPERATIONS[operation].compute)


def _load_parameter(threads: Threads, _: Array, *, kind: str) -> list[Array]:
    target, address = threads.instruction.operands[:2]
    assert isinstance(address, Address)
    held = threads.parameters.get(address.base, bytes(8))  # scratch memory is never used
    return list(np.frombuffer(held, TYPES[kind], len(names_of(target)), address.offset).reshape(-1, 1, 1))


def _copy(threads: Threads, mask: Array, target: Array, source: Array, size: int, count: Array | None = None) -> None:
    """Copy a number of bytes, or zeros where the fourth operand is 0."""
    if count is not None and not np.isin(count, (0, size)).all():
        raise threads.instruction.refused()
    word, shown = min(size, 8), mask if count is None else mask & (count > 0)
    for byte in range(0, size, word):
        words = threads.memory.read(source + byte, shown, TYPES[f"u{8 * word}"])
        threads.shared.write(target + byte, mask, words, copied=True)


def _closed(threads: Threads, mask: Array, of: str) -> tuple[Array, Array | None]:
    """Return which groups all their threads close or wait for, (blocks, columns), and who waits for others."""
    shown, waits = np.zeros(threads.shared.groups.shape, bool), None
    if of == "wgmma":
        shown[:, :STORES], waits = threads.gathered(mask, WARPGROUP)
    elif of == "cp.async":
        shown[:, COPIES:], waits = threads.gathered(mask)
    else:
        shown[:, STORES] = mask.any(1)  # the threads of a block are taken for one
    return shown, waits


def _close(threads: Threads, mask: Array, *, of: str) -> Array | None:
    shown, waits = _closed(threads, mask, of)
    threads.shared.groups += shown
    return waits


def _await(threads: Threads, mask: Array, most: int, *, of: str) -> Array | None:
    """Wait for all groups but so many; other warpgroups may still be at work."""
    shown, waits = _closed(threads, mask, of)
    done = np.where(shown, threads.shared.groups - most, 0)
    threads.complete(done, others=of == "wgmma" and threads.shape[1] > WARPGROUP)
    return waits


# Warps.


def _meet(threads: Threads, mask: Array) -> None:
    threads.shared.phases_of_warps += threads.warps(mask)


def _shuffle(threads: Threads, _: Array, x: Array, by: Array, *, way: str) -> Array:
    sources = _SOURCES[way](threads.lanes(by).astype(np.int64))
    return np.take_along_axis(threads.lanes(x), sources, -1).reshape(threads.shape)


def _reduce(threads: Threads, mask: Array, x: Array, members: Array, *, name: str, kind: str) -> Array:
    """Return the largest or smallest number of a warp, without NaN."""
    if (mask & (members != 2**32 - 1)).any():
        raise threads.instruction.refused()
    lanes = threads.lanes(x)
    while lanes.shape[-1] > 1:
        lanes = OPERATIONS[f"{name}.{kind}"].compute(lanes[..., ::2], lanes[..., 1::2])
    return np.repeat(lanes, WARP, -1).reshape(threads.shape)


def _elect(threads: Threads, _: Array) -> tuple[Array, Array]:
    return np.zeros((1, 1), np.uint32), threads.get("%laneid") == 0


def _vote(threads: Threads, _: Array, votes: Array) -> Array:
    voted = np.packbits(threads.lanes(votes), -1, bitorder="little").view(np.uint32)
    return np.repeat(voted, WARP, -1).reshape(threads.shape)


def _load_matrices(threads: Threads, mask: Array, rows: Array, *, count: str, turned: str | None) -> list[Array]:
    naming = mask & (threads.get("%laneid") < 8 * int(count))  # others' addresses are ignored
    return load_matrices(threads.shared.rows(rows, naming), int(count), transposed=bool(turned))


def _store_matrices(
    threads: Threads, mask: Array, rows: Array, registers: Sequence[Array], *, turned: str | None
) -> None:
    naming = mask & (threads.get("%laneid") < 8 * len(registers))
    for number, words in enumerate(matrix_rows(registers, transposed=bool(turned))):
        threads.shared.write(rows + 4 * number, naming, words)


_ALL_LANES = "=-1|0xffffffff"
# Caches, and an order among blocks, which run in lock step or one after the other, change nothing here.
_ORDER, _CACHE = (
    r"(?:\.(?:volatile|weak|relaxed|acquire|release|gpu|cta|sys))*",
    r"(?:\.(?:nc|c[agsv]|w[bt]|L[12]::\w+))*",
)
_ACCESS = rf"{_ORDER}\.(?P<space>global|shared)(?:::cta)?{_CACHE}(?:\.v[248])?\.(?P<kind>\w+)"
_GROUPS = r"(?P<of>cp\.async|cp\.async\.bulk|wgmma)"
_ROWS = (
    OpcodeRow(r"ld(?:\.acquire\.gpu\.global|\.global\.acquire\.gpu)\.[bu]32", "to at", _load_acquired),
    OpcodeRow(rf"ld{_ACCESS}", "w at", _load),
    OpcodeRow(rf"st{_ACCESS}", "at {kind}*", _store),
    OpcodeRow(r"ld\.param(?:\.v[24])?\.(?P<kind>\w+)", "w -", _load_parameter),
    OpcodeRow(r"red(?:\.(?:relaxed|release|gpu|global))*\.add\.(?P<kind>\w+)", "at {kind}", _add),
    OpcodeRow(r"atom\.shared(?:::cta)?(?:\.cta)?\.(?P<operation>(?:max|min|add)\.u32)", "w at u32", _update),
    OpcodeRow(r"cp\.async\.c[ag]\.shared\.global(?:\.L2::\w+)*", "at at n u32?", _copy),
    OpcodeRow(rf"{_GROUPS}\.commit_group(?:\.sync\.aligned)?", "", _close),
    OpcodeRow(rf"{_GROUPS}\.wait_group(?:\.read|\.sync\.aligned)?", "n", _await),
    OpcodeRow(r"bar\.warp\.sync", _ALL_LANES, _meet),
    OpcodeRow(r"shfl\.sync\.(?P<way>bfly|idx|down)\.b32", f"w u32 u32 =31 {_ALL_LANES}", _shuffle),
    OpcodeRow(r"shfl\.sync\.(?P<way>up)\.b32", f"w u32 u32 =0 {_ALL_LANES}", _shuffle),
    OpcodeRow(r"redux\.sync\.(?P<name>max|min)\.(?P<kind>f32|s32|u32)", "w {kind} u32", _reduce),
    OpcodeRow(r"elect\.sync", "w -", _elect),
    OpcodeRow(r"vote\.sync\.ballot\.b32", "w pred -", _vote),
    OpcodeRow(
        r"ldmatrix\.sync\.aligned\.m8n8\.x(?P<count>[124])(?P<turned>\.trans)?\.shared\.b16", "w at", _load_matrices
    ),
    OpcodeRow(r"stmatrix\.sync\.aligned\.m8n8\.x[124](?P<turned>\.trans)?\.shared\.b16", "at u32*", _store_matrices),
    *OF_WARPGROUPS,
    *OF_BLACKWELL,
    *OF_BARRIERS,
    *OF_BOXES,
)
