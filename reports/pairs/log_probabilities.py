"""How far apart two kernels are through a model, in nats: what the log-probabilities of its tokens differ by."""

from collections.abc import Iterator, Mapping
from typing import Annotated

from tiebreak.reports.page.svg import Figure, Series
from tiebreak.reports.records.decode import Count, Data, Size, one_of
from tiebreak.reports.records.record import FARTHER, MORE, Estimate, MeasureRecord, Value, number_of
from tiebreak.reports.tables.grids import Grid, Part

A, B = SIDES = ("A", "B")  # the two kernels of a pair
# What is compared in two readings: the two kernels; one and exact attention; what trains and what samples; one
# kernel twice, called in two ways or with other random bits.
PAIR, EXACT, WAYS, FLOOR = "pair", "exact", "ways", "floor"
ROLES = (PAIR, EXACT, WAYS, FLOOR)
#: The measures of a difference: `--limit NAME=NUMBER` takes these names.
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
_SHOWN = [name for name in MEASURES if name != "k1"]  # which is the mean with the other sign
_LEGEND = """second less first, in one prefill unless said; predicted: rms by both plans, emulated in the same model;
beyond: share of tokens whose ratio of probabilities leaves 1 +- 0.01, 1 +- 0.2. KL: J. Schulman's estimators. Tokens
are samples of the exact model: of A and B the estimates hold as far as these stay close to it."""


class LogProbabilityDifference(Data, frozen=True):
    """Log-probabilities of the same tokens by two models, the second less the first; null: NaN or infinite."""

    tokens: Count  # that have a log-probability
    equal: Size  # share of them with the same bits
    mean: Estimate  # nats, with its sign; the samples are sequences, at 99.9 %
    rms: Size | None  # nats
    largest: Size | None  # nats
    k1: float | None  # nats
    k3: float | None  # nats
    beyond_1_percent: Size  # share of tokens, those without a number too
    beyond_20_percent: Size  # likewise
    by_position: tuple[Size | None, ...]  # rms in nats, by eighths of the context
    by_layer: tuple[Size | None, ...]  # relative rms of what follows each layer, or each call of attention
    equal_by_layer: tuple[Size, ...]  # share of its elements with the same bits


class ReadingComparison(Data, frozen=True):
    """Two readings of the same tokens compared."""

    first: str  # which, and how it was called where that is not in one prefill: A, decode with a cache
    second: str  # likewise
    role: Annotated[str, one_of(ROLES)]  # what for
    difference: LogProbabilityDifference | None = None  # None: one could not be made
    skipped: str | None = None  # why not
    predicted: Size | None = None  # rms that their plans, emulated in the same model, have; None: not known

    def __str__(self) -> str:
        """Return its name in tables."""
        return f"{self.first} | {self.second}"

    @property
    def is_equal(self) -> bool:
        """True if all log-probabilities have the same bits."""
        return self.difference is not None and self.difference.equal == 1.0


class FormatRecord(Data, frozen=True):
    """All readings in one format."""

    format: str  # of q, k, v and O
    compared: tuple[ReadingComparison, ...]  # the pair, called alike, first
    nearer: Annotated[str, one_of(SIDES)] | None = None  # to exact attention; None: the data do not tell

    @property
    def pair(self) -> ReadingComparison:
        """The comparison of the two kernels, called alike."""
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


def number(difference: LogProbabilityDifference | None, measure: str) -> float | None:
    """Return the number of one of `MEASURES`; None where there is none."""
    value: Value = getattr(difference, measure, None)
    return number_of(value)


def sentences(of: FormatRecord) -> Iterator[str]:
    """Yield sentences about the pair in one format."""
    difference, exact = of.pair.difference, [_text(reading, "rms") for reading in of.compared if reading.role == EXACT]
    if difference is None:
        yield f"{of.format}: not read: {of.pair.skipped}"
    elif of.pair.is_equal:
        yield f"{of.format}: bitwise equal in all {difference.tokens} log-probabilities"
    else:
        nearer = f"{of.nearer} is nearer" if of.nearer else "the data do not tell which is nearer"
        yield f"{of.format}: to exact attention A has rms {exact[0]}, B {exact[1]}: {nearer}"
        yield f"{of.format}: rms by eighths of the context {' '.join(map(_figure, difference.by_position))}"
        first = next((at for at, share in enumerate(difference.equal_by_layer) if share < 1.0), 0)
        yield (
            f"{of.format}: they first differ after layer {first + 1} of {len(difference.by_layer)}, where"
            f" {difference.equal_by_layer[first]:.2%} of elements are equal; relative rms by layer"
            f" {' '.join(map(_figure, difference.by_layer))}"
        )


def in_brief(of: FormatRecord) -> str:
    """Return how far apart the pair is in one format, in a few words."""
    if of.pair.difference is None or of.pair.is_equal:
        return f"{of.format} {'not read' if of.pair.difference is None else 'bitwise equal'}"
    return f"{of.format} rms {_text(of.pair, 'rms')}, mean {_text(of.pair, 'mean')}"


def parts(model: ModelRecord) -> list[Part]:
    """Return sentences, and a grid of all formats with a row for two readings that differ."""
    rows, lines = list[list[str]](), list[str]()
    for of in model.formats:
        # A value that the way of calling does not change is in the row of the usual way.
        alike = [reading.second for reading in of.compared if reading.role == FLOOR and reading.is_equal]
        for each in of.compared:
            if each.role in (PAIR, EXACT) or each.second not in alike:
                end = "" if each.predicted is None else _figure(each.predicted)
                rows.append([f"{of.format}: {each}", *(_text(each, name) for name in _SHOWN), end])
        if alike:
            lines.append(f"{of.format}: bitwise equal to the usual way: {'; '.join(alike)}")
        lines += [*sentences(of), *dict.fromkeys(f"skipped: {each.skipped}" for each in of.compared if each.skipped)]
    return [
        f"Through {model.model}. A: {model.a}, B: {model.b}.",
        Grid(["log-probabilities, nats", *_SHOWN, "predicted"], rows),
        "\n".join(lines),
        _LEGEND,
    ]


def figures(model: ModelRecord) -> list[Figure]:
    """Return a figure for each format: rms by position, of the pair and of each kernel against exact attention."""
    drawn = []
    for of in model.formats:
        lines = {str(reading): reading.difference for reading in of.compared if reading.role in (PAIR, EXACT)}
        series_of = {name: enumerate(between.by_position, 1) for name, between in lines.items() if between is not None}
        series = (
            Series(name, tuple((float(at), y) for at, y in line if y is not None)) for name, line in series_of.items()
        )
        title = f"{of.format}: how far log-probabilities are apart along the sequence"
        drawn.append(Figure(title, f"A: {model.a}, B: {model.b}.", "eighth of the context", "rms, nats", tuple(series)))
    return drawn


def _text(compared: ReadingComparison, measure: str) -> str:
    """Return a number as a table has it, with its interval where there is one."""
    if compared.difference is None:
        return "skipped"
    value = getattr(compared.difference, measure)
    return f"{_figure(value.mean)} +- {_figure(value.half_width)}" if isinstance(value, Estimate) else _figure(value)


def _figure(value: float | None) -> str:
    return "NaN" if value is None else f"{value:.2g}"
