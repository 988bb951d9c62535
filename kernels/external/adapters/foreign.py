"""Functions of other packages: whether they are installed, in a release that an adapter knows."""

import importlib
import inspect
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tiebreak.kernels.formats import Format
from tiebreak.kernels.inputs import AttentionInputs

_BACKENDS = {"cuda": "cuda", "npu": "ascend", "cpu": "ptx"}  # of this suite, by device type


@dataclass(frozen=True)
class Foreign:
    """A function of another package, imported when it is called."""

    place: str  # module:function
    distribution: str  # what pip calls the package
    releases: str  # those that the adapter was written for
    install: str = ""  # how to install it; "": pip install and the distribution
    devices: tuple[str, ...] = ()  # types of devices that it has kernels for; none: all
    formats: tuple[Format, ...] = ()  # of inputs that it takes; none: all

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the function; NotImplementedError: it has no parameter of that name: it is of another release."""
        function = self.function
        with suppress(TypeError, ValueError):  # written in C, it will say so itself
            parameters = inspect.signature(function).parameters
            anything = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
            if not anything and (unknown := ", ".join(keywords.keys() - parameters.keys())):
                name = self.place.partition(":")[2]
                lacks = f"{name} of {self._release} has no parameter {unknown}"
                raise NotImplementedError(f"{lacks}; this adapter knows {self.releases}")
        return function(*arguments, **keywords)

    @property
    def function(self) -> Any:
        """The function; ImportError, AttributeError: there is no such package, or it has none."""
        module, _, name = self.place.partition(":")
        return getattr(importlib.import_module(module), name)

    def missing_requirement(self, inputs: AttentionInputs) -> str | None:
        """Return None, or why it can't be called on some inputs, in one line that says what to do."""
        reasons, device, fmt = [self._missing()], inputs.q.device.type, inputs.formats.inputs
        if self.devices and device not in self.devices:
            backends = " or ".join(_BACKENDS[device] for device in self.devices)
            reasons.append(f"{self.distribution} has no kernel for {device}: give --backend {backends}")
        if self.formats and fmt not in self.formats:
            taken = " and ".join(fmt.name for fmt in self.formats)
            reasons.append(f"{self.distribution} takes {taken}, not {fmt.name}: give --dtype {self.formats[0].name}")
        return "; ".join(filter(None, reasons)) or None

    def _missing(self) -> str | None:
        try:
            self.function  # noqa: B018
        except (ModuleNotFoundError, AttributeError) as error:
            if isinstance(error, ModuleNotFoundError) and error.name == self._package:
                return f"{self.distribution} is not installed: {self.install or f'pip install {self.distribution}'}"
            return f"{self._release} has no {self.place.replace(':', '.')}; this adapter knows {self.releases}"
        except Exception as error:  # whatever it raises as it is imported, such as a library built for another torch
            return f"{self._release} can't be imported: {type(error).__name__}: {' '.join(str(error).split())}"
        return None

    @property
    def _package(self) -> str:
        return self.place.partition(":")[0].partition(".")[0]

    @property
    def _release(self) -> str:
        release = "of an unknown version"
        with suppress(Exception):  # whatever it raises as it is imported
            release = getattr(importlib.import_module(self._package), "__version__", release)
        with suppress(PackageNotFoundError):
            release = version(self.distribution)
        return f"{self.distribution} {release}"
