"""Rounding points that other people's kernels have, each against the formula written out in fp64, number by number."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.kernels.algorithms import (
    FLASH_ATTENTION,
    FLASH_ATTENTION_1,
    SPLIT_ATTENTION,
    STANDARD_ATTENTION,
    Algorithm,
)
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.flash import Block
from tiebreak.kernels.formats import BF16, FP32, Formats
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import Declaration, run_declared
from tiebreak.kernels.plans import FP32_PLAN, Cast, Exponential, RoundingPlan
from tiebreak.kernels.reference import reference
from tiebreak.kernels.shift_rules import SHIFT_RULES, ShiftRule

pytestmark = pytest.mark.quick

Row = Sequence[float]
# (scores before the scale, scale, V, size of a tile) -> one row of O
Formula = Callable[[Row, float, Sequence[Row], int], list[float]]

LOW = Cast(BF16)
SAFE = SHIFT_RULES["safe"]
KEYS, D = 6, 5
SCALE = 0.3  # which bf16 does not have, nor its inverse


def bf16(x: float) -> float:
    return torch.tensor(x, dtype=torch.float64).bfloat16().item()


def mean(weights: Row, v: Sequence[Row]) -> list[float]:
    """The mean of V's rows with these weights, in fp64."""
    total = math.fsum(weights)
    return [math.fsum(w * row[i] for w, row in zip(weights, v, strict=True)) / total for i in range(D)]


def softmax_of(score: Callable[[float, float], float]) -> Formula:
    """Softmax of scores that are made from Q K^T and the scale."""
    return lambda qk, scale, v, tile: mean([math.exp(score(x, scale)) for x in qk], v)


rounded_products = softmax_of(lambda x, scale: bf16(x) * scale)
rounded_twice = softmax_of(lambda x, scale: bf16(bf16(x) * scale))
rounded_scale = softmax_of(lambda x, scale: x * bf16(scale))
rounded_divisor = softmax_of(lambda x, scale: x / bf16(1 / scale))


def rounded_weights(qk: Row, scale: float, v: Sequence[Row], tile: int) -> list[float]:
    """The numerator and each of its terms in the sum, in one tile."""
    return mean([bf16(math.exp((x - max(qk)) * scale)) for x in qk], v)


def rounded_sum(qk: Row, scale: float, v: Sequence[Row], tile: int) -> list[float]:
    weights = [math.exp((x - max(qk)) * scale) for x in qk]
    l = math.fsum(weights)
    return [l / bf16(l) * x for x in mean(weights, v)]


def rounded_arguments(qk: Row, scale: float, v: Sequence[Row], tile: int) -> list[float]:
    """S - m is bf16 in every tile, and so is m - m' wherever a later tile has a larger maximum."""
    weights: list[float] = []
    m = -math.inf
    for start in range(0, len(qk), tile):
        s = [x * scale for x in qk[start : start + tile]]
        new_m = max(m, *s)
        weights = [w * math.exp(bf16(m - new_m)) for w in weights] + [math.exp(bf16(x - new_m)) for x in s]
        m = new_m
    return mean(weights, v)


def normalised_at_every_step(qk: Row, scale: float, v: Sequence[Row], tile: int) -> list[float]:
    """O' = O (l exp(m - m') / l') + bf16(exp(S - m') / l') V."""
    o, l, m = [0.0] * D, 0.0, -math.inf
    for start in range(0, len(qk), tile):
        s = [x * scale for x in qk[start : start + tile]]
        new_m = max(m, *s)
        p = [math.exp(x - new_m) for x in s]
        new_l = l * math.exp(m - new_m) + math.fsum(p)
        carried = l * math.exp(m - new_m) / new_l
        p = [bf16(x / new_l) for x in p]
        rows = v[start : start + tile]
        o = [o[i] * carried + math.fsum(x * row[i] for x, row in zip(p, rows, strict=True)) for i in range(D)]
        l, m = new_l, new_m
    return o


