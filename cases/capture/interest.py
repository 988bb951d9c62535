"""How much a call of attention has to tell: cheap statistics of a few rows of every head, computed on the device."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tiebreak.cases.capture.watch import AttentionCall, NotHeldError
from tiebreak.cases.captured import CANCELLED
from tiebreak.cases.verdicts import MARGIN_ULPS
from tiebreak.kernels.vendor import exact_products

UNLIKE = 0.1  # an O further from softmax(scale q k^T) v than this is that of another function
ROWS = 16  # of every query head, spread evenly
_SCORES = 2**22  # of one call that are looked at, at most
_REPEATED = 1e-3  # another score within this of a row's maximum: the paper's eps
_HARMFUL_DELTA = 1.5e-3  # delta's relative bias in the paper's failing kernel
_HARMFUL_LOGIT = 88.0  # from here on exp underflows where a shift doubles the maximum
SINK = 0.9  # a P above this has the row nearly to itself: plain flash loses the rest in O-bar's cast
FEW = 16  # a row that sees fewer keys has one such P by chance, and with one key always
_SPREAD = 3.0  # standard errors of a mean over the sampled elements that are taken for noise


class Findings(NamedTuple):
    """Statistics of the sampled rows of one layer, as numbers on the host, from `Candidate.summary`."""

    repeated: float  # share of rows whose maximum repeats
    delta_bias: float  # mean of delta_lp - delta_hp over mean |delta_hp|, averaged over heads, of rowsum(dO * O)
    drift: float  # |sum| / sum || of these errors: 1 where a head's errors have one sign
    largest: float  # score
    sinks: float  # share of rows with one P above 0.9
    bias: float  # ulp, of plain flash emulated on these rows: that of the most biased pair
    worst: float  # the index of that pair among those kept
    unlike: float  # median over rows of |O - softmax(scale q k^T) v| / |O|: large where the call was no such thing
    kept_finite: float  # 1 where all that would be kept is finite

    @property
    def is_finite(self) -> bool:
        """True if all of the layer is finite, the statistics too."""
        return self.kept_finite > 0 and all(map(math.isfinite, self))

    @property
    def telling(self) -> float:
        """A score from 0 to 5: how much of each of the known causes of harm, and of the bias itself, there is."""
        delta = min(1.0, abs(self.delta_bias) / _HARMFUL_DELTA) * self.drift
        logit, bias = max(0.0, self.largest) / _HARMFUL_LOGIT, abs(self.bias) / MARGIN_ULPS
        return self.repeated + delta + min(1.0, logit) + self.sinks + min(1.0, bias)


_UNKNOWN = Findings(*[math.nan] * len(Findings._fields))


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
    first: int  # query of the call that is the first here: of a sequence behind padding
    rows: slice  # of the queries that were looked at
    statistics: Tensor  # the rows' statistics by pair, and unlike: (4 pairs + 1,)
    error: Tensor  # O - softmax(scale q k^T) v of these rows, fp32, (pairs, groups, rows, d)
    trained: bool  # whether a gradient may come
    do: Tensor | None = None  # as o
    findings: Findings = _UNKNOWN  # once its step has ended

    @property
    def bytes(self) -> int:
        """The size, on the device or in a file."""
        parts = (self.call.q, self.call.k, self.call.v, *([self.o] * (1 + self.trained)))  # dO is as O
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
            rows = slice(self.first, self.first + self.o.shape[2])
            self.do = _pick(do[:, :, rows], self.heads, self.o.shape[1]).clone()

    def summary(self) -> Tensor:
        """Return all of `Findings` in one tensor, for one transfer."""
        kept = torch.zeros_like(self.o) if self.do is None else self.do
        do = kept[:, :, self.rows].float()
        right = self.o[:, :, self.rows].float() - self.error
        wrong = (do * self.error).sum(-1).flatten(1)  # delta_lp - delta_hp, (pairs, rows)
        size, biased = (do * right).sum(-1).flatten(1).abs().sum(-1), wrong.sum(-1)
        parts = (self.call.q, self.call.k, self.call.v, self.o, kept)
        finite = torch.stack([torch.isfinite(part).all() for part in parts]).all()
        delta = torch.stack([(biased / size).mean(), (biased.abs() / wrong.abs().sum(-1)).mean()]).nan_to_num()
        statistics, unlike = _Rows(*self.statistics[:-1].reshape(len(_Rows._fields), -1)), self.statistics[-1]
        worst = statistics.bias.abs().argmax()
        shares = [statistics.sinks.mean(), statistics.bias[worst], worst.float(), unlike, finite.float()]
        return torch.stack([statistics.repeated.mean(), *delta, statistics.largest.amax(), *shares])


def candidate(name: str, layer: int, call: AttentionCall, o: Tensor, pairs: int, tokens: int, turn: int) -> Candidate:
    """Look at a call of a module, by its name and its number, and copy the most telling heads.

    Of a padded batch these are heads of sequences that stand in the same place, each cut to its own tokens.

    Args:
        call, o: q, k, v as the kernel took them, and what it returned, (batch, heads, queries, d).
        pairs: key heads to keep, over all batch entries, each with its query heads.
        tokens: queries to keep, the first; under a causal mask their keys alone.
        turn: moves the sampled rows from step to step.
    """
    places: dict[tuple[int, int], list[int]] = {}
    for entry, span in enumerate(call.spans or [slice(0, call.k.shape[2])] * call.q.shape[0]):
        places.setdefault((span.start, span.stop), []).append(entry)
    looked = []
    for (start, stop), entries in places.items():
        if start == stop:
            continue  # a sequence without tokens
        rows = slice(start, stop) if call.spans and call.q.shape[2] == call.k.shape[2] else slice(0, call.q.shape[2])
        chosen = slice(None) if len(entries) == call.q.shape[0] else entries
        parts = (call.q[chosen, :, rows], call.k[chosen, :, start:stop], call.v[chosen, :, start:stop])
        cut = replace(call, q=parts[0], k=parts[1], v=parts[2], spans=())
        looked.append(_look(name, layer, cut, o[chosen, :, rows], (pairs, tokens, turn), rows.start, entries))
    if not looked:
        raise NotHeldError("no tokens but padding")
    return looked[0][1] if len(looked) == 1 else max(looked, key=lambda item: item[0].item())[1]


def _look(
    name: str, layer: int, call: AttentionCall, o: Tensor, most: tuple[int, int, int], first: int, entries: list[int]
) -> tuple[Tensor, Candidate]:
    """Return the most telling heads of a call without padding, and how telling the first of them is."""
    pairs, tokens, turn = most
    queries = min(call.q.shape[2], tokens)
    keys = call.k.shape[2] - call.q.shape[2] + queries if call.causal else call.k.shape[2]
    # A batch that is larger than can be looked at is looked at in part.
    heads = call.q.shape[1]
    rows = max(1, min(ROWS, queries, _SCORES // (call.q.shape[0] * heads * keys)))
    batch, stride = slice(max(1, _SCORES // (heads * rows * keys))), max(1, queries // rows)
    at = slice(turn % stride, queries, stride)
    cut = replace(call, q=call.q[batch, :, :queries], k=call.k[batch, :, :keys], v=call.v[batch, :, :keys])
    statistics, exact = _rows(cut, at)
    score = statistics.score
    telling, chosen = score.flatten().nan_to_num().topk(min(pairs, score.numel()))
    where = torch.stack([chosen // score.shape[1], chosen % score.shape[1]], 1)
    groups = heads // call.k.shape[1]
    outputs = _pick(o[batch, :, :queries], where, groups).clone()
    error = outputs[:, :, at].float() - _pick(exact, where, groups)
    unlike = error.norm(dim=-1) / outputs[:, :, at].float().norm(dim=-1)
    kept = torch.cat([*(part.flatten()[chosen] for part in statistics), unlike.nan_to_num().flatten().median()[None]])
    q = _pick(cut.q, where, groups)
    mine = replace(cut, q=q * cut.factor, k=_pick(cut.k, where, 1), v=_pick(cut.v, where, 1), factor=1.0)
    of_call = torch.stack([torch.tensor(entries, device=where.device)[where[:, 0]], where[:, 1]], 1)
    return telling[0], Candidate(name, layer, mine, outputs, of_call, first, at, kept, error, o.requires_grad)


def _pick(x: Tensor, where: Tensor, groups: int) -> Tensor:
    """Return a copy (pairs, groups, n, d) of (batch, heads, n, d)."""
    return x.reshape(x.shape[0], -1, groups, *x.shape[2:])[where[:, 0], where[:, 1]]


class _Rows(NamedTuple):
    """Statistics of the sampled rows by batch entry and key head, (batch, key heads)."""

    repeated: Tensor
    largest: Tensor
    sinks: Tensor
    bias: Tensor  # ulp, of plain flash, as far as it stands out of the noise

    @property
    def score(self) -> Tensor:
        """A score of how telling a head is before its backward pass."""
        logit, bias = self.largest / _HARMFUL_LOGIT, self.bias.abs() / MARGIN_ULPS
        return self.repeated + logit.clamp(0, 1) + self.sinks + bias.clamp(0, 1)


def _rows(call: AttentionCall, at: slice) -> tuple[_Rows, Tensor]:
    """Return statistics of the sampled rows, and their O in fp32, (batch, heads, rows, d)."""
    s, v = _scores(call, at), call.v.float()
    highest = s.amax(-1, keepdim=True)
    p = torch.exp(s - highest)
    total = p.sum(-1, keepdim=True)
    statistics = [
        ((s >= highest - _REPEATED).sum(-1) > 1).float().mean(-1),
        highest.flatten(2).amax(-1),
        # The largest P is 1 / total.
        ((total[..., 0] < 1 / SINK) & ((s > -torch.inf).sum(-1) >= FEW)).float().mean(-1),
    ]
    o = (p / total) @ v
    if call.v.dtype == torch.float32:  # what the model would meet in bf16
        q, k, low = (part.bfloat16() for part in (call.q, call.k, call.v))
        statistics.append(_flash_bias(_scores(replace(call, q=q, k=k), at), low))
    else:
        statistics.append(_flash_bias(s, call.v))
    return _Rows(*statistics), o.reshape(*call.q.shape[:2], -1, v.shape[-1])


def _flash_bias(s: Tensor, low: Tensor) -> Tensor:
    """Return plain flash's bias in ulps, less its noise, (batch, key heads), of scores and of V in 16 bits."""
    fmt, v = low.dtype, low.float()
    p = torch.exp(s - s.amax(-1, keepdim=True))
    total = p.sum(-1, keepdim=True)
    flash = ((p.to(fmt).float() @ v).to(fmt).float() / total).to(fmt).float()
    exact, size = (p / total) @ v, (p / total) @ v.abs()
    unit = torch.exp2(torch.floor(torch.log2(exact.abs())) + math.log2(torch.finfo(fmt).eps)) * exact.sign()
    error = torch.where(exact.abs() >= CANCELLED * size, (flash - exact) / unit, torch.nan).flatten(2)
    bias, many = error.nanmean(-1), (~error.isnan()).sum(-1)
    noise = _SPREAD * ((error - bias[..., None]).square().nanmean(-1) / many).sqrt()
    return (bias.sign() * (bias.abs() - noise).clamp(min=0)).nan_to_num()


def _scores(call: AttentionCall, at: slice) -> Tensor:
    """Return the scores of the sampled rows, fp32, (batch, key heads, query heads of each * rows, keys)."""
    (batch, _, queries), (key_heads, keys) = call.q.shape[:3], call.k.shape[1:3]
    q = call.q[:, :, at].float()
    rows = q.shape[2]
    # The query heads of a key head and their rows in one dimension: no copy of K for each.
    s = q.reshape(batch, key_heads, -1, q.shape[-1]) @ call.k.float().transpose(-1, -2) * call.alpha
    if call.causal:
        row = torch.arange(*at.indices(queries), device=s.device) + keys - queries
        later = torch.arange(keys, device=s.device) > row[:, None]
        s = s.reshape(batch, key_heads, -1, rows, keys).masked_fill(later, -torch.inf).flatten(2, 3)
    return s
