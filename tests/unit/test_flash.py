"""Flash and standard attention: right in every shape and block, rounded where the plan says and only there.

Accuracy is held to fp64. With u = 2^-24, b key blocks and T the largest |S| of a row, the fp32 plan over exact
accumulators gives, to first order (Higham, Accuracy and Stability of Numerical Algorithms, 3.1),

    S          3u |S| at most: the product, 1/sqrt(d) as fp32, the scaling; an error of m divides out
    P-bar      with alpha of all later blocks exp(S - m), whose argument errs by u |S - m| in all, for m only grows;
               |m| <= 7T + 1 in every rule (beta of v1, the offset). Each of the b + 1 exponentials rounds once
    O          that error in O-bar and in l, 3 roundings of each a block, the division

of sum_j P_j |V_j|: 2 (3T + 8T + 1 + b + 1) + 6b + 1, which `_roundoffs` rounds up.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from tiebreak.backends.backend import EMULATION
from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.kernels.arithmetic import Noise
from tiebreak.kernels.flash import Block, backward, flash, standard
from tiebreak.kernels.formats import BF16, FP32, Formats, Rounding
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.plans import FP32_PLAN, FUSED, FUSED_STOCHASTIC, STANDARD, Cast, RoundingPlan, SumOf
from tiebreak.kernels.reference import Reference, reference
from tiebreak.kernels.roster import composed_kernel
from tiebreak.kernels.shift_rules import SHIFT_RULES

U = FP32.unit_roundoff
ARITHMETIC = EmulatedArithmetic()
SAFE = SHIFT_RULES["safe"]
EVERYTHING = Block(1000, 1000)  # larger than any sequence here: tiling off


@dataclass(frozen=True)
class Setting:
    """Sizes and masks of one input."""

    queries: int = 33
    keys: int = 33
    d: int = 16
    heads: int = 2
    key_heads: int = 2
    causal: bool = False
    visible: tuple[int, ...] = ()  # keys of each batch entry that are not padding; empty: all


SETTINGS = {
    "plain": Setting(64, 64),
    "odd": Setting(37, 37, d=20),
    "causal": Setting(causal=True),
    "padded": Setting(visible=(33, 5)),
    "causal_padded": Setting(causal=True, visible=(20, 33)),
    "wholly_masked": Setting(visible=(0, 33)),
    "grouped": Setting(heads=6, key_heads=2),
    "grouped_causal": Setting(heads=4, key_heads=1, causal=True),
    "fewer_queries": Setting(queries=19, keys=50, d=12),
    "fewer_queries_causal": Setting(queries=19, keys=50, causal=True),
    "fewer_keys": Setting(queries=50, keys=19),
    "fewer_keys_causal": Setting(queries=50, keys=19, causal=True),  # the first 31 queries see no key
    "one_query": Setting(queries=1, keys=33, causal=True),
}
# Key by key, query by query, tiles that divide no length, one for all. 1 x 1 is slow, and tried on two settings.
BLOCKS = [Block(1000, 1), Block(1, 1000), Block(7, 7), Block(7, 32), Block(32, 7), Block(32, 32), Block(128, 128)]

each_setting = pytest.mark.parametrize("name", SETTINGS)
each_block = pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.queries}x{block.keys}")


def _inputs(setting: Setting, *, repeats: bool = False, fmt: str = "fp32") -> AttentionInputs:
    """Normal q, k, v and dO; with `repeats`, keys come in equal pairs, so that every row's maximum is repeated."""
    generator = torch.Generator().manual_seed(7)

    def normal(heads: int, n: int) -> Tensor:
        x = torch.randn(2, heads, n, setting.d, generator=generator)
        return x if fmt == "fp32" else x.bfloat16().float()

    q, do = normal(setting.heads, setting.queries), normal(setting.heads, setting.queries)
    k, v = normal(setting.key_heads, setting.keys), normal(setting.key_heads, setting.keys)
    if repeats:
        k = k[:, :, torch.arange(setting.keys) // 2]
    padding = None
    if setting.visible:
        padding = torch.arange(setting.keys)[None] < torch.tensor(setting.visible)[:, None]
    compared = FP32 if fmt == "fp32" else BF16
    return AttentionInputs(q, k, v, do, Formats.of(compared), causal=setting.causal, key_padding=padding, noise_seed=11)


def _blind(inputs: AttentionInputs) -> Tensor:
    """Rows that see no key, (batch, heads, queries)."""
    hidden = inputs.hidden()
    shape = inputs.q.shape[:3]
    return torch.zeros(shape, dtype=torch.bool) if hidden is None else hidden.all(-1).expand(shape)


def _largest_score(inputs: AttentionInputs, ref: Reference) -> Tensor:
    """Largest |S| of a row over the keys it sees, (batch, heads, queries, 1)."""
    hidden = inputs.hidden()
    visible = ref.s.abs() if hidden is None else ref.s.abs().masked_fill(hidden, 0.0)
    return visible.amax(-1, keepdim=True)


def _roundoffs(inputs: AttentionInputs, ref: Reference, block: Block, row_sum_floor: float = 0.0) -> Tensor:
    """The module's count of unit roundoffs, (batch, heads, queries, 1).

    The authors' code clamps each block's row sum: a block of masked keys then adds that floor to l, which is no less
    than exp(r_m - m) with m = 2 r_m at most.
    """
    blocks, largest = math.ceil(inputs.k.shape[2] / block.keys), _largest_score(inputs, ref)
    return 22 * largest + 8 * blocks + 6 + blocks * row_sum_floor * torch.exp(largest) / U


def _lse(inputs: AttentionInputs, ref: Reference) -> Tensor:
    hidden = inputs.hidden()
    s = ref.s if hidden is None else ref.s.masked_fill(hidden, -torch.inf)
    return torch.logsumexp(s, -1, keepdim=True)


def _sdpa(inputs: AttentionInputs) -> Tensor:
    """PyTorch's composed implementation in fp64."""
    hidden = inputs.hidden()
    q, k, v = inputs.q.double(), inputs.k.double(), inputs.v.double()
    with sdpa_kernel([SDPBackend.MATH]):
        return scaled_dot_product_attention(
            q, k, v, attn_mask=None if hidden is None else ~hidden, enable_gqa=inputs.groups > 1
        )


def _assert_accurate(
    output: AttentionOutput, inputs: AttentionInputs, block: Block, row_sum_floor: float = 0.0
) -> None:
    ref = reference(inputs)
    roundoffs = _roundoffs(inputs, ref, block, row_sum_floor)
    assert output.o.shape == inputs.q.shape
    assert ((output.o.double() - ref.o).abs() <= roundoffs * U * ref.magnitude).all()
    assert output.lse is not None
    lse, blind = _lse(inputs, ref), _blind(inputs)
    # The shift's own error is the scores'; l's is O-bar's; the logarithm and the sum each round once.
    error = (output.lse.double() - lse).abs()[~blind]
    assert (error <= ((roundoffs + 8 * _largest_score(inputs, ref) + lse.abs() + 8) * U)[~blind]).all()
    assert (output.lse[blind] == -torch.inf).all()


@pytest.mark.parametrize("name", ["causal_padded", "fewer_queries_causal", "fewer_keys_causal"])
def test_a_query_sees_the_keys_up_to_its_own_place_from_the_end_that_are_not_padding(name: str) -> None:
    setting = SETTINGS[name]
    hidden = _inputs(setting).hidden()
    assert hidden is not None
    for entry in range(2):
        real = setting.visible[entry] if setting.visible else setting.keys
        for query in range(setting.queries):
            last = query + setting.keys - setting.queries
            visible = [key for key in range(setting.keys) if key <= last and key < real]
            assert (~hidden.expand(2, -1, -1, -1)[entry, 0, query]).nonzero().flatten().tolist() == visible


@each_setting
def test_the_reference_is_pytorchs_attention_in_fp64(name: str) -> None:
    inputs = _inputs(SETTINGS[name])
    ref = reference(inputs)
    # Two fp64 evaluations: the module's count at 2^-53 for each, and N + d more for sums that are not exact.
    roundoffs = 2 * (_roundoffs(inputs, ref, EVERYTHING) + sum(inputs.k.shape[2:]))
    assert ((ref.o - _sdpa(inputs)).abs() <= roundoffs * 2.0**-53 * ref.magnitude).all()


class LargestInFp64(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts elements of the largest fp64 tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.dtype == torch.float64:
            self.elements = max(self.elements, made.numel())
        return made


@pytest.mark.parametrize(("heads", "key_heads"), [(5, 5), (6, 2)])
def test_the_reference_of_a_long_row_holds_one_head_in_fp64_at_a_time(heads: int, key_heads: int) -> None:
    """65,536 keys of 64 numbers are 32 MiB of fp64, and a model has dozens of heads."""
    draws = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(1, h, n, 64, generator=draws) for h, n in ((heads, 1), (key_heads, 2**16), (key_heads, 2**16))
    )
    inputs = AttentionInputs(q, k, v, torch.ones_like(q), Formats.of(FP32))
    with LargestInFp64() as largest:  # type: ignore[no-untyped-call]
        ref = reference(inputs)
    assert largest.elements == 2**16 * 64
    exact = scaled_dot_product_attention(q.double(), k.double(), v.double(), enable_gqa=heads != key_heads)
    assert torch.allclose(ref.o, exact, rtol=0.0, atol=1e-14)


@pytest.mark.parametrize(
    ("name", "block"),
    [*product(SETTINGS, BLOCKS), *((name, Block(1, 1)) for name in ("causal_padded", "fewer_keys_causal"))],
    ids=str,
)
def test_flash_in_fp32_is_right(name: str, block: Block) -> None:
    inputs = _inputs(SETTINGS[name])
    _assert_accurate(flash(inputs, FP32_PLAN, SAFE, ARITHMETIC, block), inputs, block)


@each_block
@pytest.mark.parametrize("name", ["plain", "causal_padded", "wholly_masked"])
@pytest.mark.parametrize("rule", [rule for rule in SHIFT_RULES if rule != "safe"])
def test_no_shift_rule_changes_what_flash_computes(rule: str, name: str, block: Block) -> None:
    inputs = _inputs(SETTINGS[name], repeats=True)
    _assert_accurate(
        flash(inputs, FP32_PLAN, SHIFT_RULES[rule], ARITHMETIC, block), inputs, block, SHIFT_RULES[rule].row_sum_floor
    )


@pytest.mark.parametrize(
    ("maxima", "shifts"),
    [
        ((1.0, 6.5), (1.0, 1.0)),  # 5.5 above: less than 8 ln 2 = 5.545
        ((1.0, 6.75), (1.0, 6.75)),  # 5.75 above
        ((1.0, 4.0, 7.0), (1.0, 1.0, 7.0)),  # 3 and 6 above: it is the old shift that counts, not the block before
        ((7.0, 1.0), (7.0, 7.0)),
        ((-torch.inf, -30.0), (0.0, -30.0)),  # a block that is wholly masked leaves no shift to keep
    ],
)
def test_lazy_rescaling_follows_from_two_to_the_eighth_on(maxima: tuple[float, ...], shifts: tuple[float, ...]) -> None:
    q, k = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, len(maxima), 4)
    q[..., 0], k[0, 0, :, 0] = 2.0, torch.tensor(maxima).clamp(min=-100.0)  # a score is its key's first number
    v = torch.full_like(k, 3.0)
    padding = torch.tensor([[maximum > -torch.inf for maximum in maxima]])
    inputs = AttentionInputs(q, k, v, torch.ones_like(q), Formats.of(BF16), key_padding=padding)
    plan = replace(FUSED, o=Cast(FP32))
    o = flash(inputs, plan, SHIFT_RULES["lazy"], ARITHMETIC, Block(1, 1)).o
    # By hand: each block's P-bar from the shift it was given, brought to the last shift.
    p_bar, l = 0.0, 0.0
    for maximum, shift in zip(maxima, shifts, strict=True):
        p = math.exp(maximum - shift)
        rescale = math.exp(shift - shifts[-1])
        p_bar += rescale * torch.tensor(p).bfloat16().item()
        l += rescale * p
    assert o[..., 0].item() == pytest.approx(3.0 * p_bar / l, rel=8 * U)


