"""From what a user names to a kernel of the matrix."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.external.caller import Caller
from tiebreak.kernels.external.loading import load
from tiebreak.kernels.external.options import (
    NO_BACKWARD,
    KernelOptions,
    LoadError,
    convention,
    declared_options,
    needs_of,
)
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import Kernel


@dataclass(frozen=True)
class UserKernel(Kernel):
    """A kernel that is a user's function, which can be called step by step."""

    caller: Caller = field(kw_only=True)  # how it is called


def external_kernel(target: str, plan: str | None = None, flags: Sequence[str] = ()) -> UserKernel:
    """Return the kernel of `--kernel`, with `--plan` before its author's, and `--declare`; LoadError names the flag."""
    # After a target there may be keywords, [block=32+splits=2], or an autotuned kernel's configuration, [KERNEL.B=32].
    place, _, words = target[:-1].rpartition("[") if target.endswith("]") else (target, "", "")
    tuned = "." in words.partition("=")[0]
    chosen = [f"config={words}"] if tuned else [f"options.{word}" for word in words.split("+") if word]
    try:
        function = load(place)
        options = declared_options(function, [*flags, *chosen])
        name = options.name or (place.rpartition(":")[2] if ":" in place else getattr(function, "__name__", place))
        kernel = users_kernel(name + target.removeprefix(place), function, options)
    except LoadError as error:
        raise LoadError(f"--kernel {target}: {error}") from error
    origin = ["--kernel", target, *(word for flag in flags for word in ("--declare", flag))]
    try:
        declaration = kernel.declaration if plan is None else parse_declaration(plan)
    except ValueError as error:
        raise LoadError(f"--plan {plan}: {error}") from error
    return replace(kernel, declaration=declaration, origin=(*origin, *(() if plan is None else ("--plan", plan))))


def users_kernel(name: str, function: Callable[..., Any], options: KernelOptions) -> UserKernel:
    """Return a user's function as a kernel of the matrix; LoadError: it can't be called so, or its plan is none."""
    caller = Caller(function, convention(function, options))
    lacking = [*(foreign.missing_requirement for foreign in needs_of(function)), caller.missing_requirement]

    def missing_requirement(inputs: AttentionInputs) -> str | None:
        reasons = (reason(inputs) for reason in lacking)
        return "; ".join(dict.fromkeys(reason for reason in reasons if reason)) or None  # a package is named once

    try:
        declaration = parse_declaration(options.plan) if options.plan else None
    except ValueError as error:
        raise LoadError(f"plan {options.plan}: {error}") from error
    return UserKernel(
        name,
        caller.compute,
        declaration,
        # Whether autograd works shows when it is called.
        has_backward=caller.convention.options.backward != NO_BACKWARD,
        takes=caller.convention.takes | caller.convention.tried,
        missing_requirement=missing_requirement,
        undeclared=caller.undeclared,
        external=True,
        caller=caller,
    )


def distinct_names(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Return the kernels with distinct names: equal ones get their file's in front; LoadError: two are the same."""
    names, distinct = [kernel.name for kernel in kernels], dict[str, Kernel]()
    for kernel in kernels:
        place, name = kernel.origin[1].rpartition(":")[0], kernel.name
        if names.count(name) > 1:
            name = f"{Path(place).stem if place.endswith('.py') else place.replace('.', '_')}.{name}"
        if name in distinct:
            raise LoadError(f"--kernel {kernel.origin[1]}: there are two kernels called {name}; give one another name")
        distinct[name] = replace(kernel, name=name)
    return list(distinct.values())
