"""Flash and standard attention, forward and backward, written once over an arithmetic.

The forward pass is algorithm 1 of arXiv 2510.04212 (flash attention 2 where the shift rule is `safe`) or flash
attention 1, which keeps a normalised O; the backward pass is algorithm 2 of the former. Elementwise steps are fp32
operations in the order written here; everything else goes through the arithmetic, which rounds as the plan says.
"""

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps

import torch
from torch import Tensor

from tiebreak.kernels.arithmetic import Arithmetic, Noise
from tiebreak.kernels.formats import FP32, Rounding
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput, Gradients, sum_groups
from tiebreak.kernels.operands import LOG2_E, Operands, Scaled, base_of, cut, folds_scale, in_tiles
from tiebreak.kernels.plans import Cast, DeltaSource, Exponential, RoundingPlan, SinkEntry, Steps, SumOf
from tiebreak.kernels.shift_rules import SHIFT_RULES, ShiftRule

_FP32 = Cast(FP32)
_ROWS = 32  # of a tile of queries, at least: it changes no row, and every tile costs a run over the keys
_NATURAL, _LN_2 = Exponential(), math.log(2.0)
Wanted = tuple[bool, bool, bool]  # which of dQ, dK and dV a backward pass is to compute
ALL, DELTA_ALONE = (True, True, True), (False, False, False)


class TileOrder(enum.Enum):
    """The order in which a row takes tiles of keys, and how splits share them."""

    FORWARDS = "forwards"  # from key 0 on; of splits each gets as many keys, in tiles that begin with it
    BACKWARDS = "backwards"  # the last, cut short, comes first, as in FlashAttention-2 and -3
    PREFIX = "prefix"  # they begin anew behind the keys before the queries' own: prefix prefills of vLLM and SGLang
    TILES = "tiles"  # whole tiles, as many to each split, one behind the other
    TURNS = "turns"  # whole tiles to splits in turn, as to the warps of a block


