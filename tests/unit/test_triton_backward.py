"""The Triton kernels' backward passes, in Triton's interpreter.

In the fp32 plan they are held to fp64: with u = 2^-24, T the largest |S| and sums of d, of queries and of keys terms in
any order, P errs by at most (4T + 3d T + n) u and a gradient, to first order, by that much and its own sum's length of
itself with every term's magnitude in its place (Higham, Accuracy and Stability of Numerical Algorithms, 3.1).
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.cases.bounds import error_bound
from tiebreak.cases.errors import measure
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.kernels.algorithms import FLASH_ATTENTION
from tiebreak.kernels.formats import BF16, FP32, Format, Formats
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput, Gradients, sum_groups
from tiebreak.kernels.kernel import Declaration, run_declared
from tiebreak.kernels.plans import FP32_PLAN, Cast, DeltaSource, Exponential, RoundingPlan
from tiebreak.kernels.reference import Reference, reference, reference_gradients
from tiebreak.kernels.shift_rules import SHIFT_RULES
from tiebreak.kernels.triton.launch import run
from tiebreak.kernels.triton.loading import not_interpreting
from tiebreak.kernels.triton.roster import BLOCK, DECLARATIONS

if (reason := not_interpreting()) is not None:
    pytest.skip(reason, allow_module_level=True)

from tiebreak.backends.interpreter.assumptions import EXACT
from tiebreak.backends.interpreter.session import interpreting

U = FP32.unit_roundoff
CASES = {case.name: case for case in SCRIPTED}
ARITHMETIC = EmulatedArithmetic()
SAFE = SHIFT_RULES["safe"]
BASE_TWO = Exponential(base_two=True)

Shape = tuple[int, int, int, int, int, bool]
D32: Shape = (33, 70, 32, 2, 2, False)
GROUPED_CAUSAL: Shape = (70, 70, 16, 6, 2, True)
FEWER_KEYS_CAUSAL: Shape = (150, 19, 16, 2, 2, True)


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    """The kernels are interpreted in every test."""
    with interpreting(EXACT):
        yield


@cache
def _normal(shape: Shape, fmt: Format = FP32) -> tuple[AttentionInputs, Reference]:
    queries, keys, d, heads, key_heads, causal = shape
    generator = torch.Generator().manual_seed(5)
    sizes = [(heads, queries), (key_heads, keys), (key_heads, keys), (heads, queries)]
    tensors = [torch.randn(2, *size, d, generator=generator) for size in sizes]
    q, k, v, do = (x if fmt == FP32 else x.bfloat16().float() for x in tensors)
    inputs = AttentionInputs(q, k, v, do, Formats.of(fmt), causal=causal, noise_seed=3)
    return inputs, reference(inputs)


def _scales(inputs: AttentionInputs, ref: Reference) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV with every term's magnitude in its place."""
    q, do = inputs.q.double().abs(), inputs.do.double().abs()
    k, v = inputs.expanded_k().double().abs(), inputs.expanded_v().double().abs()
    ds = ref.p * (do @ v.transpose(-1, -2) + (do * ref.magnitude).sum(-1, keepdim=True))
    dq, dk = inputs.scale * (ds @ k), inputs.scale * (ds.transpose(-1, -2) @ q)
    return dq, sum_groups(dk, inputs.groups), sum_groups(ref.p.transpose(-1, -2) @ do, inputs.groups)


def _run(inputs: AttentionInputs, declaration: Declaration) -> AttentionOutput:
    return run(inputs, declaration, gradients=True)


def _gradients(output: AttentionOutput) -> Gradients:
    assert output.gradients is not None
    return output.gradients


def _gradients_of(output: AttentionOutput) -> tuple[Tensor, Tensor, Tensor]:
    gradients = _gradients(output)
    return gradients.dq, gradients.dk, gradients.dv


def _fp32_roundoffs(inputs: AttentionInputs) -> float:
    """How many roundings of fp32 may be in a gradient: in the scores, and in the sums."""
    (queries, d), keys = inputs.q.shape[2:], inputs.k.shape[2]
    largest = (inputs.q.double().abs() @ inputs.expanded_k().double().abs().transpose(-1, -2)).amax() * inputs.scale
    return 2 * ((d + 4) * largest.item() + keys) + d + keys + inputs.groups * queries


