"""Which cells a run has: the names on the command line, checked, and what they stand for."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tiebreak.backends.backend import Backend
from tiebreak.backends.registry import BACKENDS
from tiebreak.cases.captured import CapturedError, captured_cases
from tiebreak.cases.case import Case
from tiebreak.cases.gpt2.snippets import SNIPPETS, Snippet
from tiebreak.cases.gpt2.variants import VARIANTS
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.kernels.external import external_kernel
from tiebreak.kernels.formats import BF16, FP32, Format
from tiebreak.kernels.inputs import TORCH_DTYPES
from tiebreak.kernels.kernel import Kernel
from tiebreak.kernels.plans import parse_plan
from tiebreak.matrix.cell import Cell, TrainingCell
from tiebreak.matrix.training import trained_kernel
from tiebreak.reports.names import matching, split

_T = TypeVar("_T")
_Pair = tuple[Backend, Kernel]

_EXTERNAL_BACKEND = "cpu"  # where a user's kernel runs unless --backend says otherwise


class SelectionError(ValueError):
    """A name on the command line that stands for nothing; one line with the flag and the names it takes."""


@dataclass(frozen=True)
class Selection:
    """The command line's words, before they are looked up. Lists are comma-separated; globs are allowed."""

    backends: str | None = None
    kernels: str | None = None
    cases: str | None = None
    formats: str = "bf16"
    kernel: str | None = None  # a user's own, path/to/file.py:function or package.module:function
    plan: str | None = None  # the rounding plan that it declares
    captured: str | None = None  # folder of captured tensors


def cells(selection: Selection) -> tuple[list[Cell | TrainingCell], dict[str, str]]:
    """The cells of a run, case by case, and the backends that can't run, with their reasons.

    Raises:
        SelectionError: a name is unknown, or no cell is left: a run of nothing would pass.
    """
    chosen = matching_backends(selection)
    reasons = {backend.name: reason for backend in chosen if (reason := backend.unavailable()) is not None}
    running = [backend for backend in chosen if backend.name not in reasons]
    if not running:
        why = "; ".join(f"{name} can't run here: {reason}" for name, reason in reasons.items())
        raise SelectionError(f"--backend: {why}")
    kernels = _kernels(selection, running)
    formats = _formats(selection.formats)
    cases = _pick("--cases", "case", selection.cases, _known(selection))
    _hold_to_formats(selection, cases, formats)
    found: list[Cell | TrainingCell] = []
    for fmt in formats:
        for case in cases:
            if isinstance(case, Snippet):
                found += _training_cells(selection, case, fmt, kernels, running)
            elif case.stock is None or fmt in case.stock.formats:
                found += [Cell(*pair, case, fmt) for pair in kernels if _takes(pair[1], case, fmt)]
    if not found:
        raise SelectionError(
            "no cell is left: kernels called ...@train run in the cases called train_... alone, and those in bf16"
            " alone; triton_fp8 runs in the cases called fp8_... alone"
        )
    return found, reasons


def _takes(kernel: Kernel, case: Case, fmt: Format) -> bool:
    """Whether a case is for a kernel: not one for training alone, and in formats that the kernel is for."""
    return kernel.name not in VARIANTS and kernel.unsuited(case.formats(fmt)) is None


def check_captured(found: list[Cell | TrainingCell]) -> None:
    """Read the captured tensors of all cells once.

    Raises:
        SelectionError: a file can't be read, or a tensor in it is not finite in a cell's format.
    """
    for fmt, case in dict.fromkeys((cell.fmt, cell.case) for cell in found if isinstance(cell, Cell)):
        if case.stock is not None:
            try:
                case.make(0, 0, case.stock.heads, fmt)
            except CapturedError as error:
                raise SelectionError(str(error)) from error


def _known(selection: Selection) -> dict[str, Case | Snippet]:
    """The cases that --cases takes by name; captured ones run alone unless it is given."""
    try:
        captured = [] if selection.captured is None else captured_cases(Path(selection.captured))
    except CapturedError as error:
        raise SelectionError(str(error)) from error
    made = SCRIPTED if selection.captured is None or selection.cases is not None else ()
    return {**{case.name: case for case in (*made, *captured)}, **(SNIPPETS if made else {})}


def _hold_to_formats(selection: Selection, cases: Iterable[Case | Snippet], formats: Sequence[Format]) -> None:
    for case in cases:
        given = case.stock.formats if isinstance(case, Case) and case.stock else formats
        if not set(given) & set(formats):
            told = f"{case.name} is in {given[0].name}; add that, or leave it out with --cases"
            raise SelectionError(f"--dtype {selection.formats}: {told}")


def _training_cells(
    selection: Selection, snippet: Snippet, fmt: Format, named: Sequence[_Pair], backends: Sequence[Backend]
) -> list[TrainingCell]:
    """The training runs of one snippet: its roster, or what of it is named; any kernel where the snippet is named too.

    Beside the roster a device trains with its own kernels, except where a snippet asks for a format that it lacks.
    """
    if fmt != BF16:
        return []
    roster = [(backend, kernel) for backend in backends for kernel in _trained(backend, snippet)]
    if selection.kernel is None and selection.kernels is None:
        pairs = roster
    elif selection.cases is not None:
        pairs = list(named)
    else:
        default = {(backend.name, kernel.name) for backend, kernel in roster}
        pairs = [
            (backend, kernel)
            for backend, kernel in named
            if (backend.name, kernel.name) in default or (kernel.external and not snippet.amplified)
        ]
    return [TrainingCell(*pair, snippet, fmt) for pair in pairs]


