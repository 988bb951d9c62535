"""The suite's failure inputs, and its rule for a bias, in the tests of a kernel's own repository: without the matrix.

`tiebreak.inputs` makes the tensors of a case with the exact answer, `tiebreak.assert_fair` holds an O against it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiebreak.backends.emulation.rounding import round_to
from tiebreak.cases.errors import by_key_head, signed_error_ulps
from tiebreak.cases.feature_cases import EVERY
from tiebreak.cases.verdicts import LOOKS, MARGIN_ULPS, BiasVerdict, Interval, heads_to_tell, interval, judge
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
    if more := [feature.words for feature in made.required_features() if feature != CAUSAL]:
        raise ValueError(f"{case} asks for {' and '.join(more)}, which these tensors do not say: use tiebreak check")
    if made.formats.v != _FORMATS[dtype]:
        raise ValueError(f"{case} has V in {made.formats.v.name}, not in {dtype}: use tiebreak check")
    q, k, v, do = (x.to(device, dtype) for x in (made.q, made.k, made.v, made.do))
    return ScriptedCall(q, k, v, do, reference(made).o.to(device), made.causal, made.scale)


def assert_fair(
    o: Tensor, exact: Tensor, *, groups: int = 1, samples: int | Sequence[int] | None = None, repeat: int = 1
) -> None:
    """Raise an `AssertionError` unless a result is unbiased: its mean signed error lies within 0.05 ulp of 0.

    The error of an element is counted away from zero in ulps of the dtype of O; its mean over independent samples has a
    99.9 % interval, which lies within too. Too few samples to tell are no pass, nor is a NaN or an Inf. Where O itself
    ties, as in `sink_tie`, the exact one is biased once it is rounded: there a stochastic cast of O passes, and no
    deterministic one.

    Args:
        o: what a kernel of any kind returned, such as O of attention, (batch, heads, queries, d).
        exact: the exact one, of the same shape.
        groups: of attention, query heads that share a key head, whose errors are one sample.
        samples: the dimension, or the dimensions, along which errors are independent, such as 0 where every row has a
            sum of its own; None: heads, in each entry of the batch.
        repeat: calls one behind the other, as layers are; a bias is then told with what it makes of that many.

    Raises:
        ValueError: the shapes differ, a dimension is none of O's, or the dtype of O is none that has ulps here.
    """
    if not (isinstance(o, Tensor) and isinstance(exact, Tensor) and o.numel()):
        raise ValueError(f"O is {type(o).__name__}, the exact one {type(exact).__name__}; both are tensors, not empty")
    if o.shape != exact.shape or o.dtype not in _FORMATS or (samples is None and o.dim() != 4) or repeat < 1:
        expected = (
            f"(batch, heads, queries, d), or any shape with samples=DIM, as of the exact one, {tuple(exact.shape)}"
        )
        raise ValueError(
            f"O is {tuple(o.shape)} in {o.dtype}; expected {expected}, in {list(_FORMATS)}; repeat {repeat}"
        )
    lost = int((~torch.isfinite(o) & torch.isfinite(exact)).sum())
    if lost:
        raise AssertionError(f"NaN or Inf in {lost} of {o.numel()} elements of O")
    o, exact, fmt = _by_sample(o, samples), _by_sample(exact, samples), _FORMATS[o.dtype]
    bias, number = _bias(o.double(), exact.double(), fmt, groups)
    verdict = judge(bias)
    if verdict is BiasVerdict.UNBIASED:
        return
    what = "heads" if samples is None else "samples"
    found = f"bias {bias.mean:+.3f} +- {bias.half_width:.3f} ulp of {o.dtype} over {number} {what}"
    if verdict is BiasVerdict.BIASED:
        way = "away from" if bias.mean > 0 else "towards"
        rounded, _ = _bias(round_to(exact.double(), fmt), exact.double(), fmt, groups)
        found = f"{found}: O is rounded {way} zero; at most {MARGIN_ULPS} ulp is fair{_repeated(o, exact, repeat)}"
        if judge(rounded) is BiasVerdict.BIASED:
            found += (
                f". O itself ties (exact and rounded once: {rounded.mean:+.3f}): only a stochastic cast of it passes"
            )
        raise AssertionError(found)
    enough = heads_to_tell(bias, number * 2 ** (LOOKS - 1))  # of a single look
    raise AssertionError(f"{found}: too few to tell; take {enough}")


def _by_sample(x: Tensor, samples: int | Sequence[int] | None) -> Tensor:
    """Return (batch, heads, queries, d), of any other tensor (1, samples, 1, what a sample has)."""
    if samples is None:
        return x
    dimensions = (samples,) if isinstance(samples, int) else tuple(samples)
    if wrong := [at for at in dimensions if not -x.dim() <= at < x.dim()]:
        raise ValueError(f"samples {wrong[0]}: O has {x.dim()} dimensions, {tuple(x.shape)}")
    front = x.movedim(dimensions, tuple(range(len(dimensions))))
    return front.reshape(1, math.prod(front.shape[: len(dimensions)]), 1, -1)


def _repeated(o: Tensor, exact: Tensor, repeat: int) -> str:
    """Return what so many calls come to, each as much too large or too small as this one on the whole."""
    size = exact.abs().sum(dtype=torch.float64)
    gain = ((o.double() - exact.double()) * exact.sign()).sum() / size
    return "" if repeat == 1 else f"; it is {gain:+.2%} a call, {(1.0 + gain) ** repeat - 1.0:+.1%} after {repeat}"


def _bias(o: Tensor, exact: Tensor, fmt: Format, groups: int) -> tuple[Interval, int]:
    """Return the mean error of an O in ulps of a format, and of how many samples it is."""
    samples = by_key_head(signed_error_ulps(o, exact, fmt), groups)
    return interval(samples[torch.isfinite(samples)]), len(samples)
