"""Naming a kernel's plan from its outputs."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tiebreak.backends.backend import EMULATION
from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.backends.emulation.rounding import round_to
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.formats import BF16, Rounding, parse_format
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import Declaration, Kernel, composed, run_forward
from tiebreak.kernels.plans import Accumulator, Cast
from tiebreak.matrix.identification import designed, identity, search, settling
from tiebreak.matrix.identification.asking import ProbedKernel
from tiebreak.matrix.identification.candidates import candidates
from tiebreak.matrix.identification.designed import DESIGNED, LONG, SHAPES, Designed
from tiebreak.matrix.identification.identity import Rivals, identify
from tiebreak.matrix.identification.search import Search
from tiebreak.matrix.identification.settling import UnidentifiedError
from tiebreak.matrix.identification.space import PlanChange, changes, combined, forward_alone, moves, plainness, text
from tiebreak.programs.identify import main
from tiebreak.reports.tables.texts import explanation_text

pytestmark = pytest.mark.usefixtures("one_thread")

EMULATED = EmulatedArithmetic()
#: Designed inputs.
FEW = ("equal_keys", "probabilities", "tied_scores", "long_sums", "normal_128", "own_scale", "rising")


def _plan(text: str) -> Declaration:
    return forward_alone(parse_declaration(text), BF16)


def _on(arithmetic: Arithmetic, plan: str) -> Kernel:
    """A kernel that says nothing of the plan that it follows on some arithmetic."""
    declaration = parse_declaration(plan)

    def compute(inputs: AttentionInputs, ours: Arithmetic, gradients: bool) -> AttentionOutput:
        return run_forward(declaration, inputs, arithmetic)

    return replace(composed("k", declaration), compute=compute, declaration=None, composed=False)


def _asked(kernel: Kernel, *names: str) -> ProbedKernel:
    asked = ProbedKernel(EMULATION, kernel, BF16)
    for each in DESIGNED:
        if not names or each.name in names:
            asked.ask(each)
    return asked


@pytest.mark.parametrize(
    "plan",
    [
        "standard,divisor=input:up,s=input:rtz,l=input",  # found by two changes at once
        "dithered@fused,pv=fp16:rtna,o=input:rtz,tile=one",  # O's cast hides the rest
        # Those of runtimes: a row sum in the format, one number of two, products that are rounded, O-bar key by key.
        "standard,scale=input,q=input,k=input,s=input,shifted=input,exp=input,l=input/1",
        "flash@fp32_inside,scale=input,log2_e=input,base=2",
        "standard,s=input,shifted=input,exp=input,l=input,accumulator=rounded",
        "flash@fp32_inside,o_bar=fp16:kept,tile=1",
    ],
)
def test_the_search_comes_to_the_plan_of_a_kernel_that_says_nothing(plan: str) -> None:
    answers = list(_asked(_on(EMULATED, plan), *FEW).answers.values())
    searched = Search(answers, BF16, [forward_alone(each, BF16) for each in candidates().values()])
    nearest = searched.nearest(lambda line: None)
    assert searched.cost(nearest) == 0.0
    assert _plan(plan) == nearest, text(nearest)


def _by_shape(inputs: AttentionInputs, arithmetic: Arithmetic, gradients: bool) -> AttentionOutput:
    """A kernel whose tiles go by the head dimension, and its P by the number of heads."""
    plan = "flash@paper,tile=16" if inputs.q.shape[-1] > 64 else "flash@paper,tile=64"
    plan = "flash@paper,p_bar=fp32,tile=64" if inputs.q.shape[:2] == (1, 16) else plan
    return run_forward(parse_declaration(plan), inputs, arithmetic)


def test_a_plan_is_found_and_named_with_the_shape_that_it_changes_with(monkeypatch: pytest.MonkeyPatch) -> None:
    many, wide = (designed._normal(*size) for size in ((16, 16, 64, 64), (1, 8, 64, 128)))
    monkeypatch.setattr(identity, "SHAPES", (Designed("many", many, ""), Designed("wide", wide, "")))
    kernel = replace(composed("k", parse_declaration("standard")), compute=_by_shape, declaration=None)
    found = identify(ProbedKernel(EMULATION, kernel, BF16))
    assert _plan(str(found.plan)) == _plan("flash@paper,tile=64")
    assert found.share == 1.0
    assert found.bias["tied_maxima[k=2]"].verdict == "biased"
    assert found.alike.keys().isdisjoint({"tile", "p_bar"})
    others = {shape: _plan(str(other.plan)) for shape, other in found.elsewhere.items()}
    assert others.pop("many") == _plan("flash@paper,p_bar=fp32,tile=64")
    assert "wide" in others
    assert set(others.values()) == {_plan("flash@paper,tile=16")}
    assert found.headline.endswith("its plan changes with the shape of the call")
    assert "but not in " in explanation_text(found.explanation)


class _Fp32Sums(EmulatedArithmetic):
    """Sums in fp32, the even and the odd terms apart."""

    def matmul(self, a: Tensor, b: Tensor, cast: Cast, accumulator: Accumulator) -> Tensor:
        even, odd = (a[..., first::2].contiguous() @ b[..., first::2, :].contiguous() for first in (0, 1))
        return self.cast(even + odd, cast)

    def row_sum(self, x: Tensor, accumulator: Accumulator) -> Tensor:
        return x.cumsum(-1)[..., -1:]


FLAX = "standard,divisor=input,q=input,s=input,shifted=input,exp=input,l=input"


@pytest.mark.parametrize(
    ("kernel", "followed", "started"),
    [
        (EMULATED, "flash@fused,accumulator=ampere,tile=64", "flash@fused,tile=64"),
        # In normal numbers cdna3 has more of its bits: the order of the terms of l is alike by chance.
        (_Fp32Sums(), FLAX, f"{FLAX},accumulator=cdna3"),
    ],
)
def test_sums_are_those_of_a_device_where_products_show_it(
    kernel: EmulatedArithmetic, followed: str, started: str
) -> None:
    assert Rivals(_asked(_on(kernel, followed))).better(_plan(started)) == _plan(followed)


def test_a_row_counts_once_however_many_of_its_elements_a_plan_has() -> None:
    plan, rival = _plan("standard"), _plan("standard,p_bar=fp32")
    asked = _asked(composed("k", plan), "normal")
    changed = asked.answers["normal"]
    row, other = (0, 0, 0), changed.predicted(rival)
    assert int((changed.o[row] != other[row]).sum()) > 12
    changed.o[row] = other[row]
    change = next(change for change, each in changes(plan, BF16) if each == rival)
    assert Rivals(asked).duel(plan, rival, change) == (changed.miss(rival).rows, 1)


def test_two_casts_that_trade_places_are_told_together() -> None:
    kernel, plainer = _plan("flash@fused,l_from=rounded,tile=one"), _plan("flash@fused,exp=input,tile=one")
    alike = Rivals(_asked(composed("k", kernel))).alike(plainer)
    assert alike[PlanChange("exp", "fp32,l_from=rounded")] == kernel
    assert plainness(plainer) < plainness(kernel)


class _TruncatedSum(EmulatedArithmetic):
    """l is cut to 10 bits: the space has it in 8, in 11 and in 24."""

    def row_sum(self, x: Tensor, accumulator: Accumulator) -> Tensor:
        return round_to(super().row_sum(x, accumulator), parse_format("E8M9"), Rounding.RTZ)


def test_a_kernel_outside_of_the_space_has_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even of a few designed inputs, which more plans explain than explain all."""
    monkeypatch.setattr(settling, "DESIGNED", tuple(designed for designed in DESIGNED if designed.name in FEW))
    monkeypatch.setattr(search, "_MOST", 200)
    monkeypatch.setattr(identity, "_SWAPS", 0)
    found = identify(ProbedKernel(EMULATION, _on(_TruncatedSum(), "flash@fused,tile=64"), BF16))
    assert (found.plan, found.stopped) == (None, True)
    assert "none known" in found.headline
    assert found.unexplained
    assert found.settled["o"]
    assert not found.settled["l"]
    settled = next(line for line in found.lines() if line.startswith("  settled"))
    assert settled.endswith(", ".join(key for key, whether in found.settled.items() if whether))


