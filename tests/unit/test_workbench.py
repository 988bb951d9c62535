"""What cells of one case share: computed once, and the same to the bit as without sharing."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from tiebreak.backends.backend import EMULATION
from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.cases import gradients as gradients_module
from tiebreak.cases.bounds import ErrorBounds
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.flash import BLOCK, Block
from tiebreak.kernels.formats import BF16, FP32
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import Declaration, composed
from tiebreak.kernels.plans import FP32_PLAN, Accumulator, Cast, Exponential
from tiebreak.kernels.reference import Reference, reference_gradients
from tiebreak.kernels.roster import DEFAULT_ROSTER, composed_kernel
from tiebreak.matrix import workbench
from tiebreak.matrix.workbench import Settings, SharedEmulation, Workbench
from tiebreak.studies.cells import CASES, judged


@pytest.fixture
def bench() -> Workbench:
    return Workbench(Settings(heads=16))


def declared(kernel: str) -> Declaration:
    declaration = composed_kernel(kernel).declaration
    assert declaration is not None
    return declaration


def test_kernels_of_one_plan_and_as_many_tiles_share_a_bound_and_others_do_not(bench: Workbench) -> None:
    paper, fixed, fused = (declared(name) for name in ("flash@paper", "stabilized@paper", "flash@fused"))
    tiled = replace(paper, block=Block(keys=32))
    shared = bench.case(CASES["random"], BF16).batch(0)
    of, of_gradients = shared.bounds.of, shared.gradient_bounds.of
    for same in (fixed, replace(paper, block=Block(4096, 4096))):
        assert of(same) is of(paper)
        assert of_gradients(same) is of_gradients(paper)
    for each in (fixed, fused, tiled):
        assert torch.equal(of(each), ErrorBounds(shared.inputs, shared.ref).of(each))
    for other in (fused, tiled):
        assert not torch.equal(of(other), of(paper))
        assert of_gradients(other) is not of_gradients(paper)


@pytest.mark.parametrize(
    ("case", "block"), [("random_causal", BLOCK), ("random_grouped", Block(queries=3, keys=20))], ids=["whole", "tiles"]
)
def test_the_emulation_of_every_kernel_is_the_same_to_the_bit_as_alone(
    bench: Workbench, case: str, block: Block
) -> None:
    for name in DEFAULT_ROSTER:
        declaration = replace(declared(name), block=block)
        shared, _ = bench.case(CASES[case], BF16).emulated(0, declaration)
        inputs = bench.case(CASES[case], BF16).batch(0).inputs
        alone = EMULATION.run(composed(name, declaration), inputs, gradients=CASES[case].gradients)
        for ours, theirs in zip(tensors(shared), tensors(alone), strict=True):
            assert torch.equal(ours, theirs)


def test_nothing_is_remembered_of_an_operand_that_was_forgotten_meanwhile(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it lay, something else may lie by then."""
    inputs = bench.case(CASES["random"], BF16).batch(0).inputs
    shared, k = SharedEmulation(inputs), inputs.k.mT
    p = shared.cast(inputs.q * 1.0, Cast(BF16))
    shared.exp(p, Exponential())
    with monkeypatch.context() as narrow:
        # Room for p and its exponential, but not for p in fp64, of which the product is made.
        narrow.setattr(workbench, "_KEPT", 2 * p.numel())
        shared.matmul(p, k, FP32_PLAN.s, Accumulator.EXACT)
    p.data.neg_()  # unseen by its version, as what is made anew in its place
    shared.exp(p, Exponential())
    expected = EmulatedArithmetic().matmul(p, k, FP32_PLAN.s, Accumulator.EXACT)
    assert torch.equal(shared.matmul(p, k, FP32_PLAN.s, Accumulator.EXACT), expected)


def tensors(output: AttentionOutput) -> list[Tensor]:
    assert output.lse is not None
    gradients = output.gradients
    backward = [] if gradients is None else [gradients.dq, gradients.dk, gradients.dv, gradients.delta]
    return [output.o, output.lse, *(tensor for tensor in backward if tensor is not None)]


def test_a_product_of_inputs_that_someone_has_written_to_is_computed_anew(bench: Workbench) -> None:
    shared = bench.case(CASES["random"], BF16).batch(0)
    first = product(shared.inputs, shared.arithmetic)
    shared.inputs.q.mul_(2.0)
    assert torch.equal(product(shared.inputs, shared.arithmetic), 2.0 * first)


def product(inputs: AttentionInputs, on: Arithmetic) -> Tensor:
    return on.matmul(inputs.q, inputs.k.transpose(-1, -2), Cast(FP32), Accumulator.EXACT)


def test_the_references_gradients_are_computed_once_a_batch(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[AttentionInputs] = []

    def gradients(inputs: AttentionInputs, ref: Reference) -> tuple[Tensor, Tensor, Tensor]:
        asked.append(inputs)
        return reference_gradients(inputs, ref)

    monkeypatch.setattr(gradients_module, "reference_gradients", gradients)
    for name in ("flash@paper", "standard"):
        judged(composed_kernel(name), "random_causal", backend=EMULATION, bench=bench)
    assert len(asked) == 1


def test_errors_are_those_of_an_earlier_emulated_output_with_the_same_bits_and_of_no_other(bench: Workbench) -> None:
    of_case, plan = bench.case(CASES["random_causal"], BF16), declared("flash@paper")
    output, errors = of_case.emulated(0, plan)
    assert output.gradients is not None
    of_gradients = partial(of_case.gradient_errors, declaration=plan)
    gradient_errors = of_gradients(output.gradients, emulated=True)
    same = replace(output, o=output.o.clone())
    assert of_case.measure(0, same, plan) is errors
    assert of_gradients(replace(output.gradients, dv=output.gradients.dv.clone()), emulated=False) is gradient_errors
    other = replace(output, o=output.o.clone())
    other.o[-1, -1, -1, -1] *= 2
    assert of_case.measure(0, other, plan).max_ulps > errors.max_ulps
    assert of_case.measure(0, other, plan) is not of_case.measure(0, other, plan)  # a device's output is not kept
    assert of_case.measure(0, same, declared("flash@fused")).error_over_bound != errors.error_over_bound
    for unlike in (output.o.mT.contiguous().mT, output.o.masked_fill(output.o == output.o[0, 0, 0, 0], -0.0)):
        assert of_case.measure(0, replace(output, o=unlike), plan) is not errors
