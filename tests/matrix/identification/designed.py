"""Designed inputs: each shows few points of a plan, and says which.

Scores are chosen, not drawn from q and K: row i of q looks at three columns of K, whose products add up to any fp32
number exactly, in any order. V shows what becomes of them: with one key to a column O is that key's probability.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.random import Generator, Philox, SeedSequence
from torch import Tensor

from tiebreak.kernels.formats import BF16, FP16, Format, Formats
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionInputs

HEAD_DIMENSION = _D = 64  # of most inputs
_PIECES = 3  # bf16 numbers that add up to an fp32 number
_ROWS = _D // _PIECES
_SCALE = 1.0 / math.sqrt(_D)
_HIDDEN = -200.0  # a score of which fp32 has no probability, below a maximum of 0
_GRID = 2.0**-18  # of scores that fp16 has to hold in three pieces
_SMALLEST = -14  # exponent of a score of which fp16 has all bits in three pieces
FPREV = "FPRev (arXiv 2411.00442)"
HAWKEYE = "Hawkeye (arXiv 2603.20421)"
MMA_SIM = "MMA-Sim (arXiv 2511.10909)"

# Roles of an input: a plan has to explain all of it; or fp32's last bits show, so that it tells plans apart, and no
# plan has to; or besides it shows how products are added up, and is asked of that alone.
_BINDS, _FINE, _SUMS = "binds", "fine", "sums"
Make = Callable[[Generator, Format], AttentionInputs]


@dataclass(frozen=True)
class Designed:
    """One designed input, in a version for every seed."""

    name: str  # how the report calls it
    recipe: Make  # makes one
    shows: str  # what of a plan, in words
    method: str = "this suite"  # whose
    role: str = _BINDS
    formats: tuple[Format, ...] = (BF16, FP16)  # that can hold it

    def make(self, fmt: Format, seed: int = 0) -> AttentionInputs:
        """Return the input in a format."""
        return self.recipe(Generator(Philox(SeedSequence([seed, *self.name.encode()]))), fmt)


def _drawn(rng: Generator, low: float, high: float, *shape: int) -> Tensor:
    return torch.from_numpy(rng.uniform(low, high, shape))


def _signs(rng: Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.choice([-1.0, 1.0], shape))


def _rounded(x: Tensor, fmt: Format) -> Tensor:
    return x.to(TORCH_DTYPES[fmt]).float()


def _on_grid(x: Tensor) -> Tensor:
    return ((x / _GRID).round() * _GRID).float()


def with_scores(scores: Tensor, v: Tensor, fmt: Format) -> AttentionInputs:
    """Return inputs with these scores, fp32 (heads, rows, keys), and this V, (heads, keys, 64), of the format."""
    heads, rows, keys = scores.shape
    q, k = torch.zeros(heads, rows, _D), torch.zeros(heads, keys, _D)
    left = scores.float() / _SCALE
    for piece in range(_PIECES):
        part = _rounded(left, fmt)
        left = left - part
        columns = torch.arange(rows) * _PIECES + piece
        q[:, torch.arange(rows), columns] = 1.0
        k[:, :, columns] = part.transpose(1, 2)
    assert not left.any(), "three pieces hold every score"
    q, k, v = (x[None].contiguous() for x in (q, k, v.float()))
    return AttentionInputs(q, k, v, torch.ones_like(q), Formats.of(fmt))


def _one_hot(heads: int, keys: int, rng: Generator) -> Tensor:
    """Draw V with one key to a column, one of each run of keys / 64; the others are 0."""
    at = torch.arange(0, keys, keys // _D) + torch.from_numpy(rng.integers(0, keys // _D, (heads, _D)))
    return torch.zeros(heads, keys, _D).scatter_(1, at[:, None], 1.0)


def _signed_values(rng: Generator, heads: int, keys: int, fmt: Format) -> Tensor:
    """Draw V between 1 and 4, one sign a column."""
    signs = _signs(rng, heads, 1, _D)
    return _rounded(_drawn(rng, 1.0, 4.0, heads, keys, _D) * signs, fmt)


def _maxima(rng: Generator, heads: int, keys: int, counts: Tensor) -> Tensor:
    """Return scores with some numbers of equal maxima a row, anywhere, of 0; the other keys don't count."""
    order = torch.from_numpy(rng.permuted(np.broadcast_to(np.arange(keys), (heads, len(counts), keys)), axis=-1).copy())
    return torch.where(order < counts[None, :, None], 0.0, _HIDDEN)


