"""Which plan an undeclared kernel follows."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from tiebreak.backends.backend import EMULATION
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.features import COMMON
from tiebreak.kernels.formats import BF16
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import Kernel, nameless, run_forward, tilings
from tiebreak.kernels.reference import reference
from tiebreak.matrix.experiments.identity import Identification
from tiebreak.matrix.identification.candidates import candidates
from tiebreak.matrix.identification.explain import explain
from tiebreak.matrix.record_collector import plans
from tiebreak.matrix.workbench import Settings, SharedBatch, Workbench
from tiebreak.reports.records.record import (
    BEHAVES_LIKE,
    FOLLOWED,
    FOLLOWS,
    IDENTITY,
    UNEXPLAINED,
    Explanation,
    FitRecord,
    PlanRecord,
    Record,
)
from tiebreak.reports.tables.texts import explanation_text
from tiebreak.studies.cells import CASES, judged


def fit(bits: float | None, mean: float | None = 0.0, half_width: float | None = 0.01) -> FitRecord:
    return FitRecord(mean, half_width, bits)


def record(case: str, kernel: str = "mine", backend: str = "cpu", **bits: float) -> Record:
    return compared(case, {name: fit(share) for name, share in bits.items()}, kernel, backend)


def compared(case: str, fits: Mapping[str, FitRecord], kernel: str = "mine", backend: str = "cpu") -> Record:
    name = f"{backend}-{kernel}-{case}-bf16"
    evidence = {"fits": fits} if fits else {}
    return Record(name, backend, kernel, case, 1, "bf16", 1, 256, "call", "measured", "pytest", evidence=evidence)


def only(*records: Record) -> Explanation:
    (explanation,) = explain(records).values()
    return explanation


UNKNOWN = "unexplained: no known plan agrees; nearest is paper with"


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ({"paper": (0.999999,)}, "follows paper (99.99 % of bits in 1 cell)"),  # not quite all
        (
            {"paper": (1, 0.9, 0.7, 0.97, 0.8, 1)},
            f"{UNKNOWN} 89.50 % of bits in 6 cells (c 70.00 %, e 80.00 %, b 90.00 %, ...)",
        ),
        # One that agrees everywhere goes before one that agrees better, but not everywhere.
        ({"paper": (0.985,) * 3, "fused": (0.97, 1.0, 1.0)}, "follows paper (98.50 % of bits in 3 cells)"),
        (
            {"paper": (0.9999, 0.9999), "fused": (0.9999, 0.9998), "standard": (0.998, 1.0)},
            "can't tell apart: paper, fused on these cases (99.99 % of bits in 2 cells)",
        ),
        ({"paper": (0.9999, 0.9999), "fused": (0.9999, 0.9985)}, "follows paper (99.99 % of bits in 2 cells)"),
    ],
)
def test_the_plan_whose_bits_agree_in_all_cells_is_named(cells: dict[str, Sequence[float]], expected: str) -> None:
    shares = zip(*cells.values(), strict=True)
    records = [
        record(case, **dict(zip(cells, each, strict=True))) for case, each in zip("abcdef", shares, strict=False)
    ]
    assert explanation_text(only(*records)) == expected


def test_what_a_search_came_to_is_the_answer_unless_random_bits_leave_it_without_one() -> None:
    def searched(explanation: Explanation) -> Record:
        return replace(record("identity"), evidence={IDENTITY: explanation})

    named = Explanation(FOLLOWS, ("standard,p_bar=fp32",), 10, 0.9988)
    none = Explanation(UNEXPLAINED, ("flash@paper",), 10, 0.6, {"random": 0.5})
    cells = tuple(compared(case, {"flash@fp32_inside": fit(1.0)}) for case in "ab")
    assert only(*cells, searched(named)) == only(searched(named)) == named
    assert only(*cells, searched(none)) == none
    assert only(record("a", fair=0.6), searched(none)).state == BEHAVES_LIKE
    assert only(compared("a", {"fused": fit(0.95, 0.1), "fair": fit(0.66)})).state == UNEXPLAINED  # not random


def test_the_bias_alone_names_no_plan_and_cells_without_a_comparison_nor_plans_of_some_cells_alone_count() -> None:
    assert explain([record("a")]) == {}
    assert only(record("a"), record("b", paper=1.0)).cells == 1
    assert only(record("a", fp32=1.0, paper=1.0), record("b", paper=0.5)).plans[0] == "paper"
    near, far = fit(0.97, 0.0, 0.001), fit(0.9993, 0.03, 0.001)
    assert only(compared("a", {"fp32_inside": near, "flash@fused,tile=64": far})).plans == ("flash@fused,tile=64",)


def test_tiles_that_no_case_tells_apart_are_one_plan_and_so_are_bases() -> None:
    names = ("flash@fused", "flash@fused,tile=64", "lazy@fused", "flash@fused,base=2,tile=one")
    explanation = only(compared("a", {name: fit(1.0) for name in names}))
    assert explanation_text(explanation).startswith("follows flash@fused (")
    cut = only(compared("a", {name: fit(1.0 if "tile" in name else 0.99) for name in names}))
    assert explanation_text(cut).startswith("follows flash@fused,tile=64 (")


def test_how_a_device_adds_up_products_is_said_where_a_case_shows_it() -> None:
    plain = "standard,s=input"
    odd = f"{plain},accumulator=bfmmla"
    blocks = f"{odd},o_bar=input/512"
    short, faint = compared("a", dict.fromkeys((plain, odd, blocks), fit(1.0))), {odd: fit(1.0), blocks: fit(1.0)}
    assert explanation_text(only(short)).startswith(f"follows {plain} (")
    assert explanation_text(only(short, compared("b", faint | {plain: fit(0.7)}))).startswith(f"follows {odd} (")
    long = compared("c", {plain: fit(0.7), odd: fit(0.8), blocks: fit(1.0)})
    assert explanation_text(only(short, long)).startswith(f"follows {blocks} (")


def test_random_bits_of_its_own() -> None:
    fits = {"fused": fit(0.7, 0.1), "fused_stochastic": fit(0.66, 0.002), "fair": fit(0.65, 0.001)}
    told = explanation_text(only(compared("a", fits), compared("b", fits)))
    assert told == "behaves like fair or fused_stochastic in 2 cells (its random bits are its own)"


@pytest.mark.parametrize(
    "other", [fit(0.66, 0.2), fit(0.66, 0.04, 0.2), fit(0.66, None)], ids=["biased", "too_few_heads", "no_number"]
)
def test_a_random_plan_of_another_bias_explains_nothing(other: FitRecord) -> None:
    explanation = only(compared("a", {"fair": fit(0.66)}), compared("b", {"fair": other}))
    assert explanation_text(explanation).startswith("unexplained: no known plan agrees; nearest is fair with 66.00 %")


def test_kernels_and_backends_are_explained_each_on_its_own() -> None:
    told = [record("a", kernel, backend, paper=share)
            for kernel, backend, share in (("one", "cpu", 1.0), ("two", "cpu", 0.5), ("one", "cuda", 0.5))]  # fmt: skip
    states = {name: explanation.state for name, explanation in explain(told).items()}
    assert states == {"cpu-one": FOLLOWS, "cpu-two": UNEXPLAINED, "cuda-one": UNEXPLAINED}


def test_a_plan_is_described_by_its_rule_and_whether_that_is_a_fix() -> None:
    """What leaves a row's maximum as it is, by whatever name, is none."""
    labels = ("flash@fused", "flash_1@fused", "standard,s=input", "lazy@fused", "as_printed_v1@paper")
    rules = ("flash", "flash_1", "standard", "lazy", "as_printed_v1")
    no_fix = plans(map(parse_declaration, labels), {})
    assert no_fix == {label: PlanRecord(rule) for label, rule in zip(labels, rules, strict=True)}
    named = {"cpu-mine": Explanation("ambiguous", ("stabilized@paper", "fixed_offset@paper,base=2", "fair"), 3)}
    assert plans([], named) == {
        "stabilized@paper": PlanRecord("stabilized", fix=True),
        "fixed_offset@paper,base=2": PlanRecord("fixed_offset", fix=True),
        "fair": PlanRecord("dithered", fix=True),
    }


