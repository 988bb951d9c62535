"""The cells of a run: the names on the command line, checked and looked up."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeVar

from tiebreak.backends.backend import Backend
from tiebreak.backends.registry import BACKENDS, COMMONLY, resolved
from tiebreak.backends.torch_device import torch_devices
from tiebreak.kernels.external import LoadError, distinct_names, external_kernel
from tiebreak.kernels.formats import FP32
from tiebreak.kernels.inputs import TORCH_DTYPES
from tiebreak.kernels.kernel import Kernel
from tiebreak.matrix.experiment import Cell, Experiment, Pair, SelectionContext
from tiebreak.matrix.experiments import kinds, offered, offers
from tiebreak.reports.errors import UsageError
from tiebreak.reports.names import matching, none_named, pick, split, unknown

_T = TypeVar("_T")
_GLOB = frozenset("*?")


@dataclass(frozen=True)
class Selection:
    """The command line's words, before they are looked up. Lists are comma-separated; globs are allowed."""

    backends: str | None = None
    kernels: str | None = None
    cases: str | None = None
    formats: str = "bf16"
    kernel: tuple[str, ...] = ()  # users' own: targets of `tiebreak.kernels.external`
    declare: tuple[str, ...] = ()  # what is said of them, WORD=VALUE each
    plan: str | None = None  # the rounding plan that they declare
    captured: str | None = None  # folder of captured tensors
    experiments: str | None = None  # kinds of experiment
    card: str | None = None  # that the interpreter is to compute as
    features: str | None = None  # added to the cases' inputs
    emulated_backward: bool = False  # whether users' kernels train with the suite's own backward pass


def cells(selection: Selection) -> tuple[list[Cell], dict[str, str]]:
    """Return a run's cells, and the backends that can't run, with reasons; UsageError: unknown names, or no cells."""
    chosen = matching_backends(selection)
    reasons = {backend.name: reason for backend in chosen if (reason := backend.unavailable()) is not None}
    running = [backend for backend in chosen if backend.name not in reasons]
    if not running:
        why = "; ".join(f"{name} can't run here: {reason}" for name, reason in reasons.items())
        raise UsageError(f"--backend: {why}")
    pairs = _kernels(selection, running)
    # Not fp32: its last bits are the order of summation, of which a plan says nothing.
    formats = _pick("--dtype", "format", selection.formats, {fmt.name: fmt for fmt in TORCH_DTYPES if fmt != FP32})
    experiments = _pick("--cases", "case", selection.cases, _experiments_by_name(selection))
    if selection.features is not None:
        kernels = [kernel for _, kernel in pairs]
        changed = (it.featured(experiments, selection.features, kernels) for it in offers().values())
        experiments = [each for own in changed for each in own]
    for experiment in experiments:
        fixed_formats = experiment.formats() if experiment.options else None  # of captured tensors: a folder is named
        if fixed_formats is not None and not set(fixed_formats) & set(formats):
            advice = f"{experiment.name} is in {fixed_formats[0].name}; add that, or leave it out with --cases"
            raise UsageError(f"--dtype {selection.formats}: {advice}")
    named = bool(selection.kernel) or selection.kernels is not None, selection.cases is not None
    contexts = (SelectionContext(pairs, running, fmt, *named, selection.emulated_backward) for fmt in formats)
    selected = [cell for each in contexts for cell in cells_of(experiments, each)]
    if not selected:
        hints = "; ".join(kind.advice for kind in kinds().values() if kind.advice)
        raise UsageError(f"no cell is left: {hints}")
    return selected, reasons


def cells_of(experiments: Iterable[Experiment], context: SelectionContext) -> list[Cell]:
    """Return the cells of experiments: each with kernels of its kind and those of none."""
    owners: dict[tuple[str, str], set[str]] = {}
    for kind, backend in product(kinds(), context.backends):
        for name in kinds()[kind].kernels(backend):
            owners.setdefault((backend.name, name), set()).add(kind)
    contexts = {}
    for kind in kinds():
        pairs = [(at, it) for at, it in context.pairs if kind in owners.get((at.name, it.name), {kind})]
        contexts[kind] = replace(context, pairs=pairs)
    return [Cell(*pair, each, context.fmt) for each in experiments for pair in each.pairs(contexts[each.kind])]


def check_usable(chosen: Iterable[Cell]) -> None:
    """Read once what the experiments of all cells are made from; a `UsageError` names what can't be used."""
    for fmt, experiment in dict.fromkeys((cell.fmt, cell.experiment) for cell in chosen):
        experiment.check(fmt)


