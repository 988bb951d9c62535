"""Which log-sum-exp a kernel returns, and whether it is one: its shape, base, sign and scale, against fp64."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from tiebreak.kernels.external.call import FULL
from tiebreak.kernels.external.options import BINARY, NATURAL
from tiebreak.kernels.formats import FP32, ulp
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import CannotRunError
from tiebreak.matrix.questions.comparison import WithinError
from tiebreak.matrix.questions.session import Session

_UNITS = {NATURAL: 1.0, BINARY: math.log(2.0)}  # of a logarithm in each base
#: Of the sum: a fast exponential (PyTorch's on a CPU is 2^-14 small at 0), and its rounding in fp32.
_OF_THE_SUM = 2.0**-13
_ROUNDINGS = 3  # of a score in the inputs' format: the scale times q, the product, the product times the scale


def log_sum_exp(session: Session, found: WithinError) -> None:
    """A question of `usage`: what the kernel returns beside O."""
    if len(session.options.layout) < len(FULL):
        raise CannotRunError("is called for every sequence: its log-sum-exp is not looked at")
    inputs = session.inputs()
    placed = session.place(inputs, gradients=False)
    with session.calling(gradients=False):
        returned = placed.call.returned(placed.placed)
    second = returned[1] if isinstance(returned, (tuple, list)) and len(returned) > 1 else None
    judge_lse(second, inputs, session.options.lse, found)


def judge_lse(returned: object, inputs: AttentionInputs, declared: str, found: WithinError) -> None:
    """Take down whether what a kernel returns beside O is a log-sum-exp, in the base that it declares or in either.

    A kernel that declares none, and returns nothing that looks like one, can't be asked.
    """
    shape = inputs.q.shape[:3]
    lse = _per_row(returned, *shape)
    if lse is None:
        other = f"shape {tuple(returned.shape)}" if isinstance(returned, Tensor) else type(returned).__name__
        received = "returns O alone" if returned is None else f"returns {other} beside O"
        if not declared:
            raise CannotRunError(f"{received}, no log-sum-exp")
        why = f"{received}, expected a log-sum-exp of shape {tuple(shape)}"
        found.asked[f"a log-sum-exp in base {declared}"] = why
        found.measures |= {"lse_ulps": math.nan, "lse_error_over_bound": math.nan}
        return
    q, k, hidden = inputs.q.double(), inputs.expanded_k().double(), inputs.hidden()
    s = q @ k.transpose(-1, -2) * inputs.scale
    s = s if hidden is None else s.masked_fill(hidden, -torch.inf)
    natural = s.logsumexp(-1)
    # What rounding may change: of every score in the inputs' format, of P before it is summed, of the result.
    eps = torch.finfo(returned.dtype).eps if isinstance(returned, Tensor) else 0.0
    size = (q.abs() @ k.abs().transpose(-1, -2)).amax(
        -1
    ) * inputs.scale  # that errors of a row's scores are relative to
    bound = inputs.formats.inputs.unit_roundoff * (_ROUNDINGS * size + 1.0) + _OF_THE_SUM + eps * natural.abs()
    shares = {base: _largest((lse * unit - natural).abs() / bound) for base, unit in _UNITS.items()}
    base = declared or min(shares, key=shares.__getitem__)
    exact = natural / _UNITS[base]
    why, other_base = "", next((each for each, share in shares.items() if share <= 1.0), None)
    if shares[base] > 1.0 and other_base is not None:
        why = f"log-sum-exp is in base {other_base}, declared is base {base}"
    elif shares[base] > 1.0:
        known = (words for words, wrong in _mistakes(s, inputs.scale).items() if _largest((lse - wrong) / bound) <= 1.0)
        words, off = next(known, "is in neither base"), _largest(lse - natural)
        why = f"log-sum-exp {words}: off by up to {off:.3g}, {shares[base]:.3g} times what rounding allows"
    found.asked[f"a log-sum-exp in base {base}"] = why
    found.measures |= {"lse_ulps": _largest((lse - exact) / ulp(exact, FP32)), "lse_error_over_bound": shares[base]}
    found.unit = f"ulp, base {base}"


def _mistakes(s: Tensor, scale: float) -> Mapping[str, Tensor]:
    """Return what known mistakes make of these scores, by what is wrong with it."""
    largest, e, ln2 = s.amax(-1), s.logsumexp(-1), _UNITS[BINARY]
    log = e - largest
    return {
        "has the wrong sign": -e,
        "has the wrong sign, and base two": -e / ln2,
        "adds log l in base two to a maximum in base e": largest + log / ln2,
        "adds log l in base e to a maximum in base two": largest / ln2 + log,
        "lacks the scale at the maximum": largest / scale + log,
        "lacks the scale": e / scale,
        "lacks the maximum": log,
        "is the sum, not its logarithm": log.exp(),
        "is the maximum alone": largest,
    }


def _largest(x: Tensor) -> float:
    """Return the largest magnitude; NaN counts as infinite."""
    return x.abs().nan_to_num(nan=torch.inf).max().item()


def _per_row(returned: object, batch: int, heads: int, queries: int) -> Tensor | None:
    """Return one number a row, fp64, (batch, heads, queries); None where it is nothing of the kind."""
    if not isinstance(returned, Tensor) or not returned.is_floating_point():
        return None
    x, rows = returned.detach().double().cpu(), (batch, heads, queries)
    if x.shape in (rows, (*rows, 1), (batch, heads, 1, queries), (batch * heads, queries)):
        return x.reshape(rows)
    turned = (batch, queries, heads)
    return x.reshape(turned).transpose(1, 2) if x.shape in (turned, (*turned, 1)) else None
