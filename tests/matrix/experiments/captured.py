"""Calls on tensors that a training run has left behind, as --captured names them, and on a trained model's.

Of their gradients nothing is asked but their bounds and `worst_gradient`: on such inputs sound kernels have gains, and
means over heads are single draws; the ratio in a head was at most 3.5 on 30 layers for seven sound kernels.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tiebreak.cases.captured import TRAINED_SINK, CapturedError, captured_cases
from tiebreak.matrix.checks import Look
from tiebreak.matrix.experiment import Experiment, Offer
from tiebreak.matrix.experiments.call import OneCall, calls_on
from tiebreak.matrix.sample import Sample
from tiebreak.reports.errors import UsageError
from tiebreak.reports.records.record import CAPTURED

OWN = (TRAINED_SINK,)  # that come with the suite


class _Captured(Offer):
    def offered(self, captured: str | None, *, cases_named: bool) -> Sequence[Experiment]:
        try:
            own = calls_on(OWN, captured, cases_named=cases_named)
            return own if captured is None else [*own, *map(OneCall, captured_cases(Path(captured)))]
        except CapturedError as error:
            raise UsageError(str(error)) from error


def _replayed(sample: Sample) -> Mapping[str, str]:
    """Return as evidence what was asked of a user's kernel in a captured call, and what was not."""
    fixed, gradients, compared = sample.bench.case.fixed_heads, sample.outputs[0].gradients, sample.backward_heads
    if fixed is None or not sample.cell.kernel.external:
        return {}
    asked = "O, and gradients of its own dO within bounds" if gradients else "O"
    asked += " and beside known backward passes" if compared else ""
    left = [fixed.cut] if fixed.cut else []
    left += [f"{fixed.heads - sample.heads:,} heads more"] if sample.heads < fixed.heads else []
    if not sample.bench.case.gradients:
        left.append("gradients, since the file has no dO")
    elif gradients is None:
        left.append("gradients, since it gave none")
    elif compared is None:
        left.append("gradients beside known backward passes, since O follows no known plan")
    elif sample.gradient_heads < sample.heads:
        left.append(f"gradients of more than {sample.gradient_heads:,} heads")
    return {CAPTURED: f"asked: {asked}; not asked: {', '.join(left) or 'nothing'}"}


CALLS, LOOK = _Captured(), Look(looks=_replayed)