@pytest.mark.parametrize("queries", [1, 7, 1000])
@each_setting
def test_standard_in_fp32_is_right(name: str, queries: int) -> None:
    inputs = _inputs(SETTINGS[name])
    output = standard(inputs, replace(STANDARD, p_bar=Cast(FP32), o=Cast(FP32)), SAFE, ARITHMETIC, Block(queries, 1))
    _assert_accurate(output, inputs, EVERYTHING)


def test_a_wholly_masked_row_gives_zero_whatever_is_in_v() -> None:
    """In the reference too, where 0 * Inf would be NaN; found by the fuzz."""
    inputs = _inputs(SETTINGS["wholly_masked"], fmt="bf16")
    v = inputs.v.clone()
    v[..., 0, 0], v[..., 1, 1] = torch.inf, torch.nan
    inputs = replace(inputs, v=v)
    blind = _blind(inputs)
    assert blind.any()
    assert (reference(inputs).o[blind] == 0).all()
    for name in ("flash@fused", "standard"):
        assert (EMULATION.run(composed_kernel(name), inputs, gradients=False).o[blind] == 0).all()


@each_block
@pytest.mark.parametrize("name", ["wholly_masked", "fewer_keys_causal"])
@pytest.mark.parametrize("kernel", ["flash@fp32", "flash@paper", "stabilized_authors@all_bf16", "fair", "standard"])
def test_a_wholly_masked_row_gives_zero_and_gradient_zero(kernel: str, name: str, block: Block) -> None:
    inputs = _inputs(SETTINGS[name], fmt="bf16")
    declaration = composed_kernel(kernel).declaration
    assert declaration is not None
    blind = _blind(inputs)
    plan, rule = declaration.plan, declaration.shift_rule
    output = declaration.algorithm.forward(inputs, plan, rule, ARITHMETIC, block)
    gradients = backward(inputs, output, plan, ARITHMETIC, block)
    assert blind.any()
    assert (output.o[blind] == 0).all()
    assert (gradients.dq[blind] == 0).all()
    assert all(torch.isfinite(x).all() for x in (output.o, gradients.dq, gradients.dk, gradients.dv))


