"""Acceptance rules in public use: what the tests of other projects say of an output, each as its source has it.

A rule holds what a kernel returned against the exact result, against that rounded to the format of the output (a
reference that computes in fp32 and casts back), or against a benchmark on the same inputs: PyTorch's eager attention in
their format, or another fused kernel. Limits are those of the sources; docs/rules.md says what the rules see.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeVar

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
    """A rule lacks something that it needs; the message says what."""


@dataclass(frozen=True)
class Compared:
    """One tensor that a kernel returned, beside what rules hold it against; (batch, heads, N, d), fp64."""

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
        """LackingError: it has not what no rule can do without."""
        if self.fmt not in TORCH_DTYPES:
            raise LackingError(f"an output that torch has a format for, not {self.fmt.name}")
        for what, tensor in (("reference", self.exact), ("eager benchmark", self.eager), ("benchmark", self.fused)):
            if not _finite(tensor):
                raise LackingError(f"a {what} of {self.name} without NaN and Inf")


@dataclass(frozen=True)
class Reading:
    """One number that a rule looks at."""

    what: str  # in a word or two
    number: float
    limit: float  # that it may reach
    strict: bool = False  # whether it has to stay below

    @property
    def met(self) -> bool:
        """Whether it keeps to the limit; NaN never does."""
        return self.number < self.limit if self.strict else self.number <= self.limit


@dataclass(frozen=True)
class Answer:
    """What a rule says of a kernel's output, or of its gradients."""

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
    of: Callable[[Compared], Readings]  # what it looks at; raises `LackingError`
    gradients: bool = False  # whether it speaks of dQ, dK and dV too
    note: str = ""  # what its formula does not say

    def ask(self, *tensors: Compared) -> Answer:
        """What it says of O, or of all gradients."""
        try:
            for each in tensors:
                each.complete()
            readings = tuple(reading for each in tensors for reading in self.of(each))
        except LackingError as lacking:
            return Answer(None, needs=str(lacking))
        return Answer(all(reading.met for reading in readings), readings)


def answers(output: Compared, gradients: Sequence[Compared] = ()) -> Iterator[tuple[str, Answer]]:
    """What every rule says, by its name; of dQ, dK and dV, where there are, with `OF_GRADIENTS` behind it."""
    for name, rule in RULES.items():
        yield name, rule.ask(output)
        if gradients and rule.gradients:
            yield f"{name}{OF_GRADIENTS}", rule.ask(*gradients)


def _finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())


def _largest(x: Tensor) -> float:
    return x.abs().max().item()


def _limit_of(limits: Mapping[str, _Limit], fmt: Format) -> _Limit:
    if fmt.name not in limits:
        raise LackingError(f"a limit for {fmt.name}: its source has {', '.join(limits)}")
    return limits[fmt.name]


def _beside_eager(x: Compared, times: float, gradients: float, floor: float = 0.0, spare: float = 0.0) -> Readings:
    """The largest error is no more than so many times that of eager attention, with room below or beside."""
    limit = (times if x.name == OUTPUT else gradients) * _largest(x.eager - x.ref)
    rounded = x.ref.to(TORCH_DTYPES[x.fmt])  # in which adding 0.3 and taking it off again rounds
    limit += spare * _largest((rounded + 0.3 - 0.3 - rounded).double())
    yield Reading(f"max error of {x.name}", _largest(x.out - x.ref), max(limit, floor))


def _close(x: Compared, limits: Mapping[str, tuple[float, float]], to: str = "ref", of: str = "") -> Readings:
    """Every element within atol + rtol |expected| of `to`; of: what stands for |expected|, if not that."""
    expected: Tensor = getattr(x, to)
    atol, rtol = _limit_of(limits, x.fmt)
    tolerance = atol + rtol * getattr(x, of or to).abs()
    yield Reading(f"max share of tolerance of {x.name}", _largest((x.out - expected) / tolerance), 1.0)