def rounded_parts(qk: Row, scale: float, v: Sequence[Row], tile: int) -> list[float]:
    """sum of exp(L_i) bf16(O_i) over sum of exp(L_i), O_i and L_i of the keys of a split alone."""
    parts, weights = [], []
    for start in range(0, len(qk), tile):
        p = [math.exp((x - max(qk)) * scale) for x in qk[start : start + tile]]
        parts.append([bf16(x) for x in mean(p, v[start : start + tile])])
        weights.append(math.fsum(p))
    return mean(weights, parts)


POINTS: dict[str, tuple[Algorithm, RoundingPlan, Formula, int]] = {
    "qk": (STANDARD_ATTENTION, replace(FP32_PLAN, qk=LOW), rounded_products, KEYS),
    "qk_tiled": (FLASH_ATTENTION, replace(FP32_PLAN, qk=LOW), rounded_products, 2),
    "qk_and_s": (STANDARD_ATTENTION, replace(FP32_PLAN, qk=LOW, s=LOW), rounded_twice, KEYS),
    "scale": (FLASH_ATTENTION, replace(FP32_PLAN, scale=LOW), rounded_scale, 2),
    "divisor": (STANDARD_ATTENTION, replace(FP32_PLAN, divisor=LOW), rounded_divisor, KEYS),
    "exp": (FLASH_ATTENTION, replace(FP32_PLAN, exp=LOW), rounded_weights, KEYS),
    "exp_standard": (STANDARD_ATTENTION, replace(FP32_PLAN, exp=LOW), rounded_weights, KEYS),
    "exp_flash_1": (FLASH_ATTENTION_1, replace(FP32_PLAN, exp=LOW), rounded_weights, KEYS),
    "row_sum_standard": (STANDARD_ATTENTION, replace(FP32_PLAN, row_sum=LOW), rounded_sum, KEYS),
    "shifted": (FLASH_ATTENTION, replace(FP32_PLAN, shifted=LOW), rounded_arguments, KEYS),
    "shifted_standard": (STANDARD_ATTENTION, replace(FP32_PLAN, shifted=LOW), rounded_arguments, KEYS),
    "shifted_tiled": (FLASH_ATTENTION, replace(FP32_PLAN, shifted=LOW), rounded_arguments, 2),
    "flash_1": (FLASH_ATTENTION_1, replace(FP32_PLAN, p_bar=LOW), normalised_at_every_step, 2),
    "split": (SPLIT_ATTENTION, replace(FP32_PLAN, o_bar=LOW), rounded_parts, 2),
    "flash_1_in_one_tile": (FLASH_ATTENTION_1, replace(FP32_PLAN, p_bar=LOW), normalised_at_every_step, KEYS),
}


def inputs(queries: int = 4) -> AttentionInputs:
    generator = torch.Generator().manual_seed(3)

    def normal(n: int, scale: float) -> torch.Tensor:
        return (scale * torch.randn(1, 1, n, D, generator=generator)).bfloat16().float()

    q, k, v, do = normal(queries, 2.0), normal(KEYS, 2.0), normal(KEYS, 1.0), normal(queries, 1.0)
    return AttentionInputs(q, k, v, do, Formats.of(BF16), softmax_scale=SCALE)


def by_hand(call: AttentionInputs, formula: Formula, tile: int) -> torch.Tensor:
    v = call.v[0, 0].double().tolist()
    products = (call.q[0, 0].double() @ call.k[0, 0].double().T).tolist()
    return torch.tensor([[[formula(row, call.scale, v, tile) for row in products]]], dtype=torch.float64)


