"""Any device of torch as it is, `torch:DEVICE`; the backends `cuda` and `ascend` add what only they have.

Written after PyTorch's documentation. The only such device that has run here is written in Python, for a test.
"""

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib.metadata import entry_points
from typing import Any

import torch

from tiebreak.backends.backend import Backend
from tiebreak.backends.platform import GIB
from tiebreak.backends.probes import arithmetic_probes, fingerprint
from tiebreak.backends.torch_arithmetic import TorchArithmetic
from tiebreak.kernels.flex import flex_elsewhere
from tiebreak.kernels.kernel import first_line
from tiebreak.kernels.sdpa import registered_sdpa_kernels

PREFIX = "torch:"
WORKER_GIB = 4.0  # of a device's memory, for one worker: an estimate, its libraries and the widest case's scores


class DeviceError(RuntimeError):
    """The device can't run the kernel; the message has the remedy, in one line."""


@contextmanager
def remedies(device: str, has_fp64: bool) -> Iterator[None]:
    """Turn the errors of a device that have a remedy into one line with it; DeviceError: no memory, or no float64."""
    try:
        yield
    except (RuntimeError, TypeError) as error:  # the latter is MPS's
        text = str(error).lower()
        if "out of memory" in text:
            reason = f"{device} out of memory: fewer workers (-n) or --heads; {first_line(error)}"
        elif not has_fp64 and ("dt_double" in text or "float64" in text):
            reason = f"{device} has no float64, and the kernel asks for it: compute in float32"
        else:
            raise
        raise DeviceError(reason) from error


def answers(probes: Mapping[str, Callable[[], Mapping[str, str | float]]]) -> dict[str, str | float]:
    """Return the results of all probes; for one that fails, its error under the probe's name."""
    results: dict[str, str | float] = {}
    for name, probe in probes.items():
        try:
            results |= probe()
        except Exception as error:  # one operation that a device lacks must not cost the records of a whole run
            results[name] = f"{type(error).__name__}: {first_line(error)}"
    return results


class TorchDevice(Backend):
    """A device that torch, or a package that extends it, has functions for."""

    def module(self) -> Any:
        """Return the module of those functions."""
        return torch.get_device_module(self.device)

    def count(self) -> int:
        """Return how many such devices this process sees."""
        return int(self.module().device_count())

    def synchronize(self) -> None:
        """Wait for all work of this process; its errors are raised here."""
        # Not by torch.accelerator, which raises where a device can't wait. What is read has been computed.
        wait = getattr(self.module(), "synchronize", None)
        wait() if wait else torch.zeros(1, device=self.device).cpu()

    def worker_limit(self) -> int:
        """Return how many workers the free memory holds where they are spread evenly; one a device if it is unknown."""
        try:
            ask = getattr(self.module(), "mem_get_info", None) or torch.accelerator.get_memory_info  # from 2.9 on
            free = [ask(at)[0] for at in range(self.count())]
        except Exception:  # whatever a device raises that does not know
            return max(1, self.count())
        return max(1, len(free) * int(min(free, default=0) / (WORKER_GIB * GIB)))

    def set_up(self) -> None:
        """Take a device by the worker's number, where there are several; a process without workers has torch's."""
        worker = re.fullmatch(r"gw(\d+)", os.environ.get("PYTEST_XDIST_WORKER", ""))
        if worker and self.count() > 1:
            self.module().set_device(int(worker[1]) % self.count())

    def describe(self) -> dict[str, Any]:
        """Return the devices' names, each once, and their driver's version where torch tells it."""
        return answers({"device": self._names})

    def _names(self) -> Mapping[str, str]:
        module, devices = self.module(), range(self.count())
        alone = getattr(getattr(torch.backends, self.device, None), "get_name", lambda: self.device)  # as MPS is
        names = map(module.get_device_name, devices) if hasattr(module, "get_device_name") else [alone()]
        properties = map(getattr(module, "get_device_properties", lambda at: None), devices)
        drivers = sorted({str(each.driver_version) for each in properties if hasattr(each, "driver_version")})
        return {"device": ", ".join(dict.fromkeys(names)), **({"driver": ", ".join(drivers)} if drivers else {})}

    def poisoned(self) -> bool:
        """Return whether waiting for the device fails twice.

        After an error within a kernel, such as an illegal memory access, every call fails. A pending error, or a lack
        of memory, is raised once.
        """
        if not getattr(self.module(), "is_initialized", lambda: True)():
            return False
        for _ in range(2):
            with suppress(RuntimeError):
                self.synchronize()
                return False
        return True

    def fingerprint(self) -> Mapping[str, str | float]:
        """Return the answers of all probes; a probe that the device can't run is answered by its error."""
        probes = {"fingerprint failed": fingerprint, "probes of arithmetic failed": arithmetic_probes}
        return answers({name: partial(probe, self.arithmetic, self.device) for name, probe in probes.items()})

    @contextmanager
    def in_use(self) -> Iterator[Collection[str]]:
        """Run a kernel to its end: work is queued, and an error of it shall be this kernel's."""
        with remedies(self.device, self.arithmetic.has_fp64):
            yield ()
            self.synchronize()


def torch_device(name: str) -> TorchDevice:
    """Return the backend called torch:DEVICE, whether or not there is such a device."""
    device = name.removeprefix(PREFIX)
    return TorchDevice(
        name,
        f"torch's device {device} as it is: eager torch, and what PyTorch has for it",
        device,
        TorchArithmetic(has_fp64=False),  # nothing tells of every device that it has
        partial(_unavailable, device),
        lambda: () if _unavailable(device) else (*registered_sdpa_kernels(device), flex_elsewhere()),
        bits=f"bits on this {device}",
    )


def torch_devices(words: Iterable[str]) -> dict[str, Backend]:
    """Return the backends that a list names as torch:DEVICE; a glob means the accelerator that torch has here.

    ValueError: torch knows no such device, and no installed package brings one; one line.
    """
    devices: dict[str, Backend] = {}
    for word in (word for word in words if word.startswith(PREFIX)):
        device = word.removeprefix(PREFIX)
        try:
            _load_packages()
            accelerator = torch.accelerator.current_accelerator() if {*"*?"} & {*device} else torch.device(device)
        except RuntimeError as error:
            raise ValueError(f"unknown backend {word!r}: {first_line(error)}") from error
        if accelerator is not None and accelerator.index is not None:
            raise ValueError(f"unknown backend {word!r}: workers take turns: name it {PREFIX}{accelerator.type}")
        if accelerator is not None and accelerator.type not in ("cuda", "npu"):  # which have their own backends
            devices[PREFIX + accelerator.type] = torch_device(PREFIX + accelerator.type)
    return devices


@cache
def _load_packages() -> None:
    """Load the packages that bring devices, as torch itself would if the suite did not keep it from that."""
    for package in entry_points(group="torch.backends"):
        try:
            if package.name != "torch_npu":  # of the backend ascend; it changes torch in many places
                package.load()()
        except Exception as error:  # whatever a package raises
            raise RuntimeError(f"{package.value} can't be loaded: {first_line(error)}") from error


def _unavailable(device: str) -> str | None:
    """Return None, or why no such device can be used here, in one line."""
    try:
        count = torch.get_device_module(device).device_count()
    except Exception as error:  # whatever a device raises that is not there
        return f"PyTorch {torch.__version__} can't use {device}: {first_line(error)}"
    return None if count else f"PyTorch {torch.__version__} finds no {device}"
