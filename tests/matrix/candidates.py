"""The declarations that a kernel whose own is unknown, or says nothing of tiles, may turn out to follow."""

from dataclasses import replace

from tiebreak.kernels.flash import Block
from tiebreak.kernels.formats import FP32
from tiebreak.kernels.kernel import PLAIN, Declaration
from tiebreak.kernels.roster import composed_kernel
from tiebreak.matrix.experiment import Cell

ONE_TILE = " in one tile"  # what a plan's name ends with where rows are not split into tiles
# Plans that no composed kernel of a default run has.
_ELSEWHERE = ("flash@fused_half_up", "flash@fused_ties_away", "flash@fused_fp8")
_ONE_TILE = Block(2**31, 2**31)


def candidates(cell: Cell) -> dict[str, Declaration]:
    """The plans that an undeclared kernel may turn out to follow, in the declared tiles and in one tile.

    Not those that leave O in fp32: a kernel returns O in the format of its inputs.
    """
    tiled: dict[str, Declaration] = {}
    for kernel in (*cell.backend.kernels(), *map(composed_kernel, _ELSEWHERE)):
        found = kernel.declaration
        if found is not None and (found.plan.o.narrows or cell.fmt == FP32):
            tiled[kernel.name if kernel.composed else f"{PLAIN}@{found.plan.name}"] = found
    flash = {name: found for name, found in tiled.items() if found.algorithm.tiled}
    return tiled | {f"{name}{ONE_TILE}": replace(found, block=_ONE_TILE) for name, found in flash.items()}


def tilings(declaration: Declaration) -> tuple[Declaration, ...]:
    """The tiles that a user's kernel may work in, the smallest last; where O-bar is rounded they change its bias."""
    if not declaration.algorithm.tiled:
        return (declaration,)
    blocks = (declaration.block, _ONE_TILE, Block(64, 64), Block(32, 32))
    return tuple(replace(declaration, block=block) for block in blocks)
