"""What a cell says on ever more heads: they are drawn until its claim, its verdict and its prediction are settled."""

from collections.abc import Iterable
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
from tiebreak.matrix.bits import equal_bits
from tiebreak.matrix.candidates import tilings
from tiebreak.matrix.experiment import Cell, time_limit
from tiebreak.matrix.fits import fits
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
    """What all heads drawn so far say of a cell.

    A chaotic or cancelling case predicts nothing: its records say that no prediction is made, not that one was met.
    """

    case: Case
    declaration: Declaration  # whose bounds the kernel is held to, in the tiles that it turns out to work in
    claim: Claim | None  # of the case, about such a kernel
    predicted: bool  # whether what the kernel declares is emulated beside it
    as_rounded: bool  # whether it is held to no more bias than a correctly rounded O
    draws: tuple[Draw, ...] = ()
    exhausted: bool = False  # whether the case has no more heads than have been drawn
    out_of_time: bool = False  # whether a look was left out that might have told

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

    @property
    def remedy(self) -> str:
        """What to do about a cell that its heads do not settle."""
        if self.out_of_time:
            return f"time for {self.heads} heads and no more: raise --cell-timeout"
        if not self.exhausted:
            return f"--heads {heads_to_tell(self.errors.bias, self.heads)} would do, about"
        if self.cancelled:
            return "every element of O has cancelled: no kernel's bias shows on this input"
        return "the case has no more: capture more sequences a batch"


def _merged(batches: Iterable[Errors | None]) -> Errors | None:
    known = [errors for errors in batches if errors is not None]
    return merge(known) if known else None


def sampled(cell: Cell, bench: CaseBench) -> Sample:
    """Look at ever more heads until all is settled, there are no more or the cap is reached.

    A look draws as many heads as all before it did, and takes as long. Where the time is too short it is left out.

    Args:
        cell: whose kernel is run.
        bench: of its case, in its format.
    """
    began, limit = process_time(), time_limit(cell, bench.settings.cell_timeout)
    output = _output(cell, bench, 0)
    sample = _begun(cell, bench, _in_its_tiles(cell, bench, output))
    for look in range(LOOKS):
        for index in range(2**look // 2, 2**look):
            if bench.has(index):
                output = _output(cell, bench, index) if index else output
                sample = replace(sample, draws=(*sample.draws, _drawn(cell, output, sample, bench, index)))
        exhausted = not bench.has(len(sample.draws))
        out_of_time = limit is not None and _SHARE * (process_time() - began) > limit
        if sample.settled or exhausted or out_of_time:
            return replace(sample, exhausted=exhausted, out_of_time=out_of_time and not exhausted)
    return sample


def _output(cell: Cell, bench: CaseBench, index: int) -> AttentionOutput:
    """What a kernel makes of one batch. Gradients are measured on the first alone."""
    kernel, batch = cell.kernel, bench.batch(index)
    if kernel.declaration is not None and _is_emulated(cell):
        return bench.emulated(index, kernel.declaration)[0]
    run, gradients = kernel if index == 0 else delta_alone(kernel), bench.case.gradients and kernel.has_backward
    return batch.on(cell.backend, run).run(run, batch.inputs, gradients=gradients)


def _is_emulated(cell: Cell) -> bool:
    return cell.backend.predicts and cell.kernel.declaration is not None


def _in_its_tiles(cell: Cell, bench: CaseBench, output: AttentionOutput) -> Declaration:
    """The declaration whose bounds a kernel is held to: a user's in the tiles that it works in.

    A bound grows with the number of tiles: a kernel that declares nothing may work in the smallest.
    """
    declaration = cell.kernel.declaration or UNDECLARED
    if not cell.kernel.external:
        return declaration
    tiled = tilings(declaration)
    if cell.kernel.declaration is None or len(tiled) == 1:
        return tiled[-1]
    named = {str(each.block): each for each in tiled}
    found = fits(output.o, bench.batch(0), named)
    return named[max(found, key=lambda name: found[name].bits)]  # the first of equals


def _begun(cell: Cell, bench: CaseBench, declaration: Declaration) -> Sample:
    kernel, case, settings = cell.kernel, bench.case, bench.settings
    return Sample(
        case,
        declaration,
        _claim(cell, bench, declaration),
        predicted=case.bits_tell and kernel.declaration is not None and not cell.backend.predicts,
        as_rounded=kernel.external and settings.as_rounded and case.failure,
    )


def _claim(cell: Cell, bench: CaseBench, tiled: Declaration) -> Claim | None:
    case, kernel, fmt = bench.case, cell.kernel, cell.fmt
    if kernel.external and bench.settings.fair and case.failure:
        return _FAIR_CLAIM
    if kernel.declaration is None or not kernel.external:
        return case.claim_about(kernel.declaration, fmt)
    # Where a case cuts its rows into tiles, what it claims is of kernels that cut them too.
    keys = bench.batch(0).inputs.k.shape[-2]
    uncut = tiled.algorithm.tiled and keys > BLOCK.keys and tiled.block.keys > BLOCK.keys
    return None if uncut else case.claim_about(tiled, fmt)


def _drawn(cell: Cell, output: AttentionOutput, sample: Sample, bench: CaseBench, index: int) -> Draw:
    if _is_emulated(cell):
        _, errors = bench.emulated(index, sample.declaration)
    else:
        errors = bench.measure(index, output, sample.declaration)
    prediction = share = None
    if sample.predicted:
        emulated, prediction = bench.emulated(index, sample.declaration)
        share = equal_bits(output.o.float(), emulated.o)
    rounded = bench.emulated(index, ROUNDED)[1] if sample.as_rounded else None
    return Draw(output, errors, prediction, share, rounded)


def rounded_errors(cell: Cell, sample: Sample, bench: CaseBench) -> Errors | None:
    """Errors of a correctly rounded O on the heads drawn; None where nothing asks for it.

    That is of a user's kernel that is biased on a failure input, or held to no more bias than this.
    """
    of_interest = cell.kernel.external and bench.case.failure and sample.verdict is Verdict.BIASED
    if not of_interest or sample.rounded is not None:
        return sample.rounded
    return merge([bench.emulated(index, ROUNDED)[1] for index in range(len(sample.draws))])
