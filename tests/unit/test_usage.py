"""How a kernel is used: where its arguments lie, what is behind them, what it returns beside O, what it declares."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tiebreak.backends.backend import CPU
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.external import LoadError
from tiebreak.kernels.external.caller import Caller
from tiebreak.kernels.external.conventions import convention
from tiebreak.kernels.external.kernels import UserKernel, users_kernel
from tiebreak.kernels.external.options import KernelOptions
from tiebreak.kernels.formats import BF16, FP16, Format, Formats
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import CannotRunError, Kernel
from tiebreak.kernels.reference import reference
from tiebreak.kernels.sdpa import sdpa_math
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.experiments.questions import USAGE, Usage
from tiebreak.matrix.questions.log_sum_exp import judge_lse
from tiebreak.matrix.questions.placements import before_nan, expanded, fused, transposed, within_nan
from tiebreak.matrix.questions.usage import QUESTIONS
from tiebreak.matrix.questions.within_error import difference
from tiebreak.matrix.run import run_cell
from tiebreak.matrix.selection import Selection, SelectionError, cells
from tiebreak.matrix.settings import Settings
from tiebreak.matrix.workbench import Workbench
from tiebreak.reports.records.record import FELL, MEASURED, SKIPPED, Record

NAMES = [question.name for question in QUESTIONS]


def users(function: Callable[..., Any], **options: Any) -> UserKernel:
    return users_kernel("mine", Caller(function, convention(function, KernelOptions(**options))))


def run(kernel: Kernel, name: str, fmt: Format = BF16) -> Record:
    (question,) = (question for question in QUESTIONS if question.name == name)
    return run_cell(Cell(CPU, kernel, Usage(question), fmt), Workbench(Settings()))


def only(backend: SDPBackend) -> Callable[..., Tensor]:
    def sdpa(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        with sdpa_kernel([backend]):
            return scaled_dot_product_attention(
                q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
            )

    return sdpa


def eager(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, causal: bool = False) -> Tensor:
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, -torch.inf)
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + s.shape[-1] - s.shape[-2]), -torch.inf)
    return torch.softmax(s.float(), -1).to(q.dtype) @ v


@pytest.mark.parametrize("fmt", [BF16, FP16], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize(
    "function", [only(SDPBackend.FLASH_ATTENTION), only(SDPBackend.MATH), eager], ids=["flash", "math", "eager"]
)
def test_sound_kernels_are_blamed_for_nothing(function: Callable[..., Tensor], fmt: Format) -> None:
    outcomes = {name: run(users(function), name, fmt) for name in NAMES}
    assert {name: record.reasons for name, record in outcomes.items() if record.outcome != MEASURED} == {
        "log_sum_exp": ("returns O alone, no log-sum-exp",)
    }


@pytest.mark.parametrize("options", [{"causal": "always"}, {"multiple_of": 64}], ids=str)
def test_a_kernel_that_is_given_dummies_is_blamed_for_nothing(options: dict[str, Any]) -> None:
    def always(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    def in_tiles(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        assert q.shape[2] % 64 == k.shape[2] % 64 == 0
        return scaled_dot_product_attention(q, k, v, attn_mask)

    kernel = users(always if "causal" in options else in_tiles, **options)
    assert {record.outcome for record in (run(kernel, name) for name in NAMES)} == {MEASURED, SKIPPED}


def test_a_kernel_that_refuses_views_is_skipped_with_what_it_says() -> None:
    def strict(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not all(tensor.is_contiguous() for tensor in (q, k, v)):
            raise ValueError("q, k and v must be contiguous")
        return eager(q, k, v)

    record = run(users(strict), "strided_views")
    assert record.outcome == SKIPPED
    assert record.skipped is not None
    assert "ValueError: q, k and v must be contiguous" in record.skipped
    assert "contiguous=true" in record.skipped


def test_a_kernel_that_declares_contiguous_is_asked_about_no_view() -> None:
    seen = []

    def mine(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append(all(tensor.is_contiguous() for tensor in (q, k, v)))
        return eager(q, k, v)

    kernel = users(mine, contiguous=True)
    outcomes = {name: run(kernel, name).outcome for name in ("strided_views", "past_the_end", "interleaved")}
    assert outcomes == {"strided_views": SKIPPED, "past_the_end": MEASURED, "interleaved": MEASURED}
    assert seen
    assert all(seen)


def test_hidden_nan_is_measured_of_all_and_asked_of_those_that_say_so() -> None:
    def nan_behind_the_mask(**options: Any) -> Record:
        return run(users(only(SDPBackend.MATH), **options), "hidden_nan")

    assert (nan_behind_the_mask().outcome, nan_behind_the_mask().number("nan_let_in")) == (MEASURED, 1.0)
    assert nan_behind_the_mask(takes="hidden_nan").outcome == FELL


def test_every_cell_has_what_its_kind_describes() -> None:
    for name in ("strided_views", "hidden_nan"):
        record = run(users(only(SDPBackend.MATH)), name)
        assert record.measures
        assert record.measures.keys() <= USAGE.measures().keys()


@pytest.mark.parametrize("place", [transposed, fused, within_nan, before_nan])
def test_a_placement_holds_the_same_numbers(place: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(2, 3, 5, 8)
    placed = place(x)
    assert torch.equal(placed, x)
    assert placed.is_contiguous() == (place is before_nan)
    assert placed.stride(-1) == 1
    storage = placed.as_strided((placed.untyped_storage().nbytes() // 4,), (1,), 0)
    assert bool(storage.isnan().any()) == (place in (within_nan, before_nan))
    if place is within_nan:
        behind = placed.as_strided((2, 3, 6, 9), placed.stride())
        assert bool(behind[:, :, 5].isnan().all())
        assert bool(behind[..., 8].isnan().all())


def test_an_expanded_number_has_no_strides() -> None:
    ones = torch.ones(2, 3, 5, 8)
    assert torch.equal(expanded(ones), ones)
    assert set(expanded(ones).stride()) == {0}


def test_one_wrong_head_of_many_is_harm_and_another_order_of_summation_is_none() -> None:
    exact = torch.randn(2, 4, 16, 64, dtype=torch.float64)
    plain, other = exact.bfloat16().float(), (exact * (1 + 1e-4)).bfloat16().float()
    wrong = plain.clone()
    wrong[1, 3] = plain[0, 0]
    harmless, harmful = (difference("O", plain, ours, exact, BF16) for ours in (other, wrong))
    assert harmless.harmless
    assert 0 < harmless.share < 0.1
    assert not harmful.harmless


LSE: dict[str, tuple[Callable[[Tensor], Tensor], str, str]] = {  # by name: from scores, declared, what is wrong
    "base e": (lambda s: s.logsumexp(-1), "", ""),
    "base 2": (lambda s: s.logsumexp(-1) / math.log(2), "", ""),
    "declared 2": (lambda s: s.logsumexp(-1) / math.log(2), "2", ""),
    "with a one behind": (lambda s: s.logsumexp(-1, keepdim=True), "e", ""),
    "heads last": (lambda s: s.logsumexp(-1).transpose(1, 2), "e", ""),
    "2 for e": (lambda s: s.logsumexp(-1) / math.log(2), "e", "is in base 2, declared is base e"),
    "e for 2": (lambda s: s.logsumexp(-1), "2", "is in base e, declared is base 2"),
    "sign": (lambda s: -s.logsumexp(-1), "", "has the wrong sign"),
    "no scale": (lambda s: (s * 8).amax(-1) + (s - s.amax(-1, True)).exp().sum(-1).log(), "", "lacks the scale at the"),
    "no maximum": (lambda s: (s - s.amax(-1, True)).exp().sum(-1).log(), "e", "lacks the maximum"),
    "no logarithm": (lambda s: (s - s.amax(-1, True)).exp().sum(-1), "", "is the sum"),
    "off": (lambda s: s.logsumexp(-1) + 0.3, "", "is in neither base"),
    "NaN": (lambda s: s.logsumexp(-1) * torch.nan, "", "is in neither base"),
    "another shape": (lambda s: s.logsumexp(-1)[..., :-1], "e", "returns shape (2, 3, 4) beside O, expected"),
}


@pytest.mark.parametrize("name", LSE)
def test_a_log_sum_exp_is_held_to_base_sign_scale_and_shape(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 64, generator=generator).bfloat16().float() for n in (5, 40, 40))
    inputs = AttentionInputs(q, k, v, q, Formats.of(BF16))
    make, declared, wrong = LSE[name]
    judged = judge_lse(make(reference(inputs).s).float(), inputs, declared)
    assert bool(judged.why) == bool(wrong)
    assert wrong in judged.why


@pytest.mark.parametrize("returned", [None, torch.zeros(2, 3, 5, 40), torch.zeros(1), "weights"])
def test_what_is_no_log_sum_exp_is_none_where_none_is_declared(returned: object) -> None:
    x = torch.zeros(2, 3, 5, 64)
    with pytest.raises(CannotRunError, match="no log-sum-exp"):
        judge_lse(returned, AttentionInputs(x, x, x, x, Formats.of(BF16)), "")


def test_a_devices_own_kernels_are_asked_where_the_question_is_named() -> None:
    with pytest.raises(SelectionError, match="asked of users' kernels, which --kernel names"):
        cells(Selection(backends="emulation,cpu", experiments=USAGE.name))
    named, _ = cells(Selection(backends="emulation,cpu", cases=",".join(NAMES)))
    assert {cell.kernel.name for cell in named} == {kernel.name for kernel in CPU.vendor_kernels()}
    outcomes = {cell.id: run_cell(cell, Workbench(Settings())).outcome for cell in named}
    assert {name for name, outcome in outcomes.items() if outcome != MEASURED} == {
        f"cpu-{kernel.name}-log_sum_exp-bf16" for kernel in CPU.vendor_kernels()
    }


def test_a_devices_own_kernel_whose_calls_differ_falls() -> None:
    sound, calls = sdpa_math(), itertools.count(1)

    def compute(inputs: AttentionInputs, arithmetic: Arithmetic, gradients: bool) -> AttentionOutput:
        output = sound.compute(inputs, arithmetic, gradients)
        return replace(output, o=output.o * next(calls))

    record = run(replace(sound, compute=compute), "third_call")
    assert record.outcome == FELL
    assert "the third call against the first: O differs" in record.reasons[0]


def test_a_base_that_there_is_not_is_refused() -> None:
    with pytest.raises(LoadError, match="lse '10': expected e or 2"):
        KernelOptions(lse="10")
