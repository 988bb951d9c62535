"""A sweep as tables and figures: how often runs diverged, and what their loss came to."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import median

from tiebreak.reports.page.figures import Figure, Series
from tiebreak.reports.records.order import grouped
from tiebreak.reports.sweeps.intervals import CONFIDENCE, wilson
from tiebreak.reports.sweeps.store import Settings, Sweep, SweepRun
from tiebreak.reports.tables.grids import aside, csv_text, fitted
from tiebreak.reports.tables.run import counted

NO_STABILISER = "none"
_APART = 12  # pairs that a table lists
_STEP = 0.02  # between the marks of two lines at one learning rate, in powers of ten


@dataclass(frozen=True)
class Group:
    """The runs that differ in their seed alone."""

    format: str
    rate: float
    variant: str  # kernel, and stabiliser where there is one
    runs: tuple[SweepRun, ...]  # at least one

    @property
    def diverged(self) -> int:
        """How many."""
        return sum(run.diverged is not None for run in self.runs)

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's, of the rate."""
        return wilson(self.diverged, len(self.runs))

    @property
    def losses(self) -> list[float]:
        """Of the runs that have not diverged, lowest first."""
        return sorted(run.loss for run in self.runs if run.diverged is None and run.loss is not None)

    @property
    def rate_text(self) -> str:
        """How many diverged, and the interval in per cent."""
        low, high = (round(100 * end) for end in self.interval)
        return f"{self.diverged}/{len(self.runs)} ({low} to {high} %)"

    @property
    def loss_text(self) -> str:
        """Median, lowest and highest."""
        losses = self.losses
        return f"{median(losses):.2f} ({losses[0]:.2f} to {losses[-1]:.2f})" if losses else "-"


def variant(kernel: str, stabiliser: str) -> str:
    """What a column is called."""
    return kernel if stabiliser == NO_STABILISER else f"{kernel} + {stabiliser}"


def groups(sweep: Sweep) -> list[Group]:
    """The sweep's runs by all but their seed, in the order of its settings; without those of which none is done."""
    by_place: dict[tuple[str, float, str], list[SweepRun]] = {}
    for place in sweep.settings.places():
        by_place.setdefault((place.format, place.rate, variant(place.kernel, place.stabiliser)), [])
    for run in sweep.runs:
        by_place[run.format, run.rate, variant(run.kernel, run.stabiliser)].append(run)
    return [Group(*key, tuple(runs)) for key, runs in by_place.items() if runs]


def _variants(settings: Settings) -> list[str]:
    return [variant(kernel, stabiliser) for kernel in settings.kernels for stabiliser in settings.stabilisers]


def sweep_tables(sweep: Sweep, width: int | None, tablefmt: str) -> str:
    """Two tables, of rates and of losses: formats and learning rates down, kernels across; then what they say."""
    titles = ("runs that diverged", "loss of the others, in nats: median (lowest to highest)")
    parts = []
    for title, (headers, *rows) in zip(titles, grids(sweep), strict=True):
        parts += [aside(title, tablefmt), *fitted(rows, headers, tablefmt, width)]
    return "\n\n".join([*parts, aside(legend(sweep), tablefmt)])


def grids(sweep: Sweep) -> tuple[list[list[str]], list[list[str]]]:
    """Rates and losses as rows of texts, the first the headings."""
    found = {(one.format, one.rate, one.variant): one for one in groups(sweep)}
    settings = sweep.settings
    names = _variants(settings)
    rates, losses = [["format, lr", *names]], [["format, lr", *names]]
    for fmt in settings.formats:
        for rate in settings.rates:
            line = [found.get((fmt, rate, name)) for name in names]
            rates.append([f"{fmt} {rate:g}", *(one.rate_text if one else "" for one in line)])
            losses.append([f"{fmt} {rate:g}", *(one.loss_text if one else "" for one in line)])
    return rates, losses


def legend(sweep: Sweep) -> str:
    """How many runs there are, what diverged means, how runs diverged, and which rates are apart."""
    ways = Counter((variant(run.kernel, run.stabiliser), run.diverged) for run in sweep.runs if run.diverged)
    told = "; ".join(f"{name}: {count} by {way}" for (name, way), count in sorted(ways.items())) or "none"
    left = len(sweep.left)
    return "\n".join(
        [
            f"{counted(len(sweep.runs), 'run')}{f', {left} to run' if left else ''}; diverged: {told}",
            f"diverged: {sweep.settings.diverged}",
            f"in brackets: Wilson's {CONFIDENCE:.0%} interval of the rate; loss: mean of the last tenth of the steps",
            *_apart(sweep),
        ]
    )