def test_a_kernel_that_takes_too_few_inputs_is_refused() -> None:
    kernel = replace(_on(EMULATED, "standard"), missing_requirement=lambda inputs: "d must be 7")
    with pytest.raises(UnidentifiedError, match="takes 0 inputs of 17: d must be 7"):
        identify(ProbedKernel(EMULATION, kernel, BF16))


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
    for json_file in (tmp_path / "it.json", Path("-")):
        assert main([f"{file}:mine", "--json", str(json_file)]) == 2
        printed = capsys.readouterr()
        (line,) = printed.err.splitlines()
        assert line.startswith("tiebreak identify: mine: ")
        assert why in line
        written = printed.out or json_file.read_text(encoding="utf-8")
        assert json.loads(written)["failures"]["mine"] in line


def test_every_designed_input_can_be_made_in_its_formats() -> None:
    for each in (*DESIGNED, *LONG, *SHAPES):
        for fmt, seed in itertools.product(each.formats, range(2)):
            assert each.make(fmt, seed).q.isfinite().all(), (each.name, fmt, seed)


@pytest.mark.parametrize(
    ("plan", "plainer"),
    [
        ("standard,o_bar=input,o=input:up", "standard,o_bar=input"),  # P is normalised: nothing is left between the two
        ("flash_1@paper,o=input:up,tile=16", "flash_1@paper,tile=16"),
        ("standard,o_bar=input:up", "standard,o=input:up"),
        ("split@paper,tile=one", "split@fused,tile=one"),
        ("lazy@paper,tile=one", "flash@paper,tile=one"),  # no tile comes after another
        ("flash@paper,order=backwards,tile=one", "flash@paper,tile=one"),
        ("flash@paper,o_bar=input:kept,l=input:once,tile=one", "flash@paper,l=input,tile=one"),
        ("split@fused,l=input:once,tile=64", "split@fused,l=input,tile=64"),
    ],
)
def test_what_no_output_shows_is_no_point(plan: str, plainer: str) -> None:
    assert _plan(plan) == _plan(plainer)
    for each in (*DESIGNED, *LONG):
        inputs = each.make(BF16)
        o, plain = (run_forward(parse_declaration(x), inputs, EMULATED).o for x in (plan, plainer))
        assert torch.equal(o.nan_to_num(), plain.nan_to_num()), each.name


