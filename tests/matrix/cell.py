"""A cell of the matrix: backend x kernel x case x format, and what the command line says of all cells."""

import shlex
from dataclasses import dataclass

from tiebreak.backends.backend import Backend
from tiebreak.cases.case import Case
from tiebreak.kernels.formats import Format
from tiebreak.kernels.kernel import Kernel
from tiebreak.reports.records import Record


@dataclass(frozen=True)
class Cell:
    """What is run: backend x kernel x case x format."""

    backend: Backend
    kernel: Kernel
    case: Case
    fmt: Format

    @property
    def id(self) -> str:
        """`backend-kernel-case-format`, as pytest shows it."""
        return f"{self.backend.name}-{self.kernel.name}-{self.case.name}-{self.fmt.name}"


@dataclass(frozen=True)
class Settings:
    """What the command line says of every cell."""

    seed: int = 1
    heads: int = 256  # query heads of one batch; a cell draws up to 8 times as many
    fair: bool = False  # hold external kernels to no bias on failure inputs
    kernel_options: tuple[str, ...] = ()  # --kernel and --plan as given, for the command that reruns a cell
    matrix: str = "tests/matrix"  # the folder of the cells from where pytest was called, for the same command

    def command(self, cell: Cell) -> str:
        """The command that reruns one cell."""
        kernel: tuple[str, ...] = ("--kernels", cell.kernel.name)
        if cell.kernel.external:
            kernel = (*self.kernel_options, *(("--fair",) if self.fair else ()))
        where = ["--backend", cell.backend.name, *kernel, "--cases", cell.case.name, "--dtype", cell.fmt.name]
        return shlex.join(["pytest", self.matrix, *where, "--seed", str(self.seed), "--heads", str(self.heads)])


def blank_record(cell: Cell, settings: Settings, outcome: str, reasons: tuple[str, ...] = (), heads: int = 0) -> Record:
    """The record of a cell that has an outcome but no measures."""
    declared = cell.kernel.declaration
    return Record(
        id=cell.id,
        backend=cell.backend.name,
        kernel=cell.kernel.name,
        case=cell.case.name,
        case_version=cell.case.version,
        format=cell.fmt.name,
        seed=settings.seed,
        heads=heads,
        outcome=outcome,
        reasons=reasons,
        command=settings.command(cell),
        plan=declared.label if declared else None,
    )


def place(cell: Cell, settings: Settings) -> str:
    """Which kernel, case and seed a message is about."""
    return f"kernel {cell.kernel.name}, case {cell.case.name}, seed {settings.seed}"
