"""Questions: calls that should agree, how their answers are compared, and what a kernel is not asked."""

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tiebreak.backends.backend import CPU, EMULATION, Backend
from tiebreak.cases.case import normal_numbers
from tiebreak.kernels.external import LoadError
from tiebreak.kernels.external.kernels import UserKernel, users_kernel
from tiebreak.kernels.external.options import INVARIANT, KernelOptions
from tiebreak.kernels.formats import BF16, FP16, Format, Formats
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import CannotRunError, Kernel
from tiebreak.kernels.reference import reference
from tiebreak.kernels.sdpa import sdpa_math
from tiebreak.matrix.experiments.questions import INVARIANCE, USAGE
from tiebreak.matrix.questions import invariance
from tiebreak.matrix.questions.comparison import WithinError
from tiebreak.matrix.questions.log_sum_exp import judge_lse
from tiebreak.matrix.questions.placements import before_nan, expanded, fused, misaligned, transposed, within_nan
from tiebreak.matrix.selection import Selection, cells
from tiebreak.reports.errors import UsageError
from tiebreak.reports.records import record as records
from tiebreak.reports.tables.texts import worst
from tiebreak.reports.verdict import verdicts
from tiebreak.studies.cells import judged

ASKED = {each.name: each for each in (*USAGE.experiments, *INVARIANCE.experiments)}
NAMES = [each.name for each in USAGE.experiments]
VIEWS = (transposed, fused, misaligned, within_nan, before_nan)


def users(function: Callable[..., Any], **options: Any) -> UserKernel:
    return users_kernel("mine", function, KernelOptions(**options))


def run(
    kernel: Kernel, name: str, backend: Backend = CPU, fmt: Format = BF16, heads: int = 64, seed: int = 1
) -> records.Record:
    experiment = ASKED.get(name) or ASKED[f"invariance[{name}]"]
    return judged(kernel, experiment, heads, seed=seed, fmt=fmt, backend=backend)


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


