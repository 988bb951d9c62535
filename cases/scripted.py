"""The scripted failure inputs and their controls.

A claim is made only where its source makes one: the paper (arXiv 2510.04212, v1 and v2), its published code, the
commentary on it (kexue.fm, archive 11371), or this suite's own measurements (docs/science.md). Everything else
is measured, held to its plan's error bound and, on a device, to the emulation's prediction.

A claim reads: what is expected, who says so, of which shift rules, at which plans, and in which formats if not bf16.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tiebreak.cases.case import (
    ONE_SIGNED,
    SHAPE,
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
from tiebreak.cases.claims import (
    ACCURATE,
    BIASED,
    BIASED_AWAY,
    BIASED_TOWARD,
    BREAKS_DOWN,
    FAIR,
    FLUSHED_OR_ACCURATE,
    FUSED,
    INACCURATE,
    INACCURATE_OR_BREAKS_DOWN,
    OFFSET_HARMS,
    OUTSIDE,
    OWN,
    PAPER,
    ROWS_ERR_APART,
    ROWS_ERR_TOGETHER,
    UNBIASED,
    V1_IN_FP16,
    Claim,
    breaks_down_in,
    claim,
    shrinks,
    within,
)
from tiebreak.cases.eight_bits import EIGHT_BITS
from tiebreak.cases.feature_cases import FEATURE_CASES, SERVICE
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.probe_inputs import tied_p_bar

_COMMENTARY = "kexue.fm 11371"
_CLAMP = f"{PAPER}, published code: the row sum's clamp at 1e-10"

_16_BITS = "bf16 fp16"
_PLAIN = "safe as_printed_v1"
_SCALED = "stabilized as_printed_v2 gamma always_scaled"  # by beta = 2, and nothing else done about underflow
_FIXES = f"{_SCALED} stabilized_v1 stabilized_authors"
_SEE_NO_REPEAT = f"{_PLAIN} as_printed_v2 stabilized stabilized_v1 gamma"  # where nothing repeats within eps

_STOCHASTIC = claim(UNBIASED, f"{OWN}: stochastic rounding of O", "safe", "fused_stochastic")
_DITHERED = claim(UNBIASED, f"{OWN}: the dithered shift", "dithered", "paper")
_PLAIN_IS_BIASED = claim(BIASED_AWAY, f"{PAPER}, section 3.3.2, claim 3", _PLAIN, "paper all_bf16")
_FUSED_IS_NOT = claim(UNBIASED, f"{OWN}: where a kernel rounds decides", "safe", FUSED)
_FUSED_ROUNDED_FIRST_IS_NOT = replace(_FUSED_IS_NOT, plans=frozenset({"fused"}))
_LAZY_IS_FUSED = claim(UNBIASED, f"{OWN}: no later block is higher, so nothing lags", "lazy", "fused")
# Its delta does not see O, and so not the bias: see docs/science.md.
_STANDARD_IS_BIASED = claim(BIASED_AWAY, f"{OWN}: normalising P before its cast leaves the ties", "standard")
_FAST_EXP_ERRS = claim(BIASED_AWAY, f"{OWN}: an exp(0) below 1 makes l small", "safe", "fused_fast_exp")
_TIES_GO_AWAY = claim(BIASED_AWAY, f"{OWN}: a cast of O away from zero", "safe", "fused_p_bar_o_away")
_FIX_HOLDS = claim(UNBIASED, f"{PAPER} v2, section 4", _FIXES, "paper all_bf16")
# Of plans that scale nothing, where two maxima tie.
_FUSED_ROUNDS_ONCE = (_FUSED_IS_NOT, _LAZY_IS_FUSED, _STOCHASTIC)
_WITHOUT_A_FIX = (*_FUSED_ROUNDS_ONCE, _STANDARD_IS_BIASED)
_TIES_BREAK = (_PLAIN_IS_BIASED, _FIX_HOLDS, *_WITHOUT_A_FIX)
_SCALED_BREAKS_DOWN = claim(
    BREAKS_DOWN, f"{PAPER} v1, appendix C: unconditional scaling", "always_scaled", formats=_16_BITS
)
_OVERSHOOTS = f"{OWN}: a tile without the maximum repeats its own, is scaled"
_TILE_OVERSHOOTS = claim(
    BREAKS_DOWN, f"{_OVERSHOOTS}, and every P-bar is 0", "stabilized", formats=_16_BITS, tiled=True
)
_NO_TAIL = (200.0, 210.0)  # below the maxima: exp of it is 0 in fp32
_ROUNDS_BACK = f"{OWN}: P-bar rounds back to 1"
_ON_THE_MARGIN = "sits on the margin: which side of it the interval ends depends on the few row maxima drawn"


def _case(about: str, recipe: Recipe, claims: Sequence[Claim] = (), *, source: str = OWN, **fields: Any) -> Case:
    """A case that a table names."""
    return Case("", about, source, recipe, tuple(claims), **fields)


def _scripted(
    about: str,
    scores: Scores,
    claims: Sequence[Claim] = (),
    *,
    values: Values = ONE_SIGNED,
    shape: Shape = SHAPE,
    **fields: Any,
) -> Case:
    """Scripted rows, with further fields of their case; what holds of `fair` and of a fixed offset does of all."""
    recipe = partial(scripted, scores=scores, values=values, shape=shape)
    return _case(about, recipe, (*claims, FAIR, OFFSET_HARMS), **fields)


def _tied(about: str, scores: Scores, claims: Sequence[Claim], **fields: Any) -> Case:
    """A failure input of the paper's."""
    return _scripted(about, scores, (*claims, _DITHERED), source=PAPER, failure=True, **fields)


