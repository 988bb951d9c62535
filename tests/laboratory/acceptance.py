"""Acceptance rules in public use: what the tests of other projects say of an output, each as its source has it.

A rule holds what a kernel returned against the exact result, against that rounded to the format of the output (a
reference that computes in fp32 and casts back), or against a benchmark on the same inputs: PyTorch's eager attention in
their format, or another fused kernel. Limits are those of the sources; docs/rules.md says what the rules see.
"""

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.resources import files
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from tiebreak.kernels.formats import Format, ulp
from tiebreak.kernels.inputs import TORCH_DTYPES

OUTPUT = "O"  # the name of the output; gradients are dQ, dK and dV
OF_GRADIENTS = " of gradients"  # behind the name of a rule
FEWEST_SEEDS = 200  # that Ascend's recheck takes
_RESAMPLES, _LOWER = 2000, 0.025  # of its bootstrap
_FEWEST_PAIRS = 100  # that are not equal, from which on Cambricon asks for their signs


class LackingError(Exception):
    """A rule cannot be applied without something; the message says what."""


@dataclass(frozen=True)
class ComparedTensor:
    """One tensor that a kernel returned, with the tensors that rules compare it with; (batch, heads, N, d), fp64."""

    out: Tensor  # as the kernel returned it
    exact: Tensor  # the reference
    fmt: Format  # of the output
    eager: Tensor  # by PyTorch's eager attention in the format of the inputs
    fused: Tensor  # by a fused kernel that keeps to plan `fused`
    name: str = OUTPUT

    @cached_property
    def ref(self) -> Tensor:
        """The reference in the output's format, as torch casts it."""
        return self.exact.float().to(TORCH_DTYPES[self.fmt]).double()

    def complete(self) -> None:
        """Raise LackingError if a tensor is missing that every rule needs."""
        if self.fmt not in TORCH_DTYPES:
            raise LackingError(f"an output that torch has a format for, not {self.fmt.name}")
        for what, tensor in (("reference", self.exact), ("eager benchmark", self.eager), ("benchmark", self.fused)):
            if not _is_finite(tensor):
                raise LackingError(f"a {what} of {self.name} without NaN and Inf")


@dataclass(frozen=True)
class Reading:
    """One number that a rule looks at."""

    what: str  # in a word or two
    number: float
    limit: float  # that it may reach
    strict: bool = False  # whether it has to stay below

    @property
    def is_met(self) -> bool:
        """True if it keeps to the limit; NaN never does."""
        return self.number < self.limit if self.strict else self.number <= self.limit


@dataclass(frozen=True)
class RuleResult:
    """The verdict of a rule on a kernel's output, or on its gradients."""

    passed: bool | None  # None: it can't tell
    readings: tuple[Reading, ...] = ()
    needs: str = ""  # what it would take to tell


Readings = Iterator[Reading]
_Limit = TypeVar("_Limit", float, tuple[float, float])


@dataclass(frozen=True)
class Rule:
    """One acceptance rule."""

    formula: str  # in words: o the output, ref the reference in its format, exact the same unrounded
    source: str  # repository and path (commit or release, and date)
    of: Callable[[ComparedTensor], Readings]  # what it looks at; raises `LackingError`
    gradients: bool = False  # whether it speaks of dQ, dK and dV too
    note: str = ""  # what its formula does not say

    def ask(self, *tensors: ComparedTensor) -> RuleResult:
        """Return the rule's verdict on O, or on all gradients."""
        try:
            for each in tensors:
                each.complete()
            readings = tuple(reading for tensor in tensors for reading in self.of(tensor))
        except LackingError as lacking:
            return RuleResult(None, needs=str(lacking))
        return RuleResult(all(reading.is_met for reading in readings), readings)


def answers(output: ComparedTensor, gradients: Sequence[ComparedTensor] = ()) -> Iterator[tuple[str, RuleResult]]:
    """Yield every rule's name and verdict; those on dQ, dK and dV, if any, have `OF_GRADIENTS` after the name."""
    for name, rule in RULES.items():
        yield name, rule.ask(output)
        if gradients and rule.gradients:
            yield f"{name}{OF_GRADIENTS}", rule.ask(*gradients)


def _is_finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())


def _largest(x: Tensor) -> float:
    return x.abs().max().item()


