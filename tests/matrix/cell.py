"""A cell of the matrix: backend x kernel x case x format, and what the command line says of all cells."""

import shlex
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from tiebreak.backends.backend import Backend
from tiebreak.cases.case import Case
from tiebreak.cases.gpt2.snippets import Snippet
from tiebreak.kernels.formats import Format
from tiebreak.kernels.kernel import Kernel
from tiebreak.reports.records import Record


class _Versioned(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def version(self) -> int: ...


_Case_co = TypeVar("_Case_co", bound=_Versioned, covariant=True)


@dataclass(frozen=True)
class AnyCell(Generic[_Case_co]):
    """What is run: backend x kernel x case x format."""

    backend: Backend
    kernel: Kernel
    case: _Case_co
    fmt: Format

    @property
    def id(self) -> str:
        """`backend-kernel-case-format`, as pytest shows it."""
        return f"{self.backend.name}-{self.kernel.name}-{self.case.name}-{self.fmt.name}"


class Cell(AnyCell[Case]):
    """A cell of one call of attention on scripted or captured input."""


class TrainingCell(AnyCell[Snippet]):
    """A cell of one short training run."""


@dataclass(frozen=True)
class Settings:
    """What the command line says of every cell."""

    seed: int = 1
    heads: int = 256  # query heads of one batch; a cell draws up to 8 times as many
    fair: bool = False  # hold external kernels to no bias on failure inputs
    kernel_options: tuple[str, ...] = ()  # --kernel and --plan as given, for the command that reruns a cell
    matrix: str = "tests/matrix"  # the folder of the cells from where pytest was called, for the same command

    def command(self, cell: AnyCell[_Versioned]) -> str:
        """The command that reruns one cell."""
        kernel: tuple[str, ...] = ("--kernels", cell.kernel.name)
        if cell.kernel.external:
            kernel = (*self.kernel_options, *(("--fair",) if self.fair else ()))
        captured = cell.case.stock.options if isinstance(cell.case, Case) and cell.case.stock else ()
        where = ["--backend", cell.backend.name, *kernel, *captured, "--cases", cell.case.name]
        draw = ["--dtype", cell.fmt.name, "--seed", str(self.seed), "--heads", str(self.heads)]
        return shlex.join(["pytest", self.matrix, *where, *draw])


def blank_record(
    cell: AnyCell[_Versioned], settings: Settings, outcome: str, reasons: tuple[str, ...] = (), heads: int = 0
) -> Record:
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


def place(cell: AnyCell[_Versioned], settings: Settings) -> str:
    """Which kernel, case and seed a message is about."""
    return f"kernel {cell.kernel.name}, case {cell.case.name}, seed {settings.seed}"
