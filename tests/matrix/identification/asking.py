"""A kernel that is asked: its outputs on designed inputs, and what plans make of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from tiebreak.backends.backend import Backend, to_device
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.formats import Format
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import CannotRunError, Declaration, Kernel, run_forward
from tiebreak.matrix.bits import equal_bits, same_bits
from tiebreak.matrix.candidates import clipped
from tiebreak.matrix.sharing import SharedEmulation
from tiebreak.matrix.trial import failed_trial

_FAR = 2.0**8  # ulps: what is further away is not the less like the kernel for it


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Within, torch has so many threads; of small tensors, more than one would wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class _Miss:
    """What of one answer a plan does not have."""

    share: float  # of elements
    rows: int
    bits_between: float


@dataclass(frozen=True, eq=False)
class Answer:
    """What the kernel made of one input."""

    name: str  # of the input
    inputs: AttentionInputs
    o: Tensor
    _misses: dict[Declaration, _Miss] = field(default_factory=dict)

    @cached_property
    def emulation(self) -> Arithmetic:
        """The emulation's, with what plans share on this input."""
        return SharedEmulation(self.inputs)

    @property
    def tried(self) -> int:
        """How many plans were held against it."""
        return len(self._misses)

    def predicted(self, declaration: Declaration) -> Tensor:
        """What a plan makes of the input."""
        _, _, queries, _ = self.inputs.q.shape
        declaration = clipped(declaration, queries, self.inputs.k.shape[2])
        return run_forward(declaration, self.inputs, self.emulation).o

    def missed(self, declaration: Declaration) -> float:
        """The share of elements of O in which a plan does not have the kernel's bits."""
        return self._miss(declaration).share

    def rows_missed(self, declaration: Declaration) -> int:
        """How many rows of O have such an element."""
        return self._miss(declaration).rows

    def apart(self, declaration: Declaration) -> float:
        """How far a plan's O is from the kernel's: the mean of log2(1 + ulps between them), none more than 2^8 ulps."""
        return self._miss(declaration).bits_between

    def _miss(self, declaration: Declaration) -> _Miss:
        key = clipped(declaration, self.inputs.q.shape[2], self.inputs.k.shape[2])
        if key not in self._misses:
            prediction = self.predicted(key)
            missed = ~same_bits(self.o, prediction)
            rows = int(missed.any(-1).sum())
            between = self._bits_between(prediction) if rows else 0.0
            self._misses[key] = _Miss(missed.double().mean().item(), rows, between)
        return self._misses[key]

    def _bits_between(self, prediction: Tensor) -> float:
        ulp = torch.maximum(self.o.abs(), prediction.abs()) * 2.0**-self.inputs.formats.operands.mantissa_bits
        ulps = ((self.o - prediction).abs() / ulp).clamp_(max=_FAR)
        ulps.masked_fill_(same_bits(self.o, prediction), 0.0)
        return torch.log2(1.0 + ulps.nan_to_num_(_FAR)).mean().item()


@dataclass(frozen=True)
class Asked:
    """A kernel, and what it has answered so far."""

    backend: Backend
    kernel: Kernel
    fmt: Format  # of q, k and v
    threads: int = field(default_factory=torch.get_num_threads)  # that it runs with
    answers: dict[str, Answer] = field(default_factory=dict)  # by the name of the input
    refused: dict[str, str] = field(default_factory=dict)  # inputs that it does not take, and why

    def ask(self, name: str, inputs: AttentionInputs) -> Answer | None:
        """As `answer`, remembered: the kernel is asked once."""
        unasked = name not in self.answers and name not in self.refused
        if unasked and (answer := self.answer(name, inputs)) is not None:
            self.answers[name] = answer
        return self.answers.get(name)

    def answer(self, name: str, inputs: AttentionInputs) -> Answer | None:
        """Its answer; None where it does not take such inputs.

        Raises:
            Exception: whatever it raises on inputs that it should take.
        """
        why = self.kernel.refusal(to_device(inputs, self.backend.device))
        why = why or failed_trial(self.backend, self.kernel, inputs)
        try:
            if why is None:
                return Answer(name, inputs, self.run(inputs))
        except CannotRunError as error:
            why = str(error)
        self.refused[name] = why
        return None

    def run(self, inputs: AttentionInputs) -> Tensor:
        """One call, with as many threads as the process had at first."""
        with threads(self.threads):
            return self.backend.run(self.kernel, inputs, gradients=False).o.float()

    def repeats(self, answer: Answer) -> bool:
        """Whether a second call has the same bits."""
        return self.backend.repeats(self.kernel) or equal_bits(answer.o, self.run(answer.inputs)) == 1.0