def _mostly_close(x: Compared, tolerance: float, most: float) -> Readings:
    """Relative to the output, which callers give as the second tensor, as `torch.isclose` has it."""
    beyond = ~((x.out - x.ref).abs() / (1 + x.out.abs()) <= tolerance)
    yield Reading(f"share of {x.name} beyond tolerance", beyond.double().mean().item(), most)


def _absolute_or_relative(x: Compared, tolerance: float) -> Readings:
    absolute = (x.out - x.ref).abs()
    least = torch.minimum(absolute, absolute / (x.ref.abs() + 1e-8))
    yield Reading(f"max of the smaller error of {x.name}", _largest(least), tolerance)


def _by_format(fp16: float, bf16: float, fp32: float) -> Mapping[str, float]:
    """Powers of two."""
    return {"fp16": 2.0**fp16, "bf16": 2.0**bf16, "fp32": 2.0**fp32}


_SMALL = _by_format(-11, -8, -14)  # below it a value of Ascend's standard is small
_SMALL_ERROR = _by_format(-16, -16, -30)  # that such a value may have
_METRICS = ("MARE", "MERE", "RMSE")


def _metrics(out: Tensor, exact: Tensor) -> Tensor:
    """MARE, MERE and RMSE over the last dimension, (3, ...); NaN in `exact` is left out."""
    error = (out - exact).abs()
    relative = error / (exact.abs() + 1e-7)
    largest = relative.nan_to_num(nan=-1.0).amax(-1)
    return torch.stack([largest, relative.nanmean(-1), error.square().nanmean(-1).sqrt()])


def _ratios(x: Compared, shape: tuple[int, ...]) -> Tensor:
    """The kernel's metrics over the benchmark's, of values that are not small, over the last dimension of a shape."""
    small = x.exact.abs() < _limit_of(_SMALL, x.fmt)
    normal = x.exact.masked_fill(small, torch.nan).reshape(shape)
    ours, theirs = (_metrics(each.reshape(shape), normal) for each in (x.out, x.fused))
    return ours / theirs


def _double_benchmark(x: Compared, **limits: float) -> Readings:
    """Values that are not small by their metrics, small ones by how many have too large an error."""
    small, most = x.exact.abs() < _limit_of(_SMALL, x.fmt), _limit_of(_SMALL_ERROR, x.fmt)
    if not (x.fused != x.exact)[~small].any():
        raise LackingError(f"a benchmark of {x.name} whose error is not 0")
    ratios = _ratios(x, (-1,)).tolist() if _finite(x.out) else [torch.nan] * 3
    for what, ratio in zip(_METRICS, ratios, strict=True):
        yield Reading(f"{what} of {x.name}", ratio, limits[what.lower()])
    ours, theirs = (int((small & ((each - x.exact).abs() > most)).sum()) for each in (x.out, x.fused))
    yield Reading(f"small values of {x.name}", ours / max(theirs, 1), 2.0)


def _recheck(x: Compared) -> Readings:
    """A head is a call with a seed of its own: no two share q, K or V."""
    bounds = [torch.nan] * 3
    if _finite(x.out):
        ratios = _ratios(x, (x.out.shape[0] * x.out.shape[1], -1)).numpy()
        ratios = ratios[:, np.isfinite(ratios).all(0)]
        if (heads := ratios.shape[1]) < FEWEST_SEEDS:
            raise LackingError(f"{FEWEST_SEEDS} heads and more, each a seed of its own: {heads} can be compared")
        draw = np.random.default_rng(0)
        medians = [np.median(ratios[:, draw.integers(0, heads, heads)], axis=1) for _ in range(_RESAMPLES)]
        bounds = np.quantile(medians, _LOWER, axis=0).tolist()
    for what, bound in zip(_METRICS, bounds, strict=True):
        yield Reading(f"lower bound of the median ratio of {what}", bound, 1.0)


