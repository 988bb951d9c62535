"""Attention in 8 bits: operands with scales, P-bar's offset and saturation, and what l sums."""

import math
from dataclasses import replace

import gfloat  # type: ignore[import-untyped]
import gfloat.formats  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
from torch import Tensor

from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.cases.bounds import ErrorBounds
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.formats import BF16, FP8_E4M3, Formats
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import run_backward, run_forward
from tiebreak.kernels.operands import Operands
from tiebreak.kernels.plans import Cast
from tiebreak.kernels.reference import reference

ARITHMETIC = EmulatedArithmetic()


def _normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _inputs(keys: int = 256, queries: int = 16, heads: int = 2, d: int = 32) -> AttentionInputs:
    q, k, v = (_normal(1, heads, n, d, seed=n + i).bfloat16().float() for i, n in enumerate((queries, keys, keys)))
    return AttentionInputs(q, k, v, torch.ones_like(q), Formats.of(BF16), noise_seed=3)


def _attend(text: str, inputs: AttentionInputs) -> AttentionOutput:
    return run_forward(parse_declaration(text), inputs, ARITHMETIC)


def _taken(text: str, inputs: AttentionInputs, index: int) -> Tensor:
    """q, K or V as the product of a plan takes them, times their scales."""
    plan = parse_declaration(f"fused,{text}").plan
    return Operands.from_call(inputs, plan, ARITHMETIC).taken[index].whole


def _only(x: Tensor) -> float:
    """The one number that all elements are."""
    (number,) = set(x.flatten().tolist())
    return float(number)


IN_GFLOAT = {"fp8_e4m3": "mxfp8_e4m3", "fp8_e5m2": "mxfp8_e5m2", "int8": "mxint8"}


@pytest.mark.parametrize("name", IN_GFLOAT)
def test_microscaling_is_gfloat_s(name: str) -> None:
    inputs, info = _inputs(keys=8, queries=8, d=64), getattr(gfloat.formats, f"format_info_{IN_GFLOAT[name]}")
    # No more than 1.75 times a power of two: gfloat refuses to cut what e4m3 does not hold. Sizes over 60 octaves.
    sizes = torch.exp2(torch.arange(-30.0, 2.0, 2.0)).view(1, 2, 8, 1)
    x = ((inputs.q.clamp(-1.75, 1.75) * sizes).double()).float()
    x[..., ::32] = 1.5 * sizes
    quantized = _taken(f"q8={name}/micro32", replace(inputs, q=x), 0)
    blocks = x.double().numpy().reshape(-1, 32)
    expected = np.stack([gfloat.quantize_block(info, block, gfloat.compute_scale_amax) for block in blocks])
    assert np.array_equal(quantized.double().numpy().reshape(-1, 32), expected)


def test_what_microscaling_s_scale_leaves_beyond_the_largest_is_cut() -> None:
    x = torch.full((1, 1, 4, 32), 0.25)
    x[..., 0] = 1.96875  # times 2^8 it is 504, and e4m3 ends at 448
    inputs = replace(_inputs(queries=4, heads=1), q=x)
    assert _only(_taken("q8=fp8_e4m3/micro32", inputs, 0)[..., 0]) == 1.75


