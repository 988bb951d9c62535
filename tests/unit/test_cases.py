"""The scripted cases: the same input everywhere and always, and the scores that they claim to hold."""

from collections.abc import Callable
from dataclasses import fields
from functools import cache

import pytest
import torch
from torch import Tensor

from tiebreak.backends.emulation.rounding import round_to
from tiebreak.cases.case import Case
from tiebreak.cases.claims import BIASED, UNBIASED, claim
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.kernels.formats import BF16, FP8_E4M3, FP16, FP32, TF32, Format, parse_format
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionInputs
from tiebreak.kernels.roster import composed_kernel
from tiebreak.kernels.shift_rules import SHIFT_RULES

CASES = {case.name: case for case in SCRIPTED}
HEADS = 32

each_case = pytest.mark.parametrize("case", SCRIPTED, ids=lambda case: case.name)
each_format = pytest.mark.parametrize("fmt", [BF16, FP16], ids=lambda fmt: fmt.name)


@cache
def _made(name: str, fmt: Format = BF16, seed: int = 0, batch: int = 0) -> AttentionInputs:
    return CASES[name].make(seed, batch, HEADS, fmt)


def _tensors(inputs: AttentionInputs) -> dict[str, Tensor]:
    return {"q": inputs.q, "k": inputs.k, "v": inputs.v, "do": inputs.do}


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_names_are_unique() -> None:
    assert len(CASES) == len(SCRIPTED)


@each_case
def test_a_case_says_what_it_is_and_where_it_comes_from(case: Case) -> None:
    assert case.about
    assert case.source
    assert all(claim.source for claim in case.claims)


@each_format
@each_case
def test_a_seed_gives_the_same_bits_again(case: Case, fmt: Format) -> None:
    first, again = _made(case.name, fmt), case.make(0, 0, HEADS, fmt)
    for field in fields(AttentionInputs):
        before, after = getattr(first, field.name), getattr(again, field.name)
        assert torch.equal(before.isnan(), after.isnan()) if isinstance(before, Tensor) else before == after, field.name
    assert all(_same_bits(a, b) for a, b in zip(_tensors(first).values(), _tensors(again).values(), strict=True))


@pytest.mark.parametrize(("seed", "batch"), [(1, 0), (0, 1)], ids=["seed", "batch"])
@each_case
def test_another_seed_or_batch_gives_other_bits(case: Case, seed: int, batch: int) -> None:
    first, second = _made(case.name), _made(case.name, BF16, seed, batch)
    assert first.noise_seed != second.noise_seed
    for name in ("k", "v", "do"):
        before, after = _tensors(first)[name], _tensors(second)[name]
        # Numbers of 8 bits from a few binades meet by chance, and scripted keys share a dimension.
        assert (before == after).double().mean() < 0.5, name


def test_a_batch_of_one_seed_is_no_batch_of_another() -> None:
    assert not _same_bits(_made("random", BF16, 1, 0).v, _made("random", BF16, 0, 1).v)


def test_cases_draw_from_streams_of_their_own() -> None:
    assert not _same_bits(_made("repeated_zero").v, _made("repeated_tiny").v)


@each_format
@each_case
def test_every_tensor_lies_on_the_formats_grid(case: Case, fmt: Format) -> None:
    inputs = _made(case.name, fmt)
    assert inputs.formats == case.formats(fmt)
    assert inputs.formats.inputs == inputs.formats.output == fmt
    for name, x in _tensors(inputs).items():
        assert x.dtype == torch.float32, name
        assert torch.equal(x.nan_to_num(nan=7.0), x.to(TORCH_DTYPES[fmt]).float().nan_to_num(nan=7.0)), name


@pytest.mark.parametrize(("heads", "split"), [(8, (1, 8)), (16, (1, 16)), (64, (4, 16))])
def test_heads_are_split_over_the_batch(heads: int, split: tuple[int, int]) -> None:
    made = (case.make(0, 0, heads, BF16) for case in SCRIPTED if case.most_heads is None)
    assert {inputs.q.shape[:2] for inputs in made if inputs.lengths is None} == {split}


