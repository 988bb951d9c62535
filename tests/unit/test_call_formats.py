"""Formats of inputs, V, operands and output apart: none of them needs an exception anywhere."""

from dataclasses import replace

import pytest
import torch

from tiebreak.backends.backend import CPU
from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.backends.interpreter import INTERPRETER
from tiebreak.cases.eight_bits import EIGHT_BITS
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.kernels.formats import BF16, FP8_E4M3, FP16, FP32, Formats
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import Declaration, Kernel, run_declared
from tiebreak.kernels.plans import Cast
from tiebreak.kernels.roster import composed_kernel
from tiebreak.kernels.triton.roster import DECLARATIONS, triton_kernels
from tiebreak.matrix.experiments.call import Call
from tiebreak.matrix.selection import Selection, cells

ARITHMETIC = EmulatedArithmetic()
CASES = {case.name: case for case in SCRIPTED}
MIXED = "takes no operands or output in another format than its inputs"


def _inputs(case: str) -> AttentionInputs:
    return CASES[case].make(1, 0, 16, BF16)


def _declared(name: str) -> Declaration:
    declaration = composed_kernel(name).declaration
    assert declaration is not None
    return declaration


def _triton(name: str) -> Kernel:
    return next(kernel for kernel in triton_kernels(interpreted=True) if kernel.name == name)


def test_one_format_stands_for_all_but_those_named() -> None:
    assert Formats.of(BF16) == Formats(BF16, v=BF16, operands=BF16, output=BF16)
    assert Formats.of(BF16, v=FP8_E4M3, output=FP32) == Formats(BF16, v=FP8_E4M3, operands=BF16, output=FP32)
    with pytest.raises(TypeError, match="unexpected keyword argument 'w'"):
        Formats.of(BF16, w=FP16)


@pytest.mark.parametrize("name", ["flash@fused", "standard", "fair", "flash@all_bf16"])
def test_an_output_in_fp32_is_the_one_before_its_cast(name: str) -> None:
    inputs, declaration = _inputs("random"), _declared(name)
    wide = replace(inputs, formats=Formats.of(BF16, output=FP32))
    uncast = replace(declaration, plan=replace(declaration.plan, o=Cast(FP32)))
    o = run_declared(declaration, wide, ARITHMETIC, False).o
    assert torch.equal(o, run_declared(uncast, inputs, ARITHMETIC, False).o)
    assert not torch.equal(o, o.bfloat16().float())


def test_operands_in_another_format_move_p_bar_alone() -> None:
    inputs, declaration = _inputs("random"), _declared("flash@fused")
    moved = replace(declaration, plan=replace(declaration.plan, p_bar=Cast(FP16)))
    o = run_declared(declaration, replace(inputs, formats=Formats.of(BF16, operands=FP16)), ARITHMETIC, False).o
    assert torch.equal(o, run_declared(moved, inputs, ARITHMETIC, False).o)


@pytest.mark.parametrize("own", [{"output": FP32}, {"operands": FP16}], ids=["output", "operands"])
def test_formats_of_its_own_are_asked_for(own: dict[str, object]) -> None:
    inputs = replace(_inputs("random"), formats=Formats.of(BF16, **own))  # type: ignore[arg-type]
    assert composed_kernel("flash@fused").refusal(inputs) is None
    assert CPU.kernel("sdpa_flash").refusal(inputs) == f"sdpa_flash {MIXED}"
    assert _triton("triton_flash").refusal(inputs) == f"triton_flash {MIXED}"


def test_a_v_of_8_bits_is_widened_where_the_plan_does_not_multiply_it() -> None:
    inputs = _inputs("fp8_ties")
    assert inputs.formats == Formats.of(BF16, v=FP8_E4M3)
    assert not inputs.asks()
    for kernel in (composed_kernel("flash@fused"), CPU.kernel("sdpa_flash"), _triton("triton_flash")):
        assert kernel.refusal(inputs) is None


def test_a_kernel_that_multiplies_a_v_of_8_bits_is_not_for_another() -> None:
    kernel, message = _triton("triton_fp8"), "plan fused_fp8 multiplies a V in fp8_e4m3, not in bf16: round it first"
    assert kernel.refusal(_inputs("fp8_ties")) is None
    assert kernel.refusal(_inputs("tied_maxima[k=2]")) == message
    with pytest.raises(ValueError, match=message):
        kernel.compute(_inputs("tied_maxima[k=2]"), ARITHMETIC, False)
    unsuited = {name: _triton(name).unsuited(Formats.of(BF16)) for name in DECLARATIONS}
    assert {name for name, reason in unsuited.items() if reason} == {"triton_fp8", "triton_fp8_offset"}


def test_a_kernel_is_left_out_of_the_cells_whose_formats_it_is_not_for() -> None:
    if INTERPRETER.unavailable() is not None:
        pytest.skip("no interpreter")
    selected, _ = cells(Selection("interpreter", "triton_fp8,triton_flash"))
    ran = {
        kernel: {
            cell.experiment.name
            for cell in selected
            if isinstance(cell.experiment, Call) and cell.kernel.name == kernel
        }
        for kernel in ("triton_fp8", "triton_flash")
    }
    assert ran["triton_fp8"] == set(EIGHT_BITS)
    assert ran["triton_flash"] == {name for name, case in CASES.items() if not case.on_request}
