"""Which log-sum-exp a kernel returns, and whether it is one: its shape, base, sign and scale, against fp64."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tiebreak.kernels.external.options import BINARY, NATURAL
from tiebreak.kernels.formats import FP32, ulp
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import CannotRunError

_LN2 = math.log(2.0)
#: Of the sum: a fast exponential (PyTorch's on a CPU is 2^-14 small at 0), and its rounding in fp32.
_OF_THE_SUM = 2.0**-13
_ROUNDINGS = 3  # of a score in the inputs' format: the scale times q, the product, the product times the scale


_NONE = {"lse_ulps": math.nan, "lse_error_over_bound": math.nan}


@dataclass(frozen=True)
class JudgedLse:
    """What was returned beside O."""

    asked: str  # what it must be
    why: str  # what it is instead; empty: it is as it must
    measures: Mapping[str, float]
    unit: str = ""  # in which base it is


@dataclass(frozen=True)
class _Rows:
    """What a row's log-sum-exp is made of, fp64, (batch, heads, queries)."""

    largest: Tensor  # of the scores, scaled
    total: Tensor  # of exp(S - largest)
    size: Tensor  # scale * max over keys of |q| |k| summed over d: what a score's rounding errors are relative to
    scale: float

    @classmethod
    def of(cls, inputs: AttentionInputs) -> "_Rows":
        q, k, hidden = inputs.q.double(), inputs.expanded_k().double(), inputs.hidden()
        s = q @ k.transpose(-1, -2) * inputs.scale
        size = (q.abs() @ k.abs().transpose(-1, -2)).amax(-1) * inputs.scale
        if hidden is not None:
            s = s.masked_fill(hidden, -torch.inf)
        largest = s.amax(-1)
        return cls(largest, torch.exp(s - largest[..., None]).sum(-1), size, inputs.scale)

    @property
    def natural(self) -> Tensor:
        """The log-sum-exp."""
        return self.largest + self.total.log()

    def bound(self, inputs: AttentionInputs, returned_in: torch.dtype) -> Tensor:
        """What rounding may change: of every score in the inputs' format, of P before it is summed, of the result."""
        u = inputs.formats.inputs.unit_roundoff
        return u * (_ROUNDINGS * self.size + 1.0) + _OF_THE_SUM + torch.finfo(returned_in).eps * self.natural.abs()

    def known(self) -> Mapping[str, Tensor]:
        """Wrong ones, by what is wrong with them."""
        e, log = self.natural, self.total.log()
        return {
            "has the wrong sign": -e,
            "has the wrong sign, and base two": -e / _LN2,
            "adds log l in base two to a maximum in base e": self.largest + log / _LN2,
            "adds log l in base e to a maximum in base two": self.largest / _LN2 + log,
            "lacks the scale at the maximum": self.largest / self.scale + log,
            "lacks the scale": e / self.scale,
            "lacks the maximum": log,
            "is the sum, not its logarithm": self.total,
            "is the maximum alone": self.largest,
        }


def judge_lse(returned: object, inputs: AttentionInputs, declared: str) -> JudgedLse:
    """Whether what a kernel returns beside O is a log-sum-exp.

    Args:
        returned: the second of its results; None: there is none.
        inputs: of the call, on the host.
        declared: the base that the kernel says it has; empty: either will do.

    Raises:
        CannotRunError: it is nothing that looks like one, and the kernel does not say that it is one.
    """
    batch, heads, queries, _ = inputs.q.shape
    asked = f"a log-sum-exp{f' in base {declared}' if declared else ''}"
    lse = _per_row(returned, batch, heads, queries)
    if lse is None:
        shape = f"shape {tuple(returned.shape)}" if isinstance(returned, Tensor) else type(returned).__name__
        received = "returns O alone" if returned is None else f"returns {shape} beside O"
        if not declared:
            raise CannotRunError(f"{received}, no log-sum-exp")
        return JudgedLse(asked, f"{received}, expected a log-sum-exp of shape {(batch, heads, queries)}", _NONE)
    rows = _Rows.of(inputs)
    bases = {NATURAL: rows.natural, BINARY: rows.natural / _LN2}
    errors = {base: (lse - exact).abs() / exact.abs() * rows.natural.abs() for base, exact in bases.items()}
    shares = {base: _largest(error / rows.bound(inputs, _dtype(returned))) for base, error in errors.items()}
    base = declared or min(shares, key=shares.__getitem__)
    measures = {
        "lse_ulps": _largest((lse - bases[base]).abs() / ulp(bases[base], FP32)),
        "lse_error_over_bound": shares[base],
    }
    why = "" if shares[base] <= 1.0 else _what_is_wrong(lse, rows, shares, base, inputs)
    return JudgedLse(f"{asked} in base {base}" if not declared else asked, why, measures, f"ulp, base {base}")


def _what_is_wrong(lse: Tensor, rows: _Rows, shares: Mapping[str, float], base: str, inputs: AttentionInputs) -> str:
    bound = rows.bound(inputs, torch.float32)
    other = next((each for each, share in shares.items() if share <= 1.0), None)
    if other is not None:
        return f"log-sum-exp is in base {other}, declared is base {base}"
    likely = [words for words, wrong in rows.known().items() if _largest((lse - wrong).abs() / bound) <= 1.0]
    off = _largest((lse - rows.natural).abs())
    words = likely[0] if likely else "is in neither base"
    return f"log-sum-exp {words}: off by up to {off:.3g}, {shares[base]:.3g} times what rounding allows"


def _largest(x: Tensor) -> float:
    """NaN counts as infinite."""
    return x.nan_to_num(nan=torch.inf).max().item()


def _dtype(returned: object) -> torch.dtype:
    assert isinstance(returned, Tensor)
    return returned.dtype


def _per_row(returned: object, batch: int, heads: int, queries: int) -> Tensor | None:
    """One number a row, fp64, (batch, heads, queries); None where it is nothing of the kind."""
    if not isinstance(returned, Tensor) or not returned.is_floating_point():
        return None
    x = returned.detach().double().cpu()
    for shape in (
        (batch, heads, queries),
        (batch, heads, queries, 1),
        (batch, heads, 1, queries),
        (batch * heads, queries),
    ):
        if x.shape == shape:
            return x.reshape(batch, heads, queries)
    for shape in ((batch, queries, heads), (batch, queries, heads, 1)):
        if x.shape == shape:
            return x.reshape(batch, queries, heads).transpose(1, 2)
    return None