def test_a_format_that_no_device_computes_in_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bf16.*not in tf32"):
        CASES["random"].make(0, 0, HEADS, TF32)


def test_fp32_keeps_what_the_narrow_formats_round() -> None:
    inputs = _made("random", FP32)
    assert not torch.equal(inputs.v, inputs.v.bfloat16().float())


# The scripted rows: maxima, their distances from the top, the range of the top, the range of the gap to the tail.
Script = tuple[tuple[float, ...], tuple[float, float], tuple[float, float]]
_TOP, _GAP = (1.0, 6.0), (12.0, 18.0)
SCRIPTS: dict[str, Script] = {
    "tied_maxima[k=2]": ((0.0,) * 2, _TOP, (9.0, 15.0)),
    "tied_maxima[k=3]": ((0.0,) * 3, _TOP, _GAP),
    "tied_maxima[k=4]": ((0.0,) * 4, _TOP, _GAP),
    "tied_maxima[k=8]": ((0.0,) * 8, _TOP, _GAP),
    "tied_maxima[k=16]": ((0.0,) * 16, _TOP, _GAP),
    "tied_maxima_positive_v": ((0.0,) * 2, _TOP, _GAP),
    "sink_tie": ((0.0,) * 2, _TOP, _GAP),
    "mixed_sign_v": ((0.0,) * 2, _TOP, _GAP),
    "no_tail": ((0.0,) * 2, _TOP, (200.0, 210.0)),
    "single_maximum": ((0.0,), _TOP, (9.0, 15.0)),
    "single_maximum_sink": ((0.0,), _TOP, (9.0, 15.0)),
    "single_maximum_large": ((0.0,), (105.0, 120.0), _GAP),
    "repeated_zero": ((0.0,) * 2, (0.0, 0.0), _GAP),
    "repeated_tiny": ((0.0,) * 2, (0.001, 0.004), _GAP),
    "repeated_negative": ((0.0,) * 2, (-6.0, -1.0), _GAP),
    "repeated_large[r=20]": ((0.0,) * 2, (20.0, 22.0), _GAP),
    "repeated_large[r=25]": ((0.0,) * 2, (25.0, 25.0), _GAP),
    "repeated_large[r=30]": ((0.0,) * 2, (30.0, 32.0), _GAP),
    "repeated_large[r=60]": ((0.0,) * 2, (60.0, 65.0), _GAP),
    "repeated_large[r=90]": ((0.0,) * 2, (90.0, 92.0), _GAP),
    "repeated_large[r=105]": ((0.0,) * 2, (105.0, 110.0), _GAP),
    "repeated_large[r=10000]": ((0.0,) * 2, (1e4, 10100.0), _GAP),
    "inexact_ties[r=6]": ((0.0,) * 2, (5.0, 7.75), (200.0, 210.0)),
    "inexact_ties[r=60]": ((0.0,) * 2, (60.0, 85.0), (200.0, 210.0)),
    "inexact_ties[r=600]": ((0.0,) * 2, (520.0, 1000.0), (200.0, 210.0)),
    "inexact_single[r=6]": ((0.0,), (5.0, 7.75), (200.0, 210.0)),
    "inexact_single[r=60]": ((0.0,), (60.0, 85.0), (200.0, 210.0)),
    "inexact_single[r=600]": ((0.0,), (520.0, 1000.0), (200.0, 210.0)),
    "ties_across_blocks": ((0.0,) * 2, _TOP, _GAP),
    "ties_across_long_blocks": ((0.0,) * 4, _TOP, _GAP),
    "overshooting_shift": ((0.5, 0.0, 0.0), _TOP, _GAP),
    "near_tie_inside": ((0.0, -(2.0**-11)), _TOP, _GAP),
    "near_tie_outside": ((0.0, -1.5 * 2.0**-10), _TOP, _GAP),
    "faint_tail": ((0.0,) * 2, _TOP, (20.5, 22.5)),
    "growing_maximum[by=4]": ((0.0, 0.0, -4.0), _TOP, _GAP),
    "fp8_ties": ((0.0,) * 2, _TOP, _GAP),
    "fp8_flat_tail": ((0.0,), _TOP, (7.0, 7.5)),
}
SCRIPTED_ROWS = [(name, *script) for name, script in SCRIPTS.items()]
each_script = pytest.mark.parametrize(("name", "offsets", "top", "gap"), SCRIPTED_ROWS, ids=list(SCRIPTS))


