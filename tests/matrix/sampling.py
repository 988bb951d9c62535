"""A cell's looks at its data: run the kernel on ever more heads until claim, verdict and prediction are settled."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic

import torch

from tiebreak.cases.bounds import UNDECLARED
from tiebreak.cases.case import Case
from tiebreak.cases.claims import UNBIASED, Claim, claim, no_worse, predicted
from tiebreak.cases.errors import Errors, difference, merge
from tiebreak.cases.verdicts import LOOKS, Verdict, judge
from tiebreak.kernels.algorithms import FLASH_ATTENTION
from tiebreak.kernels.flash import BLOCK
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionOutput
from tiebreak.kernels.kernel import Declaration, delta_alone
from tiebreak.kernels.plans import FP32_INSIDE
from tiebreak.kernels.shift_rules import SHIFT_RULES
from tiebreak.matrix.attribution import Fit, equal_bits, fits
from tiebreak.matrix.candidates import candidates, tilings
from tiebreak.matrix.experiment import Cell, time_limit
from tiebreak.matrix.leaks import left_behind
from tiebreak.matrix.workbench import SharedBatch, Workbench

#: O in fp32 throughout, rounded once: what no deterministic kernel of that output format does better.
ROUNDED = Declaration(FLASH_ATTENTION, FP32_INSIDE, SHIFT_RULES["safe"])
_SHARE = 3.0  # of the time so far: what it is after one more look and the run that tells whether bits repeat
_FAIR_CLAIM = claim(UNBIASED, "--fair: no bias on any failure input", formats="bf16 fp16")


@dataclass
class _Progress:
    """What has been measured of a cell so far, look after look."""

    errors: list[Errors] = field(default_factory=list)  # one a batch
    outputs: list[AttentionOutput] = field(default_factory=list)  # one a batch
    predictions: list[Errors] = field(default_factory=list)  # one a batch, where one is made
    equal_bits: list[float] = field(default_factory=list)  # likewise
    rounded: list[Errors] = field(default_factory=list)  # of a correctly rounded O, where the kernel is held to one
    fits: Mapping[str, Fit] = field(default_factory=dict)  # of a kernel that declares nothing, on the first batch
    heads: int = 0


class SequentialSampler:
    """One cell's looks at its data."""

    def __init__(self, cell: Cell, case: Case, bench: Workbench) -> None:
        self.cell, self.case, self.bench = cell, case, bench
        self.progress = _Progress()
        self.repeatable: bool | None = None
        self.equal_gradients: float | None = None  # share of their elements that a second run gave to the bit
        self.leaks: str | None = None  # what a user's kernel leaves behind at every call, in words
        self.out_of_time = False  # whether a look was left out that might have told
        declaration = cell.kernel.declaration
        tiled = tilings(declaration or UNDECLARED) if cell.kernel.external else (declaration or UNDECLARED,)
        # A bound grows with the number of tiles: whoever says nothing may work in the smallest.
        self.tilings = tiled[-1:] if declaration is None else tiled
        self.declaration = self.tilings[0]  # in the tiles that it turns out to work in
        # A chaotic or cancelling case predicts nothing: its records say none is made, not that one was met.
        told = self.judged and not case.chaotic
        self.predictable = declaration is not None and not cell.backend.predicts and told
        self.claim = self._claim()
        self.as_rounded = cell.kernel.external and bench.settings.as_rounded and case.failure
        self.candidates = candidates() if declaration is None else {}

    def _claim(self) -> Claim | None:
        if self.cell.kernel.external and self.bench.settings.fair and self.case.failure:
            return _FAIR_CLAIM
        declaration = self.cell.kernel.declaration
        if declaration is None or not self.cell.kernel.external:
            return self.case.claim_about(declaration, self.cell.fmt)
        # Where a case cuts its rows into tiles, what it claims is of kernels that cut them too.
        keys = self.bench.batch(self.case, self.cell.fmt, 0).inputs.k.shape[-2]
        uncut = self.declaration.algorithm.tiled and keys > BLOCK.keys and self.declaration.block.keys > BLOCK.keys
        return None if uncut else self.case.claim_about(self.declaration, self.cell.fmt)

    def look(self) -> None:
        """Look at ever more heads until all is settled, there are no more or the cap is reached, then run once more.

        A look draws as many heads as all before it did, and takes as long. Where the time is too short it is left out.
        """
        began, limit = monotonic(), time_limit(self.cell, self.bench.settings.cell_timeout)
        for look in range(LOOKS):
            for index in range(2**look // 2, 2**look):
                if self._has(index):
                    self._measure(index)
            if self._settled() or self.exhausted:
                break
            self.out_of_time = limit is not None and _SHARE * (monotonic() - began) > limit
            if self.out_of_time:
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
        if self.out_of_time:
            return f"time for {self.heads} heads and no more: raise --cell-timeout"
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
            if index == 0:
                self._recognise(output, batch)
            errors = self.bench.measure(self.case, self.cell.fmt, index, output, self.declaration)
        self.progress.errors.append(errors)
        self.progress.outputs.append(output)
        self.progress.heads += batch.inputs.q.shape[0] * batch.inputs.q.shape[1]
        if self.as_rounded:
            self.progress.rounded.append(self.bench.emulated(self.case, self.cell.fmt, index, ROUNDED)[1])
        if self.predictable:
            prediction, predicted_errors = self.bench.emulated(self.case, self.cell.fmt, index, self.declaration)
            self.progress.predictions.append(predicted_errors)
            self.progress.equal_bits.append(equal_bits(output.o.float(), prediction.o))

    def _recognise(self, output: AttentionOutput, batch: SharedBatch) -> None:
        """Find the tiles that a user's kernel works in, or, if it declares nothing, what the known plans fit."""
        if len(self.tilings) > 1:
            named = {str(declaration.block): declaration for declaration in self.tilings}
            found = fits(output.o, batch, named)
            self.declaration = named[max(found, key=lambda name: found[name].bits)]  # the first of equals
            self.claim = self._claim()
        if self.judged and not self.case.chaotic:
            self.progress.fits = fits(output.o, batch, self.candidates) if self.candidates else {}

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
        prediction, errors = self.prediction(), self.errors
        if errors.nonfinite or prediction.nonfinite:
            return abs(errors.nonfinite - prediction.nonfinite) <= _few(errors)
        return predicted(difference(errors, prediction))

    def rounded(self) -> Errors:
        """Errors of a correctly rounded O on all heads drawn."""
        return merge(self.progress.rounded)

    def rounded_met(self) -> bool | None:
        """Whether the output is no more biased than a correctly rounded O; None: the data do not tell."""
        return no_worse(self.errors, self.rounded()) if self.as_rounded else True

    def prediction(self) -> Errors:
        """Errors of what is predicted, on all heads drawn."""
        return merge(self.progress.predictions)

    def predicted(self) -> tuple[Errors | None, float | None]:
        """Errors of what is predicted, and the share of elements that agree with it to the bit."""
        if not self.predictable:
            return None, None
        shares = self.progress.equal_bits
        return self.prediction(), sum(shares) / len(shares)

    def fits(self) -> Mapping[str, Fit]:
        """What every candidate has in common with the output, where that tells."""
        return {} if self._all_cancelled else self.progress.fits

    def _settled(self) -> bool:
        errors = self.errors
        told = self.claim is None or self.claim.expectation.met(errors) is not None
        verdict_told = not self.judged or errors.nonfinite > 0 or judge(errors.bias) is not Verdict.INCONCLUSIVE
        return told and verdict_told and self.prediction_met() is not None and self.rounded_met() is not None

    def _repeats(self) -> bool | None:
        """Whether a second run on the same input gives the same bits; None: not run twice."""
        if self.cell.backend.repeats(self.cell.kernel):
            return None  # unit tests show it once for all
        first, batch = self.outputs[0], self.batches[0]
        gradients = first.gradients is not None and not self.cell.kernel.o_first

        def again() -> bool:
            output = self.cell.backend.run(self.cell.kernel, batch.inputs, gradients=gradients)
            if gradients:
                self.equal_gradients = _equal_gradients(output, first)
            return equal_bits(output.o.float(), first.o.float()) == 1.0

        if not self.cell.kernel.external:
            return again()
        size = first.o.numel() * TORCH_DTYPES[batch.inputs.formats.output].itemsize
        same, self.leaks = left_behind(again, size)
        return same

    @property
    def heads(self) -> int:
        """Heads drawn in all."""
        return self.progress.heads


def _equal_gradients(one: AttentionOutput, other: AttentionOutput) -> float | None:
    """Share of elements of dQ, dK and dV that agree to the bit."""
    if one.gradients is None or other.gradients is None:
        return None
    same = elements = 0.0
    for name in ("dq", "dk", "dv"):
        ours, theirs = (getattr(found, name) for found in (one.gradients, other.gradients))
        share = 1.0 if torch.equal(ours, theirs) else equal_bits(ours.float(), theirs.float())
        same, elements = same + share * ours.numel(), elements + ours.numel()
    return same / elements


def _few(errors: Errors) -> int:
    """Elements that may differ in being finite: underflow sits on an edge that the exponential's last bit decides."""
    return errors.elements // 100