def online(tiles: Sequence[Sequence[int]], s: Row, v: Sequence[Row], **how: float) -> tuple[list[float], float]:
    """O and the log-sum-exp of these keys, tile by tile, P-bar in bf16."""
    o, l, m = [0.0] * D, 0.0, -math.inf
    kept, once = (bf16 if how.get(point) else float for point in ("o_bar", "l"))
    for keys in tiles:
        top = max(m, max(s[key] for key in keys) + how.get("shift", 0.0))
        before, m = m, top if top - m > how.get("lag", 0.0) else m
        alpha, p = math.exp(before - m), [math.exp(s[key] - m) for key in keys]
        l = once(alpha * l + math.fsum(p))
        pv = [math.fsum(bf16(x) * v[key][i] for x, key in zip(p, keys, strict=True)) for i in range(D)]
        o = [kept(kept(alpha * x) + y) for x, y in zip(o, pv, strict=True)]
    return [x / l for x in o], m + math.log(l)


def in_splits(*splits: Sequence[Sequence[int]], **how: float) -> Formula:
    def formula(qk: Row, scale: float, v: Sequence[Row], tile: int) -> list[float]:
        parts = [online(tiles, [x * scale for x in qk], v, **how) for tiles in splits]
        return mean([math.exp(lse) for _, lse in parts], [o for o, _ in parts])

    return formula


IN_PAIRS = ((0, 1), (2, 3), (4, 5))


# There are 4 queries: 2 keys come before them.
@pytest.mark.parametrize(
    ("text", "formula"),
    [
        ("flash@{},tile=2,order=backwards", in_splits(IN_PAIRS[::-1])),
        ("flash@{},tile=4,order=prefix", in_splits(((0, 1), (2, 3, 4, 5)))),
        ("split@{},tile=2,splits=2", in_splits(((0, 1), (2,)), ((3, 4), (5,)))),
        ("split@{},tile=2,splits=2,order=tiles", in_splits(IN_PAIRS[:2], IN_PAIRS[2:])),
        ("split@{},tile=2,splits=2,order=turns", in_splits(IN_PAIRS[::2], IN_PAIRS[1::2])),
        ("flash@{},tile=2,o_bar=bf16:kept", in_splits(IN_PAIRS, o_bar=True)),
        ("flash@{},tile=2,l=bf16:once", in_splits(IN_PAIRS, l=True)),
        ("flash@{},tile=2,shift=-1", in_splits(IN_PAIRS, shift=-1.0)),
        ("flash@{},tile=2,shift=ln1.5", in_splits(IN_PAIRS, shift=math.log(1.5))),
        ("lazy@{},tile=2,lag=0.5", in_splits(IN_PAIRS, lag=0.5)),
    ],
)
def test_tiles_splits_and_shifts_are_those_of_the_text(text: str, formula: Formula) -> None:
    declaration = parse_declaration(text.format("fp32,p_bar=bf16"))
    expected = by_hand(inputs(), formula, KEYS)
    assert_rounded_as(declaration.algorithm, declaration.plan, declaration.block, expected, declaration.shift_rule)


def test_the_root_of_the_scale_is_rounded_in_q_and_in_k() -> None:
    call, root = inputs(), math.sqrt(SCALE)
    q, k = ((x.double() * root).bfloat16().double() / root for x in (call.q, call.k))
    expected = by_hand(replace(call, q=q, k=k), softmax_of(lambda x, scale: x * scale), KEYS)
    assert_rounded_as(STANDARD_ATTENTION, replace(FP32_PLAN, q=LOW, k=LOW), Block(2, 2), expected)


def test_the_root_is_a_number_of_the_scale_s_format_before_q_and_k_take_it() -> None:
    call, root = inputs(), bf16(math.sqrt(SCALE))
    q, k = ((x.double() * root).bfloat16().double() / math.sqrt(SCALE) for x in (call.q, call.k))
    expected = by_hand(replace(call, q=q, k=k), softmax_of(lambda x, scale: x * scale), KEYS)
    assert_rounded_as(STANDARD_ATTENTION, replace(FP32_PLAN, q=LOW, k=LOW, scale=LOW), Block(2, 2), expected)


