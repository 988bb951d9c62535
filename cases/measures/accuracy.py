"""Whether the errors of an output are no larger than those of a rounding plan on the same inputs.

Two numbers say so, each paired head by head, since a plan's errors differ more between inputs than between kernels:

- the ratio of the mean squared errors in ulps. Between sound kernels and the plan that they follow it is 1 but for the
  order of summation, tile sizes and the last bit of the exponential: for eight kernels in 44 cases of 32 heads at most
  1.014 in 70,400 cells in bf16, 1.07 in 33,800 in fp16. `LIMIT` lies above both.
- the difference of their biases, where every accepted plan is unbiased: in the same cells at most 0.010 ulp.

Most plans do not say where a backward pass rounds. Those that people ship are emulated from the kernel's own O and
log-sum-exp, and the one whose bits dQ, dK and dV have is what they are held to: by the ratio of mean squared errors
again, less the error that O's rounding puts into delta, beside which a cast of dS or of a sum would not show. If no
two gradients have a pass's bits, the nearest pass counts where dQ and dK show that delta comes from O. Autograd's
gradients depend on how attention is written: others are held to the largest errors of all passes, delta's among them.
For seventeen sound kernels on normal numbers the ratio was at most 1.011 in 1,140 cells in bf16, 1.03 in 228 in fp16,
and the lower end of no interval above 1.004; one more cast to bf16 makes 1.2 and more of it.

A third number asks which way gradients err on normal numbers: their *gain error*, sum(error * reference) /
sum(reference^2), head by head. Rounding to nearest has none: that of no sound kernel differed from 0 by 4 standard
errors and 3e-4, and the error of delta read off dQ was at most 8e-5. `GAIN` is 1e-3 for both, half of what a bf16
number loses on average that is rounded in one direction.

A cast of dP before the large part of it cancels hides gains below some per cent, however many heads are drawn. So the
gain of a kernel that follows a known pass is taken beside that pass, head by head; of others it has to lie in `GAIN`
or within what 256 heads of the looser pass leave open (`*_gain_noise`), whichever is wider.

Where some heads alone are wrong, means over heads tell little: their interval is as wide as heads are apart. So no
head of normal numbers may err `WORSE` times as much as the plan errs there; tests/matrix/questions/comparison.py
derives it. In a gradient the errors of one pass in one head are a single draw: with a gradient through the maximum one
number of a row decides, and may be near 0. There the known pass that errs most in that head counts, and dQ and dK of a
kernel that follows none may err `WAYS` times as much, as one sound pass may beside another. Beside one pass
autograd's gradients of tiled loops, sound ones, came to 10.9, beside all of them to 2.4 (tests/defects/loops.py).

A cell falls where the whole interval lies beyond the limit, and passes where it lies within. Else more heads are drawn;
if they are too few at the cap the answer is not told, and the run falls. The interval's confidence leaves one false
alarm in 10,000 runs of 300 such questions, at four looks each, if the means over heads are normal. In the cells above
the mean of (square - LIMIT times the plan's square) was at most 1.5 times its standard error, where 5.2 makes a cell
fall. Squares are in ulps of the mean of |V|: in ulps of an O that cancels, their mean has no finite variance.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, isfinite

from tiebreak.cases.errors import Errors
from tiebreak.cases.measures import CallMeasure, Observed, Value
from tiebreak.cases.verdicts import Interval, quantile

LIMIT = 1.1  # ratio of mean squared errors
WORSE = 4.0  # mean squared error of one head over another's on normal numbers that no other way of rounding explains
WAYS = 4.0  # larger than another's the mean squared error of one sound backward pass may be, beside `WORSE`
GAIN = 1e-3  # gain error of dQ, dK and dV, and relative error of delta
_FALSE_ALARMS = 1e-4  # a run, at most
_USUAL_HEADS = 256
_QUESTIONS = 300  # a run: a ratio of O in about 65 cells, a bias in about 10, three ratios and four gains in about 10
#: Mean squared error of a number that is rounded to nearest once, in ulps: where the plan errs by less, exact elements
#: that the last bit of a sum turns into errors of an ulp would decide.
ROUNDED_ONCE = 1 / 12


GRADIENTS = ("dq", "dk", "dv")


def _half_width(samples: Tensor) -> float:
    """Of a one-sided interval for the mean of independent samples, for one question of a run."""
    widening = quantile(samples.numel(), 1.0 - 2.0 * _FALSE_ALARMS / _QUESTIONS)
    return widening * samples.std().item() / math.sqrt(samples.numel())


def _mean(samples: Tensor) -> Interval | None:
    """The mean of what is finite; None of fewer than two."""
    samples = samples[isfinite(samples)]
    return Interval(samples.mean().item(), _half_width(samples)) if samples.numel() > 1 else None


def ratio_of_means(ours: Tensor, theirs: Tensor, floor: float = 0.0) -> Interval | None:
    """Ratio of two means over the same heads, (heads,) each, with its one-sided interval (delta method).

    NaN and Inf are left out in pairs; None of fewer than two. The denominator counts as at least `floor`.
    """
    both = isfinite(ours) & isfinite(theirs)
    if int(both.sum()) < 2:
        return None
    ours, theirs = ours[both], theirs[both]
    base = max(theirs.mean().item(), floor)
    if base == 0.0:
        return Interval(1.0, 0.0) if ours.abs().max().item() == 0.0 else None
    ratio = ours.mean().item() / base
    return Interval(ratio, _half_width(ours - ratio * theirs) / base)


def _paired(
    of: Callable[[Errors, Errors], Value], asked: Callable[[Observed], bool] = lambda _: True
) -> Callable[[Observed], Value]:
    """What follows from the errors of O and of the plan that it is held to, where there is one and it is asked."""
    return lambda observed: of(*observed.held_to) if observed.held_to and asked(observed) else None


def _backward_ratio(name: str, observed: Observed) -> Value:
    heads = [run[name] for run in observed.backward_heads]
    ratios = [ratio_of_means(each.square, each.their_square) for each in heads]
    return max((ratio for ratio in ratios if ratio is not None), key=lambda ratio: ratio.low, default=None)


def _largest_ratio(ours: Tensor, theirs: Tensor, floor: float) -> float:
    """Return the largest ratio of what two have in one head, (heads,) each; what is NaN or Inf is told elsewhere."""
    ratios = ours / theirs.clamp(min=floor)
    return ratios[isfinite(ratios)].max().item() if bool(isfinite(ratios).any()) else math.nan


def _gain(at: int, observed: Observed) -> Value:
    errors, batch = observed.gradient_errors, observed.batches[0]
    if errors is None or observed.held_to is None or not observed.normal:
        return None
    if not observed.backward_heads:
        groups = 1 if at else batch.inputs.groups  # K and V have key heads alone; heads that share one are one sample
        first = errors.each[at].along / batch.gradients.squares[at].reshape(-1, groups).mean(1)
        plain = torch.cat([first, *(more.gains[at] for more in observed.more_gradients)])
        predicted = observed.predicted_gradients
        beside = None if predicted is None else first - predicted.gains[at]
    else:
        heads = observed.backward_heads[0][GRADIENTS[at]]
        plain, beside = heads.gain, heads.gain - heads.their_gain
    # Where it is the kernel's own, what is left beside the known pass is next to nothing.
    means = [mean for samples in (plain, beside) if samples is not None and (mean := _mean(samples)) is not None]
    return min(means, key=lambda mean: mean.half_width, default=None)


def _gain_noise(at: int, observed: Observed) -> Value:
    inputs = observed.batches[0].inputs
    if observed.backward_heads:
        gains = observed.backward_heads[0][GRADIENTS[at]].their_gain[: inputs.k.shape[0] * inputs.k.shape[1]]
    elif observed.predicted_gradients is not None and observed.normal:
        gains = observed.predicted_gradients.gains[at]
    else:
        return None
    noise = _mean(gains)
    return None if noise is None else noise.half_width * math.sqrt(inputs.q.shape[0] * inputs.q.shape[1] / _USUAL_HEADS)


MEASURES = (
    CallMeasure(
        "square_ratio",
        "mean squared error of O over that of the plan it is held to, on the same heads",
        of=_paired(lambda ours, plans: ratio_of_means(ours.head_size_square, plans.head_size_square, ROUNDED_ONCE)),
    ),
    CallMeasure(
        "worst_head",
        "the same ratio in the head where it is largest, on normal numbers",
        of=_paired(
            lambda ours, plans: _largest_ratio(ours.head_size_square, plans.head_size_square, ROUNDED_ONCE),
            lambda observed: observed.normal,
        ),
    ),
    CallMeasure(
        "worst_gradient",
        "the same ratio of dQ, dK and dV, over that of the known backward pass that errs most in that head",
        of=lambda observed: observed.worst_gradient,
    ),
    CallMeasure(
        "bias_apart",
        "bias of O less that of the plan it is held to, on normal numbers",
        "ulp",
        of=_paired(lambda ours, plans: _mean(ours.head_bias - plans.head_bias), lambda observed: observed.normal),
    ),
    *(
        CallMeasure(
            f"{name}_square_ratio",
            f"mean squared error of d{name[1].upper()} over that of the backward pass it is held to, on normal numbers",
            of=partial(_backward_ratio, name),
        )
        for name in GRADIENTS
    ),
    *(
        CallMeasure(
            f"{name}_gain_error",
            f"how much too large d{name[1].upper()} is on the whole, as a share, on normal numbers",
            of=partial(_gain, at),
        )
        for at, name in enumerate(GRADIENTS)
    ),
    *(
        CallMeasure(
            f"{name}_gain_noise",
            f"half the width of the interval that {_USUAL_HEADS} heads of the known backward pass give the same number",
            of=partial(_gain_noise, at),
        )
        for at, name in enumerate(GRADIENTS)
    ),
)
