"""What acceptance rules in public use say of a cell, with `--rules`: asked of the heads that it draws at first."""

from functools import cache

from tiebreak.cases.acceptance import Compared, answers
from tiebreak.kernels.backward_passes import BACKWARD_PASSES
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.inputs import AttentionOutput
from tiebreak.kernels.kernel import Declaration
from tiebreak.matrix.workbench import CaseBench
from tiebreak.reports.records import record as records


@cache
def eager() -> Declaration:
    """PyTorch's eager attention in the format of the inputs, forward and by autograd, as flash-attention's tests have
    it: a product, a softmax and a product, all tensors between them in that format.
    """
    backward = BACKWARD_PASSES["autograd's of a softmax in 16 bits (P, dP and dS in 16 bits)"]
    return backward.after(parse_declaration("standard,s=input,q=input"))


def compared(output: AttentionOutput, bench: CaseBench) -> tuple[Compared, list[Compared]]:
    """O of the first batch, and its gradients where there are, beside what rules hold them against."""
    batch = bench.batch(0)
    eagers, fused = (bench.emulated(0, declaration)[0] for declaration in (eager(), parse_declaration("flash@fused")))
    fmt = batch.inputs.formats.output
    o = Compared(output.o.double(), batch.ref.o, fmt, eagers.o.double(), fused.o.double())
    if output.gradients is None:
        return o, []
    gradients = []
    for name, exact in zip(("dq", "dk", "dv"), batch.gradients.gradients, strict=True):
        out, theirs, other = (getattr(made.gradients, name).double() for made in (output, eagers, fused))
        gradients.append(Compared(out, exact, fmt, theirs, other, f"d{name[1].upper()}"))
    return o, gradients


def said(output: AttentionOutput, bench: CaseBench) -> dict[str, records.RuleAnswer]:
    """What every rule says of an output of the first batch, as records have it."""
    return {
        name: records.RuleAnswer(
            answer.passed,
            {
                each.what: records.RuleReading(records.finite(each.number), records.finite(each.limit))
                for each in answer.readings
            },
            answer.needs,
        )
        for name, answer in answers(*compared(output, bench))
    }
