"""What the command line says of every cell."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    seed: int = 1
    heads: int = 256  # query heads of one batch; a cell draws up to 8 times as many
    fair: bool = False  # hold external kernels to no bias on failure inputs
    as_rounded: bool = False  # hold them to no more bias than a correctly rounded O has
    rules: bool = False  # ask acceptance rules in public use too
    cell_timeout: float | None = None  # seconds that a cell may take; None: as its experiment and its backend say
    matrix: tuple[str, ...] = ("tests/matrix",)  # how pytest finds the cells from where it was called, for that command
