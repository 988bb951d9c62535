"""A cell's looks at its data: run the kernel on ever more heads until claim, verdict and prediction are settled."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tiebreak.cases.bounds import UNDECLARED
from tiebreak.cases.case import Case
from tiebreak.cases.claims import UNBIASED, Claim, claim, predicted
from tiebreak.cases.errors import Errors, difference, merge
from tiebreak.cases.verdicts import LOOKS, MARGIN_ULPS, Verdict, judge
from tiebreak.kernels.inputs import AttentionOutput
from tiebreak.kernels.kernel import Declaration, delta_alone
from tiebreak.matrix.candidates import candidates, tilings
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.workbench import SharedBatch, Workbench

_FAIR_CLAIM = claim(UNBIASED, "--fair: no bias on any failure input", formats="bf16 fp16")


@dataclass
class _Progress:
    """What has been measured of a cell so far, look after look."""

    errors: list[Errors] = field(default_factory=list)  # one a batch
    outputs: list[AttentionOutput] = field(default_factory=list)  # one a batch
    predictions: dict[Declaration, list[Errors]] = field(default_factory=dict)
    fits: dict[str, list[Errors]] = field(default_factory=dict)
    equal_bits: dict[Declaration, list[float]] = field(default_factory=dict)
    heads: int = 0


class Looks:
    """One cell's looks at its data."""

    def __init__(self, cell: Cell, case: Case, bench: Workbench) -> None:
        self.cell, self.case, self.bench = cell, case, bench
        self.progress = _Progress()
        self.repeatable: bool | None = None
        declaration = cell.kernel.declaration
        self.declaration = declaration or UNDECLARED
        # A chaotic or cancelling case predicts nothing: its records say none is made, not that one was met.
        told = self.judged and not case.chaotic
        self.predictable = declaration is not None and not cell.backend.predicts and told
        self.tilings = tilings(self.declaration) if cell.kernel.external else (self.declaration,)
        self.claim = self._claim()
        self.candidates = candidates(cell) if declaration is None else {}

    def _claim(self) -> Claim | None:
        if self.cell.kernel.external and self.bench.settings.fair and self.case.failure:
            return _FAIR_CLAIM
        # A declared plan of a user's kernel is a prediction to be held to, not an allowance to be biased.
        return self.case.claim_about(self.cell.kernel.declaration, self.cell.fmt)

    def look(self) -> None:
        """Look at ever more heads until all is settled, there are no more or the cap is reached, then run once more."""
        for look in range(LOOKS):
            for index in range(2**look // 2, 2**look):
                if self._has(index):
                    self._measure(index)
            if self._settled() or self.exhausted:
                break
        self.repeatable = self._repeats()

    def _has(self, index: int) -> bool:
        return self.case.has(index, self.bench.settings.heads)

    @property
    def exhausted(self) -> bool:
        """Whether the case has no more heads than have been drawn."""
        return not self._has(len(self.progress.errors))

    @property
    def remedy(self) -> str:
        """What to do about a cell that its heads do not settle."""
        if not self.exhausted:
            return "raise --heads"
        if self._all_cancelled:
            return "every element of O has cancelled: no kernel's bias shows on this input"
        return "the case has no more: capture more sequences a batch"

    @property
    def _all_cancelled(self) -> bool:
        return self.errors.left_out == self.errors.elements

    def _measure(self, index: int) -> None:
        batch = self.bench.batch(self.case, self.cell.fmt, index)
        gradients = self.case.gradients and self.cell.kernel.has_backward
        if self.cell.backend.predicts and self.cell.kernel.declaration is not None:
            output, errors = self.bench.emulated(self.case, self.cell.fmt, index, self.declaration)
        else:
            # Gradients are measured on the first batch alone.
            kernel = self.cell.kernel if index == 0 else delta_alone(self.cell.kernel)
            output = self.cell.backend.run(kernel, batch.inputs, gradients=gradients)
            # The bound grows with the number of tiles.
            errors = self.bench.measure(self.case, self.cell.fmt, index, output, self.tilings[-1])
        self.progress.errors.append(errors)
        self.progress.outputs.append(output)
        self.progress.heads += batch.inputs.q.shape[0] * batch.inputs.q.shape[1]
        for declaration in self.tilings if self.predictable else ():
            prediction, predicted_errors = self.bench.emulated(self.case, self.cell.fmt, index, declaration)
            self.progress.predictions.setdefault(declaration, []).append(predicted_errors)
            self.progress.equal_bits.setdefault(declaration, []).append(equal_bits(output.o.float(), prediction.o))
        for name, declaration in self.candidates.items():
            emulated = self.bench.emulated(self.case, self.cell.fmt, index, declaration)[1]
            self.progress.fits.setdefault(name, []).append(emulated)

    @property
    def outputs(self) -> list[AttentionOutput]:
        """One a batch."""
        return self.progress.outputs

    @property
    def batches(self) -> list[SharedBatch]:
        """What they were made from."""
        return [self.bench.batch(self.case, self.cell.fmt, index) for index in range(len(self.outputs))]

    @property
    def errors(self) -> Errors:
        """Of all heads drawn."""
        return merge(self.progress.errors)

    @property
    def judged(self) -> bool:
        """Whether the mean error in ulps says anything in this case."""
        return not self.case.cancels

    def prediction_met(self) -> bool | None:
        """Whether the output is what the declaration predicts; None: the data do not tell."""
        if not self.predictable:
            return True
        (_, prediction), errors = self.prediction(), self.errors
        if errors.nonfinite or prediction.nonfinite:
            return abs(errors.nonfinite - prediction.nonfinite) <= _few(errors)
        return predicted(difference(errors, prediction))

    def prediction(self) -> tuple[Declaration, Errors]:
        """What is predicted, in the tiles that come nearest: nobody has said in which a user's kernel works."""
        merged = [(declaration, merge(found)) for declaration, found in self.progress.predictions.items()]
        return min(merged, key=lambda pair: _distance(self.errors, pair[1]))

    def predicted(self) -> tuple[Errors | None, float | None]:
        """Errors of what is predicted, and the share of elements that agree with it to the bit."""
        if not self.predictable:
            return None, None
        declaration, errors = self.prediction()
        shares = self.progress.equal_bits[declaration]
        return errors, sum(shares) / len(shares)

    def fits(self) -> list[tuple[str, list[Errors]]]:
        """What every candidate predicts, where that tells."""
        told = self.judged and not self.case.chaotic and not self._all_cancelled
        return list(self.progress.fits.items()) if told else []

    def _settled(self) -> bool:
        errors = self.errors
        told = self.claim is None or self.claim.expectation.met(errors) is not None
        verdict_told = not self.judged or errors.nonfinite > 0 or judge(errors.bias) is not Verdict.INCONCLUSIVE
        return told and verdict_told and self.prediction_met() is not None and self._fit_told()

    def _fit_told(self) -> bool:
        """Whether the heads drawn tell which known plans an undeclared kernel may follow here.

        They do where it and some plan agree nearly to the bit. A kernel with a random stream of its own agrees with
        none so closely; then every plan that may be its own is to be told.
        """
        errors = self.errors
        found = [difference(errors, merge(emulated)) for _, emulated in self.fits()]
        if any(fit.half_width < MARGIN_ULPS / 4 and predicted(fit) for fit in found):
            return True
        return not any(predicted(fit) is None and abs(fit.mean) <= fit.half_width for fit in found)

    def _repeats(self) -> bool | None:
        """Whether a second run on the same input gives the same bits; None: not run twice."""
        if self.cell.backend.predicts:
            return None  # a unit test shows it once for all of the emulation
        first, batch = self.outputs[0], self.batches[0]
        # O of a composed kernel does not hang on whether gradients follow; of another's who knows.
        gradients = first.gradients is not None and not self.cell.kernel.composed
        again = self.cell.backend.run(self.cell.kernel, batch.inputs, gradients=gradients)
        return equal_bits(again.o.float(), first.o.float()) == 1.0

    @property
    def heads(self) -> int:
        """Heads drawn in all."""
        return self.progress.heads


def _distance(ours: Errors, theirs: Errors) -> float:
    """How far apart two biases are; a difference that is no number is farther than any."""
    mean = abs(difference(ours, theirs).mean)
    return mean if math.isfinite(mean) else math.inf


def _few(errors: Errors) -> int:
    """Elements that may differ in being finite: underflow sits on an edge that the exponential's last bit decides."""
    return errors.elements // 100


def equal_bits(ours: Tensor, theirs: Tensor) -> float:
    """Share of elements that agree to the bit, NaN counting as equal to NaN."""
    same = (ours == theirs) | (torch.isnan(ours) & torch.isnan(theirs))
    return same.double().mean().item()
