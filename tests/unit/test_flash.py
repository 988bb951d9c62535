"""Flash and standard attention, forward and backward: right in every shape and block, rounded where the plan says.

Accuracy is held to fp64. With u = 2^-24, b key blocks and T the largest |S| of a row, the fp32 plan over exact
accumulators gives, to first order (Higham, Accuracy and Stability of Numerical Algorithms, 3.1),

    S          3u |S| at most: the product, 1/sqrt(d) as fp32, the scaling; an error of m divides out
    P-bar      with alpha of all later blocks exp(S - m), whose argument errs by u |S - m| in all, for m only grows;
               |m| <= 7T + 1 in every rule (beta of v1, the offset). Each of the b + 1 exponentials rounds once
    O          that error in O-bar and in l, 3 roundings of each a block, the division

of sum_j P_j |V_j|: 2 (3T + 8T + 1 + b + 1) + 6b + 1, which `roundoffs` rounds up. With E the count of a gradient's
roundings that `of_gradients` makes, P errs by E u P, dP - delta by at most E u (|dO| |V|^T + rowsum(|dO| P |V|)), and
so each gradient by 2 E u times itself with every term's magnitude in its place.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.kernels import reference as referring
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.flash import Block, Forward, backward, flash, standard
from tiebreak.kernels.formats import BF16, FP32, Formats
from tiebreak.kernels.inputs import AttentionInputs, sum_groups
from tiebreak.kernels.plans import FP32_PLAN, FUSED, STANDARD, Cast, DeltaSource, RoundingPlan
from tiebreak.kernels.reference import Reference, reference, reference_gradients
from tiebreak.kernels.sdpa import Operators
from tiebreak.kernels.shift_rules import SHIFT_RULES, ShiftRule

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
    "grouped_causal": Setting(heads=6, key_heads=2, causal=True),
    "fewer_queries": Setting(queries=19, keys=50, d=12),
    "fewer_queries_causal": Setting(queries=19, keys=50, causal=True),
    "fewer_keys_causal": Setting(queries=50, keys=19, causal=True),  # the first 31 queries see no key
    "one_query": Setting(queries=1, keys=33, causal=True),
}
# Key by key, query by query, tiles that divide no length, one for all.
BLOCKS = [Block(1000, 1), Block(1, 1000), Block(32, 7), Block(128, 128)]
FEW_BLOCKS = pytest.mark.parametrize("block", [Block(7, 5), EVERYTHING], ids=str)


def made(setting: Setting, *, repeats: bool = False, fmt: str = "fp32") -> AttentionInputs:
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


def blind_rows(inputs: AttentionInputs) -> Tensor:
    """Rows that see no key, (batch, heads, queries)."""
    hidden = inputs.hidden()
    shape = inputs.q.shape[:3]
    return torch.zeros(shape, dtype=torch.bool) if hidden is None else hidden.all(-1).expand(shape)


def largest_score(inputs: AttentionInputs, ref: Reference) -> Tensor:
    """Largest |S| of a row over the keys it sees, (batch, heads, queries, 1)."""
    hidden = inputs.hidden()
    visible = ref.s.abs() if hidden is None else ref.s.abs().masked_fill(hidden, 0.0)
    return visible.amax(-1, keepdim=True)


def roundoffs(inputs: AttentionInputs, ref: Reference, block: Block, row_sum_floor: float = 0.0) -> Tensor:
    """The module's count of unit roundoffs, (batch, heads, queries, 1).

    The authors' code clamps each block's row sum: a block of masked keys then adds that floor to l, which is no less
    than exp(r_m - m) with m = 2 r_m at most.
    """
    blocks, largest = math.ceil(inputs.k.shape[2] / block.keys), largest_score(inputs, ref)
    return 22 * largest + 8 * blocks + 6 + blocks * row_sum_floor * torch.exp(largest) / U


def of_gradients(inputs: AttentionInputs, ref: Reference, block: Block) -> float:
    """Roundings of fp32 on the way to a gradient: in P, twice, in O, and three in each tile."""
    largest = largest_score(inputs, ref).amax().item()
    tiles = math.ceil(inputs.k.shape[2] / block.keys) + math.ceil(inputs.q.shape[2] / block.queries)
    return 2 * (4 * largest + 2) + roundoffs(inputs, ref, block).amax().item() + 3 * tiles + inputs.groups


def magnitudes(inputs: AttentionInputs, ref: Reference) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV with every term's magnitude in its place."""
    q, do = inputs.q.double().abs(), inputs.do.double().abs()
    k, v = inputs.expanded_k().double().abs(), inputs.expanded_v().double().abs()
    ds = ref.p * (do @ v.mT + (do * ref.magnitude).sum(-1, keepdim=True))
    dq, dk = inputs.scale * (ds @ k), inputs.scale * (ds.mT @ q)
    return dq, sum_groups(dk, inputs.groups), sum_groups(ref.p.mT @ do, inputs.groups)


