"""The measures of one call of attention: a number each, described once, in one table.

Records, tables, gate, CSV, JUnit's XML, the page and the JSON Schema read the descriptions and know no measure by name.
Attention is a weighted mean of the values that a row sees, whatever its scores are. A bound that follows from errors of
the scores is of no use where scores are so large that their rounding can move any weight to any key; the range of V
does not look at them.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, isfinite

from tiebreak.cases.errors import Errors, coherence, difference, independent_coherence
from tiebreak.cases.gradients import delta_errors_of, ulps_of_rows
from tiebreak.cases.verdicts import LIMIT, MARGIN_ULPS, WORSE, Interval, Value, interval, quantile
from tiebreak.kernels.inputs import GRADIENT_NAMES
from tiebreak.matrix.sample import Sample
from tiebreak.reports.records.record import FARTHER, LESS, MORE, MeasureRecord

_FALSE_ALARMS = 1e-4  # a run, at most
_USUAL_HEADS = 256
_QUESTIONS = 300  # a run: a ratio of O in about 65 cells, a bias in about 10, three ratios and four gains in about 10


@dataclass(frozen=True)
class CallMeasure:
    """A measure of one call."""

    of: Callable[[Sample], Value]  # how it is computed
    described: MeasureRecord


def _half_width(samples: Tensor) -> float:
    """Return half the width of a one-sided interval for the mean of independent samples, for one question of a run."""
    if samples.numel() < 2:
        return math.inf
    widening = quantile(samples.numel(), 1.0 - 2.0 * _FALSE_ALARMS / _QUESTIONS)
    return widening * samples.std().item() / math.sqrt(samples.numel())


def _mean(samples: Tensor) -> Interval | None:
    """Return the mean of the finite ones; None of fewer than two."""
    samples = samples[isfinite(samples)]
    return Interval(samples.mean().item(), _half_width(samples)) if samples.numel() > 1 else None


def ratio_of_means(ours: Tensor, theirs: Tensor, floor: float = 0.0) -> Interval | None:
    """Return the ratio of two means over the same heads, (heads,) each, with its one-sided interval (delta method).

    NaN and Inf are left out in pairs; None without a pair, and no interval of one. The denominator is at least `floor`.
    Where it is the floor, few heads tell little of ours alone. Their ratio to theirs, the larger number, stands where
    they tell more of it and it is not surely beyond `LIMIT`: what keeps to the limit there keeps to it above the floor.
    """
    both = isfinite(ours) & isfinite(theirs)
    if not both.any():
        return None
    ours, theirs = ours[both], theirs[both]
    ours_mean, base = ours.mean().item(), theirs.mean().item()
    if base == 0.0 == floor:
        return Interval(1.0, 0.0) if ours_mean == 0.0 else None
    paired = Interval(ratio := ours_mean / base, _half_width(ours - ratio * theirs) / base) if base else None
    if paired and base >= floor:
        return paired
    floored = Interval(ours_mean / floor, _half_width(ours) / floor)
    return paired if paired and paired.high < floored.high and paired.low <= LIMIT else floored


def _square_ratio(ours: Errors, theirs: Errors) -> Interval | None:
    """Return how much larger the mean squared error of O is than a plan's.

    Heads are the samples: a kernel may be wrong in some, and another plan may be far off in one. A captured layer has
    no others: its rows tell whether errors keep to the limit, or are as large as in no sound head.
    """
    floor = theirs.head_rounded_once.nanmean().item()
    heads, rows = (
        ratio_of_means(getattr(ours, name), getattr(theirs, name), floor)
        for name in ("head_size_square", "row_size_square")
    )
    return rows if rows and (rows.high <= LIMIT or rows.low > WORSE) else heads


def _largest_ratio(ours: Errors, theirs: Errors) -> float:
    """Return the largest ratio of two errors in one head; NaN and Inf are reported elsewhere."""
    ratios = ours.head_size_square / torch.maximum(theirs.head_size_square, theirs.head_rounded_once)
    return ratios[isfinite(ratios)].max().item() if bool(isfinite(ratios).any()) else math.nan


def _to_plan(of: Callable[[Errors, Errors], Value], *, normal: bool = False) -> Callable[[Sample], Value]:
    """Return a measure of the errors of O compared with those of the plan that it is held to, where there is one."""

    def measured(sample: Sample) -> Value:
        theirs = sample.plan_errors if sample.bench.case.normal or not normal else None
        return None if theirs is None else of(sample.errors, theirs)

    return measured


def _relative_error(at: int, sample: Sample) -> Value:
    assert sample.gradient_errors is not None
    return float(sample.gradient_errors.each[at].rows.norm() / sample.first.gradients.norms[at])


def _ulps(at: int, sample: Sample) -> Value:
    assert sample.gradient_errors is not None
    exact = sample.first.gradients
    return ulps_of_rows(sample.gradient_errors.each[at].rows, exact.units[at], exact.gradients[at].shape[-1])


def _delta(sample: Sample) -> Value:
    gradients, batch = sample.outputs[0].gradients, sample.first
    if gradients is None or gradients.delta is not None:
        return None
    first = delta_errors_of(gradients.dq, batch.inputs, batch.ref, batch.gradients.gradients[0])
    samples = torch.cat([first, *(more.delta for more in sample.more_gradients)])
    return interval(samples) if samples.isfinite().all() else Interval(torch.nan, torch.inf)


def _sink(sample: Sample) -> Value:
    gradients, exact = sample.outputs[0].gradients, sample.first.gradients.sink
    if gradients is None or gradients.dsink is None or exact is None:
        return None
    return float((gradients.dsink.double() - exact).norm() / exact.norm())


def _backward_ratio(at: int, sample: Sample) -> Value:
    compared = sample.backward_heads if sample.bench.case.normal else None
    heads = compared[GRADIENT_NAMES[at]] if compared else None
    return None if heads is None else ratio_of_means(heads.square, heads.their_square)


def _gain(at: int, sample: Sample) -> Value:
    """Measure the relative gain error of one gradient, compared with the known backward pass if there is one."""
    errors, batch = sample.gradient_errors, sample.first
    if errors is None or sample.held_to is None or not sample.bench.case.normal:
        return None
    beside: Tensor | None
    if sample.backward_heads:
        heads = sample.backward_heads[GRADIENT_NAMES[at]]
        plain, beside = heads.gain, heads.gain - heads.their_gain
    else:
        groups = 1 if at else batch.inputs.groups  # K and V have key heads alone; heads that share one are one sample
        first = errors.each[at].along / batch.gradients.squares[at].reshape(-1, groups).mean(1)
        plain = torch.cat([first, *(more.gains[at] for more in sample.more_gradients)])
        predicted = sample.predicted_gradients
        beside = None if predicted is None else first - predicted.gains[at]
    # Where it is the kernel's own, what is left, compared with the known pass, is almost nothing.
    means = [mean for samples in (plain, beside) if samples is not None and (mean := _mean(samples)) is not None]
    return min(means, key=lambda mean: mean.half_width, default=None)


def _gain_noise(at: int, sample: Sample) -> Value:
    """Measure how far chance moves the gain of one gradient at the usual number of heads."""
    inputs = sample.first.inputs
    if sample.backward_heads:
        gains = sample.backward_heads[GRADIENT_NAMES[at]].their_gain[: inputs.k.shape[0] * inputs.k.shape[1]]
    elif sample.held_to is not None and sample.gradient_errors is not None and sample.predicted_gradients is not None:
        gains = sample.predicted_gradients.gains[at]
    else:
        return None
    noise = _mean(gains)
    return None if noise is None else noise.half_width * math.sqrt(inputs.q.shape[0] * inputs.q.shape[1] / _USUAL_HEADS)


def _of(name: str, about: str, of: Callable[[Sample], Value], unit: str = "", **more: Any) -> tuple[str, CallMeasure]:
    return name, CallMeasure(of, MeasureRecord(about, unit, **more))


def _attribute(name: str, about: str, unit: str = "", **more: Any) -> tuple[str, CallMeasure]:
    """Return a measure that reads the attribute of `Errors` of this name."""
    return _of(name, about, lambda sample: getattr(sample.errors, name), unit, **more)


def _each_gradient(
    name: str, about: str, of: Callable[[int, Sample], Value], unit: str = "", **more: Any
) -> list[tuple[str, CallMeasure]]:
    """Return a measure of each gradient; {} is replaced by how it is written."""
    return [
        _of(f"{each}_{name}", about.format(f"d{each[1].upper()}"), partial(of, at), unit, **more)
        for at, each in enumerate(GRADIENT_NAMES)
    ]


_FAULT: Mapping[str, Any] = {"worse": MORE, "limit": 0.0, "per": "elements", "portable": True}
_BIAS: Mapping[str, Any] = {"worse": FARTHER, "limit": 0.02, "margin": MARGIN_ULPS, "column": True}
#: Errors of O against the fp64 reference, in ulps, and of delta.
OF_O: Mapping[str, CallMeasure] = dict(
    [
        _attribute("bias", "mean signed error of O; + is away from zero", "ulp", **_BIAS),
        _attribute("rms_ulps", "root mean square error of O", "ulp", worse=MORE, column=True),
        _attribute("max_ulps", "largest error of O", "ulp", worse=MORE, limit=1.0, share=0.1, column=True),
        _attribute("error_over_bound", "largest error of O as a share of its plan's rounding-error bound", worse=MORE),
        _attribute("gain", "sum |O| / sum |reference|: below 1 the output shrinks", column=True),
        _attribute(
            "delta_bias",
            "mean of delta_lp - delta_hp, relative to mean |delta_hp|; delta is rowsum(dO * O)",
            worse=FARTHER,
            column=True,
        ),
        _attribute("left_out", "elements of O left out of the errors: the reference is 0, or the sum has cancelled"),
        _attribute(
            "nonfinite", "elements of O that are NaN or Inf where the reference is finite", **_FAULT, column=True
        ),
        _attribute("missed", "elements of O that are finite where the reference is NaN or Inf", **_FAULT),
        _attribute("elements", "elements of O"),
    ]
)
#: The same compared with the plan that a kernel declares, or follows.
BESIDE_A_PLAN: Mapping[str, CallMeasure] = dict(
    [
        _of(
            "square_ratio",
            "mean squared error of O over that of the plan it is held to, on the same heads",
            _to_plan(_square_ratio),
        ),
        _of(
            "worst_head",
            "the same ratio in the head where it is largest, on normal numbers",
            _to_plan(_largest_ratio, normal=True),
        ),
        _of(
            "worst_gradient",
            "the same ratio of dQ, dK and dV, over that of the known backward pass that errs most in that head",
            lambda sample: sample.worst_gradient,
        ),
        _of(
            "bias_apart",
            "bias of O less that of the plan it is held to, on normal numbers",
            _to_plan(lambda ours, plans: _mean(ours.head_bias - plans.head_bias), normal=True),
            "ulp",
        ),
        *_each_gradient(
            "square_ratio",
            "mean squared error of {} over that of the backward pass it is held to, on normal numbers",
            _backward_ratio,
        ),
        *_each_gradient("gain_error", "how much too large {} is on the whole, as a share, on normal numbers", _gain),
        *_each_gradient(
            "gain_noise",
            f"half the width of the interval that {_USUAL_HEADS} heads of the known backward pass give the same number",
            _gain_noise,
        ),
    ]
)
#: Errors of the gradients, and how much of them is the error of delta (paper, equations 1 and 2).
OF_GRADIENTS: Mapping[str, CallMeasure] = dict(
    [
        *_each_gradient(
            "relative_error",
            "norm of the error of {0} over the norm of {0}",
            lambda at, sample: _relative_error(at, sample) if sample.gradient_errors else None,
            worse=MORE,
        ),
        *(
            _of(
                f"equation_{at + 1}_cosine",
                f"cosine of the error of {gradient} to what the error of delta makes of it (paper, equation {at + 1})",
                partial(lambda at, sample: sample.equation_cosines and sample.equation_cosines[at], at),
            )
            for at, gradient in enumerate(("dQ", "dW_Q"))
        ),
        *_each_gradient(
            "ulps",
            "root mean square error of {}, in ulps of the largest element of its row",
            lambda at, sample: _ulps(at, sample) if sample.gradient_errors else None,
            "ulp",
            worse=MORE,
        ),
        _of(
            "delta_bias_in_dq",
            "mean error of delta as the error of dQ shows it (paper, equation 1), relative to mean |delta|",
            _delta,
            worse=FARTHER,
        ),
        _of(
            "gradients_nonfinite",
            "elements of dQ, dK, dV that are NaN or Inf, the reference's are finite",
            lambda sample: float(sample.gradient_errors.faults.nonfinite) if sample.gradient_errors else None,
            worse=MORE,
        ),
        _of("dsink_relative_error", "norm of the error of dSink, of a learned sink, over its norm", _sink, worse=MORE),
        _of(
            "gradient_error_over_bound",
            "largest error of dQ, dK and dV as a share of its rounding-error bound",
            lambda sample: sample.gradient_errors.faults.over_bound if sample.gradient_errors else None,
            worse=MORE,
        ),
    ]
)
#: Other measures of O: against a prediction and the range of V, and of the common part of a row's errors.
MORE_OF_O: Mapping[str, CallMeasure] = dict(
    [
        _of(
            "predicted_bias",
            "bias of the emulation of the declared plan on the same inputs",
            lambda sample: None if sample.prediction is None else sample.prediction.bias,
            "ulp",
        ),
        _of(
            "rounded_bias",
            "bias of a correctly rounded O on the same heads, of a user's kernel that is biased on a failure input",
            lambda sample: None if sample.rounded is None else sample.rounded.bias,
            "ulp",
            of_biased=True,
        ),
        _of(
            "prediction_difference",
            "bias less the predicted one, paired head by head",
            lambda sample: None if sample.prediction is None else difference(sample.errors, sample.prediction),
            "ulp",
            worse=FARTHER,
        ),
        _of(
            "equal_bits",
            "share of elements of O that agree with the prediction to the bit",
            lambda sample: sample.equal_bits,
            worse=LESS,
        ),
        _attribute(
            "outside_values",
            "largest distance of O from the range of V, as a share of what the plan's rounding allows",
            worse=MORE,
        ),
        _of(
            "row_coherence",
            "mean over rows of the absolute mean signed error of a row: what delta, a sum over it, feels",
            lambda sample: coherence(sample.row_errors).nanmean().item(),
            "ulp",
            worse=MORE,
        ),
        _of(
            "row_coherence_independent",
            "what row_coherence would be if a row's errors, of that size, were independent",
            lambda sample: independent_coherence(sample.row_errors).nanmean().item(),
            "ulp",
        ),
    ]
)
CALL_MEASURES = {**OF_O, **BESIDE_A_PLAN, **OF_GRADIENTS, **MORE_OF_O}


def values_of(sample: Sample, names: Collection[str] = CALL_MEASURES.keys()) -> dict[str, Value]:
    """Return the numbers of some measures, None where there is none."""
    return {name: measure.of(sample) for name, measure in CALL_MEASURES.items() if name in names}
