"""Experiments: what a backend and a kernel are put through, to a result, by kinds.

A kind offers experiments by name (`--cases` chooses among them), says which kernels each is for, runs one cell, and
describes its measures. A call and its contract are the core's; the others are plug-ins.
"""

from collections.abc import Mapping
from functools import cache

from tiebreak.matrix.experiment import Kind
from tiebreak.matrix.experiments import call, contract
from tiebreak.plugins import Door


@cache
def kinds() -> Mapping[str, Kind]:
    """Return every kind of experiment, by name."""
    return dict(
        sorted(
            Door("tiebreak.experiments", Kind, {kind.name: kind for kind in (call.KIND, contract.KIND)})
            .usable()
            .items()
        )
    )