def _exact_scores(inputs: AttentionInputs) -> Tensor:
    return inputs.q.double() @ inputs.expanded_k().double().transpose(-1, -2) * inputs.scale


def _fp32_scores(inputs: AttentionInputs, order: Callable[[int], list[int]]) -> Tensor:
    """Scores in fp32, one product added after another in an order of the dimensions."""
    dimensions = order(inputs.q.shape[-1])
    terms = (inputs.q[..., :, None, d] * inputs.k[..., None, :, d] for d in dimensions)
    total = next(terms)
    for term in terms:
        total = total + term
    return total * inputs.scale


ORDERS: dict[str, Callable[[int], list[int]]] = {
    "forward": lambda d: list(range(d)),
    "backward": lambda d: list(range(d))[::-1],
}


@each_format
@each_script
def test_a_scripted_row_has_the_maxima_and_the_gap_that_it_claims(
    name: str, offsets: tuple[float, ...], top: tuple[float, float], gap: tuple[float, float], fmt: Format
) -> None:
    s = _exact_scores(_made(name, fmt)).sort(-1, descending=True).values
    above = max(offsets)
    base = s[..., :1] - above
    # The row maximum was drawn from `top` and the gap from `gap`, each rounded to bf16.
    low, high = (torch.tensor(bound).bfloat16().item() for bound in top)
    assert ((base >= low) & (base <= high)).all()
    assert (s[..., : len(offsets)] - base == torch.tensor(offsets, dtype=torch.float64)).all()
    distance = base - s[..., len(offsets) :]
    assert ((distance >= torch.tensor(gap[0]).bfloat16()) & (distance <= torch.tensor(gap[1]).bfloat16())).all()


@pytest.mark.parametrize("order", ORDERS)
@each_format
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripted_scores_are_exact_in_fp32_in_any_order(name: str, fmt: Format, order: str) -> None:
    inputs = _made(name, fmt)
    assert torch.equal(_fp32_scores(inputs, ORDERS[order]).double(), _exact_scores(inputs))


@each_format
def test_equal_keys_tie_in_fp32_in_any_order_though_no_score_is_exact(fmt: Format) -> None:
    inputs = _made("equal_keys", fmt)
    exact = _exact_scores(inputs)
    for order in ORDERS.values():
        s = _fp32_scores(inputs, order)
        assert torch.equal(s[..., 0], s[..., 1])
        assert (s[..., 0] > s[..., 2:].amax(-1) + 9).all()
        assert not torch.equal(s.double(), exact)
    assert torch.equal(inputs.k[:, :, 0], inputs.k[:, :, 1])
    assert not torch.equal(inputs.v[:, :, 0], inputs.v[:, :, 1])


@pytest.mark.parametrize(
    ("name", "positions"),
    [
        ("ties_across_blocks", {17, 145}),
        ("ties_across_long_blocks", {100, 700, 1300, 1900}),
        ("overshooting_shift", {5, 40, 200}),
        ("growing_maximum", {17, 145, 155}),
        ("growing_maximum[by=4]", {17, 145, 155}),
    ],
)
def test_maxima_lie_in_the_key_blocks_that_they_should(name: str, positions: set[int]) -> None:
    s = _exact_scores(_made(name))
    largest = s.topk(len(positions)).indices
    assert set(largest.flatten().tolist()) == positions


def test_the_overshooting_block_comes_before_the_true_maximum() -> None:
    s = _exact_scores(_made("overshooting_shift"))
    assert torch.equal(s[..., 5], s[..., 40])
    assert torch.equal(s[..., 200], s[..., 5] + 0.5)


