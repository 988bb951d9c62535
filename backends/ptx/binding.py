"""Instructions as functions of threads: what memory and other threads take part with."""

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from tiebreak.backends.interpreter.numbers import Array
from tiebreak.backends.ptx.barriers import BINDERS as OF_BARRIERS
from tiebreak.backends.ptx.blackwell import BINDERS as OF_BLACKWELL
from tiebreak.backends.ptx.bulk import BINDERS as OF_BOXES
from tiebreak.backends.ptx.memory import WARP
from tiebreak.backends.ptx.operands import Run, names_of, place_of, reader, writer
from tiebreak.backends.ptx.operations import OPERATIONS, TYPES
from tiebreak.backends.ptx.parsing import Address, Instruction
from tiebreak.backends.ptx.products import load_matrices, matrix_rows, multiplied, product_of
from tiebreak.backends.ptx.threads import Threads
from tiebreak.backends.ptx.warpgroups import BINDERS as OF_WARPGROUPS

_Match = re.Match[str]
_ALL_LANES = {"-1", "0xffffffff"}
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
    return [effect for run in runs for effect in (_effect(run, card), *[_nothing] * (len(run) - 1))]


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
    if (found := _binder(at.opcode)) is not None:
        return found[0](at, found[1])
    if at.opcode.startswith("mma."):
        return _products(run, card)
    if at.opcode in OPERATIONS:
        return _calculation(at)
    raise at.refused()


@cache
def _binder(opcode: str) -> tuple[Callable[[Instruction, _Match], Run], _Match] | None:
    return next(((binder, match) for name, binder in _BINDERS.items() if (match := re.fullmatch(name, opcode))), None)


def _nothing(_: Threads, __: Array) -> None:
    """Do nothing."""


def _calculation(at: Instruction) -> Run:
    operation, write = OPERATIONS[at.opcode], writer(at.operands[0], at)
    kinds = operation.sources + operation.sources[-1:] * len(at.operands)
    reads = [reader(operand, kind, at) for operand, kind in zip(at.operands[1:], kinds, strict=False)]
    return lambda threads, mask: write(threads, 0, operation.compute(*(read(threads) for read in reads)), mask)


def _move(at: Instruction, match: _Match) -> Run:
    """Bind `mov`, also from several registers to one and back, the lowest first."""
    write, (target, source), size = writer(at.operands[0], at), at.operands, int(match[1]) // 8
    each = size // max(len(names_of(target)), len(names_of(source)))
    reads = [reader(part, f"u{8 * (each if isinstance(source, tuple) else size)}", at) for part in names_of(source)]

    def move(threads: Threads, mask: Array) -> None:
        whole = np.stack(np.broadcast_arrays(*(read(threads) for read in reads)), -1)
        parts = whole.view(f"u{each if isinstance(target, tuple) else size}")
        for number in range(parts.shape[-1]):
            write(threads, number, np.ascontiguousarray(parts[..., number]), mask)

    return move if isinstance(target, tuple) or isinstance(source, tuple) else _calculation(at)


# Memory.


def _access(at: Instruction, match: _Match) -> Run:
    """Bind `ld` and `st`, of adjacent numbers too."""
    loads, shared, dtype = match[1] == "ld", match[2] == "shared", TYPES[match[3]]
    memory, values = at.operands[1::-1] if loads else at.operands[:2]
    place, count, unsigned = place_of(memory, at), len(names_of(values)), np.dtype(f"u{dtype.itemsize}")
    write = writer(values, at) if loads else None
    reads = [] if loads else [reader(name, f"u{8 * dtype.itemsize}", at) for name in names_of(values)]

    def access(threads: Threads, mask: Array) -> None:
        first, shown, space = place(threads), threads.full(mask), threads.shared if shared else threads.memory
        for number in range(count):
            where = first + number * dtype.itemsize
            if write is not None:
                write(threads, number, space.read(where, shown, unsigned, at).view(dtype), mask)
            else:
                space.write(where, shown, threads.full(reads[number](threads)), at)

    return access


def _acquired(at: Instruction, _: _Match) -> Run:
    """Bind a load in which another block is waited for: who reads there what it has read before waits."""
    place, write, read = place_of(at.operands[1], at), writer(at.operands[0], at), TYPES["u32"]

    def load(threads: Threads, mask: Array) -> Array:
        shown, addresses = threads.full(mask), place(threads)
        found = np.stack([addresses, threads.memory.read(addresses, shown, read, at).astype(np.int64)])
        before = threads.acquired.setdefault(at.line, np.full_like(found, -1))
        again: Array = shown & (found == before).all(0)
        np.copyto(before, found, where=shown)
        write(threads, 0, found[1].astype(read), shown & ~again)
        return again

    return load


