"""Attention in 8 bits, emulated: tables of docs/fewer-bits.md."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.formats import BF16, FP8_E4M3, Formats, ulp
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import run_forward
from tiebreak.kernels.plans import Cast
from tiebreak.kernels.reference import reference
from tiebreak.studies.pages import PageTable, table

ARITHMETIC = EmulatedArithmetic()
SEED, HEADS = 1, 256
_SATURATING = Cast(FP8_E4M3, saturates=True)


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(SEED + sum(shape)))


def _attend(kernel: str, inputs: AttentionInputs) -> Tensor:
    return run_forward(parse_declaration(kernel), inputs, ARITHMETIC).o.double()


# FlashAttention-4 on a B300, as #2694 tells it: relative error beside the bf16 kernel, by the logits' deviation.
_ON_A_B300 = {0.25: (0.027, 0.027), 0.5: (0.031, 0.028), 1.0: (0.136, 0.027), 1.5: (0.305, 0.024), 2.0: (0.361, 0.022)}
_STALE = {
    "e4m3, 2^8, lag 4": "lazy_4@fused_fp8_offset",
    "e5m2, 2^8, lag 4": "lazy_4@fused_e5m2_offset",
    "e4m3, 2^4, lag 4": "lazy_4@fused_fp8_offset_4",
    "e4m3, 2^8, no lag": "flash@fused_fp8_offset",
    "l clamped, 2^8, lag 4": "lazy_4@fused_fp8_clamped",
    "no lag, l rounded": "flash@fused_fp8_offset,l_from=rounded",
}


def stale(keys: int = 8192, queries: int = 256, d: int = 128) -> Iterator[str]:
    """Relative error of O where the running maximum lags, by the deviation of the logits."""

    def rows() -> Iterator[Sequence[str]]:
        q, k, v = (
            x.clamp(-3, 3).to(torch.float8_e4m3fn).float()[None, None]
            for x in (_normal(queries, d), _normal(keys, d), _normal(keys, d + 1)[:, 1:])
        )
        for deviation, (before, after) in _ON_A_B300.items():
            scale = deviation / math.sqrt(d)
            inputs = AttentionInputs(q, k, v, torch.zeros_like(q), Formats.of(BF16, v=FP8_E4M3), softmax_scale=scale)
            plain = _attend("flash@fused,base=2", inputs)
            errors = [(_attend(f"{kernel},base=2", inputs) - plain).norm() / plain.norm() for kernel in _STALE.values()]
            yield f"{deviation:g}", f"{before:.3f}", f"{after:.3f}", *(f"{error.item():.3f}" for error in errors)

    yield from table(("logits' deviation", "B300, before", "B300, 2^4", *_STALE), rows())


def sink(heads: int = 64, keys: int = 4096) -> Iterator[str]:
    """From which height of a sink on half of the other P-bar are 0, beside the closed form."""
    scores, places = _normal(heads, keys), slice(0, 4)
    above = scores[:, places].amax(-1).mean().item()  # delta_k of arXiv 2606.06521

    def lost(height: float, factor: float) -> float:
        s = scores.clone()
        s[:, places] += height
        p_bar = ARITHMETIC.cast(torch.exp(s - s.amax(-1, keepdim=True)) * factor, _SATURATING)
        return (p_bar[:, places.stop :] == 0).float().mean().item()

    def half(factor: float) -> float:
        low, high = 0.0, 40.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if lost(middle, factor) >= 0.5 else (middle, high)
        return low

    def rows() -> Iterator[Sequence[str]]:
        for power in (0, 4, 8):
            height = half(2.0**power)
            lifted = 10 * math.log(2) + power * math.log(2)
            own, theirs = lifted - above, lifted - 1.03
            apart = (f"{height / closed - 1:+.1%}" for closed in (own, theirs))
            yield f"2^{power}", f"{height:.2f}", f"{own:.2f}", f"{theirs:.2f}", *apart

    of_these = f"closed form, delta_k = {above:.2f} of these scores"
    yield from table(("S", "half is lost from", of_these, "delta_k = 1.03", "apart", "apart"), rows())


_SUMS = {"before": "fused_fp8_offset", "after": "fused_fp8_offset,l_from=rounded"}
FIX = {
    **{f"{rule}, l {when} the cast": f"{rule}@{plan}" for rule in ("flash", "stabilized", "dithered")
       for when, plan in _SUMS.items()},
    "dithered, l after, O stochastic": "dithered@fused_fp8_fair",
    "flash, l after, O stochastic": "flash@fused_fp8_fair",
}  # fmt: skip
FIX_CASES = ("fp8_ties", "fp8_flat_tail", "fp8_stale_maximum", "fp8_sink_collapse", "fp8_random")


def fix_row(kernel: str, inputs: AttentionInputs, ref: Tensor) -> str:
    """Bias, row coherence and root mean square of one kernel's errors, in ulps of bf16."""
    errors = ref.sign() * (_attend(kernel, inputs) - ref) / ulp(ref, BF16)
    return f"{errors.mean():+.2f}, {errors.mean(-1).abs().mean():.2f}, {errors.square().mean().sqrt():.2f}"


