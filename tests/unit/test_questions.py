"""Questions: calls that should agree, how their answers are compared, and what a kernel is not asked."""

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tiebreak.backends.backend import CPU, EMULATION, Backend
from tiebreak.cases.case import Shape, normal_numbers
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.external import LoadError
from tiebreak.kernels.external.call import Places
from tiebreak.kernels.external.kernels import UserKernel, users_kernel
from tiebreak.kernels.external.options import INVARIANT, KernelOptions
from tiebreak.kernels.formats import BF16, FP16, Format, Formats
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import CannotRunError, Kernel
from tiebreak.kernels.reference import reference
from tiebreak.kernels.sdpa import sdpa_math
from tiebreak.kernels.vendor import through_autograd
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.experiments.questions import INVARIANCE, USAGE
from tiebreak.matrix.questions import answers
from tiebreak.matrix.questions.answers import PARTS
from tiebreak.matrix.questions.comparison import Difference, WithinError
from tiebreak.matrix.questions.log_sum_exp import judge_lse
from tiebreak.matrix.questions.placements import before_nan, expanded, fused, misaligned, transposed, within_nan
from tiebreak.matrix.questions.session import Session
from tiebreak.matrix.run import run_cell
from tiebreak.matrix.selection import Selection, SelectionError, cells
from tiebreak.matrix.settings import Settings
from tiebreak.matrix.workbench import Workbench
from tiebreak.reports.records.record import (
    BIASED,
    FELL,
    HELD,
    INCONCLUSIVE,
    MEASURED,
    SKIPPED,
    UNBIASED,
    Estimate,
    Record,
    Run,
)  # fmt: skip
from tiebreak.reports.tables.texts import worst
from tiebreak.reports.verdict import verdicts

ASKED = {each.name: each for each in (*USAGE.experiments, *INVARIANCE.experiments)}
NAMES = [each.name for each in USAGE.experiments]
VIEWS = (transposed, fused, misaligned, within_nan, before_nan)


def users(function: Callable[..., Any], **options: Any) -> UserKernel:
    return users_kernel("mine", function, KernelOptions(**options))


def run(kernel: Kernel, name: str, backend: Backend = CPU, fmt: Format = BF16, heads: int = 64) -> Record:
    experiment = ASKED.get(name) or ASKED[f"invariance[{name}]"]
    return run_cell(Cell(backend, kernel, experiment, fmt), Workbench(Settings(seed=1, heads=heads)))


def only(backend: SDPBackend) -> Callable[..., Tensor]:
    def sdpa(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        with sdpa_kernel([backend]):
            return scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal)

    return sdpa


def eager(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, causal: bool = False) -> Tensor:
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, -torch.inf)
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + s.shape[-1] - s.shape[-2]), -torch.inf)
    return torch.softmax(s.float(), -1).to(q.dtype) @ v


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v)


