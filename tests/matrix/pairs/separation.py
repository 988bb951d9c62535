"""The fewest changes that make one plan another, and each one's share of the difference."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

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
    a: Declaration, b: Declaration, fmt: Format, inputs: Mapping[str, Sequence[SharedBatch]]
) -> tuple[PointRecord, ...]:
    """Return the points in which two plans differ, without those that change no bit, with their shares.

    The points are ordered greedily on the way from A's plan to B's: each is the one that removes most of the remaining
    difference. The share of a point is the decrease of ms(O of the plan so far - O of B) / ms(O of A - O of B), in
    ulps, emulated. The shares add up to 1.
    """
    one, other = space.forward_alone(a, fmt), space.forward_alone(b, fmt)
    between = _Between(_filled(one, other), _filled(other, one))
    ours, theirs = _parts(between.a), _parts(between.b)
    points = [point for point, part in ours.items() if part != theirs[point]]
    for point in list(points):
        fewer = between.plan_with([each for each in points if each != point])
        if fewer is not None and not between.remaining(fewer, [batch for each in inputs.values() for batch in each]):
            points.remove(point)
    return tuple(point for name, batches in inputs.items() for point in between.way(points, name, batches))


def _filled(declaration: Declaration, other: Declaration) -> Declaration:
    """Return a declaration with the other's values where it ignores them."""
    unused = {field: getattr(other.plan, field) for field in declaration.algorithm.unused}
    block = declaration.block if declaration.algorithm.tiled else other.block
    return replace(declaration, plan=replace(declaration.plan, **unused), block=block)


def _parts(declaration: Declaration) -> dict[str, Any]:
    block, plan = declaration.block, {key: getattr(declaration.plan, field) for key, field in FORWARD.items()}
    blocks = {space.TILE: block.keys, space.SPLITS: block.splits, space.ORDER: block.order}
    return {space.ALGORITHM: declaration.algorithm, space.RULE: declaration.shift_rule, **blocks, **plan}


@dataclass(frozen=True)
class _Between:
    """The plans between two plans."""

    a: Declaration
    b: Declaration

    def plan_with(self, points: Sequence[str]) -> Declaration | None:
        """Return A with these points as in B; None where one excludes what another is in A."""
        theirs = _parts(self.b)
        parts = _parts(self.a) | {point: theirs[point] for point in points}
        block = Block(parts[space.TILE], parts[space.TILE], parts[space.SPLITS], parts[space.ORDER])
        with suppress(ValueError):
            plan = replace(self.a.plan, **{field: parts[key] for key, field in FORWARD.items()})
            return Declaration(parts[space.ALGORITHM], plan, parts[space.RULE], block)
        return None

    def way(self, points: Sequence[str], where: str, batches: Sequence[SharedBatch]) -> Iterator[PointRecord]:
        """Yield the points in turn, each with its share of the difference on these inputs; none if there is none."""
        whole = left = self.remaining(self.a, batches)
        taken = list[str]()
        while left and len(taken) < len(points):
            ways = {point: self.plan_with([*taken, point]) for point in points if point not in taken}
            after = {each: self.remaining(way, batches) for each, way in ways.items() if way is not None}
            # Where each of them excludes a point of A's, all that are left go at once.
            gone = [min(after, key=after.__getitem__)] if after else list(ways)
            now = min(after.values(), default=0.0)
            here, there = (",".join(self.text(each, of) for each in gone) for of in (self.a, self.b))
            yield PointRecord(here, there, where, (left - now) / whole)
            taken, left = [*taken, *gone], now

    def remaining(self, way: Declaration, batches: Sequence[SharedBatch]) -> float:
        """Return the mean square of the remaining difference from B, in ulps."""
        squares = []
        for batch in batches:
            ours, theirs = (batch.predicted(each).double() for each in (way, self.b))
            squares.append(in_units(ours - theirs, batch.units).square().nanmean())
        return torch.stack(squares).mean().item() if squares else 0.0

    def text(self, point: str, of: Declaration) -> str:
        """Return the value of a point in one of them, as --plan has it."""
        part = _parts(of)[point]
        if point == space.RULE:
            value = space.named(of).shift_rule.name
        elif point == _BASE:
            value = f"{'2' if part.base_two else 'e'}{' (fast)' if part.correction else ''}"
        elif point in FORWARD:
            value = values_apart((self.b if of is self.a else self.a).plan, of.plan)[point]
        else:
            value = str(getattr(part, "name" if point == space.ALGORITHM else "value", part))
        return f"{point}={value}"
