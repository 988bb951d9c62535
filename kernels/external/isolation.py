"""What a kernel under test may do to its process: the state that it changes is put back, its CPU time is limited.

A kernel that turns a switch of torch's would else take other kernels' cells with it, and the suite's own arithmetic.
"""

import faulthandler
import importlib
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, TextIO

import numpy as np
import torch

_IMPORTED_BY_AUTOGRAD = "torch.fx.experimental.symbolic_shapes"  # with its first dO: seconds that are not a kernel's


def _flushes() -> bool:
    """Whether this thread takes subnormals for zero; torch does not tell."""
    return bool((torch.full((1,), 2.0**-140, dtype=torch.float32, device="cpu") * 1.0).item() == 0.0)


def _put_device(before: torch.device) -> None:
    torch.set_default_device(None if before.type == "cpu" else before)


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
_CUDA = torch.backends.cuda
_PRECISION, _ENVIRONMENT = "torch's precision of fp32 products", "the environment"
# As messages call each, how it is got, and how it is put back.
_SWITCHES: tuple[tuple[str, Callable[[], Any], Callable[[Any], Any]], ...] = (
    # First: what is put back afterwards is computed with it.
    ("torch's flushing of subnormals", _flushes, torch.set_flush_denormal),
    ("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
    ("torch's default device", torch.get_default_device, _put_device),
    ("torch's number of threads", torch.get_num_threads, torch.set_num_threads),
    ("torch's grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    ("torch's autocast", partial(torch.is_autocast_enabled, "cpu"), partial(torch.set_autocast_enabled, "cpu")),
    ("torch's autocast", partial(torch.get_autocast_dtype, "cpu"), partial(torch.set_autocast_dtype, "cpu")),
    ("torch's deterministic algorithms", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (_PRECISION, _matmul_precision, torch.set_float32_matmul_precision),
    *((_PRECISION, *_fp32_precision(place)) for place in _NEWER),
    *(
        ("torch's choice of attention kernels", getattr(_CUDA, f"{name}_enabled"), getattr(_CUDA, f"enable_{name}"))
        for name in ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")
    ),
    (_ENVIRONMENT, lambda: dict(os.environ), _put_environment),
    ("the working directory", os.getcwd, os.chdir),
)


@contextmanager
def kept_state() -> Iterator[list[str]]:
    """Put the process back as it was when the block ends, however it ends; the list then names what had changed."""
    before = [(name, get, put, get()) for name, get, put in _SWITCHES]
    changed: list[str] = []
    try:
        yield changed
    finally:
        for name, get, put, old in before:
            now = get()
            if now == old or old is None:
                continue
            put(old)
            # Libraries set variables of their own as they are imported.
            grown = name == _ENVIRONMENT and old.items() <= now.items()
            if not grown and name not in changed:
                changed.append(name)


@contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Global random numbers from a seed, so that a kernel that uses them gives the same whatever ran before it."""
    with ExitStack() as undo:
        undo.callback(torch.set_rng_state, torch.get_rng_state())
        undo.callback(np.random.set_state, np.random.get_state())
        undo.callback(random.setstate, random.getstate())
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        yield


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
