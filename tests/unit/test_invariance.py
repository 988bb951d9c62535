"""A call compared with itself: same bits, other bits without a bias, with one, or a knob that did nothing."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tiebreak.backends.backend import CPU, EMULATION, Backend
from tiebreak.cases.case import Shape
from tiebreak.cases.recipes import normal_numbers
from tiebreak.kernels.external import LoadError
from tiebreak.kernels.external.call import Places
from tiebreak.kernels.external.caller import Caller
from tiebreak.kernels.external.conventions import convention
from tiebreak.kernels.external.kernels import UserKernel, users_kernel
from tiebreak.kernels.external.options import INVARIANT, KernelOptions
from tiebreak.kernels.formats import BF16, FP16, Format
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import Kernel
from tiebreak.kernels.vendor import through_autograd
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.experiments.questions import Invariance
from tiebreak.matrix.questions import answers
from tiebreak.matrix.questions.answers import PARTS
from tiebreak.matrix.questions.invariance import QUESTIONS
from tiebreak.matrix.questions.materials import MATERIALS
from tiebreak.matrix.questions.placements import fused, misaligned, transposed
from tiebreak.matrix.questions.session import Session
from tiebreak.matrix.questions.without_bias import WithoutBias
from tiebreak.matrix.run import run_cell
from tiebreak.matrix.selection import Selection, cells
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
from tiebreak.reports.tables.changes import worst
from tiebreak.reports.verdict import verdicts

QUESTION = {each.name.removeprefix("invariance[").removesuffix("]"): each for each in QUESTIONS}


def users(function: Callable[..., Any], **options: Any) -> UserKernel:
    return users_kernel("mine", Caller(function, convention(function, KernelOptions(**options))))


def run(kernel: Kernel, knob: str, backend: Backend = CPU, fmt: Format = BF16, heads: int = 128) -> Record:
    return run_cell(Cell(backend, kernel, Invariance(QUESTION[knob]), fmt), Workbench(Settings(seed=1, heads=heads)))


def session(kernel: Kernel, knob: str) -> Session[WithoutBias]:
    return Session(Cell(CPU, kernel, Invariance(QUESTION[knob]), BF16), seed=1, heads=32, found=WithoutBias(False))


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


def test_the_words_that_a_kernel_may_declare_are_the_knobs() -> None:
    assert set(INVARIANT) <= set(QUESTION)
    with pytest.raises(LoadError, match="invariant 'spin': known are batch, split"):
        KernelOptions(invariant="spin")


def test_a_default_run_leaves_them_out_and_a_name_brings_them_in() -> None:
    plain = Selection(backends="emulation", kernels="split@fused")
    named = (replace(plain, experiments="invariance"), replace(plain, cases="invariance[split]"))
    for selection, there in ((plain, False), *((each, True) for each in named)):
        assert any(cell.experiment.kind == "invariance" for cell in cells(selection)[0]) == there, selection


@pytest.mark.parametrize("fmt", [BF16, FP16], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("backend", [EMULATION, CPU], ids=lambda backend: backend.name)
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
    record = run(users(splitting(heeds=False)), "split")
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
    plain, declared = (run(users(splitting(), invariant=words), "split") for words in ("", "batch split"))
    assert (plain.outcome, declared.outcome) == (MEASURED, FELL)
    assert declared.answers["invariance"].asked == "the same bits, as the kernel declares"
    assert "without bias" in declared.reasons[0]


def test_a_kernel_that_loses_a_split_has_larger_errors() -> None:
    def loses(q: Tensor, k: Tensor, v: Tensor, num_splits: int = 1) -> Tensor:
        keys = k.shape[2] - (k.shape[2] // num_splits if num_splits > 2 else 0)
        return splitting()(q, k[:, :, :keys], v[:, :, :keys], num_splits)

    record = run(users(loses), "split")
    assert record.outcome == FELL
    assert "mean squared errors" in record.reasons[0]


@pytest.mark.parametrize("knob", ["batch", "padding", "memory", "decode", "chunks"])
def test_flash_attention_has_the_same_bits_on_the_emulation(knob: str) -> None:
    record = run(EMULATION.kernel("flash@fused"), knob, EMULATION)
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
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    record = run(users(attention, **options), knob)
    assert record.outcome == SKIPPED
    assert re.search(why, record.skipped or "")


def test_random_bits_of_its_own_differ_without_a_bias() -> None:
    generator = torch.Generator().manual_seed(1)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float())
        noise = torch.randint(0, 2**16, o.shape, generator=generator, dtype=torch.int32)
        return (o.view(torch.int32) + noise).bitwise_and(-65536).view(torch.float32).to(q.dtype)

    record = run(users(attention), "repeat")
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
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).to(qkv[0].dtype)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().float().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            o = torch.nn.functional.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2])
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
    fell, forward_alone = run(users(with_gradients), knob), run(users(with_gradients, backward="none"), knob)
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


def test_all_gradients_of_repeated_calls_are_compared() -> None:
    repeated = {key.rpartition(", ")[2] for key in run(users(with_gradients), "repeat").evidence["changes"]}
    assert {"dQ", "dK", "dV"} <= repeated


def test_where_do_lies_must_reach_the_backward_pass() -> None:
    """Its storage read in other strides has another dQ; a backward pass of another dO shows nothing."""

    def deaf(_: Tensor, q: Tensor, k: Tensor, v: Tensor, __: Tensor) -> tuple[Tensor, ...]:
        return torch.ones_like(q), torch.ones_like(k), torch.ones_like(v)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float()).to(q.dtype)

    reached, lost = (run(users(attention, backward=backward), "memory", heads=32) for backward in ("autograd", deaf))
    assert (reached.outcome, lost.outcome) == (HELD, INCONCLUSIVE)
    assert lost.reasons == ("the knob did nothing: no bit changed by dO's storage in other strides",)


@pytest.mark.parametrize("placing", [transposed, fused, misaligned])
def test_views_reach_a_vendors_backward_pass_as_they_lie(placing: Callable[[Tensor], Tensor]) -> None:
    def placed(x: Tensor) -> tuple[Any, ...]:
        return x.stride(), x.storage_offset(), x.requires_grad

    def call(_: AttentionInputs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert {placed(x) for x in (q, k, v)} == {(*placed(placing(torch.empty(q.shape)))[:2], True)}
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    kernel = Kernel("vendors", partial(through_autograd, call), None)
    asked = session(kernel, "memory")
    inputs = asked.draw("normal numbers", normal_numbers, Shape(queries=8, keys=8))
    assert tuple(asked.place(inputs, Places.all(placing)).answers()) == PARTS


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


def test_exact_answers_are_computed_once_for_all_changes_and_gradients_where_there_are_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = {"reference": 0, "reference_gradients": 0}

    def counting(name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
        def counter(*arguments: Any) -> Any:
            counted[name] += 1
            return compute(*arguments)

        return counter

    for name in counted:
        monkeypatch.setattr(answers, name, counting(name, getattr(answers, name)))
    flash, calls = CPU.kernel("flash@fused"), len(MATERIALS)
    for kernel, gradients in ((replace(flash, has_backward=False), 0), (flash, calls)):
        counted |= dict.fromkeys(counted, 0)
        for state in (answers._reference, answers._gradients, answers.units):
            state.cache_clear()
        QUESTION["decode"].ask(session(kernel, "decode"))
        assert counted == {"reference": calls, "reference_gradients": gradients}


def test_the_verdict_has_a_line_for_each_knob() -> None:
    kernel = users(splitting(torch.bfloat16))
    records = tuple(run(kernel, knob) for knob in ("split", "memory"))
    (verdict,) = verdicts(Run(platform={}, options={}, records=records))
    fell, split, memory = verdict.findings[:3]
    assert (fell.name, split.name, memory.name) == ("fell", "invariance[split]", "invariance[memory]")
    assert ", with bias: +0.2" in split.text
    # AMX adds up a transposed product in another order.
    assert re.match("the same bits in 48 comparisons$|other bits in . of 48 comparisons, without bias", memory.text)
    assert isinstance(records[0].measures["mean_difference"], Estimate)
