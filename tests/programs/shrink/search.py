"""The smallest part of a call of attention on which a finding about a kernel still holds (delta debugging).

The method is ddmin (Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002), axis by axis.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from tiebreak.backends.backend import Backend
from tiebreak.cases.bounds import UNDECLARED, ErrorBounds
from tiebreak.cases.captured import uncancelled_ulps
from tiebreak.cases.errors import by_key_head
from tiebreak.cases.verdicts import BiasVerdict, interval, judge
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import Kernel
from tiebreak.kernels.reference import Reference, reference

AXES = ("batch", "heads", "group", "queries", "keys", "columns")
MANY = 16  # key heads: with fewer, a mean has no interval worth the name
_WRONG = 0.5  # ulps: a number rounded to nearest is never further off
_TIE = 0.5625  # ulps: an error between the two is that of a tie which the rest of the row tips
_REPEATED = 1e-3  # another score within this of a row's maximum: the paper's eps
_ROWS = 16  # that are tried alone


@dataclass(frozen=True)
class Part:
    """A part of a call: places along every axis of the whole, in order."""

    batch: tuple[int, ...]
    heads: tuple[int, ...]  # key heads
    group: tuple[int, ...]  # query heads of each key head
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    columns: tuple[int, ...]  # of q, k and v alike
    causal: bool

    @classmethod
    def whole(cls, inputs: AttentionInputs) -> "Part":
        """Return all of a call."""
        (batch, heads, queries, d), groups = inputs.q.shape, inputs.groups
        sizes = batch, heads // groups, groups, queries, inputs.k.shape[2], d
        places: dict[str, Any] = {axis: tuple(range(size)) for axis, size in zip(AXES, sizes, strict=True)}
        return cls(**places, causal=inputs.causal)

    @property
    def size(self) -> str:
        """The number of elements."""
        heads = len(self.batch) * len(self.heads) * len(self.group)
        return f"heads {heads}, queries {len(self.queries)}, keys {len(self.keys)}, d {len(self.columns)}"


@dataclass(frozen=True)
class Seen:
    """The output of a kernel on a part, and its errors."""

    inputs: AttentionInputs
    o: Tensor  # (batch, heads, queries, d)

    @cached_property
    def ref(self) -> Reference:
        """The reference, in fp64."""
        return reference(self.inputs)

    @cached_property
    def error(self) -> Tensor:
        """The signed error in ulps; NaN where O has cancelled, whose error shows how much, or the reference is 0."""
        return uncancelled_ulps(self.o, self.ref, self.inputs.formats.output)

    @cached_property
    def repeated(self) -> Tensor:
        """True if each row repeats its maximum, (batch, heads, queries, 1)."""
        s = self.inputs.visible(self.ref.s)
        return (s >= s.amax(-1, keepdim=True) - _REPEATED).sum(-1, keepdim=True) > 1

    @cached_property
    def over_bound(self) -> Tensor:
        """|error| as a share of the loosest plan's rounding-error bound, by element."""
        bound = ErrorBounds(self.inputs, self.ref).of(UNDECLARED)
        return ((self.o.double() - self.ref.o).abs() / bound).nan_to_num(nan=0.0)

    @cached_property
    def mean_error(self) -> tuple[float, bool]:
        """The mean error, and whether it is beyond the margin at 99.9 %; never of fewer than `MANY` key heads."""
        means = by_key_head(self.error, self.inputs.groups)
        bias = interval(means[torch.isfinite(means)])
        return bias.mean, judge(bias) is BiasVerdict.BIASED and len(means) >= MANY


@dataclass(frozen=True)
class Symptom:
    """An error to keep while a call is shrunk."""

    name: str  # finite, bound, mean or wrong way
    about: str  # one line
    badness: Callable[[Seen], Tensor]  # of every element, (batch, heads, queries, d); of a mean one number
    limit: float  # beyond which one is wrong

    def holds(self, seen: Seen) -> bool:
        """Return whether an output shows it."""
        return bool((self.badness(seen) > self.limit).any())


FINITE = Symptom(
    "finite",
    "NaN or Inf where the reference is finite",
    lambda seen: (~torch.isfinite(seen.o) & torch.isfinite(seen.ref.o)).double(),
    0.0,
)
BOUND = Symptom(
    "bound", "an error beyond the rounding-error bound of the loosest plan", lambda seen: seen.over_bound, 1.0
)


def wrong_way(sign: float, *, tied: bool) -> Symptom:
    """Return the symptom of an element more than half an ulp off to one side; a tie, slightly more, if it repeats."""

    def badness(seen: Seen) -> Tensor:
        error = (sign * seen.error).nan_to_num(nan=0.0)
        return error.masked_fill((error > _TIE) | ~seen.repeated, 0.0) if tied else error

    return Symptom("wrong way", "an element that is rounded the wrong way", badness, _WRONG)


