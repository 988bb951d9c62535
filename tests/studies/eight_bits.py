"""Attention in 8 bits, emulated: tables of docs/fewer-bits.md."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.formats import BF16, Formats, ulp
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import run_forward
from tiebreak.kernels.reference import reference
from tiebreak.studies.pages import PageTable, table

ARITHMETIC = EmulatedArithmetic()
SEED, HEADS = 1, 256


def normal(*shape: int) -> Tensor:
    """Draw normal numbers, by their shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(SEED + sum(shape)))


def attend(kernel: str, inputs: AttentionInputs) -> Tensor:
    """Return O of an emulated kernel."""
    return run_forward(parse_declaration(kernel), inputs, ARITHMETIC).o.double()


_SUMS = {"before": "fused_fp8_offset", "after": "fused_fp8_offset,l_from=rounded"}
FIX = {
    **{f"{rule}, l {when} the cast": f"{rule}@{plan}" for rule in ("flash", "stabilized", "dithered")
       for when, plan in _SUMS.items()},
    "dithered, l after, O stochastic": "dithered@fused_fp8_fair",
    "flash, l after, O stochastic": "flash@fused_fp8_fair",
}  # fmt: skip
FIX_CASES = ("fp8_ties", "fp8_flat_tail", "fp8_stale_maximum", "fp8_sink_collapse", "fp8_random")


def fix_row(kernel: str, inputs: AttentionInputs, ref: Tensor) -> str:
    """Return bias, row coherence and root mean square of one kernel's errors, in ulps of bf16."""
    errors = ref.sign() * (attend(kernel, inputs) - ref) / ulp(ref, BF16)
    return f"{errors.mean():+.2f}, {errors.mean(-1).abs().mean():.2f}, {errors.square().mean().sqrt():.2f}"


def fix() -> Iterator[str]:
    """Yield what the fixes make of P-bar in e4m3."""
    cases = {case.name: case.make(SEED, 0, HEADS, BF16) for case in SCRIPTED if case.name in FIX_CASES}
    refs = {name: reference(inputs).o for name, inputs in cases.items()}

    def rows() -> Iterator[Sequence[str]]:
        for name, kernel in {"flash, P-bar in bf16": "flash@fused", **FIX}.items():
            yield name, *(fix_row(kernel, cases[case], refs[case]) for case in FIX_CASES)

    yield from table(("kernel", *(f"`{name}`" for name in FIX_CASES)), rows())


_PLANS = ("fp8_tensor", "fp8", "fp8_block", "fp8_e5m2_v", "fp8_ada", "fp8_hopper", "mxfp8", "sage", "sage,smooth_k=no")


def _normal_inputs(heads: int, keys: int, queries: int, d: int) -> AttentionInputs:
    q, k, v = (normal(1, heads, n, d + i)[..., :d].bfloat16().float() for i, n in enumerate((queries, keys, keys)))
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
    """Yield the relative error of O by who shares a scale: the mean over heads, each by its own size."""
    made = _scaled(_normal_inputs(heads, keys, queries, d))
    refs = {name: reference(inputs).o for name, inputs in made.items()}

    def apart(plan: str, name: str) -> str:
        lost = (attend(plan, made[name]) - refs[name]).norm(dim=(-2, -1)) / refs[name].norm(dim=(-2, -1))
        return f"{lost.mean():.3f}"

    def rows() -> Iterator[Sequence[str]]:
        for plan in ("fused", *_PLANS):
            yield f"`{plan}`", *(apart(plan, name) for name in made)

    yield from table(("plan", *made), rows())


TABLES = [PageTable("fewer-bits.md", "fix", fix), PageTable("fewer-bits.md", "scales", scales)]
