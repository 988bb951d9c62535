"""Cases of what calls ask beyond softmax(Q K^T) V: for each feature an input on which its rounding shows.

What ties break to is derived in docs/science.md, *What calls ask beyond softmax(Q K^T) V*. A kernel that leaves a
feature out, or is off by one key, is beyond its error bound.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tiebreak.cases.case import Case, Draw, Recipe, Scores, Shape, Values, normal_numbers, scripted
from tiebreak.cases.claims import (
    BIASED_AWAY,
    BIASED_TOWARD,
    BREAKS_DOWN,
    FUSED,
    OUTSIDE,
    OWN,
    PAPER,
    UNBIASED,
    Claim,
    claim,
)
from tiebreak.kernels.formats import FP8_E4M3
from tiebreak.kernels.inputs import AttentionInputs

_LOUD = 100.0  # of V where no row sees it
_AS_TIED = (
    claim(BIASED_AWAY, f"{PAPER}, section 3.3.2, claim 3", "safe", "paper all_bf16"),
    claim(UNBIASED, f"{OWN}: where a kernel rounds decides", "safe lazy", FUSED),
    claim(UNBIASED, f"{OWN}: stochastic rounding of O", "safe", "fused_stochastic"),
    claim(BIASED_AWAY, f"{OWN}: normalising P before its cast leaves the ties", "standard"),
)
_TIED_UNLESS_S_IS_NARROW = tuple(replace(each, plans=each.plans - {"all_bf16"}) for each in _AS_TIED)
_SOUND = claim(UNBIASED, f"{OWN}: accuracy baseline", "safe lazy standard", f"paper {FUSED} standard")
_CLAMPED = claim(OUTSIDE, f"{PAPER}, published code: the row sum's clamp at 1e-10", "stabilized_authors", "all_bf16")
_STAGNATES = claim(
    BIASED_TOWARD,
    f"{OWN}: 128 terms of -2.45 to -2.1 are 1 to 1.2 or 2.1 to 2.4 ulp of a sum in bf16, and round to 1 or 2",
    "safe",
    "paper",
)
_CAST_ONCE = claim(UNBIASED, f"{OWN}: the mean of 16,384 is cast once", "safe lazy standard", f"{FUSED} standard")


def _sink_at_maximum(draw: Draw) -> AttentionInputs:
    """Three maxima and a sink, all four logits equal in every row of a head: P-bar = 1 four times, V three times."""
    inputs = scripted(draw, Scores(maxima=3, top=(2.0, 2.0), gap=(9.0, 15.0)))
    return replace(inputs, sink=torch.full((inputs.q.shape[1],), 2.0))


def _window_cuts_tie(draw: Draw) -> AttentionInputs:
    """Two maxima; the first two of four rows see both. The key before the cut is the first maximum itself."""
    inputs = scripted(draw, Scores(positions=(40, 100)))
    return replace(inputs, causal=True, window=(124 + 1 - 40, 0))


def _block_mask_cuts(draw: Draw) -> AttentionInputs:
    """Two maxima in the first and third of four blocks; the second, hidden, has a higher one, and a loud V."""
    inputs = scripted(draw, Scores(maxima=3, positions=(10, 40, 90), offsets=(0.0, 30.0, 0.0)))
    inputs.v[:, :, 32:64] = _LOUD
    return replace(inputs, block_mask=torch.tensor([True, False, True, True])[None, None, None], block_size=(4, 32))


def _padded_maximum(draw: Draw) -> AttentionInputs:
    """Two maxima; the last 32 keys, which are padding, have one 100 above them, and a loud V."""
    inputs = scripted(draw, Scores(maxima=3, positions=(10, 50, 100), offsets=(0.0, 0.0, 100.0)))
    inputs.v[:, :, 96:] = _LOUD
    return replace(inputs, key_padding=(torch.arange(128) < 96).expand(len(inputs.q), -1))


def _single_visible_key(draw: Draw) -> AttentionInputs:
    """128 keys, of which padding leaves one: O is a row of V."""
    inputs = normal_numbers(draw)
    seen = torch.from_numpy(draw.rng.integers(0, 128, len(inputs.q)))
    return replace(inputs, key_padding=torch.arange(128)[None] == seen[:, None])


def _packed(draw: Draw) -> AttentionInputs:
    """Three sequences packed into 256 keys, two maxima each: at the ends, and 1 above those of the one before."""
    scores = Scores(
        maxima=6, gap=(9.0, 13.0), positions=(20, 95, 96, 175, 176, 255), offsets=(0.0, 0.0, 1.0, 1.0, 2.0, 2.0)
    )
    batch = scripted(draw, scores, shape=Shape(queries=6, keys=256))
    q, k, v, do = (x.flatten(0, 1)[None] for x in (batch.q, batch.k, batch.v, batch.do))
    return replace(batch, q=q, k=k, v=v, do=do, lengths=((0, 1, 4, 6), (0, 96, 176, 256)))


def _bias_makes_tie(draw: Draw) -> AttentionInputs:
    """Two keys whose scores lie 4 apart, and a bias of -4 on the higher one: the tie is there once it is added."""
    inputs = scripted(draw, Scores(positions=(30, 90), offsets=(0.0, 4.0)))
    return replace(inputs, bias=torch.where(torch.arange(128) == 90, -4.0, 0.0)[None, None, None])


def _softcap_near_ties(draw: Draw) -> AttentionInputs:
    """Scores of about 180 and 177.7, and -180 of a tail, under a cap of 30, which leaves 6e-5 between the two."""
    scores = Scores(top=(176.0, 184.0), gap=(356.0, 372.0), offsets=(0.0, -2.296875))
    return replace(scripted(draw, scores), softcap=30.0)


def _equal_keys(draw: Draw, keys: int, d: int, apart: float, jitters: int) -> AttentionInputs:
    """One query and equal keys; from one column of V to the next the mean, which is -2.45 or above, grows by `apart`.

    `jitters`: numbers that say by how much of `apart` it lies above: one a column or one a head.
    """
    q, k = draw.normal(1, draw.heads, 1, d), draw.normal(1, draw.heads, 1, d)
    means = -2.45 + apart * (torch.arange(d) + draw.uniform(0.0, 1.0, 1, draw.heads, 1, jitters))
    return draw.inputs(q, k.repeat(1, 1, keys, 1), 0.3 * draw.normal(1, draw.heads, keys, d) + means)


def _paged(draw: Draw) -> AttentionInputs:
    """100 keys in pages of 16 that lie anywhere in a pool; the last page's other keys would be seen, and be loud."""
    inputs = scripted(draw, shape=Shape(keys=100))
    batch, pages = len(inputs.q), 7
    table = draw.rng.permutation(batch * pages + 3)[: batch * pages].reshape(batch, pages)
    return replace(inputs, block_table=torch.from_numpy(table), page_size=16, pool_pages=batch * pages + 3)