#: K equal maxima with one-signed V: the bias falls about as 1/(2k), so from k = 8 on it is inside the margin.
_EQUAL_MAXIMA = {
    f"tied_maxima[k={k}]": _tied(
        f"{k} equal maxima, V negative",
        Scores(maxima=k, gap=(9.0, 15.0) if k == 2 else (12.0, 18.0)),
        (*(_TIES_BREAK if k <= 4 else _FUSED_ROUNDS_ONCE), V1_IN_FP16),
        gradients=k == 2,
        traced=k == 2,
        study=k != 2,
        family=("number of equal maxima", k),
    )
    for k in (2, 3, 4, 8, 16)
}

_ON_A_SINK = Values(tail_mean=-0.1)
_OTHER_V = {
    "tied_maxima_positive_v": _tied(
        "2 equal maxima, V positive: the same bias, the other way",
        Scores(),
        (*_TIES_BREAK, V1_IN_FP16),
        values=Values(mean=2.4),
    ),
    "tied_maxima_unscaled": _tied(
        "2 equal maxima, alpha = 1: scores are not scaled, as in T5",
        Scores(),
        (*_TIES_BREAK, V1_IN_FP16),
        shape=Shape(scale=1.0),
        study=True,
    ),
    "sink_tie": _tied(
        "2 equal maxima on an attention sink, the tail's V near 0",
        Scores(),
        (
            _PLAIN_IS_BIASED,
            claim(BIASED_TOWARD, f"{OWN}: where a kernel rounds decides", "safe lazy", FUSED),
            *(_FIX_HOLDS, _STOCHASTIC, _STANDARD_IS_BIASED, V1_IN_FP16),
        ),
        values=_ON_A_SINK,
        gradients=True,
    ),
    "mixed_sign_v": _scripted(
        "2 equal maxima, V of mixed sign (control): ties break both ways",
        Scores(),
        (
            claim(UNBIASED, f"{PAPER}, section 3.3.2", _PLAIN, "paper", tiled=False),
            claim(BIASED_TOWARD, f"{OWN}: measured, -0.09 ulp; no mechanism is known", "safe lazy", FUSED),
            claim(
                within(112.0),
                f"{OWN}: where V cancels the tail is left, and its P-bar, at most exp(-12 - r_m), is lost in fp16",
                f"{_SCALED} stabilized_authors",
                "paper fused all_bf16",
                "fp16",
            ),
            V1_IN_FP16,
        ),
        source=PAPER,
        values=Values(mean=0.0, std=1.0),
    ),
    "no_tail": _scripted(
        "2 equal maxima and no remainder (control): exact ties go to even",
        Scores(gap=_NO_TAIL),
        (
            *(_FAST_EXP_ERRS, _TIES_GO_AWAY),
            claim(UNBIASED, f"{_COMMENTARY}: eliminating the remainder", _PLAIN),
            V1_IN_FP16,
        ),
        source=_COMMENTARY,
    ),
}