def _in_fp32(source: DeltaSource) -> Declaration:
    return Declaration(FLASH_ATTENTION, replace(FP32_PLAN, delta_from=source, exponential=BASE_TWO), SAFE, BLOCK)


def _assert_right(computed: AttentionOutput, inputs: AttentionInputs, ref: Reference, roundoffs: float) -> None:
    exact = reference_gradients(inputs, ref)
    for gradient, expected, scale in zip(_gradients_of(computed), exact, _scales(inputs, ref), strict=True):
        assert gradient.shape == expected.shape
        assert ((gradient.double() - expected).abs() <= roundoffs * scale).all()


def test_in_fp32_the_gradients_are_those_of_fp64(attention_shape: Shape) -> None:
    inputs, ref = _normal(attention_shape)
    _assert_right(_run(inputs, _in_fp32(DeltaSource.OUTPUT)), inputs, ref, _fp32_roundoffs(inputs) * U)


@pytest.mark.parametrize("shape", [GROUPED_CAUSAL, FEWER_KEYS_CAUSAL], ids=["grouped_causal", "fewer_keys_causal"])
@pytest.mark.parametrize("source", [DeltaSource.PROBABILITIES, DeltaSource.RECOMPUTED_OUTPUT])
def test_so_they_are_wherever_delta_comes_from(source: DeltaSource, shape: Shape) -> None:
    inputs, ref = _normal(shape)
    _assert_right(_run(inputs, _in_fp32(source)), inputs, ref, _fp32_roundoffs(inputs) * U)


@pytest.mark.parametrize("source", [source for source in DeltaSource if source is not DeltaSource.UNNORMALISED])
def test_padding_has_no_gradient_and_gives_none(source: DeltaSource) -> None:
    shape = (33, 70, 16, 4, 2, True)
    key = torch.arange(70)
    inputs = replace(_normal(shape)[0], key_padding=torch.stack([key * 7919 % 5 > 1, key >= 45]))
    ref, output = reference(inputs), _run(inputs, _in_fp32(source))
    assert (ref.o[1, :, :8] == 0).all()  # query i sees keys to i + 37
    _assert_right(output, inputs, ref, _fp32_roundoffs(inputs) * U)
    assert inputs.key_padding is not None
    for gradient in _gradients_of(output)[1:]:
        padding = ~inputs.key_padding[:, None, :, None].expand_as(gradient)
        assert (gradient[padding] == 0).all()


@pytest.mark.parametrize("kernel", ["triton_fair", "triton_standard"])
def test_in_bf16_the_gradients_keep_their_plans_bound(kernel: str, attention_shape: Shape) -> None:
    _assert_within_the_bound(kernel, attention_shape)


@pytest.mark.parametrize("kernel", ["triton_flash", "triton_dithered", "triton_paper"])
def test_so_they_do_in_the_other_kernels(kernel: str) -> None:
    _assert_within_the_bound(kernel, GROUPED_CAUSAL)


def _assert_within_the_bound(kernel: str, shape: Shape) -> None:
    inputs, ref = _normal(shape, BF16)
    # P, dS and the result round to bf16; O, whose up to 6 roundings (a stochastic one counts twice) enter by delta.
    _assert_right(_run(inputs, DECLARATIONS[kernel]), inputs, ref, 9 * BF16.unit_roundoff)


