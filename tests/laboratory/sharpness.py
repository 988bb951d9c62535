"""How sharp the loss is around a model's logits: how much it can rise in a small box around them.

Lee et al., To FP8 and Back Again (arXiv 2405.18710), equations 1 and 2: Keskar et al.'s sharpness (arXiv 1609.04836) of
the logits of the last token, in place of the weights.
"""

from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

_Array = NDArray[np.float64]

EPSILON = 5e-4  # the paper's


def sharpness(logits: Tensor, targets: Tensor, epsilon: float = EPSILON) -> float:
    """The rise of the mean loss f over one plus the loss, in per cent: 100 (max f(y + z) - f(y)) / (1 + f(y)).

    z runs over the box ``|z_i| <= epsilon (|y_i| + 1)`` and L-BFGS-B finds the maximum, from z = 0 with scipy's own
    settings. One z for every sequence: their maxima don't depend on each other, and are searched for at once.

    Args:
        logits: y, of the last token of every sequence, (sequences, vocabulary), finite.
        targets: the tokens that follow, int64 (sequences,).
        epsilon: size of the box, above 0.

    Returns:
        Per cent; 0 where the loss can't rise.

    Raises:
        ImportError: no scipy.
        ValueError: logits that are not finite, or a box without size.
    """
    y, rows = logits.detach().double().cpu().numpy(), np.arange(len(logits))
    if not np.isfinite(y).all():
        raise ValueError("the logits have NaN or Inf: there is no loss to rise")
    if not epsilon > 0:
        raise ValueError(f"epsilon must be above 0, not {epsilon}")
    answers = targets.cpu().numpy()

    def fallen(z: _Array) -> tuple[float, _Array]:
        """What the minimiser takes: the loss, summed, times -1, and its gradient."""
        moved = y + z.reshape(y.shape)
        highest = moved.max(-1, keepdims=True)
        exponentials = np.exp(moved - highest)
        sums = exponentials.sum(-1, keepdims=True)
        loss = np.log(sums[:, 0]) + highest[:, 0] - moved[rows, answers]
        gradient = exponentials / sums
        gradient[rows, answers] -= 1.0
        return -float(loss.sum()), -gradient.ravel()

    start = np.zeros(y.size)
    before = -fallen(start)[0] / len(y)
    after = -_minimum(fallen, start, epsilon * (np.abs(y) + 1.0).ravel()) / len(y)
    return 100.0 * (after - before) / (1.0 + before)


def _minimum(function: Any, start: _Array, box: _Array) -> float:
    optimize = import_module("scipy.optimize")  # an extra, and slow to import
    minimum = optimize.minimize(function, start, jac=True, method="L-BFGS-B", bounds=optimize.Bounds(-box, box))
    return float(minimum.fun)