def test_keys_that_only_blind_rows_see_get_no_gradient() -> None:
    inputs = _inputs(SETTINGS["wholly_masked"])
    output = flash(inputs, FP32_PLAN, SAFE, ARITHMETIC, EVERYTHING)
    gradients = backward(inputs, output, FP32_PLAN, ARITHMETIC, EVERYTHING)
    assert (gradients.dk[0] == 0).all()
    assert (gradients.dv[0] == 0).all()


@pytest.mark.parametrize("queries", [1, 7, 32])
@pytest.mark.parametrize("name", ["odd", "causal", "grouped"])
@pytest.mark.parametrize("kernel", ["flash@fused", "fair"])
def test_the_bits_of_o_do_not_depend_on_the_query_block(kernel: str, name: str, queries: int) -> None:
    inputs = _inputs(SETTINGS[name], fmt="bf16")
    declaration = composed_kernel(kernel).declaration
    assert declaration is not None
    tiled, whole = (
        flash(inputs, declaration.plan, declaration.shift_rule, ARITHMETIC, Block(size, 1000)).o
        for size in (queries, 1000)
    )
    assert torch.equal(tiled, whole)


@pytest.mark.parametrize("size", [1, 7, 32])
def test_the_noise_of_a_tile_is_that_part_of_the_wholes(size: int) -> None:
    noise, shape, device = Noise(5, heads=3), torch.Size([2, 3, 40, 8]), torch.device("cpu")
    starts = range(0, 40, size)
    tiles = [torch.Size([2, 3, min(size, 40 - start), 8]) for start in starts]
    dither = [noise.dither(tile, start, device) for tile, start in zip(tiles, starts, strict=True)]
    bits = [noise.bits(tile, start, device) for tile, start in zip(tiles, starts, strict=True)]
    assert torch.equal(torch.cat(dither, 2), noise.dither(shape, 0, device))
    assert torch.equal(torch.cat(bits, 2), noise.bits(shape, 0, device))