def splitting(partial: torch.dtype = torch.float32, heeds: bool = True, shortest: int = 1) -> Callable[..., Tensor]:
    """Split-KV attention whose partial O is stored in a format of its own."""

    def attention(q: Tensor, k: Tensor, v: Tensor, num_splits: int = 1) -> Tensor:
        keys = k.shape[2]
        size = max(-(-keys // num_splits), shortest) if heeds else keys
        s = q.float() @ k.float().transpose(-1, -2) / math.sqrt(q.shape[-1])
        parts = [(s[..., at : at + size], v[:, :, at : at + size].float()) for at in range(0, keys, size)]
        lse = torch.stack([torch.logsumexp(tile, -1, keepdim=True) for tile, _ in parts])
        shifted = [torch.exp(tile - tile.amax(-1, keepdim=True)) for tile, _ in parts]
        products = [p.to(q.dtype).float() @ x for p, (_, x) in zip(shifted, parts, strict=True)]
        outputs = [pv / p.sum(-1, keepdim=True) for p, pv in zip(shifted, products, strict=True)]
        stored = torch.stack([o.to(partial).float() for o in outputs])
        return (torch.softmax(lse, 0) * stored).sum(0).to(q.dtype)

    return attention


@pytest.mark.parametrize("fmt", [BF16, FP16], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize(
    "function", [only(SDPBackend.FLASH_ATTENTION), only(SDPBackend.MATH), eager], ids=["flash", "math", "eager"]
)
def test_sound_kernels_are_blamed_for_nothing(function: Callable[..., Tensor], fmt: Format) -> None:
    outcomes = {name: run(users(function), name, fmt=fmt, heads=16) for name in NAMES}
    assert all(record.measures.keys() <= USAGE.measures().keys() for record in outcomes.values())
    assert {name: record.reasons for name, record in outcomes.items() if record.outcome != MEASURED} == {
        "log_sum_exp": ("returns O alone, no log-sum-exp",)
    }


@pytest.mark.parametrize("options", [{"square": True}, {"multiple_of": 64}], ids=str)
def test_a_kernel_that_is_given_dummies_is_blamed_for_nothing(options: dict[str, Any]) -> None:
    def strict(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        queries, keys = q.shape[2], k.shape[2]
        assert queries == keys if "square" in options else queries % 64 == keys % 64 == 0
        return scaled_dot_product_attention(q, k, v, attn_mask)

    kernel = users(strict, **options)
    assert {run(kernel, name, heads=16).outcome for name in NAMES} == {MEASURED, SKIPPED}


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


@pytest.mark.parametrize("place", VIEWS)
def test_a_placement_holds_the_same_numbers(place: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(2, 3, 5, 8)
    placed = place(x)
    assert torch.equal(placed, x)
    assert placed.is_contiguous() == (place in (before_nan, misaligned))
    assert placed.stride(-1) == 1
    storage = placed.as_strided((placed.untyped_storage().nbytes() // 4,), (1,), 0)
    assert bool(storage[1:].isnan().any()) == (place in (within_nan, before_nan))
    if place is within_nan:
        behind = placed.as_strided((2, 3, 6, 9), placed.stride())
        assert bool(behind[:, :, 5].isnan().all() & behind[..., 8].isnan().all())
    ones = torch.ones(2, 3, 5, 8)
    assert torch.equal(expanded(ones), ones)
    assert set(expanded(ones).stride()) == {0}


def test_one_wrong_head_of_many_is_harm_and_another_order_of_summation_is_none() -> None:
    exact = torch.randn(2, 4, 16, 64, dtype=torch.float64)
    plain, other = exact.bfloat16().float(), (exact * (1 + 1e-4)).bfloat16().float()
    wrong = plain.clone()
    wrong[1, 3] = plain[0, 0]
    harmless, harmful = (Difference.between(plain, ours, exact, BF16) for ours in (other, wrong))
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
    found = WithinError(BF16)
    judge_lse(make(reference(inputs).s).float(), inputs, declared, found)
    (why,) = found.asked.values()
    assert bool(why) == bool(wrong)
    assert wrong in why


@pytest.mark.parametrize("returned", [None, torch.zeros(2, 3, 5, 40), torch.zeros(1), "weights"])
def test_what_is_no_log_sum_exp_is_none_where_none_is_declared(returned: object) -> None:
    x = torch.zeros(2, 3, 5, 64)
    with pytest.raises(CannotRunError, match="no log-sum-exp"):
        judge_lse(returned, AttentionInputs(x, x, x, x, Formats.of(BF16)), "", WithinError(BF16))


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


def test_the_words_that_a_kernel_may_declare_are_questions() -> None:
    assert {f"invariance[{word}]" for word in INVARIANT} <= set(ASKED)
    with pytest.raises(LoadError, match="lse '10': expected e or 2"):
        KernelOptions(lse="10")
    with pytest.raises(LoadError, match="invariant 'spin': known are batch, split"):
        KernelOptions(invariant="spin")


def test_a_default_run_leaves_them_out_and_a_name_brings_them_in() -> None:
    default = Selection(backends="emulation", kernels="split@fused")
    named = (replace(default, experiments="invariance"), replace(default, cases="invariance[split]"))
    for selection, there in ((default, False), *((each, True) for each in named)):
        assert any(cell.experiment.kind == "invariance" for cell in cells(selection)[0]) == there, selection


@pytest.mark.parametrize(("backend", "fmt"), [(EMULATION, BF16), (CPU, FP16)], ids=["emulation", "cpu"])
def test_partial_outputs_in_sixteen_bits_are_a_bias_that_splitting_makes(backend: Backend, fmt: Format) -> None:
    """The same tie that one split breaks toward zero becomes exact where each half is rounded on its own."""
    sound = run(backend.kernel("split@fused"), "split", backend, fmt)
    assert (sound.outcome, sound.shown and sound.shown.verdict) == (MEASURED, UNBIASED)
    of_o = [change.bits for name, change in sound.evidence["changes"].items() if not name.endswith(PARTS[1:])]
    assert 0.0 < max(of_o) < 0.05
    assert (sound.number("control_bits") or 0.0) > 0.5
    cast = run(backend.kernel("split@paper"), "split", backend, fmt)
    name = worst(cast.evidence["changes"])
    change = cast.evidence["changes"][name]
    assert (cast.outcome, change.verdict) == (FELL, BIASED)
    assert name.endswith("ties apart on a sink")
    if fmt is BF16:
        assert change.before.mean == pytest.approx(-0.21, abs=0.03)
        assert change.after.mean == pytest.approx(0.0, abs=0.05)
    assert change.difference.mean == pytest.approx(change.after.mean - change.before.mean, abs=1e-9)


def test_a_knob_that_does_nothing_says_nothing() -> None:
    record = run(users(splitting(heeds=False)), "split", heads=16)
    assert record.outcome == INCONCLUSIVE
    assert record.reasons == ("the knob did nothing: no bit changed by 8 splits of 4096 keys whose V cancels",)
    assert record.number("differing_bits") == 0.0


def test_rows_are_lengthened_until_a_kernel_splits_them() -> None:
    """vLLM PR 58131 measured prompts that were too short to split."""
    kernel = replace(users(splitting(torch.bfloat16, shortest=256)), has_backward=False)
    record = run(kernel, "split", heads=32)
    assert record.outcome == FELL
    assert all(" of 1024 keys" in name for name in record.evidence["changes"])


def test_who_declares_the_same_bits_is_held_to_them() -> None:
    undeclared, declared = (
        run(users(splitting(), invariant=words, backward="none"), "split", heads=16) for words in ("", "batch split")
    )
    assert (undeclared.outcome, declared.outcome) == (MEASURED, FELL)
    assert declared.answers["invariance"].asked == "the same bits, as the kernel declares"
    assert "without bias" in declared.reasons[0]


def test_a_kernel_that_loses_a_split_has_larger_errors() -> None:
    def loses(q: Tensor, k: Tensor, v: Tensor, num_splits: int = 1) -> Tensor:
        keys = k.shape[2] - (k.shape[2] // num_splits if num_splits > 2 else 0)
        return splitting()(q, k[:, :, :keys], v[:, :, :keys], num_splits)

    record = run(users(loses), "split", heads=16)
    assert record.outcome == FELL
    assert "mean squared errors" in record.reasons[0]


@pytest.mark.parametrize("knob", ["batch", "padding", "memory", "decode", "chunks"])
def test_flash_attention_has_the_same_bits_on_the_emulation(knob: str) -> None:
    record = run(EMULATION.kernel("flash@fused"), knob, EMULATION, heads=16)
    assert record.outcome == HELD, record.reasons
    assert record.number("differing_bits") == 0.0
    assert min(record.evidence["controls"].values()) > 0.0
    changed = {name.partition(",")[0] for name in record.evidence["changes"]}
    assert {"batch": "packed before one of 10 queries", "memory": "pages in another order"}.get(knob) in {
        None,
        *changed,
    }


@pytest.mark.parametrize(
    ("knob", "options", "why"),
    [
        ("split", {}, "no parameter num_splits"),
        ("batch", {"layout": "hnd"}, "it sees no batch"),
        ("memory", {"contiguous": True}, "it is given no views"),
        ("decode", {"square": True}, "dummy queries or keys|as many keys as queries"),
    ],
)
def test_a_knob_that_a_kernel_lacks_is_skipped_with_the_reason(knob: str, options: dict[str, Any], why: str) -> None:
    record = run(users(plain, **options), knob)
    assert record.outcome == SKIPPED
    assert re.search(why, record.skipped or "")


def test_random_bits_of_its_own_differ_without_a_bias() -> None:
    generator = torch.Generator().manual_seed(1)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = scaled_dot_product_attention(q.float(), k.float(), v.float())
        noise = torch.randint(0, 2**16, o.shape, generator=generator, dtype=torch.int32)
        return (o.view(torch.int32) + noise).bitwise_and(-65536).view(torch.float32).to(q.dtype)

    record = run(users(attention), "repeat", heads=32)
    assert record.outcome == MEASURED, record.reasons
    assert (record.number("differing_bits") or 0.0) > 0.1


def test_a_row_that_draws_random_bits_by_its_place_is_compared_with_others_of_its_head() -> None:
    """Of the last row alone 2,048 heads do not settle it: a dithered shift errs alike in all columns of a row."""
    record = run(CPU.kernel("dithered@paper"), "decode", heads=64)
    assert record.outcome == MEASURED, record.reasons
    assert {name.partition(", ")[0] for name in record.evidence["changes"]} == {"one query of 97 keys"}
    assert any(", causal, " in name for name in record.evidence["changes"])


class Gradients(torch.autograd.Function):
    """Sound attention whose dV is rounded toward zero where a sequence is alone, or dO is not aligned."""

    @staticmethod
    def forward(ctx: Any, *qkv: Tensor) -> Tensor:
        ctx.save_for_backward(*qkv)
        q, k, v = (x.float() for x in qkv)
        return scaled_dot_product_attention(q, k, v).to(qkv[0].dtype)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().float().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            o = scaled_dot_product_attention(leaves[0], leaves[1], leaves[2])
        dq, dk, dv = torch.autograd.grad(o, leaves, do.float())
        if len(do) == 1 or do.data_ptr() % 16:
            dv = dv.view(torch.int32).bitwise_and(-65536).view(torch.float32)
        return tuple(x.to(do.dtype) for x in (dq, dk, dv))


def with_gradients(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return Gradients.apply(q, k, v)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize(
    ("knob", "change", "wrong"),
    [("batch", "among 3 others", "before"), ("memory", "one element off alignment", "after")],
)
def test_gradients_are_compared_too(knob: str, change: str, wrong: str) -> None:
    kernels = users(with_gradients), users(with_gradients, backward="none")
    fell, forward_alone = (run(kernel, knob, heads=128) for kernel in kernels)
    changes = fell.evidence["changes"]
    assert fell.outcome == FELL
    name = worst(changes)
    assert re.fullmatch(f"{change}, .*, dV", name)
    assert changes[name].verdict == BIASED
    sound = {"before": "after", "after": "before"}[wrong]
    assert getattr(changes[name], wrong).mean < -0.1, "toward zero"
    assert getattr(changes[name], sound).mean == pytest.approx(0.0, abs=0.02)
    assert {change.bits for key, change in changes.items() if key.endswith("dQ")} == {0.0}
    assert forward_alone.outcome != FELL
    assert not any(key.endswith("dV") for key in forward_alone.evidence["changes"])


def test_where_do_lies_must_reach_the_backward_pass() -> None:
    """Its storage read in other strides has another dQ; a backward pass of another dO shows nothing."""

    def deaf(_: Tensor, q: Tensor, k: Tensor, v: Tensor, __: Tensor) -> tuple[Tensor, ...]:
        return torch.ones_like(q), torch.ones_like(k), torch.ones_like(v)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q.float(), k.float(), v.float()).to(q.dtype)

    reached, lost = (run(users(attention, backward=backward), "memory", heads=32) for backward in ("autograd", deaf))
    assert (reached.outcome, lost.outcome) == (HELD, INCONCLUSIVE)
    assert lost.reasons == ("the knob did nothing: no bit changed by dO's storage in other strides",)


@pytest.mark.parametrize("placing", [transposed, fused, misaligned])
def test_views_reach_a_vendors_backward_pass_as_they_lie(placing: Callable[[Tensor], Tensor]) -> None:
    def placed(x: Tensor) -> tuple[Any, ...]:
        return x.stride(), x.storage_offset(), x.requires_grad

    def call(_: AttentionInputs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert {placed(x) for x in (q, k, v)} == {(*placed(placing(torch.empty(q.shape)))[:2], True)}
        return scaled_dot_product_attention(q, k, v)

    kernel = Kernel("vendors", partial(through_autograd, call), None, has_backward=True)
    cell = Cell(CPU, kernel, ASKED["invariance[memory]"], BF16)
    asked = Session(cell, seed=1, heads=32)
    inputs = asked.draw("normal numbers", normal_numbers, Shape(queries=8, keys=8))
    assert len(asked.place(inputs, Places.all(placing)).backward(torch.empty(0))) == 3


def test_a_view_that_a_backward_pass_refuses_leaves_o_compared() -> None:
    def backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> tuple[Tensor, ...]:
        if not do.is_contiguous():
            raise ValueError("dO must be contiguous")
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            return torch.autograd.grad(with_gradients(*leaves), leaves, do)

    changes = run(users(with_gradients, backward=backward), "memory", heads=32).evidence["changes"]
    compared = {name for name in changes if ", normal numbers" in name}
    assert {"transposed, normal numbers", "one element off alignment, normal numbers, dQ"} <= compared
    assert "transposed, normal numbers, dQ" not in compared


def test_an_exact_answer_is_computed_once_for_all_that_is_compared_with_it() -> None:
    x = torch.randn(2, 3, 5, 64)
    inputs = AttentionInputs(x, x, x, x, Formats.of(BF16))
    for part in PARTS:
        assert answers.exact(inputs, part) is answers.exact(inputs, part)
        assert answers.units(inputs, part) is answers.units(inputs, part)


def test_the_verdict_has_a_line_for_each_knob() -> None:
    kernel = users(splitting(torch.bfloat16), backward="none")
    records = tuple(run(kernel, knob, heads=32) for knob in ("split", "memory"))
    (verdict,) = verdicts(Run(platform={}, options={}, records=records))
    fell, split, memory = verdict.findings[:3]
    assert (fell.name, split.name, memory.name) == ("fell", "invariance[split]", "invariance[memory]")
    assert ", with bias: +0.2" in split.text
    # AMX adds up a transposed product in another order.
    assert re.match("the same bits in 12 comparisons$|other bits in . of 12 comparisons, without bias", memory.text)
    assert isinstance(records[0].measures["mean_difference"], Estimate)
