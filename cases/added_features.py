"""Features added to cases: `--features window,sink,window+sink` makes three of each, one of them `no_tail+window+sink`.

Each is added so that what the case is about stays: a window or a block mask hides the keys that weigh least, a sink
lies far below, pages hold the same keys. So a claim about tied maxima stays too, of rules that do not scale a shift.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from tiebreak.cases.case import JOINED, Case, Draw, Recipe, Scores, scripted
from tiebreak.kernels.features import (
    BIAS,
    BLOCK_MASK,
    DESCALE,
    LENGTHS,
    PAGES,
    SINK,
    SOFTCAP,
    VALUE_DIM,
    WINDOW,
    Feature,
)
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.reference import products

_RULES = frozenset({"safe", "as_printed_v1", "lazy", "dithered", "standard"})  # none scales a maximum


def _value_dim(inputs: AttentionInputs, _: float | None) -> AttentionInputs:
    """Half as many columns of V."""
    half = inputs.v.shape[3] // 2
    return replace(inputs, v=inputs.v[..., :half].contiguous(), do=inputs.do[..., :half].contiguous())


def _lengths(inputs: AttentionInputs, _: float | None) -> AttentionInputs:
    """The first entries of a batch, four at most, as sequences of one."""
    few = inputs.part(slice(4))
    batch, queries, keys = len(few.q), few.q.shape[2], few.k.shape[2]
    q, k, v, do = (x.transpose(0, 1).flatten(1, 2)[None] for x in (few.q, few.k, few.v, few.do))
    ends = tuple(range(0, batch * queries + 1, queries)), tuple(range(0, batch * keys + 1, keys))
    padding = None if few.key_padding is None else few.key_padding.flatten()[None]
    return replace(few, q=q, k=k, v=v, do=do, key_padding=padding, lengths=ends)


def _weakest_first(inputs: AttentionInputs, weakest: int) -> AttentionInputs:
    """The keys that weigh least in any row of a head before all others, where their order is all that this changes."""
    if inputs.masks() or inputs.bias is not None:
        return inputs
    s = products(inputs)
    weight = (s - s.amax(-1, keepdim=True)).amax(2)
    of_groups = weight.reshape(len(s), inputs.k.shape[1], -1, s.shape[-1]).amax(2)
    first = torch.ones_like(of_groups, dtype=torch.bool).scatter_(2, of_groups.argsort(-1)[..., :weakest], False)
    order = first.int().argsort(dim=-1, stable=True)[..., None]
    k, v = (x.gather(2, order.expand_as(x)) for x in (inputs.k, inputs.v))
    return replace(inputs, k=k, v=v)


def _window(inputs: AttentionInputs, left: float | None) -> AttentionInputs:
    """All keys but the weakest quarter."""
    keys = inputs.k.shape[2]
    left = keys - keys // 4 - 1 if left is None else left
    return replace(_weakest_first(inputs, max(0, keys - int(left) - 1)), window=(int(left), None))


def _block_mask(inputs: AttentionInputs, _: float | None) -> AttentionInputs:
    """All blocks but the one of the weakest quarter of the keys, where no row can lose its only keys by that."""
    keys = max(1, inputs.k.shape[2] // 4)
    blocks = -(-inputs.q.shape[2] // 64), -(-inputs.k.shape[2] // keys)
    mask = torch.ones(1, 1, *blocks, dtype=torch.bool)
    mask[..., 0] = bool(inputs.masks())
    return replace(_weakest_first(inputs, keys), block_mask=mask, block_size=(64, keys))


def _bias(inputs: AttentionInputs, _: float | None) -> AttentionInputs:
    """One number a head, which softmax does not see."""
    heads = inputs.q.shape[1]
    return replace(inputs, bias=-0.5 * (1.0 + torch.arange(heads) % 4)[None, :, None, None])


def _softcap(inputs: AttentionInputs, cap: float | None) -> AttentionInputs:
    """That of Gemma 2."""
    return replace(inputs, softcap=50.0 if cap is None else cap)


def _sink(inputs: AttentionInputs, below: float | None) -> AttentionInputs:
    """So far below the lowest maximum of a head's rows, 24 unless said, rounded to the inputs' format."""
    s = products(inputs) if inputs.bias is None else products(inputs) + inputs.bias
    hidden = inputs.hidden()
    top = (s if hidden is None else s.masked_fill(hidden, -torch.inf)).amax(-1)
    lowest = top.masked_fill(top == -torch.inf, torch.inf).amin((0, 2)).nan_to_num(nan=0.0, posinf=0.0)
    sink = lowest - (24.0 if below is None else below)
    return replace(inputs, sink=sink.to(torch.bfloat16).float())


def _descaled(inputs: AttentionInputs, _: float | None) -> AttentionInputs:
    """K and V in e4m3, with a factor of 1/4."""
    quarter = torch.full(inputs.k.shape[:2], 0.25)
    k, v = ((4.0 * x).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float() for x in (inputs.k, inputs.v))
    return replace(inputs, k=k, v=v, k_descale=quarter, v_descale=quarter.clone())


def _pages(inputs: AttentionInputs, size: float | None) -> AttentionInputs:
    """Pages of 16 keys in the reverse order, in a pool with one to spare."""
    keys = 16 if size is None else int(size)
    pages = -(-inputs.k.shape[2] // max(1, keys))
    table = torch.arange(len(inputs.q) * pages, 0, -1).reshape(len(inputs.q), pages)
    return replace(inputs, block_table=table, page_size=keys, pool_pages=len(inputs.q) * pages + 1)


@dataclass(frozen=True)
class _Added:
    """How a feature comes into inputs."""

    feature: Feature
    add: Callable[[AttentionInputs, float | None], AttentionInputs]  # with a value of one's own; None: the usual one
    value: str = ""  # what a value of one's own is, such as `softcap=30`; empty: it takes none
    claims_stay: bool = True  # whether tied maxima tie, and break, as they did


#: By the word that `takes` has for them, in the order in which they are added.
_ADDED: Mapping[str, _Added] = {
    added.feature.taken: added
    for added in (
        _Added(VALUE_DIM, _value_dim),
        _Added(LENGTHS, _lengths, claims_stay=False),  # of fewer heads
        _Added(WINDOW, _window, "keys before a row's own"),
        _Added(BLOCK_MASK, _block_mask),
        _Added(BIAS, _bias),
        _Added(SOFTCAP, _softcap, "the cap"),
        _Added(SINK, _sink, "how far below the row's maximum"),
        _Added(DESCALE, _descaled, claims_stay=False),  # V of 4 bits ties otherwise
        _Added(PAGES, _pages, "keys of a page"),
    )
}
ADDED = tuple(_ADDED)


def added_features(words: Sequence[str]) -> dict[Feature, float | None]:
    """Features that are added together, each with its value, if it was given one, in the order in which they are added.

    Args:
        words: by which `takes` of a kernel calls them, and perhaps a value behind `=`; ValueError: one makes no sense.
    """
    asked: dict[str, float | None] = {}
    for word in words:
        name, given, text = word.partition("=")
        if name not in _ADDED:
            raise ValueError(f"unknown feature {name!r}: known are {', '.join(ADDED)}; + joins several")
        if given and not _ADDED[name].value:
            raise ValueError(f"{word}: {name} takes no value")
        try:
            asked[name] = float(text) if given else None
        except ValueError:
            raise ValueError(f"{word}: expected {name}=NUMBER, {_ADDED[name].value}") from None
    return {added.feature: asked[name] for name, added in _ADDED.items() if name in asked}


def with_features(case: Case, words: Sequence[str]) -> Case:
    """A case with further features, as `added_features` takes them; one that it has already stays as it is."""
    features = added_features(words)
    stay = _tied(case.recipe) and all(
        value is None and _ADDED[feature.taken].claims_stay for feature, value in features.items()
    )
    kept = (replace(each, rules=each.rules & _RULES) for each in case.claims if each.rules & _RULES)
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
        if feature not in inputs.asks():
            inputs = _ADDED[feature.taken].add(inputs, value)
    return inputs


def _tied(recipe: Recipe) -> bool:
    """Whether a recipe scripts rows of maxima anywhere, as low as a cap leaves alone, above a tail that counts."""
    if not isinstance(recipe, partial) or recipe.func is not scripted:
        return False
    scores: Scores = recipe.keywords["scores"]
    anywhere = not scores.offsets and scores.positions is None
    return anywhere and 0.0 < scores.top[0] < scores.top[1] <= 8.0 and scores.gap[1] <= 30.0
