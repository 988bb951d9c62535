"""What a kernel under test may do to its process: the state that it changes is put back, its CPU time is limited.

A kernel that turns a switch of torch's would else take other kernels' cells with it, and the suite's own arithmetic.
"""

import faulthandler
import importlib
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

import numpy as np
import torch

_IMPORTED_BY_AUTOGRAD = "torch.fx.experimental.symbolic_shapes"  # with its first dO: seconds that are not a kernel's


@dataclass(frozen=True)
class _Switch:
    name: str  # as messages call it
    parts: Sequence[tuple[Callable[[], Any], Callable[[Any], Any]]]  # each as it is got and as it is put
    may_grow: bool = False  # whether what is added to it is taken back silently


def _flushes() -> bool:
    """Whether this thread takes subnormals for zero; torch does not tell."""
    return bool((torch.full((1,), 2.0**-140, dtype=torch.float32, device="cpu") * 1.0).item() == 0.0)


def _put_environment(before: dict[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _matmul_precision() -> str | None:
    """The older setting, which torch refuses to tell once a newer one has been touched."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _fp32_precision(path: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """The newer setting, in several places of their own from torch 2.9 on; some are not there before."""

    def place() -> Any:
        owner: Any = torch
        for name in path.split("."):
            owner = getattr(owner, name, None)
        return owner

    return lambda: getattr(place(), "fp32_precision", None), lambda before: setattr(place(), "fp32_precision", before)


_NEWER = ("backends", "backends.mkldnn", "backends.mkldnn.matmul", "backends.cuda.matmul", "backends.cudnn")
_SDPA = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")
_SWITCHES = (
    # First: what is put back afterwards is computed with it.
    _Switch("torch's flushing of subnormals", [(_flushes, torch.set_flush_denormal)]),
    _Switch("torch's default dtype", [(torch.get_default_dtype, torch.set_default_dtype)]),
    _Switch(
        "torch's default device",
        [(torch.get_default_device, lambda old: torch.set_default_device(None if old.type == "cpu" else old))],
    ),
    _Switch("torch's number of threads", [(torch.get_num_threads, torch.set_num_threads)]),
    _Switch("torch's grad mode", [(torch.is_grad_enabled, torch.set_grad_enabled)]),
    _Switch(
        "torch's autocast",
        [
            (partial(torch.is_autocast_enabled, "cpu"), partial(torch.set_autocast_enabled, "cpu")),
            (partial(torch.get_autocast_dtype, "cpu"), partial(torch.set_autocast_dtype, "cpu")),
        ],
    ),
    _Switch(
        "torch's deterministic algorithms",
        [(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode)],
    ),
    _Switch(
        "torch's precision of fp32 products",
        [(_matmul_precision, torch.set_float32_matmul_precision), *map(_fp32_precision, _NEWER)],
    ),
    _Switch(
        "torch's choice of attention kernels",
        [(getattr(torch.backends.cuda, f"{n}_enabled"), getattr(torch.backends.cuda, f"enable_{n}")) for n in _SDPA],
    ),
    # Libraries set variables of their own as they are imported.
    _Switch("the environment", [(lambda: dict(os.environ), _put_environment)], may_grow=True),
    _Switch("the working directory", [(os.getcwd, os.chdir)]),
)


@contextmanager
def kept_state() -> Iterator[list[str]]:
    """Put the process back as it was when the block ends, however it ends.

    Yields:
        A list that then holds the names of what the block had changed.
    """
    before = [(switch, get, put, get()) for switch in _SWITCHES for get, put in switch.parts]
    changed: list[str] = []
    try:
        yield changed
    finally:
        for switch, get, put, old in before:
            now = get()
            if now == old or old is None:
                continue
            put(old)
            grown = switch.may_grow and old.items() <= now.items()
            if not grown and switch.name not in changed:
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