def fix() -> Iterator[str]:
    """What the fixes make of P-bar in e4m3."""
    cases = {case.name: case.make(SEED, 0, HEADS, BF16) for case in SCRIPTED if case.name in FIX_CASES}
    refs = {name: reference(inputs).o for name, inputs in cases.items()}

    def rows() -> Iterator[Sequence[str]]:
        for name, kernel in {"flash, P-bar in bf16": "flash@fused", **FIX}.items():
            yield name, *(fix_row(kernel, cases[case], refs[case]) for case in FIX_CASES)

    yield from table(("kernel", *(f"`{name}`" for name in FIX_CASES)), rows())


_PLANS = ("fp8_tensor", "fp8", "fp8_block", "fp8_e5m2_v", "fp8_ada", "fp8_hopper", "mxfp8", "sage", "sage,smooth_k=no")


def _normal_inputs(heads: int, keys: int, queries: int, d: int) -> AttentionInputs:
    q, k, v = (_normal(1, heads, n, d + i)[..., :d].bfloat16().float() for i, n in enumerate((queries, keys, keys)))
    return AttentionInputs(q, k, v, torch.zeros_like(q), Formats.of(BF16))


def _scaled(inputs: AttentionInputs) -> dict[str, AttentionInputs]:
    """Return normal inputs, and others whose sizes differ where a scale is shared, by the name of their column."""
    v, heads, keys = inputs.v, torch.arange(inputs.v.shape[1]), torch.arange(inputs.v.shape[2])
    uneven, falling = torch.exp2(-3.0 * heads).view(1, -1, 1, 1), torch.exp2(-8.0 * (keys // 128)).view(1, 1, -1, 1)
    channel = 30.0 * (torch.arange(inputs.k.shape[3]) == 5)
    return {
        "normal": inputs,
        "V of each head 1/8 of the last": replace(inputs, v=(v * uneven).bfloat16().float()),
        "V of each 128 keys 2^-8 of the last": replace(inputs, v=(v * falling).bfloat16().float()),
        "a channel of K is 30": replace(inputs, k=(inputs.k + channel).bfloat16().float()),
    }


def scales(heads: int = 8, keys: int = 512, queries: int = 64, d: int = 64) -> Iterator[str]:
    """Relative error of O by who shares a scale: the mean over heads, each by its own size."""
    made = _scaled(_normal_inputs(heads, keys, queries, d))
    refs = {name: reference(inputs).o for name, inputs in made.items()}

    def apart(plan: str, name: str) -> str:
        lost = (_attend(plan, made[name]) - refs[name]).norm(dim=(-2, -1)) / refs[name].norm(dim=(-2, -1))
        return f"{lost.mean():.3f}"

    def rows() -> Iterator[Sequence[str]]:
        for plan in ("fused", *_PLANS):
            yield f"`{plan}`", *(apart(plan, name) for name in made)

    yield from table(("plan", *made), rows())


TABLES = [
    PageTable("fewer-bits.md", "stale", stale),
    PageTable("fewer-bits.md", "sink", sink),
    PageTable("fewer-bits.md", "fix", fix),
    PageTable("fewer-bits.md", "scales", scales),
]