@dataclass(frozen=True)
class Block:
    """Tile sizes. Tiling off is a block at least as large as the sequence."""

    queries: int = 128
    keys: int = 128
    splits: int = 0  # of split attention; 0: every tile is one
    order: TileOrder = TileOrder.FORWARDS

    def __post_init__(self) -> None:
        if self.queries < 1 or self.keys < 1:
            raise ValueError(f"block sizes must be at least 1, not {self.queries} x {self.keys}")

    def __str__(self) -> str:
        """Return the tiles as declarations have them: `64`, `64x32` for queries by keys, or `one` for a whole row."""
        if self.keys == self.queries == ONE_TILE.keys:
            return "one"
        return f"{self.keys}" if self.queries == self.keys else f"{self.queries}x{self.keys}"

    def of_keys(self, queries: int, keys: int) -> list[list[slice]]:
        """Return tiles of keys, by split, in the order in which a row takes them; without splits each is one."""
        prefix = max(0, keys - queries) if self.order is TileOrder.PREFIX else 0
        tiles = [*in_tiles(0, prefix, self.keys), *in_tiles(prefix, keys, self.keys)]
        if not self.splits:
            return [[tile] for tile in (tiles[::-1] if self.order is TileOrder.BACKWARDS else tiles)]
        if self.order is TileOrder.TURNS:
            return [tiles[first :: self.splits] for first in range(min(self.splits, len(tiles)))]
        if self.order is TileOrder.TILES:
            return [tiles[part] for part in in_tiles(0, len(tiles), -(-len(tiles) // self.splits))]
        return [in_tiles(part.start, part.stop, self.keys) for part in in_tiles(0, keys, -(-keys // self.splits))]


BLOCK, ONE_TILE = Block(), Block(2**31, 2**31)


@dataclass(frozen=True)
class Softmax:
    """The exponential of scores less a shift, both in the units that the plan keeps scores in.

    Its argument is S - m, which the plan may round, or contracted fma(S, c, -m c), with m c rounded to fp32.
    """

    scale: float  # alpha, or a soft cap
    plan: RoundingPlan
    arithmetic: Arithmetic

    @property
    def logit(self) -> float:
        """The difference in the scores' units that is a difference of 1 between two logits."""
        return 1.0 / self.scale if folds_scale(self.plan) else 1.0

    @property
    def rescale(self) -> Exponential:
        """The exponential of factors that rescale earlier sums: never a fast one."""
        return Exponential(self.plan.exponential.base_two)

    @cached_property
    def factor(self) -> float:
        """The contraction's c in fp32: log2 e in base two, times alpha in fp32 if scores are unscaled (as in FA-2)."""
        alpha = torch.tensor(self.scale).item() if folds_scale(self.plan) else 1.0
        return torch.tensor(alpha * self.unit).item()

    @property
    def unit(self) -> float:
        """The exponent that 1 in a natural exponent is when contracted."""
        return base_of(self.plan, self.arithmetic)

    def p_bar(self, s: Tensor, shift: Tensor) -> Tensor:
        """Return 2^offset exp(S - shift), as the plan casts it."""
        plan, arithmetic = self.plan, self.arithmetic
        if plan.contracted:  # FlashAttention-3 and -4 take the offset off m c
            addend = shift * -self.factor + plan.offset * self.unit * _LN_2
            p = arithmetic.exp_of_fma(s, self.factor, addend, plan.exponential)
        else:
            p = self._power(arithmetic.cast(s - shift, plan.shifted), plan.exponential)
            p = p * 2.0**plan.offset if plan.offset else p
        return arithmetic.cast(p, plan.exp)

    def between(self, earlier: Tensor, shift: Tensor) -> Tensor:
        """Return exp(m - m') of a rescaling; contracted plans multiply m - m' by c, as FlashAttention-2 and -4 do."""
        apart = earlier - shift
        if self.plan.contracted:
            return self.arithmetic.exp_of_fma(apart, self.factor, torch.zeros_like(apart), self.rescale)
        return self._power(self.arithmetic.cast(apart, self.plan.shifted), self.rescale)

    def _power(self, x: Tensor, exponential: Exponential) -> Tensor:
        """Return the exponential of an argument that is not contracted, with the plan's own log2 e."""
        if self.plan.log2_e.narrows and exponential.base_two:
            return self.arithmetic.exp_of_fma(x, self.unit, torch.zeros_like(x), exponential)
        return self.arithmetic.exp(x, exponential)

    def p(self, s: Tensor, lse: Tensor) -> Tensor:
        """Return exp(S - log-sum-exp) of a backward pass, the log-sum-exp a natural logarithm."""
        if self.plan.contracted:
            return self.arithmetic.exp_of_fma(s, self.factor, lse * -self.unit, self.rescale)
        return self._power(s - lse, self.rescale)

    def p_of_sink(self, sink: Tensor, shift: Tensor) -> Tensor:
        """Return 2^offset exp(sink - shift), as the row sum takes it, of a sink as a logit."""
        if self.plan.contracted:  # FlashAttention-3: exp2(sink log2 e - m c)
            p = self.arithmetic.exp_of_fma(sink.expand_as(shift), self.unit, shift * -self.factor, self.rescale)
        else:
            p = self._power(sink - shift, self.rescale)
        return p * 2.0**self.plan.offset

    def natural(self, shift: Tensor) -> Tensor:
        """Return a shift as a logit."""
        return shift * self.scale if folds_scale(self.plan) else shift


def _zeroed(x: Tensor, where: Tensor) -> Tensor:
    """Return `x` with 0 in some rows, which are mostly none; the test is cheap where it waits for no device."""
    return x if x.device.type == "cpu" and not where.any() else x.masked_fill(where, 0.0)


def _finite(shift: Tensor) -> Tensor:
    """Return a shift that leaves hidden scores at -Inf: 0 where there is nothing to shift by."""
    return shift.masked_fill(shift == -torch.inf, 0.0)


@dataclass(frozen=True)
class _Tiled:
    """The common part of both passes over a call."""

    operands: Operands
    block: Block
    plan: RoundingPlan
    arithmetic: Arithmetic

    @cached_property
    def softmax(self) -> Softmax:
        return Softmax(self.operands.unit, self.plan, self.arithmetic)

    def row_sum(self, x: Tensor, cast: Cast = _FP32) -> Tensor:
        """Return sums of rows, cast at the end, or after each block of terms."""
        first, *others = torch.split(x, cast.every or x.shape[-1], -1)
        total = self.arithmetic.cast(self.arithmetic.row_sum(first, self.plan.accumulator), cast)
        for terms in others:
            total = self.arithmetic.cast(total + self.arithmetic.row_sum(terms, self.plan.accumulator), cast)
        return total


@dataclass(frozen=True)
class _Pass(_Tiled):
    shift_rule: ShiftRule
    noise: Noise

    @property
    def tiles(self) -> list[list[slice]]:
        return self.block.of_keys(self.operands.q.shape[2], self.operands.k.shape[2])

    def running(self, cast: Cast, rescaled: Tensor, added: Tensor) -> Tensor:
        """Return a running sum with a tile's part added."""
        rescaled = rescaled if cast.steps is Steps.ONCE else self.arithmetic.cast(rescaled, cast)
        return self.arithmetic.cast(rescaled + added, cast)

    def begun(self, rows: slice, entry: SinkEntry | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the start of a row: m, l, both changed by a sink that enters there, and an O of 0."""
        q, plan, sink = self.operands.q[:, :, rows], self.plan, self.operands.sink
        m = q.new_full((*q.shape[:-1], 1), -torch.inf)
        if sink is not None and entry in (SinkEntry.FIRST, SinkEntry.MAXIMUM):
            m = (sink * self.softmax.logit).expand_as(m)
        first = sink is not None and entry is SinkEntry.FIRST
        o = q.new_zeros(*q.shape[:-1], self.operands.v.shape[-1])
        return m, torch.full_like(m, 2.0**plan.offset if first else 0.0), o

    def weights(self, s: Tensor, shift: Tensor) -> tuple[Scaled, Tensor]:
        """Return P-bar of a tile as its product takes it, and its sum as l counts it."""
        p = self.softmax.p_bar(s, shift)
        p_bar = self.operands.p_bar(p)
        if self.plan.row_sum_of is SumOf.ROUNDED:
            p = p_bar.whole
        elif self.plan.row_sum_of is SumOf.CLAMPED:
            p = p.clamp(max=self.plan.p_bar.fmt.largest)
        total = self.row_sum(p, self.plan.row_sum.of_a_tile)
        if self.shift_rule.row_sum_floor:
            total = total.clamp(min=self.shift_rule.row_sum_floor)
        return p_bar, self.arithmetic.cast(total, self.plan.row_sum.of_a_tile)

    def final(self, o: Tensor, rows: slice) -> Tensor:
        """Return O after its cast; rows without a visible key give zeros."""
        cast, hidden = self.plan.o, self.operands.hidden
        if hidden is not None:
            o = _zeroed(o, cut(hidden, rows, slice(None)).all(-1, keepdim=True))
        stochastic = cast.rounding is Rounding.STOCHASTIC
        return self.arithmetic.cast(o, cast, self.noise.bits(o.shape, rows.start, o.device) if stochastic else None)


# (inputs, plan in the formats of the call, shift rule, arithmetic, tile sizes) -> O (batch, heads, queries, d) and the
# log-sum-exp, without gradients
Forward = Callable[[AttentionInputs, RoundingPlan, ShiftRule, Arithmetic, Block], AttentionOutput]


def _tile_by_tile(algorithm: Callable[[_Pass, slice], tuple[Tensor, Tensor]]) -> Forward:
    """Return a forward pass made of a function that gives O before its cast, and the log-sum-exp, for some rows."""

    @wraps(algorithm)
    def run(
        inputs: AttentionInputs, plan: RoundingPlan, shift_rule: ShiftRule, arithmetic: Arithmetic, block: Block
    ) -> AttentionOutput:
        operands, noise = Operands.from_call(inputs, plan, arithmetic), Noise(inputs.noise_seed, inputs.q.shape[1])
        forward = _Pass(operands, block, plan, arithmetic, shift_rule, noise)
        outputs, sums = [], []
        for rows in in_tiles(0, operands.q.shape[2], max(block.queries, _ROWS)):
            o, lse = algorithm(forward, rows)
            outputs.append(forward.final(o, rows))
            sums.append(lse)
        return AttentionOutput(torch.cat(outputs, 2), torch.cat(sums, 2), tiles=operands.tiles)

    return run


@_tile_by_tile
def flash(forward: _Pass, rows: slice) -> tuple[Tensor, Tensor]:
    """Compute tiled attention with a running shift (paper, algorithm 1)."""
    plan, sink, tiles = forward.plan, forward.operands.sink, [keys for part in forward.tiles for keys in part]
    o, lse = _online(forward, rows, tiles, None if sink is None else plan.sink, plan.o_bar)
    if sink is None or plan.sink is not SinkEntry.AFTERWARDS:
        return o, lse
    return _with_sink(forward.final(o, rows), lse, sink)


def _with_sink(o: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Let a sink enter rows of O that are normalised without it."""
    return o * torch.sigmoid(lse - sink), torch.logaddexp(lse, sink.expand_as(lse))


def _online(
    forward: _Pass, rows: slice, tiles: list[slice], entry: SinkEntry | None, o_bar_cast: Cast
) -> tuple[Tensor, Tensor]:
    """Return O before its cast and the log-sum-exp of some tiles; NaN and -Inf in rows that see none of their keys."""
    operands, plan, softmax, rule = forward.operands, forward.plan, forward.softmax, forward.shift_rule
    q, sink, cast = operands.q[:, :, rows], operands.sink, forward.arithmetic.cast
    m, l, o_bar = forward.begun(rows, entry)
    dither = forward.noise.dither(q.shape, rows.start, q.device) if rule.dithered else torch.zeros_like(m)
    for number, keys in enumerate(tiles):
        s = operands.scores(rows, keys)
        row_max = s.amax(-1, keepdim=True)
        proposed = rule.propose(s, row_max, dither, softmax.logit)
        # A wholly masked tile has no maximum to shift by.
        new_m = torch.maximum(m, torch.where(row_max == -torch.inf, row_max, proposed))
        if rule.lag:
            new_m = torch.where(new_m - m <= rule.lag * softmax.logit, m, new_m)
        shift = _finite(new_m)
        p_bar, block_sum = forward.weights(s, shift)
        pv = operands.weighted(p_bar, keys, o_bar_cast.of_a_tile)
        if number == 0 and entry is None:  # there is nothing to rescale yet; a sum with 0 has no -0
            l, o_bar = cast(block_sum, plan.row_sum), cast(pv + 0.0, o_bar_cast)
        else:
            alpha = softmax.between(m, shift)
            l = forward.running(plan.row_sum, alpha * l, block_sum)
            o_bar = forward.running(o_bar_cast, alpha * o_bar, pv)
        m = new_m
    if sink is not None and entry in (SinkEntry.MAXIMUM, SinkEntry.LAST):
        # A row without a visible key has only the sink.
        m = torch.where(m == -torch.inf, sink * softmax.logit, m)
        l = cast(l + softmax.p_of_sink(sink, m), plan.row_sum)
    o = operands.unscaled(o_bar / l)
    return o, softmax.natural(m) + torch.log(l) - plan.offset * _LN_2


@_tile_by_tile
def flash_1(forward: _Pass, rows: slice) -> tuple[Tensor, Tensor]:
    """Compute tiled attention whose running O is normalised after every tile, and whose P is before its cast.

    FlashAttention-1 (arXiv 2205.14135, algorithm 1), in the order of SGLang's prefill kernel, which comes from
    lightllm: with m~ and l~ of the tile, beta = exp(m~ - m'), l' = alpha l + beta l~, O' = (l / l' alpha) O +
    cast(exp(S - m~) (beta / l')) V. The plan's `p_bar` casts the normalised P, `o_bar` the running O; l always sums P
    before its cast. Each tile is shifted by its maximum. A sink that does not come first scales the last O.
    """
    operands, plan, softmax, cast = forward.operands, forward.plan, forward.softmax, forward.arithmetic.cast
    m, l, o = forward.begun(rows, plan.sink)
    for (keys,) in forward.tiles:
        s = operands.scores(rows, keys)
        row_max = s.amax(-1, keepdim=True)
        new_m = torch.maximum(m, row_max)
        shift = _finite(new_m)
        p = softmax.p_bar(s, _finite(row_max))
        alpha, beta = (softmax.between(maximum, shift) for maximum in (m, row_max))
        block_sum = forward.row_sum(p, plan.row_sum.of_a_tile)
        new_l = forward.running(plan.row_sum, alpha * l, cast(beta * block_sum, plan.row_sum.of_a_tile))
        divisor = new_l.masked_fill(new_l == 0.0, 1.0)  # no key has been visible yet: a row of zeros stays one
        p, v = cast(p * (beta / divisor), plan.p_bar), operands.taken[2].values[:, :, keys]
        pv = forward.arithmetic.matmul(p, v, plan.o_bar.of_a_tile, plan.accumulator)
        o = forward.running(plan.o_bar, o * (l / divisor * alpha), pv)
        m, l = new_m, new_l
    o, lse = operands.unscaled(o), softmax.natural(m) + torch.log(l)
    if operands.sink is None or plan.sink is SinkEntry.FIRST:
        return o, lse
    return _with_sink(forward.final(o, rows) if plan.sink is SinkEntry.AFTERWARDS else o, lse, operands.sink)


@_tile_by_tile
def split(forward: _Pass, rows: slice) -> tuple[Tensor, Tensor]:
    """Compute each split of the keys, then weigh their normalised O by their log-sum-exp: split-KV decoding.

    Flash-Decoding (https://pytorch.org/blog/flash-decoding), and the decode kernels of vLLM, SGLang and FlashInfer. The
    plan's `o_bar` casts the O of a split, as it is stored between the passes; `row_sum` casts l and the sum of weights.
    A split is one tile of keys, or, if there is a number of splits, flash attention over its tiles.
    """
    plan, cast, parts = forward.plan, forward.arithmetic.cast, []
    for tiles in forward.tiles:  # a sink is that of the first split, as in vLLM's unified kernel
        has_sink = forward.operands.sink is not None and tiles[0].start == 0
        o, lse = _online(forward, rows, tiles, SinkEntry.MAXIMUM if has_sink else None, _FP32)
        parts.append((cast(_zeroed(o, lse == -torch.inf), plan.o_bar), lse))  # 0 in rows that see none of its keys
    # Their mean, weighted by the exponentials of their log-sum-exps, in fp32, one after the other.
    top = torch.stack([lse for _, lse in parts]).amax(0)
    shift = _finite(top)
    o, total = torch.zeros_like(parts[0][0]), torch.zeros_like(top)
    for part, lse in parts:
        weight = forward.arithmetic.exp(lse - shift, _NATURAL)
        o, total = o + weight * part, cast(total + weight, plan.row_sum)
    return o / total.masked_fill(total == 0.0, 1.0), top + torch.log(total)


@_tile_by_tile
def standard(forward: _Pass, rows: slice) -> tuple[Tensor, Tensor]:
    """Compute standard attention: softmax over the whole row, shifted by its maximum, normalised before P is cast.

    The plan's `p_bar` casts the normalised P, `exp` and `row_sum` the terms that it is divided from, `o_bar` the
    product. Rows are processed in tiles to bound memory.
    """
    operands, plan, softmax = forward.operands, forward.plan, forward.softmax
    every_key = slice(0, operands.k.shape[-2])
    s = operands.with_sink(operands.scores(rows, every_key), softmax.logit)
    shift = _finite(s.amax(-1, keepdim=True))
    p = softmax.p_bar(s, shift)
    l = forward.row_sum(p, plan.row_sum)
    p = forward.arithmetic.cast(p[..., every_key] / l, plan.p_bar)
    o = operands.unscaled(forward.arithmetic.matmul(p, operands.taken[2].values, plan.o_bar, plan.accumulator))
    return o, softmax.natural(shift) + torch.log(l)


def backward(
    inputs: AttentionInputs,
    output: AttentionOutput,
    plan: RoundingPlan,
    arithmetic: Arithmetic,
    block: Block,
    wanted: Wanted = ALL,
) -> Gradients:
    """Return gradients from the stored O and log-sum-exp (paper, algorithm 2), for flash and standard attention alike.

    The forward pass's tiles are reused if it had the same block. The plan's `delta_from` is the only difference between
    the backward passes of standard and flash attention. Parts of dQ, dK and dV that are not `wanted` are NaN.
    """
    assert output.lse is not None, "the forward pass must return its log-sum-exp"
    operands, groups = Operands.from_call(inputs, plan, arithmetic, output.tiles), inputs.groups
    tape = _Tape(operands, block, plan, arithmetic, output.o, output.lse)
    delta = tape.delta() if inputs.dlse is None else tape.delta() - inputs.dlse
    made = torch.empty_like if operands.q.shape[2] and operands.k.shape[2] else torch.zeros_like  # without tiles
    dq, dk, dv = (
        made(tensor) if needed else tensor.new_full((), torch.nan).expand(tensor.shape)
        for tensor, needed in zip((operands.q, operands.k, operands.v), wanted, strict=True)
    )
    if plan.group_sums.narrows:
        dk, dv = (x[:, ::groups] for x in (dk, dv))
    # The factor of dS, and the rest of the scale.
    left = 1.0 if plan.scaled_ds.narrows or plan.scaled_q.narrows else operands.scale
    q = arithmetic.cast(operands.q * operands.scale, plan.scaled_q) if plan.scaled_q.narrows else operands.q
    k, left_of_dq = (tape.scaled_k, _LN_2) if plan.scaled_k.narrows else (operands.k, left)
    whole = ONE_TILE if plan.shift_attached else block  # what goes to a row's maximum is the sum of all of its keys
    for keys in in_tiles(0, operands.k.shape[2], whole.keys) if any(wanted) else ():
        for rows in in_tiles(0, operands.q.shape[2], block.queries):
            p, ds = tape.p(rows, keys), tape.ds(rows, keys, delta[:, :, rows])
            if wanted[2]:
                p = arithmetic.cast(p, plan.p)
                tape.add_by_key(dv[:, :, keys], tape.product(p.mT, tape.do[:, :, rows]), first=not rows.start)
            if wanted[0]:
                product = tape.product(ds, k[:, :, keys])
                tape.add(dq[:, :, rows], product, plan.sums, left_of_dq, first=not keys.start)
            if wanted[1]:
                tape.add_by_key(dk[:, :, keys], tape.product(ds.mT, q[:, :, rows]), left, first=not rows.start)
    if plan.scaled_q.narrows:
        dq = dq * operands.scale
    if not plan.group_sums.narrows:
        dk, dv = sum_groups(dk, groups), sum_groups(dv, groups)
    dk, dv = (x.to(dk.dtype) for x in inputs.gradients_as_stored(dk, dv))
    dq, dk, dv = (
        arithmetic.cast(gradient, plan.gradients) if needed else gradient
        for gradient, needed in zip((dq, dk, dv), wanted, strict=True)
    )
    return Gradients(dq, dk, dv, delta, tape.dsink(delta))


@dataclass(frozen=True)
class _Tape(_Tiled):
    """The tiles that the backward pass recomputes."""

    o: Tensor
    lse: Tensor

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return self.arithmetic.matmul(a, b, _FP32, self.plan.accumulator)

    def p(self, rows: slice, keys: slice) -> Tensor:
        return self.operands.tiles.shared("p", rows, keys, lambda: self._p(rows, keys))

    def _p(self, rows: slice, keys: slice) -> Tensor:
        operands, lse = self.operands, self.lse[:, :, rows]
        if self.plan.scaled_k.narrows and not operands.softcap and operands.bias is None:
            product = self.product(operands.q[:, :, rows], self.scaled_k[:, :, keys].mT)
            s = operands.masked(product, rows, keys)
            p = self.arithmetic.exp((s - lse * LOG2_E) * _LN_2, _NATURAL)
        else:
            p = self.softmax.p(operands.scores(rows, keys), self._shift[:, :, rows] if self._unnormalised else lse)
        # A row without a visible key has log-sum-exp -inf and no probabilities.
        return _zeroed(p, lse == -torch.inf)

    @property
    def _unnormalised(self) -> bool:
        return self.plan.delta_from is DeltaSource.UNNORMALISED

    @cached_property
    def do(self) -> Tensor:
        """The tensor that enters dP and dV: dO, or dO / l of an unnormalised O."""
        do = self.operands.do
        if not (self._unnormalised or self.plan.do_over_l.narrows):
            return do
        over_l = self.arithmetic.cast(do / self._l, self.plan.do_over_l)
        return over_l if self._unnormalised else over_l * self._l

    @cached_property
    def _shift(self) -> Tensor:
        """The row maxima, as natural logarithms."""
        every = slice(0, self.operands.q.shape[2]), slice(0, self.operands.k.shape[2])
        s = self.operands.with_sink(self.operands.scores(*every), self.softmax.logit)
        return self.softmax.natural(s.amax(-1, keepdim=True))

    @cached_property
    def _l(self) -> Tensor:
        """The sum of P-bar; 1 in a row without a visible key."""
        return torch.exp(self.lse - self._shift).masked_fill(self.lse == -torch.inf, 1.0)

    @cached_property
    def scaled_k(self) -> Tensor:
        return self.arithmetic.cast(self.operands.k * (self.operands.scale * LOG2_E), self.plan.scaled_k)

    def ds(self, rows: slice, keys: slice, delta: Tensor) -> Tensor:
        p = self.arithmetic.cast(self.p(rows, keys), self.plan.p_of_ds)
        ds = p * (self.dp(rows, keys) - (delta / self._l[:, :, rows] if self._unnormalised else delta))
        if self.plan.shift_attached:
            ds = self._through_maximum(ds, rows, keys, delta)
        ds = self.arithmetic.cast(self.operands.of_products(ds, rows, keys), self.plan.ds)
        scaled = self.plan.scaled_ds
        return self.arithmetic.cast(ds * self.operands.scale, scaled) if scaled.narrows else ds

    def _through_maximum(self, ds: Tensor, rows: slice, keys: slice, delta: Tensor) -> Tensor:
        """Send the rest of a row's sum, 0 without rounding, through its maximum, which may be the sink."""
        s, left = self.operands.scores(rows, keys), ds.sum(-1, keepdim=True)
        if self.operands.sink is not None:
            left = left - self._p_of_sink(self.operands.sink, rows) * delta
        every = self.operands.with_sink(s, self.softmax.logit)
        largest = every.clone().eq_(every.amax(-1, keepdim=True))  # numbers: a comparison to bool takes longer
        return ds - (largest / largest.sum(-1, keepdim=True))[..., : s.shape[-1]] * left

    def _p_of_sink(self, sink: Tensor, rows: slice) -> Tensor:
        return self.arithmetic.exp(sink - self.lse[:, :, rows], _NATURAL)

    def dsink(self, delta: Tensor) -> Tensor | None:
        """Return minus the sum over rows of P of the sink times delta, (heads,)."""
        if self.operands.sink is None:
            return None
        of_heads = (self._p_of_sink(self.operands.sink, slice(None)) * delta).transpose(0, 1).flatten(1)
        return self.arithmetic.cast(-self.row_sum(of_heads)[:, 0], self.plan.gradients)

    def add_by_key(self, total: Tensor, added: Tensor, factor: float = 1.0, *, first: bool) -> None:
        """Add to dK or dV, which hold the sum over each head, or over each key head."""
        cast = self.plan.group_sums if self.plan.group_sums.narrows else self.plan.sums
        for member in range(groups := added.shape[1] // total.shape[1]):
            self.add(total, added[:, member::groups], cast, factor, first=first and not member)

    def add(self, total: Tensor, added: Tensor, cast: Cast, factor: float = 1.0, *, first: bool) -> None:
        if first:
            total.zero_().add_(added, alpha=factor)  # a product plus 0 is rounded as the product
        else:
            total.add_(added if factor == 1.0 else factor * added)
        if cast.narrows:
            total.copy_(self.arithmetic.cast(total, cast))

    def dp(self, rows: slice, keys: slice) -> Tensor:
        def make() -> Tensor:
            return self.arithmetic.cast(self.product(self.do[:, :, rows], self.operands.v[:, :, keys].mT), self.plan.dp)

        return self.operands.tiles.shared("dp", rows, keys, make)

    def delta(self) -> Tensor:
        """Return delta, (batch, heads, queries, 1), from what the plan says (paper, section 3.2)."""
        do, v, source = self.operands.do, self.operands.v, self.plan.delta_from
        if source in (DeltaSource.OUTPUT, DeltaSource.UNNORMALISED):
            o = self._uncast() if self._unnormalised else self.o.float()
            return self.arithmetic.cast(self.row_sum(do * o), self.plan.delta)
        tiles = []
        for rows in in_tiles(0, do.shape[2], self.block.queries):
            total = torch.zeros_like(do[:, :, rows, :1])
            for keys in in_tiles(0, v.shape[2], self.block.keys):
                p = self.arithmetic.cast(self.p(rows, keys), self.plan.p_of_ds)
                if source is DeltaSource.PROBABILITIES:
                    total = total + self.row_sum(p * self.dp(rows, keys))
                else:
                    total = total + self.row_sum(do[:, :, rows] * self.product(p, v[:, :, keys]))
            tiles.append(total)
        return self.arithmetic.cast(torch.cat(tiles, 2), self.plan.delta)

    def _uncast(self) -> Tensor:
        """Return O before its cast, of the plain forward pass in these tiles; 0 in rows that see no key."""
        queries, keys = self.operands.q.shape[2], self.operands.k.shape[2]
        entry = None if self.operands.sink is None else SinkEntry.MAXIMUM
        plain = _Pass(self.operands, self.block, self.plan, self.arithmetic, SHIFT_RULES["safe"], Noise(0, 1))
        tiles, parts = in_tiles(0, keys, self.block.keys), in_tiles(0, queries, self.block.queries)
        o = torch.cat([_online(plain, rows, tiles, entry, self.plan.o_bar)[0] for rows in parts], 2)
        return _zeroed(o, self.lse == -torch.inf)