_ONE_MAXIMUM = {
    "single_maximum": _scripted(
        "1 maximum, the tail's V like the rest (control)",
        Scores(maxima=1, gap=(9.0, 15.0)),
        source=PAPER,
        unclaimed="a control: what a tail 9 to 15 below leaves of one maximum is 0.1 ulp and less, of either sign",
    ),
    "single_maximum_sink": _scripted(
        "1 maximum on a sink, the tail's V near 0: nothing repeats, no fix sees it",
        Scores(maxima=1, gap=(9.0, 15.0)),
        (
            claim(
                BIASED_AWAY,
                f"{OWN}: the limit of the fix",
                f"{_SEE_NO_REPEAT} stabilized_authors lazy",
                f"paper all_bf16 {FUSED}",
            ),
            claim(BIASED_TOWARD, f"{OWN}: O is the sink's P alone, cast once more", "standard"),
            *(_DITHERED, _STOCHASTIC),
        ),
        values=_ON_A_SINK,
        failure=True,
    ),
    "single_maximum_large": _scripted(
        "1 maximum of 105 to 120: scaling it although nothing repeats underflows",
        Scores(maxima=1, top=(105.0, 120.0)),
        (
            _SCALED_BREAKS_DOWN,
            claim(INACCURATE, f"{_OVERSHOOTS}, and overshoots", "stabilized", formats=_16_BITS, tiled=True),
        ),
        source=f"{PAPER} v1, appendix C",
    ),
}

_MAXIMA_NEAR_ZERO = {
    "repeated_zero": _tied(
        "repeated maximum exactly 0: neither branch of the fix applies",
        Scores(top=(0.0, 0.0)),
        (
            _PLAIN_IS_BIASED,
            claim(BIASED_AWAY, f"{OWN}: no branch for 0", _FIXES, "paper all_bf16"),
            *_WITHOUT_A_FIX,
        ),
    ),
    "repeated_tiny": _tied(
        "repeated maximum of 0.001 to 0.004: P-bar rounds back to 1",
        Scores(top=(0.001, 0.004)),
        (
            _PLAIN_IS_BIASED,
            claim(BIASED, _ROUNDS_BACK, _SCALED, "paper"),
            claim(BIASED_AWAY, f"{_ROUNDS_BACK}, and l with it", "stabilized_authors", "all_bf16"),
            *_WITHOUT_A_FIX,
        ),
        study=True,
        unclaimed=f"the fix in a fused kernel {_ON_THE_MARGIN}",
    ),
    "repeated_negative": _tied(
        "repeated maximum of -6 to -1: the fix's negative branch",
        Scores(top=(-6.0, -1.0)),
        (
            claim(BIASED_AWAY, f"{OWN}: line 10 of v2 as printed loses this branch", "as_printed_v2", "paper"),
            claim(BIASED, f"{PAPER} v1, appendix C: gamma close to 1", "gamma", "paper"),
            *_TIES_BREAK,
        ),
    ),
}


