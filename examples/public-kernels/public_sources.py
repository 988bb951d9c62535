"""Source files of packages, executed on their own: what is around them is not imported, and they are not changed.

A kernel's file often imports a server, a driver or a compiled extension. Here such imports get stand-ins that do
nothing. docs/other-kernels.md says why each is there.
"""

import builtins
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import cache
from importlib import metadata
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

FOLDER = "TIEBREAK_SOURCES"  # environment variable: a folder of unpacked packages and checkouts
_REAL = frozenset({"torch", "triton", "numpy", "packaging", *sys.stdlib_module_names})
_WITHIN = ("", "src", "python")  # where a checkout keeps its packages
_FACTORIES = frozenset({"empty", "zeros", "ones", "full", "arange", "tensor"})
_FOUND: dict[str, ModuleType] = {}


class StandIn(ModuleType):
    """What takes the place of a module, and of whatever is asked of it: false, nothing, and harmless."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A decorator leaves a function as it is, and a tuned one too, which can't be called."""
        decorates = len(args) == 1 and not kwargs and (callable(args[0]) or hasattr(args[0], "fn"))
        return args[0] if decorates else self

    def __bool__(self) -> bool:
        return False

    def __or__(self, other: object) -> Any:
        return self

    __ror__ = __or__

    def __instancecheck__(self, instance: object) -> bool:
        return False

    def __mro_entries__(self, bases: object) -> tuple[type, ...]:
        return ()


class _Cuda(StandIn):
    """What host code asks `torch.cuda`: an sm_80 with one multiprocessor, so that none has a reason to split keys."""

    capability = (8, 0)
    properties = SimpleNamespace(name="stand-in", multi_processor_count=1, warp_size=32, gcnArchName="")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def get_device_capability(self, device: object = None) -> tuple[int, int]:
        return self.capability

    def get_device_properties(self, device: object = None) -> SimpleNamespace:
        return self.properties

    def get_device_name(self, device: object = None) -> str:
        return "stand-in"

    def device(self, device: object) -> nullcontext[None]:
        return nullcontext()


CUDA = _Cuda("torch.cuda")


class _Torch(ModuleType):
    """PyTorch, with a GPU that lies in the CPU's memory. Only the files that are loaded here see it."""

    cuda = CUDA

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(torch, name)
        return _on_the_cpu(attribute) if name in _FACTORIES else attribute


def _on_the_cpu(factory: Any) -> Any:
    def made(*args: Any, device: object = None, **kwargs: Any) -> Any:
        return factory(*args, device="cpu" if str(device).startswith("cuda") else device, **kwargs)

    return made


_TORCH = _Torch("torch")


def as_if_on_a_gpu(q: torch.Tensor) -> Any:
    """A tensor on the CPU that claims to be on a GPU, for a launcher that checks."""
    return torch.Tensor._make_subclass(_SaysCuda, q, q.requires_grad)


class _SaysCuda(torch.Tensor):
    is_cuda = True


def source(module: str, *, also: tuple[str, ...] = (), **replacements: Any) -> Any:
    """The module that a file defines.

    Args:
        module: its name from its package on, such as `vllm.v1.attention.ops.prefix_prefill`.
        also: modules of the package whose files it needs as well.
        given: what its imports get instead of a stand-in, by the last name: `from vllm.platforms import
            current_platform` gets `given["current_platform"]`.

    Raises:
        NotImplementedError: no such file is here.
    """
    if module not in _FOUND:
        path = path_of(module)
        for name in also:
            path_of(name)
        _Importing(frozenset((module, *also)), replacements).load(module, path)
    return _FOUND[module]


class _Importing:
    """What `import` does in the files of one package."""

    def __init__(self, files: frozenset[str], replacements: Mapping[str, Any]) -> None:
        self.files = files
        self.replacements = {"torch": _TORCH, **replacements}

    def load(self, name: str, path: Path) -> ModuleType:
        """Execute a file. Its functions keep the import that it was executed with."""
        module = ModuleType(name)
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        changed = {**vars(builtins), "__import__": self.imported}
        module.__dict__.update(__file__=str(path), __package__=package, __builtins__=changed)
        _FOUND[name] = module
        try:
            exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), vars(module))
        except BaseException:
            del _FOUND[name]
            raise
        return module

    def imported(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: object = None,
        fromlist: tuple[str, ...] | None = (),
        level: int = 0,
    ) -> Any:
        """In the place of `__import__`."""
        full = resolve_name("." * level + name, (globals or {})["__package__"]) if level else name
        top = full.partition(".")[0]
        if top not in _REAL:
            return self._module(full, fromlist) if fromlist else self._module(top, fromlist)
        module = builtins.__import__(full, fromlist=fromlist or ())
        return self.replacements.get(full, module) if fromlist or full == top else self.replacements.get(top, module)

    def _module(self, name: str, fromlist: tuple[str, ...] | None) -> Any:
        if name in self.files:
            return _FOUND[name] if name in _FOUND else self.load(name, path_of(name))
        package = StandIn(name)
        for attribute in fromlist or ():
            inner = f"{name}.{attribute}"
            if inner in self.files:
                setattr(package, attribute, self._module(inner, None))
            elif attribute in self.replacements:
                setattr(package, attribute, self.replacements[attribute])
        return package


def _stand_in(name: str) -> Any:
    """A package may hand on Triton by a name of its own."""
    last = name.rpartition(".")[2]
    if last in ("triton", "tl"):
        import triton

        return triton if last == "triton" else triton.language
    return StandIn(name)


def path_of(module: str) -> Path:
    """The file of a module, in the folder of sources or installed.

    Raises:
        NotImplementedError: there is none.
    """
    return _root_and_path(module)[1]


@cache
def _root_and_path(module: str) -> tuple[Path, Path]:
    inner = module.replace(".", "/")
    for root in _roots():
        for path in (root / f"{inner}.py", root / inner / "__init__.py"):
            if path.is_file():
                return root, path
    raise NotImplementedError(f"there is no {inner}.py: install its package, or name the folder above it in {FOLDER}")


def _roots() -> Iterator[Path]:
    if folder := os.environ.get(FOLDER):
        for package in sorted(Path(folder).iterdir()):
            yield from (package / within for within in _WITHIN)
    yield from map(Path, sys.path)


def version_of(module: str) -> str:
    """Return the version of the package that a file belongs to, or the commit that is checked out."""
    try:
        root, path = _root_and_path(module)
    except NotImplementedError:
        return "not here"
    top = module.partition(".")[0]
    for distribution in metadata.distributions(path=[str(root)]):
        if any(file.parts[0] == top for file in distribution.files or ()):
            return distribution.version
    for name in ("__init__", "_version", "version"):
        file = root / top / f"{name}.py"
        text = file.read_text("utf-8") if file.is_file() else ""
        if version := re.search(r"^__version__ = .*?'(\S+)'", text, re.MULTILINE):
            return version[1]
    command = ["git", "-C", str(path.parent), "rev-parse", "--short=10", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False)
    return commit.stdout.strip() or "unknown"
