"""What a cell says on ever more heads: they are drawn until all that is asked of them is told."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from time import process_time

from tiebreak.cases.bounds import UNDECLARED
from tiebreak.cases.claims import UNBIASED, Claim, claim, no_worse, predicted
from tiebreak.cases.errors import Errors, difference, merge
from tiebreak.cases.verdicts import LOOKS, Verdict, judge
from tiebreak.kernels.algorithms import FLASH_ATTENTION
from tiebreak.kernels.flash import BLOCK
from tiebreak.kernels.inputs import AttentionOutput
from tiebreak.kernels.kernel import Declaration, delta_alone
from tiebreak.kernels.plans import FP32_INSIDE
from tiebreak.kernels.shift_rules import SHIFT_RULES
from tiebreak.matrix.bits import equal_bits
from tiebreak.matrix.candidates import tilings
from tiebreak.matrix.experiment import Cell, time_limit
from tiebreak.matrix.workbench import CaseBench

#: O in fp32 throughout, rounded once: what no deterministic kernel of that output format does better.
ROUNDED = Declaration(FLASH_ATTENTION, FP32_INSIDE, SHIFT_RULES["safe"])
_NEXT_LOOK = 3.0  # times the time so far: when one more look, and the run that tells whether bits repeat, are done
FAIR_CLAIM = claim(UNBIASED, "--fair: no bias on any failure input", formats="bf16 fp16")


@dataclass(frozen=True)
class Sample:
    """What all heads drawn so far say of a cell.

    A chaotic or cancelling case predicts nothing: its records say that no prediction is made, not that one was met.
    """

    cell: Cell
    bench: CaseBench  # of its case, in its format
    declaration: Declaration  # whose bounds the kernel is held to, in the tiles that it turns out to work in
    claim: Claim | None  # of the case, about such a kernel
    outputs: tuple[AttentionOutput, ...] = ()  # one a batch
    batch_errors: tuple[Errors, ...] = ()  # of them
    exhausted: bool = False  # whether the case has no more heads than have been drawn
    out_of_time: bool = False  # whether there is no time for one more look

    @property
    def heads(self) -> int:
        return sum(output.o.shape[0] * output.o.shape[1] for output in self.outputs)

    @cached_property
    def errors(self) -> Errors:
        return merge(list(self.batch_errors))

    def emulated(self, declaration: Declaration) -> Errors:
        """Errors of what the emulation makes of a declaration, on all heads."""
        return merge([self.bench.emulated(index, declaration)[1] for index in range(len(self.outputs))])

    @cached_property
    def prediction(self) -> Errors | None:
        """Errors of what the kernel declares; None: nothing is predicted, or the emulation itself was run."""
        kernel, backend = self.cell.kernel, self.cell.backend
        if kernel.declaration is None or backend.predicts or not self.bench.case.bits_tell:
            return None
        return self.emulated(self.declaration)

    @property
    def equal_bits(self) -> float | None:
        """Share of elements of O that agree with the prediction to the bit."""
        if self.prediction is None:
            return None
        emulated = [self.bench.emulated(index, self.declaration)[0].o for index in range(len(self.outputs))]
        pairs = zip(self.outputs, emulated, strict=True)
        return sum(equal_bits(output.o.float(), o) for output, o in pairs) / len(emulated)

    @cached_property
    def rounded(self) -> Errors | None:
        """Errors of a correctly rounded O, of a user's kernel that is biased on a failure input or held to them."""
        failing_of_users = self.cell.kernel.external and self.bench.case.failure
        asked = self.bench.settings.as_rounded or self.verdict is Verdict.BIASED
        return self.emulated(ROUNDED) if failing_of_users and asked else None

    @property
    def cancelled(self) -> bool:
        """Whether no element of O has an error in ulps."""
        return self.errors.left_out == self.errors.elements

    @cached_property
    def verdict(self) -> Verdict | None:
        """On the bias; None where the mean error in ulps says nothing in this case."""
        if self.bench.case.cancels:
            return None
        return Verdict.NONFINITE if self.errors.nonfinite else judge(self.errors.bias)

    @property
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
        return not self.bench.settings.as_rounded or self.rounded is None or no_worse(self.errors, self.rounded)

    @property
    def settled(self) -> bool:
        """Whether more heads would tell nothing more."""
        answers = (self.claim_met, self.prediction_met, self.rounded_met)
        return None not in answers and self.verdict is not Verdict.INCONCLUSIVE

    @property
    def obstacle(self) -> str:
        """Return why more heads can't be drawn by a larger --heads, and what to do about it; empty if they can."""
        if self.out_of_time:
            return f"time for {self.heads} heads and no more: raise --cell-timeout"
        if not self.exhausted:
            return ""
        if self.cancelled:
            return "every element of O has cancelled: no kernel's bias shows on this input"
        return "the case has no more: capture more sequences a batch"


