"""Experiments: what a backend and a kernel are put through, to a result, by kinds.

A kind offers experiments by name (`--cases` chooses among them), says which kernels each is for, runs one cell, and
describes its measures. It is found by being in a module of this folder.
"""

import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module

from tiebreak.matrix.experiment import Kind


@cache
def kinds() -> Mapping[str, Kind]:
    modules = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, Kind)]
    return {kind.name: kind for kind in sorted(found, key=lambda kind: kind.name)}
