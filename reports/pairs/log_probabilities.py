"""How far apart two kernels are through a model, in nats: what the log-probabilities of its tokens differ by."""

from collections.abc import Mapping
from typing import Annotated

from tiebreak.reports.page.svg import Figure
from tiebreak.reports.records.decode import Count, Data, Size, one_of
from tiebreak.reports.records.record import FARTHER, MORE, Estimate, MeasureRecord, Value, number_of
from tiebreak.reports.tables.grids import Part

# What two readings are beside each other: the two kernels; one and exact attention; what trains and what samples; one
# kernel twice, called in two ways or with other random bits.
PAIR, EXACT, WAYS, FLOOR = "pair", "exact", "ways", "floor"
ROLES = (PAIR, EXACT, WAYS, FLOOR)
#: What a difference has a number of, once for all: `--limit NAME=NUMBER` takes these names.
MEASURES: Mapping[str, MeasureRecord] = {
    "mean": MeasureRecord("mean difference of the log-probabilities", "nats", FARTHER),
    "rms": MeasureRecord("root mean square of the difference", "nats", MORE),
    "largest": MeasureRecord("largest size of a difference", "nats", MORE),
    "k1": MeasureRecord("mean of log(first / second): estimates the KL divergence, may be below 0", "nats", FARTHER),
    "k3": MeasureRecord("mean of r - 1 - log r, r = second / first: estimates it too, never below 0", "nats", MORE),
    "beyond_1_percent": MeasureRecord("share of tokens whose ratio of probabilities leaves 1 +- 0.01", "", MORE),
    "beyond_20_percent": MeasureRecord("share of tokens whose ratio of probabilities leaves 1 +- 0.2", "", MORE),
}
EIGHTHS = 8  # of the context, by which positions are grouped
_SHOWN = ("mean", "rms", "largest", "k3", "beyond_1_percent", "beyond_20_percent")  # k1 is the mean with the other sign
_KL = (
    "KL: J. Schulman's estimators (2020). Tokens are samples of the exact model, and of neither kernel: of two kernels"
    " they estimate the divergence as far as these stay close to it."
)


class LayerDifference(Data, frozen=True):
    """What two models differ by after one layer."""

    layer: str  # its number from 0, or the module that called attention
    relative_rms: Size | None  # root mean square of the difference over that of the first
    equal: Size  # share of elements with the same bits


class Difference(Data, frozen=True):
    """Log-probabilities of the same tokens by two models, the second less the first; null: NaN or infinite."""

    tokens: Count  # that have a log-probability
    mean: Estimate  # nats, with its sign; the samples are sequences, at 99.9 %
    rms: Size | None  # nats
    largest: Size | None  # nats
    k1: float | None  # nats
    k3: Size | None  # nats
    beyond_1_percent: Size | None  # share of tokens
    beyond_20_percent: Size | None  # share of tokens; the clip of PPO
    equal: Size  # share of log-probabilities with the same bits
    by_position: tuple[Size | None, ...]  # rms in nats, by eighths of the context
    layers: tuple[LayerDifference, ...] = ()  # in the model's order


class Compared(Data, frozen=True):
    """Two readings of the same tokens beside each other."""

    first: str  # which and how it was called: A, by decode with a cache
    second: str  # likewise
    role: Annotated[str, one_of(ROLES)]  # what for
    difference: Difference | None = None  # None: one could not be made
    skipped: str | None = None  # why not
    predicted: Size | None = None  # rms that their plans, emulated in the same model, make; None: not known


class FormatRecord(Data, frozen=True):
    """All readings in one format."""

    format: str  # of q, k, v and O
    compared: tuple[Compared, ...]  # the pair, called alike, first
    nearer: Annotated[str, one_of(("A", "B"))] | None = None  # to exact attention; None: the data do not tell

    @property
    def pair(self) -> Compared:
        """The two kernels, called alike."""
        return self.compared[0]


class ModelRecord(Data, frozen=True):
    """A pair through a model."""

    a: str  # the first kernel
    b: str  # the second
    model: str  # what it is, in one line
    formats: tuple[FormatRecord, ...]  # each of them

    def worst(self, measure: str) -> float | None:
        """Return the number of a measure of the pair that is farthest from 0; None where a format has none."""
        raise NotImplementedError


def number(difference: Difference, measure: str) -> float | None:
    """Return the number of one of `MEASURES`."""
    value: Value = getattr(difference, measure)
    return number_of(value)


def sentences(model: ModelRecord) -> list[str]:
    """Return what there is to say, a sentence or two for each format."""
    raise NotImplementedError


def parts(model: ModelRecord) -> list[Part]:
    """Return sentences and grids: of all readings, and of the layers."""
    raise NotImplementedError


def figures(model: ModelRecord) -> list[Figure]:
    """Return a figure for each format: rms by position, of the pair and of each kernel beside exact attention."""
    raise NotImplementedError
