"""Backends: a device, the arithmetic on it, and the kernels it runs."""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.backends.platform import emulated
from tiebreak.backends.probes import fingerprint, plan_changes
from tiebreak.backends.torch_arithmetic import TorchArithmetic
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput, Gradients
from tiebreak.kernels.kernel import Kernel
from tiebreak.kernels.plans import Accumulator
from tiebreak.kernels.roster import DEFAULT_ROSTER, composed_kernel, eight_bit_kernels
from tiebreak.kernels.sdpa import cpu_sdpa_flash, sdpa_math

BITS_OF_INSTRUCTIONS = "bits of emulated instructions"  # what a plan rests on where the processor is not there


@dataclass(frozen=True)
class Backend:
    """A device that runs kernels, and all that the suite knows about it."""

    name: str  # how tables and --backend call it
    about: str  # one line
    device: str  # torch's name of the device
    arithmetic: Arithmetic  # the device's operations
    unavailable: Callable[[], str | None]  # None, or why it can't run here, in one line
    vendor_kernels: Callable[[], tuple[Kernel, ...]]  # kernels that only this backend has
    predicts: bool = False  # whether its output is the prediction itself
    on_request: bool = False  # whether it runs only where --backend names it
    composed: bool = True  # whether the composed kernels run on it too, or its own alone
    pace: str = "native"  # how fast cells are there: a column of tests/matrix/order.csv
    slower: float = 1.0  # how many times as much time as on a CPU a kernel may take there
    budget: float | None = None  # seconds of CPU time for a check of a kernel by default; None: all that it takes
    #: How products are added up on the device, as plans name it; see `tiebreak.backends.emulation.accumulators`.
    accumulators: Mapping[Accumulator, Callable[[Tensor, Tensor], Tensor]] = field(default_factory=dict, compare=False)
    bits: str = "bits on this machine"  # what a plan rests on that is told by them
    resident: bool = True  # whether kernels run in this process, and may leave something behind in it

    @property
    def evidence(self) -> str:
        """The evidence for a plan that outputs show on this backend, in words: never a device that is absent."""
        computes = self.device == "cpu" and not self.predicts  # by instructions of this processor
        return BITS_OF_INSTRUCTIONS if computes and emulated() else self.bits

    @property
    def options(self) -> tuple[str, ...]:
        """The command-line options that configure it, other than its name."""
        return ()

    def notice(self) -> str | None:
        """Return a line about it for the first lines of a run; None: nothing."""
        return None

    def assuming(self, card: str) -> "Backend":
        """Return a backend that computes as an absent card would; itself, where the device is present.

        ValueError: nothing is known of such a card; one line with those that are.
        """
        del card
        return self

    def worker_limit(self) -> int | None:
        """Return how many workers the device carries; None: as many as the host's cores and memory do."""
        return None

    def worker_environment(self, worker: int) -> Mapping[str, str]:
        """Return additions to a worker's environment, by which it sees one of several devices.

        Workers are numbered from 0; one that replaces another has a new number.
        """
        del worker
        return {}

    def set_up(self) -> None:
        """Take a device for this process, which is about to use it. Called after `unavailable`, perhaps repeatedly."""

    def describe(self) -> dict[str, Any]:
        """Return properties of the device and its software that can change bits of a result, by name."""
        return {}

    def poisoned(self) -> bool:
        """Return whether an error has left the device unusable for this process."""
        return False

    def kernels(self) -> tuple[Kernel, ...]:
        """Return the kernels of a default run, in the order of the table."""
        composed = DEFAULT_ROSTER if self.composed else ()
        return (*(composed_kernel(name) for name in composed), *self.vendor_kernels())

    def kernel(self, name: str) -> Kernel:
        """Return the kernel called `name`: the device's own, or any composed one; ValueError lists what it has."""
        vendor = {kernel.name: kernel for kernel in self.vendor_kernels()}
        if name not in vendor and not self.composed:
            raise ValueError(f"unknown kernel {name!r}: {self.name} has {', '.join(vendor)}")
        is_vendors = name in vendor and not vendor[name].composed  # a composed one chosen by name is for any input
        return vendor[name] if is_vendors else composed_kernel(name)

    def repeats(self, kernel: Kernel) -> bool:
        """Return whether a second run on the same input is certain to have the same bits, so that none is needed."""
        del kernel
        return self.predicts

    def fingerprint(self) -> Mapping[str, str | float]:
        """Return measured properties of the device's arithmetic, for the record of a run."""
        return fingerprint(self.arithmetic, self.device)

    def plan_changes(self) -> tuple[str, ...]:
        """Return what plans must say of the device's 16-bit products, as `tiebreak.backends.probes.plan_changes`."""
        return () if self.predicts else plan_changes(self.arithmetic, self.device)

    def in_use(self) -> AbstractContextManager[Collection[str]]:
        """Return the context to run kernels in; it yields what is assumed of a device that is absent."""
        return nullcontext(())

    def run(self, kernel: Kernel, inputs: AttentionInputs, *, gradients: bool) -> AttentionOutput:
        """Run a kernel on the device and bring its output back to the host; raises whatever the kernel raises."""
        with self.in_use() as assumed:
            output = kernel.compute(to_device(inputs, self.device), self.arithmetic, gradients)
            return replace(to_device(output, "cpu"), assumed="; ".join(sorted(assumed)))


_Moved = TypeVar("_Moved", AttentionInputs, AttentionOutput, Gradients)


def to_device(value: _Moved, device: str) -> _Moved:
    """Return the same dataclass with every tensor in it on `device`."""
    moved, there = dict[str, Any](), torch.device(device)
    for name, part in vars(value).items():
        if isinstance(part, torch.Tensor) and part.device != there:
            moved[name] = part.to(there)
        elif isinstance(part, Gradients):
            moved[name] = to_device(part, device)
    return replace(value, **moved) if moved else value


EMULATION = Backend(
    "emulation",
    "every rounding in software, as the plan declares it",
    "cpu",
    EmulatedArithmetic(),
    lambda: None,
    eight_bit_kernels,
    predicts=True,
    pace="emulated",
    bits="bits of the emulation",
)
CPU = Backend(
    "cpu",
    "this CPU as it is: native torch operations and PyTorch's own kernels",
    "cpu",
    TorchArithmetic(),
    lambda: None,
    lambda: (cpu_sdpa_flash(), sdpa_math()),
)
