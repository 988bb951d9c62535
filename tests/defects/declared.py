"""Kernels that declare a rounding plan and follow another, and devices that round otherwise than configured."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.features import COMMON
from tiebreak.kernels.formats import BF16, Rounding
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import Compute, Declaration, Kernel, run_declared
from tiebreak.kernels.plans import Accumulator, Cast
from tiebreak.kernels.roster import composed_kernel

EXACT = EmulatedArithmetic()


class CastingIn(EmulatedArithmetic):
    """A device whose casts round in another mode than the plan says."""

    def __init__(self, rounding: Rounding) -> None:
        self.rounding = rounding

    def cast(self, x: Tensor, cast: Cast, random: Tensor | None = None) -> Tensor:
        return super().cast(x, replace(cast, rounding=self.rounding), random)


class NarrowAccumulator(EmulatedArithmetic):
    """A device that keeps the running sums of its matrix products in bf16."""

    def matmul(self, a: Tensor, b: Tensor, cast: Cast, accumulator: Accumulator) -> Tensor:
        total = torch.zeros(*a.shape[:-1], b.shape[-1])
        for index in range(a.shape[-1]):
            product = a[..., :, index, None] * b[..., None, index, :]
            total = super().cast(total + product, Cast(BF16))
        return super().cast(total, cast)


class NoiseOfTheFirst(EmulatedArithmetic):
    """A device on which all elements of a tile share one random number."""

    def cast(self, x: Tensor, cast: Cast, random: Tensor | None = None) -> Tensor:
        return super().cast(x, cast, None if random is None else random[:1, :1, :1, :1].expand_as(random))


def declaration_of(name: str) -> Declaration:
    """What a composed kernel declares."""
    declaration = composed_kernel(name).declaration
    assert declaration is not None
    return declaration


def honest(name: str) -> Kernel:
    """A kernel that does what the composed kernel `name` declares: a sound twin."""
    declaration = declaration_of(name)
    return Kernel(name, partial(run_declared, declaration), declaration, takes=COMMON)


def doing(declared: str, done: str, **changes: object) -> Callable[[str], Kernel]:
    """A kernel that declares one composed kernel and does another, with changes to the plan of the latter."""
    doing = declaration_of(done)
    plan = replace(doing.plan, **changes)  # type: ignore[arg-type]
    return _computing(declared, partial(run_declared, replace(doing, plan=plan)))


def on_other_inputs(declared: str, change: Callable[[AttentionInputs], AttentionInputs]) -> Callable[[str], Kernel]:
    """A kernel that does what it declares on inputs that are not those it was given."""
    declaration = declaration_of(declared)

    def compute(inputs: AttentionInputs, arithmetic: Arithmetic, gradients: bool) -> AttentionOutput:
        return run_declared(declaration, change(inputs), arithmetic, gradients)

    return _computing(declared, compute)


def _computing(declared: str, compute: Compute) -> Callable[[str], Kernel]:
    def named(name: str) -> Kernel:
        return Kernel(name, compute, declaration_of(declared), takes=COMMON)

    return named