def test_casts_are_pytorch_s() -> None:
    inputs = _inputs()
    scale = (inputs.q.abs().amax() / 127.0).item()
    expected = torch.fake_quantize_per_tensor_affine(inputs.q, scale, 0, -127, 127)
    assert torch.allclose(_taken("q8=int8/tensor", inputs, 0), expected, rtol=1e-6, atol=0.0)
    for name, dtype in (("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)):
        of_heads = inputs.k.abs().amax((-2, -1), keepdim=True) / torch.finfo(dtype).max  # it fills the format
        assert torch.equal(_taken(f"k8={name}/head", inputs, 1), (inputs.k / of_heads).to(dtype).float() * of_heads)


@pytest.mark.parametrize("index", [0, 1, 2], ids=["q", "k", "v"])
def test_the_more_scales_the_less_is_lost(index: int) -> None:
    """Rows of very different size: one scale for all loses the small ones, one for their block does not."""
    inputs, name = _inputs(queries=256), ("q", "k", "v")[index]
    blocks, heads = torch.exp2(-8 * (torch.arange(256.0) // 64)), torch.tensor([1.0, 2.0**-12])
    x = (getattr(inputs, name) * blocks.view(1, 1, -1, 1) * heads.view(1, 2, 1, 1)).float()
    lost, nothing = {}, replace(_inputs(), v=torch.zeros(1, 2, 256, 32))
    for scaling in ("tensor", "head", "block64", "micro32"):
        taken = _taken(f"{name}8=fp8_e4m3/{scaling}", replace(inputs, **{name: x}), index)
        lost[scaling] = ((taken - x).abs() / x.abs()).mean().item()
        assert not _attend(f"fused,v8=fp8_e4m3/{scaling}", nothing).o.any(), "zeros have a scale too"
    # e4m3 ends at 2^-18 of its largest. The last quarter of a head is 2^-24 of the first: a quarter is lost. Of the
    # second head, 2^-12 as large, one scale for both loses three quarters: with the first's one, half of all.
    assert lost["tensor"] > 0.5
    assert 0.25 < lost["head"] < lost["tensor"]
    assert max(lost["block64"], lost["micro32"]) < 2 * FP8_E4M3.unit_roundoff


def test_q_takes_the_scale_in_base_two() -> None:
    inputs = _inputs()
    expected = inputs.q * (inputs.scale * math.log2(math.e))
    taken = _taken("base=2,q8=int8/head+scale", inputs, 0)
    assert (taken - expected).abs().max() <= expected.abs().max() / 127 / 2 * 1.001
    # A factor of all of q is one of its scale: the numbers are the same, and O is, but for its own last bit.
    scaled, plain = (_attend(f"fused,base=2,q8=int8/head{also}", inputs).o for also in ("+scale", ""))
    assert ((scaled - plain).abs() <= 2.0**-7 * plain.abs()).all()


def test_taking_the_mean_off_k_is_nothing_to_softmax_and_much_to_8_bits() -> None:
    """A channel of K that is 50 everywhere takes all of int8's range; softmax does not see it."""
    inputs = _inputs()
    inputs = replace(inputs, k=(inputs.k + 50.0 * (torch.arange(32) == 5)).bfloat16().float())
    exact = reference(inputs).o
    smooth, plain = (
        (_attend(f"fused,k8=int8/head,smooth_k={word}", inputs).o - exact).abs().mean() for word in ("yes", "no")
    )
    # The channel makes the steps 12 times as large, at the least: 50 and more where 4 was the largest. Half of that.
    assert smooth < plain / 6


@pytest.mark.parametrize("name", ["fused", "fused_contracted", "fused,base=2"])
def test_a_power_of_two_on_p_bar_changes_no_bit_of_16(name: str) -> None:
    inputs = _inputs()
    plain, lifted = _attend(name, inputs), _attend(f"{name},offset=8", inputs)
    assert lifted.lse is not None
    assert plain.lse is not None
    assert (lifted.lse - plain.lse).abs().max() < 1e-5
    if "contract" not in name:  # there it is part of a sum that is rounded
        assert torch.equal(plain.o, lifted.o)
    assert (plain.o - lifted.o).abs().max() <= 2.0**-8 * plain.o.abs().max()


def _stale(growth: float) -> AttentionInputs:
    """V of 1; a key of the first block of two at the score 0, one of the second at `growth`."""
    q, k = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 4, 16)
    q[..., 0], k[0, 0, :, 0] = 4.0, torch.tensor([0.0, -100.0, growth, -100.0])
    return AttentionInputs(q, k, torch.ones_like(k), torch.ones_like(q), Formats.of(BF16))


@pytest.mark.parametrize(
    ("plan", "left"),
    [
        # P-bar is 256 and 256 e^2.5, of which e4m3 holds 448; l is 256 (1 + e^2.5).
        ("fused_fp8_offset", (256 + 448) / (256 * (1 + math.exp(2.5)))),
        ("fused_fp8_clamped", 1.0),
        ("fused_fp8_offset,l_from=rounded", 1.0),
        ("fused_e5m2_offset", (256 + 3072) / (256 * (1 + math.exp(2.5)))),  # rounded to 3072, no more
        ("fused_fp8_offset_4", (16 + 192) / (16 * (1 + math.exp(2.5)))),
    ],
)
def test_a_maximum_that_lags_saturates_p_bar(plan: str, left: float) -> None:
    o = _attend(f"lazy_4@{plan},o=fp32,tile=2", _stale(2.5)).o
    assert _only(o) == pytest.approx(left, rel=1e-6)
    followed = _attend(f"flash@{plan},o=fp32,tile=2", _stale(2.5)).o
    assert _only(followed) == pytest.approx(1.0, rel=0.01)
    assert _only(_attend(f"lazy_4@{plan},tile=2", _stale(3.0)).o) == pytest.approx(1.0, rel=0.01)


def test_a_cast_that_does_not_saturate_is_lost() -> None:
    assert _attend("lazy_4@fused_fp8_offset,p_bar=fp8_e4m3,tile=2", _stale(2.5)).o.isnan().all()
    cast = ARITHMETIC.cast(torch.tensor([torch.inf, -torch.inf, 500.0, torch.nan]), Cast(FP8_E4M3, saturates=True))
    assert cast[:3].tolist() == [448.0, -448.0, 448.0]
    assert cast[3].isnan()


@pytest.mark.parametrize("name", ["fp8", "fp8_tensor", "fp8_block", "fp8_e5m2_v", "mxfp8", "sage", "fp8_hopper"])
@pytest.mark.parametrize("case", ["random_grouped", "random_scaled"])
def test_errors_keep_within_the_plan_s_bound(name: str, case: str) -> None:
    chosen = next(scripted for scripted in SCRIPTED if scripted.name == case)
    inputs = chosen.make(1, 0, 16, BF16)
    declaration = parse_declaration(name)
    ref = reference(inputs)
    error = (run_forward(declaration, inputs, ARITHMETIC).o.double() - ref.o).abs()
    assert (error <= ErrorBounds(inputs, ref).of(declaration)).all()
    # 8 bits cost something: this is no bound on another plan's error.
    plain = (run_forward(parse_declaration("fp32"), inputs, ARITHMETIC).o.double() - ref.o).abs()
    assert error.mean() > 2 * plain.mean()


def test_l_that_sums_what_the_product_takes_has_no_common_error_of_a_row() -> None:
    """V of 1: O is what l has lost or gained, nothing where it counts what the product takes."""
    inputs = replace(_inputs(), v=torch.ones(1, 2, 256, 32))
    exact, apart = (_attend(f"mxfp8,v8=none,o=fp32,l_from={of}", inputs).o for of in ("rounded", "unrounded"))
    assert (exact - 1.0).abs().max() < 1e-6
    assert (apart - 1.0).abs().max() > 1e-3
    inputs = next(scripted for scripted in SCRIPTED if scripted.name == "fp8_random").make(1, 0, 64, BF16)
    ref, common = reference(inputs).o, {}
    for of in ("unrounded", "rounded"):
        o = _attend(f"fused_fp8_offset,o=fp32,l_from={of}", inputs).o.double()
        common[of] = ((o - ref) / ref).mean(-1).abs().mean().item()
    # Summed before, a row's factor is the mean of what its casts erred by. Summed after, that cancels, and the same
    # errors are weighted by how far V lies from its mean: by a quarter, of either sign.
    assert common["rounded"] < common["unrounded"] / 4


def test_a_tile_of_v_has_one_scale() -> None:
    with pytest.raises(ValueError, match="a block must hold whole tiles of keys, not 128"):
        _attend("fused,v8=fp8_e4m3/block64,tile=128", _inputs())
    declaration, ref = parse_declaration("fused,v8=fp8_e4m3/block64,tile=32"), reference(_inputs())
    within = run_forward(declaration, _inputs(), ARITHMETIC).o
    assert ((within - ref.o).abs() <= ErrorBounds(_inputs(), ref).of(declaration)).all()


def test_the_backward_pass_takes_v_as_it_is() -> None:
    inputs = _inputs()
    plain, eight = parse_declaration("fused"), parse_declaration("fused,v8=fp8_e4m3/head")
    output = run_forward(plain, inputs, ARITHMETIC)
    assert torch.equal(
        run_backward(plain, inputs, output, ARITHMETIC).dq, run_backward(eight, inputs, output, ARITHMETIC).dq
    )
