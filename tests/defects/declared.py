"""Kernels that declare a rounding plan and follow another, and devices that round otherwise than configured."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.kernels.features import COMMON
from tiebreak.kernels.formats import BF16, Rounding
from tiebreak.kernels.kernel import Kernel, run_declared
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


def honest(name: str) -> Kernel:
    """A kernel that does what the composed kernel `name` declares: a sound twin."""
    return doing(name, name, name)


def doing(declared: str, done: str, name: str, **changes: object) -> Kernel:
    """A kernel that declares one composed kernel and does another, with changes to the plan of the latter."""
    says, does = (composed_kernel(each).declaration for each in (declared, done))
    assert does is not None
    does = replace(does, plan=replace(does.plan, **changes))  # type: ignore[arg-type]
    return Kernel(name, partial(run_declared, does), says, takes=COMMON)
