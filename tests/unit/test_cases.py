"""The scripted cases: the same input everywhere and always, and the scores that they claim to hold."""

import fnmatch
from collections.abc import Callable
from dataclasses import fields
from functools import cache, partial

import pytest
import torch
from torch import Tensor

from tiebreak.cases.case import Case, Scores, scripted
from tiebreak.cases.claims import BIASED, UNBIASED, Claim, claim, written_claims
from tiebreak.cases.feature_cases import EVERY
from tiebreak.cases.slips import slips
from tiebreak.kernels.formats import BF16, FP16, FP32, TF32, Format, Formats
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionInputs
from tiebreak.kernels.reference import reference
from tiebreak.kernels.roster import composed_kernel

pytestmark = pytest.mark.quick

CASES = {case.name: case for case in EVERY}
HEADS = 16
LONG = {case.name for case in EVERY if case.most_heads is not None}  # rows of which few heads say enough

each_case = pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
each_format = pytest.mark.parametrize("fmt", [BF16, FP16], ids=lambda fmt: fmt.name)


@cache
def _made(name: str, fmt: Format = BF16, seed: int = 0, batch: int = 0) -> AttentionInputs:
    return CASES[name].make(seed, batch, 2 if name in LONG else HEADS, fmt)


def _tensors(inputs: AttentionInputs) -> dict[str, Tensor]:
    return {"q": inputs.q, "k": inputs.k, "v": inputs.v, "do": inputs.do}


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


@each_case
def test_a_seed_gives_the_same_bits_again_and_another_others_all_on_the_formats_grid(case: Case) -> None:
    first, again, other = (
        _made(case.name),
        case.make(0, 0, 2 if case.name in LONG else HEADS, BF16),
        _made(case.name, seed=1),
    )
    for field in fields(AttentionInputs):
        before, after = getattr(first, field.name), getattr(again, field.name)
        before, after = (torch.tensor(x) if isinstance(x, float) else x for x in (before, after))
        assert torch.equal(before.isnan(), after.isnan()) if isinstance(before, Tensor) else before == after, field.name
    assert all(_same_bits(x, _tensors(again)[name]) for name, x in _tensors(first).items())
    assert first.noise_seed != other.noise_seed
    for name in ("k", "v", "do"):
        # Numbers of 8 bits from a few binades meet by chance, and scripted keys share a dimension.
        drawn = _tensors(first)[name]
        assert (drawn == _tensors(other)[name])[drawn != 0.0].double().mean() < 0.5, name
    for fmt in (BF16, FP16):
        inputs = _made(case.name, fmt)
        assert inputs.formats == case.formats(fmt)
        assert inputs.formats.inputs == inputs.formats.output == fmt
        for name, x in _tensors(inputs).items():
            assert torch.equal(x.nan_to_num(nan=7.0), x.to(TORCH_DTYPES[fmt]).float().nan_to_num(nan=7.0)), name


def test_every_case_takes_any_number_of_heads_and_many_are_split_over_the_batch() -> None:
    for case in EVERY:
        assert case.make(1, 0, 5, BF16).q.shape[:2] == (1, min(5, case.most_heads or 5))
    assert CASES["random"].make(0, 0, 64, BF16).q.shape[:2] == (4, 16)
    assert CASES["ties_across_long_blocks"].make(1, 0, 256, BF16).q.shape[:2] == (4, 16), "64 at most"


def test_names_and_streams_are_a_case_s_own() -> None:
    assert len(CASES) == len(EVERY)
    assert all(case.about and case.source and all(claim.source for claim in case.claims) for case in EVERY)
    written = {name for names, _ in written_claims() for name in names}
    assert [name for name in written if not fnmatch.filter(CASES, name.replace("[", "[[]"))] == []
    assert not _same_bits(_made("repeated_zero").v, _made("repeated_tiny").v)
    assert not _same_bits(_made("random", BF16, 1, 0).v, _made("random", BF16, 0, 1).v)


def test_a_format_that_no_device_computes_in_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bf16.*not in tf32"):
        CASES["random"].make(0, 0, HEADS, TF32)


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


#: By case: the scores that its recipe scripts.
SCRIPTS: dict[str, Scores] = {
    case.name: case.recipe.keywords.get("scores", Scores())
    for case in EVERY
    if isinstance(case.recipe, partial) and case.recipe.func is scripted and case.name != "low_logits"
}
ORDERS = (lambda d: list(range(d)), lambda d: list(range(d))[::-1])  # forward and backward


@each_format
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_scripted_row_is_exact_in_fp32_in_any_order_and_has_the_maxima_and_the_gap_of_its_script(
    name: str, fmt: Format
) -> None:
    inputs, script = _made(name, fmt), SCRIPTS[name]
    s = _exact_scores(inputs)
    assert all(torch.equal(_fp32_scores(inputs, order).double(), s) for order in ORDERS)
    s = s.sort(-1, descending=True).values
    offsets = torch.tensor(sorted(script.offsets or (0.0,) * script.maxima, reverse=True), dtype=torch.float64)
    base = s[..., :1] - offsets[0]
    # The row maximum was drawn from `top` and the gap from `gap`, each rounded to bf16.
    (low, high), (near, far) = (torch.tensor(bounds).bfloat16() for bounds in (script.top, script.gap))
    assert ((base >= low) & (base <= high)).all()
    assert (s[..., : script.maxima] - base == offsets).all()
    distance = base - s[..., script.maxima :]
    assert ((distance >= near) & (distance <= far)).all()