def assert_accurate(
    algorithm: Forward, plan: RoundingPlan, inputs: AttentionInputs, block: Block, rule: ShiftRule = SAFE
) -> None:
    """O, the log-sum-exp and, with them, all gradients."""
    ref, output = reference(inputs), algorithm(inputs, plan, rule, ARITHMETIC, block)
    errors = roundoffs(inputs, ref, block, rule.row_sum_floor)
    assert output.o.shape == inputs.q.shape
    assert ((output.o.double() - ref.o).abs() <= errors * U * ref.magnitude).all()
    hidden, blind = inputs.hidden(), blind_rows(inputs)
    lse = torch.logsumexp(ref.s if hidden is None else ref.s.masked_fill(hidden, -torch.inf), -1, keepdim=True)
    assert output.lse is not None
    # The shift's own error is the scores'; l's is O-bar's; the logarithm and the sum each round once.
    allowed = (errors + 8 * largest_score(inputs, ref) + lse.abs() + 8) * U
    assert ((output.lse.double() - lse).abs() <= allowed)[~blind].all()
    assert (output.lse[blind] == -torch.inf).all()
    if rule.row_sum_floor:
        return
    gradients, exact = backward(inputs, output, plan, ARITHMETIC, block), reference_gradients(inputs, ref)
    ours, count = (gradients.dq, gradients.dk, gradients.dv), 2 * of_gradients(inputs, ref, block)
    for gradient, expected, scale in zip(ours, exact, magnitudes(inputs, ref), strict=True):
        assert gradient.shape == expected.shape
        assert ((gradient.double() - expected).abs() <= count * U * scale).all()


