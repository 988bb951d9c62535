"""Backends: a device, the arithmetic on it, and the kernels it runs."""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.backends.platform import emulated
from tiebreak.backends.probes import fingerprint
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
    """Where kernels run, and every answer about the device: all who ask know no device's name."""

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

    @property
    def evidence(self) -> str:
        """What a plan rests on that outputs tell here, in words: never a device that is not there."""
        computes = self.device == "cpu" and not self.predicts  # by instructions of this processor
        return BITS_OF_INSTRUCTIONS if computes and emulated() else self.bits

    @property
    def options(self) -> tuple[str, ...]:
        """Words of the command line that configure it, beside its name."""
        return ()

    def notice(self) -> str | None:
        """What the first lines of a run state about it; None: nothing."""
        return None

    def assuming(self, card: str) -> "Backend":
        """Compute as a card would that is not here; itself, where the device that is here computes.

        Raises:
            ValueError: nothing is known of such a card; one line with those that are.
        """
        del card
        return self

    def worker_limit(self) -> int | None:
        """How many workers the device carries, where the backend can run; None: what the host's cores and memory do."""
        return None

    def worker_environment(self, worker: int) -> Mapping[str, str]:
        """What to add to a worker's environment before it starts, so that it sees one of several devices.

        Workers' numbers are from 0 on; one that replaces another has a number of its own.
        """
        del worker
        return {}

    def set_up(self) -> None:
        """Take a device for this process, which is about to use it. Called after `unavailable`, perhaps repeatedly."""

    def describe(self) -> dict[str, Any]:
        """What of the device and its software can change the bits of a result, by its name among a run's platform."""
        return {}

    def poisoned(self) -> bool:
        """Whether an error has left the device unusable for this process."""
        return False

    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels of a default run, in the order of the table."""
        composed = DEFAULT_ROSTER if self.composed else ()
        return (*(composed_kernel(name) for name in composed), *self.vendor_kernels())

    def kernel(self, name: str) -> Kernel:
        """The kernel called `name`: one of the device's own, or any composed one.

        Raises:
            ValueError: the backend has no such kernel; the message lists what it has.
        """
        vendor = {kernel.name: kernel for kernel in self.vendor_kernels()}
        if name not in vendor and not self.composed:
            raise ValueError(f"unknown kernel {name!r}: {self.name} has {', '.join(vendor)}")
        own = name in vendor and not vendor[name].composed  # a composed one chosen by name is for any input
        return vendor[name] if own else composed_kernel(name)

    def repeats(self, kernel: Kernel) -> bool:
        """Whether a second run on the same input could only have the same bits, so that a cell need not make one."""
        del kernel
        return self.predicts

    def fingerprint(self) -> Mapping[str, str | float]:
        """What the device's arithmetic does, measured, for the record of a run."""
        return fingerprint(self.arithmetic, self.device)

    def in_use(self) -> AbstractContextManager[Collection[str]]:
        """What kernels have to be run within; it yields what is assumed for them of a device that is not there."""
        return nullcontext(())

    def run(self, kernel: Kernel, inputs: AttentionInputs, *, gradients: bool) -> AttentionOutput:
        """Run a kernel on the device and bring its output back to the host.

        Raises:
            Exception: whatever the kernel raises.
        """
        with self.in_use() as assumed:
            output = kernel.compute(to_device(inputs, self.device), self.arithmetic, gradients)
            return replace(to_device(output, "cpu"), assumed="; ".join(sorted(assumed)))


_Moved = TypeVar("_Moved", AttentionInputs, AttentionOutput, Gradients)


def to_device(value: _Moved, device: str) -> _Moved:
    """The same dataclass with every tensor in it on `device`."""
    moved: dict[str, Any] = {}
    for each in fields(value):
        part = getattr(value, each.name)
        if isinstance(part, torch.Tensor):
            moved[each.name] = part.to(device)
        elif isinstance(part, Gradients):
            moved[each.name] = to_device(part, device)
    return replace(value, **moved)


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
