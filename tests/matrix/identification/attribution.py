"""Attribution of an output to a plan: the known plans, and usual mistakes, by how many of its bits they have."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from tiebreak.backends.backend import Backend
from tiebreak.cases.bounds import UNDECLARED
from tiebreak.cases.errors import measure
from tiebreak.cases.slips import slips
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import Declaration, nameless
from tiebreak.kernels.reference import reference
from tiebreak.matrix.identification.candidates import MATCHED_BY_ERROR_SIZE, accepted, on_device
from tiebreak.matrix.identification.settling import left_open
from tiebreak.matrix.result import HeldTo
from tiebreak.matrix.sample import Sample
from tiebreak.matrix.workbench import EQUAL, FIRST_HEADS, Fit, Settled, SharedBatch, equal_bits
from tiebreak.reports.records.record import FOLLOWED

_MOST = 0.5  # of the rows, which a mistake may hide all keys of: what is left has to tell it from others
#: What a kernel is held to that may have its own random bits, as reports name it: the mean square of its errors is
#: two to three times that of a cast to nearest.
_LOOSEST = "the loosest plan of random bits"


def plan_fits(sample: Sample, settled: Settled) -> Mapping[str, Fit]:
    """Return how known plans fit the output of a kernel that declares none.

    If the kernel follows one plan and that plan has the bits here too, only this plan; otherwise all. Empty where bits
    show nothing.
    """
    if not sample.bench.case.bits_tell or sample.has_cancelled:
        return {}
    o, batch, plans = sample.outputs[0].o, sample.bench.batch(0), on_device(sample.cell.backend)
    if settled.followed is not None:
        fit = batch.fits(o, {settled.followed: plans[settled.followed]})
        if fit[settled.followed].bits >= 1.0 - EQUAL:
            return fit
    others = _plans_on_other_inputs(settled)
    if sample.bench.case.needs and others:  # it tells what a kernel makes of features, and others which plan it follows
        entries = [name.replace("flash_1@fused", "flash_1@fused,sink=last") for name in others]  # P is cast without it
        plans = {name: plan for name, plan in {**plans, **MATCHED_BY_ERROR_SIZE}.items() if name in (*others, *entries)}
    return batch.fits(o, plans) if plans else {}


def _plans_on_other_inputs(settled: Settled) -> tuple[str, ...]:
    """Return the plans to which a kernel is held where its bits name none."""
    return settled.candidates if settled.followed is None else (settled.followed,)


def plan_held_to(sample: Sample, fits: Mapping[str, Fit], settled: Settled) -> HeldTo | None:
    """Return the plan that a kernel follows here, or follows on other inputs.

    A kernel that follows a plan on most inputs and none on others (it clamps its logits, say) is compared with its own
    plan on the others. If it follows another plan at another shape, it is compared with that one there. One that could
    be asked nothing else, as an engine's dump, is compared with what its bits here leave open. None where bits show
    nothing.
    """
    plans = accepted(on_device(sample.cell.backend), sample.bench.batch(0).inputs.formats)
    plans = {**plans, **MATCHED_BY_ERROR_SIZE}
    bits = {name: fit.bits for name, fit in fits.items() if name in plans}
    if not bits:
        return None
    nearest, best = max(bits, key=bits.__getitem__), max(fits, key=lambda name: fits[name].bits)
    refused = best if fits[best].bits >= FOLLOWED > bits[nearest] else None
    follows = refused or bits[nearest] >= FOLLOWED
    names = (nearest,) if follows else _plans_on_other_inputs(settled) or left_open(plans, nearest, bits[nearest])
    held = [HeldTo(name if len(names) == 1 else _LOOSEST, plans[name], refused) for name in names]
    return max(held, key=lambda each: sample.bench.emulated(0, each.declaration)[1].rms_ulps, default=None)


def slip_bits(o: Tensor, batch: SharedBatch, backend: Backend, held_to: HeldTo | None = None) -> dict[str, float]:
    """Return the mistakes that explain an output, and the share of bits that the nearest plan has of each.

    A mistake explains an output whose errors against the mistake's exact result are within the rounding-error bound of
    the loosest plan, while its errors against attention are not: rounding alone cannot do both. A mistake that makes
    scores large has a wide bound, so there a plan must also have the bits, as for a kernel that follows it. The plan
    that the kernel is held to is tried first.
    """
    (_, heads), key_heads = batch.inputs.q.shape[:2], batch.inputs.k.shape[1]
    entries = -(-FIRST_HEADS // heads)  # whole ones, which show the key head that each query head reads
    some = batch.part(slice(entries), slice(key_heads))
    ours = o[:entries, :heads].float()
    if _share_of_bound(ours, some) <= 1.0:
        return {}
    explaining: dict[str, float] = {}
    known = accepted(on_device(backend), batch.inputs.formats).values()
    candidates = [*([held_to.declaration] if held_to else []), *known]
    for slip in slips(some.inputs):
        wrong, seen = SharedBatch(slip.inputs, reference(slip.inputs)), slip.seen(ours)
        emptied = _rows_without_keys(slip.inputs) & ~_rows_without_keys(some.inputs)
        seen = torch.where(emptied, 0.0, seen)  # what a row gives whose keys the mistake hides is not asked
        if emptied.double().mean() < _MOST and _share_of_bound(seen, wrong) <= 1.0:
            bits = _most_bits(seen, wrong, candidates)
            explaining |= {slip.about: bits} if bits >= FOLLOWED else {}
    return explaining


def _most_bits(o: Tensor, batch: SharedBatch, candidates: Iterable[Declaration]) -> float:
    """Return the largest share of bits that a plan has, up to what plans are not told apart by."""
    most = 0.0
    for plan in dict.fromkeys(nameless(batch.clipped(each)) for each in candidates):
        most = max(most, equal_bits(o, batch.predicted(plan)))
        if most >= 1.0 - EQUAL:
            break
    return most


def _rows_without_keys(inputs: AttentionInputs) -> Tensor:
    """Return rows that see no key, broadcastable to O."""
    hidden = inputs.hidden()
    return torch.zeros(1, 1, 1, 1, dtype=torch.bool) if hidden is None else hidden.all(-1, keepdim=True)


def _share_of_bound(o: Tensor, batch: SharedBatch) -> float:
    """Return the largest error as a share of the bound; Inf where an element is lost."""
    bound = batch.bounds.of(batch.clipped(UNDECLARED))
    errors = measure(o, None, batch.inputs, batch.ref, bound, batch.units)
    return errors.error_over_bound if not errors.nonfinite else float("inf")