def test_a_growing_maximum_grows_by_less_than_lazy_rescaling_follows_and_head_by_head() -> None:
    s = _exact_scores(_made("growing_maximum"))
    growth = s[..., 145] - s[..., 17]
    assert torch.equal(s[..., 145], s[..., 155])
    assert ((growth >= 1.0) & (growth <= 5.0) & (growth < SHIFT_RULES["lazy"].lag)).all()
    assert (growth == growth[..., :1]).all()  # of a row, as of its head
    assert len(set(growth[..., 0].flatten().tolist())) > HEADS / 2


@pytest.mark.parametrize(
    "case", [case for case in SCRIPTED if case.formats(BF16).v != BF16], ids=lambda case: case.name
)
def test_v_lies_on_the_grid_of_the_narrower_format_that_a_case_names(case: Case) -> None:
    inputs = case.make(1, 0, 32, BF16)
    v = inputs.v
    assert torch.equal(round_to(v, inputs.formats.v), v)
    assert not torch.equal(round_to(v, parse_format("E4M2")), v)


def test_in_eight_bits_each_key_of_the_flat_tail_is_nothing_and_all_are_much() -> None:
    s = _exact_scores(_made("fp8_flat_tail"))
    p_bar = torch.exp(s - s.amax(-1, keepdim=True))
    tail = p_bar.masked_fill(p_bar == 1, 0.0)
    assert (round_to(tail.float(), FP8_E4M3) == 0).all()
    assert (tail.sum(-1) > 0.06).all()


def test_maxima_lie_anywhere_in_a_row_unless_placed() -> None:
    places = _exact_scores(_made("tied_maxima[k=2]"))[:, :, 0].topk(2).indices.flatten()
    # Of 64 places among 128 keys, 39 % differ on average if they are drawn evenly; 5 % if there were a handful.
    assert len(set(places.tolist())) > 32


def test_the_row_maximum_varies_within_a_head() -> None:
    row_max = _exact_scores(_made("tied_maxima[k=2]")).amax(-1)
    assert (row_max.amax(-1) > row_max.amin(-1)).all()


NEGATIVE = [name for name in SCRIPTS if name not in ("tied_maxima_positive_v", "mixed_sign_v")]


@pytest.mark.parametrize("name", [name for name in NEGATIVE if "sink" not in name])
def test_v_is_negative(name: str) -> None:
    assert (_made(name).v < 0).all()


def test_v_is_positive_where_the_case_says_so() -> None:
    assert (_made("tied_maxima_positive_v").v > 0).all()


def test_v_of_mixed_sign_is_evenly_mixed() -> None:
    v = _made("mixed_sign_v").v
    share = (v > 0).double().mean().item()
    assert abs(share - 0.5) < 5 * 0.5 / v.numel() ** 0.5


@pytest.mark.parametrize(("name", "maxima"), [("sink_tie", 2), ("single_maximum_sink", 1)])
def test_a_sinks_tail_has_v_near_zero_and_its_maxima_have_not(name: str, maxima: int) -> None:
    inputs = _made(name)
    at = _exact_scores(inputs)[:, :, 0].topk(maxima).indices
    is_top = torch.zeros(inputs.v.shape[:3], dtype=torch.bool).scatter_(2, at, True)
    top, tail = inputs.v[is_top], inputs.v[~is_top]
    assert (top < -1).all()
    # Mean -0.1, standard deviation 0.3; 8 standard deviations for rounding to bf16 and a million draws.
    assert abs(tail.mean().item() + 0.1) < 8 * 0.3 / tail.numel() ** 0.5


@pytest.mark.parametrize("name", [name for name in CASES if name != "random_mixed_v"])
def test_the_upstream_gradient_is_of_one_sign(name: str) -> None:
    assert (_made(name).do <= 0).all()


@pytest.mark.parametrize("name", ["random_mixed_v", "random", "random_causal", "random_grouped", "random_odd"])
def test_random_cases_have_the_shapes_that_they_claim(name: str) -> None:
    inputs = _made(name)
    shapes = {
        "random_causal": (48, 48, 32),
        "random_odd": (7, 100, 40),
    }
    assert (inputs.q.shape[2], inputs.k.shape[2], inputs.q.shape[3]) == shapes.get(name, (4, 128, 64))
    assert inputs.groups == (4 if name == "random_grouped" else 1)
    assert inputs.causal is (name == "random_causal")


