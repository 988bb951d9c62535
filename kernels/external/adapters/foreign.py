"""Functions of other packages: whether they are installed, in a release that an adapter knows."""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from tiebreak.kernels.formats import Format
from tiebreak.kernels.inputs import AttentionInputs

_ATTRIBUTE = "__tiebreak_needs__"
_F = TypeVar("_F", bound=Callable[..., Any])
_BACKENDS = {"cuda": "cuda", "npu": "ascend"}  # of this suite, by device type


@dataclass(frozen=True)
class Foreign:
    """A function of another package. Called like one, it is imported then."""

    place: str  # module:function
    distribution: str  # what pip calls the package
    releases: str  # those that the adapter was written for
    keywords: tuple[str, ...] = ()  # that the adapter calls it with
    install: str = ""  # how to install it; "": pip install and the distribution
    devices: tuple[str, ...] = ()  # types of devices that it has kernels for; none: all
    formats: tuple[Format, ...] = ()  # of inputs that it takes; none: all

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call it."""
        return self.function(*arguments, **keywords)

    @property
    def function(self) -> Any:
        """The function.

        Raises:
            ImportError: no such package.
            AttributeError: it has no such function.
        """
        module, _, name = self.place.partition(":")
        return getattr(importlib.import_module(module), name)

    def missing_requirement(self, inputs: AttentionInputs) -> str | None:
        """None, or why it can't be called on some inputs, in one line that says what to do."""
        reasons = [self._missing(), self._misplaced(inputs.q.device.type), self._unsuited(inputs.formats.inputs)]
        return "; ".join(filter(None, reasons)) or None

    def _missing(self) -> str | None:
        module, _, name = self.place.partition(":")
        try:
            function = self.function
        except (ModuleNotFoundError, AttributeError) as error:
            top = module.partition(".")[0]
            absent = isinstance(error, ModuleNotFoundError) and error.name == top
            if absent or (self._version is None and not hasattr(_module(top), "__version__")):
                return f"{self.distribution} is not installed: {self.install or f'pip install {self.distribution}'}"
            return f"{self._release} has no {module}.{name}; this adapter knows {self.releases}"
        except Exception as error:  # whatever it raises as it is imported, such as a library built for another torch
            return f"{self._release} can't be imported: {type(error).__name__}: {' '.join(str(error).split())}"
        unknown = [keyword for keyword in self.keywords if not _takes(function, keyword)]
        if unknown:
            lacks = f"{name} of {self._release} has no parameter {', '.join(unknown)}"
            return f"{lacks}; this adapter knows {self.releases}"
        return None

    def _misplaced(self, device: str) -> str | None:
        if not self.devices or device in self.devices:
            return None
        backends = " or ".join(_BACKENDS[device] for device in self.devices)
        return f"{self.distribution} has no kernel for {device}: give --backend {backends}"

    def _unsuited(self, inputs: Format) -> str | None:
        if not self.formats or inputs in self.formats:
            return None
        taken = " and ".join(fmt.name for fmt in self.formats)
        return f"{self.distribution} takes {taken}, not {inputs.name}: give --dtype {self.formats[0].name}"

    @property
    def _version(self) -> str | None:
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return None

    @property
    def _release(self) -> str:
        release = self._version or getattr(_module(self.place.partition(":")[0].partition(".")[0]), "__version__", None)
        return f"{self.distribution} {release or 'of an unknown version'}"


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception:  # its version is then unknown
        return None


def _takes(function: Callable[..., Any], keyword: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C: it will say so itself
        return True
    kinds = {parameter.kind for parameter in parameters.values()}
    return keyword in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def needs(*foreign: Foreign) -> Callable[[_F], _F]:
    """Say which functions of other packages an adapter calls."""

    def mark(function: _F) -> _F:
        setattr(function, _ATTRIBUTE, foreign)
        return function

    return mark


def needs_of(function: object) -> tuple[Foreign, ...]:
    """Which functions of other packages an adapter calls; none of any other function."""
    foreign = getattr(function, _ATTRIBUTE, ())
    return foreign if isinstance(foreign, tuple) else ()
