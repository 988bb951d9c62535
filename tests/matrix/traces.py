"""The evidence of a call that a page draws: how its errors are spread, and the error of O-bar key by key."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tiebreak.cases.errors import signed_error_ulps
from tiebreak.kernels.formats import Format
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionInputs
from tiebreak.kernels.kernel import Declaration
from tiebreak.kernels.reference import Reference
from tiebreak.matrix.checks import Look
from tiebreak.matrix.sample import Sample
from tiebreak.reports.records import record as records

_BINS, _REACH_ULPS = 64, 2.0  # of the histogram of signed errors


@dataclass(frozen=True)
class Trace:
    """One element of O-bar, key after key: the paper's equation 5."""

    error: Tensor  # O-bar in the narrow format less O-bar in fp64, after each key, (keys,)
    p_bar: Tensor  # rounded P-bar of each key, (keys,)

    @property
    def at_one(self) -> list[int]:
        """Keys whose P-bar is exactly 1."""
        return (self.p_bar == 1).nonzero().flatten().tolist()


def error_trace(p_bar: Tensor, v: Tensor, fmt: Format) -> Tensor:
    """Return equation 5: partial sums in fp32, each rounded to the format of O-bar, less the same in fp64; (keys,).

    The arguments are one row of P-bar as the product gets it, and one column of V, (keys,) each.
    """
    partial = torch.cumsum(p_bar.float() * v.float(), 0)
    return partial.to(TORCH_DTYPES[fmt]).double() - torch.cumsum(p_bar.double() * v.double(), 0)


def trace(
    declaration: Declaration, inputs: AttentionInputs, ref: Reference, *, head: int = 0, row: int = 0, column: int = 0
) -> Trace:
    """Return the trace of one element of O-bar in the first batch entry, the row untiled and without dither."""
    dtype = TORCH_DTYPES[inputs.formats.operands]
    s = ref.s[0, head, row : row + 1].float()
    row_max = s.amax(-1, keepdim=True)
    shift = declaration.shift_rule.propose(s, row_max, torch.zeros_like(row_max))
    p_bar = torch.exp(s - shift)[0].to(dtype).float()
    v = inputs.expanded_v()[0, head, :, column]
    return Trace(error_trace(p_bar, v, inputs.formats.operands), p_bar)


def _histogram(sample: Sample) -> records.HistogramRecord:
    error = signed_error_ulps(sample.outputs[0].o.float(), sample.first.ref.o, sample.first.inputs.formats.output)
    error = error[torch.isfinite(error)]
    counts = torch.histc(error, _BINS, -_REACH_ULPS, _REACH_ULPS).int().tolist()
    return records.HistogramRecord(-_REACH_ULPS, 2 * _REACH_ULPS / _BINS, tuple(counts), len(error) - sum(counts))


def _evidence(sample: Sample) -> Mapping[str, Any]:
    """Return the evidence of a case that is traced."""
    declaration, first = sample.cell.kernel.declaration, sample.first
    if not sample.bench.case.traced:
        return {}
    if declaration is None or not sample.cell.backend.predicts:
        return {"histogram": _histogram(sample)}
    traced = trace(declaration, first.inputs, first.ref)
    error = tuple(map(records.finite, traced.error.tolist()))
    return {"histogram": _histogram(sample), "trace": records.TraceRecord(error, tuple(traced.at_one))}


LOOK = Look(looks=_evidence)