def test_what_outputs_show_is_a_point() -> None:
    for plan in (
        *("standard,o_bar=fp16,o=input:up", "flash@paper,o=input:up,tile=one", "lazy@paper,tile=64"),
        *("flash@paper,o_bar=input:kept,l=input:once,tile=64", "split@paper,l=input:once,tile=64,splits=2"),
        *("flash_1@paper,tile=one,order=prefix", "lazy@paper,lag=2,tile=64,order=backwards"),
    ):
        assert text(_plan(plan)) == plan


OF_RULES: set[str] = {"rule", "algorithm"}
OF_SCALE: tuple[set[str], ...] = ({"divisor"}, {"scale"}, {"q", "s"})


@pytest.mark.parametrize(
    ("plan", "stages", "found"),
    [
        ("flash_1@fused,q=fp16,s=input:rtz,base=2", ({"q"}, {"s"}), "flash_1@fused,q=input:rtz,s=input,base=2"),
        (
            "flash@fused,q=fp16,s=input:rtz,base=2",
            (OF_RULES, {"s"}, {"shifted"}),
            "dithered@fused,q=fp16,s=input,shifted=input:down,base=2",
        ),
        ("split@fused", ({"splits"}, {"order"}), "split@fused,splits=4,order=turns"),
        ("flash@fused,tile=128", ({"algorithm"}, {"tile"}, {"pv", "o_bar"}), "split@paper"),
        ("fixed_offset@fp32_inside", OF_SCALE, "fixed_offset@fp32_inside,divisor=fp16:up,s=input:rtz"),
    ],
)
def test_points_that_hide_one_another_are_tried_together(plan: str, stages: Sequence[set[str]], found: str) -> None:
    plan, found = (text if "tile" in text else f"{text},tile=32" for text in (plan, found))
    assert _plan(found) in set(combined([_plan(plan)], BF16, *stages, usual=stages is not OF_SCALE))


def test_a_range_and_an_offset_are_moved_together() -> None:
    in_tf32, in_fp16 = (_plan(f"lazy@fused_fp8_offset,p_bar={fmt}:up,tile=64") for fmt in ("tf32", "fp16"))
    assert in_fp16 in {other for _, other in moves(in_tf32, BF16)}  # it has no range without the offset


def test_every_change_of_a_plan_has_a_text_that_is_read_back() -> None:
    for change, other in changes(_plan("flash@fused,tile=64"), BF16):
        assert _plan(text(other)) == other, change
