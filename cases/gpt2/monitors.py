"""Monitors: what one call of attention did to its gradients, and the state of a layer's weights.

A monitor is a function of a `View`, which a `Recorder` calls for every call of attention that it is shown. A model
without observers keeps and computes nothing for them.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from tiebreak.cases.gpt2.attention import Observation
from tiebreak.cases.gpt2.model import Block
from tiebreak.kernels.arithmetic import Noise
from tiebreak.kernels.flash import Softmax
from tiebreak.kernels.formats import FP32
from tiebreak.kernels.inputs import AttentionInputs, Gradients
from tiebreak.kernels.operands import folds_scale
from tiebreak.kernels.plans import Cast
from tiebreak.kernels.shift_rules import repeated


@dataclass(frozen=True)
class View:
    """An observation with the intermediates that monitors share, each computed once and only if used."""

    observation: Observation
    head: int | None = None  # of the model's layer, the one looked at; None: all of the call

    def wide(self, x: Tensor) -> Tensor:
        """In fp64, on the host where the device has none."""
        return (x if self.observation.arithmetic.has_fp64 else x.cpu()).double()

    @property
    def heads(self) -> tuple[int, ...]:
        """The heads looked at."""
        return self.observation.heads if self.head is None else (self.head,)

    def _seen(self, x: Tensor) -> Tensor:
        """What a tensor (batch, heads, ...) has of the heads looked at."""
        if self.head is None:
            return x
        at = self.observation.heads.index(self.head)
        return x[:, at : at + 1]

    @cached_property
    def inputs(self) -> AttentionInputs:
        """q, k, v and dO of the heads looked at."""
        inputs = self.observation.inputs
        q, k, v, do = map(self._seen, (inputs.q, inputs.k, inputs.v, inputs.do))
        return replace(inputs, q=q, k=k, v=v, do=do)

    @property
    def gradients(self) -> Gradients:
        """What the backward pass returned for them."""
        gradients = self.observation.output.gradients
        assert gradients is not None
        dq, dk, dv = map(self._seen, (gradients.dq, gradients.dk, gradients.dv))
        return Gradients(dq, dk, dv, None if gradients.delta is None else self._seen(gradients.delta))

    @cached_property
    def _softmax(self) -> Softmax:
        plan = self.observation.kernel.declaration.plan
        return Softmax(self.inputs.scale, plan, self.observation.arithmetic)

    @cached_property
    def _scores(self) -> tuple[Tensor, Tensor]:
        """Scores as the kernel rounds them, and in the units that it keeps them in, -inf where masked."""
        arithmetic, plan, hidden = self.observation.arithmetic, self._softmax.plan, self.inputs.hidden()
        assert hidden is not None
        product = arithmetic.matmul(self.inputs.q, self.inputs.k.mT, Cast(FP32), plan.accumulator)
        hidden = hidden.to(product.device)
        s = torch.where(hidden, -torch.inf, arithmetic.cast(product * self.inputs.scale, plan.s))
        return s, torch.where(hidden, -torch.inf, product) if folds_scale(plan) else s

    @property
    def s(self) -> Tensor:
        """Scores as the kernel rounds them, -inf where masked, (batch, heads, tokens, tokens)."""
        return self._scores[0]

    @cached_property
    def row_max(self) -> Tensor:
        """The largest score of every row, (batch, heads, tokens, 1)."""
        return self.s.amax(-1, keepdim=True)

    @cached_property
    def p(self) -> Tensor:
        """P as the backward pass recomputes it from the log-sum-exp, fp64 of an fp32 exponential."""
        lse = self.observation.output.lse
        assert lse is not None
        return self.wide(self._softmax.p(self._scores[1], self._seen(lse)))

    @cached_property
    def p_bar(self) -> Tensor:
        """P-bar as rounded, in rows of one tile (a kernel with several rounds the earlier ones at an earlier shift)."""
        observed, softmax, kept = self.observation, self._softmax, self._scores[1]
        noise = Noise(observed.inputs.noise_seed, len(observed.heads))
        dither = self._seen(noise.dither(observed.inputs.q.shape, 0, kept.device))
        rule = observed.kernel.declaration.shift_rule
        shift = rule.propose(kept, kept.amax(-1, keepdim=True), dither, softmax.logit)
        return observed.arithmetic.cast(softmax.p_bar(kept, shift), softmax.plan.p_bar)

    @cached_property
    def output_error(self) -> Tensor:
        """O less what fp64 makes of the same rounded P-bar (paper, equation 4), fp64 (batch, heads, tokens, d)."""
        p_bar = self.wide(self.p_bar)
        exact = p_bar @ self.wide(self.inputs.v) / p_bar.sum(-1, keepdim=True)
        return self.wide(self._seen(self.observation.output.o)) - exact

    @cached_property
    def _dp(self) -> Tensor:
        return self.wide(self.inputs.do) @ self.wide(self.inputs.v).mT

    @cached_property
    def delta(self) -> Tensor:
        """rowsum(dP * P) in fp64 with the P of the backward pass, (batch, heads, tokens, 1)."""
        return (self._dp * self.p).sum(-1, keepdim=True)

    @cached_property
    def delta_error(self) -> Tensor:
        """delta_lp - delta_hp of every row (paper, equation 1), fp64 (batch, heads, tokens).

        hp is `delta`, and delta_lp counts with the sum of the backward pass's P, which is 1 but for rounding: so it is
        -rowsum(dS), exactly what the query weights feel. Of a kernel that keeps delta to itself it is the part of dQ's
        error along P K (equation 1), so it counts what else the kernel rounds in its backward pass.
        """
        inputs, delta = self.inputs, self.gradients.delta
        if delta is not None:
            return (self.wide(delta) * self.p.sum(-1, keepdim=True) - self.delta).squeeze(-1)
        dq = inputs.scale * (self.p * (self._dp - self.delta)) @ self.wide(inputs.k)
        along = ((dq - self.wide(self.gradients.dq)) * self.pk).sum(-1)
        return along / (inputs.scale * self.pk.square().sum(-1))

    @cached_property
    def pk(self) -> Tensor:
        """P K, (batch, heads, tokens, d), fp64 (paper, equation 1)."""
        return self.p @ self.wide(self.inputs.k)

    def direction(self, weight: Tensor) -> Tensor:
        """Sum over tokens of weight[T] (PK)[T]^T X[T], fp64 (heads, d, width); weight is (batch, heads, tokens)."""
        return torch.einsum("bht,bhtd,btc->hdc", self.wide(weight), self.pk, self.wide(self.observation.x))


def _total(x: Tensor) -> Tensor:
    """The sum of (n, heads, ...) over all but the heads: within each of the n, then one after the other.

    A head's number is so the same to the bit whichever heads are looked at beside it. The order of torch's own sum over
    several dimensions depends on all sizes, and that of a running sum on a GPU on chance.
    """
    return x.flatten(2).sum(-1).cpu().cumsum(0)[-1]


def _mean(x: Tensor) -> Tensor:
    """The mean of (n, heads, ...) over all but the heads, in the same order."""
    return _total(x) / (x.numel() // x.shape[1])


Measure = Callable[[View], Tensor]  # one number a head, (heads,)
MEASURES: Mapping[str, Measure] = {
    # Sum of delta_lp - delta_hp over the batch's rows (paper, figure 5a), and that of delta_hp.
    "delta_error": lambda view: _total(view.delta_error),
    "delta": lambda view: _total(view.delta.squeeze(-1)),
    # Sum over rows of rowsum(dO * error of O): what delta would err by if it were computed from O. Token after token:
    # in that order the records that are kept have summed.
    "output_delta_error": lambda view: _total(
        (view.wide(view.inputs.do) * view.output_error).transpose(1, 2).flatten(0, 1)
    ),
    # Share of rows whose maximum repeats (paper, figure 13).
    "repeated_rows": lambda view: _mean(view.wide(repeated(view.s, view.row_max))),
    # The largest logit: its mean over rows, and that of all.
    "row_max": lambda view: _mean(view.wide(view.row_max)),
    "max_logit": lambda view: view.wide(view.row_max).amax((0, 2, 3)),
}


def direction_cosine() -> Measure:
    """A measure of how far errors of delta push W_Q along one direction R (paper, equations 2 and 3).

    R is the sum over tokens of (PK)[T]^T X[T] in the first step seen, by layer and heads. The measure is the cosine to
    it of the error that delta_lp - delta_hp makes in dW_Q (equation 2).
    """
    first: dict[tuple[int, tuple[int, ...]], Tensor] = {}  # each (heads, d, width)

    def cosine(view: View) -> Tensor:
        now = view.direction(torch.ones_like(view.delta_error))
        r = first.setdefault((view.observation.layer, view.heads), now)
        return torch.nn.functional.cosine_similarity(view.direction(view.delta_error).flatten(1), r.flatten(1), dim=1)

    return cosine


class Recorder:
    """Calls measures on the calls of attention in some layers and keeps what they say."""

    def __init__(self, measures: Mapping[str, Measure], layers: Iterable[int], head: int | None = None) -> None:
        """Record `measures` of `layers`: of all their heads, or of one, at its share of the cost."""
        self._measures, self._layers, self._head = measures, frozenset(layers), head
        self._values: dict[tuple[str, int, int], list[float]] = {}

    def __call__(self, observation: Observation) -> None:
        """Measure one call of attention; one of a model's observers."""
        if observation.layer not in self._layers or self._head not in (None, *observation.heads):
            return
        view = View(observation, self._head)
        for name, measure in self._measures.items():
            for head, value in zip(view.heads, measure(view).tolist(), strict=True):
                self._values.setdefault((name, observation.layer, head), []).append(value)

    def series(self, measure: str, layer: int, head: int) -> tuple[float, ...]:
        """All values of one measure of one head, in the order of the steps."""
        return tuple(self._values[measure, layer, head])


def drift(values: Sequence[float]) -> float:
    """sum(s) / sum|s|: 1 or -1 where every value has the same sign, about 0 for a random walk; NaN for zeros."""
    size = sum(map(abs, values))
    return sum(values) / size if size else math.nan


def spectral_norms(block: Block) -> Tensor:
    """The largest singular value of every head's W_Q, (heads,) (paper, figures 3 and 11); NaN of NaN and Inf."""
    parts = block.wq.weight.detach().reshape(block.heads, -1, block.wq.weight.shape[1])
    finite = torch.isfinite(parts).flatten(1).all(1)
    # Of what is not finite torch would raise.
    norms: Tensor = torch.linalg.matrix_norm(parts.nan_to_num(0.0, 0.0, 0.0), 2)
    return norms.where(finite, torch.nan)
