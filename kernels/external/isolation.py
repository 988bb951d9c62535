"""What a kernel under test may do to its process: the state that it changes is put back, its CPU time is limited.

A kernel that turns a switch of torch's would else take other kernels' cells with it, and the suite's own arithmetic.
"""

import faulthandler
import importlib
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TextIO

import numpy as np
import torch

_SDPA = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")
_IMPORTED_BY_AUTOGRAD = "torch.fx.experimental.symbolic_shapes"  # with its first dO: seconds that are not a kernel's


@dataclass(frozen=True)
class _Switch:
    """One part of the state."""

    name: str  # as messages call it
    get: Callable[[], Any]
    put: Callable[[Any], Any]
    harmless: Callable[[Any, Any], bool] = lambda before, now: before == now  # whether a change is put back silently


def _flushes() -> bool:
    """Whether this thread takes subnormals for zero; torch does not tell."""
    return bool((torch.full((1,), 2.0**-140, dtype=torch.float32, device="cpu") * 1.0).item() == 0.0)


def _put_environment(before: dict[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _put_autocast(before: tuple[bool, torch.dtype]) -> None:
    torch.set_autocast_enabled("cpu", before[0])
    torch.set_autocast_dtype("cpu", before[1])


def _precisions() -> tuple[Any, ...]:
    """Where torch, from 2.9 on, keeps how precise products in fp32 are, each on its own; before, some are not there."""
    backends = torch.backends
    mkldnn, cuda = backends.mkldnn, backends.cuda.matmul
    return backends, mkldnn, getattr(mkldnn, "matmul", None), cuda, backends.cudnn


def _precision() -> tuple[str | None, ...]:
    """The older setting, which torch refuses to tell once a newer one has been touched, then the newer ones."""
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:
        older = None
    return older, *(getattr(place, "fp32_precision", None) for place in _precisions())


def _put_precision(before: tuple[str | None, ...]) -> None:
    older, *newer = before
    if older is not None:
        torch.set_float32_matmul_precision(older)
    for place, value in zip(_precisions(), newer, strict=True):
        if value is not None and place.fp32_precision != value:
            place.fp32_precision = value


def _put_sdpa(before: tuple[bool, ...]) -> None:
    for name, enabled in zip(_SDPA, before, strict=True):
        getattr(torch.backends.cuda, f"enable_{name}")(enabled)


_SWITCHES = (
    # First: what is put back afterwards is computed with it.
    _Switch("torch's flushing of subnormals", _flushes, torch.set_flush_denormal),
    _Switch("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
    _Switch(
        "torch's default device",
        torch.get_default_device,
        lambda before: torch.set_default_device(None if before.type == "cpu" else before),
    ),
    _Switch("torch's number of threads", torch.get_num_threads, torch.set_num_threads),
    _Switch("torch's grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    _Switch(
        "torch's autocast",
        lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        _put_autocast,
    ),
    _Switch("torch's deterministic algorithms", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    _Switch("torch's precision of fp32 products", _precision, _put_precision),
    _Switch(
        "torch's choice of attention kernels",
        lambda: tuple(getattr(torch.backends.cuda, f"{name}_enabled")() for name in _SDPA),
        _put_sdpa,
    ),
    # Libraries set variables of their own as they are imported.
    _Switch("the environment", lambda: dict(os.environ), _put_environment, lambda old, new: old.items() <= new.items()),
    _Switch("the working directory", os.getcwd, os.chdir),
)


@contextmanager
def kept_state() -> Iterator[list[str]]:
    """Put the process back as it was when the block ends, however it ends.

    Yields:
        A list that then holds the names of what the block had changed.
    """
    before = [(switch, switch.get()) for switch in _SWITCHES]
    changed: list[str] = []
    try:
        yield changed
    finally:
        for switch, value in before:
            now = switch.get()
            if now != value:
                switch.put(value)
                if not switch.harmless(value, now):
                    changed.append(switch.name)


@contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Global random numbers from a seed, so that a kernel that uses them gives the same whatever ran before it."""
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


class Clock:
    """Counts the CPU time of this process while a user's code runs, not while the suite does.

    A signal of the kernel's ends what passes the limit: a user's code may hold Python's lock for ever.
    """

    def __init__(self) -> None:
        self.left: float | None = None  # seconds of CPU time until the limit; None: there is none
        self._running = False

    @contextmanager
    def limited(self, seconds: float, file: TextIO) -> Iterator[None]:
        """Give all calls within so much CPU time together; where it is spent, dump all stacks and end the process."""
        with suppress(ImportError):
            importlib.import_module(_IMPORTED_BY_AUTOGRAD)
        faulthandler.register(signal.SIGPROF, file=file, chain=True)
        self.left = seconds
        try:
            yield
        finally:
            self.left = None
            faulthandler.unregister(signal.SIGPROF)

    @contextmanager
    def running(self) -> Iterator[None]:
        """A user's code runs within, and perhaps more of it within that."""
        if self.left is None or self._running:
            yield
            return
        self._running = True
        signal.setitimer(signal.ITIMER_PROF, self.left)
        try:
            yield
        finally:
            self.left = max(signal.setitimer(signal.ITIMER_PROF, 0.0)[0], 1e-3)
            self._running = False


CLOCK = Clock()  # of this process