@pytest.mark.parametrize("q", ["", ",q=bf16"])
def test_scale_and_log2_e_are_one_number_where_both_are_narrow(q: str) -> None:
    call, fold = inputs(), bf16(SCALE * math.log2(math.e))
    assert fold != bf16(SCALE) * bf16(math.log2(math.e))
    left = (call.q.double() * fold).bfloat16().double() / fold if q else call.q
    plan = parse_declaration(f"flash@fp32,base=2,scale=bf16,log2_e=bf16{q}").plan
    expected = by_hand(replace(call, q=left), softmax_of(lambda x, scale: x * fold * math.log(2)), KEYS)
    assert_rounded_as(FLASH_ATTENTION, plan, Block(2, 2), expected)


@pytest.mark.parametrize(("every", "terms"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("algorithm", [FLASH_ATTENTION, STANDARD_ATTENTION], ids=lambda algorithm: algorithm.name)
def test_a_row_sum_may_be_rounded_after_every_few_terms(algorithm: Algorithm, every: int, terms: int) -> None:
    def formula(qk: Row, scale: float, v: Sequence[Row], tile: int) -> list[float]:
        shifted = [math.exp((x - max(qk)) * scale) for x in qk]
        l = 0.0
        for first in range(0, KEYS, terms):
            l = bf16(l + math.fsum(shifted[first : first + terms]))
        return [math.fsum(p * row[column] for p, row in zip(shifted, v, strict=True)) / l for column in range(D)]

    plan = replace(FP32_PLAN, row_sum=replace(LOW, every=every))
    assert_rounded_as(algorithm, plan, Block(2, KEYS), by_hand(inputs(), formula, KEYS))


@pytest.mark.parametrize("changes", ["", ",contract=yes"])
def test_log2_e_is_a_number_of_its_format(changes: str) -> None:
    fold = math.log(2) * torch.tensor(math.log2(math.e)).bfloat16().item()
    plan = parse_declaration(f"flash@fp32,base=2,log2_e=bf16{changes}").plan
    expected = by_hand(inputs(), softmax_of(lambda x, scale: x * scale * fold), KEYS)
    assert_rounded_as(FLASH_ATTENTION, plan, Block(2, 2), expected)


def assert_rounded_as(
    algorithm: Algorithm, plan: RoundingPlan, block: Block, expected: torch.Tensor, rule: ShiftRule = SAFE
) -> None:
    call, declaration = inputs(), Declaration(algorithm, plan, rule, block)
    o = run_declared(declaration, call, EmulatedArithmetic(), gradients=False).o.double()
    ref = reference(call)
    # The order of fp32's own operations, some dozens of them; each point costs thousands of times that.
    fp32 = 64 * FP32.unit_roundoff * ref.magnitude
    assert ((o - expected).abs() <= fp32).all()
    assert ((o - ref.o).abs() > 100 * fp32).any()


@pytest.mark.parametrize("name", POINTS)
def test_a_point_rounds_where_its_formula_does(name: str) -> None:
    algorithm, plan, formula, tile = POINTS[name]
    assert_rounded_as(algorithm, plan, Block(2, tile), by_hand(inputs(), formula, tile))


@pytest.mark.parametrize("base_two", [False, True])
@pytest.mark.parametrize("algorithm", [FLASH_ATTENTION, STANDARD_ATTENTION], ids=lambda kernel: kernel.name)
def test_a_scaled_q_is_rounded_before_the_product(algorithm: Algorithm, base_two: bool) -> None:
    """In base two with log2(e) in it, as the Triton kernels that fold it into q have it."""
    call, fold = inputs(), math.log2(math.e) if base_two else 1.0
    q = (call.q.double() * (call.scale * fold)).bfloat16().double() / (call.scale * fold)
    expected = by_hand(replace(call, q=q), softmax_of(lambda x, scale: x * scale), KEYS)
    plan = replace(FP32_PLAN, q=LOW, exponential=Exponential(base_two=base_two))
    assert_rounded_as(algorithm, plan, Block(2, 2), expected)