def test_the_masked_cases_mask_what_they_claim() -> None:
    padded, wholly = _made("padded").key_padding, _made("wholly_masked").key_padding
    assert padded is not None
    assert wholly is not None
    assert padded.any(-1).all()
    assert not padded.all()
    assert not wholly[0].any()
    assert wholly[1:].any(-1).all()


def test_the_poisoned_cases_hold_one_poisoned_element_a_head() -> None:
    nan, inf = _made("nan_in_q"), _made("inf_in_v")
    assert torch.equal(nan.q.isnan().sum((-1, -2)), torch.ones(nan.q.shape[:2]))
    assert torch.equal(inf.v.isinf().sum((-1, -2)), torch.ones(inf.v.shape[:2]))
    assert all(torch.isfinite(x).all() for x in (nan.k, nan.v, nan.do, inf.q, inf.k, inf.do))


@each_format
def test_subnormal_v_is_subnormal_and_not_zero(fmt: Format) -> None:
    v = _made("subnormal_v", fmt).v
    assert (v.abs() < fmt.smallest_normal).all()
    # |V| is about 1 of the 2 that fit below the smallest normal value: zero where it is under a grid step.
    assert (v != 0).double().mean() > 0.9


def test_huge_logits_are_huge() -> None:
    s = _exact_scores(_made("huge_logits"))
    # Normal of standard deviation 1e4.
    assert 0.9e4 < s.std().item() < 1.1e4


FIRST = claim(BIASED, "first", rules="safe", plans="paper")
SECOND = claim(UNBIASED, "second", rules="safe stabilized")
THIRD = claim(UNBIASED, "third", plans="fused")


@pytest.mark.parametrize(
    ("kernel", "source"),
    [
        ("flash@paper", "first"),
        ("flash@fused", "second"),
        ("stabilized@paper", "second"),
        ("stabilized@fused", "second"),
        ("dithered@fused", "third"),
        ("dithered@paper", None),
        ("standard", None),
    ],
)
def test_the_first_claim_that_concerns_a_kernel_is_its_claim(kernel: str, source: str | None) -> None:
    case = Case("made_up", "", "", CASES["random"].recipe, (FIRST, SECOND, THIRD))
    claim = case.claim_about(composed_kernel(kernel).declaration)
    assert (claim.source if claim else None) == source


def test_only_a_claim_about_all_kernels_speaks_of_one_that_declares_nothing() -> None:
    of_all = claim(UNBIASED, "all")
    assert Case("made_up", "", "", CASES["random"].recipe, (SECOND, THIRD, of_all)).claim_about(None) is of_all
    assert Case("made_up", "", "", CASES["random"].recipe, (SECOND, THIRD)).claim_about(None) is None


def test_a_claim_speaks_of_the_formats_that_it_names() -> None:
    both, narrow = claim(UNBIASED, "both", formats="bf16 fp16"), claim(UNBIASED, "bf16 unless said")
    case = Case("made_up", "", "", CASES["random"].recipe, (narrow, both))
    declaration = composed_kernel("flash@paper").declaration
    assert case.claim_about(declaration, BF16) is narrow
    assert case.claim_about(declaration, FP16) is both
    assert case.claim_about(declaration, FP32) is None


def test_a_claim_speaks_of_standard_attention_if_it_names_it_or_no_rule() -> None:
    declaration = composed_kernel("standard").declaration
    assert declaration is not None
    assert claim(UNBIASED, "", rules="safe standard").concerns(declaration, BF16)
    assert claim(UNBIASED, "").concerns(declaration, BF16)
    assert not claim(UNBIASED, "", rules="safe").concerns(declaration, BF16)


@pytest.mark.parametrize(("asked", "drawn"), [(32, 32), (64, 64), (256, 64)])
def test_of_long_rows_no_more_heads_are_drawn_than_a_run_has_time_for(asked: int, drawn: int) -> None:
    q = CASES["ties_across_long_blocks"].make(1, 0, asked, BF16).q
    assert q.shape[0] * q.shape[1] == drawn