def _large_maxima() -> dict[str, Case]:
    """Where beta * r_m makes P-bar underflow: exp(-r_m) is subnormal in fp32 from 87.4 on and 0 from 104 on.

    The authors' code clamps the row sum 2 exp(-r_m) at 1e-10, so its output is that share of the right one. In fp16
    P-bar is 0 from 17.4 on, and so are, from 18.1 on, a row sum in fp16 and its clamp (docs/science.md).
    """
    holds = claim(UNBIASED, f"{PAPER} v2, section 4", _SCALED, "paper")
    common = claim(BIASED, f"{OWN}: one r_m is one common error of P-bar", _SCALED, "paper fused")
    coarse = claim(INACCURATE, f"{OWN}: P-bar is subnormal", _SCALED, "paper fused")
    breaks = claim(BREAKS_DOWN, f"{OWN}: 0/0", _SCALED, "paper fused", _16_BITS)
    v1_breaks = claim(BREAKS_DOWN, f"{OWN}: beta = 7 underflows from 17.4 on", "stabilized_v1", "paper", _16_BITS)
    authors = partial(claim, source=_CLAMP, rules="stabilized_authors", plans="all_bf16")
    gone = authors(shrinks(0.0, 1e-9))
    in_fp16 = partial(claim, rules=_SCALED, plans="paper fused", formats="fp16")
    lost = (
        in_fp16(shrinks(0.0, 0.0), f"{OWN}: P-bar is 0 in fp16, l in fp32 is not", tiled=False),
        in_fp16(INACCURATE, f"{OWN}: P-bar is 0 in fp16 where a tile holds both maxima", tiled=True),
    )
    flushed = in_fp16(INACCURATE_OR_BREAKS_DOWN, f"{OWN}: P-bar is 0 in fp16, l subnormal: a device may flush it")
    no_sum = claim(
        BREAKS_DOWN,
        f"{OWN}: l, and the published code's clamp of it, are 0 in fp16",
        f"{_SCALED} stabilized_authors",
        "all_bf16",
        "fp16",
    )
    rows: dict[int, tuple[float, tuple[Claim, ...]]] = {
        20: (22.0, (authors(UNBIASED, source=f"{PAPER}, published code"), *lost)),
        25: (25.0, (common, authors(shrinks(0.26, 0.30)), *lost)),
        30: (32.0, (holds, authors(shrinks(0.0002, 0.0019)), *lost)),
        60: (65.0, (holds, gone, *lost)),
        90: (92.0, (coarse, gone, flushed)),
        105: (110.0, (breaks, gone)),
        10000: (10100.0, (breaks, authors(shrinks(0.0, 1e-2)))),
    }
    unclaimed = {
        20: f"the fix {_ON_THE_MARGIN}",
        10000: "at 1e4 bf16 spaces scores by 64: where S is in bf16 every key ties, and contracted, one of three r_m"
        " decides",
    }
    plain = claim(BIASED_AWAY, f"{PAPER}, section 3.3.2", _PLAIN, "paper")
    cases = {
        f"repeated_large[r={r}]": _tied(
            f"repeated maximum of {r}" + (f" to {high:g}" if high > r else " in every row"),
            Scores(top=(float(r), high)),
            (
                plain if r == 10000 else _PLAIN_IS_BIASED,
                *(*claims, v1_breaks, no_sum),
                _FUSED_ROUNDED_FIRST_IS_NOT if r == 10000 else _FUSED_IS_NOT,
                *_WITHOUT_A_FIX[1:],
            ),
            study=r in (25, 30, 60, 90),
            chaotic=r == 90,  # whether the device flushes a subnormal P-bar decides
            unclaimed=unclaimed.get(r),
        )
        for r, (high, claims) in rows.items()
    }
    return cases | _inexact_arguments((gone, *lost, v1_breaks, no_sum), (breaks, gone, v1_breaks, no_sum))


