"""Which log-sum-exp a kernel returns, and whether it is one: shape, base, sign, scale, gradients, against fp64."""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from tiebreak.cases.bounds import UNDECLARED
from tiebreak.cases.shapes import reported
from tiebreak.kernels.external.call import FULL
from tiebreak.kernels.external.options import BINARY, NATURAL
from tiebreak.kernels.formats import FP32, ulp
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import CannotRunError
from tiebreak.kernels.plans import Accumulator, RoundingPlan
from tiebreak.kernels.reference import scores
from tiebreak.matrix.questions.comparison import DK, DQ, DV, Answers, WithinError
from tiebreak.matrix.questions.session import Session

_UNITS = {NATURAL: 1.0, BINARY: math.log(2.0)}  # of a logarithm in each base
#: Errors of the sum: a fast exponential (PyTorch's on a CPU is 2^-14 small at 0), and its rounding in fp32.
_OF_THE_SUM = 2.0**-13
_ROUNDED = ("q", "k", "qk", "s", "shifted", "scale", "divisor", "log2_e", "row_sum")  # casts of a plan on the way to l
_ROUNDINGS = 3  # of a score in the inputs' format: the scale times q, the product, the product times the scale


def log_sum_exp(session: Session, results: WithinError) -> None:
    """Ask, as a question of `usage`, whether the kernel's second output is a log-sum-exp."""
    if len(session.options.layout) < len(FULL):
        raise CannotRunError("is called for every sequence: its log-sum-exp is not looked at")
    inputs, plan = session.inputs(), session.followed.plan
    second = _second(session, inputs)
    base = judge_lse(second, inputs, session.options.lse, results, plan)
    if not base:
        return
    for index, call in enumerate(call for call in reported() if call.asks == "log_sum_exp"):
        asked = session.arranged(call.inputs(session.small_draw(1 + index), session.shape.d))
        with session.leaving_out():
            if session.takes(asked):
                other = _second(session, asked)
                if session.options.lse or _per_row(other, *asked.q.shape[:3]) is not None:
                    judge_lse(other, asked, base, results, plan, call.words)
    if isinstance(second, Tensor) and session.has_gradients:
        _hold_gradients(session, inputs, base, second.dtype, results)


def _second(session: Session, inputs: AttentionInputs) -> object:
    """Return what a call returns behind O; None: nothing."""
    placed = session.place(inputs, gradients=False)
    with session.calling(gradients=False):
        returned = placed.call.returned(placed.placed)
    return returned[1] if isinstance(returned, (tuple, list)) and len(returned) > 1 else None


def _hold_gradients(
    session: Session, inputs: AttentionInputs, base: str, stored: torch.dtype, results: WithinError
) -> None:
    """Record whether gradients through the log-sum-exp are right, alone and together with those through O.

    dS = P (dP - delta + dlse): with dO = 0, dQ = scale (P dlse) K and dV = 0. A dlse of the size of dP is visible in
    the sum. With a log-sum-exp in few bits, P = exp(S - lse) is off by a factor, at most its roundoff.
    """
    dlse = session.inputs(1).do.sum(-1, keepdim=True)
    lse = inputs.visible(scores(inputs)).logsumexp(-1, keepdim=True)
    factor = (torch.finfo(stored).eps / 2 * lse.abs()).exp().float()
    both = replace(inputs, dlse=dlse)
    alone = replace(both, do=torch.zeros_like(inputs.do))
    for words, call in (("the log-sum-exp's gradient alone", alone), ("with that of O", both)):
        try:
            answer = _gradients(session, call, _UNITS[base])
        except Exception:  # it says that it takes no such gradient, and computes nothing wrong
            if session.cell.backend.poisoned():
                raise
            return
        if not answer:
            return
        parts = (DQ, DK) if call is alone else (DQ, DK, DV)
        plain = session.emulated(replace(call, dlse=dlse * factor))
        results.compare(words, plain, {part: answer[part] for part in parts}, call, levels=session.levels)
        if call is alone and answer[DV].any():
            results.requirements[words] = results.requirements[words] or f"{words}: dV is not 0"
    results.measures["error_ratio"] = max((difference.worse for difference in results.differences), default=1.0)


def _gradients(session: Session, inputs: AttentionInputs, unit: float) -> Answers:
    """Return autograd's gradients for dlse and, unless it is 0, dO; none where the log-sum-exp has no gradient."""
    placed = session.place(inputs)
    with session.calling(gradients=True):
        o, lse, *_ = placed.call.returned(placed.placed)
        rows = _per_row(lse, *inputs.q.shape[:3])
        if rows is None or not rows.requires_grad or inputs.dlse is None:
            return {}
        of, upstream = [rows * unit], [inputs.dlse[..., 0].double()]
        if inputs.do.any():
            of, upstream = [*of, o], [*upstream, placed.placed.do]
        made = torch.autograd.grad(of, placed.placed.leaves, upstream, allow_unused=True)
    # An input that autograd finds unused has a gradient of 0.
    leaves = zip(made, placed.placed.leaves, strict=True)
    return placed.collected(o, tuple(torch.zeros_like(leaf) if each is None else each for each, leaf in leaves))