def test_candidates_are_texts_that_the_command_line_takes_and_no_two_do_the_same() -> None:
    for text, declaration in candidates().items():
        taken = parse_declaration(text)
        assert taken == declaration
        assert taken.tile_named == declaration.tile_named
        assert declaration.plan.o.narrows
    done = [nameless(declaration) for declaration in candidates().values()]
    assert len(set(done)) == len(done)


def test_a_named_tile_is_the_only_one() -> None:
    assert [str(tiling.block) for tiling in tilings(parse_declaration("paper"))] == ["128", "one", "64", "32"]
    assert [str(tiling.block) for tiling in tilings(parse_declaration("paper,tile=128"))] == ["128"]
    assert len(tilings(parse_declaration("standard"))) == 1


@cache
def batch(case: str) -> SharedBatch:
    """Inputs of a case, and what the candidates make of them, for all tests."""
    inputs = CASES[case].make(1, 0, 32, BF16)
    return SharedBatch(inputs, reference(inputs))


def test_a_contracted_kernel_is_told_from_one_that_rounds_first() -> None:
    plan, fits_by_case = "flash@fused_contracted", {}
    for case in ("inexact_ties[r=6]", "sink_tie", "tied_p_bar"):
        o = run_forward(parse_declaration(plan), batch(case).inputs, EMULATION.arithmetic).o
        shares = batch(case).fits(o, candidates())
        fits_by_case[case] = {name: FitRecord(0.0, 0.01, fit.bits) for name, fit in shares.items()}
    explanation = only(*(compared(case, each) for case, each in fits_by_case.items()))
    assert explanation_text(explanation) == f"follows {plan} (100.00 % of bits in 3 cells)"
    assert (fits_by_case["inexact_ties[r=6]"]["flash@fused"].bits or 1.0) < 0.9


