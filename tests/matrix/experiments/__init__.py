"""Experiments: what a backend and a kernel are put through, to a result. A kind of experiment is a module in here.

A kind offers experiments by name (`--cases` chooses among them), says which kernels each is for, runs one cell, and
describes its measures. The module's `KIND` is found by being in this folder.
"""

import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module

from tiebreak.matrix.experiment import Kind


@cache
def kinds() -> Mapping[str, Kind]:
    """Every kind of experiment by name."""
    modules = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    offered: list[Kind] = [module.KIND for module in modules]
    return {kind.name: kind for kind in offered}