def _reduced(at: Instruction, match: _Match) -> Run:
    place, kind = place_of(at.operands[0], at), match[1]
    read = reader(at.operands[1], f"u{TYPES[kind].itemsize * 8}", at)
    return lambda threads, mask: threads.memory.add(
        place(threads), threads.full(mask), threads.full(read(threads)), kind, at
    )


def _updated(at: Instruction, match: _Match) -> Run:
    write, place, compute = writer(at.operands[0], at), place_of(at.operands[1], at), OPERATIONS[match[1]].compute
    read = reader(at.operands[2], "u32", at)
    return lambda threads, mask: write(
        threads,
        0,
        threads.shared.update(place(threads), threads.full(mask), threads.full(read(threads)), compute, at),
        mask,
    )


def _parameter(at: Instruction, match: _Match) -> Run:
    write, address, dtype = writer(at.operands[0], at), at.operands[1], TYPES[match[1]]
    count = len(names_of(at.operands[0]))
    if not isinstance(address, Address):
        raise at.refused()

    def load(threads: Threads, mask: Array) -> None:
        held = threads.parameters.get(address.base, bytes(8))  # scratch memory is never used
        for number, value in enumerate(np.frombuffer(held, dtype, count, address.offset)):
            write(threads, number, value.reshape(1, 1), mask)

    return load


def _copy(at: Instruction, _: _Match) -> Run:
    """Bind `cp.async`: a number of bytes, or zeros where the fourth operand is 0."""
    to, source, size = place_of(at.operands[0], at), place_of(at.operands[1], at), int(str(at.operands[2]), 0)
    filled, word = reader(at.operands[3] if len(at.operands) > 3 else str(size), "u32", at), min(size, 8)

    def copy(threads: Threads, mask: Array) -> None:
        count, shown, first, target = threads.full(filled(threads)), threads.full(mask), source(threads), to(threads)
        if not np.isin(count, (0, size)).all():
            raise at.refused()
        for byte in range(0, size, word):
            words = threads.memory.read(first + byte, shown & (count > 0), TYPES[f"u{8 * word}"], at)
            threads.shared.write(target + byte, shown, words, at, copied=True)

    return copy


def _of_copies(at: Instruction, match: _Match) -> Run:
    def meet(threads: Threads, mask: Array) -> Array | None:
        blocks, waits = threads.gathered(mask)
        if match[1] == "commit_group":
            threads.shared.groups += blocks
        else:
            threads.shared.wait(blocks, int(str(at.operands[0])))
        return waits

    return meet


def _barrier(at: Instruction, _: _Match) -> Run:
    if at.operands[0] not in _ALL_LANES:
        raise at.refused()

    def meet(threads: Threads, mask: Array) -> None:
        threads.shared.phases_of_warps += threads.warps(mask, at)

    return meet


def _shuffle(at: Instruction, match: _Match) -> Run:
    _, value, by, clamp, members = at.operands
    if clamp != ("0" if match[1] == "up" else "31") or members not in _ALL_LANES:
        raise at.refused()
    reads, write = (reader(value, "u32", at), reader(by, "u32", at)), writer(at.operands[0], at)

    def shuffle(threads: Threads, mask: Array) -> None:
        threads.warps(mask, at)
        x, by = (threads.full(read(threads)).reshape(threads.shape[0], -1, WARP) for read in reads)
        taken = np.take_along_axis(x, _SOURCES[match[1]](by.astype(np.int64)), -1)
        write(threads, 0, taken.reshape(threads.shape), mask)

    return shuffle


def _reduction(at: Instruction, match: _Match) -> Run:
    """Bind `redux.sync`: the largest or smallest number of a warp, without NaN."""
    write, function = writer(at.operands[0], at), OPERATIONS[f"{match[1]}.{match[2]}"]
    read, members = reader(at.operands[1], match[2], at), reader(at.operands[2], "u32", at)

    def reduce(threads: Threads, mask: Array) -> None:
        threads.warps(mask, at)
        if (mask & (members(threads) != 2**32 - 1)).any():
            raise at.refused()
        lanes = threads.full(read(threads)).reshape(threads.shape[0], -1, WARP)
        while lanes.shape[-1] > 1:
            lanes = function.compute(lanes[..., ::2], lanes[..., 1::2])
        write(threads, 0, np.repeat(lanes, WARP, -1).reshape(threads.shape), mask)

    return reduce


