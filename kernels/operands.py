"""The operands of attention's two products: q, K and V as given or in 8 bits with scales, tile by tile."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.counter import random_bits
from tiebreak.kernels.formats import FP32, Rounding
from tiebreak.kernels.inputs import AttentionInputs, Tiles
from tiebreak.kernels.plans import Cast, RoundingPlan
from tiebreak.kernels.quantization import Quantization, Scaling

LOG2_E = 1.4426950408889634
_FP32 = Cast(FP32)
_ROWS, _COLUMNS = -2, -1  # dimensions


@dataclass(frozen=True)
class Scaled:
    """Numbers that a product takes, and the factors of its result."""

    values: Tensor  # (batch, heads, rows, columns)
    scale: Tensor | None  # broadcastable to (batch, heads, rows, 1); None: 1, or the values have it in them

    @property
    def whole(self) -> Tensor:
        """The numbers that are meant, in fp32."""
        return self.values if self.scale is None else self.values * self.scale

    def rows(self, rows: slice) -> "Scaled":
        """Return some of the rows."""
        scale = self.scale
        if scale is not None and scale.shape[_ROWS] > 1:
            scale = scale[:, :, rows]
        return Scaled(self.values[:, :, rows], scale)


def _quantized(x: Tensor, how: Quantization | None, arithmetic: Arithmetic, inner: int = _COLUMNS) -> Scaled:
    """Return a tensor in 8 bits.

    The scale of a microscaled block is a power of two within the product's sum, so it is multiplied back exactly.
    """
    if how is None:
        return Scaled(x, None)
    scale = how.scales(x, inner)
    numbers = (x / scale).clamp(-how.largest, how.largest)
    values = arithmetic.cast(numbers, Cast(how.fmt, how.rounding, saturates=True))
    if how.scaling is Scaling.MICRO:
        return Scaled(values * scale, None)
    return Scaled(values, scale)


def _unscaled(product: Tensor, *scales: Tensor | None) -> Tensor:
    """Return a product times the scales of its operands, one after the other, each rounded to fp32."""
    for scale in scales:
        product = product if scale is None else product * scale
    return product


@dataclass(frozen=True)
class Operands:
    """One call's inputs with key heads expanded, and the masks, cut into tiles on demand."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    hidden: Tensor | None
    scale: float
    softcap: float
    sink: Tensor | None  # (heads, 1, 1)
    bias: Tensor | None
    capped_bias: bool
    tiles: Tiles
    plan: RoundingPlan
    arithmetic: Arithmetic
    taken: tuple[Scaled, Scaled, Scaled]  # q, K and V as products take them

    @classmethod
    def from_call(
        cls, inputs: AttentionInputs, plan: RoundingPlan, arithmetic: Arithmetic, tiles: Tiles | None = None
    ) -> "Operands":
        """Return the operands of a call; `tiles` are of an earlier pass over it."""
        k_held, v_held = (
            Scaled(inputs.expanded(x), None if factors is None else inputs.expanded(factors[..., None, None]))
            for x, factors in ((inputs.k, inputs.k_descale), (inputs.v, inputs.v_descale))
        )
        q, k, v, hidden = inputs.q, k_held.whole, v_held.whole, inputs.hidden()
        small_q, small_k = q, k
        if plan.smooth_k:  # in the format of the call, as PyTorch takes a mean
            input_cast = Cast(inputs.formats.inputs)
            small_k = arithmetic.cast(k - arithmetic.cast(k.mean(_ROWS, keepdim=True), input_cast), input_cast)
        if plan.q8 is not None and plan.q8.takes_scale:
            small_q = q * (inputs.scale * base_of(plan, arithmetic))
        taken = (
            _quantized(small_q, plan.q8, arithmetic),
            k_held if plan.k8 is None and small_k is k else _quantized(small_k, plan.k8, arithmetic),
            v_held if plan.v8 is None else _quantized(v, plan.v8, arithmetic, _ROWS),
        )
        sink = None if inputs.sink is None else inputs.sink[:, None, None]
        of_scores = hidden, inputs.scale, inputs.softcap, sink, inputs.added, inputs.capped_bias
        return cls(q, k, v, inputs.do, *of_scores, tiles or Tiles(), plan, arithmetic, taken)

    def scores(self, rows: slice, keys: slice) -> Tensor:
        """Return one tile of S: the product, its cast, scales, the scale alpha, S's cast, soft cap, bias and mask.

        If q's cast is narrow, or its 8 bits include it, alpha is applied to q first, with log2(e) if the exponential is
        in base two. If the plan contracts and casts neither q nor S, alpha stays in the exponential's argument; softly
        capped scores then stay as tanh gives them, and the cap is their factor. S's cast follows each step that
        computes S anew.
        """

        def make() -> Tensor:
            s = self._capped(rows, keys)
            if self.bias is None or self.capped_bias:
                return self.masked(s, rows, keys)
            bias = cut(self.bias, rows, keys)
            # FlashAttention-2 divides slopes by the factor that is to come.
            s = s + bias / self.unit if folds_scale(self.plan) else self.arithmetic.cast(s + bias, self.plan.s)
            return self.masked(s, rows, keys)

        return self.tiles.shared("s", rows, keys, make)

    def _capped(self, rows: slice, keys: slice) -> Tensor:
        """Return scores, perhaps with their bias, under their soft cap c: c tanh(s / c) in fp32, as in Triton kernels.

        If alpha is left to the exponential it is tanh(s (alpha / c)), as in FlashAttention-2 and -3.
        """
        plan, arithmetic = self.plan, self.arithmetic
        q, k = self.taken[0].rows(rows), self.taken[1].rows(keys)
        scale, base, values, of_k = self._rounded_scale(), 1.0, q.values, k.values
        if plan.q.narrows or plan.k.narrows:
            base = base_of(plan, arithmetic)
            factor, scale = scale * (math.sqrt(base) if plan.k.narrows else base), 1.0
            values = arithmetic.cast(values * factor, plan.q)
            of_k = arithmetic.cast(of_k * factor, plan.k) if plan.k.narrows else of_k
        elif plan.q8 is not None and plan.q8.takes_scale:
            scale, base = 1.0, base_of(plan, arithmetic)
        # In fp32, whatever the plan: kernels of all plans that leave q as it is share it.
        product = arithmetic.matmul(values, of_k.mT, _FP32, plan.accumulator)
        s = _unscaled(arithmetic.cast(product, plan.qk), q.scale, None if k.scale is None else k.scale.mT)
        bias = cut(self.bias, rows, keys) if self.bias is not None and self.capped_bias else None
        if folds_scale(plan):
            s = s if bias is None else s + bias / self.scale
            return arithmetic.tanh(s * torch.tensor(self.scale / self.softcap).item()) if self.softcap else s
        s = arithmetic.cast(s * (scale / base), plan.s)
        s = s if bias is None else arithmetic.cast(s + bias, plan.s)
        return arithmetic.cast(self.softcap * arithmetic.tanh(s / self.softcap), plan.s) if self.softcap else s

    def of_products(self, ds: Tensor, rows: slice, keys: slice) -> Tensor:
        """Return dS of one tile by the products that scores are made of: 1 - tanh^2 times it if they are capped."""
        if not self.softcap:
            return ds
        s = self._capped(rows, keys)
        return ds * (1.0 - (s if folds_scale(self.plan) else s / self.softcap).square())

    def with_sink(self, s: Tensor, logit: float) -> Tensor:
        """Return scores of some rows with the sink as the last, if there is one; 1 is `logit` in their unit."""
        if self.sink is None:
            return s
        return torch.cat([s, (self.sink * logit).expand(*s.shape[:-1], 1)], -1)

    @property
    def unit(self) -> float:
        """The factor that turns scores which the exponential is to multiply into logits."""
        return self.softcap or self.scale

    def masked(self, s: Tensor, rows: slice, keys: slice) -> Tensor:
        """Return a tile of scores with -inf where the mask hides them."""
        if self.hidden is None:
            return s
        hidden = cut(self.hidden, rows, keys)
        if s.device.type == "cpu":  # where a minimum takes a tenth of the time; but it passes NaN on
            lowered = torch.minimum(s, torch.where(hidden, -torch.inf, torch.inf))
            if not torch.isnan(lowered.sum()):
                return lowered
        return s.masked_fill(hidden, -torch.inf)

    def _rounded_scale(self) -> float:
        """Return the factor of scores, or of q and of K both; in fp32 where nothing is narrow."""
        plan, scale = self.plan, math.sqrt(self.scale) if self.plan.k.narrows else self.scale
        if plan.divisor.narrows:
            divisor = torch.tensor(1.0 / scale, dtype=torch.float32)
            return 1.0 / self.arithmetic.cast(divisor, plan.divisor).item()
        if plan.scale.narrows:
            unit = base_of(plan, self.arithmetic) if plan.log2_e.narrows else 1.0  # the exponential multiplies by it
            factor = torch.tensor(scale * LOG2_E if unit != 1.0 else scale, dtype=torch.float32)
            return self.arithmetic.cast(factor, plan.scale).item() / unit
        return scale

    def p_bar(self, p: Tensor) -> Scaled:
        """Return P-bar of one tile as the product takes it."""
        return _quantized(self.cast_p(p), self.plan.p8, self.arithmetic)

    def cast_p(self, p: Tensor) -> Tensor:
        """Return a tile of P-bar after its cast; a stochastic one hashes each number's place in the tile."""
        cast, bits = self.plan.p_bar, None
        if cast.rounding is Rounding.STOCHASTIC:
            bits = random_bits(0, torch.arange(p.numel(), device=p.device).view(p.shape))
        return self.arithmetic.cast(p, cast, bits)

    def weighted(self, p: Scaled, keys: slice, cast: Cast) -> Tensor:
        """Return P-bar V of one tile, cast, with a block's scale of V, no head's; ValueError: V of several blocks."""
        plan, v = self.plan, self.taken[2].rows(keys)
        first = plan.pv if plan.pv.narrows else cast
        pv = self.arithmetic.cast(self.arithmetic.matmul(p.values, v.values, first, plan.accumulator), cast)
        if v.scale is None or not self._v_by_blocks:
            return _unscaled(pv, p.scale)
        if (v.scale != v.scale[:, :, :1]).any():
            raise ValueError(f"v8={plan.v8}: a block must hold whole tiles of keys, not {keys.stop - keys.start}")
        return _unscaled(pv, p.scale, v.scale[:, :, :1])

    def unscaled(self, o: Tensor) -> Tensor:
        """Return O times the scale of V that a whole head shares."""
        return o if self._v_by_blocks else _unscaled(o, self.taken[2].scale)

    @property
    def _v_by_blocks(self) -> bool:
        return self.plan.v8 is not None and self.plan.v8.scaling is Scaling.BLOCK


def folds_scale(plan: RoundingPlan) -> bool:
    """Return whether alpha is a factor of the exponential's argument, so that scores stay as Q K^T has them."""
    in_q = plan.q.narrows or plan.k.narrows or (plan.q8 is not None and plan.q8.takes_scale)
    return plan.contracted and not plan.s.narrows and not in_q


def base_of(plan: RoundingPlan, arithmetic: Arithmetic) -> float:
    """Return the exponent that 1 in a natural exponent is, by the constant that the plan has."""
    if not plan.exponential.base_two:
        return 1.0
    return arithmetic.cast(torch.tensor(LOG2_E), plan.log2_e).item() if plan.log2_e.narrows else LOG2_E


def cut(mask: Tensor, rows: slice, keys: slice) -> Tensor:
    """Return one tile of a mask or a bias, which may have one row for all queries or one column for all keys."""
    rows, keys = (part if n > 1 else slice(None) for part, n in zip((rows, keys), mask.shape[_ROWS:], strict=True))
    return mask[:, :, rows, keys]


def in_tiles(first: int, end: int, size: int) -> list[slice]:
    """Return the tiles' rows of q, or of K and V, `size` at a time."""
    return [slice(start, min(start + size, end)) for start in range(first, end, size)]
