"""Shapes of calls: which sizes kernels change their path by, and calls of public reports, from shapes.toml."""

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from itertools import accumulate, combinations, product
from numbers import Real
from operator import eq, ge, le
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tiebreak.cases.case import Draw
from tiebreak.cases.feature_cases import VARIED, in_pages, slopes
from tiebreak.kernels.features import DESCALE
from tiebreak.kernels.inputs import AttentionInputs

_DO = 4.0  # of this size P dP leaves fp16 where dO is a thousand times as large
_BLOCK = 64  # rows and keys of a block of a mask
_AXES = "bhqk"  # of a bias or a block mask
_DRAWN = 4099  # entries of a batch, at most, that are drawn: a prime, so that entries 2^n apart are not the same ones
_Pair = tuple[tuple[str, Any], tuple[str, Any]]  # values of two dimensions, in their order


@dataclass(frozen=True)
class ShapedCall:
    """A call on normal numbers: its sizes, and what it has beside q, k and v; fields that tell most come last."""

    asks: str  # the question that makes it
    source: str  # a public report, or why a kernel might be wrong
    causal: bool = False
    heads: int = 4
    key_heads: int = 0  # 0: as many as heads
    queries: int = 17
    keys: int = 40
    d: int = 0  # of q and k; 0: the first that the kernel takes
    d_v: int = 0  # of V; 0: as q's
    batch: int = 2
    parameter: str = ""  # as `takes` of a user's kernel calls it; empty: none
    gradients: bool = True  # whether they are compared too
    window: int = 0  # keys before a row's own; 0 behind it
    full: str = _AXES  # axes of a bias or a block mask that are not of size 1
    sizes: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # rows and keys of packed sequences
    lengths: tuple[int, ...] = ()  # keys of padded sequences; empty: other ones for each
    page: int = 16  # keys of a page
    softcap: float = 1.5
    lse: float = 0.0  # what all scores are lowered by
    v_in_k: bool = False  # whether V is the first columns of K, in the same memory

    @property
    def words(self) -> str:
        """The fields that are not as usual, as messages name the call."""
        usual = {each.name: each.default for each in fields(self) if each.name not in ("asks", "source", "gradients")}
        return ", ".join(
            f"{name}={getattr(self, name)}" for name, value in usual.items() if getattr(self, name) != value
        )

    def inputs(self, draw: Draw, d: int) -> AttentionInputs:
        """Draw the inputs of the call; `d` is the head dimension of a call that names none."""
        d, d_v, key_heads = self.d or d, self.d_v or self.d or d, self.key_heads or self.heads
        sizes = (self.heads, self.queries, d), (key_heads, self.keys, d), (key_heads, self.keys, d_v)
        drawn = min(self.batch, _DRAWN)
        q, k, v, do = (
            draw.rounded(draw.normal(drawn, *size)).repeat(-(-self.batch // drawn), 1, 1, 1)[: self.batch]
            for size in (*sizes, (self.heads, self.queries, d_v))
        )
        v = k[..., :d_v] if self.v_in_k else v
        if self.lse:
            q[..., 0], k[..., 0] = self.lse, math.sqrt(d)
        inputs = AttentionInputs(q, k, v, _DO * do, draw.formats, causal=self.causal)
        return _ADDED[self.parameter](inputs, self, draw) if self.parameter else inputs


def _shape(inputs: AttentionInputs, call: ShapedCall, rows: int, keys: int) -> tuple[int, ...]:
    sizes = (*inputs.q.shape[:2], rows, keys)
    return tuple(size if axis in call.full else 1 for axis, size in zip(_AXES, sizes, strict=True))


def _bias(inputs: AttentionInputs, call: ShapedCall, draw: Draw) -> AttentionInputs:
    shape = _shape(inputs, call, inputs.q.shape[2], inputs.k.shape[2])
    return replace(inputs, bias=draw.rounded(draw.normal(*shape)))


def _alibi(inputs: AttentionInputs, call: ShapedCall, draw: Draw) -> AttentionInputs:
    """Draw slopes (heads,), or (batch, heads) where these alone are full."""
    return replace(inputs, alibi=slopes(draw, *inputs.q.shape[call.full != "bh" : 2]))


def _block_mask(inputs: AttentionInputs, call: ShapedCall, draw: Draw) -> AttentionInputs:
    """Hide half of the blocks, but never the first of a row, which a causal mask leaves alone."""
    blocks = (-(-x.shape[2] // _BLOCK) for x in (inputs.q, inputs.k))
    seen = draw.uniform(0.0, 1.0, *_shape(inputs, call, *blocks)) < 0.5
    seen[..., 0] = True
    return replace(inputs, block_mask=seen, block_size=(_BLOCK, _BLOCK))


def _padding(inputs: AttentionInputs, call: ShapedCall, _: Draw) -> AttentionInputs:
    batch, keys = len(inputs.q), inputs.k.shape[2]
    lengths = torch.tensor(call.lengths or [keys - index * keys // (2 * batch) for index in range(batch)])
    return replace(inputs, key_padding=torch.arange(keys) < lengths[:, None])


def _lengths(inputs: AttentionInputs, call: ShapedCall, draw: Draw) -> AttentionInputs:
    """Pack sequences of given sizes; of a call that names none, a third and the rest of its rows and keys."""
    rows, keys = call.sizes if call.sizes[0] else tuple((n // 3, n - n // 3) for n in (call.queries, call.keys))
    packed = replace(call, batch=1, queries=sum(rows), keys=sum(keys), parameter="")
    begins = (0, *accumulate(rows)), (0, *accumulate(keys))
    return replace(packed.inputs(draw, inputs.q.shape[3]), lengths=begins)


#: How a parameter comes into a call.
_ADDED: Mapping[str, Callable[[AttentionInputs, ShapedCall, Draw], AttentionInputs]] = {
    "scale": lambda inputs, *_: replace(inputs, softmax_scale=0.3),
    "window": lambda inputs, call, _: replace(inputs, window=(call.window, 0)),
    "softcap": lambda inputs, call, _: replace(inputs, softcap=call.softcap),
    "sink": lambda inputs, _, draw: replace(inputs, sink=draw.normal(inputs.q.shape[1]).bfloat16().float()),
    "bias": _bias,
    "alibi": _alibi,
    "block_mask": _block_mask,
    "padding": _padding,
    "lengths": _lengths,
    "pages": lambda inputs, call, draw: in_pages(inputs, draw, call.page),
    "descale": lambda inputs, _, draw: VARIED[DESCALE](inputs, draw),
}
PARAMETERS = tuple(_ADDED)


@cache
def _table() -> Mapping[str, Any]:
    return tomllib.loads((Path(__file__).parent / "shapes.toml").read_text(encoding="utf-8"))


def dimensions() -> Mapping[str, Sequence[int]]:
    """Return the sizes that meet in pairs."""
    found: Mapping[str, Sequence[int]] = _table()["dimensions"]
    return found


@cache
def reported() -> Sequence[ShapedCall]:
    """Return the calls of shapes.toml; of a field that lists values a call each, d and d_v in step."""
    return [ShapedCall(**call) for row in _table()["call"] for call in _each(row)]


def _each(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    in_step = ("d", "d_v") if "d_v" in row else ()
    lists = {name: value for name, value in row.items() if isinstance(value, list) and name not in in_step}
    steps = [dict(zip(in_step, values, strict=True)) for values in zip(*(row[name] for name in in_step), strict=True)]
    for values, step in product(product(*lists.values()), steps or [{}]):
        yield {**row, **dict(zip(lists, map(_frozen, values), strict=True)), **step}


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def covering(values: Mapping[str, Sequence[Any]], never: Set[_Pair] = frozenset()) -> Iterator[dict[str, Any]]:
    """Yield few choices, a value of each dimension, so that every two values of two dimensions meet in one at least.

    Those of `never` don't: packed sequences are a batch of 1.

    Greedy, after AETG (Cohen et al., "The AETG system", IEEE Transactions on Software Engineering 23, 1997): each
    choice begins with a pair that has not met, and takes of every other dimension the value that meets most.
    """
    left = {((a, x), (b, y)): None for a, b in combinations(values, 2) for x, y in product(values[a], values[b])}
    left = {pair: None for pair in left if pair not in never}
    while left:
        chosen = dict(next(iter(left)))
        for name in [name for name in values if name not in chosen]:
            possible = [
                x for x in values[name] if never.isdisjoint(_pair(values, (name, x), y) for y in chosen.items())
            ]
            chosen[name] = max(possible, key=partial(_meets, left, values, chosen, name))
        for a, b in combinations(chosen.items(), 2):
            left.pop(_pair(values, a, b), None)
        yield chosen


def _meets(
    left: Mapping[Any, None], values: Mapping[str, Any], chosen: Mapping[str, Any], name: str, value: Any
) -> int:
    """Return how many pairs that have not met do so with one more value."""
    return sum(_pair(values, (name, value), other) in left for other in chosen.items())


def _pair(values: Mapping[str, Any], a: tuple[str, Any], b: tuple[str, Any]) -> _Pair:
    order = list(values)
    return (a, b) if order.index(a[0]) < order.index(b[0]) else (b, a)


def separating(calls: Sequence[tuple[Mapping[str, Any], bool]]) -> str:
    """Return in words the simplest condition that holds of all calls that are wrong and of no other; empty: none does.

    Conditions are one value of a dimension, at least or at most one, or two of these together.
    """
    wrong, right = ([call for call, is_wrong in calls if is_wrong is state] for state in (True, False))
    if not wrong or not right:
        return ""
    telling_first = [each.name for each in reversed(fields(ShapedCall)) if each.name in wrong[0]]
    tests_of = (_tests(name, [call for call, _ in calls]) for name in telling_first)
    fitting = [test for tests in tests_of for test in tests if test.value and all(test(call) for call in wrong)]
    for number in (1, 2):
        for tests in combinations(fitting, number):
            if not any(all(test(call) for test in tests) for call in right):
                return " and ".join(f"{test.name} {test.relation} {test.value}" for test in tests)
    return ""


class _Test(NamedTuple):
    """A condition on one dimension of a call."""

    name: str
    relation: str
    value: Any

    def __call__(self, call: Mapping[str, Any]) -> bool:
        return bool(_RELATIONS[self.relation](call[self.name], self.value))


_RELATIONS: Mapping[str, Callable[[Any, Any], bool]] = {"=": eq, ">=": ge, "<=": le}


def _tests(name: str, calls: Sequence[Mapping[str, Any]]) -> Iterator[_Test]:
    values = dict.fromkeys(call[name] for call in calls)
    ordered = all(isinstance(value, Real) and not isinstance(value, bool) for value in values)
    for relation in _RELATIONS if ordered else ("=",):
        yield from (_Test(name, relation, value) for value in values)