def _apart(sweep: Sweep) -> list[str]:
    """Pairs that differ in one thing and whose intervals do not overlap."""
    pairs = [
        f"{one.variant} {one.format} {one.rate:g} ({one.diverged}/{len(one.runs)}), {_other(one, other)}"
        for one, other in combinations(groups(sweep), 2)
        if _differ_in_one(one, other) and _separate(one, other)
    ]
    if not pairs:
        return ["no two rates that differ in kernel, format or learning rate alone have intervals that are apart"]
    more = [f"  and {len(pairs) - _APART} more"] if len(pairs) > _APART else []
    return ["intervals that are apart:", *(f"  {pair}" for pair in pairs[:_APART]), *more]


def _other(group: Group, other: Group) -> str:
    """The other of a pair, by what it differs in."""
    named = next(
        text
        for text, differs in (
            (other.variant, other.variant != group.variant),
            (other.format, other.format != group.format),
            (f"{other.rate:g}", True),
        )
        if differs
    )
    return f"{named} ({other.diverged}/{len(other.runs)})"


def _differ_in_one(group: Group, other: Group) -> bool:
    return (group.format != other.format) + (group.rate != other.rate) + (group.variant != other.variant) == 1


def _separate(group: Group, other: Group) -> bool:
    (low, high), (other_low, other_high) = group.interval, other.interval
    return high < other_low or other_high < low


def as_csv(sweep: Sweep) -> str:
    """A line a group."""
    names = ("format", "rate", "kernel", "stabiliser", "runs", "diverged", "low", "high", "loss_median", "loss_lowest",
             "loss_highest", "max_logit")  # fmt: skip
    rows = []
    for group in groups(sweep):
        first, losses = group.runs[0], group.losses
        logits = [run.max_logit for run in group.runs if run.max_logit is not None]
        numbers = (median(losses), losses[0], losses[-1]) if losses else (None, None, None)
        shares = (len(group.runs), group.diverged, *group.interval)
        values = (
            group.format,
            group.rate,
            first.kernel,
            first.stabiliser,
            *shares,
            *numbers,
            max(logits, default=None),
        )
        rows.append(dict(zip(names, values, strict=True)))
    return csv_text(names, rows)


def as_json(sweep: Sweep) -> str:
    """The settings and every run."""
    return json.dumps(asdict(sweep), indent=1, allow_nan=False) + "\n"


def sweep_figures(sweep: Sweep, label: str) -> list[Figure]:
    """Of each format how often runs diverged against the learning rate, and what the loss of the others came to."""
    settings, drawn = sweep.settings, list[Figure]()
    for fmt, own in grouped(groups(sweep), lambda group: group.format).items():
        shares = [
            _Mark(each, *(100 * share for share in (each.diverged / len(each.runs), *each.interval))) for each in own
        ]
        losses = [_Mark(each, median(each.losses), each.losses[0], each.losses[-1]) for each in own if each.losses]
        note = f"Bars: Wilson's {CONFIDENCE:.0%} intervals. {label}."
        drawn.append(_figure(f"{fmt}: runs that diverged", "%", shares, settings, note))
        note = f"Median over the seeds. Bars: lowest to highest. {label}."
        drawn.append(_figure(f"{fmt}: loss of the runs that did not", "loss, nats", losses, settings, note))
    return drawn


@dataclass(frozen=True)
class _Mark:
    """A mark of a figure with its bar."""

    group: Group
    y: float
    low: float
    high: float


def _figure(title: str, y_label: str, marks: Sequence[_Mark], settings: Settings, note: str) -> Figure:
    series = []
    for number, label in enumerate(_variants(settings)):
        own = sorted((mark for mark in marks if mark.group.variant == label), key=lambda mark: mark.group.rate)
        places = [math.log10(mark.group.rate) + number * _STEP for mark in own]
        points = tuple((x, mark.y) for x, mark in zip(places, own, strict=True))
        bars = tuple((x, mark.low, mark.high) for x, mark in zip(places, own, strict=True))
        if points:
            series.append(Series(label, points, marked=points, bars=bars))
    ticks = tuple((math.log10(rate), f"{rate:g}") for rate in sorted(settings.rates))
    return Figure(title, note, "learning rate", y_label, tuple(series), ticks)