def _experiments_by_name(selection: Selection) -> dict[str, Experiment]:
    """Return the experiments that --cases takes by name."""
    chosen = _pick("--experiments", "kind of experiment", selection.experiments, kinds())
    if selection.experiments is None and selection.cases is None:
        chosen = [kind for kind in chosen if not kind.on_request]
    names, every = {kind.name for kind in chosen}, offered(selection.captured, cases_named=selection.cases is not None)
    return {each.name: each for each in every if each.kind in names}


def matching_backends(selection: Selection) -> list[Backend]:
    """Return the requested backends, whether they can run or not; a `UsageError` names what is unknown."""
    names = "cpu" if selection.backends is None and selection.kernel else selection.backends
    try:
        names = names and resolved(names)
        devices = torch_devices(name for name in split(names or "") if name not in COMMONLY)
    except ValueError as error:
        raise UsageError(f"--backend: {error}") from error
    backends = _pick("--backend", "backend", names, {**BACKENDS, **devices} if devices else BACKENDS)
    if names is None:
        backends = [backend for backend in backends if not backend.on_request]
    if selection.card is None:
        return backends
    try:
        assuming = [backend.assuming(selection.card) for backend in backends]
    except ValueError as error:
        raise UsageError(f"--as {error}") from error
    if all(assumed is plain for assumed, plain in zip(assuming, backends, strict=True)):
        raise UsageError(
            f"--as {selection.card}: only --backend interpreter and ptx compute as a card that is not here"
        )
    return assuming


def _kernels(selection: Selection, backends: Sequence[Backend]) -> list[Pair]:
    """Return the kernels on every backend: the default ones, those of --kernels, and users'."""
    external = _external(selection, backends) if selection.kernel else []
    if external and selection.kernels is None:
        return external
    pairs = [(backend, kernel) for backend in backends for kernel in _kernels_of(backend, selection.kernels)]
    names = {kernel.name for _, kernel in pairs}
    if selection.kernels is not None:
        kernels = [kernel.name for backend in backends for kernel in backend.kernels()]
        trained = [name for backend in backends for kind in kinds().values() for name in kind.kernels(backend)]
        kernels_known = list(dict.fromkeys([*kernels, *trained]))
        listed = "any rule@plan is one, and `tiebreak list kernels` names"
        for name in split(selection.kernels):
            if not matching(name, names):
                raise UsageError(f"--kernels: {unknown('kernel', name, kernels_known, listed)}")
        if not names:
            raise UsageError(f"--kernels: {none_named('kernel', kernels_known, listed)}")
    for _, kernel in external:
        if kernel.name in names:
            target = " ".join(kernel.origin[:2])
            raise UsageError(f"{target}: --kernels has a {kernel.name} too; give your function another name")
    return [*pairs, *external]


def _external(selection: Selection, backends: Sequence[Backend]) -> list[Pair]:
    """Return users' kernels on every chosen device; the emulation runs only the suite's code."""
    devices = [backend for backend in backends if not backend.predicts]
    if not devices:
        known_names = ", ".join(backend.name for backend in BACKENDS.values() if not backend.predicts)
        raise UsageError(f"a kernel of your own runs on a device, not in the emulation: --backend {known_names}")
    try:
        named = [external_kernel(each, selection.plan, selection.declare) for each in selection.kernel]
        kernels = distinct_names(named)
    except LoadError as error:
        raise UsageError(str(error)) from error
    return [(backend, kernel) for backend in devices for kernel in kernels]


def _kernels_of(backend: Backend, names: str | None) -> list[Kernel]:
    """Return a backend's kernels under these names: its default ones by glob, and any composed one by its full name."""
    default = {kernel.name: kernel for kernel in backend.kernels()}
    if names is None:
        return list(default.values())
    for kind in kinds().values():
        default |= kind.kernels(backend)
    kernels: dict[str, Kernel] = {}
    for name in split(names):
        # Named in full, a kernel that is for some inputs only may get any. One of another kind of experiment, or
        # another backend's own, is looked for by its name; who has called for all backends refuses what none has.
        with suppress(ValueError):
            kernels |= {} if set(name) & _GLOB else {name: backend.kernel(name)}
        if name not in kernels:
            kernels |= {match: default[match] for match in matching(name, default)}
    return list(kernels.values())


def _pick(flag: str, kind: str, names: str | None, values: Mapping[str, _T]) -> list[_T]:
    """Return the values whose names are listed, all without a list."""
    if names is None:
        return list(values.values())
    for name in split(names):
        if COMMONLY.get(name) in values and not matching(name, values):
            raise UsageError(f"{flag}: {kind} {name!r} is called {COMMONLY[name]}; all: {', '.join(values)}")
    return [values[name] for name in pick(kind, names, values, f"`tiebreak list {kind}s` names", flag)]
