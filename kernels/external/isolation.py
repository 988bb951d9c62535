"""Protection of the process from a kernel under test: changed state is restored, its CPU time is limited.

A kernel that turns a switch of torch's would else take other kernels' cells with it, and the suite's own arithmetic.
"""

import faulthandler
import importlib
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial, reduce
from typing import Any, TextIO

import numpy as np
import torch
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

_TORCH: Any = torch
_C: Any = torch._C
_DISPATCH_MODE: Any = TorchDispatchMode
_IMPORTED_BY_AUTOGRAD = "torch.fx.experimental.symbolic_shapes"  # with its first dO: seconds that are not a kernel's


def _has_flushing() -> bool:
    """Return whether this thread treats subnormals as zero; torch does not say."""
    return bool((torch.full((1,), 2.0**-140, dtype=torch.float32, device="cpu") * 1.0).item() == 0.0)


def _modes(kind: str) -> list[Any]:
    """Return the function or dispatch modes that are entered, the innermost last."""
    return [getattr(_C, f"_get_{kind}_stack_at")(at) for at in range(getattr(_C, f"_len_torch_{kind}_stack")())]


def _function_modes(*, devices: bool = False) -> list[Any]:
    """Return the modes of functions, without default devices, which torch keeps among them; or these alone."""
    return [mode for mode in _modes("function") if isinstance(mode, DeviceContext) == devices]


def _stack(modes: list[Any]) -> None:
    while _C._len_torch_function_stack():
        _C._pop_torch_function_stack()
    for mode in modes:
        _C._push_on_torch_function_stack(mode)


def _put_function_modes(before: list[Any]) -> None:
    _stack([*_function_modes(devices=True), *before])


def _put_dispatch_modes(before: list[Any]) -> None:
    for mode in reversed(_modes("dispatch")):
        _DISPATCH_MODE.__exit__(mode, None, None, None)  # not what a kernel's own class has in its place
    for mode in before:
        _DISPATCH_MODE.__enter__(mode)


def _put_device(before: torch.device) -> None:
    modes = _function_modes()
    _stack([])  # torch looks for its own at the bottom, and `with torch.device(...)` puts another on top
    torch.set_default_device(None)
    _stack(modes)
    if before.type != "cpu":
        torch.set_default_device(before)


def _put_inference_mode(before: bool) -> None:
    _GUARDS.append(_C._InferenceMode(before))  # which holds as long as it lives


def _autocasts() -> int:
    """Return the depth of nested autocasts; while there is one, torch keeps casts of weights."""
    entered: int = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return entered


def _put_autocasts(before: int) -> None:
    for _ in range(_autocasts() - before):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()


def _saving_hooks() -> tuple[Any, ...]:
    top = getattr(_C._autograd, "_top_saved_tensors_default_hooks", None)  # from torch 2.8 on
    return (top(False) if top else None) or ()


def _put_saving_hooks(before: tuple[Any, ...]) -> None:
    while _saving_hooks() not in (before, ()):
        _C._autograd._pop_saved_tensors_default_hooks()
    if before and not _saving_hooks():
        _C._autograd._push_saved_tensors_default_hooks(*before)