def _inexact_arguments(at_60: tuple[Claim, ...], at_600: tuple[Claim, ...]) -> dict[str, Case]:
    """Row maxima whose product with alpha log2 e is no fp32 number, and nothing that could break a tie but that.

    Contracted, P-bar of the maxima is 2^e, e the rounding error of m c: up to half an ulp of it, 2^-22, 2^-18 and 2^-15
    here. The cast makes P-bar 1, l has it as it is, and all ties of a row break to the side of -e. Which side that is
    depends on r_m, so rows err together and heads do not. A row with one maximum has no tie: O is one row of V. What
    scaled shifts come to at repeated maxima of about 60 and 600 is given.
    """
    together = claim(ROWS_ERR_TOGETHER, f"{OWN}: m c is rounded and S c is not", "safe", "fused_contracted")
    apart = claim(ROWS_ERR_APART, f"{_COMMENTARY}: eliminating the remainder", f"{_PLAIN} lazy")
    alone = claim(ROWS_ERR_APART, f"{OWN}: O is one row of V", f"{_PLAIN} lazy standard")
    v1_lost = claim(shrinks(0.0, 0.0), f"{OWN}: exp(-6 r_m) is 0 in fp16", "stabilized_v1", formats="fp16")
    lost = claim(shrinks(0.0, 0.0), f"{OWN}: P-bar is 0 in fp16, l in fp32 is not", "always_scaled", formats="fp16")
    # The ranges hold dozens of numbers of bf16, of which half round m c up and half down: 1 % to 7 % apart.
    rows = {
        6: ((5.0, 7.75), (v1_lost,), ()),
        60: ((60.0, 85.0), at_60, (lost,)),
        600: ((520.0, 1000.0), at_600, (_SCALED_BREAKS_DOWN, _TILE_OVERSHOOTS)),
    }
    rounded = "times log2 e, which fp32 rounds, and no remainder"
    repeated, single = (
        {
            f"inexact_{kind}[r={r}]": _scripted(
                about.format(f"{r} {rounded}"),
                Scores(maxima=maxima, top=top, gap=_NO_TAIL),
                (*claims, *harm[maxima == 1]),
                study=r != 6,
                unclaimed="a shift that is moved or scaled has an error of P-bar of its own, common to a row",
            )
            for r, (top, *harm) in rows.items()
        }
        for kind, about, maxima, claims in (
            ("ties", "2 equal maxima of about {}", 2, (together, _TIES_GO_AWAY, _FAST_EXP_ERRS, apart)),
            ("single", "1 maximum of about {} (control): nothing ties", 1, (alone,)),
        )
    )
    return repeated | single


_ACROSS_BLOCKS = {
    "ties_across_blocks": _scripted(
        "2 equal maxima, each in a key block of its own: no block sees a repeat",
        Scores(positions=(17, 145)),
        (_STANDARD_IS_BIASED, *_FUSED_ROUNDS_ONCE, _DITHERED),
        shape=Shape(keys=256),
        failure=True,
    ),
    "ties_across_long_blocks": _scripted(
        "4 equal maxima of 2,048 keys, 512 apart: a library that sums P V in bf16 between blocks errs in each",
        Scores(maxima=4, positions=(100, 700, 1300, 1900)),
        (_STANDARD_IS_BIASED, *_FUSED_ROUNDS_ONCE),
        shape=Shape(keys=2048),
        failure=True,
        most_heads=64,
        study=True,
        unclaimed="O-bar in bf16 is rounded in the tile of every maximum, and each rounding has an error of its own",
    ),
    "overshooting_shift": _scripted(
        "a repeated maximum in the first block, scaled above the true maximum of the second",
        Scores(maxima=3, positions=(5, 40, 200), offsets=(0.0, 0.0, 0.5)),
        (V1_IN_FP16,),
        shape=Shape(keys=256),
        unclaimed="two maxima half below the third in every row: one common error of P-bar, of any sign",
    ),
}