def _equal_keys(rng: Generator, fmt: Format) -> AttentionInputs:
    counts = torch.tensor([1, 2, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 6, 6, 7, 7, 8, 9, 12, 16])
    return with_scores(_maxima(rng, 4, _D, counts), _signed_values(rng, 4, _D, fmt), fmt)


def _many_equal_keys(rng: Generator, fmt: Format) -> AttentionInputs:
    counts = torch.from_numpy(rng.integers(32, 128, _ROWS) * 2 + 1)
    return with_scores(_maxima(rng, 2, 256, counts), _signed_values(rng, 2, 256, fmt), fmt)


def _probabilities(rng: Generator, fmt: Format) -> AttentionInputs:
    scores = _drawn(rng, -6.0, 0.0, 4, _ROWS, _D)
    scores += torch.where(torch.arange(_ROWS)[:, None] % 2 == 0, -scores.amax(-1, keepdim=True), 3.0)
    return with_scores(_on_grid(scores), _one_hot(4, _D, rng), fmt)


def _ties(x: Tensor, exponents: Tensor | float, fmt: Format) -> Tensor:
    """Return numbers of these exponents halfway between the format's in even columns, with 11 bits in odd ones."""
    spacing = torch.exp2(exponents - torch.where(torch.arange(_D) % 2 == 0, fmt.mantissa_bits, 10))
    return ((x / spacing).floor() + 0.5) * spacing


def _tied_scores(rng: Generator, fmt: Format) -> AttentionInputs:
    """Draw scores that are ties; every third row's maximum is 0."""
    scores = _drawn(rng, -8.0, 6.0, 4, _ROWS, _D)
    scores[:, ::3] = -scores[:, ::3].abs()
    scores = _ties(scores, scores.abs().log2().floor().clamp(min=_SMALLEST), fmt)
    scores[:, ::3, 0] = 0.0
    return with_scores(scores, _one_hot(4, _D, rng), fmt)


