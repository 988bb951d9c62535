"""The plan whose errors those of a kernel may not exceed: the one it declares, follows here, or follows overall.

A kernel that declares nothing, follows one plan on most inputs and none on others, such as one that clamps its logits,
is so held to its own arithmetic on the others. One that follows another plan at another shape is held to that plan
there.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from tiebreak.cases.case import Case
from tiebreak.cases.errors import Errors
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.kernels.formats import Format
from tiebreak.kernels.kernel import Declaration
from tiebreak.matrix.attribution import RANDOM, shares
from tiebreak.matrix.candidates import accepted, on_device
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.identification.asking import Asked
from tiebreak.matrix.sampling import SequentialSampler
from tiebreak.matrix.settings import Settings
from tiebreak.matrix.workbench import CaseBench, SharedBatch, Workbench
from tiebreak.reports.records.record import FOLLOWED

_HEADS = 32  # of each probe: on as many, attribution tells the candidates of a cell apart
#: What a kernel is held to that may have random bits of its own, as reports name it: the mean square of its errors is
#: two to three times that of a cast to nearest.
_LOOSEST = "the loosest plan of random bits"
_PROBES: tuple[Case, ...] = tuple(case for case in SCRIPTED if case.normal)[:3]


@dataclass(frozen=True)
class HeldTo:
    """What the errors of O are compared with."""

    plan: str  # as reports name it
    declaration: Declaration  # what it is
    errors: tuple[Errors, Errors]  # of O and of the plan's emulation, on the same heads


def plan_held_to(cell: Cell, sampler: SequentialSampler, case_bench: CaseBench, bench: Workbench) -> HeldTo | None:
    """What the errors of a cell are compared with.

    Args:
        cell: what was run.
        sampler: what came of it.
        case_bench: of its case.
        bench: of the worker, which remembers what a kernel follows overall.

    Returns:
        None where the emulation tells nothing: it is what was run, or the case is chaotic or cancels.
    """
    sample = sampler.sample
    if sample.prediction is not None:
        return HeldTo(sample.declaration.label, sample.declaration, (sample.errors, sample.prediction))
    known = accepted(on_device(cell.backend))
    bits = {name: fit.bits for name, fit in sampler.fits.items() if name in known}
    if not bits:
        return None
    nearest = max(bits, key=bits.__getitem__)
    plans = (nearest,) if bits[nearest] >= FOLLOWED else _overall(cell, bench)
    ours = sample.draws[0].errors
    held = [
        HeldTo(plan if len(plans) == 1 else _LOOSEST, known[plan], (ours, case_bench.emulated(0, known[plan])[1]))
        for plan in plans
    ]
    return max(held, key=lambda held_to: held_to.errors[1].rms_ulps, default=None)


def _overall(cell: Cell, bench: Workbench) -> tuple[str, ...]:
    """The accepted plan with the most bits of a kernel on normal numbers; where it may have random bits, all that do.

    None where it runs on none of the probes.
    """
    key = (cell.backend.name, cell.kernel.name, cell.fmt.name)
    if key not in bench.overall:
        known = accepted(on_device(cell.backend))
        probes = list(_shares(cell, bench, known))
        total = {name: sum(bits[name] for bits in probes) for name in known}
        best = max(total, key=total.__getitem__)
        near = total[best] >= RANDOM * len(probes)
        plans = (best,) if near else tuple(name for name in total if known[name].plan.stochastic)
        bench.overall[key] = plans if probes else ()
    return bench.overall[key]


def _shares(cell: Cell, bench: Workbench, known: Mapping[str, Declaration]) -> Iterator[dict[str, float]]:
    """The share of bits that every known plan has of the kernel, one dictionary a probe that it runs on."""
    asked = Asked(cell.backend, cell.kernel, cell.fmt)
    for case in _PROBES:
        batch = _probed(case, cell.fmt, bench.settings.seed)
        try:
            answer = asked.answer(case.name, batch.inputs)
        except Exception:  # the cell of that case says what it raised
            continue
        if answer is not None and torch.isfinite(answer.o).any():
            yield shares(answer.o, batch, known)


@lru_cache(maxsize=len(_PROBES))
def _probed(case: Case, fmt: Format, seed: int) -> SharedBatch:
    """What every kernel that follows no plan in its cell is asked about, and with it what the plans make of that."""
    return CaseBench(case, fmt, Settings(seed=seed, heads=_HEADS)).batch(0)