def splitting(partial: torch.dtype = torch.float32, shortest: int = 1) -> Callable[..., Tensor]:
    """Split-KV attention whose partial O is stored in a format of its own."""

    def attention(q: Tensor, k: Tensor, v: Tensor, num_splits: int = 1) -> Tensor:
        size = max(-(-k.shape[2] // num_splits), shortest)
        s = torch.split(q.float() @ k.float().mT / math.sqrt(q.shape[-1]), size, -1)
        lse = torch.stack([torch.logsumexp(part, -1, keepdim=True) for part in s])
        stored = []
        for part, values in zip(s, torch.split(v.float(), size, 2), strict=True):
            p = torch.exp(part - part.amax(-1, keepdim=True))
            stored.append((p.to(q.dtype).float() @ values / p.sum(-1, keepdim=True)).to(partial).float())
        return (torch.softmax(lse, 0) * torch.stack(stored)).sum(0).to(q.dtype)

    return attention


def square(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    assert q.shape[2] == k.shape[2]
    return scaled_dot_product_attention(q, k, v, attn_mask)


def sixteens(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    assert q.shape[2] % 16 == k.shape[2] % 16 == 0
    return scaled_dot_product_attention(q, k, v, attn_mask)


def rounded_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s: Tensor = (q @ k.mT) * q.shape[-1] ** -0.5
    p = s.softmax(-1, dtype=torch.float32).to(q.dtype)
    return p @ v


def zero_far_from_0(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    largest: Tensor = (q @ k.mT).amax(-1, keepdim=True) * q.shape[-1] ** -0.5
    return rounded_scores(q, k, v).where(largest > -200.0, 0.0)


@pytest.mark.parametrize("seed", [1, 2, 6])
def test_scores_that_are_rounded_far_from_0_are_held_to_their_plan(seed: int) -> None:
    """At -500 two bf16 numbers are 2 apart, and eager attention errs much more than its first call shows."""
    assert run(users(rounded_scores), "extremes", heads=16, seed=seed).passes
    assert run(users(zero_far_from_0), "extremes", heads=16, seed=seed).fails


@pytest.mark.parametrize("name", NAMES)
def test_sound_kernels_a_devices_own_and_those_that_are_given_dummies_are_blamed_for_nothing(
    name: str, alike: Callable[[str], None]
) -> None:
    alike(name)
    kernels = {
        "flash": (users(only(SDPBackend.FLASH_ATTENTION)), BF16),
        "math": (users(only(SDPBackend.MATH)), FP16),
        "square": (users(square, square=True), BF16),
        "sixteens": (users(sixteens, multiple_of=16), BF16),
        **{kernel.name: (kernel, BF16) for kernel in CPU.vendor_kernels()},
    }
    outcomes = {word: run(kernel, name, fmt=fmt, heads=16) for word, (kernel, fmt) in kernels.items()}
    assert all(record.measures.keys() <= USAGE.measured.keys() for record in outcomes.values())
    assert {w: r.reasons for w, r in outcomes.items() if r.outcome not in (records.MEASURED, records.SKIPPED)} == {}
    skipped = {word: record.reasons for word, record in outcomes.items() if record.outcome == records.SKIPPED}
    own = {kernel.name for kernel in CPU.vendor_kernels()}
    assert bool(skipped.keys() & own) is (name in (*SKIPPED, "defaults", "backward_again", "frozen_inputs"))
    assert own <= skipped.keys() or not own & skipped.keys()
    for word in ("flash", "math"):
        if name in ("latent_views", "group_sizes"):
            assert (word in skipped) is (word == "flash")  # which takes no narrower V, and no groups
        else:
            assert skipped.get(word) == SKIPPED.get(name)


SKIPPED = {"log_sum_exp": ("returns O alone, no log-sum-exp",), "page_sizes": ("has no parameter of the kind pages",)}


def scaled(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    """Attention that rounds elsewhere where it is given no scale, and rightly so."""
    if scale is None:
        return eager(q, k, v, causal=causal)
    return eager(q * (scale * math.sqrt(q.shape[-1])), k, v, causal=causal)


def five(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float = 5.0) -> Tensor:
    return scaled(q, k, v, causal, scale)


def eighth(q: Tensor, k: Tensor, v: Tensor, scale: float = 0.125) -> Tensor:
    return scaled(q, k, v, False, scale)


def masks(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, scale: float | None = None) -> Tensor:
    return scaled(q, k, v, causal, scale)


def sound(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None) -> Tensor:
    return scaled(q, k, v, causal, scale)


def refuses(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None) -> Tensor:
    if scale is None:
        raise ValueError("no scale")
    return scaled(q, k, v, causal, scale)


def declines(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, scale: float | None = None) -> Tensor:
    if scale is None:
        raise NotImplementedError("no scale")
    return scaled(q, k, v, causal, scale)


def breaks(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None) -> Tensor:
    o = scaled(q, k, v, causal, scale)
    return o[:, :, 1:] if scale is None else o


def required(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    return scaled(q, k, v, causal, scale)


def anything(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    return scaled(q, k, v, **given)


@pytest.mark.parametrize(
    ("function", "options", "outcome", "why"),
    [
        (five, {}, records.FAILED, "scale left out (default 5.0), as scale=1/sqrt(40): O differs"),
        (eighth, {}, records.FAILED, "scale left out (default 0.125), as scale=1/sqrt(40): O differs"),
        (eighth, {"head_dims": [64, 128]}, records.FAILED, "scale left out (default 0.125), as scale=1/sqrt(128): O"),
        (eighth, {"head_dims": [64]}, records.MEASURED, ""),
        (masks, {}, records.FAILED, "causal left out (default True), as causal=False: O differs"),
        (masks, {}, records.FAILED, "--declare own_defaults=causal"),
        (masks, {"own_defaults": "causal"}, records.MEASURED, ""),
        (refuses, {}, records.CRASHED, "ValueError: no scale"),
        (refuses, {}, records.CRASHED, "; scale left out (default None), as scale="),
        (declines, {}, records.FAILED, "causal left out (default True)"),
        (declines, {"own_defaults": "causal"}, records.SKIPPED, "no scale"),
        (breaks, {}, records.FAILED, "returned shape (2, 4, 63, 40), expected (2, 4, 64, 40)"),
        (sound, {}, records.MEASURED, ""),
        (required, {}, records.SKIPPED, "no parameter with a default"),
        (anything, {}, records.SKIPPED, "no parameter with a default"),
    ],
)
def test_a_default_is_held_to_what_it_means(
    function: Callable[..., Tensor], options: dict[str, Any], outcome: str, why: str
) -> None:
    record = run(users(function, **options), "defaults")
    said = record.skipped or "".join(record.reasons)
    assert record.outcome == outcome, said
    assert why in said


def test_a_default_that_is_meant_otherwise_is_one_that_there_is() -> None:
    for function, word in ((required, "scale"), (sound, "softcap")):
        with pytest.raises(LoadError, match=f"own_defaults '{word}': it has no parameter of that name with a default"):
            users(function, own_defaults=word)


def strict(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if not all(tensor.is_contiguous() for tensor in (q, k, v)):
        raise ValueError("q, k and v must be contiguous")
    return eager(q, k, v)


@pytest.mark.parametrize(
    ("name", "function", "options", "why"),
    [
        ("strided_views", strict, {}, "contiguous=true says so: ValueError: q, k and v must be contiguous"),
        ("scaled_do", eager, {"backward": "none"}, "has no backward pass"),
        ("log_sum_exp", eager, {"layout": "hnd"}, "is called for every sequence"),
        ("split", eager, {}, "no parameter num_splits"),
        ("batch", eager, {"layout": "hnd"}, "it sees no batch"),
        ("memory", eager, {"contiguous": True}, "it is given no views"),
        ("decode", strict, {"square": True}, "dummy queries or keys|as many keys as queries"),
    ],
)
def test_what_a_kernel_lacks_is_skipped_with_the_reason(
    name: str, function: Callable[..., Tensor], options: dict[str, Any], why: str
) -> None:
    record = run(users(function, **options), name)
    assert record.outcome == records.SKIPPED
    assert re.search(why, record.skipped or "")


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
    assert set(expanded(torch.ones(2, 3, 5, 8)).stride()) == {0}


@pytest.mark.parametrize(
    ("declared", "wrong", "returned"),
    [
        ("", "", lambda s: s.logsumexp(-1)),
        ("2", "", lambda s: s.logsumexp(-1) / math.log(2)),
        ("e", "", lambda s: s.logsumexp(-1).transpose(1, 2)),
        ("e", "is in base 2, declared is base e", lambda s: s.logsumexp(-1) / math.log(2)),
        ("", "has the wrong sign", lambda s: -s.logsumexp(-1)),
        ("", "lacks the scale at the", lambda s: (s * 8).amax(-1) + (s - s.amax(-1, True)).exp().sum(-1).log()),
        ("", "is the sum", lambda s: (s - s.amax(-1, True)).exp().sum(-1)),
        ("", "is in neither base", lambda s: s.logsumexp(-1) * torch.nan),
        ("e", "returns shape (2, 3, 4) with O, expected", lambda s: s.logsumexp(-1)[..., :-1]),
    ],
)
def test_a_log_sum_exp_is_held_to_base_sign_scale_and_shape(
    declared: str, wrong: str, returned: Callable[[Tensor], Tensor]
) -> None:
    generator, found = torch.Generator().manual_seed(0), WithinError(BF16)
    q, k, v = (torch.randn(2, 3, n, 64, generator=generator).bfloat16().float() for n in (5, 40, 40))
    inputs = AttentionInputs(q, k, v, q, Formats.of(BF16))
    judge_lse(returned(reference(inputs).s).float(), inputs, declared, found)
    (why,) = found.requirements.values()
    assert bool(why) == bool(wrong)
    assert wrong in why


def shifted_where_causal(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Return a log-sum-exp that is off by 3 under a mask."""
    s = (q.float() @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).float().mT) / math.sqrt(q.shape[-1])
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(s.shape[-1] - s.shape[-2] + 1), -math.inf)
    o = s.softmax(-1).to(q.dtype).float() @ v.repeat_interleave(q.shape[1] // v.shape[1], 1).float()
    return o.to(q.dtype), s.logsumexp(-1) + 3.0 * causal


def two_per_cent(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return a log-sum-exp of a sum that is 2 % too large, beside an O of exact scores."""
    o, lse = shifted_where_causal(q, k, v)
    return o, lse + 0.02


@pytest.mark.parametrize(
    ("attention", "why"), [(shifted_where_causal, "causal=True"), (two_per_cent, "off by up to 0.02")]
)
def test_a_log_sum_exp_is_held_to_the_scores_of_the_plan_in_every_kind_of_call(attention: Any, why: str) -> None:
    record = run(users(attention), "log_sum_exp")
    assert record.fails
    assert why in "".join(record.reasons)


class Summed(torch.autograd.Function):
    """Attention that adds dK to a buffer of the forward pass, and dQ is right only beside a dK."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.total = torch.zeros_like(k)
        return eager(q, k, v)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            dq, dk, dv = torch.autograd.grad(eager(*leaves), leaves, do)
        ctx.total += dk
        return dq * (1.0 if ctx.needs_input_grad[1] else 1.5), ctx.total.clone(), dv


def summed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o: Tensor = Summed.apply(q, k, v)  # type: ignore[no-untyped-call]
    return o


@pytest.mark.parametrize(
    ("name", "why"), [("backward_again", "the second of two backward passes: dK"), ("frozen_inputs", "of q alone: dQ")]
)
def test_gradients_do_not_depend_on_how_often_or_with_which_others_they_are_asked_for(name: str, why: str) -> None:
    record = run(users(summed), name)
    assert record.fails
    assert why in "".join(record.reasons)


class Given(torch.autograd.Function):
    """What it is given, with a gradient made of that which comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, made: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.made = made
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.made(gradient), None


OF_V = "gradient alone: dV is not 0"


def refused(gradient: Tensor) -> Tensor:
    raise NotImplementedError(f"no gradient of {gradient.shape}")


@pytest.mark.parametrize(
    ("lse", "made", "outcome", "why"),
    [
        (lambda s: s.float().logsumexp(-1), None, records.MEASURED, ""),
        (lambda s: s.float().logsumexp(-1) / math.log(2), None, records.MEASURED, ""),
        # P = exp(S - lse) of one that is rounded to 8 bits is off by as much as that.
        (lambda s: s.logsumexp(-1), None, records.MEASURED, ""),
        (lambda s: s.logsumexp(-1).detach(), None, records.MEASURED, "not asked"),
        (lambda s: s.float().logsumexp(-1), refused, records.MEASURED, "not asked"),
        (lambda s: s.float().logsumexp(-1), torch.zeros_like, records.FAILED, "gradient alone: dQ differs"),
        (lambda s: s.float().logsumexp(-1), torch.neg, records.FAILED, "gradient alone: dQ differs"),
        (lambda s: s.float().logsumexp(-1) / math.log(2), lambda x: x * math.log(2), records.FAILED, "dQ differs"),
        (lambda s: s.float().logsumexp(-1), None, records.FAILED, OF_V),
    ],
    ids=["e", "2", "16 bits", "detached", "refused", "dropped", "negated", "base two", "dV"],
)
def test_gradients_through_the_log_sum_exp_are_held_to_fp64(
    lse: Callable[[Tensor], Tensor], made: Callable[[Tensor], Tensor] | None, outcome: str, why: str
) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        s = q @ k.mT / math.sqrt(q.shape[-1])
        second = lse(s)
        second = second if made is None else Given.apply(second, made)  # type: ignore[no-untyped-call]
        unseen = v.float().sum((-1, -2)).unsqueeze(-1)  # a term of 0, whose gradient of V is none
        return s.float().softmax(-1).to(q.dtype) @ v, second + (unseen - unseen.detach() if why == OF_V else 0.0)

    record = run(users(attention), "log_sum_exp", seed=55)  # which would blame the one in 16 bits
    assert record.outcome == outcome, record.reasons
    assert why == "not asked" or why in "".join(record.reasons)
    assert ("gradient alone" in record.answers["usage"].asked) == (why != "not asked")


@pytest.mark.parametrize(
    ("name", "is_wrong"), [("sizes", "rows > 257"), ("group_sizes", "8 query heads to a key head")]
)
def test_a_kernel_that_is_wrong_beyond_usual_sizes_fails(name: str, is_wrong: str) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        wrong = q.shape[2] > 257 if name == "sizes" else q.shape[1] >= 8 * k.shape[1]
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        return eager(q, k, v) * (1.02 if wrong else 1.0)

    assert run(users(attention), name).fails, is_wrong


def test_what_is_no_log_sum_exp_is_none_where_none_is_declared() -> None:
    x = torch.zeros(2, 3, 5, 64)
    for returned in (None, torch.zeros(2, 3, 5, 40), torch.zeros(1), "weights"):
        with pytest.raises(CannotRunError, match="no log-sum-exp"):
            judge_lse(returned, AttentionInputs(x, x, x, x, Formats.of(BF16)), "", WithinError(BF16))


def test_a_devices_own_kernels_are_asked_where_the_question_is_named() -> None:
    with pytest.raises(UsageError, match="asked of users' kernels, which --kernel names"):
        cells(Selection(backends="emulation,cpu", experiments=USAGE.name))
    named, _ = cells(Selection(backends="emulation,cpu", cases=",".join(NAMES)))
    assert {cell.kernel.name for cell in named} == {kernel.name for kernel in CPU.vendor_kernels()}


def test_a_devices_own_kernel_whose_calls_differ_fails() -> None:
    sound, calls = sdpa_math(), itertools.count(1)

    def compute(*given: Any) -> AttentionOutput:
        output = sound.compute(*given)
        return replace(output, o=output.o * next(calls))

    record = run(replace(sound, compute=compute), "third_call")
    assert record.outcome == records.FAILED
    assert "the third call against the first: O differs" in record.reasons[0]


def test_the_words_that_a_kernel_may_declare_are_questions() -> None:
    assert {f"invariance[{word}]" for word in INVARIANT} <= set(ASKED)
    with pytest.raises(LoadError, match="lse '10': expected e or 2"):
        KernelOptions(lse="10")
    with pytest.raises(LoadError, match="invariant 'spin': known are batch, split"):
        KernelOptions(invariant="spin")


def test_a_default_run_leaves_them_out_and_a_name_brings_them_in() -> None:
    default = Selection(backends="emulation", kernels="split@fused")
    named = replace(default, experiments="invariance"), replace(default, cases="invariance[split]")
    for selection, there in ((default, False), (named[0], True), (named[1], True)):
        assert any(cell.experiment.kind == "invariance" for cell in cells(selection)[0]) == there, selection


def test_rows_are_lengthened_until_a_kernel_splits_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM PR 58131 measured prompts that were too short to split."""
    monkeypatch.setattr(invariance, "_SPLIT_ROWS", (256, 512))
    kernel = replace(users(splitting(torch.bfloat16, shortest=256)), has_backward=False)
    record = run(kernel, "split", heads=32)
    assert record.outcome == records.FAILED
    assert all(" of 512 keys" in name for name in record.evidence["changes"])


def test_who_declares_the_same_bits_is_held_to_them() -> None:
    kernels = (users(splitting(), invariant=words, backward="none") for words in ("", "batch split"))
    undeclared, declared = (run(kernel, "split", heads=16) for kernel in kernels)
    assert (undeclared.outcome, declared.outcome) == (records.MEASURED, records.FAILED)
    assert declared.answers["invariance"].asked == "bitwise equal, as the kernel declares"
    assert "without bias" in declared.reasons[0]


def test_a_kernel_that_loses_a_split_has_larger_errors() -> None:
    def loses(q: Tensor, k: Tensor, v: Tensor, num_splits: int = 1) -> Tensor:
        keys = k.shape[2] - (k.shape[2] // num_splits if num_splits > 2 else 0)
        return splitting()(q, k[:, :, :keys], v[:, :, :keys], num_splits)

    record = run(users(loses, backward="none"), "split", heads=16)
    assert record.outcome == records.FAILED
    assert "mean squared errors" in record.reasons[0]


@pytest.mark.parametrize(
    ("knob", "change"),
    [
        ("batch", "packed before one of 10 queries"),
        ("padding", "28 padded behind 100 keys"),
        ("memory", "pages in another order"),
        ("decode", "one query of 97 keys"),
        ("chunks", "in chunks of 50 queries"),
    ],
)
def test_flash_attention_has_the_same_bits_on_the_emulation(knob: str, change: str) -> None:
    record = run(EMULATION.kernel("flash@fused"), knob, EMULATION, heads=16)
    assert record.outcome == records.PASSED, record.reasons
    assert record.number("differing_bits") == 0.0
    assert min(record.evidence["controls"].values()) > 0.0
    assert change in {name.partition(",")[0] for name in record.evidence["changes"]}


def test_random_bits_of_its_own_differ_without_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariance, "_CALLS", 3)
    generator = torch.Generator().manual_seed(1)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = scaled_dot_product_attention(q.float(), k.float(), v.float())
        noise = torch.randint(0, 2**16, o.shape, generator=generator, dtype=torch.int32)
        return (o.view(torch.int32) + noise).bitwise_and(-65536).view(torch.float32).to(q.dtype)

    record = run(users(attention), "repeat", heads=32)
    assert record.outcome == records.MEASURED, record.reasons
    assert (record.number("differing_bits") or 0.0) > 0.1


def test_a_row_that_draws_random_bits_by_its_place_is_compared_with_others_of_its_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the last row alone 2,048 heads do not settle it: a dithered shift errs alike in all columns of a row."""
    monkeypatch.setattr(invariance, "_MATERIALS", {"normal numbers": normal_numbers})
    record = run(CPU.kernel("dithered@paper"), "decode", heads=32)
    assert record.outcome == records.MEASURED, record.reasons
    assert {name.partition(", ")[0] for name in record.evidence["changes"]} == {"one query of 97 keys"}
    assert any(", causal, " in name for name in record.evidence["changes"])


def in_fp32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q.float(), k.float(), v.float()).to(q.dtype)


def truncating(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> tuple[Tensor, ...]:
    """A sound backward pass, but that dV is rounded toward zero where a sequence is alone, or dO is not aligned."""
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        out = scaled_dot_product_attention(leaves[0], leaves[1], leaves[2])
    dq, dk, dv = torch.autograd.grad(out, leaves, do.float())
    if len(do) == 1 or do.data_ptr() % 16:
        dv = dv.view(torch.int32).bitwise_and(-65536).view(torch.float32)
    return tuple(x.to(do.dtype) for x in (dq, dk, dv))


@pytest.mark.parametrize(
    ("knob", "change", "wrong", "sound"),
    [("batch", "among 3 others", "before", "after"), ("memory", "one element off alignment", "after", "before")],
)
def test_gradients_are_compared_too(knob: str, change: str, wrong: str, sound: str) -> None:
    record = run(users(in_fp32, backward=truncating), knob, heads=128)
    changes = record.evidence["changes"]
    assert record.outcome == records.FAILED
    name = worst(changes)
    assert re.fullmatch(f"{change}, .*, dV", name)
    assert changes[name].verdict == records.BIASED
    assert getattr(changes[name], wrong).mean < -0.1, "toward zero"
    assert getattr(changes[name], sound).mean == pytest.approx(0.0, abs=0.02)
    assert {change.bits for key, change in changes.items() if key.endswith("dQ")} == {0.0}


def test_where_do_lies_must_reach_the_backward_pass() -> None:
    """Its storage read in other strides has another dQ; a backward pass of another dO shows nothing."""

    def deaf(_: Tensor, *qkvo: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.ones_like, qkvo[:3]))

    lost = run(users(in_fp32, backward=deaf), "memory", heads=16)
    assert lost.outcome == records.UNDECIDED
    assert lost.reasons == ("the knob did nothing: no bit changed by dO's storage in other strides",)


def test_partial_outputs_in_sixteen_bits_are_a_bias_of_splitting_and_a_line_of_the_verdict() -> None:
    """The same tie that one split breaks toward zero becomes exact where each half is rounded on its own."""
    asked = tuple(run(EMULATION.kernel("split@paper"), knob, EMULATION) for knob in ("split", "memory"))
    name = worst(asked[0].evidence["changes"])
    change = asked[0].evidence["changes"][name]
    assert (asked[0].outcome, change.verdict) == (records.FAILED, records.BIASED)
    assert name.endswith("ties apart on a sink")
    assert change.before.mean == pytest.approx(-0.21, abs=0.03)
    assert change.after.mean == pytest.approx(0.0, abs=0.05)
    assert change.difference.mean == pytest.approx(change.after.mean - change.before.mean, abs=1e-9)
    (verdict,) = verdicts(records.Run(platform={}, options={}, records=asked))
    failed, split, memory = verdict.findings[:3]
    assert (failed.name, split.name, memory.name) == ("failed", "invariance[split]", "invariance[memory]")
    assert ", with bias: +0.2" in split.text
    assert memory.text.startswith("bitwise equal in ")
