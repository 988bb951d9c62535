"""How far apart two kernels are through a model, in nats: what the log-probabilities of its tokens differ by."""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Annotated

from tiebreak.reports.page.svg import Figure, Series
from tiebreak.reports.records.decode import Count, Data, Size, one_of
from tiebreak.reports.records.record import FARTHER, MORE, Estimate, MeasureRecord, Value, number_of
from tiebreak.reports.tables.grids import Grid, Part

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

    def farthest(self, measure: str) -> float | None:
        """Return the number of one of `MEASURES` of the pair, farthest from 0; None where a format has none."""
        numbers = [number(each.pair.difference, measure) for each in self.formats]
        return None if None in numbers else max(filter(None, numbers), key=abs, default=0.0)


def number(difference: Difference | None, measure: str) -> float | None:
    """Return the number of one of `MEASURES`; None where there is none."""
    value: Value = None if difference is None else getattr(difference, measure)
    return number_of(value)


def sentences(model: ModelRecord) -> list[str]:
    """Return what there is to say of the pair, a line or more for each format."""
    return [f"Through {model.model}. A: {model.a}, B: {model.b}.", *chain(*map(_said, model.formats))]


def _said(of: FormatRecord) -> Iterator[str]:
    found, predicted = of.pair.difference, of.pair.predicted
    if found is None:
        yield f"{of.format}: not read, {of.pair.skipped}"
        return
    if found.equal == 1.0:
        yield f"{of.format}: the same bits in all {found.tokens} log-probabilities."
        return
    plans = "" if predicted is None else f" (their plans predict {predicted:.3g})"
    yield (
        f"{of.format}: B less A {_text(found, 'mean')} nats, rms {_text(found, 'rms')}{plans}, largest"
        f" {_text(found, 'largest')}; by position {' '.join(map(_figure, found.by_position))}."
    )
    exact = [_text(each.difference, "rms") for each in of.compared if each.role == EXACT]
    which = f"nearer is {of.nearer}" if of.nearer else "the data do not tell which is nearer"
    yield f"{of.format}: beside exact attention rms of A {exact[0]}, of B {exact[1]}: {which}."
    for layer in found.layers:
        if layer.equal < 1.0:
            equal = f"{100 * layer.equal:.3g} % of elements equal, relative rms {_figure(layer.relative_rms)}"
            yield f"{of.format}: they first differ after {layer.layer} of {len(found.layers)} ({equal})."
            return


def parts(model: ModelRecord) -> list[Part]:
    """Return sentences, and a grid for each format: a row two readings."""
    heads = ["first | second", *(f"{name} {MEASURES[name].unit}".strip() for name in _SHOWN), "predicted rms"]
    told: list[Part] = ["\n".join(sentences(model))]
    for of in model.formats:
        rows = [
            [
                f"{each.first} | {each.second}",
                *(
                    [_text(each.difference, name) for name in _SHOWN]
                    if each.difference
                    else [f"skipped: {each.skipped}", *[None] * (len(_SHOWN) - 1)]
                ),
                each.predicted and _figure(each.predicted),
            ]
            for each in of.compared
        ]
        told.append(Grid(heads, rows, f"{of.format}: log-probabilities, second less first"))
    return [*told, "\n".join(f"{name}: {about.about}" for name, about in MEASURES.items()) + "\n" + _KL]


def _text(difference: Difference | None, measure: str) -> str:
    """Return a number as a table has it: signed where it may have a sign, with its interval where there is one."""
    value = None if difference is None else getattr(difference, measure)
    if isinstance(value, Estimate):
        return f"{_figure(value.mean, '+')} +- {_figure(value.half_width)}"
    return _figure(value, "+" if MEASURES[measure].worse == FARTHER else "")


def _figure(value: float | None, sign: str = "") -> str:
    return "NaN" if value is None else f"{value:{sign}.3g}"


def figures(model: ModelRecord) -> list[Figure]:
    """Return a figure for each format: rms by position, of the pair and of each kernel beside exact attention."""
    drawn = []
    for of in model.formats:
        lines = [(each, each.difference) for each in of.compared if each.role in (PAIR, EXACT)]
        series = tuple(
            Series(
                f"{each.first} | {each.second}",
                tuple((at + 1.0, rms) for at, rms in enumerate(found.by_position) if rms is not None),
            )
            for each, found in lines
            if found is not None
        )
        title = f"{of.format}: how far log-probabilities are apart along the sequence"
        drawn.append(Figure(title, f"A: {model.a}, B: {model.b}.", "eighth of the context", "rms, nats", series))
    return [each for each in drawn if each.series]
