"""What separates two plans: the fewest changes that make the one the other, and each one's share of the difference."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tiebreak.cases.errors import in_units
from tiebreak.kernels.declarations import FORWARD, values_apart
from tiebreak.kernels.flash import Block
from tiebreak.kernels.formats import Format
from tiebreak.kernels.kernel import Declaration
from tiebreak.matrix.identification import space
from tiebreak.matrix.workbench import SharedBatch
from tiebreak.reports.pairs.verdict import PointRecord

_BASE = "base"  # the key of the exponential, which is more than its base


def separation(
    a: Declaration, b: Declaration, fmt: Format, normal: Sequence[SharedBatch], others: Sequence[SharedBatch]
) -> tuple[PointRecord, ...]:
    """The points in which two plans differ, without those that change no bit on these inputs.

    On the way from A's plan to B's the point comes next that takes most of what is left of the difference: its share is
    how much less ms(O of the plan on the way, less O of B) / ms(O of A less O of B) then is, on normal numbers, in
    ulps, emulated. So the first has what it does alone, and all of them add up to 1.
    """
    mixtures = _Mixtures(a, b, fmt)
    points = list(mixtures.points)
    for point in mixtures.points:
        fewer = mixtures.made([each for each in points if each != point])
        if fewer is not None and not _square(fewer, mixtures.b, (*normal, *others)):
            points.remove(point)
    shown = next((batches for batches in (normal, others) if _square(mixtures.a, mixtures.b, batches)), ())
    whole = left = _square(mixtures.a, mixtures.b, shown)
    taken, found = list[str](), list[PointRecord]()
    while len(taken) < len(points) and whole:
        ways = {each: mixtures.made([*taken, each]) for each in points if each not in taken}
        squares = {each: _square(way, mixtures.b, shown) for each, way in ways.items() if way is not None}
        # Where each of them excludes a point of A's, all that is left goes at once.
        point = min(squares, key=squares.__getitem__) if squares else None
        gone = [point] if point else list(ways)
        after = squares[point] if point else 0.0
        texts = [mixtures.text(each) for each in gone]
        ours, theirs = (",".join(f"{key}={text[at]}" for key, text in zip(gone, texts, strict=True)) for at in range(2))
        found.append(PointRecord(ours, theirs, (left - after) / whole))
        taken, left = [*taken, *gone], after
    return tuple(found)


def _square(one: Declaration, other: Declaration, batches: Sequence[SharedBatch]) -> float:
    """Mean square of the difference of two plans, in ulps."""
    squares = [_apart(batch, one, other).square().nanmean() for batch in batches]
    return torch.stack(squares).mean().item() if squares else 0.0


def _apart(batch: SharedBatch, one: Declaration, other: Declaration) -> Tensor:
    ours, theirs = (batch.predicted(batch.clipped(each)).double() for each in (one, other))
    return in_units(ours - theirs, batch.units)


class _Mixtures:
    """Plans between two: the one's, and the other's in some points."""

    def __init__(self, a: Declaration, b: Declaration, fmt: Format) -> None:
        """Of what both do forward; what one makes nothing of is in it as in the other."""
        one, other = space.forward_alone(a, fmt), space.forward_alone(b, fmt)
        self.a, self.b = _filled(one, other), _filled(other, one)
        self._parts = _parts(self.a), _parts(self.b)
        self.points = [key for key, part in self._parts[0].items() if part != self._parts[1][key]]

    def made(self, points: Sequence[str]) -> Declaration | None:
        """A with these points as in B; None where they exclude one of A's."""
        parts = self._parts[0] | {point: self._parts[1][point] for point in points}
        with suppress(ValueError):
            plan = replace(self.a.plan, **{field: parts[key] for key, field in FORWARD.items()})
            tile, splits, order = (parts[key] for key in (space.TILE, space.SPLITS, space.ORDER))
            return Declaration(parts[space.ALGORITHM], plan, parts[space.RULE], Block(tile, tile, splits, order))
        return None

    def text(self, point: str) -> tuple[str, str]:
        """What a point is in A and in B, as --plan has it."""
        if point in FORWARD and point != _BASE:
            one, other = self.a.plan, self.b.plan
            return values_apart(other, one)[point], values_apart(one, other)[point]
        one, other = self._parts
        return _said(point, self.a, one[point]), _said(point, self.b, other[point])


def _filled(declaration: Declaration, other: Declaration) -> Declaration:
    unused = {field: getattr(other.plan, field) for field in declaration.algorithm.unused}
    block = declaration.block if declaration.algorithm.tiled else other.block
    return replace(declaration, plan=replace(declaration.plan, **unused), block=block)


def _parts(declaration: Declaration) -> Mapping[str, Any]:
    block = declaration.block
    return {
        space.ALGORITHM: declaration.algorithm,
        space.RULE: declaration.shift_rule,
        space.TILE: block.keys,
        space.SPLITS: block.splits,
        space.ORDER: block.order,
        **{key: getattr(declaration.plan, field) for key, field in FORWARD.items()},
    }


def _said(point: str, declaration: Declaration, part: Any) -> str:
    if point == space.RULE:
        return space.named(declaration).shift_rule.name
    if point == space.ALGORITHM:
        return str(part.name)
    if point == _BASE:
        return f"{'2' if part.base_two else 'e'}{', fast' if part.correction else ''}"
    return str(getattr(part, "value", part))
