"""What a cell says on ever more heads: they are drawn until its claim, its verdict and its prediction are settled."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from time import process_time

from tiebreak.cases.bounds import UNDECLARED
from tiebreak.cases.case import Case
from tiebreak.cases.claims import UNBIASED, Claim, claim, no_worse, predicted
from tiebreak.cases.errors import Errors, difference, merge
from tiebreak.cases.verdicts import LOOKS, Verdict, heads_to_tell, judge
from tiebreak.kernels.algorithms import FLASH_ATTENTION
from tiebreak.kernels.flash import BLOCK
from tiebreak.kernels.inputs import AttentionOutput
from tiebreak.kernels.kernel import Declaration, delta_alone
from tiebreak.kernels.plans import FP32_INSIDE
from tiebreak.kernels.shift_rules import SHIFT_RULES
from tiebreak.matrix.attribution import Fit, equal_bits, fits
from tiebreak.matrix.candidates import on_device, tilings
from tiebreak.matrix.experiment import Cell, time_limit
from tiebreak.matrix.workbench import CaseBench

#: O in fp32 throughout, rounded once: what no deterministic kernel of that output format does better.
ROUNDED = Declaration(FLASH_ATTENTION, FP32_INSIDE, SHIFT_RULES["safe"])
_SHARE = 3.0  # of the time so far: what it is after one more look and the run that tells whether bits repeat
_FAIR_CLAIM = claim(UNBIASED, "--fair: no bias on any failure input", formats="bf16 fp16")


@dataclass(frozen=True)
class Draw:
    """What one batch of heads gave."""

    output: AttentionOutput
    errors: Errors  # of the output
    prediction: Errors | None  # of what the kernel's declaration predicts; None: none is made
    equal_bits: float | None  # share of elements of O that agree with that to the bit
    rounded: Errors | None  # of a correctly rounded O; None: the kernel is not held to one


@dataclass(frozen=True)
class Sample:
    """What all heads drawn so far say of a cell."""

    case: Case
    declaration: Declaration  # whose bounds the kernel is held to, in the tiles that it turns out to work in
    claim: Claim | None  # of the case, about such a kernel
    draws: tuple[Draw, ...] = ()

    @property
    def heads(self) -> int:
        """In all."""
        return sum(draw.output.o.shape[0] * draw.output.o.shape[1] for draw in self.draws)

    @cached_property
    def errors(self) -> Errors:
        """Of all heads."""
        return merge([draw.errors for draw in self.draws])

    @cached_property
    def prediction(self) -> Errors | None:
        """Errors of what is predicted, on all heads."""
        return _merged(draw.prediction for draw in self.draws)

    @cached_property
    def rounded(self) -> Errors | None:
        """Errors of a correctly rounded O, on all heads."""
        return _merged(draw.rounded for draw in self.draws)

    @property
    def equal_bits(self) -> float | None:
        """Share of elements that agree with the prediction to the bit."""
        shares = [draw.equal_bits for draw in self.draws if draw.equal_bits is not None]
        return sum(shares) / len(shares) if shares else None

    @property
    def cancelled(self) -> bool:
        """Whether no element of O has an error in ulps."""
        return self.errors.left_out == self.errors.elements

    @cached_property
    def verdict(self) -> Verdict | None:
        """On the bias; None where the mean error in ulps says nothing in this case."""
        if self.case.cancels:
            return None
        return Verdict.NONFINITE if self.errors.nonfinite else judge(self.errors.bias)

    @cached_property
    def claim_met(self) -> bool | None:
        """Whether what the case claims is so; None: the data do not tell."""
        return self.claim is None or self.claim.expectation.met(self.errors)

    @cached_property
    def prediction_met(self) -> bool | None:
        """Whether the output is what the declaration predicts; None: the data do not tell."""
        errors, prediction = self.errors, self.prediction
        if prediction is None:
            return True
        if errors.nonfinite or prediction.nonfinite:
            # Underflow sits on an edge that the exponential's last bit decides.
            return abs(errors.nonfinite - prediction.nonfinite) <= errors.elements // 100
        return predicted(difference(errors, prediction))

    @cached_property
    def rounded_met(self) -> bool | None:
        """Whether the output is no more biased than a correctly rounded O; None: the data do not tell."""
        return self.rounded is None or no_worse(self.errors, self.rounded)

    @property
    def settled(self) -> bool:
        """Whether more heads would tell nothing more."""
        answers = (self.claim_met, self.prediction_met, self.rounded_met)
        return None not in answers and self.verdict is not Verdict.INCONCLUSIVE


def _merged(batches: Iterable[Errors | None]) -> Errors | None:
    known = [errors for errors in batches if errors is not None]
    return merge(known) if known else None


class SequentialSampler:
    """Draws the heads of a cell, look after look."""

    def __init__(self, cell: Cell, bench: CaseBench) -> None:
        """Draw nothing yet.

        Args:
            cell: whose kernel is run.
            bench: of its case, in its format.
        """
        self._cell, self._bench = cell, bench
        self._out_of_time = False  # whether a look was left out that might have told
        declaration, external = cell.kernel.declaration, cell.kernel.external
        tiled = tilings(declaration or UNDECLARED) if external else (declaration or UNDECLARED,)
        # A bound grows with the number of tiles: a kernel that says nothing may work in the smallest.
        self._tilings = tiled[-1:] if declaration is None else tiled
        # A chaotic or cancelling case predicts nothing: its records say none is made, not that one was met.
        bits_tell = not (bench.case.cancels or bench.case.chaotic)
        self._predicts = bits_tell and declaration is not None and not cell.backend.predicts
        self._candidates = on_device(cell.backend) if bits_tell and declaration is None else {}
        self._as_rounded = external and bench.settings.as_rounded and bench.case.failure
        self._fits: Mapping[str, Fit] = {}
        self.sample = self._nothing_yet(self._tilings[0])

    def _nothing_yet(self, declaration: Declaration) -> Sample:
        return Sample(self._bench.case, declaration, self._claim(declaration))

    def _claim(self, tiled: Declaration) -> Claim | None:
        case, kernel, fmt = self._bench.case, self._cell.kernel, self._cell.fmt
        if kernel.external and self._bench.settings.fair and case.failure:
            return _FAIR_CLAIM
        if kernel.declaration is None or not kernel.external:
            return case.claim_about(kernel.declaration, fmt)
        # Where a case cuts its rows into tiles, what it claims is of kernels that cut them too.
        keys = self._bench.batch(0).inputs.k.shape[-2]
        uncut = tiled.algorithm.tiled and keys > BLOCK.keys and tiled.block.keys > BLOCK.keys
        return None if uncut else case.claim_about(tiled, fmt)

    def draw(self) -> Sample:
        """Look at ever more heads until all is settled, there are no more or the cap is reached.

        A look draws as many heads as all before it did, and takes as long. Where the time is too short it is left out.
        """
        began, limit = process_time(), time_limit(self._cell, self._bench.settings.cell_timeout)
        for look in range(LOOKS):
            for index in range(2**look // 2, 2**look):
                if self._bench.has(index):
                    self._draw(index)
            if self.sample.settled or self.exhausted:
                break
            self._out_of_time = limit is not None and _SHARE * (process_time() - began) > limit
            if self._out_of_time:
                break
        return self.sample

    def _draw(self, index: int) -> None:
        output, errors = self._measured(index)
        prediction = share = rounded = None
        if self._predicts:
            emulated, prediction = self._bench.emulated(index, self.sample.declaration)
            share = equal_bits(output.o.float(), emulated.o)
        if self._as_rounded:
            _, rounded = self._bench.emulated(index, ROUNDED)
        draws = (*self.sample.draws, Draw(output, errors, prediction, share, rounded))
        self.sample = replace(self.sample, draws=draws)

    def _measured(self, index: int) -> tuple[AttentionOutput, Errors]:
        backend, kernel, bench = self._cell.backend, self._cell.kernel, self._bench
        if backend.predicts and kernel.declaration is not None:
            return bench.emulated(index, self.sample.declaration)
        # Gradients are measured on the first batch alone.
        run, gradients = kernel if index == 0 else delta_alone(kernel), bench.case.gradients and kernel.has_backward
        batch = bench.batch(index)
        output = batch.on(backend, run).run(run, batch.inputs, gradients=gradients)
        if index == 0:
            self._recognise(output)
        return output, bench.measure(index, output, self.sample.declaration)

    def _recognise(self, output: AttentionOutput) -> None:
        """Find the tiles that a user's kernel works in, or, if it declares nothing, what the known plans fit."""
        batch = self._bench.batch(0)
        if len(self._tilings) > 1:
            named = {str(declaration.block): declaration for declaration in self._tilings}
            tiles = fits(output.o, batch, named)
            best = max(tiles, key=lambda name: tiles[name].bits)  # the first of equals
            self.sample = self._nothing_yet(named[best])
        if self._candidates:
            self._fits = fits(output.o, batch, self._candidates)

    def rounded(self) -> Errors | None:
        """Errors of a correctly rounded O on the heads drawn; None where nothing asks for it.

        That is of a user's kernel that is biased on a failure input, or held to no more bias than this.
        """
        sample = self.sample
        of_interest = self._cell.kernel.external and self._bench.case.failure and sample.verdict is Verdict.BIASED
        if not of_interest or sample.rounded is not None:
            return sample.rounded
        return merge([self._bench.emulated(index, ROUNDED)[1] for index in range(len(sample.draws))])

    @property
    def exhausted(self) -> bool:
        """Whether the case has no more heads than have been drawn."""
        return not self._bench.has(len(self.sample.draws))

    @property
    def fits(self) -> Mapping[str, Fit]:
        """What every candidate has in common with the output of a kernel that declares nothing, where that tells."""
        return {} if self.sample.cancelled else self._fits

    @property
    def remedy(self) -> str:
        """What to do about a cell that its heads do not settle."""
        if self._out_of_time:
            return f"time for {self.sample.heads} heads and no more: raise --cell-timeout"
        if not self.exhausted:
            return f"--heads {heads_to_tell(self.sample.errors.bias, self.sample.heads)} would do, about"
        if self.sample.cancelled:
            return "every element of O has cancelled: no kernel's bias shows on this input"
        return "the case has no more: capture more sequences a batch"