@each_format
def test_equal_keys_tie_in_fp32_in_any_order_though_no_score_is_exact(fmt: Format) -> None:
    inputs = _made("equal_keys", fmt)
    exact = _exact_scores(inputs)
    for order in ORDERS:
        s = _fp32_scores(inputs, order)
        assert torch.equal(s[..., 0], s[..., 1])
        assert (s[..., 0] > s[..., 2:].amax(-1) + 9).all()
        assert not torch.equal(s.double(), exact)
    assert torch.equal(inputs.k[:, :, 0], inputs.k[:, :, 1])
    assert not torch.equal(inputs.v[:, :, 0], inputs.v[:, :, 1])


def test_edges_are_what_they_say() -> None:
    padded, wholly = (CASES[name].make(0, 0, 64, BF16).key_padding for name in ("padded", "wholly_masked"))
    assert padded is not None
    assert wholly is not None
    assert padded.any(-1).all()
    assert not padded.all()
    assert wholly.any(-1).tolist() == [False, *[True] * (len(wholly) - 1)]
    nan, inf = _made("nan_in_q"), _made("inf_in_v")
    assert (nan.q.isnan().sum((-1, -2)) == 1).all()
    assert (inf.v.isinf().sum((-1, -2)) == 1).all()
    assert all(torch.isfinite(x).all() for x in (nan.k, nan.v, nan.do, inf.q, inf.k, inf.do))
    assert 0.9e4 < _exact_scores(_made("huge_logits")).std().item() < 1.1e4  # normal, of a standard deviation of 1e4
    assert not torch.equal(_made("random", FP32).v, _made("random", FP32).v.bfloat16().float())


@each_format
def test_subnormal_v_is_subnormal_and_not_zero(fmt: Format) -> None:
    v = _made("subnormal_v", fmt).v
    assert (v.abs() < fmt.smallest_normal).all()
    # |V| is about 1 of the 2 that fit below the smallest normal value: zero where it is under a grid step.
    assert (v != 0).double().mean() > 0.9


FIRST = claim(BIASED, "first", "safe", "paper")
SECOND = claim(UNBIASED, "second", "safe stabilized")
THIRD = claim(UNBIASED, "third", plans="fused")
OF_ALL = claim(UNBIASED, "all")
BOTH, NARROW = claim(UNBIASED, "both", formats="bf16 fp16"), claim(UNBIASED, "bf16 unless said")


@pytest.mark.parametrize(
    ("claims", "kernel", "fmt", "source"),
    [
        ((FIRST, SECOND, THIRD), "flash@paper", BF16, "first"),
        ((FIRST, SECOND, THIRD), "flash@fused", BF16, "second"),
        ((FIRST, SECOND, THIRD), "stabilized@paper", BF16, "second"),
        ((FIRST, SECOND, THIRD), "dithered@fused", BF16, "third"),
        ((FIRST, SECOND, THIRD), "dithered@paper", BF16, None),
        ((FIRST, SECOND, THIRD), "standard", BF16, None),
        ((SECOND, THIRD, OF_ALL), None, BF16, "all"),  # a kernel that declares nothing
        ((SECOND, THIRD), None, BF16, None),
        ((NARROW, BOTH), "flash@paper", BF16, "bf16 unless said"),
        ((NARROW, BOTH), "flash@paper", FP16, "both"),
        ((NARROW, BOTH), "flash@paper", FP32, None),
        ((claim(UNBIASED, "named", "safe standard"),), "standard", BF16, "named"),
        ((OF_ALL,), "standard", BF16, "all"),
    ],
)
def test_the_first_claim_that_concerns_a_kernel_and_a_format_is_the_one(
    claims: tuple[Claim, ...], kernel: str | None, fmt: Format, source: str | None
) -> None:
    declaration = None if kernel is None else composed_kernel(kernel).declaration
    found = Case("made_up", "", "", CASES["random"].recipe, claims).claim_about(declaration, fmt)
    assert (found.source if found else None) == source


def test_a_cap_before_the_scale_is_another_cap() -> None:
    """A slip that no planted defect makes, as a change of the inputs: against attention with it, written out."""
    generator = torch.Generator().manual_seed(1)
    q, k, v, do = (torch.randn(1, 2, 5, 16, generator=generator).bfloat16().float() for _ in range(4))
    inputs = AttentionInputs(q=q, k=k, v=v, do=do, formats=Formats.of(BF16), softcap=3.0)
    slip = next(slip for slip in slips(inputs) if slip.about == "scores are capped before they are scaled")
    scores = 3.0 * torch.tanh(q.double() @ k.double().mT / 3.0) * 16**-0.5
    torch.testing.assert_close(reference(slip.inputs).o, scores.softmax(-1) @ v.double(), rtol=1e-12, atol=0.0)