def _fp8_cache(draw: Draw) -> AttentionInputs:
    """Normal numbers whose K and V are held in e4m3 with a factor for each head, as a cache has them."""
    inputs, largest = normal_numbers(draw, Shape(groups=4)), FP8_E4M3.largest
    factors = [draw.uniform(0.01, 0.03, *inputs.k.shape[:2]) for _ in range(2)]
    k, v = (
        (x / factor[..., None, None]).clamp(-largest, largest).to(torch.float8_e4m3fn).float()
        for x, factor in zip((inputs.k, inputs.v), factors, strict=True)
    )
    return replace(inputs, k=k, v=v, k_descale=factors[0], v_descale=factors[1])


def _mla(draw: Draw) -> AttentionInputs:
    """Head dimensions 192 and 128, as DeepSeek's models have them."""
    inputs = normal_numbers(draw, Shape(d=192))
    return replace(inputs, v=inputs.v[..., :128].contiguous(), do=inputs.do[..., :128].contiguous())


def _case(about: str, recipe: Recipe, *claims: Claim, **fields: Any) -> Case:
    """A case that the table names."""
    return Case("", about, OWN, recipe, claims, only_claimed=True, **fields)


FEATURE_CASES = {
    "sink_at_maximum": _case(
        "3 equal maxima and a learned sink as high: P-bar = 1 four times, V three times",
        _sink_at_maximum,
        claim(
            BIASED_AWAY,
            f"{OWN}: a sink without a V makes O smaller than every V, so what is left of the tail points away",
            "safe lazy standard",
            f"paper all_bf16 {FUSED} standard",
        ),
        failure=True,
        gradients=True,
    ),
    "window_cuts_tie": _case("a sliding window of which 2 rows of 4 see both maxima", _window_cuts_tie, *_AS_TIED),
    "block_mask_cuts": _case("a block mask that hides a higher maximum", _block_mask_cuts, *_AS_TIED),
    "padded_maximum": _case("padding that holds a maximum 100 above the others", _padded_maximum, *_AS_TIED),
    "packed_ties": _case("3 packed sequences, 2 maxima each, the next one's higher", _packed, *_AS_TIED, most_heads=64),
    "bias_makes_tie": _case("2 scores that tie by their bias", _bias_makes_tie, *_TIED_UNLESS_S_IS_NARROW),
    "paged_ties": _case("2 maxima among 100 keys in pages, poison behind the last", _paged, *_AS_TIED),
    "negative_lse": _case(
        "2 equal maxima of -120 to -100: no exp of a log-sum-exp is a number",
        partial(scripted, scores=Scores(top=(-120.0, -100.0))),
        claim(
            BREAKS_DOWN,
            f"{OWN}: where the maximum is negative these shift by 0, and every P-bar is 0",
            "stabilized stabilized_v1 always_scaled",
            "paper fused",
        ),
        *(_CLAMPED, *_AS_TIED),
        gradients=True,
    ),
    "split_tie": _case(
        "2 maxima on a sink in one split of the keys, a third in another",
        partial(
            scripted,
            scores=Scores(maxima=3, positions=(17, 40, 145)),
            values=Values(tail_mean=-0.1),
            shape=Shape(keys=256),
        ),
        claim(
            BIASED_TOWARD,
            f"{OWN}: a partial O in the inputs' format breaks its tie before the splits are put together",
            "split",
            "fused,o_bar=input",
        ),
        claim(UNBIASED, f"{OWN}: of three maxima O is no tie", "safe split", FUSED),
    ),
    "softcap_near_ties": _case(
        "a soft cap near saturation: scores 2.3 apart come to lie 6e-5 apart, and both P-bar round to 1",
        _softcap_near_ties,
        claim(BIASED_AWAY, f"{OWN}: P-bar rounds up to 1, what l sums does not", "safe lazy", FUSED),
        claim(
            UNBIASED,
            f"{OWN}: P-bar = 1 twice and no tail: an exact tie, which goes to even",
            "safe standard",
            "paper all_bf16 standard",
        ),
        _CLAMPED,
    ),
    "decode_equal_keys": _case(
        "1 query and 16,384 equal keys: a sum in the inputs' format stagnates",
        partial(_equal_keys, keys=16384, d=64, apart=0.35 / 64, jitters=64),
        *(_STAGNATES, _CAST_ONCE),
        most_heads=16,
        study=True,
    ),
    "decode_64k": _case(
        "1 query and 65,536 equal keys",
        partial(_equal_keys, keys=65536, d=16, apart=21 / 16 * 2.0**-6, jitters=1),
        *(_STAGNATES, _CAST_ONCE),
        most_heads=8,
        on_request=True,
    ),
    "single_visible_key": _case("1 visible key among 128: O is a row of V", _single_visible_key, _SOUND),
    "fp8_cache": _case("K and V held in e4m3 with descale factors", _fp8_cache, _SOUND),
    "value_dim": _case("q and K with d = 192, V with 128", _mla, _SOUND, gradients=True),
}
