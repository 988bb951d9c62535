"""What of the candidates has the bits of an output: known plans, and usual mistakes, on the first batch of a cell."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tiebreak.cases.bounds import UNDECLARED
from tiebreak.cases.errors import by_key_head, in_units, measure
from tiebreak.cases.slips import slips
from tiebreak.cases.verdicts import Interval, interval
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import Declaration
from tiebreak.kernels.reference import reference
from tiebreak.matrix.candidates import nameless
from tiebreak.matrix.workbench import SharedBatch
from tiebreak.reports.records.record import FOLLOWED

#: Share of equal bits up to which a kernel of which no plan has more may cast O with random bits of its own.
RANDOM = 0.9
_REACH = 0.02  # how far behind the best in its share of equal bits a candidate may be to be tried on all heads
_MOST = 0.5  # of the rows, which a mistake may hide all keys of: what is left has to tell it from others


@dataclass(frozen=True)
class Fit:
    """What one plan has in common with the output."""

    bits: float  # share of elements of O that agree to the bit
    difference: Interval  # of bias, in ulps, paired head by head


def same_bits(ours: Tensor, theirs: Tensor) -> Tensor:
    """Which elements agree to the bit, NaN counting as equal to NaN."""
    return (ours == theirs) | (ours.isnan() & theirs.isnan())


def equal_bits(ours: Tensor, theirs: Tensor) -> float:
    """Share of elements that agree to the bit."""
    return same_bits(ours, theirs).double().mean().item()


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
    work = _work(batch, candidates)
    some = batch.first_heads
    fitting = _tried(o, some, work.values())
    if some is not batch:
        best = max(fit.bits for fit in fitting.values())
        near = [plan for plan, fit in fitting.items() if fit.bits >= best - _REACH or drawn(plan)]
        fitting |= _tried(o, batch, near)
    return {name: fitting[plan] for name, plan in work.items()}


def shares(o: Tensor, batch: SharedBatch, candidates: Mapping[str, Declaration]) -> dict[str, float]:
    """The share of bits alone that each candidate has of an output, on all heads. Arguments as for `fits`."""
    ours = o.float()
    return {name: equal_bits(ours, batch.predicted(plan)) for name, plan in _work(batch, candidates).items()}


def _work(batch: SharedBatch, candidates: Mapping[str, Declaration]) -> dict[str, Declaration]:
    """What candidates do with a batch, by their names: some do the same."""
    return {name: nameless(batch.clipped(declaration)) for name, declaration in candidates.items()}


def drawn(declaration: Declaration) -> bool:
    """Whether random bits enter O."""
    return declaration.plan.stochastic or declaration.shift_rule.dithered


def _tried(o: Tensor, batch: SharedBatch, declarations: Iterable[Declaration]) -> dict[Declaration, Fit]:
    entries, heads = batch.inputs.q.shape[:2]
    ours, units = o[:entries, :heads].float(), batch.yardstick.units
    fitting = {}
    for declaration in dict.fromkeys(declarations):
        theirs = batch.predicted(declaration)
        samples = by_key_head(in_units(ours.double() - theirs.double(), units), batch.inputs.groups)
        fitting[declaration] = Fit(equal_bits(ours, theirs), interval(samples[torch.isfinite(samples)]))
    return fitting


def slip_bits(o: Tensor, batch: SharedBatch, candidates: Mapping[str, Declaration]) -> dict[str, float]:
    """The mistakes that explain an output, and the share of bits that the nearest plan has of each.

    A mistake explains it where its errors against the mistake's exact result are within the rounding-error bound of the
    loosest plan, and its errors against attention are not: rounding alone takes no output from one to the other. Where
    the mistake makes scores large that bound is wide, so a plan has to have the bits, as of a kernel that follows it.

    Args:
        o: as a user's kernel returned it, (batch, heads, queries, d of V).
        batch: what the kernel was given.
        candidates: plans by name.
    """
    some = batch.first_heads
    entries, heads = some.inputs.q.shape[:2]
    ours = o[:entries, :heads].float()
    if _share_of_bound(ours, some) <= 1.0:
        return {}
    found: dict[str, float] = {}
    for slip in slips(some.inputs):
        wrong, seen = SharedBatch(slip.inputs, reference(slip.inputs)), slip.seen(ours)
        emptied = _blind(slip.inputs) & ~_blind(some.inputs)
        seen = torch.where(emptied, 0.0, seen)  # what a row gives whose keys the mistake hides is not asked
        if emptied.double().mean() < _MOST and _share_of_bound(seen, wrong) <= 1.0:
            bits = max(shares(seen, wrong, candidates).values())
            found |= {slip.about: bits} if bits >= FOLLOWED else {}
    return found


def _blind(inputs: AttentionInputs) -> Tensor:
    """Rows that see no key, broadcastable to O."""
    hidden = inputs.hidden()
    return torch.zeros(1, 1, 1, 1, dtype=torch.bool) if hidden is None else hidden.all(-1, keepdim=True)


def _share_of_bound(o: Tensor, batch: SharedBatch) -> float:
    """The largest error as a share of the bound; Inf where an element is lost."""
    bound = batch.bounds.of(batch.clipped(UNDECLARED))
    errors = measure(o, None, batch.inputs, batch.ref, bound, batch.yardstick)
    return errors.error_over_bound if not errors.nonfinite else float("inf")
