"""Experiments: what a backend and a kernel are put through, to a result, by kinds.

A kind offers experiments by name (`--cases` chooses among them), says which kernels each is for, runs one cell, and
describes its measures. A call is the core's; the others are plug-ins.
"""

from collections.abc import Mapping
from functools import cache

from tiebreak.matrix.experiment import Kind
from tiebreak.matrix.experiments import call
from tiebreak.plugins import Door


@cache
def kinds() -> Mapping[str, Kind]:
    return dict(sorted(Door[Kind]("tiebreak.experiments", Kind, {call.KIND.name: call.KIND}).usable().items()))
