"""Cases of what calls ask beyond softmax(Q K^T) V: for each feature an input on which its rounding shows.

What ties break to is derived in docs/science.md, *What calls ask beyond softmax(Q K^T) V*. A kernel that leaves a
feature out, or is off by one key, is beyond its error bound.

`SERVICE` asks users' kernels that take them for the same features, alone and in pairs, on normal numbers, with
parameters that differ by head, sequence and row: where all are alike, a kernel may take those of the first for all.

A feature is also added to other cases: `--features window,sink,window+sink` makes three of each, one of them
`no_tail+window+sink`. What the case is about stays: a window or a block mask hides the keys that weigh least, a sink
lies far below, pages hold the same keys. So a claim about tied maxima stays too, of rules that do not scale a shift.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tiebreak.cases.case import (
    HEADS_PER_BATCH,
    JOINED,
    OWN,
    Case,
    Draw,
    Recipe,
    Scores,
    Shape,
    Values,
    normal_numbers,
    scripted,
)
from tiebreak.cases.scripted import SCRIPTED, named
from tiebreak.kernels.features import (
    ALIBI,
    BIAS,
    BLOCK_MASK,
    CAPPED_BIAS,
    CAUSAL,
    DESCALE,
    FEATURES,
    GROUPED,
    HIDDEN_NAN,
    KEY_PADDING,
    LENGTHS,
    OWN_ENDS,
    OWN_SCALE,
    PAGES,
    SINK,
    SOFTCAP,
    VALUE_DIM,
    WINDOW,
    Feature,
)
from tiebreak.kernels.formats import FP8_E4M3
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.reference import products

_LOUD = 100.0  # of V where no row sees it


def _sink_at_maximum(draw: Draw) -> AttentionInputs:
    inputs = scripted(draw, Scores(maxima=3, top=(2.0, 2.0), gap=(9.0, 15.0)))
    return replace(inputs, sink=torch.full((inputs.q.shape[1],), 2.0))


def _window_cuts_tie(draw: Draw) -> AttentionInputs:
    """Draw two maxima; the first two of four rows see both. The key before the cut is the first maximum itself."""
    inputs = scripted(draw, Scores(positions=(40, 100)))
    return replace(inputs, causal=True, window=(124 + 1 - 40, 0))


def _block_mask_cuts(draw: Draw) -> AttentionInputs:
    """Draw two maxima in the first and third of four blocks; the second, hidden, has a higher one, and a loud V."""
    inputs = scripted(draw, Scores(maxima=3, positions=(10, 40, 90), offsets=(0.0, 30.0, 0.0)))
    inputs.v[:, :, 32:64] = _LOUD
    return replace(inputs, block_mask=torch.tensor([True, False, True, True])[None, None, None], block_size=(4, 32))


def _padded_maximum(draw: Draw) -> AttentionInputs:
    """Draw two maxima; the last 32 keys, which are padding, have one 100 above them, and a loud V."""
    inputs = scripted(draw, Scores(maxima=3, positions=(10, 50, 100), offsets=(0.0, 0.0, 100.0)))
    inputs.v[:, :, 96:] = _LOUD
    return replace(inputs, key_padding=(torch.arange(128) < 96).expand(len(inputs.q), -1))


def _single_visible_key(draw: Draw) -> AttentionInputs:
    inputs = normal_numbers(draw)
    seen = torch.from_numpy(draw.rng.integers(0, 128, len(inputs.q)))
    return replace(inputs, key_padding=torch.arange(128)[None] == seen[:, None])


def _packed(draw: Draw) -> AttentionInputs:
    """Pack three sequences into 256 keys, two maxima each: at the ends, and 1 above those of the one before."""
    scores = Scores(
        maxima=6, gap=(9.0, 13.0), positions=(20, 95, 96, 175, 176, 255), offsets=(0.0, 0.0, 1.0, 1.0, 2.0, 2.0)
    )
    batch = scripted(draw, scores, shape=Shape(queries=6, keys=256))
    q, k, v, do = (x.flatten(0, 1)[None] for x in (batch.q, batch.k, batch.v, batch.do))
    return replace(batch, q=q, k=k, v=v, do=do, lengths=((0, 1, 4, 6), (0, 96, 176, 256)))


def _bias_makes_tie(draw: Draw) -> AttentionInputs:
    """Draw two keys whose scores differ by 4, and a bias of -4 on the higher one, which makes the tie."""
    inputs = scripted(draw, Scores(positions=(30, 90), offsets=(0.0, 4.0)))
    return replace(inputs, bias=torch.where(torch.arange(128) == 90, -4.0, 0.0)[None, None, None])


def _softcap_near_ties(draw: Draw) -> AttentionInputs:
    """Draw scores of about 180 and 177.7, and -180 of a tail, under a cap of 30, which makes them 6e-5 apart."""
    scores = Scores(top=(176.0, 184.0), gap=(356.0, 372.0), offsets=(0.0, -2.296875))
    return replace(scripted(draw, scores), softcap=30.0)


def _equal_keys(draw: Draw, keys: int, d: int, apart: float, jitters: int) -> AttentionInputs:
    """Draw one query and equal keys; the mean, at least -2.45, grows by `apart` from one column of V to the next.

    `jitters` are shares of `apart` that are added: one for each column or for each head.
    """
    q, k = draw.normal(1, draw.heads, 1, d), draw.normal(1, draw.heads, 1, d)
    means = -2.45 + apart * (torch.arange(d) + draw.uniform(0.0, 1.0, 1, draw.heads, 1, jitters))
    return draw.inputs(q, k.repeat(1, 1, keys, 1), 0.3 * draw.normal(1, draw.heads, keys, d) + means)


def _paged(draw: Draw) -> AttentionInputs:
    """Draw 100 keys in pages of 16 anywhere in a pool; the last page's other keys would be seen, and be loud."""
    return in_pages(scripted(draw, shape=Shape(keys=100)), draw)