@dataclass
class Shrinker:
    """A kernel and a call, and the smallest part found so far: read it at any time."""

    backend: Backend
    kernel: Kernel
    inputs: AttentionInputs  # the whole call, without a padding mask
    tell: Callable[[str], None]
    part: Part = field(init=False)
    finding: Symptom = field(default=FINITE)  # what holds on `part`
    trials: int = 0

    def __post_init__(self) -> None:
        self.part = Part.whole(self.inputs)

    def seen(self, part: Part) -> Seen:
        """Run the kernel on a part; it may raise anything."""
        inputs = cut(self.inputs, part)
        return Seen(inputs, self.backend.run(self.kernel, inputs, gradients=False).o)

    def keeps(self, part: Part, finding: Symptom) -> bool:
        """Return whether a symptom is seen on a part; a kernel that does not take the part shows nothing on it."""
        if not _is_consistent(self.inputs, part) or self.kernel.refusal(cut(self.inputs, part)) is not None:
            return False
        self.trials += 1
        try:
            return finding.holds(self.seen(part))
        except Exception:
            return False

    def shrink(self, finding: Symptom) -> None:
        """Make `part` as small as possible with a symptom that it shows as it is."""
        self.finding = finding
        self._one_row(finding)
        self._along_axes(finding)

    def _along_axes(self, finding: Symptom) -> None:
        before = None
        while before != self.part:
            before = self.part
            for axis in AXES:
                fewest(getattr(self.part, axis), partial(self._take, finding, axis))

    def bias(self, sign: float) -> None:
        """Shrink a bias: its mean while heads are many, then one element rounded the wrong way, if possible a tie.

        If there is no such element, as where all exact ties are rounded one way, the mean of the fewest heads is kept.
        """

        def badness(seen: Seen) -> Tensor:
            mean, biased = seen.mean_error
            return torch.tensor(sign * mean if biased else 0.0)

        mean = self.finding = Symptom("mean", "a mean signed error beyond 0.05 ulp", badness, 0.0)
        while len(self.part.batch) * len(self.part.heads) >= 2 * MANY:
            axis = "batch" if len(self.part.batch) > 1 else "heads"
            kept = getattr(self.part, axis)
            if not self._take(mean, axis, kept[: len(kept) // 2]):
                break
        tied = bool(self.seen(self.part).repeated.double().mean() > 0.5)  # else a row that repeats is there by chance
        for single in (wrong_way(sign, tied=tied), wrong_way(sign, tied=False)):
            if self._one_row(single):
                self._along_axes(single)
                return
        self.tell("no single element is off by more than half an ulp: the mean over heads is kept")
        self._sort(mean)
        self._along_axes(mean)

    def _sort(self, finding: Symptom) -> None:
        """Sort every head's keys by their scores: heads that differ in where they tie then share keys."""
        whole = self.inputs
        if not whole.causal:
            scores = (whole.q.double() @ whole.expanded_k().double().mT).mean(2)
            shared = scores.reshape(len(scores), -1, whole.groups, scores.shape[-1]).mean(2)
            order = shared.argsort(descending=True, stable=True)[..., None]
            k, v = (x.gather(2, order.expand_as(x)) for x in (whole.k, whole.v))
            self.inputs = replace(whole, k=k, v=v)
            if not self.keeps(self.part, finding):
                self.inputs = whole

    def _one_row(self, finding: Symptom) -> bool:
        """Go down to the worst row on which a symptom is seen alone; return whether there is one."""
        badness = finding.badness(self.seen(self.part)).mean(-1)
        later = self.inputs.k.shape[2] - self.inputs.q.shape[2]
        part, groups = self.part, len(self.part.group)
        for place in badness.flatten().argsort(descending=True, stable=True)[:_ROWS]:
            entry, head, row = (int(at) for at in torch.unravel_index(place, badness.shape))
            query = part.queries[row]
            keys = tuple(key for key in part.keys if not part.causal or key <= query + later)
            of_head = (part.batch[entry],), (part.heads[head // groups],), (part.group[head % groups],)
            alone = Part(*of_head, (query,), keys, part.columns, causal=False)
            # A row that sees its keys alone needs no mask; a kernel may err under a mask only.
            if self._try(alone, finding) or (part.causal and self._try(replace(alone, causal=True), finding)):
                return True
        return False

    def _take(self, finding: Symptom, axis: str, items: tuple[int, ...]) -> bool:
        changed: dict[str, Any] = {axis: items}
        return self._try(replace(self.part, **changed), finding)

    def _try(self, part: Part, finding: Symptom) -> bool:
        if not self.keeps(part, finding):
            return False
        self.part, self.finding = part, finding
        self.tell(f"{part.size} ({self.trials} trials)")
        return True


def cut(inputs: AttentionInputs, part: Part) -> AttentionInputs:
    """Return the inputs of a part."""
    batch, heads, group, queries, keys, columns = (torch.tensor(getattr(part, axis)) for axis in AXES)
    rows = (heads[:, None] * inputs.groups + group).flatten()
    q, do = (x[batch][:, rows][:, :, queries][..., columns].contiguous() for x in (inputs.q, inputs.do))
    k, v = (x[batch][:, heads][:, :, keys][..., columns].contiguous() for x in (inputs.k, inputs.v))
    return replace(inputs, q=q, k=k, v=v, do=do, causal=part.causal, softmax_scale=inputs.scale)


def _is_consistent(inputs: AttentionInputs, part: Part) -> bool:
    """Return whether a causal mask lets every query of a part see what it saw in the whole."""
    if not part.causal:
        return True
    later, fewer = inputs.k.shape[2] - inputs.q.shape[2], len(part.keys) - len(part.queries)
    return all(
        sum(key <= query + later for key in part.keys) == place + fewer + 1 > 0
        for place, query in enumerate(part.queries)
    )


def fewest(items: Sequence[int], keeps: Callable[[tuple[int, ...]], bool]) -> tuple[int, ...]:
    """Return a minimal part of the items, in order, that `keeps` accepts; it must accept all of them."""
    left, parts = tuple(items), 2
    while len(left) > 1:
        step = -(-len(left) // parts)
        pieces = [left[start : start + step] for start in range(0, len(left), step)]
        rests = [tuple(item for item in left if item not in set(piece)) for piece in pieces]
        smaller = next((piece for piece in (*pieces, *(rests if len(pieces) > 2 else ())) if keeps(piece)), None)
        if smaller is not None:
            parts = 2 if smaller in pieces else max(parts - 1, 2)
            left = smaller
        elif step == 1:
            break
        else:
            parts = min(len(left), 2 * parts)
    return left
