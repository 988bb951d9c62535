"""A torch device written in Python: each operation is carried out by the CPU, counted, and refused in float64.

It is an out-of-tree device as PyTorch's documentation has them (PrivateUse1). torch keeps it for as long as a process
lives, so `test_torch_device.py` installs it for processes of its own.
"""

import atexit
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

NAME, WRITTEN_TO = "abacus", "ABACUS"  # the latter: the variable that names a file for the counters
CALLS: Counter[str] = Counter()
_MOVES = ("aten::copy_", "aten::_to_copy")  # which alone see tensors of two devices
_LIBRARY: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]


class Bead(torch.Tensor):
    """A tensor on the device; `host` has its numbers."""

    host: torch.Tensor

    def __new__(cls, host: torch.Tensor) -> "Bead":
        if host.dtype is torch.float64:
            CALLS["float64"] += 1
            raise TypeError(f"{NAME} has no float64")
        where: Any = {
            "strides": host.stride(),
            "storage_offset": host.storage_offset(),
            "device": torch.device(NAME, 0),
        }
        bead: Bead = cls._make_wrapper_subclass(cls, host.shape, dtype=host.dtype, **where)
        bead.host = host
        return bead

    @classmethod
    def __torch_dispatch__(  # type: ignore[override, unused-ignore]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return carried_out(func, *args, **(kwargs or {}))


def carried_out(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what an operation gives, computed on the host."""
    name, given = func._schema.name, pytree.tree_leaves((args, kwargs))
    beads = [x for x in given if isinstance(x, Bead)]
    if name not in _MOVES and any(isinstance(x, torch.Tensor) and x.dim() and not isinstance(x, Bead) for x in given):
        raise RuntimeError(f"{name}: expected all tensors on {NAME}, and one is on the CPU")
    CALLS[name] += 1
    asked = kwargs.pop("device", None)
    here = bool(beads) if asked is None else torch.device(asked).type == NAME
    hosts = {id(bead.host): bead for bead in beads}

    def back(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not here:
            return x
        return hosts[id(x)] if id(x) in hosts else Bead(x)

    def to_host(x: Any) -> Any:
        return x.host if isinstance(x, Bead) else x

    if asked is not None:
        kwargs["device"] = "cpu"
    computed = func(*pytree.tree_map(to_host, args), **pytree.tree_map(to_host, kwargs))
    if name == "aten::copy_":
        return args[0]
    return pytree.tree_map(back, computed)


class Module(backend_registration._DummyBackendModule):
    """What stands at `torch.abacus`."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_device_name(self, index: int) -> str:
        return "abacus of ten beads"

    def synchronize(self, device: object = None) -> None:
        CALLS["synchronize"] += 1


def load() -> None:
    """Make the device known to torch: what its entry point of the group `torch.backends` names."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, Module())
    _LIBRARY.fallback(carried_out, "PrivateUse1")  # of what makes tensors
    if WRITTEN_TO in os.environ:
        atexit.register(lambda: Path(os.environ[WRITTEN_TO]).write_text(json.dumps(CALLS)))