def mlx(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return ((q * torch.tensor(scale, dtype=q.dtype)) @ k.mT).float().softmax(-1).to(q.dtype) @ v


def folded(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """As Triton's tutorial had it: the scale and log2(e) in q."""
    s = (q.float() * (scale * math.log2(math.e))).to(q.dtype).float() @ k.float().mT
    p = torch.exp2(s - s.amax(-1, keepdim=True))
    return (p.to(q.dtype).float() @ v.float() / p.sum(-1, keepdim=True)).to(q.dtype)


@pytest.mark.parametrize(
    ("kernel", "plan"), [(mlx, "standard,scale=input,q=input,s=input"), (folded, "flash@fused,q=input,base=2")]
)
def test_a_kernel_that_scales_q_first_is_known(kernel: Callable[..., Tensor], plan: str) -> None:
    """In PyTorch's own bf16, with a scale that is no power of two."""
    inputs = batch("random_odd").inputs
    o = kernel(*(x.bfloat16() for x in (inputs.q, inputs.k, inputs.v)), inputs.scale)
    found = batch("random_odd").fits(o, candidates())
    assert found[plan].bits > 0.995
    assert {text.partition(",tile")[0] for text, fit in found.items() if fit.bits >= FOLLOWED} == {plan}


def test_a_cell_tries_the_plan_that_designed_inputs_show_and_all_others_where_it_has_not_the_bits() -> None:
    def by_head_dimension(inputs: AttentionInputs, arithmetic: Arithmetic, gradients: bool) -> AttentionOutput:
        del gradients
        plan = "flash@fused" if inputs.q.shape[-1] >= 64 else "flash@paper"
        return run_forward(parse_declaration(plan), inputs, arithmetic)

    kernel = Kernel("k", by_head_dimension, None, has_backward=False, takes=COMMON, external=True)
    bench = Workbench(Settings(heads=8))
    emulated = partial(judged, kernel, backend=EMULATION, bench=bench)
    emulated(Identification())
    fits_by_case = {case: emulated(case).evidence["fits"] for case in ("random", "random_causal")}
    assert set(fits_by_case["random"]) == {"flash@fused"}
    assert set(fits_by_case["random_causal"]) == set(candidates())
    assert fits_by_case["random_causal"]["flash@paper"].bits == 1.0
