"""How much a call of attention has to tell: cheap statistics of a few rows of every head, computed on the device."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tiebreak.cases.capture.watch import AttentionCall
from tiebreak.kernels.vendor import exact_products

ROWS = 16  # of every query head, spread evenly
_SCORES = 2**22  # of one call that are looked at, at most
_REPEATED = 1e-3  # another score within this of a row's maximum: the paper's eps
_HARMFUL_DELTA = 1.5e-3  # delta's relative bias in the paper's failing kernel
_HARMFUL_LOGIT = 88.0  # from here on exp underflows where a shift doubles the maximum


class Findings(NamedTuple):
    """Statistics of the sampled rows of one layer, as numbers on the host, from `Candidate.summary`."""

    repeated: float  # share of rows whose maximum repeats
    delta_bias: float  # mean of delta_lp - delta_hp over mean |delta_hp|, averaged over heads, of rowsum(dO * O)
    drift: float  # |sum| / sum || of these errors: 1 where a head's errors have one sign
    largest: float  # score
    unlike: float  # median over rows of |O - softmax(scale q k^T) v| / |O|: large where the call was no such thing
    kept_finite: float  # 1 where all that would be kept is finite

    @property
    def is_finite(self) -> bool:
        """True if all of the layer is finite, the statistics too."""
        return self.kept_finite > 0 and all(map(math.isfinite, self))

    @property
    def telling(self) -> float:
        """A score from 0 to 3: how much of each of the three known causes of harm there is."""
        delta = min(1.0, abs(self.delta_bias) / _HARMFUL_DELTA) * self.drift
        return self.repeated + delta + min(1.0, max(0.0, self.largest) / _HARMFUL_LOGIT)


_UNKNOWN = Findings(*[math.nan] * 6)


@contextmanager
def measuring(device: torch.device) -> Iterator[None]:
    """Compute during a model's step: without graph, autocast, narrowed products or random numbers."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False), exact_products():
        yield


@dataclass
class Candidate:
    """The most telling heads of one call, copied on the device; dO comes with the backward pass."""

    name: str  # of the module that called
    layer: int  # its number, by the order of the first forward pass
    call: AttentionCall  # q (pairs, groups, queries, d), k, v (pairs, 1, keys, d): a pair is a batch entry's key head
    o: Tensor  # (pairs, groups, queries, d)
    heads: Tensor  # batch entry and key head of every pair, (pairs, 2)
    rows: slice  # of the queries that were looked at
    statistics: Tensor  # repeated and largest by pair, and unlike: (2 pairs + 1,)
    error: Tensor  # O - softmax(scale q k^T) v of these rows, fp32, (pairs, groups, rows, d)
    do: Tensor | None = None  # as o
    findings: Findings = _UNKNOWN  # once its step has ended

    @property
    def bytes(self) -> int:
        """The size, on the device or in a file."""
        parts = (self.call.q, self.call.k, self.call.v, self.o, self.o)  # dO is as O
        return sum(part.numel() * part.element_size() for part in parts)

    def within(self, size: int) -> "Candidate | None":
        """Return as many heads as fit into this size, the most telling before the backward pass; None: none fit."""
        pairs = size * self.o.shape[0] // self.bytes
        if pairs < 1:
            return None
        q, k, v = (part[:pairs] for part in (self.call.q, self.call.k, self.call.v))
        do = None if self.do is None else self.do[:pairs]
        return replace(self, call=replace(self.call, q=q, k=k, v=v), o=self.o[:pairs], heads=self.heads[:pairs], do=do)

    def take(self, do: Tensor) -> None:
        """Keep the gradient of O, (batch, heads, queries, d) of the model; only the first one counts."""
        if self.do is None:
            self.do = _pick(do, self.heads, self.o.shape[1])[:, :, : self.o.shape[2]].clone()

    def summary(self) -> Tensor:
        """Return all of `Findings` in one tensor, for one transfer."""
        assert self.do is not None
        do = self.do[:, :, self.rows].float()
        right = self.o[:, :, self.rows].float() - self.error
        wrong = (do * self.error).sum(-1).flatten(1)  # delta_lp - delta_hp, (pairs, rows)
        size, biased = (do * right).sum(-1).flatten(1).abs().sum(-1), wrong.sum(-1)
        parts = (self.call.q, self.call.k, self.call.v, self.o, self.do)
        finite = torch.stack([torch.isfinite(part).all() for part in parts]).all()
        delta = torch.stack([(biased / size).mean(), (biased.abs() / wrong.abs().sum(-1)).mean()])
        (repeated, largest), unlike = self.statistics[:-1].reshape(2, -1), self.statistics[-1:]
        return torch.cat(
            [repeated.mean()[None], delta.nan_to_num(), largest.amax()[None], unlike, finite.float()[None]]
        )