# Rows whose first key block ends below the maximum, but not by so much that lazy rescaling follows it. P-bar of the
# maxima is then exp(growth), not 1. Where all rows grow alike, P-bar's rounding is one common error of O as long as l
# sums P-bar before it: bf16(e^4) = 54.5 is 1.8e-3 too small, 0.28 ulp of O.
_GROWN = (_PLAIN_IS_BIASED, _FUSED_IS_NOT, _STOCHASTIC, V1_IN_FP16, FAIR, OFFSET_HARMS)
_LAZY_RESCALING = f"{OWN}, FlashAttention-4's lazy rescaling"
_GROWING_MAXIMUM = {
    "growing_maximum": _case(
        "2 equal maxima 1 to 5 above the first block's: FlashAttention-4 keeps the old shift, and P-bar is above 1",
        partial(growing, growth=(1.0, 5.0)),
        _GROWN,
        source=_LAZY_RESCALING,
        failure=True,
    ),
    "growing_maximum[by=4]": _case(
        "the same, 4 above in every row: lazy rescaling makes one error common to all rows",
        partial(growing, growth=(4.0, 4.0)),
        (
            claim(BIASED_TOWARD, f"{OWN}: e^4 rounds down", "lazy", "paper fused fused_stochastic"),
            *_GROWN,
            _STANDARD_IS_BIASED,
        ),
        source=_LAZY_RESCALING,
        failure=True,
        gradients=True,
        study=True,
    ),
}

_SUM_UNROUNDED = f"{OWN}: P-bar rounds up to 1, what l sums does not"
_NEAR_TIES = {
    "near_tie_inside": _tied(
        "2 maxima 5e-4 apart, inside the fix's tolerance of 1e-3",
        Scores(offsets=(0.0, -(2.0**-11))),
        (
            claim(BIASED_AWAY, f"{PAPER} v2: both P-bar round to 1", f"{_PLAIN} stabilized_v1", "paper all_bf16"),
            claim(UNBIASED, f"{PAPER} v2: eps = 1e-3", "stabilized", "paper"),
            claim(BIASED_AWAY, _SUM_UNROUNDED, "safe lazy", FUSED),
            _STANDARD_IS_BIASED,
        ),
    ),
    "near_tie_outside": _tied(
        "2 maxima 1.5e-3 apart, outside the fix's tolerance: both P-bar still round to 1",
        Scores(offsets=(0.0, -(2.0**-10 + 2.0**-11))),
        (
            claim(BIASED_AWAY, f"{OWN}: the limit of eps", _SEE_NO_REPEAT, "paper all_bf16"),
            claim(BIASED_AWAY, _SUM_UNROUNDED, "safe lazy stabilized", FUSED),
            claim(BIASED_AWAY, _SUM_UNROUNDED, "safe", "fused_stochastic"),
            _STANDARD_IS_BIASED,
        ),
        study=True,
    ),
}


def _equal_keys(draw: Draw) -> AttentionInputs:
    """Duplicate tokens: two tokens share one key of random direction, so their scores tie in any arithmetic."""
    inputs = scripted(draw, Scores(positions=(0, 1)))
    q, k = inputs.q.clone(), inputs.k.clone()
    q[..., 2:] = draw.rounded(0.05 * draw.normal(*q[..., 2:].shape))
    k[:, :, 1] = k[:, :, 0]
    return replace(inputs, q=q, k=k)


def _tied_p_bar(draw: Draw) -> AttentionInputs:
    """Every other head's ties lie above neighbours with an odd last bit."""
    batch, heads = draw.batch_and_heads
    odd = (torch.arange(batch * heads) % 2 == 1).view(batch, heads)
    inputs = tied_p_bar(draw.rng, odd, draw.noise_seed())
    q, k, v = map(draw.rounded, (inputs.q, inputs.k, inputs.v))
    return AttentionInputs(q, k, v, draw.upstream(q.shape), draw.formats, noise_seed=inputs.noise_seed)


