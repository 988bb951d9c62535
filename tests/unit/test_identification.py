"""Naming a kernel's plan from its outputs."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tiebreak.backends.backend import EMULATION
from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.backends.emulation.rounding import round_to
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.declarations import parse_declaration, shortest
from tiebreak.kernels.formats import BF16, Rounding, parse_format
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import Declaration, Kernel, composed, run_forward
from tiebreak.kernels.plans import Accumulator, Cast
from tiebreak.matrix.candidates import candidates
from tiebreak.matrix.identification import search
from tiebreak.matrix.identification.asking import Asked, threads
from tiebreak.matrix.identification.designed import DESIGNED, LONG, SHAPES
from tiebreak.matrix.identification.identity import identify
from tiebreak.matrix.identification.known import KnownPlans, UnidentifiedError
from tiebreak.matrix.identification.rivals import Rivals
from tiebreak.matrix.identification.search import Search
from tiebreak.matrix.identification.space import (
    ALGORITHM,
    RULE,
    TILE,
    Change,
    changes,
    combined,
    forward_alone,
    moves,
    plainness,
    text,
)
from tiebreak.programs.identify import main
from tiebreak.reports.tables.texts import explanation_text


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with threads(1):
        yield


@pytest.mark.parametrize(
    "plan",
    [
        "standard,divisor=input:up,s=input:zero,l=input",  # found by two changes at once
        "dithered@fused,pv=fp16:away,o=input:zero,tile=one",  # O's cast hides the rest
    ],
)
def test_the_search_comes_to_the_plan_of_a_kernel_that_says_nothing(plan: str) -> None:
    truth = parse_declaration(plan)
    answers = list(_asked(composed("k", truth)).answers.values())
    searched = Search(answers, BF16, [forward_alone(known, BF16) for known in candidates().values()])
    nearest = searched.nearest(lambda line: None)
    assert searched.cost(nearest) == 0.0
    assert forward_alone(truth, BF16) == nearest, text(nearest)


def _by_shape(inputs: AttentionInputs, arithmetic: Arithmetic, gradients: bool) -> AttentionOutput:
    """A kernel whose tiles go by the head dimension, and its P by the number of elements."""
    del gradients
    plan = "flash@paper,l=input,tile=16" if inputs.q.shape[-1] > 64 else "flash@paper,l=input,tile=64"
    plan = "flash@paper,p_bar=fp32,l=input,tile=64" if inputs.q.numel() >= 2**18 else plan
    return run_forward(parse_declaration(plan), inputs, arithmetic)


def test_a_plan_is_found_and_named_with_the_shape_that_it_changes_with() -> None:
    kernel = replace(composed("k", parse_declaration("standard")), compute=_by_shape, declaration=None)
    identity = identify(KnownPlans(Asked(EMULATION, kernel, BF16)))
    assert identity.plan is not None
    assert _plan(identity.plan) == _plan("flash@paper,l=input,tile=64")
    assert identity.share == 1.0
    assert identity.bias["tied_maxima[k=2]"].verdict == "biased"
    assert "tile" not in identity.alike
    assert "p_bar" not in identity.alike
    others = {shape: _plan(other.plan) for shape, other in identity.elsewhere.items() if other.plan is not None}
    tiles, of_many = _plan("flash@paper,l=input,tile=16"), _plan("flash@paper,p_bar=fp32,l=input,tile=64")
    assert others.keys() == identity.elsewhere.keys()
    assert others.pop("64 x 64 x 64") == of_many
    assert "8 x 64 x 256, d = 128" in others
    assert set(others.values()) == {tiles}
    assert identity.headline.endswith("its plan changes with the shape of the call")
    assert "but not in " in explanation_text(identity.explanation)


def _asked(kernel: Kernel) -> Asked:
    asked = Asked(EMULATION, kernel, BF16)
    for designed in DESIGNED:
        asked.ask(designed)
    return asked


@pytest.mark.parametrize("accumulator", ["sequential", "ampere"])
def test_sums_of_a_device_are_named(accumulator: str) -> None:
    plan = f"flash@fused,accumulator={accumulator},tile=64"
    rivals = Rivals(_asked(composed("k", parse_declaration(plan))))
    better = rivals.better(forward_alone(parse_declaration("flash@fused,tile=64"), BF16))
    assert better == forward_alone(parse_declaration(plan), BF16)


class _Fp32Sums(EmulatedArithmetic):
    """Sums in fp32, the even and the odd terms apart."""

    def matmul(self, a: Tensor, b: Tensor, cast: Cast, accumulator: Accumulator) -> Tensor:
        even, odd = (a[..., first::2].contiguous() @ b[..., first::2, :].contiguous() for first in (0, 1))
        return self.cast(even + odd, cast)

    def row_sum(self, x: Tensor, accumulator: Accumulator) -> Tensor:
        return x.cumsum(-1)[..., -1:]


def test_sums_that_products_do_not_show_are_no_devices() -> None:
    """In normal numbers cdna3 has more of its bits: the order of the terms of l is alike by chance."""
    plan = "standard,divisor=input,q=input,s=input,shifted=input,exp=input,l=input"
    better = Rivals(_asked(_on(_Fp32Sums(), plan))).better(
        forward_alone(parse_declaration(f"{plan},accumulator=cdna3"), BF16)
    )
    assert better == forward_alone(parse_declaration(plan), BF16)


def test_a_row_counts_once_however_many_of_its_elements_a_plan_has() -> None:
    plan, rival = _plan("standard"), _plan("standard,p_bar=fp32")
    normal = next(designed for designed in DESIGNED if designed.name == "normal")
    asked = Asked(EMULATION, composed("k", plan), BF16)
    changed = asked.ask(normal)
    assert changed is not None
    row, other = (0, 0, 0), changed.predicted(rival)
    assert int((changed.o[row] != other[row]).sum()) > 12
    changed.o[row] = other[row]
    change = next(change for change, each in changes(plan, BF16) if each == rival)
    assert Rivals(asked).duel(plan, rival, change) == (changed.miss(rival).rows, 1)


def test_two_casts_that_trade_places_are_told_together() -> None:
    kernel, plainer = _plan("flash@fused,l_from=rounded,tile=one"), _plan("flash@fused,exp=input,tile=one")
    alike = Rivals(_asked(composed("k", kernel))).alike(plainer)
    assert alike[Change("exp", "fp32,l_from=rounded")] == kernel
    assert plainness(plainer) < plainness(kernel)


class _TruncatedSum(EmulatedArithmetic):
    """l is cut to 10 bits: the space has it in 8, in 11 and in 24."""

    def row_sum(self, x: Tensor, accumulator: Accumulator) -> Tensor:
        return round_to(super().row_sum(x, accumulator), parse_format("E8M9"), Rounding.TOWARD_ZERO)


def _on(arithmetic: Arithmetic, plan: str) -> Kernel:
    declaration = parse_declaration(plan)

    def compute(inputs: AttentionInputs, ours: Arithmetic, gradients: bool) -> AttentionOutput:
        del ours, gradients
        return run_forward(declaration, inputs, arithmetic)

    return replace(composed("k", declaration), compute=compute, declaration=None, composed=False)


def test_a_kernel_outside_of_the_space_has_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_MOST", 500)
    identity = identify(KnownPlans(Asked(EMULATION, _on(_TruncatedSum(), "flash@fused,tile=64"), BF16)))
    assert identity.plan is None
    assert "none known" in identity.headline
    assert identity.unexplained


def test_a_kernel_that_is_not_deterministic_is_refused() -> None:
    def compute(inputs: AttentionInputs, arithmetic: Arithmetic, gradients: bool, calls: list[int]) -> AttentionOutput:
        del gradients
        calls.append(1)
        seeded = replace(inputs, noise_seed=len(calls))
        return run_forward(parse_declaration("fair"), seeded, arithmetic)

    kernel = replace(composed("k", parse_declaration("fair")), compute=partial(compute, calls=[]))
    with pytest.raises(UnidentifiedError, match="not deterministic"):
        identify(KnownPlans(Asked(replace(EMULATION, predicts=False), kernel, BF16)))


def test_a_kernel_that_takes_too_few_inputs_is_refused() -> None:
    kernel = replace(composed("k", parse_declaration("standard")), missing_requirement=lambda inputs: "d must be 7")
    with pytest.raises(UnidentifiedError, match="takes 0 inputs of 17: d must be 7"):
        identify(KnownPlans(Asked(EMULATION, kernel, BF16)))


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        ("q * float('nan')", "nothing that it returns is finite"),
        ("q[..., :-1]", "returned shape (1, 4, 21, 63), expected (1, 4, 21, 64)"),
        ("q + torch.rand_like(q)", "not deterministic"),
    ],
)
def test_a_kernel_that_cannot_be_asked_is_one_line_and_bad_usage(
    returned: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kernels.py"
    file.write_text(f"import torch\n\n\ndef mine(q, k, v):\n    return {returned}\n")
    assert main([f"{file}:mine"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tiebreak identify: mine: ")
    assert why in line


def test_every_designed_input_can_be_made_in_its_formats() -> None:
    for designed in (*DESIGNED, *LONG, *SHAPES):
        for fmt in designed.formats:
            for seed in range(3):
                assert designed.make(fmt, seed).q.isfinite().all(), (designed.name, fmt, seed)


def _plan(text: str) -> Declaration:
    return forward_alone(parse_declaration(text), BF16)


@pytest.mark.parametrize(
    ("plan", "plainer"),
    [
        ("standard,o_bar=input,o=input:up", "standard,o_bar=input"),  # P is normalised: nothing is left between the two
        ("standard,o_bar=input/16,o=input:up", "standard,o_bar=input/16"),
        ("flash_1@paper,o=input:up,tile=16", "flash_1@paper,tile=16"),
        ("standard,o_bar=input:up", "standard,o=input:up"),
        ("flash_1@paper,tile=one", "flash_1@fused,tile=one"),
        ("split@paper,tile=one", "split@fused,tile=one"),
        ("lazy@paper,tile=one", "flash@paper,tile=one"),  # no tile comes after another
    ],
)
def test_what_no_output_shows_is_no_point(plan: str, plainer: str) -> None:
    assert _plan(plan) == _plan(plainer)
    for designed in (*DESIGNED, *LONG):
        inputs = designed.make(BF16)
        o, plain = (run_forward(parse_declaration(each), inputs, EmulatedArithmetic()).o for each in (plan, plainer))
        assert torch.equal(o.nan_to_num(), plain.nan_to_num()), designed.name


@pytest.mark.parametrize(
    "plan",
    [
        "standard,o=input:up",
        "standard,o_bar=fp16,o=input:up",
        "flash@paper,o=input:up,tile=one",
        "split@paper,o=input:up,tile=64",
        "split@fused_fast_exp,o_bar=input,tile=one",
        "lazy@paper,tile=64",
    ],
)
def test_what_outputs_show_is_a_point(plan: str) -> None:
    assert text(_plan(plan)) == plan


@pytest.mark.parametrize(
    ("plan", "stages", "found"),
    [
        (
            "flash_1@fused,q=fp16,s=input:zero,base=2,tile=32",
            ({"q"}, {"s"}),
            "flash_1@fused,q=input:zero,s=input,base=2,tile=32",
        ),
        (
            "flash@fused,q=fp16,s=input:zero,base=2,tile=32",
            ({RULE, ALGORITHM}, {"s"}, {"shifted"}),
            "dithered@fused,q=fp16,s=input,shifted=input:down,base=2,tile=32",
        ),
        ("flash@all_bf16,shifted=input,tile=32", ({RULE, ALGORITHM},), "dithered@all_bf16,shifted=input,tile=32"),
        ("flash@fused,tile=128", ({ALGORITHM}, {TILE}, {"pv", "o_bar"}), "split@paper,tile=32"),
    ],
)
def test_points_that_hide_one_another_are_tried_together(plan: str, stages: Sequence[set[str]], found: str) -> None:
    assert _plan(found) in set(combined([_plan(plan)], BF16, *stages, usual=True))


def test_the_scale_is_cast_together_with_q_or_s() -> None:
    plans = set(combined([_plan("fixed_offset@fp32_inside,tile=32")], BF16, {"divisor"}, {"scale"}, {"q", "s"}))
    assert _plan("fixed_offset@fp32_inside,divisor=fp16:zero,q=fp16:zero,tile=32") in plans
    assert _plan("fixed_offset@fp32_inside,divisor=fp16:up,s=input:zero,tile=32") in plans


def test_a_range_and_an_offset_are_moved_together() -> None:
    in_tf32 = _plan("lazy@fused_fp8_offset,p_bar=tf32:up,tile=64")
    in_fp16 = _plan("lazy@fused_fp8_offset,p_bar=fp16:up,tile=64")  # it has no range without the offset
    assert in_fp16 in {other for _, other in moves(in_tf32, BF16)}


def test_every_change_of_a_plan_has_a_text_that_is_read_back() -> None:
    plan = forward_alone(parse_declaration("flash@fused,tile=64"), BF16)
    for change, other in changes(plan, BF16):
        assert forward_alone(parse_declaration(text(other)), BF16) == other, change


def test_the_shortest_text_of_a_plan_names_what_is_nearest() -> None:
    declaration = parse_declaration("flash@paper,o_bar=fp32,base=2,tile=64")
    assert shortest(declaration).label == "flash@fused,base=2,tile=64"
