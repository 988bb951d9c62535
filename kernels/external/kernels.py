"""From what a user names to a kernel of the matrix."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.external.adapters.foreign import Foreign, needs_of
from tiebreak.kernels.external.caller import Caller
from tiebreak.kernels.external.conventions import convention
from tiebreak.kernels.external.errors import LoadError
from tiebreak.kernels.external.loading import load
from tiebreak.kernels.external.options import NO_BACKWARD, decorator_options, flag_options, mapped_options, read_toml
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import Declaration, Kernel


@dataclass(frozen=True)
class UserKernel(Kernel):
    """A kernel that is a user's function, which can be called step by step."""

    caller: Caller = field(kw_only=True)  # how it is called

    def given(self, **keywords: object) -> "UserKernel":
        """The same with further keywords, whatever its options say of them."""
        called = self.caller.convention
        options = replace(called.options, options={**called.options.options, **keywords})
        caller = replace(self.caller, convention=replace(called, options=options))
        return replace(self, caller=caller, compute=caller.compute)


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


def external_kernels(target: KernelTarget) -> list[UserKernel]:
    """The kernels that a target names: one, or all of a TOML file.

    Raises:
        LoadError: it can't be found, imported or called as it is; one line that names the flag.
    """
    plan = None if target.plan is None else _declaration(f"--plan {target.plan}", target.plan)
    try:
        return [_kernel(replace(target, target=name), place, words, plan) for name, place, words in _places(target)]
    except LoadError as error:
        raise LoadError(f"--kernel {target.target}: {error}") from error


def external_kernel(target: str, plan: str | None = None, flags: Sequence[str] = ()) -> Kernel:
    """The one kernel that a target names.

    Args:
        target: as `--kernel` takes it.
        plan: the rounding plan that it declares.
        flags: WORD=VALUE each, as `--declare` takes them.

    Raises:
        LoadError: it can't be found, imported or called as it is, or the target names several.
    """
    kernels = external_kernels(KernelTarget(target, tuple(flags), plan))
    if len(kernels) > 1:
        raise LoadError(f"--kernel {target}: it has {', '.join(kernel.name for kernel in kernels)}; name one")
    return kernels[0]


def _places(target: KernelTarget) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Of each kernel: its target on the command line, that of its function, and its table in a TOML file."""
    path, _, name = target.target.partition(".toml")
    if not path or ".toml" not in target.target:
        return [(target.target, target.target, {})]
    file, table = Path(f"{path}.toml"), name.removeprefix(":")
    tables = read_toml(file)
    if table and table not in tables:
        raise LoadError(f"{file} has no [{table}]; it has {', '.join(tables)}")
    return [
        (f"{file}:{key}", _beside(file, str(words["target"])), words)
        for key, words in tables.items()
        if table in ("", key)
    ]


def _beside(file: Path, target: str) -> str:
    """A target in a TOML file: files are named from where it lies."""
    place, separator, name = target.partition(".py:")
    return f"{file.parent / place}.py:{name}" if separator else target


def _kernel(target: KernelTarget, place: str, words: Mapping[str, Any], plan: Declaration | None) -> UserKernel:
    function = load(place)
    table = {word: value for word, value in words.items() if word != "target"}
    options = flag_options(target.flags, mapped_options(table, place, decorator_options(function)))
    caller = Caller(function, convention(function, options))
    if plan is None and options.plan:
        plan = _declaration(f"plan {options.plan}", options.plan)
    name = options.name or (place.rpartition(":")[2] if ":" in place else getattr(function, "__name__", place))
    return replace(users_kernel(name, caller, plan, needs_of(function)), origin=target.options)


def users_kernel(
    name: str, caller: Caller, plan: Declaration | None = None, needed: tuple[Foreign, ...] = ()
) -> UserKernel:
    """A user's function as a kernel of the matrix.

    Args:
        name: how tables call it.
        caller: the function, and how it is called.
        plan: the rounding plan that it declares.
        needed: what of other packages it needs.
    """
    return UserKernel(
        name,
        caller.compute,
        plan,
        # What autograd knows of shows when it is called.
        has_backward=caller.convention.options.backward != NO_BACKWARD,
        takes=caller.convention.takes | caller.convention.tried,
        missing_requirement=partial(_missing_requirement, needed, caller),
        undeclared=caller.undeclared,
        external=True,
        caller=caller,
    )


def _missing_requirement(needed: tuple[Foreign, ...], caller: Caller, inputs: AttentionInputs) -> str | None:
    """None, or what of other packages is not here as an adapter knows it, and what the function itself can't take."""
    reasons = (*(part.missing_requirement(inputs) for part in needed), caller.missing_requirement(inputs))
    return "; ".join(dict.fromkeys(reason for reason in reasons if reason)) or None  # a package is named once


def _declaration(where: str, text: str) -> Declaration:
    try:
        return parse_declaration(text)
    except ValueError as error:
        raise LoadError(f"{where}: {error}") from error


def distinct_names(kernels: Sequence[Kernel]) -> list[Kernel]:
    """The same kernels under distinct names: those of one name have their file's or module's name in front.

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
