"""What a cell's looks found, as the fields of its record."""

import hashlib
from typing import Any

import torch

from tiebreak.cases.gradients import gradient_measures
from tiebreak.cases.measures import Measures, difference, merge, signed_error_ulps
from tiebreak.cases.trace import trace
from tiebreak.cases.verdicts import Interval, Verdict, judge
from tiebreak.kernels.inputs import AttentionOutput
from tiebreak.matrix.looks import Looks
from tiebreak.reports import records

_BINS, _REACH_ULPS = 64, 2.0  # of the histogram of signed errors


def results(looks: Looks) -> dict[str, Any]:
    """The fields of a record that measuring fills."""
    measures, claim = looks.measures, looks.claim
    verdict = Verdict.NONFINITE if measures.nonfinite else judge(measures.bias)
    return {
        "verdict": verdict.value if looks.judged else None,
        "measures": _measures_record(looks, measures),
        "claim": claim and records.ClaimRecord(claim.expectation.name, claim.source, claim.expectation.met(measures)),
        "prediction": _prediction_record(looks, measures),
        "fits": {name: _estimate(difference(measures, merge(emulated))) for name, emulated in looks.fits()},
        "digest": _digest(looks.first),
        "trace": _trace(looks),
        "histogram": _histogram(looks),
    }


def _measures_record(looks: Looks, measures: Measures) -> records.MeasuresRecord:
    gradients: dict[str, float | None] = {}
    if looks.first is not None and looks.first.gradients is not None:
        batch = looks.bench.batch(looks.cell.case, looks.cell.fmt, 0)
        found = gradient_measures(looks.first, batch.inputs, batch.ref, batch.gradients)
        gradients = {name: records.finite(value) for name, value in found.items()}
    return records.MeasuresRecord(
        bias=_estimate(measures.bias),
        rms_ulps=records.finite(measures.rms_ulps),
        max_ulps=records.finite(measures.max_ulps),
        error_over_bound=records.finite(measures.error_over_bound),
        gain=records.finite(measures.gain),
        delta_bias=_estimate(measures.delta_bias),
        left_out=measures.left_out,
        nonfinite=measures.nonfinite,
        elements=measures.elements,
        gradients=gradients,
        repeatable=looks.repeatable,
    )


def _prediction_record(looks: Looks, measures: Measures) -> records.PredictionRecord | None:
    if not looks.predictable:
        return None
    declaration, prediction = looks.prediction()
    equal_bits = looks.progress.equal_bits[declaration]
    return records.PredictionRecord(
        plan=looks.declaration.label,
        bias=_estimate(prediction.bias),
        difference=_estimate(difference(measures, prediction)),
        equal_bits=sum(equal_bits) / len(equal_bits),
        met=looks.prediction_met(),
    )


def _trace(looks: Looks) -> records.TraceRecord | None:
    declaration = looks.cell.kernel.declaration
    if not (looks.cell.case.traced and looks.cell.backend.predicts and declaration):
        return None
    batch = looks.bench.batch(looks.cell.case, looks.cell.fmt, 0)
    found = trace(declaration, batch.inputs, batch.ref)
    return records.TraceRecord(tuple(map(records.finite, found.error.tolist())), tuple(found.at_one))


def _histogram(looks: Looks) -> records.HistogramRecord | None:
    """Signed errors of the first batch, where the case is traced."""
    if not looks.cell.case.traced or looks.first is None:
        return None
    batch = looks.bench.batch(looks.cell.case, looks.cell.fmt, 0)
    error = signed_error_ulps(looks.first.o.float(), batch.ref.o, looks.cell.fmt)
    error = error[torch.isfinite(error)]
    counts = torch.histc(error, _BINS, -_REACH_ULPS, _REACH_ULPS).int().tolist()
    return records.HistogramRecord(-_REACH_ULPS, 2 * _REACH_ULPS / _BINS, tuple(counts), len(error) - sum(counts))


def _estimate(interval: Interval) -> records.Estimate:
    return records.Estimate.of(interval.mean, interval.half_width)


def _digest(output: AttentionOutput | None) -> str | None:
    """A digest of the bits of O."""
    if output is None:
        return None
    return hashlib.sha256(output.o.float().contiguous().numpy().tobytes()).hexdigest()[:16]
