"""The scripted failure inputs and their controls. What is claimed about each is in `claims.csv`."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tiebreak.cases.case import (
    ONE_SIGNED,
    OWN,
    PAPER,
    SHAPE,
    TWO_MAXIMA,
    Case,
    Draw,
    Recipe,
    Scores,
    Shape,
    Values,
    growing,
    normal_numbers,
    scripted,
)
from tiebreak.cases.claims import claims_about
from tiebreak.kernels.formats import FP8_E4M3, Formats
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.probe_inputs import pieces, tied_p_bar

_COMMENTARY = "kexue.fm 11371"
_NO_TAIL = (200.0, 210.0)  # below the maxima: exp of it is 0 in fp32
_ON_THE_MARGIN = "sits on the margin: which side of it the interval ends depends on the few row maxima drawn"
_SHIFTED = "a shift that is moved or scaled has its own error of P-bar"


def _case(about: str, recipe: Recipe, *, source: str = OWN, **fields: Any) -> Case:
    return Case("", about, source, recipe, **fields)


def _scripted(
    about: str, scores: Scores = TWO_MAXIMA, *, values: Values = ONE_SIGNED, shape: Shape = SHAPE, **fields: Any
) -> Case:
    return _case(about, partial(scripted, scores=scores, values=values, shape=shape), **fields)


_tied = partial(_scripted, source=PAPER, failure=True)  # a failure input of the paper's
_GROUPS: dict[str, dict[str, Case]] = {}  # by what they are about

#: K equal maxima with one-signed V: the bias falls about as 1/(2k), so from k = 8 on it is inside the margin.
_GROUPS["equal maxima"] = {
    f"tied_maxima[k={k}]": _tied(
        f"{k} equal maxima, V negative",
        Scores(maxima=k, gap=(9.0, 15.0) if k == 2 else (12.0, 18.0)),
        gradients=k == 2,
        traced=k == 2,
        study=k != 2,
        family=("number of equal maxima", k),
    )
    for k in (2, 3, 4, 8, 16)
}

_ON_A_SINK = Values(tail_mean=-0.1)
_GROUPS["equal maxima, other values of V"] = {
    "tied_maxima_positive_v": _tied(
        "2 equal maxima, V positive: the same bias, the other way", values=Values(mean=2.4)
    ),
    "tied_maxima_unscaled": _tied(
        "2 equal maxima, alpha = 1: scores are not scaled, as in T5", shape=Shape(scale=1.0), study=True
    ),
    "sink_tie": _tied("2 equal maxima on an attention sink, the tail's V near 0", values=_ON_A_SINK, gradients=True),
    "mixed_sign_v": _scripted(
        "2 equal maxima, V of mixed sign (control): ties break both ways",
        source=PAPER,
        values=Values(mean=0.0, std=1.0),
    ),
    "no_tail": _scripted(
        "2 equal maxima and no remainder (control): exact ties go to even",
        Scores(gap=_NO_TAIL),
        source=_COMMENTARY,
    ),
}

_GROUPS["one maximum"] = {
    "single_maximum": _scripted(
        "1 maximum, the tail's V like the rest (control)",
        Scores(maxima=1, gap=(9.0, 15.0)),
        source=PAPER,
        unclaimed="a control: what a tail 9 to 15 below leaves of one maximum is 0.1 ulp and less, of either sign",
    ),
    "single_maximum_sink": _scripted(
        "1 maximum on a sink, the tail's V near 0: nothing repeats, no fix sees it",
        Scores(maxima=1, gap=(9.0, 15.0)),
        values=_ON_A_SINK,
        failure=True,
    ),
    "single_maximum_large": _scripted(
        "1 maximum of 105 to 120: scaling it although nothing repeats underflows",
        Scores(maxima=1, top=(105.0, 120.0)),
        source=f"{PAPER} v1, appendix C",
    ),
}

_GROUPS["maxima near zero and below it"] = {
    "repeated_zero": _tied("repeated maximum exactly 0: neither branch of the fix applies", Scores(top=(0.0, 0.0))),
    "repeated_tiny": _tied(
        "repeated maximum of 0.001 to 0.004: P-bar rounds back to 1",
        Scores(top=(0.001, 0.004)),
        study=True,
        unclaimed=f"the fix in a fused kernel {_ON_THE_MARGIN}",
    ),
    "repeated_negative": _tied("repeated maximum of -6 to -1: the fix's negative branch", Scores(top=(-6.0, -1.0))),
}

# Where beta * r_m makes P-bar underflow: exp(-r_m) is subnormal in fp32 from 87.4 on and 0 from 104 on. The authors'
# code clamps the row sum 2 exp(-r_m) at 1e-10, so its output is that share of the right one. In fp16 P-bar is 0 from
# 17.4 on, and so are, from 18.1 on, a row sum in fp16 and its clamp (docs/science.md).
_GROUPS["large maxima"] = {
    f"repeated_large[r={r}]": _tied(
        f"repeated maximum of {r}" + (f" to {high:g}" if high > r else " in every row"),
        Scores(top=(float(r), high)),
        study=r in (25, 30, 60, 90),
        chaotic=r == 90,  # whether the device flushes a subnormal P-bar decides
        unclaimed=unclaimed,
    )
    for r, high, unclaimed in (
        (20, 22.0, f"the fix {_ON_THE_MARGIN}"),
        *((25, 25.0, None), (30, 32.0, None), (60, 65.0, None), (90, 92.0, None), (105, 110.0, None)),
        (
            10000,
            10100.0,
            "at 1e4 bf16 spaces scores by 64: where S is in bf16 every key ties, and contracted, one of three r_m"
            " decides",
        ),
    )
}

# Row maxima whose product with alpha log2 e is no fp32 number, and nothing that could break a tie but that. Contracted,
# P-bar of the maxima is 2^e, e the rounding error of m c: up to half an ulp of it, 2^-22, 2^-18 and 2^-15 here. The
# cast makes P-bar 1, l has it as it is, and all ties of a row break to the side of -e. Which side that is depends on
# r_m, so rows err together and heads do not. A row with one maximum has no tie: O is one row of V. The ranges hold
# dozens of numbers of bf16, of which half round m c up and half down: 1 % to 7 % apart.
_GROUPS["large maxima"] |= {
    f"inexact_{kind}[r={r}]": _scripted(
        about.format(f"{r} times log2 e, which fp32 rounds, and no remainder"),
        Scores(maxima=maxima, top=top, gap=_NO_TAIL),
        study=r != 6,
        unclaimed=f"{_SHIFTED}, common to a row",
    )
    for kind, about, maxima in (
        ("ties", "2 equal maxima of about {}", 2),
        ("single", "1 maximum of about {} (control): nothing ties", 1),
    )
    for r, top in ((6, (5.0, 7.75)), (60, (60.0, 85.0)), (600, (520.0, 1000.0)))
}

# Rows whose first key block ends below the maximum, but not by so much that lazy rescaling follows it. P-bar of the
# maxima is then exp(growth), not 1. Where all rows grow alike, P-bar's rounding is one common error of O as long as l
# sums P-bar before it: bf16(e^4) = 54.5 is 1.8e-3 too small, 0.28 ulp of O.
_grown = partial(_case, source=f"{OWN}, FlashAttention-4's lazy rescaling", failure=True)
_GROUPS["maxima in several key blocks"] = {
    "ties_across_blocks": _scripted(
        "2 equal maxima, each in a separate key block: no block sees a repeat",
        Scores(positions=(17, 145)),
        shape=Shape(keys=256),
        failure=True,
    ),
    "ties_across_long_blocks": _scripted(
        "4 equal maxima of 2,048 keys, 512 apart: a library that sums P V in bf16 between blocks errs in each",
        Scores(maxima=4, positions=(100, 700, 1300, 1900)),
        shape=Shape(keys=2048),
        failure=True,
        most_heads=64,
        study=True,
        unclaimed="O-bar in bf16 is rounded in the tile of every maximum, and each rounding has a separate error",
    ),
    "overshooting_shift": _scripted(
        "a repeated maximum in the first block, scaled above the true maximum of the second",
        Scores(maxima=3, positions=(5, 40, 200), offsets=(0.0, 0.0, 0.5)),
        shape=Shape(keys=256),
        unclaimed="two maxima half below the third in every row: one common error of P-bar, of any sign",
    ),
    "growing_maximum": _grown(
        "2 equal maxima 1 to 5 above the first block's: FlashAttention-4 keeps the old shift, and P-bar is above 1",
        partial(growing, growth=(1.0, 5.0)),
    ),
    "growing_maximum[by=4]": _grown(
        "the same, 4 above in every row: lazy rescaling makes one error common to all rows",
        partial(growing, growth=(4.0, 4.0)),
        gradients=True,
        study=True,
    ),
}

_GROUPS["maxima that differ by less than P-bar's rounding"] = {
    "near_tie_inside": _tied(
        "2 maxima 5e-4 apart, inside the fix's tolerance of 1e-3", Scores(offsets=(0.0, -(2.0**-11)))
    ),
    "near_tie_outside": _tied(
        "2 maxima 1.5e-3 apart, outside the fix's tolerance: both P-bar still round to 1",
        Scores(offsets=(0.0, -(2.0**-10 + 2.0**-11))),
        study=True,
    ),
}


def _equal_keys(draw: Draw) -> AttentionInputs:
    """Draw duplicate tokens: two share one key of random direction, so their scores tie in any arithmetic."""
    inputs = scripted(draw, Scores(positions=(0, 1)))
    q, k = inputs.q.clone(), inputs.k.clone()
    q[..., 2:] = draw.rounded(0.05 * draw.normal(*q[..., 2:].shape))
    k[:, :, 1] = k[:, :, 0]
    return replace(inputs, q=q, k=k)


def _tied_p_bar(draw: Draw) -> AttentionInputs:
    """Draw ties of P-bar, in every other head above neighbours with an odd last bit."""
    batch, heads = draw.batch_and_heads
    odd = (torch.arange(batch * heads) % 2 == 1).view(batch, heads)
    inputs = tied_p_bar(draw.rng, odd, draw.noise_seed())
    q, k, v = map(draw.rounded, (inputs.q, inputs.k, inputs.v))
    return AttentionInputs(q, k, v, draw.upstream(q.shape), draw.formats, noise_seed=inputs.noise_seed)


def _exact_p_bar(draw: Draw) -> AttentionInputs:
    """Draw rows of one maximum, whose V shows 1 / l, and 15 keys of one P-bar, in bf16 from 1/4 to 1, whose V is 0.

    The error of O is that of its own cast, whatever P-bar's format, and that of the exponential in 0.79 to 0.94 of l.
    An exponential's error of 2^-13, as in FlashAttention-4's polynomial (8.8e-5) and PyTorch's fast one (1.1e-4), gives
    1.003 of the mean square in bf16 and 1.08 in fp16; one of 1e-3, without a bias, 1.1 and 11.
    """
    batch, heads = draw.batch_and_heads
    scores = draw.uniform(0.25, 1.0, batch, heads, 16).bfloat16().double().log().float()
    q, k, v = torch.zeros(batch, heads, 16, 64), torch.zeros(batch, heads, 16, 64), torch.zeros(batch, heads, 16, 64)
    q[..., :48] = torch.eye(16).repeat_interleave(3, 1)  # row i adds up three columns of K to its score
    k[:, :, 1:, :48] = torch.stack(pieces(scores * 8.0), -1).flatten(-2)[:, :, None]
    v[:, :, 0] = draw.normal(batch, heads, 64).mul_(0.3).sub_(2.4)
    return draw.inputs(q, k, v)


_GROUPS["controls"] = {
    "equal_keys": _case("duplicate tokens: ties exact in any arithmetic", _equal_keys, failure=True),
    "faint_tail": _scripted(
        "2 equal maxima, a tail of about 2^-24 of the row sum: fp32 itself rounds it away", Scores(gap=(20.5, 22.5))
    ),
    "tied_p_bar": _case(
        "every P-bar but the maximum's is a tie in bf16: tells how a kernel casts P-bar",
        _tied_p_bar,
        unclaimed="where S is in bf16 P-bar is no tie",
    ),
    "exact_p_bar": _case(
        "every P-bar is a number of bf16: tells how exact a kernel's exponential is",
        _exact_p_bar,
        unclaimed="where S is in bf16 P-bar is another number",
    ),
    "random_mixed_v": _case("normal q, k, v: O cancels", partial(normal_numbers, v_mean=0.0, v_std=1.0), cancels=True),
}


def _sink(draw: Draw, height: float) -> AttentionInputs:
    """Draw normal scores above a row's r_m, those of the first four keys `height` higher; V of the four is a 64th.

    The four never tie, not even in bf16: they are multiples of a quarter, each a sixteenth higher than the one before.
    """
    inputs = scripted(draw, Scores(maxima=4, positions=(0, 1, 2, 3)))
    k, v = inputs.k.clone(), inputs.v.clone()
    k[..., 1] = draw.normal(*k.shape[:3])
    k[..., :4, 1] = (4 * k[..., :4, 1]).round() / 4 + height + torch.arange(4) / 16
    v[..., :4, :] /= 64.0
    return replace(inputs, k=draw.rounded(k), v=v)


def _in_e4m3(draw: Draw, recipe: Recipe) -> AttentionInputs:
    inputs = recipe(draw)
    return replace(inputs, v=inputs.v.to(torch.float8_e4m3fn).float())


def _with_e4m3(about: str, recipe: Recipe, **fields: Any) -> Case:
    return _case(about, partial(_in_e4m3, recipe=recipe), formats=partial(Formats.of, v=FP8_E4M3), **fields)


#: V in e4m3, in which O is exact where two maxima tie. Kernels of 16 bits take them too (docs/fewer-bits.md).
EIGHT_BITS = {
    "fp8_ties": _with_e4m3("2 equal maxima, V in e4m3: O is exact, and nothing ties", scripted, study=True),
    "fp8_flat_tail": _with_e4m3(
        "1 maximum, 127 keys 7 to 7.5 below it, V in e4m3: each is nothing in 8 bits, together they are a tenth",
        partial(scripted, scores=Scores(maxima=1, gap=(7.0, 7.5))),
        failure=True,
        unclaimed="S in bf16 moves each of the tail by up to 1.6 %, and standard attention sits on the margin",
    ),
    # Two maxima g above the first block's, 0.7 to 2.7: less than 4 in base two, so a lazy maximum stays. Times 2^8,
    # P-bar of the two is 256 e^g, from 516 to 3809, and e4m3 ends at 448. With the one key of the first block,
    # (2 448 + 256) / (512 e^g + 256) of a row's weight is left: from 0.895 down to 0.146.
    "fp8_stale_maximum": _with_e4m3(
        "2 equal maxima 0.7 to 2.7 above the first block's: where m lags P-bar reaches 3809, and e4m3 ends at 448",
        partial(growing, growth=(0.7, 2.7)),
        source=f"{OWN}, flash-attention #2716",
        failure=True,
    ),
    # Half of the other P-bar are 0 in e4m3 from a gap of 10 ln 2 + ln S - delta_k on, 5.9 where S = 1 and 11.4 where
    # S = 2^8; delta_k = 1.03 is how far the largest of four normal numbers lies above their mean (section 3.2).
    "fp8_sink_collapse": _with_e4m3(
        "normal scores, those of 4 first keys 7 higher, with V near 0: most other P-bar are 0 in e4m3",
        partial(_sink, height=7.0),
        source="arXiv 2606.06521",
        failure=True,
        unclaimed="a sink with V near 0 makes O of small P-bar: their casts are what O errs by",
    ),
    "fp8_random": _with_e4m3(
        "normal q and k, V about 1 in e4m3: the accuracy baseline in 8 bits",
        normal_numbers,
        study=True,
        unclaimed="in 16 bits as the case random has it",
    ),
}
_GROUPS["V in 8 bits"] = EIGHT_BITS

#: Normal q and k, V normal about 1: the accuracy baseline, in every shape that a kernel must take.
_GROUPS["normal numbers"] = {
    name: _case(
        about,
        partial(normal_numbers, shape=shape, causal="causal" in name),
        gradients=True,
        normal=True,
        unclaimed=f"{_SHIFTED}, of 0.1 ulp and less on random scores",
    )
    for name, about, shape in (
        ("random", "normal q and k, V about 1: the accuracy baseline", SHAPE),
        ("random_causal", "under a causal mask", Shape(queries=48, keys=48, d=32)),
        (
            "random_causal_chunk",
            "under a causal mask, 16 queries at the end of 100 keys",
            Shape(queries=16, keys=100, d=32),
        ),
        ("random_wide", "d = 128", Shape(d=128)),
        ("random_grouped", "grouped-query heads, 4 to a key head", Shape(groups=4)),
        ("random_odd", "7 queries, 100 keys, d = 40: no powers of two", Shape(queries=7, keys=100, d=40)),
        ("random_scaled", "alpha = 0.3, no power of two", Shape(scale=0.3)),
    )
}


def _padded(draw: Draw, *, all_masked: bool) -> AttentionInputs:
    """Draw input with a key padding mask; with `all_masked`, the first batch entry sees no key at all."""
    inputs = normal_numbers(draw)
    batch, keys = inputs.k.shape[0], inputs.k.shape[2]
    lengths = torch.from_numpy(draw.rng.integers(keys // 4, keys + 1, batch))
    visible = torch.arange(keys)[None] < lengths[:, None]
    if all_masked:
        visible[0] = False
    return replace(inputs, key_padding=visible)


def _poisoned(draw: Draw, value: float, tensor: str) -> AttentionInputs:
    """Draw input with one NaN or Inf in q (its row is lost) or in v (its column is)."""
    inputs = normal_numbers(draw)
    poisoned = getattr(inputs, tensor).clone()
    poisoned[:, :, 1, 0] = value
    return replace(inputs, **{tensor: poisoned})


def _subnormal(draw: Draw) -> AttentionInputs:
    inputs = normal_numbers(draw)
    tiny = inputs.v.abs().clamp(max=1.9) * (0.5 * inputs.formats.inputs.smallest_normal)
    return replace(inputs, v=draw.rounded(tiny))


_GROUPS["masks, NaN, Inf, subnormal and very large numbers"] = {
    "padded": _case("a key padding mask", partial(_padded, all_masked=False), gradients=True),
    "wholly_masked": _case("rows without a visible key give zeros", partial(_padded, all_masked=True), gradients=True),
    "low_logits": _case(
        "every score about -6e4, the first key's highest: a running maximum that starts above them stays",
        partial(scripted, scores=Scores(top=(-6.4e4, -5.2e4), maxima=1, positions=(0,))),
        unclaimed="where S is in bf16, in steps of 256 here, every key ties",
        chaotic=True,
    ),
    "huge_logits": _case(
        "scores of about 1e4: near one-hot rows",
        partial(normal_numbers, size=1e4),
        unclaimed="where S is in bf16, in steps of 64 here, which key wins a row is chance",
        chaotic=True,
    ),
    "inf_in_v": _case("one Inf in V: its column is lost, no other", partial(_poisoned, value=torch.inf, tensor="v")),
    "nan_in_q": _case("a NaN in q: its row is lost, no other", partial(_poisoned, value=torch.nan, tensor="q")),
    "subnormal_v": _case("V below the smallest normal value: exact, or flushed to zero", _subnormal, chaotic=True),
}


#: What MiniLM's and SmolLM2's attention has met of them, and how often (docs/science.md, "Trained models").
SEEN = {
    "near_tie_inside": "two largest scores within 1e-3 in 0.17 % of MiniLM's rows, 0.08 % of SmolLM2's",
    "single_maximum_sink": "one P above 0.9 in 1.81 % of MiniLM's rows, 9.66 % of SmolLM2's",
    "trained_sink": "one P above 0.9 in 93.78 % of the rows of this head of SmolLM2",
}


def named(groups: Mapping[str, Mapping[str, Case]]) -> tuple[Case, ...]:
    """Return cases by what they are about, and by name, with all that is claimed about them."""
    return tuple(
        replace(case, name=name, group=group, seen=SEEN.get(name, ""), claims=(*case.claims, *claims_about(name)))
        for group, cases in groups.items()
        for name, case in cases.items()
    )


SCRIPTED = named(_GROUPS)