def test_every_row_has_a_dither_and_every_element_has_bits_of_its_own() -> None:
    noise, shape, device = Noise(5, heads=3), torch.Size([2, 3, 40, 8]), torch.device("cpu")
    dither, bits = noise.dither(shape, 0, device), noise.bits(shape, 0, device)
    assert dither.shape == (2, 3, 40, 1)
    # Among n numbers of 32 bits n^2 / 2^33 pairs are equal on average: 4e-4 among the bits. The dither has 24.
    assert len(set(dither.flatten().tolist())) == dither.numel()
    assert len(set(bits.flatten().tolist())) == bits.numel()
    assert not torch.equal(dither, Noise(6, heads=3).dither(shape, 0, device))


@pytest.mark.parametrize("keys", [1, 7, 32])
def test_the_dither_of_a_row_does_not_depend_on_the_key_block(keys: int) -> None:
    # With the row's maximum at its first key, the shift of every block is the first one's, and P-bar's rounding, which
    # depends on it, is the same to the bit unless a block draws another dither: fp32's sums and division remain.
    inputs = _inputs(SETTINGS["plain"])
    k = inputs.k.clone()
    k[:, :, 0], k[:, :, 1:] = 1.0, inputs.k[:, :, 1:].abs() / 4 - 1.0
    inputs = replace(inputs, q=inputs.q.abs(), k=k)
    plan, rule = replace(FUSED, o=Cast(FP32)), SHIFT_RULES["dithered"]
    tiled, whole = (flash(inputs, plan, rule, ARITHMETIC, Block(32, size)).o.double() for size in (keys, 1000))
    ref, blocks = reference(inputs), math.ceil(64 / keys)
    assert (ref.s.argmax(-1) == 0).all()
    assert ((tiled - whole).abs() <= (6 * (blocks + 1) + 2) * U * ref.magnitude).all()