def _put_environment(before: dict[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _matmul_precision() -> str | None:
    """Return the older setting, which torch refuses to report once a newer one has been used."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _setting(path: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return the getter and setter of an attribute; not every torch has each."""
    place, _, name = path.rpartition(".")

    def owner() -> Any:
        return reduce(lambda owner, word: getattr(owner, word, None), place.split("."), _TORCH)

    return lambda: getattr(owner(), name, None), lambda before: setattr(owner(), name, before)


_GUARDS = list[Any]()
_CUDA = torch.backends.cuda
_DEVICES = ("cpu", "cuda", "privateuseone")  # the last is what a plug-in brings, such as an NPU
_AUTOCAST, _ATTENTION, _ENVIRONMENT = "torch's autocast", "torch's choice of attention kernels", "the environment"
_PRECISION, _SUMS = "torch's precision of fp32 products", "torch's sums of 16-bit products"
_DETERMINISTIC, _ONEDNN = "torch's deterministic algorithms", "torch's use of oneDNN"
_SETTINGS = {
    "utils.deterministic.fill_uninitialized_memory": _DETERMINISTIC,
    "backends.mkldnn.enabled": _ONEDNN,
    "backends.mkldnn.deterministic": _ONEDNN,
    # In several separate places from torch 2.9 on.
    "backends.fp32_precision": _PRECISION,
    "backends.mkldnn.fp32_precision": _PRECISION,
    "backends.mkldnn.matmul.fp32_precision": _PRECISION,
    "backends.cuda.matmul.fp32_precision": _PRECISION,
    "backends.cudnn.fp32_precision": _PRECISION,
    "backends.cuda.matmul.allow_fp16_accumulation": _SUMS,
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction": _SUMS,
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction": _SUMS,
}
# The name of each in messages, its getter and its setter.
_SWITCHES: tuple[tuple[str, Callable[[], Any], Callable[[Any], Any]], ...] = (
    # First: all others are got and put back within them, and what is put back afterwards is computed with the next.
    ("a function mode of torch's", _function_modes, _put_function_modes),
    ("a dispatch mode of torch's", partial(_modes, "dispatch"), _put_dispatch_modes),
    ("torch's flushing of subnormals", _has_flushing, torch.set_flush_denormal),
    ("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
    ("torch's default device", torch.get_default_device, _put_device),
    ("torch's number of threads", torch.get_num_threads, torch.set_num_threads),
    ("torch's inference mode", torch.is_inference_mode_enabled, _put_inference_mode),  # which sets the grad mode
    ("torch's grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    ("torch's hooks of saved tensors", _saving_hooks, _put_saving_hooks),
    ("torch's detection of anomalies", torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    (_AUTOCAST, _autocasts, _put_autocasts),
    *(
        (_AUTOCAST, partial(getattr(torch, get), device), partial(getattr(torch, put), device))
        for device in _DEVICES
        for get, put in (("is_autocast_enabled", "set_autocast_enabled"), ("get_autocast_dtype", "set_autocast_dtype"))
    ),
    (_DETERMINISTIC, torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (_PRECISION, _matmul_precision, torch.set_float32_matmul_precision),
    *((name, *_setting(path)) for path, name in _SETTINGS.items()),
    *(
        (_ATTENTION, getattr(_CUDA, f"{name}_enabled"), getattr(_CUDA, f"enable_{name}"))
        for name in ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")
    ),
    (_ATTENTION, _CUDA.fp16_bf16_reduction_math_sdp_allowed, _CUDA.allow_fp16_bf16_reduction_math_sdp),
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
            # Libraries set their own variables as they are imported.
            grown = name == _ENVIRONMENT and old.items() <= now.items()
            if not grown and name not in changed:
                changed.append(name)


@contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Seed the global random numbers, so that a kernel that uses them gives the same whatever ran before it."""
    with ExitStack() as undo:
        undo.callback(torch.set_rng_state, torch.get_rng_state())
        undo.callback(np.random.set_state, np.random.get_state())
        undo.callback(random.setstate, random.getstate())
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        yield


class Clock:
    """A counter of this process's CPU time that runs only while a user's code does.

    Beyond the limit the kernel's signal ends the process: a user's code may hold Python's lock for ever.
    """

    def __init__(self) -> None:
        self.left: float | None = None  # seconds of CPU time until the limit; None: there is none
        self._running = False

    @contextmanager
    def limited(self, seconds: float, file: TextIO) -> Iterator[None]:
        """Limit all calls together to this CPU time; once it is spent, dump all stacks and end the process."""
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
        """Count the time of a user's code within, which may contain more of it."""
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
