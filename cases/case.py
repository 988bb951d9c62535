"""A case: an input, scripted or captured, with what is claimed about it."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.random import Generator, Philox, SeedSequence
from torch import Tensor

from tiebreak.cases.claims import Claim
from tiebreak.cases.errors import Errors
from tiebreak.kernels.features import Feature
from tiebreak.kernels.formats import BF16, Format, Formats
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionInputs
from tiebreak.kernels.kernel import Declaration
from tiebreak.kernels.reference import Reference

PAPER = "arXiv 2510.04212"
OWN = "this suite"
HEADS_PER_BATCH = 16
JOINED = "+"  # between a case's name and the features that were added to it


@dataclass(frozen=True)
class Shape:
    """The sizes of a case's tensors, without heads."""

    queries: int = 4  # a few, so that the row maximum varies within a head: heads are the samples, not rows
    keys: int = 128
    d: int = 64
    groups: int = 1  # query heads per key head
    scale: float | None = None  # alpha; None: 1/sqrt(d)


@dataclass(frozen=True)
class Draw:
    """The random numbers, formats and heads that a case's recipe uses."""

    rng: Generator  # numpy's, whose stream is the same on every CPU; torch's is not
    formats: Formats  # of the call
    heads: int  # query heads in all
    batch: int = 0  # index of the batch

    @property
    def batch_and_heads(self) -> tuple[int, int]:
        """The heads, split into a batch and heads per batch entry."""
        return (self.heads // HEADS_PER_BATCH, HEADS_PER_BATCH) if self.heads > HEADS_PER_BATCH else (1, self.heads)

    def normal(self, *shape: int) -> Tensor:
        """Return standard normal numbers, fp32."""
        return torch.from_numpy(self.rng.standard_normal(shape, dtype=np.float32))

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """Return uniform numbers in [low, high), fp32."""
        return low + (high - low) * torch.from_numpy(self.rng.random(shape, dtype=np.float32))

    def rounded(self, x: Tensor) -> Tensor:
        """Return `x` in the format of q and k, carried in fp32."""
        return x.to(TORCH_DTYPES[self.formats.inputs]).float()

    def upstream(self, shape: torch.Size) -> Tensor:
        """Return a gradient dO of one sign, negative, as in the columns that fail in the paper (figure 5b)."""
        return self.rounded(-self.uniform(0.0, 1.0, *shape))

    def noise_seed(self) -> int:
        """Return a seed for the dither and the stochastic casts of this batch."""
        return int(self.rng.integers(0, 2**31))

    def inputs(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None
    ) -> AttentionInputs:
        """Return q, k and v, rounded, with their own upstream gradient and seed of the noise."""
        q, k, v = map(self.rounded, (q, k, v))
        do, seed = self.upstream(q.shape), self.noise_seed()
        return AttentionInputs(q, k, v, do, self.formats, causal=causal, noise_seed=seed, softmax_scale=scale)


Recipe = Callable[[Draw], AttentionInputs]


@dataclass(frozen=True)
class FixedHeads:
    """The heads of a case that exist and are not generated, such as captured ones."""

    heads: int  # query heads in all
    has_batch: Callable[[int, int], bool]  # whether there is a batch of this index, where one has so many query heads
    cut: str  # what of the call these leave out, in words
    formats: tuple[Format, ...]  # it can be given in
    options: tuple[str, ...]  # of the command line, that bring the case in
    checksum: Callable[[], int]  # of the tensors
    measured: Callable[[Errors, Tensor, AttentionInputs, Reference], Errors]  # of O: the errors that say something


@dataclass(frozen=True)
class Case:
    """One input, generated or existing, with the claims about it."""

    name: str  # how tables and --cases call it
    about: str  # one line
    source: str  # where the input or the claim comes from
    recipe: Recipe  # makes one batch of heads
    claims: tuple[Claim, ...] = ()  # the first that concerns a kernel holds for it
    failure: bool = False  # an input on which rounding is known to fail: --fair asks for no bias here
    seen: str = ""  # which trained models' attention has met what it scripts, and how often; "": none is known
    gradients: bool = False  # whether the backward pass is run and measured too
    normal: bool = False  # normal numbers: no accepted plan in 16 bits is biased on them
    traced: bool = False  # whether the error trace of one element of O-bar is recorded
    cancels: bool = False  # V is of mixed sign and O cancels: its error in ulps has no mean worth judging
    chaotic: bool = False  # one bit of S, or a flushed subnormal, changes O by many ulps: bits cannot be predicted
    formats: Callable[[Format], Formats] = Formats.of  # what it is in where q and k are in a format
    revision: int = 1  # raised when the recipe makes another input
    fixed_heads: FixedHeads | None = None  # None: the recipe makes any number of heads
    most_heads: int | None = None  # of a batch, where rows are so long that more take minutes; None: as many as asked
    unclaimed: str | None = None  # why nothing is claimed of the kernels that no claim speaks of
    on_request: bool = False  # whether it is run where --cases names it alone: it takes a minute
    study: bool = False  # whether a neighbour says the same of a kernel: users' own run on it by name alone
    family: tuple[str, float] | None = None  # the one number in which it differs from others, what it is and its value
    needs: frozenset[Feature] = frozenset()  # asked of users' kernels that take these; of any other by name alone
    group: str = ""  # what the cases that stand beside it are about
    only_claimed: bool = False  # whether kernels of a roster's plan of which it claims nothing run by name alone

    @property
    def bits_tell(self) -> bool:
        """True if a plan predicts the bits of O: not where O cancels, or is chaotic."""
        return not (self.cancels or self.chaotic)

    @property
    def version(self) -> int:
        """The recipe's revision, or the checksum of existing heads: records of other versions are not comparable."""
        return self.revision if self.fixed_heads is None else self.fixed_heads.checksum()

    def has_batch(self, batch: int, heads: int) -> bool:
        """Return whether there is a batch `batch` where a batch has `heads` query heads."""
        return self.fixed_heads is None or self.fixed_heads.has_batch(batch, heads)

    def make(self, seed: int, batch: int, heads: int, fmt: Format) -> AttentionInputs:
        """Return inputs of one batch of heads: the same on every platform.

        Args:
            seed: of the run.
            batch: index of the batch; each has its own random stream.
            heads: query heads, split over the batch dimension; fewer of long rows, and at the end of fixed heads.
            fmt: format of q and k; the others follow by `formats`. ValueError: none that torch devices compute in.
        """
        if fmt not in TORCH_DTYPES:
            raise ValueError(f"cases come in {', '.join(f.name for f in TORCH_DTYPES)}, not in {fmt.name}")
        # A case with a feature added has the same numbers.
        stream = SeedSequence([seed, zlib.crc32(self.name.partition(JOINED)[0].encode()), batch])
        heads = heads if self.most_heads is None else min(heads, self.most_heads)
        return self.recipe(Draw(Generator(Philox(stream)), self.formats(fmt), heads, batch))

    def claim_about(self, declaration: Declaration | None, fmt: Format = BF16) -> Claim | None:
        """Return the claim that applies to a kernel; None where the case claims nothing about it."""
        return next((claim for claim in self.claims if claim.concerns(declaration, fmt)), None)


@dataclass(frozen=True)
class Scores:
    """Scripted scores: some keys at the row's maximum, the others a gap below it, exactly on the bf16 grid."""

    top: tuple[float, float] = (1.0, 6.0)  # the row maximum is drawn from here
    gap: tuple[float, float] = (12.0, 18.0)  # how far the tail lies below it
    maxima: int = 2  # keys at the maximum
    positions: tuple[int, ...] | None = None  # their places; None: anywhere
    offsets: tuple[float, ...] = ()  # added to the maxima's scores, one each (near ties, overshooting blocks)


@dataclass(frozen=True)
class Values:
    """Normally distributed values of V, for the keys at the maximum and for the tail."""

    mean: float = -2.4
    std: float = 0.3
    tail_mean: float | None = None  # None: as the maxima


SHAPE = Shape()
TWO_MAXIMA = Scores()
ONE_SIGNED = Values()


def scripted(
    draw: Draw, scores: Scores = TWO_MAXIMA, values: Values = ONE_SIGNED, shape: Shape = SHAPE
) -> AttentionInputs:
    """Return rows whose scores are as scripted.

    alpha, 1/sqrt(d) unless the shape says otherwise, is a power of two for the default d; q and k carry the row
    maximum in dimension 0 (k_0 = 8) and the gap in dimension 1 (q_1 = 1 / alpha, k_1 = -gap), so every score is exact
    in fp32, and equal maxima are equal in any order of summation. The other dimensions of q are 0; those of k are
    random, so that P K is not degenerate.
    """
    batch, heads = draw.batch_and_heads
    inverse_scale = shape.d**0.5 if shape.scale is None else 1.0 / shape.scale
    k = draw.normal(batch, heads, shape.keys, shape.d)
    top = draw.uniform(*scores.top, batch, heads, shape.queries).bfloat16().float()
    gaps = draw.uniform(*scores.gap, batch, heads, shape.keys).bfloat16().float()
    if scores.positions is None:
        places = draw.uniform(0.0, 1.0, *gaps.shape).argsort(-1)[..., : scores.maxima]
    else:
        places = torch.tensor(scores.positions).expand(batch, heads, scores.maxima)
    is_top = torch.zeros_like(gaps, dtype=torch.bool).scatter_(2, places, True)
    offsets = torch.tensor(scores.offsets or (0.0,) * scores.maxima)
    k[..., 0] = 8.0
    k[..., 1] = -gaps
    ordered = is_top.nonzero()[:, -1].reshape(places.shape)
    k[..., 1].scatter_(2, ordered, offsets.expand(places.shape).contiguous())
    q = torch.zeros(batch, heads, shape.queries, shape.d)
    q[..., 0] = top * (inverse_scale / 8.0)
    q[..., 1] = inverse_scale
    v = draw.normal(batch, heads, shape.keys, shape.d).mul_(values.std).add_(values.mean)
    if values.tail_mean is not None:
        v = torch.where(is_top[..., None], v, v + (values.tail_mean - values.mean))
    return draw.inputs(q, k, v, scale=shape.scale)


def growing(draw: Draw, growth: tuple[float, float]) -> AttentionInputs:
    """Draw two maxima in one block of 32, 64 or 128 keys after the first, whose one key is `growth` below them."""
    inputs = scripted(draw, Scores(positions=(145, 155)), shape=Shape(keys=256))
    k = inputs.k.clone()
    k[..., 17, 1] = -draw.uniform(*growth, *k.shape[:2]).bfloat16().float()
    return replace(inputs, k=k)


def normal_numbers(
    draw: Draw,
    shape: Shape = SHAPE,
    *,
    causal: bool = False,
    size: float = 1.0,
    v_mean: float = 1.0,
    v_std: float = 0.25,
) -> AttentionInputs:
    """Draw normally distributed q, k and v, scores of about `size`.

    V is normal about 1: about 0, O would cancel, and an error in ulps of O would show how much, not how the kernel
    rounds.
    """
    batch, heads = draw.batch_and_heads
    key_heads = 1 if heads % shape.groups else heads // shape.groups  # few heads: all share one
    q = size * draw.normal(batch, heads, shape.queries, shape.d)
    k = draw.normal(batch, key_heads, shape.keys, shape.d)
    v = v_mean + v_std * draw.normal(batch, key_heads, shape.keys, shape.d)
    return draw.inputs(q, k, v, causal=causal, scale=shape.scale)