def test_stochastic_rounding_leaves_the_bits_before_it_alone() -> None:
    inputs = _inputs(SETTINGS["plain"], fmt="bf16")
    wide = flash(inputs, replace(FUSED, o=Cast(FP32)), SAFE, ARITHMETIC, EVERYTHING)
    rounded = flash(inputs, FUSED_STOCHASTIC, SAFE, ARITHMETIC, EVERYTHING)
    bits = Noise(inputs.noise_seed, 2).bits(wide.o.shape, 0, torch.device("cpu"))
    assert torch.equal(rounded.o, ARITHMETIC.cast(wide.o, Cast(BF16, Rounding.STOCHASTIC), bits))


# What narrowing one rounding point of the fp32 plan changes of everything that a kernel returns.
CHANGES: dict[str, set[str]] = {
    "scale": {"o", "lse", "delta", "dq", "dk", "dv"},
    "divisor": {"o", "lse", "delta", "dq", "dk", "dv"},
    "q": {"o", "lse", "delta", "dq", "dk", "dv"},
    "qk": {"o", "lse", "delta", "dq", "dk", "dv"},
    "exp": {"o", "lse", "delta", "dq", "dk", "dv"},  # as shifted
    "shifted": {"o", "lse", "delta", "dq", "dk", "dv"},  # of the backward pass by the log-sum-exp alone
    "s": {"o", "lse", "delta", "dq", "dk", "dv"},
    "p_bar": {"o", "delta", "dq", "dk"},  # l sums P-bar before its cast; dV takes P from the log-sum-exp
    "pv": {"o", "delta", "dq", "dk"},
    "o_bar": {"o", "delta", "dq", "dk"},
    "row_sum": {"o", "lse", "delta", "dq", "dk", "dv"},
    "o": {"o", "delta", "dq", "dk"},
    "delta": {"delta", "dq", "dk"},
    "p": {"dv"},
    "dp": {"dq", "dk"},
    "do_over_l": {"dq", "dk", "dv"},
    "p_of_ds": {"dq", "dk"},
    "ds": {"dq", "dk"},
    "scaled_ds": {"dq", "dk"},
    "scaled_q": {"dk"},  # alpha of dQ stays fp32
    "scaled_k": {"dq", "dk", "dv"},
    "sums": {"dq", "dk", "dv"},
    "group_sums": {"dk", "dv"},
    "gradients": {"dq", "dk", "dv"},
}


def _returned(plan: RoundingPlan, inputs: AttentionInputs, arithmetic: EmulatedArithmetic) -> dict[str, Tensor]:
    output = flash(inputs, plan, SAFE, arithmetic, EVERYTHING)
    gradients = backward(inputs, output, plan, arithmetic, EVERYTHING)
    assert output.lse is not None
    assert gradients.delta is not None
    tensors = (output.o, output.lse, gradients.delta, gradients.dq, gradients.dk, gradients.dv)
    return dict(zip(("o", "lse", "delta", "dq", "dk", "dv"), tensors, strict=True))


def _narrowed(point: str) -> RoundingPlan:
    return replace(FP32_PLAN, **{point: Cast(BF16)})  # type: ignore[arg-type]


def test_every_rounding_point_is_switched_here() -> None:
    assert set(CHANGES) == {name for name, _ in FP32_PLAN.casts()}