def _limit_of(limits: Mapping[str, _Limit], fmt: Format) -> _Limit:
    if fmt.name not in limits:
        raise LackingError(f"a limit for {fmt.name}: its source has {', '.join(limits)}")
    return limits[fmt.name]


def _times_eager(x: ComparedTensor, times: float, gradients: float, floor: float = 0.0, spare: float = 0.0) -> Readings:
    """Read the largest error as a multiple of eager attention's, with a floor or with room to spare."""
    limit = (times if x.name == OUTPUT else gradients) * _largest(x.eager - x.ref)
    rounded = x.ref.to(TORCH_DTYPES[x.fmt])  # in which adding 0.3 and taking it off again rounds
    limit += spare * _largest((rounded + 0.3 - 0.3 - rounded).double())
    yield Reading(f"max error of {x.name}", _largest(x.out - x.ref), max(limit, floor))


def _close(x: ComparedTensor, limits: Mapping[str, tuple[float, float]], to: str = "ref", of: str = "") -> Readings:
    """Read every element against atol + rtol |expected| of `to`; `of`: what |expected| is of, if not of `to`."""
    expected: Tensor = getattr(x, to)
    atol, rtol = _limit_of(limits, x.fmt)
    tolerance = atol + rtol * getattr(x, of or to).abs()
    yield Reading(f"max share of tolerance of {x.name}", _largest((x.out - expected) / tolerance), 1.0)


def _mostly_close(x: ComparedTensor, tolerance: float, most: float) -> Readings:
    """Read elements relative to the output, which callers give as the second tensor, as `torch.isclose` has it."""
    beyond = ~((x.out - x.ref).abs() / (1 + x.out.abs()) <= tolerance)
    yield Reading(f"share of {x.name} beyond tolerance", beyond.double().mean().item(), most)


def _absolute_or_relative(x: ComparedTensor, tolerance: float) -> Readings:
    absolute = (x.out - x.ref).abs()
    least = torch.minimum(absolute, absolute / (x.ref.abs() + 1e-8))
    yield Reading(f"max of the smaller error of {x.name}", _largest(least), tolerance)


def _by_format(fp16: float, bf16: float, fp32: float) -> Mapping[str, float]:
    """Return limits that are powers of two."""
    return {"fp16": 2.0**fp16, "bf16": 2.0**bf16, "fp32": 2.0**fp32}


_SMALL = _by_format(-11, -8, -14)  # below it a value of Ascend's standard is small
_SMALL_ERROR = _by_format(-16, -16, -30)  # that such a value may have
_METRICS = ("MARE", "MERE", "RMSE")


def _metrics(out: Tensor, exact: Tensor) -> Tensor:
    """Return MARE, MERE and RMSE over the last dimension, (3, ...); NaN in `exact` is left out."""
    error = (out - exact).abs()
    relative = error / (exact.abs() + 1e-7)
    largest = relative.nan_to_num(nan=-1.0).amax(-1)
    return torch.stack([largest, relative.nanmean(-1), error.square().nanmean(-1).sqrt()])


def _ratios(x: ComparedTensor, shape: tuple[int, ...]) -> Tensor:
    """Return the kernel's metrics over the benchmark's, of values that are not small, over a shape's last dimension."""
    small = x.exact.abs() < _limit_of(_SMALL, x.fmt)
    normal = x.exact.masked_fill(small, torch.nan).reshape(shape)
    ours, theirs = (_metrics(each.reshape(shape), normal) for each in (x.out, x.fused))
    return ours / theirs


def _double_benchmark(x: ComparedTensor, **limits: float) -> Readings:
    """Read values that are not small by their metrics, and count the small ones with too large an error."""
    small, most = x.exact.abs() < _limit_of(_SMALL, x.fmt), _limit_of(_SMALL_ERROR, x.fmt)
    if not (x.fused != x.exact)[~small].any():
        raise LackingError(f"a benchmark of {x.name} whose error is not 0")
    ratios = _ratios(x, (-1,)).tolist() if _is_finite(x.out) else [torch.nan] * 3
    for what, ratio in zip(_METRICS, ratios, strict=True):
        yield Reading(f"{what} of {x.name}", ratio, limits[what.lower()])
    ours, theirs = (int((small & ((each - x.exact).abs() > most)).sum()) for each in (x.out, x.fused))
    yield Reading(f"small values of {x.name}", ours / max(theirs, 1), 2.0)


