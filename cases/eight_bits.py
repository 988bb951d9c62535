"""Inputs for attention in 8 bits: V in e4m3, in which O is exact where two maxima tie.

Kernels of 16 bits take them too. What plans in 8 bits make of them is derived in docs/fewer-bits.md.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tiebreak.cases.case import Case, Draw, Recipe, Scores, growing, normal_numbers, scripted
from tiebreak.cases.claims import (
    ACCURATE,
    BIASED_TOWARD,
    FAIR,
    FUSED,
    OFFSET_HARMS,
    OWN,
    ROWS_ERR_APART,
    ROWS_ERR_TOGETHER,
    UNBIASED,
    V1_IN_FP16,
    Claim,
    claim,
    shrinks,
    within,
)
from tiebreak.kernels.formats import FP8_E4M3, Formats
from tiebreak.kernels.inputs import AttentionInputs

_COLLAPSE = "arXiv 2606.06521"
_STALE = "flash-attention #2716"
_OFFSET = "fused_fp8_offset fused_fp8_offset_4 fused_e5m2_offset fused_fp8_clamped"
_P_BAR_ALONE, _16_BITS = f"fused_fp8 {_OFFSET}", f"{FUSED} paper"
_SCALED = "fp8 fp8_hopper mxfp8 sage"

_WITHOUT_A_CLAMP = "fused_fp8 fused_fp8_offset"

_CURE = claim(UNBIASED, f"{OWN}: l sums P-bar after its cast, O is stochastic", plans="fused_fp8_fair")
# Where m is not the maximum, P-bar there is no power of two: e4m3 rounds it by up to 1/16, and l does not know.
_SHIFTED_ERRS = claim(
    ROWS_ERR_TOGETHER,
    f"{OWN}: a shift that moves makes P-bar of the maxima err, each row's by a factor of its own",
    rules="stabilized dithered",
    plans="fused_fp8_offset",
)
_WITHIN_SCALES = claim(ACCURATE, f"{OWN}: accuracy of q, K and V in 8 bits with scales", plans=_SCALED)


def _in_e4m3(draw: Draw, recipe: Recipe) -> AttentionInputs:
    inputs = recipe(draw)
    return replace(inputs, v=inputs.v.to(torch.float8_e4m3fn).float())


def _sink(draw: Draw, height: float) -> AttentionInputs:
    """Normal scores above a row's r_m, those of the first four keys `height` higher; V of the four is a 64th.

    The four never tie, in bf16 either: they lie on quarters, each a sixteenth higher than the one before.
    """
    inputs = scripted(draw, Scores(maxima=4, positions=(0, 1, 2, 3)))
    k, v = inputs.k.clone(), inputs.v.clone()
    k[..., 1] = draw.normal(*k.shape[:3])
    k[..., :4, 1] = (4 * k[..., :4, 1]).round() / 4 + height + torch.arange(4) / 16
    v[..., :4, :] /= 64.0
    return replace(inputs, k=draw.rounded(k), v=v)


def _case(about: str, recipe: Recipe, *claims: Claim, source: str = OWN, **fields: Any) -> Case:
    """A case of a recipe whose V is put into e4m3, which the table names."""
    in_e4m3 = partial(_in_e4m3, recipe=recipe)
    return Case("", about, source, in_e4m3, claims, formats=partial(Formats.of, v=FP8_E4M3), **fields)


#: The cases, in the order of tables.
EIGHT_BITS = {
    "fp8_ties": _case(
        "2 equal maxima, V in e4m3: O is exact, and nothing ties",
        scripted,
        claim(UNBIASED, f"{OWN}: 8 bits hold the sum of two numbers of 4", "safe lazy_4", f"{_16_BITS} {_P_BAR_ALONE}"),
        *(_CURE, _SHIFTED_ERRS, _WITHIN_SCALES, V1_IN_FP16, FAIR, OFFSET_HARMS),
        study=True,
    ),
    "fp8_flat_tail": _case(
        "1 maximum, 127 keys 7 to 7.5 below it, V in e4m3: each is nothing in 8 bits, together they are a tenth",
        partial(scripted, scores=Scores(maxima=1, gap=(7.0, 7.5))),
        claim(BIASED_TOWARD, f"{OWN}: P-bar below 2^-10 is 0 in e4m3, and l has it all", plans="fused_fp8"),
        claim(UNBIASED, f"{OWN}: 16 bits hold the tail", "safe", _16_BITS),
        # Of the 32 keys to a scale the largest P-bar is e^-7 = 1.87 2^-11: 478 times its scale.
        claim(BIASED_TOWARD, f"{OWN}: microscaling's scale leaves up to 512, and 448 is the most", plans="mxfp8"),
        claim(
            UNBIASED,
            f"{OWN}: 2^8 lifts the tail above what e4m3 loses",
            "safe lazy_4 stabilized",
            _OFFSET,
        ),
        *(_CURE, _SHIFTED_ERRS, _WITHIN_SCALES, FAIR, OFFSET_HARMS),
        failure=True,
        unclaimed="S in bf16 moves each of the tail by up to 1.6 %, and standard attention sits on the margin",
    ),
    # Two maxima g above the first block's, 0.7 to 2.7: less than 4 in base two, so a lazy maximum stays. Times 2^8,
    # P-bar of the two is 256 e^g, from 516 to 3809, and e4m3 ends at 448. With the one key of the first block,
    # (2 448 + 256) / (512 e^g + 256) of a row's weight is left: from 0.895 down to 0.146.
    "fp8_stale_maximum": _case(
        "2 equal maxima 0.7 to 2.7 above the first block's: where m lags P-bar reaches 3809, and e4m3 ends at 448",
        partial(growing, growth=(0.7, 2.7)),
        claim(shrinks(0.14, 0.90), f"{_STALE}: l counts what saturates", "lazy_4", "fused_fp8_offset"),
        claim(UNBIASED, f"{OWN}: P-bar of a maximum is a power of two", "safe", "fused_fp8_offset"),
        claim(ACCURATE, f"{_STALE}: 57344 is beyond its reach", "lazy_4", "fused_e5m2_offset"),
        claim(ACCURATE, "flash-attention #2717: 2^4 in the place of 2^8", "lazy_4", "fused_fp8_offset_4"),
        # 448 for each in the place of 256 e^g: their shares of a row are wrong by 0.19 at most, of V's own spread.
        claim(within(2.0), f"{OWN}: l counts what is left", "lazy_4", "fused_fp8_clamped"),
        *(_CURE, _SHIFTED_ERRS),
        claim(ACCURATE, f"{OWN}: nothing is lost that l counts", "safe stabilized dithered lazy_4", _WITHOUT_A_CLAMP),
        _WITHIN_SCALES,
        source=f"{OWN}, {_STALE}",
        failure=True,
    ),
    # Half of the other P-bar are 0 in e4m3 from a gap of 10 ln 2 + ln S - delta_k on, 5.9 where S = 1 and 11.4 where
    # S = 2^8; delta_k = 1.03 is how far the largest of four normal numbers lies above their mean (section 3.2).
    "fp8_sink_collapse": _case(
        "normal scores, those of 4 first keys 7 higher, with V near 0: most other P-bar are 0 in e4m3",
        partial(_sink, height=7.0),
        claim(BIASED_TOWARD, f"{_COLLAPSE}: P-bar collapses under a sink", plans="fused_fp8"),
        claim(ACCURATE, f"{_COLLAPSE}: 2^8 moves the threshold to 11.4", plans=_P_BAR_ALONE),
        *(_WITHIN_SCALES, FAIR, OFFSET_HARMS),
        source=_COLLAPSE,
        failure=True,
        unclaimed="a sink with V near 0 makes O of small P-bar: their casts are what O errs by",
    ),
    "fp8_random": _case(
        "normal q and k, V about 1 in e4m3: the accuracy baseline in 8 bits",
        normal_numbers,
        claim(
            ROWS_ERR_TOGETHER,
            f"{OWN}: l counts what P-bar's cast lost, or not what it added: one factor a row",
            plans=_P_BAR_ALONE,
        ),
        claim(ROWS_ERR_APART, f"{OWN}: what l counts is what P V has", plans="fused_fp8_fair"),
        _WITHIN_SCALES,
        study=True,
        unclaimed="in 16 bits as the case random has it",
    ),
}