@pytest.mark.parametrize("point", CHANGES)
def test_narrowing_one_rounding_point_changes_what_it_feeds_and_nothing_else(point: str) -> None:
    inputs = _inputs(replace(SETTINGS["causal"], d=20))  # alpha is no power of two
    before, after = (_returned(plan, inputs, ARITHMETIC) for plan in (FP32_PLAN, _narrowed(point)))
    assert {name for name in before if not torch.equal(before[name], after[name])} == CHANGES[point]


@pytest.mark.parametrize(
    ("point", "result"), [("o", "o"), ("delta", "delta"), *(("gradients", name) for name in ("dq", "dk", "dv"))]
)
def test_a_narrowed_result_is_the_fp32_one_cast(point: str, result: str) -> None:
    inputs = _inputs(SETTINGS["grouped_causal"])
    before, after = (_returned(plan, inputs, ARITHMETIC) for plan in (FP32_PLAN, _narrowed(point)))
    assert torch.equal(after[result], before[result].bfloat16().float())


class _Spy(EmulatedArithmetic):
    """The emulation, noting what its narrowing casts return."""

    def __init__(self) -> None:
        self.narrowed: list[Tensor] = []

    def cast(self, x: Tensor, cast: Cast, random: Tensor | None = None) -> Tensor:
        result = super().cast(x, cast, random)
        if cast.narrows:
            self.narrowed.append(result)
        return result


def _exact_intermediates(inputs: AttentionInputs) -> dict[str, Callable[[Reference], Tensor]]:
    """What each inner rounding point holds in a single tile, in fp64."""
    v, do = inputs.v.double(), inputs.do.double()

    def p_bar(ref: Reference) -> Tensor:
        return torch.exp(ref.s - ref.s.amax(-1, keepdim=True))

    def dp(ref: Reference) -> Tensor:
        del ref
        return do @ v.transpose(-1, -2)

    return {
        "s": lambda ref: ref.s,
        "p_bar": p_bar,
        "row_sum": lambda ref: p_bar(ref).sum(-1, keepdim=True),
        "o_bar": lambda ref: p_bar(ref) @ v,
        "p": lambda ref: ref.p,
        "dp": dp,
        "ds": lambda ref: ref.p * (dp(ref) - ref.delta),
    }


@pytest.mark.parametrize("point", ["s", "p_bar", "row_sum", "o_bar", "p", "dp", "ds"])
def test_an_inner_rounding_point_narrows_the_tensor_that_it_names(point: str) -> None:
    inputs, spy = _inputs(SETTINGS["plain"]), _Spy()
    _returned(_narrowed(point), inputs, spy)
    exact = _exact_intermediates(inputs)[point](reference(inputs))
    narrowed = [x for x in spy.narrowed if x.shape == exact.shape and not (x == 0).all()]
    assert narrowed
    # Half an ulp at most, 2^-8 of the value, on top of what fp32 errs: 2^-8 of that again covers it, except where dP
    # and delta cancel in dS, whose error is fp32's of its larger terms.
    slack = 2.0**-16 * exact.abs().amax()
    for x in narrowed:
        assert torch.equal(x, x.bfloat16().float())
        assert ((x.double() - exact).abs() <= 2.0**-8 * exact.abs() + slack).all()


def test_row_sum_from_rounded_sums_what_the_product_gets() -> None:
    inputs = _inputs(SETTINGS["plain"])
    # Quarters: with 1/sqrt(d) = 1/4 every score, and its distance to the maximum, is exact in fp32.
    inputs = replace(inputs, q=(4 * inputs.q).round() / 4, k=(4 * inputs.k).round() / 4)
    s = reference(inputs).s
    m = s.amax(-1, keepdim=True)
    p = torch.exp(s - m).float()
    for of, summed in ((SumOf.UNROUNDED, p), (SumOf.ROUNDED, p.bfloat16())):
        plan = replace(_narrowed("p_bar"), row_sum_of=of)
        lse = flash(inputs, plan, SAFE, ARITHMETIC, EVERYTHING).lse
        assert lse is not None
        log_l = torch.log(summed.double().sum(-1, keepdim=True))
        # l, its logarithm (within 2u), the sum of m and it.
        assert ((lse.double() - (m + log_l)).abs() <= (1 + 2 * log_l.abs() + (m + log_l).abs()) * U).all()


@pytest.mark.parametrize(("queries", "keys"), [(0, 1), (1, 0), (-1, 5)])
def test_an_empty_tile_is_refused(queries: int, keys: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1, not {queries} x {keys}"):
        Block(queries, keys)
