"""Calls on tensors that a training run has left behind, as --captured names them."""

from collections.abc import Sequence
from pathlib import Path

from tiebreak.cases.captured import CapturedError, captured_cases
from tiebreak.matrix.experiment import Experiment, Offer
from tiebreak.matrix.experiments.call import OneCall
from tiebreak.reports.errors import UsageError


class _Captured(Offer):
    def offered(self, captured: str | None, *, cases_named: bool) -> Sequence[Experiment]:
        try:
            return () if captured is None else [*map(OneCall, captured_cases(Path(captured)))]
        except CapturedError as error:
            raise UsageError(str(error)) from error


CALLS = _Captured()
