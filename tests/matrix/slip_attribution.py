"""Which usual mistake has the bits of an output that is no attention."""

import torch
from torch import Tensor

from tiebreak.backends.backend import Backend
from tiebreak.cases.bounds import UNDECLARED
from tiebreak.cases.errors import measure
from tiebreak.cases.slips import slips
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.reference import reference
from tiebreak.matrix.attribution import shares
from tiebreak.matrix.candidates import accepted, on_device
from tiebreak.matrix.workbench import SharedBatch
from tiebreak.reports.records.record import FOLLOWED

_MOST = 0.5  # of the rows, which a mistake may hide all keys of: what is left has to tell it from others


def slip_bits(o: Tensor, batch: SharedBatch, backend: Backend) -> dict[str, float]:
    """The mistakes that explain an output, and the share of bits that the nearest plan has of each.

    A mistake explains it where its errors against the mistake's exact result are within the rounding-error bound of the
    loosest plan, and its errors against attention are not: rounding alone takes no output from one to the other. Where
    the mistake makes scores large that bound is wide, so a plan has to have the bits, as of a kernel that follows it.

    Args:
        o: as a user's kernel returned it, (batch, heads, queries, d of V).
        batch: what the kernel was given.
        backend: where it ran.
    """
    some = batch.first_heads
    entries, heads = some.inputs.q.shape[:2]
    ours, known = o[:entries, :heads].float(), accepted(on_device(backend))
    if _share_of_bound(ours, some) <= 1.0:
        return {}
    found: dict[str, float] = {}
    for slip in slips(some.inputs):
        wrong, seen = SharedBatch(slip.inputs, reference(slip.inputs)), slip.seen(ours)
        emptied = _blind(slip.inputs) & ~_blind(some.inputs)
        seen = torch.where(emptied, 0.0, seen)  # what a row gives whose keys the mistake hides is not asked
        if emptied.double().mean() < _MOST and _share_of_bound(seen, wrong) <= 1.0:
            bits = max(shares(seen, wrong, known).values())
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