def batches_of(look: int) -> range:
    """Return the indices of the batches that a look draws: as many as all looks before it."""
    return range(2**look // 2, 2**look)


def looks(cell: Cell, bench: CaseBench) -> Iterator[Sample]:
    """Yield what is known after each look, until there are no more heads, the cap is reached or time is short.

    A look draws as many heads as all before it did, and takes as long. Who needs no more of them stops asking.
    """
    began, limit = process_time(), time_limit(cell, bench.settings.cell_timeout)
    output = _output(cell, bench, 0)
    declaration = _in_its_tiles(cell, bench, output)
    sample = Sample(cell, bench, declaration, _claim(cell, bench, declaration))
    for look in range(LOOKS):
        for index in batches_of(look):
            if bench.has(index):
                output = _output(cell, bench, index) if index else output
                errors = _errors(cell, bench, index, output, declaration)
                outputs, batch_errors = (*sample.outputs, output), (*sample.batch_errors, errors)
                sample = replace(sample, outputs=outputs, batch_errors=batch_errors)
        exhausted = not bench.has(len(sample.outputs))
        out_of_time = limit is not None and _NEXT_LOOK * (process_time() - began) > limit
        sample = replace(sample, exhausted=exhausted, out_of_time=out_of_time and not exhausted)
        yield sample
        if exhausted or out_of_time:
            return


def _output(cell: Cell, bench: CaseBench, index: int) -> AttentionOutput:
    """What a kernel makes of one batch. Gradients are measured on the first alone."""
    kernel, gradients = cell.kernel, bench.case.gradients and cell.kernel.has_backward
    if kernel.declaration is not None and cell.backend.predicts:
        return bench.emulated(index, kernel.declaration)[0]
    run = kernel if index == 0 else delta_alone(kernel)
    return cell.backend.run(run, bench.batch(index).inputs, gradients=gradients)


def _errors(cell: Cell, bench: CaseBench, index: int, output: AttentionOutput, declaration: Declaration) -> Errors:
    if cell.kernel.declaration is not None and cell.backend.predicts:
        return bench.emulated(index, declaration)[1]
    return bench.measure(index, output, declaration)


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
    found = bench.batch(0).fits(output.o, named)
    return named[max(found, key=lambda name: found[name].bits)]  # the first of equals


def _claim(cell: Cell, bench: CaseBench, tiled: Declaration) -> Claim | None:
    """What the case, or --fair, claims about such a kernel."""
    case, kernel = bench.case, cell.kernel
    if kernel.external and bench.settings.fair and case.failure:
        return FAIR_CLAIM
    if kernel.declaration is None or not kernel.external:
        return case.claim_about(kernel.declaration, cell.fmt)
    # Where a case cuts its rows into tiles, what it claims is of kernels that cut them too.
    keys = bench.batch(0).inputs.k.shape[-2]
    uncut = tiled.algorithm.tiled and keys > BLOCK.keys and tiled.block.keys > BLOCK.keys
    return None if uncut else case.claim_about(tiled, cell.fmt)