def _relative(x: Compared) -> Readings:
    largest, mean, _ = _metrics(x.out.flatten(), x.exact.flatten()).tolist() if _finite(x.out) else [torch.nan] * 3
    limit = _limit_of(_by_format(-10, -7, -13), x.fmt)
    yield Reading("MERE", mean, limit, strict=True)
    yield Reading("MARE", largest, 10 * limit, strict=True)


def _mixed(x: Compared) -> Readings:
    error = (x.out - x.exact).abs()
    atol, rtol = _limit_of(_by_format(-9, -6, -16), x.fmt), _limit_of(_by_format(-9, -6, -10), x.fmt)
    within = error <= atol + rtol * x.exact.abs()
    yield Reading("share beyond tolerance", 1 - within.double().mean().item(), 0.01)
    hard = _limit_of({"fp16": 0.1, "bf16": 1.0, "fp32": 0.01}, x.fmt)
    limit = torch.clamp(32 * ulp(x.exact, x.fmt), min=hard)
    yield Reading("max error over its limit", _largest(error / limit), 1.0)


def _balance(x: Compared) -> Readings:
    """Of bf16 msprobe takes both to fp32 first; of fp16 it casts the benchmark."""
    expected = x.ref if x.fmt.name == "fp16" else x.exact.float().double()
    apart = int((x.out > expected).sum()) - int((x.out < expected).sum())
    share = abs(apart) / x.out.numel() if _finite(x.out) else torch.nan
    yield Reading("balance", share, _limit_of(_by_format(-20, -7, -14), x.fmt))


def _cambricon(x: Compared) -> Readings:
    """Its CPU baseline is cast to the format of the output before it is compared."""
    expected, error = x.ref, x.out - x.ref
    yield Reading("diff1", (error.abs().sum() / (expected.abs().sum() + 1e-9)).item(), 3e-3)
    yield Reading("diff2", (error.square().sum() / (expected.square().sum() + 1e-9)).sqrt().item(), 3e-3)
    pairs = np.unique(torch.complex(x.out, expected)[error != 0].numpy())  # a pair is one number, and sorted as such
    if len(pairs) >= _FEWEST_PAIRS:
        below = float((pairs.real < pairs.imag).mean())
        yield Reading("diff4, of the commoner sign", max(below, 1 - below), 1.0, strict=True)


def _signed_mean(x: Compared) -> Readings:
    away = ((x.out - x.exact) * x.exact.sign()).mean()
    unit = torch.finfo(TORCH_DTYPES[x.fmt]).eps * x.exact.abs().mean()
    yield Reading(f"signed mean error of {x.name}", abs((away / unit).item()), 0.05)


_FLASH = "Dao-AILab/flash-attention"
_AT_FLASH = "0251105, 2026-08-15"
_AT_AITER = "e404860, 2026-08-22"
_OPBASE = "cann/opbase docs/zh/ops_precision_standard"
_AT_COMMERCIAL = "6049643, 2026-04-09; taken out by 8b296c7, 2026-04-22"
_SEVERAL = "the benchmark is another vendor's fused kernel: here flash@fused, emulated"
# Absolute and relative tolerance, by format of the output.
_TORCH = {"fp16": (1e-5, 1e-3), "bf16": (1e-5, 1.6e-2), "fp32": (1e-5, 1.3e-6)}
_GEMS = {name: (1e-4, relative) for name, (_, relative) in _TORCH.items()}
_ENGINE = {"fp16": (1e-3, 1e-3), "bf16": (1.5e-2, 1.5e-2)}
_FLASHINFER = {"fp16": (1e-3, 1e-3), "bf16": (1e-2, 1e-2)}
_VLLM = dict.fromkeys(("fp16", "bf16"), (1.5e-2, 1e-2))
_CUDNN = dict.fromkeys(("fp16", "bf16"), (2e-2, 2e-2))
_BENCH = {"fp16": (1e-2, 1e-2), "bf16": (1e-2, 1e-2), "fp32": (1e-4, 1e-4)}