def judge_lse(
    returned: object,
    inputs: AttentionInputs,
    declared: str,
    results: WithinError,
    plan: RoundingPlan = UNDECLARED.plan,
    words: str = "",
) -> str | None:
    """Record whether the kernel's second output is a log-sum-exp, in the base that it declares or in either.

    Nothing is recorded for a kernel that declares none, and returns nothing that looks like one. Returns the base, if
    it is right. The plan says how scores are rounded; `words` name a call that is not the first.
    """
    shape = inputs.q.shape[:3]
    rows = _per_row(returned, *shape)
    lse = None if rows is None else rows.detach()
    if lse is None:
        other = f"shape {tuple(returned.shape)}" if isinstance(returned, Tensor) else type(returned).__name__
        received = "returns O alone" if returned is None else f"returns {other} with O"
        if not declared:
            raise CannotRunError(f"{received}, no log-sum-exp")
        why = f"{received}, expected a log-sum-exp of shape {tuple(shape)}"
        results.requirements[f"a log-sum-exp in base {declared}{words and f', {words}'}"] = why
        results.measures |= {"lse_ulps": math.nan, "lse_error_over_bound": math.nan}
        return None
    q, k, s = inputs.q.double(), inputs.expanded_k().double(), inputs.visible(scores(inputs))
    natural = s.logsumexp(-1)
    # Allowed rounding: of every score as the plan has it, of P before it is summed, of the result.
    eps = torch.finfo(returned.dtype).eps if isinstance(returned, Tensor) else 0.0
    size = (q.abs() @ k.abs().mT).amax(-1) * inputs.scale  # that errors of a row's scores are relative to
    roundoff = inputs.formats.inputs.unit_roundoff
    of_scores = _ROUNDINGS * roundoff if _narrows_scores(plan) else (_ROUNDINGS + q.shape[-1]) * FP32.unit_roundoff
    bound = of_scores * size + roundoff + _OF_THE_SUM + eps * natural.abs()
    shares = {base: _largest((lse * unit - natural).abs() / bound) for base, unit in _UNITS.items()}
    base = declared or min(shares, key=shares.__getitem__)
    exact = natural / _UNITS[base]
    why, other_base = "", next((each for each, share in shares.items() if share <= 1.0), None)
    if shares[base] > 1.0 and other_base is not None:
        why = f"log-sum-exp is in base {other_base}, declared is base {base}"
    elif shares[base] > 1.0:
        known = (each for each, wrong in _mistakes(s, inputs.scale).items() if _largest((lse - wrong) / bound) <= 1.0)
        mistake, off = next(known, "is in neither base"), _largest(lse - natural)
        why = f"log-sum-exp {mistake}: off by up to {off:.3g}, {shares[base]:.3g} times what rounding allows"
    results.requirements[f"a log-sum-exp in base {base}{words and f', {words}'}"] = (
        f"{words}: {why}" if why and words else why
    )
    found = {"lse_ulps": _largest((lse - exact) / ulp(exact, FP32)), "lse_error_over_bound": shares[base]}
    results.measures |= {name: max(number, results.measures.get(name, 0.0)) for name, number in found.items()}
    results.unit = f"ulp, base {base}"
    return None if why else base


def _narrows_scores(plan: RoundingPlan) -> bool:
    """Return whether a plan rounds scores, or sums of their exponentials, to fewer bits than fp32 has."""
    rounded = any(getattr(plan, name).narrows for name in _ROUNDED)
    in_8_bits = plan.q8 is not None or plan.k8 is not None
    return rounded or in_8_bits or plan.smooth_k or plan.accumulator is Accumulator.ROUNDED


def _mistakes(s: Tensor, scale: float) -> Mapping[str, Tensor]:
    """Return the outputs of known mistakes on these scores, by a description of the mistake."""
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
    """Return one number a row, fp64 on the host, (batch, heads, queries); None where the output has another shape."""
    if not isinstance(returned, Tensor) or not returned.is_floating_point():
        return None
    x, rows = returned.cpu().double(), (batch, heads, queries)
    if x.shape in (rows, (*rows, 1), (batch, heads, 1, queries), (batch * heads, queries)):
        return x.reshape(rows)
    turned = (batch, queries, heads)
    return x.reshape(turned).transpose(1, 2) if x.shape in (turned, (*turned, 1)) else None
