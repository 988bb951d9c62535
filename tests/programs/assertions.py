"""The suite's failure inputs, and its rule for a bias, in the tests of a kernel's own repository: without the matrix.

`tiebreak.inputs` makes the tensors of a case with the exact answer, `tiebreak.assert_fair` holds an O against it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tiebreak.backends.emulation.rounding import round_to
from tiebreak.cases.errors import by_key_head, signed_error_ulps
from tiebreak.cases.feature_cases import EVERY
from tiebreak.cases.verdicts import LOOKS, MARGIN_ULPS, Interval, Verdict, heads_to_tell, interval, judge
from tiebreak.kernels.features import CAUSAL
from tiebreak.kernels.formats import Format
from tiebreak.kernels.inputs import TORCH_DTYPES
from tiebreak.kernels.reference import reference
from tiebreak.reports.names import unknown

_FORMATS: dict[torch.dtype, Format] = {dtype: fmt for fmt, dtype in TORCH_DTYPES.items()}
_SCRIPTED = {case.name: case for case in EVERY}
_HEADS = 64  # by which a tie that is always broken one way is told from none


@dataclass(frozen=True)
class ScriptedCall:
    """One call of attention on the input of a case, with its exact answer."""

    q: Tensor  # (batch, heads, queries, d)
    k: Tensor  # (batch, key heads, keys, d)
    v: Tensor  # (batch, key heads, keys, d of V)
    do: Tensor  # (batch, heads, queries, d of V), an upstream gradient
    exact: Tensor  # O, (batch, heads, queries, d of V), fp64
    causal: bool  # query i sees keys 0 .. i + keys - queries
    scale: float  # of Q K^T


def inputs(
    case: str,
    *,
    heads: int = _HEADS,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 1,
) -> ScriptedCall:
    """The tensors of a scripted case, the same on every machine.

    Args:
        case: its name; `tiebreak list cases` has all, and what each is.
        heads: query heads, over all entries of the batch.
        dtype: of q, k, v and dO: bfloat16, float16 or float32.
        device: where the tensors go.
        seed: of the numbers.

    Raises:
        ValueError: no such case; one that asks for more than a causal mask, or for another format of V; another dtype.
    """
    if dtype not in _FORMATS:
        raise ValueError(f"dtype {dtype}: cases come in {', '.join(map(str, _FORMATS))}")
    if case not in _SCRIPTED:
        raise ValueError(unknown("case", case, _SCRIPTED, "`tiebreak list cases` names"))
    made = _SCRIPTED[case].make(seed, 0, heads, _FORMATS[dtype])
    if more := [feature.words for feature in made.asks() if feature != CAUSAL]:
        raise ValueError(f"{case} asks for {' and '.join(more)}, which these tensors do not say: use tiebreak check")
    if made.formats.v != _FORMATS[dtype]:
        raise ValueError(f"{case} has V in {made.formats.v.name}, not in {dtype}: use tiebreak check")
    q, k, v, do = (x.to(device, dtype) for x in (made.q, made.k, made.v, made.do))
    return ScriptedCall(q, k, v, do, reference(made).o.to(device), made.causal, made.scale)


def assert_fair(o: Tensor, exact: Tensor, *, groups: int = 1) -> None:
    """Raise an `AssertionError` unless O is unbiased: the mean signed error's interval lies within 0.05 ulp of 0.

    The error of an element is counted away from zero in ulps of the dtype of O; the samples are heads, at 99.9 %
    confidence. Too few heads to tell are no pass, nor is a NaN or an Inf. Where O itself ties, as in `sink_tie`, the
    exact one is biased once it is rounded: there a stochastic cast of O passes, and no deterministic one.

    Args:
        o: a kernel's output, (batch, heads, queries, d).
        exact: the exact one, of the same shape.
        groups: query heads that share a key head, whose errors are one sample.

    Raises:
        ValueError: the shapes differ, or the dtype of O is none that has ulps here.
    """
    if o.shape != exact.shape or o.dim() != 4 or o.dtype not in _FORMATS:
        expected = f"(batch, heads, queries, d) as of the exact one, {tuple(exact.shape)}, in {list(_FORMATS)}"
        raise ValueError(f"O is {tuple(o.shape)} in {o.dtype}; expected {expected}")
    lost = int((~torch.isfinite(o) & torch.isfinite(exact)).sum())
    if lost:
        raise AssertionError(f"NaN or Inf in {lost} of {o.numel()} elements of O")
    fmt = _FORMATS[o.dtype]
    bias, heads = _bias(o.double(), exact.double(), fmt, groups)
    verdict = judge(bias)
    if verdict is Verdict.UNBIASED:
        return
    found = f"bias {bias.mean:+.3f} +- {bias.half_width:.3f} ulp of {o.dtype} over {heads} heads"
    if verdict is Verdict.BIASED:
        way = "away from" if bias.mean > 0 else "towards"
        rounded, _ = _bias(round_to(exact.double(), fmt), exact.double(), fmt, groups)
        found = f"{found}: O is rounded {way} zero; at most {MARGIN_ULPS} ulp is fair"
        if judge(rounded) is Verdict.BIASED:
            found += (
                f". O itself ties (exact and rounded once: {rounded.mean:+.3f}): only a stochastic cast of it passes"
            )
        raise AssertionError(found)
    enough = heads_to_tell(bias, heads * 2 ** (LOOKS - 1))  # of a single look
    raise AssertionError(f"{found}: too few to tell; take {enough}")


def _bias(o: Tensor, exact: Tensor, fmt: Format, groups: int) -> tuple[Interval, int]:
    """Return the mean error of an O in ulps of a format, and of how many heads it is."""
    samples = by_key_head(signed_error_ulps(o, exact, fmt), groups)
    return interval(samples[torch.isfinite(samples)]), len(samples)
