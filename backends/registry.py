"""The backends that there are, by name: the core's own, those that packages register, and those of files."""

from tiebreak.backends.backend import CPU, EMULATION, Backend
from tiebreak.backends.torch_arithmetic import TorchArithmetic
from tiebreak.backends.torch_device import PREFIX
from tiebreak.kernels.external.loading import imported
from tiebreak.kernels.external.options import LoadError
from tiebreak.plugins import Door, PluginError

__all__ = ["BACKENDS", "COMMONLY", "resolved", "target_of"]

#: Other names that people use for a backend.
COMMONLY = {"gpu": "cuda", "nvidia": "cuda", "amd": "cuda", "rocm": "cuda", "hip": "cuda", "npu": "ascend",
            "triton": "interpreter", "emulator": "emulation",
            PREFIX + "cpu": "cpu", PREFIX + "cuda": "cuda", PREFIX + "npu": "ascend"}  # fmt: skip
_targets: dict[str, str] = {}  # of those that files brought, by their names


class _Backends(Door[Backend]):
    def __getitem__(self, name: str) -> Backend:
        """Return a backend; one whose plug-in can't be used is one that can't run, for that reason."""
        try:
            return super().__getitem__(name)
        except PluginError as error:
            reason = str(error)
            return Backend(name, "not loaded", "cpu", TorchArithmetic(), lambda: reason, tuple, composed=False)


BACKENDS = _Backends("tiebreak.backends", Backend, {backend.name: backend for backend in (EMULATION, CPU)})


def resolved(names: str) -> str:
    """Return a comma list of backends with the name instead of each path/to/file.py:NAME, which is then registered.

    LoadError: NAME is missing, or a file can't be imported, has no backend of that name, or one called as another is.
    """
    return ",".join(_brought(name) if ".py" in name else name for name in map(str.strip, names.split(",")))


def _brought(target: str) -> str:
    place, _, name = target.rpartition(":")
    if not place:
        raise LoadError(f"{target}: expected FILE.py:NAME, NAME being an object of tiebreak.backends.backend.Backend")
    backend = getattr(imported(place), name, None)
    if not isinstance(backend, Backend):
        raise LoadError(f"{place} has no backend {name!r}: name an object of tiebreak.backends.backend.Backend")
    if backend.name in BACKENDS and _targets.get(backend.name) != target:
        raise LoadError(f"{target}: there is a backend called {backend.name}; give yours another name")
    _targets[backend.name], BACKENDS.own[backend.name] = target, backend
    return backend.name


def target_of(name: str) -> str:
    """Return a backend as --backend takes it: its name, or the file and object that brought it."""
    return _targets.get(name, name)
