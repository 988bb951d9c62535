"""From what a user names to a kernel of the matrix."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.external.adapters.foreign import Foreign, needs_of
from tiebreak.kernels.external.calling import Caller
from tiebreak.kernels.external.conventions import convention
from tiebreak.kernels.external.declaring import NO_BACKWARD, of_flags, of_mapping, read_toml, said_of
from tiebreak.kernels.external.errors import LoadError
from tiebreak.kernels.external.loading import load
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import Declaration, Kernel


@dataclass(frozen=True)
class KernelTarget:
    """What a user gives for one kernel."""

    target: str  # as on the command line
    flags: tuple[str, ...] = ()  # WORD=VALUE each
    plan: str | None = None  # that it declares; goes before what its author says

    @property
    def options(self) -> tuple[str, ...]:
        """The words of the command line that bring it in."""
        declared = (word for flag in self.flags for word in ("--declare", flag))
        return ("--kernel", self.target, *declared, *(() if self.plan is None else ("--plan", self.plan)))


def external_kernels(given: KernelTarget) -> list[Kernel]:
    """The kernels that a target names: one, or all of a TOML file.

    Raises:
        LoadError: it can't be found, imported or called as it is; one line that names the flag.
    """
    plan = None if given.plan is None else _declaration(f"--plan {given.plan}", given.plan)
    try:
        return [
            _kernel(replace(given, target=target), function_target, words, plan)
            for target, function_target, words in _said(given)
        ]
    except LoadError as error:
        raise LoadError(f"--kernel {given.target}: {error}", error.own_traceback) from error


def external_kernel(target: str, plan: str | None = None, flags: Sequence[str] = ()) -> Kernel:
    """The one kernel that a target names.

    Args:
        target: as `--kernel` takes it.
        plan: the rounding plan that it declares.
        flags: WORD=VALUE each, as `--declare` takes them.

    Raises:
        LoadError: it can't be found, imported or called as it is, or the target names several.
    """
    found = external_kernels(KernelTarget(target, tuple(flags), plan))
    if len(found) > 1:
        raise LoadError(f"--kernel {target}: it has {', '.join(kernel.name for kernel in found)}; name one")
    return found[0]


def _said(given: KernelTarget) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Targets as the command line names them, the functions that they stand for, and what a file says of these."""
    path, _, name = given.target.partition(".toml")
    if not path or ".toml" not in given.target:
        return [(given.target, given.target, {})]
    file, wanted = Path(f"{path}.toml"), name.removeprefix(":")
    found = read_toml(file)
    if wanted and wanted not in found:
        raise LoadError(f"{file} has no [{wanted}]; it has {', '.join(found)}")
    return [
        (f"{file}:{key}", _beside(file, str(words["target"])), words)
        for key, words in found.items()
        if wanted in ("", key)
    ]


def _beside(file: Path, target: str) -> str:
    """A target in a TOML file: files are named from where it lies."""
    place, separator, name = target.partition(".py:")
    return f"{file.parent / place}.py:{name}" if separator else target


def _kernel(given: KernelTarget, target: str, words: Mapping[str, Any], plan: Declaration | None) -> Kernel:
    function = load(target)
    told = {word: value for word, value in words.items() if word != "target"}
    said = of_flags(given.flags, of_mapping(told, target, said_of(function)))
    caller = Caller(function, convention(function, said))
    if plan is None and said.plan:
        plan = _declaration(f"plan {said.plan}", said.plan)
    return Kernel(
        said.name or (target.rpartition(":")[2] if ":" in target else getattr(function, "__name__", target)),
        partial(_compute, caller),
        plan,
        has_backward=said.backward != NO_BACKWARD,  # what autograd knows of shows when it is called
        takes=caller.how.takes,
        missing_requirement=partial(_missing_requirement, needs_of(function), caller),
        external=True,
        origin=given.options,
    )


def _missing_requirement(needed: tuple[Foreign, ...], caller: Caller, inputs: AttentionInputs) -> str | None:
    """None, or what of other packages is not here as an adapter knows it, and what the function itself can't take."""
    told = dict.fromkeys(
        [*(one.missing_requirement(inputs) for one in needed), caller.missing_requirement(inputs)]
    )  # of one package once
    return "; ".join(one for one in told if one) or None


def _declaration(where: str, text: str) -> Declaration:
    try:
        return parse_declaration(text)
    except ValueError as error:
        raise LoadError(f"{where}: {error}") from error


def _compute(caller: Caller, inputs: AttentionInputs, arithmetic: Arithmetic, gradients: bool) -> AttentionOutput:
    del arithmetic
    return caller.run(inputs, gradients=gradients)


def told_apart(kernels: Sequence[Kernel]) -> list[Kernel]:
    """The same kernels under names of their own: those of one name are told apart by their files or modules.

    Raises:
        LoadError: two are the same.
    """
    names = [kernel.name for kernel in kernels]
    longer = [f"{_stem(kernel)}.{kernel.name}" if names.count(kernel.name) > 1 else kernel.name for kernel in kernels]
    for kernel, name in zip(kernels, longer, strict=True):
        if longer.count(name) > 1:
            raise LoadError(f"--kernel {kernel.origin[1]}: there are two kernels called {name}; give one another name")
    return [replace(kernel, name=name) for kernel, name in zip(kernels, longer, strict=True)]


def _stem(kernel: Kernel) -> str:
    place = kernel.origin[1].rpartition(":")[0]
    return Path(place).stem if place.endswith((".py", ".toml")) else place.replace(".", "_")