def candidate(name: str, layer: int, call: AttentionCall, o: Tensor, pairs: int, tokens: int, turn: int) -> Candidate:
    """Look at a call of a module, by its name and its number, and copy the most telling heads.

    Args:
        call, o: q, k, v as the kernel took them, and what it returned, (batch, heads, queries, d).
        pairs: key heads to keep, over all batch entries, each with its query heads.
        tokens: queries to keep, the first; under a causal mask their keys alone.
        turn: moves the sampled rows from step to step.
    """
    queries = min(call.q.shape[2], tokens)
    keys = call.k.shape[2] - call.q.shape[2] + queries if call.causal else call.k.shape[2]
    # A batch that is larger than can be looked at is looked at in part.
    heads = call.q.shape[1]
    rows = max(1, min(ROWS, queries, _SCORES // (call.q.shape[0] * heads * keys)))
    batch, stride = slice(max(1, _SCORES // (heads * rows * keys))), max(1, queries // rows)
    at = slice(turn % stride, queries, stride)
    cut = replace(call, q=call.q[batch, :, :queries], k=call.k[batch, :, :keys], v=call.v[batch, :, :keys])
    repeated, largest, exact = _rows(cut, at)
    score = repeated + (largest / _HARMFUL_LOGIT).clamp(0, 1)
    chosen = score.flatten().nan_to_num().topk(min(pairs, score.numel())).indices
    where = torch.stack([chosen // score.shape[1], chosen % score.shape[1]], 1)
    groups = heads // call.k.shape[1]
    outputs = _pick(o[batch, :, :queries], where, groups).clone()
    error = outputs[:, :, at].float() - _pick(exact, where, groups)
    unlike = error.norm(dim=-1) / outputs[:, :, at].float().norm(dim=-1)
    unlike = unlike.nan_to_num().flatten().median()
    statistics = torch.cat([repeated.flatten()[chosen], largest.flatten()[chosen], unlike[None]])
    q = _pick(cut.q, where, groups)
    mine = replace(cut, q=q * cut.factor, k=_pick(cut.k, where, 1), v=_pick(cut.v, where, 1), factor=1.0)
    return Candidate(name, layer, mine, outputs, where, at, statistics, error)


def _pick(x: Tensor, where: Tensor, groups: int) -> Tensor:
    """Return a copy (pairs, groups, n, d) of (batch, heads, n, d)."""
    return x.reshape(x.shape[0], -1, groups, *x.shape[2:])[where[:, 0], where[:, 1]]


def _rows(call: AttentionCall, at: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Return, by key head, the share of sampled rows that repeat their maximum, the largest score, and O in fp32."""
    (batch, heads, queries), (key_heads, keys) = call.q.shape[:3], call.k.shape[1:3]
    q = call.q[:, :, at].float()
    rows = q.shape[2]
    # The query heads of a key head and their rows in one dimension: no copy of K for each.
    s = q.reshape(batch, key_heads, -1, q.shape[-1]) @ call.k.float().transpose(-1, -2) * call.alpha
    if call.causal:
        row = torch.arange(*at.indices(queries), device=s.device) + keys - queries
        later = torch.arange(keys, device=s.device) > row[:, None]
        s = s.reshape(batch, key_heads, -1, rows, keys).masked_fill(later, -torch.inf).flatten(2, 3)
    highest = s.amax(-1, keepdim=True)
    repeated = ((s >= highest - _REPEATED).sum(-1) > 1).float().mean(-1)
    o = torch.softmax(s, -1) @ call.v.float()
    return repeated, highest.flatten(2).amax(-1), o.reshape(batch, heads, rows, -1)