def _tied_probabilities(rng: Generator, fmt: Format) -> AttentionInputs:
    """Draw rows of 64 keys with ties of P-bar, then rows of two keys whose P / l are ties."""
    ties = _ties(_drawn(rng, 0.52, 0.93, 4, _ROWS, _D), -1.0, fmt)
    scores = torch.log(ties).float()
    scores[:, :, 0] = 0.0
    pairs = slice(_ROWS // 2, None)
    share = ties[:, pairs, 1]
    scores[:, pairs, 1:] = _HIDDEN
    scores[:, pairs, 1] = torch.log((1.0 - share) / share).float()
    return with_scores(scores, _one_hot(4, _D, rng), fmt)


def _long_sums(rng: Generator, fmt: Format) -> AttentionInputs:
    """Draw one key that V shows, and up to 63 equal ones that only l counts."""
    scores = torch.full((4, _ROWS, _D), _HIDDEN)
    alike = _on_grid(_drawn(rng, -5.0, -0.05, 4, _ROWS, 1)).expand_as(scores)
    scores = torch.where(torch.arange(_D) < torch.from_numpy(rng.integers(2, _D, (4, _ROWS, 1))), alike, scores)
    scores[:, :, 0] = 0.0
    v = torch.zeros(4, _D, _D)
    v[:, 0] = _signed_values(rng, 4, 1, fmt)[:, 0]
    return with_scores(scores, v, fmt)


def _rising(height: tuple[float, float], keys: int = 256, heads: int = 2) -> Make:
    """Return scores that rise, or in odd rows fall, by `height` over all keys; each 16 have one maximum."""

    def make(rng: Generator, fmt: Format) -> AttentionInputs:
        run = 16
        rise = _drawn(rng, *height, heads, _ROWS, 1)
        steps = torch.from_numpy(rng.dirichlet(np.ones(keys // run), (heads, _ROWS))).cumsum(-1)
        scores = rise * steps.repeat_interleave(run, -1) - _drawn(rng, 0.0, 2.0, heads, _ROWS, keys)
        scores[:, 1::2] = scores[:, 1::2].flip(-1)
        return with_scores(_on_grid(scores - rise), _one_hot(heads, keys, rng), fmt)

    return make


def _repeated_maxima(rng: Generator, fmt: Format) -> AttentionInputs:
    """Draw two keys at the maximum or next to it, which is large, small, 0 or negative; 62 below it."""
    tops = torch.tensor([-6, -3, -1, -0.5, -0.003, 0, 0.002, 0.5, 1, 1.5, 2, 3, 4, 5, 6, 7, 14, 25, 60, 2.5, 3.5])
    beside = torch.tensor([0.0, 0.0, 0.0, 5e-4, 2e-3])
    scores = -_drawn(rng, 0.3, 6.0, 4, _ROWS, _D)
    scores[:, :, :2] = 0.0
    scores[:, :, 1] -= beside[torch.from_numpy(rng.integers(0, 5, (4, _ROWS)))]
    return with_scores(_on_grid(scores + tops[None, :, None]), _one_hot(4, _D, rng), fmt)


def _large_maxima(rng: Generator, fmt: Format) -> AttentionInputs:
    """Draw two equal maxima of 5 and more, whose S times a constant is no fp32 number, and V whose sum is a tie."""
    tops = torch.exp2(_drawn(rng, 2.3, 9.8 if fmt == FP16 else 17.5, 1, _ROWS, 1)) * _signs(rng, 1, _ROWS, 1)
    scores = _maxima(rng, 4, _D, torch.full((_ROWS,), 2))
    return with_scores(scores + (tops * 32).round() / 32, _signed_values(rng, 4, _D, fmt), fmt)


def _faint_tails(rng: Generator, fmt: Format) -> AttentionInputs:
    """Draw two equal maxima, whose V adds up to a tie or not, and a third key of 2^-17 to 2^-34, of either sign."""
    half = _D // 2
    tails = _on_grid(_drawn(rng, 17.0, 34.0, 4, _ROWS, 1) * -math.log(2.0))
    scores = torch.full((4, _ROWS, _D), _HIDDEN)
    scores[:, :, :half] = _maxima(rng, 4, half, torch.full((_ROWS,), 2))
    scores.scatter_(-1, torch.from_numpy(rng.integers(half, _D, tails.shape)), tails)
    v = _signed_values(rng, 4, _D, fmt)
    v[:, half:] *= _signs(rng, 4, half, 1)
    return with_scores(scores, v, fmt)


def _swallowed(rng: Generator, fmt: Format) -> AttentionInputs:
    """Draw equal keys, some hidden; in each column of V two numbers that cancel, and 62 that either swallows."""
    hidden = torch.from_numpy(rng.uniform(size=(2, _ROWS, _D)) < rng.uniform(0.0, 0.3, (2, _ROWS, 1)))
    v = torch.full((2, _D, _D), 2.0**-10)
    for head in range(2):
        for column in range(_D):
            v[head, torch.from_numpy(rng.choice(_D, 2, replace=False)), column] = torch.tensor([2.0**15, -(2.0**15)])
    return with_scores(torch.where(hidden, _HIDDEN, 0.0), v, fmt)


def _deep(rng: Generator, fmt: Format) -> AttentionInputs:
    """Draw ties of P-bar of 2^-80 to 2^-110, made visible by a V of 2^100."""
    exponents, ulp = torch.from_numpy(rng.integers(-110, -80, (4, _ROWS, _D))), 2.0**-fmt.mantissa_bits
    ties = (1.0 + ((_drawn(rng, 0.0, 1.0, 4, _ROWS, _D) / ulp).floor() + 0.5) * ulp) * torch.exp2(exponents.double())
    scores = torch.log(ties).float()
    scores[:, :, 0] = 0.0
    v = _one_hot(4, _D, rng) * 2.0**100
    v[:, 0] = 0.0
    return with_scores(scores, v, fmt)


def _normal(heads: int, rows: int, keys: int, d: int, scale: float | None = None, size: float = 1.0) -> Make:
    def make(rng: Generator, fmt: Format) -> AttentionInputs:
        shapes = ((1, heads, length, d) for length in (rows, keys, keys))
        q, k, v = (_rounded(torch.from_numpy(rng.standard_normal(x, dtype=np.float32)), fmt) for x in shapes)
        q = _rounded(q * size, fmt)
        return AttentionInputs(q, k, v, torch.ones_like(q), Formats.of(fmt), softmax_scale=scale)

    return make


DESIGNED = (
    Designed("equal_keys", _equal_keys, "casts of O, and of O-bar or P / l: the V of equal keys adds up to ties"),
    Designed("probabilities", _probabilities, "casts on the way to P: V shows each key's"),
    Designed("tied_scores", _tied_scores, "modes of the casts of Q K^T, S and S - m: every score is a tie", HAWKEYE),
    Designed("tied_probabilities", _tied_probabilities, "modes of P's casts: ties, and next to them", HAWKEYE, _FINE),
    Designed("long_sums", _long_sums, "l, and which P it sums: V shows 1 / l"),
    Designed("repeated_maxima", _repeated_maxima, "the shift rule: maxima of either sign repeat, or nearly do"),
    Designed("large_maxima", _large_maxima, "contraction, by ties that P's last bit breaks; S beyond fp16", role=_FINE),
    Designed("faint_tails", _faint_tails, "sums of products: terms of 2^-17 to 2^-34 tip ties", MMA_SIM, _SUMS),
    Designed("swallowed", _swallowed, "the order of sums: large numbers that cancel swallow others", FPREV, _SUMS),
    Designed("deep", _deep, "the exponential's base: arguments of -60 to -80", role=_FINE, formats=(BF16,)),
    Designed("normal", _normal(4, 16, 128, _D, size=1.5), "everything at once: normal numbers, 128 keys"),
    # Few keys, for tiles go by d.
    Designed("normal_128", _normal(4, 16, 16, 128, size=1.5), "casts of the scale and of q: d = 128, of inexact root"),
    Designed("normal_96", _normal(4, 16, 16, 96, size=1.5), "formats of scale and divisor: d = 96, of inexact root"),
    Designed("own_scale", _normal(4, 16, 64, _D, scale=0.3), "the same: normal numbers, a scale of 0.3"),
    Designed("many_equal_keys", _many_equal_keys, "l and O-bar, and where they are added up: 65 to 255 equal keys"),
    Designed("rising", _rising((1.0, 5.0)), "tiles, and what is rescaled between them: maxima rise or fall", FPREV),
    Designed("steep", _rising((6.0, 20.0)), "the same where a lazy rescaling follows: by 6 to 20", FPREV),
)
#: Names of what is asked of sums alone: in fp32 their order shows in it, of which most plans say nothing.
OF_SUMS = frozenset(designed.name for designed in DESIGNED if designed.role == _SUMS)
#: Names of those that a plan has to explain, but for what it leaves open.
BINDING = frozenset(designed.name for designed in DESIGNED if designed.role == _BINDS)
#: Long rows, for tiles that all others have whole.
LONG = tuple(
    Designed(f"rising[{keys}]", _rising((2.0, 6.0), keys, 1), f"tiles of {keys // 2} keys, over {keys} keys", FPREV)
    for keys in (512, 1024)
)
_SIZES = ((1, 1, 128, 64), (1, 16, 64, 64), (64, 64, 64, 64), (128, 1, 256, 64), (8, 128, 512, 64), (8, 64, 256, 128))
#: Normal numbers in other shapes, in which a compiler may round elsewhere: by these no plan is chosen.
SHAPES = tuple(
    Designed(
        f"{heads} x {rows} x {keys}" + ("" if d == HEAD_DIMENSION else f", d = {d}"),
        _normal(heads, rows, keys, d),
        "heads x queries x keys of another shape",
    )
    for heads, rows, keys, d in _SIZES
)
