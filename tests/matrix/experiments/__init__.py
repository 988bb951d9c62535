"""Experiments: what a backend and a kernel are put through, to a result, by kinds.

A kind offers experiments by name (`--cases` chooses among them), says which kernels each is for, runs one cell, and
describes its measures. A call is the core's; the others are plug-ins.
"""

from collections.abc import Mapping
from functools import cache

from tiebreak.matrix.experiment import Experiment, Kind, Offer
from tiebreak.matrix.experiments import call
from tiebreak.plugins import Door


@cache
def offers() -> Mapping[str, Offer]:
    """Return everything that brings experiments to a run, by name."""
    return dict(sorted(Door[Offer]("tiebreak.experiments", Offer, {call.KIND.name: call.KIND}).usable().items()))


@cache
def kinds() -> Mapping[str, Kind]:
    """Return every kind of experiment, by name."""
    return {name: each for name, each in offers().items() if isinstance(each, Kind)}


def offered(captured: str | None = None, *, cases_named: bool) -> list[Experiment]:
    """Return the experiments of a run, kind by kind."""
    every = (each for it in offers().values() for each in it.offered(captured, cases_named=cases_named))
    return sorted(every, key=lambda each: each.kind)