RULES: Mapping[str, Rule] = {
    "flash_attention_2": Rule(
        "max |o - ref| <= 2 max |eager - ref|; gradients 3 times",
        f"{_FLASH} tests/test_flash_attn.py:1121 (2.8.4 {_AT_FLASH})",
        partial(_beside_eager, times=2, gradients=3),
        gradients=True,
        note="no absolute term; ref is cast to the output's format, so that errors are counted in whole ulps",
    ),
    "flash_attention_3": Rule(
        "max |o - ref| <= 2 max |eager - ref| + 2 max |ref + 0.3 - 0.3 - ref|, also of gradients",
        f"{_FLASH} hopper/test_flash_attn.py:285, tests/cute/test_flash_attn.py:513"
        f" (3.0.0 and 4.0.0.beta27, {_AT_FLASH})",
        partial(_beside_eager, times=2, gradients=2, spare=2),
        gradients=True,
        note="FlashAttention-4's too; 3 times with a soft cap, which no input here has",
    ),
    "aiter": Rule(
        "max |o - ref| <= max(2 max |eager - ref|, 0.01); gradients 10 times",
        f"ROCm/aiter op_tests/test_mha.py:343 ({_AT_AITER})",
        partial(_beside_eager, times=2, gradients=10, floor=0.01),
        gradients=True,
    ),
    "aiter_check_all_close": Rule(
        "|o - ref| <= 0.01 + 0.01 |o| but for 5 % of elements",
        f"ROCm/aiter aiter/test_common.py:479 checkAllclose ({_AT_AITER})",
        partial(_mostly_close, tolerance=0.01, most=0.05),
        note="it logs and returns the share; most callers assert nothing",
    ),
    **{
        f"ascend_{level.lower()}": Rule(
            f"MARE, MERE and RMSE against exact <= {mare:g}, {mere:g} and {rmse:g} times the benchmark's; of |exact|"
            " below 2^-8 (bf16) twice as many errors above 2^-16",
            f"{_OPBASE}/commercial_standard.md 4.5, {level} ({_AT_COMMERCIAL})",
            partial(_double_benchmark, mare=mare, mere=mere, rmse=rmse),
            gradients=True,
            note=_SEVERAL,
        )
        for level, mare, mere, rmse in (("L0", 10, 2, 2), ("L1", 5, 1.5, 1.5), ("L2", 2, 1.2, 1.2))
    },
    "ascend_recheck": Rule(
        "the 95 % lower bound of the median ratio of MARE, MERE and RMSE, bootstrapped over 200 seeds and more, <= 1",
        f"{_OPBASE}/commercial_standard.md 4.5.2 ({_AT_COMMERCIAL})",
        _recheck,
        note=f"asked after a fail of L0 to L2 alone, where fewer seeds fail; a head is a seed; {_SEVERAL}",
    ),
    "ascend_community_april": Rule(
        "mean |o - exact| / (|exact| + 1e-7) < 2^-7 (bf16) and the largest < 10 times that",
        f"{_OPBASE}/experimental_standard.md (6049643, 2026-04-09, to 2026-07-15)",
        _relative,
    ),
    "ascend_community": Rule(
        "|o - exact| <= 2^-6 + 2^-6 |exact| (bf16; fp16 2^-9) for 99 %, and the largest <= 1 or 32 ulps",
        f"{_OPBASE}/experimental_standard.md 2 (adbe441, from 2026-07-15)",
        _mixed,
        note="where the source says 1 or 32 ulps the larger counts",
    ),
    "msprobe_balance": Rule(
        "|count(o > exact) - count(o < exact)| / N <= 2^-7 (bf16; fp16 2^-20, fp32 2^-14)",
        "Ascend/msprobe api_accuracy_checker/compare/algorithm.py:76, precision_standard/standard_config.py:127"
        " (8ff00da, 2026-08-08)",
        _balance,
        note="without a sign, and not counted away from zero: over V of both signs a bias cancels; it decides for no"
        " operator as shipped",
    ),
    "transformer_engine": Rule(
        "|o - eager| <= 0.015 + 0.015 |eager| (bf16; fp16 0.001), also of gradients",
        "NVIDIA/TransformerEngine tests/pytorch/attention/test_attention.py:179 (d0067d0, 2026-08-22)",
        partial(_close, limits=_ENGINE, to="eager"),
        gradients=True,
    ),
    "flag_gems": Rule(
        "|o - eager| <= 0.0001 + 0.016 |eager| (bf16; fp16 0.001)",
        "flagos-ai/FlagGems src/flag_gems/testing/__init__.py:80 (5.3.4+166 ed2508b, 2026-08-21)",
        partial(_close, limits=_GEMS, to="eager"),
        note="held against PyTorch's attention of the device, in the inputs' format; a test may ask for another atol",
    ),
    "flashinfer": Rule(
        "|o - ref| <= 0.01 + 0.01 |ref| (bf16; fp16 0.001)",
        "flashinfer-ai/flashinfer tests/attention/test_blackwell_fmha.py:167 (0.6.18+27 fb28d72, 2026-08-22)",
        partial(_close, limits=_FLASHINFER),
    ),
    "vllm": Rule(
        "|o - eager| <= 0.015 + 0.01 |eager|",
        "vllm-project/vllm tests/kernels/attention/test_flash_attn.py test_varlen_with_paged_kv"
        " (0001b99; bbf906a before it has the same)",
        partial(_close, limits=_VLLM, to="eager"),
    ),
    "cudnn_frontend": Rule(
        "|o - exact| <= 0.02 + 0.02 |exact|",
        "NVIDIA/cudnn-frontend test/python/sdpa/fp16.py:667 (1.23.0+4 3929da2, 2026-05-08)",
        partial(_close, limits=_CUDNN, to="exact"),
    ),
    "kernel_bench": Rule(
        "|eager - o| <= 0.01 + 0.01 |o| (bf16, fp16)",
        "ScalingIntelligence/KernelBench src/kernelbench/eval.py:83, 804 (423217d, 2026-03-05)",
        partial(_close, limits=_BENCH, to="eager", of="out"),
    ),
    "flashinfer_bench": Rule(
        "|o - ref| <= 0.01 or |o - ref| / (|ref| + 1e-8) <= 0.01",
        "flashinfer-ai/flashinfer-bench flashinfer_bench/bench/utils.py:97 (40e6ca7, 2026-04-30)",
        partial(_absolute_or_relative, tolerance=1e-2),
    ),
    "torch_assert_close": Rule(
        "|o - ref| <= 1e-5 + 0.016 |ref| (bf16; fp16 0.001, fp32 1.3e-6)",
        "pytorch/pytorch torch/testing/_comparison.py, _DTYPE_PRECISIONS (2.13.0)",
        partial(_close, limits=_TORCH),
    ),
    "cambricon": Rule(
        "sum |d| / sum |ref| and sqrt(sum d^2 / sum ref^2) <= 0.003, and not all d of one sign; d = o - ref",
        "Cambricon/mlu-ops docs/MLU-OPS-Accuracy-Acceptance-Standard.md, pb_gtest/src/evaluator.cpp:224,"
        " executor.cpp:2274 (ref is cast) (73adc65, 2026-04-29)",
        _cambricon,
        note="diff1, diff2 and diff4 of composite operators; diff4 of 100 and more different pairs that are not equal",
    ),
    "signed_mean": Rule(
        "|mean((o - exact) sign(exact))| <= 0.05 eps mean |exact|",
        "this suite (not in use elsewhere)",
        _signed_mean,
        note="what any of these rules could ask in one line",
    ),
}