_CONTROLS = {
    "equal_keys": _case(
        "duplicate tokens: ties exact in any arithmetic",
        _equal_keys,
        (*_TIES_BREAK, _DITHERED, V1_IN_FP16, FAIR, OFFSET_HARMS),
        failure=True,
    ),
    "faint_tail": _scripted(
        "2 equal maxima, a tail of about 2^-24 of the row sum: fp32 itself rounds it away",
        Scores(gap=(20.5, 22.5)),
        (_TIES_GO_AWAY, V1_IN_FP16),
    ),
    "tied_p_bar": _case(
        "every P-bar but the maximum's is a tie in bf16: tells how a kernel casts P-bar",
        _tied_p_bar,
        (
            claim(BIASED_AWAY, f"{OWN}: ties go away from zero", plans="fused_p_bar_away fused_p_bar_o_away"),
            claim(UNBIASED, f"{OWN}: to even, half of the ties go either way", "safe", f"{FUSED} paper"),
        ),
        unclaimed="where S is in bf16 P-bar is no tie",
    ),
    "random_mixed_v": _case("normal q, k, v: O cancels", partial(normal_numbers, v_mean=0.0, v_std=1.0), cancels=True),
}


def _random(about: str, shape: Shape = SHAPE, claims: Sequence[Claim] = (), *, causal: bool = False) -> Case:
    """Normal q and k, V normal about 1: the accuracy baseline, in every shape that a kernel must take."""
    # Of 8 bits no bias is claimed, nor none: P-bar is more often just above one of so few numbers than just below.
    coarse = claim(ACCURATE, f"{OWN}: accuracy in 8 bits", plans="fused_fp8", formats=_16_BITS)
    sound = claim(UNBIASED, f"{OWN}: accuracy baseline", "safe standard dithered", formats=_16_BITS)
    moved = "a shift that is moved or scaled has an error of P-bar of its own, of 0.1 ulp and less on random scores"
    recipe = partial(normal_numbers, shape=shape, causal=causal)
    return _case(about, recipe, (*claims, coarse, sound), gradients=True, normal=True, unclaimed=moved)


# r_m is 6 in the middle where alpha = 0.3, 11 at most: what is left of P-bar is then subnormal in fp16.
_SCALED_P_BAR_IS_LOST = claim(
    INACCURATE, f"{OWN}: unconditional scaling leaves exp(-r_m) of P-bar", "always_scaled", formats="fp16"
)
_NORMAL_NUMBERS = {
    "random": _random("normal q and k, V about 1: the accuracy baseline"),
    "random_causal": _random("under a causal mask", Shape(queries=48, keys=48, d=32), causal=True),
    "random_causal_chunk": _random(
        "under a causal mask, 16 queries at the end of 100 keys",
        Shape(queries=16, keys=100, d=32),
        causal=True,
    ),
    "random_wide": _random("d = 128", Shape(d=128)),
    "random_grouped": _random("grouped-query heads, 4 to a key head", Shape(groups=4)),
    "random_odd": _random("7 queries, 100 keys, d = 40: no powers of two", Shape(queries=7, keys=100, d=40)),
    "random_scaled": _random("alpha = 0.3, no power of two", Shape(scale=0.3), (_SCALED_P_BAR_IS_LOST,)),
}