class LargestInFp64(Operators):  # type: ignore[no-untyped-call]
    """Counts elements of the largest fp64 tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.dtype == torch.float64:
            self.elements = max(self.elements, made.numel())
        return made


def test_the_reference_of_a_long_row_holds_one_head_in_fp64_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """65,536 keys of 64 numbers are 32 MiB of fp64, and a model has dozens of heads. Here 256 keys are many."""
    inputs = made(Setting(queries=1, keys=256, d=64, heads=6, key_heads=2))
    whole = reference(inputs)
    monkeypatch.setattr(referring, "_LARGE", 2**14)
    with LargestInFp64() as largest:
        ref = reference(inputs)
    assert largest.elements == 256 * 64
    assert torch.allclose(ref.o, whole.o, rtol=0.0, atol=1e-14)


STANDARD_IN_FP32 = replace(STANDARD, p_bar=Cast(FP32), o=Cast(FP32))


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(
    ("algorithm", "plan", "block"),
    [
        *((flash, FP32_PLAN, block) for block in BLOCKS),
        # Delta is the same number whatever it is computed from.
        *((flash, replace(FP32_PLAN, delta_from=source), Block(7, 32)) for source in DeltaSource),
        (standard, STANDARD_IN_FP32, Block(7, 1000)),
    ],
    ids=lambda value: str(value) if isinstance(value, Block) else "",
)
def test_attention_in_fp32_is_right(name: str, algorithm: Forward, plan: RoundingPlan, block: Block) -> None:
    assert_accurate(algorithm, plan, made(SETTINGS[name]), block)


@FEW_BLOCKS
@pytest.mark.parametrize("name", ["causal_padded", "wholly_masked"])
@pytest.mark.parametrize("rule", [rule for rule in SHIFT_RULES if rule != "safe"])
def test_no_shift_rule_changes_what_flash_computes(rule: str, name: str, block: Block) -> None:
    assert_accurate(flash, FP32_PLAN, made(SETTINGS[name], repeats=True), block, SHIFT_RULES[rule])


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
    o = flash(inputs, replace(FUSED, o=Cast(FP32)), SHIFT_RULES["lazy"], ARITHMETIC, Block(1, 1)).o
    # By hand: each block's P-bar from the shift it was given, brought to the last shift.
    p_bar, l = 0.0, 0.0
    for maximum, shift in zip(maxima, shifts, strict=True):
        p, rescale = math.exp(maximum - shift), math.exp(shift - shifts[-1])
        p_bar += rescale * torch.tensor(p).bfloat16().item()
        l += rescale * p
    assert o[..., 0].item() == pytest.approx(3.0 * p_bar / l, rel=8 * U)


@FEW_BLOCKS
@pytest.mark.parametrize("name", ["wholly_masked", "fewer_keys_causal"])
@pytest.mark.parametrize("kernel", ["flash@fp32", "stabilized_authors@all_bf16", "fair", "standard"])
def test_a_wholly_masked_row_gives_zero_and_gradient_zero(kernel: str, name: str, block: Block) -> None:
    inputs, declaration = made(SETTINGS[name], fmt="bf16"), parse_declaration(kernel)
    blind, plan = blind_rows(inputs), declaration.plan
    output = declaration.algorithm.forward(inputs, plan, declaration.shift_rule, ARITHMETIC, block)
    gradients = backward(inputs, output, plan, ARITHMETIC, block)
    assert blind.any()
    assert (output.o[blind] == 0).all()
    assert (gradients.dq[blind] == 0).all()
    assert all(torch.isfinite(x).all() for x in (output.o, gradients.dq, gradients.dk, gradients.dv))
    if name == "wholly_masked":  # keys that blind rows alone see
        assert not gradients.dk[0].any()
        assert not gradients.dv[0].any()
    v = inputs.v.clone()  # whatever is in it, in the reference too, where 0 * Inf would be NaN; found by the fuzz
    v[..., 0, 0], v[..., 1, 1] = torch.inf, torch.nan
    spoilt = replace(inputs, v=v)
    assert not reference(spoilt).o[blind].any()
    assert not declaration.algorithm.forward(spoilt, plan, declaration.shift_rule, ARITHMETIC, block).o[blind].any()


# What narrowing one rounding point of the fp32 plan changes of everything that a kernel returns.
CHANGES = {
    "log2_e": "",  # of base two alone
    **dict.fromkeys(("scale", "divisor", "q", "k", "qk", "exp", "shifted", "s", "row_sum"), "o lse delta dq dk dv"),
    # l sums P-bar before its cast; dV takes P from the log-sum-exp.
    **dict.fromkeys(("p_bar", "pv", "o_bar", "o"), "o delta dq dk"),
    "delta": "delta dq dk",
    "p": "dv",
    **dict.fromkeys(("dp", "p_of_ds", "ds", "scaled_ds"), "dq dk"),
    "scaled_q": "dk",  # alpha of dQ stays fp32
    **dict.fromkeys(("do_over_l", "scaled_k", "sums", "gradients"), "dq dk dv"),
    "group_sums": "dk dv",
}


def returned(plan: RoundingPlan, inputs: AttentionInputs) -> dict[str, Tensor]:
    output = flash(inputs, plan, SAFE, ARITHMETIC, EVERYTHING)
    gradients = backward(inputs, output, plan, ARITHMETIC, EVERYTHING)
    assert output.lse is not None
    assert gradients.delta is not None
    tensors = (output.o, output.lse, gradients.delta, gradients.dq, gradients.dk, gradients.dv)
    return dict(zip(("o", "lse", "delta", "dq", "dk", "dv"), tensors, strict=True))


@pytest.mark.parametrize("point", [name for name, _ in FP32_PLAN.casts()])
def test_narrowing_one_rounding_point_changes_what_it_feeds_and_nothing_else(point: str) -> None:
    inputs = made(replace(SETTINGS["causal"], d=20))  # alpha is no power of two
    narrowed = replace(FP32_PLAN, **{point: Cast(BF16)})  # type: ignore[arg-type]
    before, after = (returned(plan, inputs) for plan in (FP32_PLAN, narrowed))
    assert {name for name in before if not torch.equal(before[name], after[name])} == set(CHANGES[point].split())
    for result in {"o": ("o",), "delta": ("delta",), "gradients": ("dq", "dk", "dv")}.get(point, ()):
        assert torch.equal(after[result], before[result].bfloat16().float())
