"""Runs the README's backend on a torch device that nobody has, and on the CPU; prints what came of both as JSON.

The device is torch's PrivateUse1: the CPU computes, but as on a GPU a tensor on the host does not mix with one on the
device, and as on an Apple GPU and an NPU there is no float64. A process has one such device, so this is a script.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from msgspec import to_builtins
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tiebreak.backends.backend import CPU, Backend
from tiebreak.cases.gpt2.snippets import SNIPPETS
from tiebreak.cases.gpt2.variants import VARIANTS
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.kernels.formats import BF16
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.experiments.call import Call
from tiebreak.matrix.experiments.training import TrainingRun, trained_kernel
from tiebreak.matrix.run import run_cell
from tiebreak.matrix.settings import Settings
from tiebreak.matrix.workbench import Workbench

NAME = "stand_in"
HOST = torch.device("cpu")
STEPS = 3  # of a training run


#: What torch asks a device's own module, torch.cuda and the like.
MODULE = SimpleNamespace(
    is_initialized=lambda: True,
    is_available=lambda: True,
    device_count=lambda: 1,
    current_device=lambda: 0,
    get_amp_supported_dtype=lambda: [torch.bfloat16],
)


class OnDevice(Tensor):
    """A tensor on the device: its numbers lie in another one, on the host, which only the device reads."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> "OnDevice":
        if raw.dtype is torch.float64:
            raise TypeError(f"{NAME} has no float64")
        made: OnDevice = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, 0),
        )
        made.raw = raw
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        return compute(op, *args, **(kwargs or {}))


def compute(op: Any, *args: Any, **kwargs: Any) -> Any:
    """One of torch's operations on the device."""
    name, tensors = op._schema.name, pytree.tree_leaves((args, kwargs))
    foreign = [x for x in tensors if isinstance(x, Tensor) and not isinstance(x, OnDevice) and x.dim() > 0]
    if foreign and name != "aten::copy_":
        raise RuntimeError(f"{name}: a tensor on the host among those on {NAME}")
    on_host = pytree.tree_map(_on_host, (args, kwargs))
    result = op(*on_host[0], **on_host[1])
    leaves = {
        "aten::_to_copy": kwargs.get("device", torch.device(NAME)) == HOST,
        "aten::copy_": bool(args) and not isinstance(args[0], OnDevice),
    }
    if leaves.get(name, False):
        return result
    wrapped = {id(x.raw): x for x in tensors if isinstance(x, OnDevice)}  # what is changed in place stays who it is

    def on_device(x: object) -> object:
        if not isinstance(x, Tensor):
            return x
        return wrapped[id(x)] if id(x) in wrapped else OnDevice(x)

    return pytree.tree_map(on_device, result)


def _on_host(x: object) -> object:
    if isinstance(x, OnDevice):
        return x.raw
    return HOST if isinstance(x, torch.device) else x


def start() -> torch.library.Library:
    """Put the device into torch, for as long as what is returned lives."""
    _setup_privateuseone_for_python_backend(NAME, MODULE)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    library = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    library.fallback(compute, "PrivateUse1")  # type: ignore[no-untyped-call]
    return library


def experiments(backend: Backend) -> dict[str, Any]:
    """One experiment of every kind: its outcome and what it measured."""
    bench = Workbench(Settings(seed=1, heads=16))
    case = next(case for case in SCRIPTED if case.name == "random_causal")
    call = run_cell(Cell(backend, backend.kernel("flash@paper"), Call(case), BF16), bench)
    snippet = replace(SNIPPETS["train_drift"], steps=STEPS)
    kernel = trained_kernel(VARIANTS["fair@train"])
    training = run_cell(Cell(backend, kernel, TrainingRun(snippet), BF16), bench)
    assert call.measures, call.reasons
    assert training.measures, training.reasons
    return {
        "call": [call.outcome, call.digest, to_builtins(call.measures)],
        "losses": training.digest,
        "monitors": dict(training.measures),
        "fingerprint": dict(backend.fingerprint()),
    }


def main(example: Path) -> None:
    """Print what the backend called MPS in a file does on the stand-in, and what it does on the CPU."""
    library = start()
    names: dict[str, Any] = {}
    exec(example.read_text(encoding="utf-8"), names)
    mps = replace(names["MPS"], unavailable=lambda: None)
    refused = []
    operations: tuple[Callable[[Tensor], Tensor], ...] = (lambda x: x.double(), lambda x: x + torch.ones(2))
    for operation in operations:
        try:
            operation(torch.ones(2).to(NAME))
        except (TypeError, RuntimeError) as error:
            refused.append(str(error))
    results = {"refused": refused, "device": experiments(replace(mps, device=NAME)), "cpu": experiments(CPU)}
    print(json.dumps(results))
    del library


if __name__ == "__main__":
    main(Path(sys.argv[1]))
