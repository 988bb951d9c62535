"""A kernel that is asked: its outputs on designed inputs, and what plans make of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from tiebreak.backends.backend import Backend
from tiebreak.kernels.formats import Format
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import Blame, CannotRunError, Declaration, Kernel
from tiebreak.matrix.identification.designed import DESIGNED, Designed
from tiebreak.matrix.trial import refusal
from tiebreak.matrix.workbench import Emulated, same_bits

_FAR = 2.0**8  # ulps: what is further away is not the less like the kernel for it


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Run torch with `number` threads; on small tensors, more than one would wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Miss:
    """The bits of an output that a plan misses."""

    share: float  # of elements of O
    rows: int  # of O, that have such an element
    bits_between: float  # mean of log2(1 + ulps between the plan's O and the kernel's), none more than 2^8 ulps


@dataclass(frozen=True, eq=False)
class DesignedOutput(Emulated):
    """A kernel's O on one designed input, and how plans compare with it."""

    o: Tensor
    name: str  # of the input
    shared: Emulated | None = None  # the same inputs, and what plans make of them, of every kernel that is asked
    misses: dict[Declaration, Miss] = field(default_factory=dict)  # of plans that were held against it

    def missed(self, declaration: Declaration) -> float:
        """Return the share of elements of O that a plan misses."""
        return self.miss(declaration).share

    def miss(self, declaration: Declaration) -> Miss:
        """Compare a plan's O with the kernel's; computed once a plan."""
        key = self.clipped(declaration)
        if key not in self.misses:
            prediction = (self.shared or self).predicted(key)
            missed, between = ~same_bits(self.o, prediction), 0.0
            if rows := int(missed.any(-1).sum()):
                ulp = torch.maximum(self.o.abs(), prediction.abs()) * 2.0**-self.inputs.formats.operands.mantissa_bits
                ulps = ((self.o - prediction).abs() / ulp).clamp_(max=_FAR).masked_fill_(~missed, 0.0)
                between = torch.log2(1.0 + ulps.nan_to_num_(_FAR)).mean().item()
            self.misses[key] = Miss(missed.double().mean().item(), rows, between)
        return self.misses[key]


@lru_cache(maxsize=2 * len(DESIGNED))  # of two formats
def _emulated(designed: Designed, fmt: Format, seed: int) -> Emulated:
    return Emulated(designed.make(fmt, seed))


@dataclass(frozen=True)
class ProbedKernel:
    """A kernel whose plan is unknown, and its outputs on designed inputs."""

    backend: Backend
    kernel: Kernel
    fmt: Format  # of q, k and v
    threads: int = field(default_factory=torch.get_num_threads)  # that it runs with
    answers: dict[str, DesignedOutput] = field(default_factory=dict)  # to designed inputs, by name
    refused: dict[str, str] = field(default_factory=dict)  # inputs that it does not take, and why

    def ask(self, designed: Designed, seed: int = 0) -> DesignedOutput | None:
        """Return the output on a designed input, computed once; None if the format or the kernel does not take it."""
        name = f"{designed.name}#{seed}" if seed else designed.name
        unasked = name not in self.answers and name not in self.refused and self.fmt in designed.formats
        if unasked and (answer := self.answer(name, _emulated(designed, self.fmt, seed))) is not None:
            self.answers[name] = answer
        return self.answers.get(name)

    def answer(self, name: str, shared: Emulated) -> DesignedOutput | None:
        """Return the output on some inputs; None where the kernel does not take them. It may raise anything."""
        why = refusal(self.backend, self.kernel, shared.inputs)
        try:
            if why is None:
                return DesignedOutput(shared.inputs, self.run(shared.inputs), name, shared)
        except CannotRunError as error:
            if error.blame is Blame.KERNEL:
                raise
            why = str(error)
        self.refused[name] = why
        return None

    def run(self, inputs: AttentionInputs) -> Tensor:
        """Make one call, with as many threads as the process had at first."""
        with threads(self.threads):
            return self.backend.run(self.kernel, inputs, gradients=False).o.float()