def _recheck(x: ComparedTensor) -> Readings:
    """Read each head as a call with a separate seed: no two share q, K or V."""
    bounds = [torch.nan] * 3
    if _is_finite(x.out):
        ratios = _ratios(x, (x.out.shape[0] * x.out.shape[1], -1)).numpy()
        ratios = ratios[:, np.isfinite(ratios).all(0)]
        if (heads := ratios.shape[1]) < FEWEST_SEEDS:
            raise LackingError(f"{FEWEST_SEEDS} heads and more, each a seed of its own: {heads} can be compared")
        draw = np.random.default_rng(0)
        medians = [np.median(ratios[:, draw.integers(0, heads, heads)], axis=1) for _ in range(_RESAMPLES)]
        bounds = np.quantile(medians, _LOWER, axis=0).tolist()
    for what, bound in zip(_METRICS, bounds, strict=True):
        yield Reading(f"lower bound of the median ratio of {what}", bound, 1.0)


def _relative(x: ComparedTensor) -> Readings:
    largest, mean, _ = _metrics(x.out.flatten(), x.exact.flatten()).tolist() if _is_finite(x.out) else [torch.nan] * 3
    limit = _limit_of(_by_format(-10, -7, -13), x.fmt)
    yield Reading("MERE", mean, limit, strict=True)
    yield Reading("MARE", largest, 10 * limit, strict=True)


def _mixed(x: ComparedTensor) -> Readings:
    error = (x.out - x.exact).abs()
    atol, rtol = _limit_of(_by_format(-9, -6, -16), x.fmt), _limit_of(_by_format(-9, -6, -10), x.fmt)
    within = error <= atol + rtol * x.exact.abs()
    yield Reading("share beyond tolerance", 1 - within.double().mean().item(), 0.01)
    hard = _limit_of({"fp16": 0.1, "bf16": 1.0, "fp32": 0.01}, x.fmt)
    limit = torch.clamp(32 * ulp(x.exact, x.fmt), min=hard)
    yield Reading("max error over its limit", _largest(error / limit), 1.0)


def _balance(x: ComparedTensor) -> Readings:
    """Read bf16 after a conversion of both to fp32, as msprobe does, and fp16 with the benchmark cast."""
    expected = x.ref if x.fmt.name == "fp16" else x.exact.float().double()
    apart = int((x.out > expected).sum()) - int((x.out < expected).sum())
    share = abs(apart) / x.out.numel() if _is_finite(x.out) else torch.nan
    yield Reading("balance", share, _limit_of(_by_format(-20, -7, -14), x.fmt))


def _cambricon(x: ComparedTensor) -> Readings:
    """Read against a CPU baseline that is cast to the format of the output first."""
    expected, error = x.ref, x.out - x.ref
    yield Reading("diff1", (error.abs().sum() / (expected.abs().sum() + 1e-9)).item(), 3e-3)
    yield Reading("diff2", (error.square().sum() / (expected.square().sum() + 1e-9)).sqrt().item(), 3e-3)
    pairs = np.unique(torch.complex(x.out, expected)[error != 0].numpy())  # a pair is one number, and sorted as such
    if len(pairs) >= _FEWEST_PAIRS:
        below = float((pairs.real < pairs.imag).mean())
        yield Reading("diff4, of the commoner sign", max(below, 1 - below), 1.0, strict=True)


def _signed_mean(x: ComparedTensor) -> Readings:
    away = ((x.out - x.exact) * x.exact.sign()).mean()
    unit = torch.finfo(TORCH_DTYPES[x.fmt]).eps * x.exact.abs().mean()
    yield Reading(f"signed mean error of {x.name}", abs((away / unit).item()), 0.05)


_READ_BY = (_times_eager, _close, _mostly_close, _absolute_or_relative, _double_benchmark, _recheck, _relative, _mixed,
            _balance, _cambricon, _signed_mean)  # fmt: skip
_BY_NAME: Mapping[str, Callable[..., Readings]] = {each.__name__.removeprefix("_"): each for each in _READ_BY}


def _rule(asks: str, given: Mapping[str, Any] | None = None, **rest: Any) -> Rule:
    """Return a rule of the table next to this file."""
    return Rule(of=partial(_BY_NAME[asks], **given or {}), **rest)


_TABLES = tomllib.loads((files(__package__) / "acceptance.toml").read_text("utf-8"))
RULES: Mapping[str, Rule] = {name: _rule(**table) for name, table in _TABLES.items()}