def _trained(backend: Backend, snippet: Snippet) -> list[Kernel]:
    # The interpreter takes minutes for a run: its kernels train where they are named.
    if not backend.composed or (snippet.amplified and not backend.predicts):
        return []
    roster = snippet.roster if backend.predicts else snippet.on_devices
    own = [kernel for kernel in backend.vendor_kernels() if kernel.has_backward]
    return [*(trained_kernel(VARIANTS[name]) for name in roster), *own]


def matching_backends(selection: Selection) -> list[Backend]:
    """The backends that a run asks for, whether they can run or not.

    Raises:
        SelectionError: a name is unknown.
    """
    default = _EXTERNAL_BACKEND if selection.kernel else None
    names = default if selection.backends is None else selection.backends
    return _pick("--backend", "backend", names, BACKENDS)


def _formats(names: str) -> list[Format]:
    # Not fp32: its last bits are the order of summation, of which a plan says nothing.
    return _pick("--dtype", "format", names, {fmt.name: fmt for fmt in TORCH_DTYPES if fmt != FP32})


def _kernels(selection: Selection, backends: Sequence[Backend]) -> list[_Pair]:
    if selection.plan is not None and selection.kernel is None:
        raise SelectionError("--plan declares the plan of your own kernel: it needs --kernel")
    external = [] if selection.kernel is None else _external(selection, backends)
    if external and selection.kernels is None:
        return external
    pairs = [(backend, kernel) for backend in backends for kernel in _of(backend, selection.kernels)]
    if selection.kernels is not None:
        _all_used(selection.kernels, [kernel.name for _, kernel in pairs], backends)
    names = {kernel.name for _, kernel in pairs}
    if any(kernel.name in names for _, kernel in external):
        raise SelectionError(
            f"--kernel {selection.kernel}: --kernels has a {external[0][1].name} too; give your function another name"
        )
    return [*pairs, *external]


def _external(selection: Selection, backends: Sequence[Backend]) -> list[_Pair]:
    """The user's kernel on every device chosen; the emulation runs no code but its own."""
    assert selection.kernel is not None
    devices = [backend for backend in backends if not backend.predicts]
    if not devices:
        known = ", ".join(backend.name for backend in BACKENDS.values() if not backend.predicts)
        raise SelectionError(f"--kernel runs on a device, not in the emulation: give --backend one of {known}")
    try:
        plan = None if selection.plan is None else parse_plan(selection.plan)
    except ValueError as error:
        raise SelectionError(f"--plan: {error}") from error
    try:
        kernel = external_kernel(selection.kernel, plan)
    except ValueError as error:
        raise SelectionError(str(error)) from error
    return [(backend, kernel) for backend in devices]


def _of(backend: Backend, names: str | None) -> list[Kernel]:
    """A backend's kernels under these names: its default ones by glob, and any composed one by its full name."""
    default = {kernel.name: kernel for kernel in backend.kernels()}
    if names is None:
        return list(default.values())
    if backend.composed:
        default |= {name: trained_kernel(variant) for name, variant in VARIANTS.items()}
    found: dict[str, Kernel] = {}
    for name in split(names):
        matches = matching(name, default)
        if not matches and not _is_glob(name):
            try:
                found.setdefault(name, backend.kernel(name))
            except ValueError:
                continue  # perhaps another backend's own: `_all_used` decides
        found.update({match: default[match] for match in matches})
    return list(found.values())


def _all_used(names: str, used: Iterable[str], backends: Sequence[Backend]) -> None:
    used = list(used)
    known = list(dict.fromkeys(kernel.name for backend in backends for kernel in backend.kernels()))
    variants = ", ".join(dict.fromkeys(name.partition("@")[0] for name in VARIANTS))
    listed = (
        f"known are {', '.join(known)}, any rule@plan such as dithered@all_bf16; in the cases called train_..."
        f" also NAME@train and NAME@train_l_rounded with NAME one of {variants}"
    )
    for name in split(names):
        if not matching(name, used):
            raise SelectionError(f"--kernels: unknown kernel {name!r}; {listed}")
    if not used:
        raise SelectionError(f"--kernels: no kernel named; {listed}")


def _pick(flag: str, kind: str, names: str | None, known: Mapping[str, _T]) -> list[_T]:
    """The values whose names are listed, all without a list."""
    if names is None:
        return list(known.values())
    found: dict[str, _T] = {}
    for name in split(names):
        matches = matching(name, known)
        if not matches:
            raise SelectionError(f"{flag}: unknown {kind} {name!r}; known are {', '.join(known)}")
        found.update({match: known[match] for match in matches})
    if not found:
        raise SelectionError(f"{flag}: no {kind} named; known are {', '.join(known)}")
    return list(found.values())


def _is_glob(name: str) -> bool:
    return "*" in name or "?" in name