@pytest.mark.parametrize("kernel", [name for name in DECLARATIONS if not name.startswith("triton_fp8")])
@pytest.mark.parametrize("case", ["tied_maxima[k=2]", "random_grouped"])
def test_delta_and_the_gradients_are_the_emulations(kernel: str, case: str) -> None:
    inputs, declaration = CASES[case].make(1, 0, 32, BF16), DECLARATIONS[kernel]
    ref = reference(inputs)
    output, emulated = _run(inputs, declaration), run_declared(declaration, inputs, ARITHMETIC, True)
    ours, theirs = _gradients(output), _gradients(emulated)
    assert ours.delta is not None
    assert theirs.delta is not None
    # Rows whose O has the emulation's bits: delta is a sum of d terms, and in standard attention of keys x d.
    same = (output.o == emulated.o).all(-1, keepdim=True)
    assert same.double().mean() > 0.9
    terms = inputs.q.shape[3] + (inputs.k.shape[2] if kernel == "triton_standard" else 0)
    size = (inputs.do.abs().double() * ref.magnitude).sum(-1, keepdim=True)
    slack = 8 if kernel == "triton_standard" else 1  # P and dP err too
    assert ((ours.delta - theirs.delta).abs() <= slack * terms * U * size)[same].all()
    # In the norm: few of an element's roundings to bf16 go another way.
    for gradient, expected in zip(_gradients_of(output), _gradients_of(emulated), strict=True):
        assert (gradient - expected).norm() <= BF16.unit_roundoff * expected.norm()


@pytest.mark.parametrize("kernel", ["triton_flash", "triton_paper", "triton_fair"])
def test_deltas_bias_is_the_emulations(kernel: str) -> None:
    inputs, declaration = CASES["tied_maxima[k=2]"].make(1, 0, 256, BF16), DECLARATIONS[kernel]
    ref = reference(inputs)
    bound = error_bound(inputs, ref, declaration)
    outputs = _run(inputs, declaration), run_declared(declaration, inputs, ARITHMETIC, True)
    measured, emulated = (
        measure(output.o, _gradients(output).delta, inputs, ref, bound).delta_bias for output in outputs
    )
    # The orders of the sums differ. That moves a few elements of O to the other neighbour, by which delta differs too,
    # and delta's own row sum of d terms of one sign by d U of it on either side (Higham, 4.2).
    moved = ((outputs[0].o.double() - outputs[1].o.double()) * inputs.do.double()).abs().sum(-1).mean()
    order = 2 * inputs.q.shape[-1] * U
    assert abs(measured.mean - emulated.mean) <= (moved / ref.delta.abs().mean()).item() + order
    # DESIGN.md, expected values: always positive in the paper's plan; `fair` has none.
    assert (measured.low > 0) == (kernel == "triton_paper")
    assert (measured.low <= 0 <= measured.high) == (kernel == "triton_fair")


@pytest.mark.parametrize("point", ["p", "dp", "ds", "delta", "gradients", "s"])
def test_every_rounding_point_of_the_backward_pass_is_a_switch_of_its_own(point: str) -> None:
    inputs, _ = _normal(D32)
    narrowed = {"delta": {"delta", "dq", "dk"}, "p": {"dv"}, "dp": {"dq", "dk"}, "ds": {"dq", "dk"}}
    changed = narrowed.get(point, {"dq", "dk", "dv"} | ({"delta"} if point == "s" else set()))
    plan = replace(FP32_PLAN, **{point: Cast(BF16)})  # type: ignore[arg-type]
    inputs = replace(inputs, formats=Formats.of(BF16))
    before, after = (_gradients(_run(inputs, Declaration(FLASH_ATTENTION, p, SAFE, BLOCK))) for p in (FP32_PLAN, plan))
    names = ("delta", "dq", "dk", "dv")
    assert {name for name in names if not torch.equal(getattr(before, name), getattr(after, name))} == changed


@pytest.mark.parametrize(
    ("source", "fed"),
    [(DeltaSource.OUTPUT, {"o"}), (DeltaSource.PROBABILITIES, {"dp"}), (DeltaSource.RECOMPUTED_OUTPUT, set())],
)
def test_delta_is_computed_from_what_the_plan_says(source: DeltaSource, fed: set[str]) -> None:
    inputs, plan = replace(_normal(D32)[0], formats=Formats.of(BF16)), replace(FP32_PLAN, delta_from=source)

    def delta(changed: RoundingPlan) -> Tensor:
        computed = _gradients(_run(inputs, Declaration(FLASH_ATTENTION, changed, SAFE, BLOCK))).delta
        assert computed is not None
        return computed

    plain = delta(plan)
    narrowed = {"o": replace(plan, o=Cast(BF16)), "dp": replace(plan, dp=Cast(BF16))}
    assert {point for point, changed in narrowed.items() if not torch.equal(delta(changed), plain)} == fed