def in_pages(inputs: AttentionInputs, draw: Draw, keys: int = 16) -> AttentionInputs:
    """Place keys in pages of so many, anywhere in a pool with three to spare."""
    pages = -(-inputs.k.shape[2] // keys)
    pool = len(inputs.q) * pages + 3
    table = torch.from_numpy(draw.rng.permutation(pool)[: pool - 3].reshape(-1, pages))
    return replace(inputs, block_table=table, page_size=keys, pool_pages=pool)


def _fp8_cache(draw: Draw) -> AttentionInputs:
    inputs = normal_numbers(draw, Shape(groups=4))
    return _e4m3(inputs, *(draw.uniform(0.01, 0.03, *inputs.k.shape[:2]) for _ in range(2)))


def _e4m3(inputs: AttentionInputs, k_descale: Tensor, v_descale: Tensor) -> AttentionInputs:
    """Return K and V in e4m3, with these factors, (batch, key heads)."""
    k, v = (
        (x / factors[..., None, None]).clamp(-FP8_E4M3.largest, FP8_E4M3.largest).to(torch.float8_e4m3fn).float()
        for x, factors in ((inputs.k, k_descale), (inputs.v, v_descale))
    )
    return replace(inputs, k=k, v=v, k_descale=k_descale, v_descale=v_descale)


def _mla(draw: Draw) -> AttentionInputs:
    """Draw head dimensions 192 and 128, as DeepSeek's models have them."""
    inputs = normal_numbers(draw, Shape(d=192))
    return replace(inputs, v=inputs.v[..., :128].contiguous(), do=inputs.do[..., :128].contiguous())


def _case(about: str, recipe: Recipe, **fields: Any) -> Case:
    return Case("", about, OWN, recipe, only_claimed=True, **fields)


FEATURE_CASES = {
    "sink_at_maximum": _case(
        "3 equal maxima and a learned sink as high: P-bar = 1 four times, V three times",
        _sink_at_maximum,
        failure=True,
        gradients=True,
    ),
    "window_cuts_tie": _case("a sliding window of which 2 rows of 4 see both maxima", _window_cuts_tie),
    "block_mask_cuts": _case("a block mask that hides a higher maximum", _block_mask_cuts),
    "padded_maximum": _case("padding that holds a maximum 100 above the others", _padded_maximum),
    "packed_ties": _case("3 packed sequences, 2 maxima each, the next one's higher", _packed, most_heads=64),
    "bias_makes_tie": _case("2 scores that tie by their bias", _bias_makes_tie),
    "paged_ties": _case("2 maxima among 100 keys in pages, poison behind the last", _paged),
    "negative_lse": _case(
        "2 equal maxima of -120 to -100: no exp of a log-sum-exp is a number",
        partial(scripted, scores=Scores(top=(-120.0, -100.0))),
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
    ),
    "softcap_near_ties": _case(
        "a soft cap near saturation: scores 2.3 apart come to lie 6e-5 apart, and both P-bar round to 1",
        _softcap_near_ties,
    ),
    "decode_equal_keys": _case(
        "1 query and 16,384 equal keys: a sum in the inputs' format stagnates",
        partial(_equal_keys, keys=16384, d=64, apart=0.35 / 64, jitters=64),
        most_heads=16,
        study=True,
    ),
    "decode_64k": _case(
        "1 query and 65,536 equal keys",
        partial(_equal_keys, keys=65536, d=16, apart=21 / 16 * 2.0**-6, jitters=1),
        most_heads=8,
        on_request=True,
    ),
    "single_visible_key": _case("1 visible key among 128: O is a row of V", _single_visible_key),
    "fp8_cache": _case("K and V held in e4m3 with descale factors", _fp8_cache),
    "value_dim": _case("q and K with d = 192, V with 128", _mla, gradients=True),
}

_SEQUENCES = (1, 37, 65)  # keys: one, a prime, and one more than a tile; the last sequence has what is left
_POISON = 3e4  # where no key lies: what a kernel that reads it must not add up


def _lengths_of(last: int, draw: Draw) -> list[int]:
    """Return lengths of four sequences, the last one's given; a batch begins with another of them."""
    lengths, first = [*_SEQUENCES, last], draw.batch % 4
    return lengths[first:] + lengths[:first]


def _grouped(inputs: AttentionInputs, _: Draw) -> AttentionInputs:
    """Share a key head between two query heads; between all of an odd number."""
    step = inputs.q.shape[1] if inputs.q.shape[1] % 2 else 2
    return replace(inputs, k=inputs.k[:, ::step], v=inputs.v[:, ::step])


def _values_cut(inputs: AttentionInputs, _: object) -> AttentionInputs:
    """Keep half of the columns of V."""
    half = inputs.v.shape[3] // 2
    return replace(inputs, v=inputs.v[..., :half].contiguous(), do=inputs.do[..., :half].contiguous())


def _other_lengths(inputs: AttentionInputs, draw: Draw) -> AttentionInputs:
    """Pack sequences of other lengths, whose heads are those of all entries of the batch."""
    q, k, v, do = (x.flatten(0, 1)[None] for x in (inputs.q, inputs.k, inputs.v, inputs.do))
    begins = (0, *accumulate(_lengths_of(q.shape[2] - sum(_SEQUENCES), draw)))
    return replace(inputs, q=q, k=k, v=v, do=do, lengths=(begins, begins))


def _other_keys(inputs: AttentionInputs, draw: Draw) -> AttentionInputs:
    """Append keys to every sequence, each of another length."""
    lengths = torch.tensor(_lengths_of(inputs.k.shape[2], draw)[-len(inputs.k) :])
    return replace(inputs, key_padding=torch.arange(inputs.k.shape[2]) < lengths[:, None])


def _own_ends(inputs: AttentionInputs, _: Draw) -> AttentionInputs:
    """Align causal rows with the end of every sequence, which has at least as many keys."""
    assert inputs.key_padding is not None
    rows = torch.arange(inputs.k.shape[2]) < inputs.q.shape[2]
    return replace(inputs, causal=True, own_ends=True, key_padding=inputs.key_padding | rows)


def slopes(draw: Draw, *shape: int) -> Tensor:
    """Draw slopes of ALiBi that no format of 16 bits holds, and whose products with 256 keys are exact."""
    slope = (2.0 ** -draw.uniform(1.0, 9.0, *shape)).float()
    return (slope.view(torch.int32) & -(2**8)).view(torch.float32)  # 16 bits: some heads see far


def _both_sides(inputs: AttentionInputs, draw: Draw) -> AttentionInputs:
    """Add a window whose edges cross every tile, and which has a right side where no causal mask is."""
    more = 8 * (draw.batch % 2)
    return replace(inputs, window=(37 + more, 0) if inputs.causal else (23 + more, 9))


def _other_blocks(inputs: AttentionInputs, draw: Draw) -> AttentionInputs:
    """Add blocks that differ between heads; all heads see the diagonal's."""
    batch, heads, blocks = *inputs.q.shape[:2], -(-inputs.k.shape[2] // 64)
    seen = draw.uniform(0.0, 1.0, batch, heads, blocks, blocks) < 0.5
    return replace(inputs, block_mask=seen | torch.eye(blocks, dtype=torch.bool), block_size=(64, 64))


def _other_pages(inputs: AttentionInputs, draw: Draw) -> AttentionInputs:
    """Place keys in pages of a pool that holds large numbers elsewhere."""
    return replace(in_pages(inputs, draw), poison=inputs.poison if inputs.is_rescaled else _POISON)


#: How a feature comes into a call of kernels in service, in the order in which it does; what is not drawn differs by
#: the batch: two draws of batches 0 and 1 never ask for the same.
VARIED: Mapping[Feature, Callable[[AttentionInputs, Draw], AttentionInputs]] = {
    GROUPED: _grouped,
    VALUE_DIM: _values_cut,
    CAUSAL: lambda inputs, draw: replace(inputs, causal=draw.batch % 2 > 0),
    OWN_SCALE: lambda inputs, draw: replace(inputs, softmax_scale=0.25 / 4 ** (draw.batch % 2)),
    # Factors of every sequence and key head, K's other than V's.
    DESCALE: lambda inputs, draw: _e4m3(inputs, *(draw.uniform(x, 3 * x, *inputs.k.shape[:2]) for x in (0.01, 0.003))),
    LENGTHS: _other_lengths,
    KEY_PADDING: _other_keys,
    OWN_ENDS: _own_ends,
    WINDOW: _both_sides,
    BLOCK_MASK: _other_blocks,
    BIAS: lambda inputs, draw: replace(inputs, bias=draw.rounded(draw.normal(*inputs.q.shape[:3], inputs.k.shape[2]))),
    ALIBI: lambda inputs, draw: replace(inputs, alibi=slopes(draw, inputs.q.shape[1])),
    # Large enough to show in scores of about 1, and more in their gradients.
    SOFTCAP: lambda inputs, draw: replace(inputs, softcap=2.0 / (1 + draw.batch % 2)),
    CAPPED_BIAS: lambda inputs, _: replace(inputs, capped_bias=True),
    # A logit of every head's own, about as large as a row's log-sum-exp.
    SINK: lambda inputs, draw: replace(inputs, sink=(4.0 + 2.0 * draw.normal(inputs.q.shape[1])).bfloat16().float()),
    PAGES: _other_pages,
    HIDDEN_NAN: lambda inputs, _: replace(inputs, poison=torch.nan),  # where no key lies
}
#: Features that kernels in service combine: those with gradients, and those that read a cache.
_TRAINED = (
    *("lengths", "window", "block_mask", "bias", "softcap", "sink", "window.sink", "window.softcap", "window.lengths"),
    *("window.gqa", "window.bias", "sink.softcap", "sink.lengths", "sink.gqa", "softcap.lengths", "softcap.bias"),
    *("softcap.gqa", "lengths.gqa", "lengths.value_dim", "bias.padding", "bias.gqa", "block_mask.gqa"),
    *("alibi", "alibi.lengths", "alibi.gqa", "softcap.bias.capped_bias"),
)
_CACHED = (
    *("pages", "pages.padding", "pages.padding.hidden_nan", "pages.gqa", "pages.softcap", "pages.sink", "pages.window"),
    *("pages.descale", "descale", "descale.gqa", "padding.own_ends", "pages.padding.own_ends"),
)


def _in_service(draw: Draw, needs: frozenset[Feature], shape: Shape, causal: bool) -> AttentionInputs:
    """Draw normal numbers in four sequences, with some features."""
    inputs = normal_numbers(draw, shape, causal=causal)
    if draw.heads == HEADS_PER_BATCH:
        q, k, v, do = (x.reshape(4, -1, *x.shape[2:]) for x in (inputs.q, inputs.k, inputs.v, inputs.do))
        inputs = replace(inputs, q=q, k=k, v=v, do=do)
    for feature, vary in VARIED.items():
        inputs = vary(inputs, draw) if feature in needs else inputs
    return inputs


def _service(name: str, words: Sequence[str], about: str, shape: Shape, *, causal: bool = False) -> dict[str, Case]:
    cases, by_word = {}, {feature.taken: feature for feature in FEATURES}
    for joined in words:
        needs = frozenset(by_word[word] for word in joined.split("."))
        trains = all(feature.trains for feature in needs)
        cases[f"{name}[{joined}]"] = Case(
            "",
            f"{joined.replace('.', ', ')}: {about}",
            OWN,
            partial(_in_service, needs=needs, shape=shape, causal=causal),
            gradients=trains,
            normal=True,
            most_heads=HEADS_PER_BATCH,
            needs=needs,
            revision=2,
        )
    return cases


#: One size is no multiple of a tile, the other is one of several, and rows are more than a tile has.
SERVICE = (
    _service("served", _TRAINED, "other parameters by head, sequence and row, 163 rows", Shape(163, 163))
    | _service("served_causal", _TRAINED, "the same, 192 rows under a causal mask", Shape(192, 192), causal=True)
    | _service("cached", _CACHED, "other lengths, pages and factors by sequence and head", Shape(4, 163))
)

_RULES = frozenset({"safe", "as_printed_v1", "lazy", "dithered", "standard"})  # none scales a maximum


def _lengths(inputs: AttentionInputs, _: float | None) -> AttentionInputs:
    """Make the first entries of a batch, four at most, sequences of one."""
    few = inputs.part(slice(4))
    batch, queries, keys = len(few.q), few.q.shape[2], few.k.shape[2]
    q, k, v, do = (x.transpose(0, 1).flatten(1, 2)[None] for x in (few.q, few.k, few.v, few.do))
    ends = tuple(range(0, batch * queries + 1, queries)), tuple(range(0, batch * keys + 1, keys))
    padding = None if few.key_padding is None else few.key_padding.flatten()[None]
    return replace(few, q=q, k=k, v=v, do=do, key_padding=padding, lengths=ends)


def _padding(inputs: AttentionInputs, _: float | None) -> AttentionInputs:
    """Pad an eighth to a half of the keys, at the end, by sequence."""
    batch, keys = len(inputs.k), inputs.k.shape[2]
    ends = keys - (1 + torch.arange(batch) % 4) * keys // 8
    return replace(inputs, key_padding=torch.arange(keys) < ends[:, None])


def _weakest_first(inputs: AttentionInputs, weakest: int) -> AttentionInputs:
    """Move the keys that weigh least in any row of a head before all others, where only their order changes."""
    if inputs.masks() or inputs.added is not None:
        return inputs
    s = products(inputs)
    weight = (s - s.amax(-1, keepdim=True)).amax(2)
    of_groups = weight.reshape(len(s), inputs.k.shape[1], -1, s.shape[-1]).amax(2)
    first = torch.ones_like(of_groups, dtype=torch.bool).scatter_(2, of_groups.argsort(-1)[..., :weakest], False)
    order = first.int().argsort(dim=-1, stable=True)[..., None]
    k, v = (x.gather(2, order.expand_as(x)) for x in (inputs.k, inputs.v))
    return replace(inputs, k=k, v=v)


def _window(inputs: AttentionInputs, left: float | None) -> AttentionInputs:
    """Hide the weakest quarter of the keys with a window."""
    keys = inputs.k.shape[2]
    left = keys - keys // 4 - 1 if left is None else left
    return replace(_weakest_first(inputs, max(0, keys - int(left) - 1)), window=(int(left), None))


def _block_mask(inputs: AttentionInputs, _: float | None) -> AttentionInputs:
    """Hide the block with the weakest quarter of the keys, where no row can lose its only keys by that."""
    keys = max(1, inputs.k.shape[2] // 4)
    blocks = -(-inputs.q.shape[2] // 64), -(-inputs.k.shape[2] // keys)
    mask = torch.ones(1, 1, *blocks, dtype=torch.bool)
    mask[..., 0] = bool(inputs.masks())
    return replace(_weakest_first(inputs, keys), block_mask=mask, block_size=(64, keys))


def _bias(inputs: AttentionInputs, _: float | None) -> AttentionInputs:
    """Add one number a head, which softmax does not see."""
    heads = inputs.q.shape[1]
    return replace(inputs, bias=-0.5 * (1.0 + torch.arange(heads) % 4)[None, :, None, None])


def _usual_slopes(inputs: AttentionInputs) -> Tensor:
    return 0.5 ** (1.0 + torch.arange(inputs.q.shape[1]) % 8)


def _sink(inputs: AttentionInputs, below: float | None) -> AttentionInputs:
    """Add a sink `below` the lowest maximum of a head's rows, rounded to the inputs' format."""
    s = products(inputs) if inputs.added is None else products(inputs) + inputs.added
    top = inputs.visible(s).amax(-1)
    lowest = top.masked_fill(top == -torch.inf, torch.inf).amin((0, 2)).nan_to_num(nan=0.0, posinf=0.0)
    sink = lowest - (24.0 if below is None else below)
    return replace(inputs, sink=sink.to(torch.bfloat16).float())


def _pages(inputs: AttentionInputs, size: float | None) -> AttentionInputs:
    """Place keys in pages of 16 in the reverse order, in a pool with one to spare."""
    keys = 16 if size is None else int(size)
    pages = -(-inputs.k.shape[2] // max(1, keys))
    table = torch.arange(len(inputs.q) * pages, 0, -1).reshape(len(inputs.q), pages)
    return replace(inputs, block_table=table, page_size=keys, pool_pages=len(inputs.q) * pages + 1)


@dataclass(frozen=True)
class _Added:
    """A feature, and the way in which it is added to inputs."""

    feature: Feature
    add: Callable[[AttentionInputs, float | None], AttentionInputs]  # with a value of one's own; None: the usual one
    value: str = ""  # what a value of one's own is, such as `softcap=30`; empty: it takes none
    claims_stay: bool = True  # whether tied maxima tie, and break, as they did


#: By their word in `takes`, in the order in which they are added.
_ADDED: Mapping[str, _Added] = {
    added.feature.taken: added
    for added in (
        _Added(VALUE_DIM, _values_cut),
        _Added(KEY_PADDING, _padding, claims_stay=False),  # which may hide a maximum
        _Added(LENGTHS, _lengths, claims_stay=False),  # of fewer heads
        _Added(WINDOW, _window, "keys before a row's own"),
        _Added(BLOCK_MASK, _block_mask),
        _Added(BIAS, _bias),
        _Added(ALIBI, lambda inputs, _: replace(inputs, alibi=_usual_slopes(inputs)), claims_stay=False),
        # 50 is Gemma 2's.
        _Added(SOFTCAP, lambda inputs, cap: replace(inputs, softcap=50.0 if cap is None else cap), "the cap"),
        _Added(SINK, _sink, "how far below the row's maximum"),
        # With a factor of 1/4. V of 4 bits ties otherwise.
        _Added(
            DESCALE, lambda inputs, _: _e4m3(inputs, *torch.full((2, *inputs.k.shape[:2]), 0.25)), claims_stay=False
        ),
        _Added(PAGES, _pages, "keys of a page"),
    )
}
ADDED = tuple(_ADDED)


def added_features(words: Sequence[str]) -> dict[Feature, float | None]:
    """Return features to add together, in the order in which they are added, each with its value if given.

    The words are those of a kernel's `takes`, perhaps with a value after `=`; ValueError: one is wrong.
    """
    values: dict[str, float | None] = {}
    for word in words:
        name, given, text = word.partition("=")
        if name not in _ADDED:
            raise ValueError(f"unknown feature {name!r}: known are {', '.join(ADDED)}; + joins several")
        if given and not _ADDED[name].value:
            raise ValueError(f"{word}: {name} takes no value")
        try:
            values[name] = float(text) if given else None
        except ValueError:
            raise ValueError(f"{word}: expected {name}=NUMBER, {_ADDED[name].value}") from None
    return {added.feature: values[name] for name, added in _ADDED.items() if name in values}


def with_features(case: Case, words: Sequence[str]) -> Case:
    """Return a case with further features, as `added_features` takes them; one that it has already is unchanged."""
    features = added_features(words)
    stay = _scripts_ties(case.recipe) and all(
        value is None and _ADDED[feature.taken].claims_stay for feature, value in features.items()
    )
    kept = (replace(claim, rules=claim.rules & _RULES) for claim in case.claims if claim.rules & _RULES)
    return replace(
        case,
        name=JOINED.join([case.name, *words]),
        about=f"{case.about}; with {', '.join(words)}",
        recipe=partial(_made, recipe=case.recipe, features=features),
        claims=tuple(kept) if stay else (),
        only_claimed=False,
        traced=False,
        family=None,
        unclaimed=None,
    )


def _made(draw: Draw, recipe: Recipe, features: Mapping[Feature, float | None]) -> AttentionInputs:
    inputs = recipe(draw)
    for feature, value in features.items():
        if feature not in inputs.required_features():
            inputs = _ADDED[feature.taken].add(inputs, value)
    return inputs


def _scripts_ties(recipe: Recipe) -> bool:
    """Return whether a recipe scripts rows of maxima, low enough for a cap to spare, above a tail that counts."""
    if not isinstance(recipe, partial) or recipe.func is not scripted:
        return False
    scores: Scores = recipe.keywords["scores"]
    anywhere = not scores.offsets and scores.positions is None
    return anywhere and 0.0 < scores.top[0] < scores.top[1] <= 8.0 and scores.gap[1] <= 30.0


#: The cases of features, and with them all that are scripted.
FEATURED = named(
    {
        "what calls ask beyond softmax(Q K^T) V": FEATURE_CASES,
        "features as kernels in service have them": SERVICE,
    }
)
EVERY = (*SCRIPTED, *FEATURED)