def _padded(draw: Draw, *, all_masked: bool) -> AttentionInputs:
    """Random input with a key padding mask; with `all_masked`, the first batch entry sees no key at all."""
    inputs = normal_numbers(draw)
    batch, keys = inputs.k.shape[0], inputs.k.shape[2]
    lengths = torch.from_numpy(draw.rng.integers(keys // 4, keys + 1, batch))
    visible = torch.arange(keys)[None] < lengths[:, None]
    if all_masked:
        visible[0] = False
    return replace(inputs, key_padding=visible)


def _poisoned(draw: Draw, value: float, tensor: str) -> AttentionInputs:
    """Random input with one NaN or Inf in q (its row is lost) or in v (its column is)."""
    inputs = normal_numbers(draw)
    poisoned = getattr(inputs, tensor).clone()
    poisoned[:, :, 1, 0] = value
    return replace(inputs, **{tensor: poisoned})


def _subnormal(draw: Draw) -> AttentionInputs:
    """V below the smallest normal value of the format."""
    inputs = normal_numbers(draw)
    tiny = inputs.v.abs().clamp(max=1.9) * (0.5 * inputs.formats.inputs.smallest_normal)
    return replace(inputs, v=draw.rounded(tiny))


_OF_AUTHORS = partial(claim, rules="stabilized_authors", plans="all_bf16")
_CLAMPED = _OF_AUTHORS(OUTSIDE, _CLAMP)
_TIED_BY_CAST = _OF_AUTHORS(
    breaks_down_in(0.05),
    f"{OWN}: S's cast to fp16 ties two maxima, and the clamp of l is 0 in fp16",
    formats="fp16",
)
_SHIFT_CLAMPED = _OF_AUTHORS(
    BREAKS_DOWN, f"{OWN}: the shift is clamped at 0, so l is 0, and its clamp is 0 in fp16", formats="fp16"
)
_EDGES = {
    "padded": _case("a key padding mask", partial(_padded, all_masked=False), gradients=True),
    "wholly_masked": _case("rows without a visible key give zeros", partial(_padded, all_masked=True), gradients=True),
    "low_logits": _case(
        "every score about -6e4, the first key's highest: a running maximum that starts above them stays",
        partial(scripted, scores=Scores(top=(-6.4e4, -5.2e4), maxima=1, positions=(0,))),
        (_SCALED_BREAKS_DOWN, _CLAMPED, _SHIFT_CLAMPED, _TILE_OVERSHOOTS, OFFSET_HARMS),
        unclaimed="where S is in bf16, in steps of 256 here, every key ties",
        chaotic=True,
    ),
    "huge_logits": _case(
        "scores of about 1e4: near one-hot rows",
        partial(normal_numbers, size=1e4),
        (_SCALED_BREAKS_DOWN, _CLAMPED, _TIED_BY_CAST, OFFSET_HARMS),
        unclaimed="where S is in bf16, in steps of 64 here, which key wins a row is chance",
        chaotic=True,
    ),
    "inf_in_v": _case("one Inf in V: its column is lost, no other", partial(_poisoned, value=torch.inf, tensor="v")),
    "nan_in_q": _case("a NaN in q: its row is lost, no other", partial(_poisoned, value=torch.nan, tensor="q")),
    "subnormal_v": _case(
        "V below the smallest normal value: exact, or flushed to zero",
        _subnormal,
        (
            claim(INACCURATE, f"{OWN}: scaling takes P V below the subnormals", "always_scaled", formats=_16_BITS),
            claim(FLUSHED_OR_ACCURATE, f"{OWN}: a device may flush subnormals", formats=_16_BITS),
        ),
        chaotic=True,
    ),
}

# The scripted cases by what they are about, and by name.
_GROUPS = {
    "equal maxima": _EQUAL_MAXIMA,
    "equal maxima, other values of V": _OTHER_V,
    "one maximum": _ONE_MAXIMUM,
    "maxima near zero and below it": _MAXIMA_NEAR_ZERO,
    "large maxima": _large_maxima(),
    "maxima in several key blocks": _ACROSS_BLOCKS | _GROWING_MAXIMUM,
    "maxima that differ by less than P-bar's rounding": _NEAR_TIES,
    "controls": _CONTROLS,
    "V in 8 bits": EIGHT_BITS,
    "normal numbers": _NORMAL_NUMBERS,
    "masks, NaN, Inf, subnormal and very large numbers": _EDGES,
    "what calls ask beyond softmax(Q K^T) V": FEATURE_CASES,
    "features as kernels in service have them": SERVICE,
}
#: The scripted cases by what they are about.
GROUPS: Mapping[str, tuple[Case, ...]] = {
    group: tuple(replace(case, name=name) for name, case in cases.items()) for group, cases in _GROUPS.items()
}
SCRIPTED: tuple[Case, ...] = tuple(case for group in GROUPS.values() for case in group)