def _matrices(at: Instruction, match: _Match) -> Run:
    count, write, place = int(match[1]), writer(at.operands[0], at), place_of(at.operands[1], at)

    def load(threads: Threads, mask: Array) -> None:
        threads.warps(mask, at)
        naming = threads.full(mask & (threads.get("%laneid") < 8 * count))  # others' addresses are ignored
        rows = threads.shared.rows(place(threads), naming, at)
        for number, value in enumerate(load_matrices(rows, count, transposed=bool(match[2]))):
            write(threads, number, value, mask)

    return load


def _stored_matrices(at: Instruction, match: _Match) -> Run:
    count, place = int(match[1]), place_of(at.operands[0], at)
    reads = [reader(name, "u32", at) for name in names_of(at.operands[1])]

    def store(threads: Threads, mask: Array) -> None:
        threads.warps(mask, at)
        naming, first = threads.full(mask & (threads.get("%laneid") < 8 * count)), place(threads)
        rows = matrix_rows([threads.full(read(threads)) for read in reads], transposed=bool(match[2]))
        for word in range(4):
            threads.shared.write(first + 4 * word, naming, rows[word], at)

    return store


def _products(run: Sequence[Instruction], card: str) -> Run:
    """Bind some `mma.sync` of one kind, of which several have one A or one B."""
    product, writes = product_of(run[0], card), [writer(at.operands[0], at) for at in run]
    names = [[names_of(at.operands[of]) for at in run] for of in (1, 2, 3)]
    once = [list(dict.fromkeys(operands)) for operands in names[:2]]
    which = [np.array([some.index(name) for name in operands]) for some, operands in zip(once, names, strict=False)]
    reads = [[[reader(name, "u32", run[0]) for name in each] for each in some] for some in (*once, names[2])]

    def multiply(threads: Threads, mask: Array) -> None:
        threads.warps(mask, run[0])
        left, right, sums = (
            np.concatenate([take([threads.full(read(threads)) for read in each]) for each in some])
            for take, some in zip((product.left, product.right, product.sums), reads, strict=True)
        )
        warps = len(sums) // len(run)
        of_left, of_right = ((warps * each[:, None] + np.arange(warps)).ravel() for each in which)
        d = multiplied(left, right, (of_left, of_right), sums, product.core)
        for write, made in zip(writes, np.split(d, len(run)), strict=True):
            for number, value in enumerate(product.registers(made, threads.shape)):
                write(threads, number, value, mask)

    return multiply


_BINDERS: Mapping[str, Callable[[Instruction, _Match], Run]] = {
    r"ld(?:\.acquire\.gpu\.global|\.global\.acquire\.gpu)\.[bu]32": _acquired,
    r"red(?:\.(?:relaxed|release|gpu|global))*\.add\.(\w+)": _reduced,
    r"atom\.shared(?:::cta)?(?:\.cta)?\.((?:max|min|add)\.u32)": _updated,
    # Caches, and an order among blocks, which run in lock step or one after the other, change nothing here.
    r"(ld|st)(?:\.(?:volatile|weak|relaxed|acquire|release|gpu|cta|sys))*\.(global|shared)(?:::cta)?"
    r"(?:\.(?:nc|c[agsv]|w[bt]|L[12]::\w+))*(?:\.v[248])?\.(\w+)": _access,
    r"ld\.param(?:\.v[24])?\.(\w+)": _parameter,
    r"mov\.b(32|64)": _move,
    r"mapa\.shared::cluster\.u32": lambda at, _: _calculation(replace(at, opcode="mov.u32", operands=at.operands[:2])),
    r"cvta\.param\.u64": lambda at, _: _calculation(replace(at, opcode="mov.u64")),
    r"cp\.async\.c[ag]\.shared\.global(?:\.L2::\w+)*": _copy,
    r"cp\.async\.(commit_group|wait_group)": _of_copies,
    r"bar\.warp\.sync": _barrier,
    r"shfl\.sync\.(bfly|idx|up|down)\.b32": _shuffle,
    r"redux\.sync\.(max|min)\.(f32|s32|u32)": _reduction,
    r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16": _matrices,
    r"stmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16": _stored_matrices,
    **OF_WARPGROUPS,
    **OF_BLACKWELL,
    **OF_BARRIERS,
    **OF_BOXES,
}
