"""How plans fit an output: the share of bits that agree, and how far apart the biases are."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tiebreak.cases.errors import by_key_head, in_units
from tiebreak.cases.verdicts import Interval, interval
from tiebreak.kernels.kernel import Declaration
from tiebreak.matrix.bits import equal_bits
from tiebreak.matrix.candidates import drawn, nameless
from tiebreak.matrix.workbench import SharedBatch

_REACH = 0.02  # how far behind the best in its share of equal bits a candidate may be to be tried on all heads


@dataclass(frozen=True)
class Fit:
    """What one plan has in common with the output."""

    bits: float  # share of elements of O that agree to the bit
    difference: Interval  # of bias, in ulps, paired head by head


def fits(o: Tensor, batch: SharedBatch, candidates: Mapping[str, Declaration]) -> dict[str, Fit]:
    """How each candidate fits an output.

    All are tried on some heads; those near the best, and those with random bits, which agree with nothing to the bit,
    on all of them.

    Args:
        o: as the kernel returned it, (batch, heads, queries, d).
        batch: what it was given.
        candidates: by name.

    Returns:
        In the candidates' order; of one that is out of reach what some heads say.
    """
    work = {name: nameless(batch.clipped(declaration)) for name, declaration in candidates.items()}
    some = batch.first_heads
    fitting = _tried(o, some, work.values())
    if some is not batch:
        best = max(fit.bits for fit in fitting.values())
        near = [plan for plan, fit in fitting.items() if fit.bits >= best - _REACH or drawn(plan)]
        fitting |= _tried(o, batch, near)
    return {name: fitting[plan] for name, plan in work.items()}


def _tried(o: Tensor, batch: SharedBatch, declarations: Iterable[Declaration]) -> dict[Declaration, Fit]:
    entries, heads = batch.inputs.q.shape[:2]
    ours, units = o[:entries, :heads].float(), batch.units
    fitting = {}
    for declaration in dict.fromkeys(declarations):
        theirs = batch.predicted(declaration)
        samples = by_key_head(in_units(ours.double() - theirs.double(), units), batch.inputs.groups)
        fitting[declaration] = Fit(equal_bits(ours, theirs), interval(samples[torch.isfinite(samples)]))
    return fitting
