"""A sweep as tables and figures: how often runs diverged, and what their loss came to."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations, product
from statistics import NormalDist, median

from tiebreak.reports.page.svg import Figure, Series
from tiebreak.reports.records.order import grouped
from tiebreak.reports.sweeps.store import Settings, Sweep, SweepRun
from tiebreak.reports.tables.grids import Grid, Part
from tiebreak.reports.tables.run import counted

CONFIDENCE = 0.95
NO_STABILISER = "none"
_APART = 12  # pairs that a table lists
_STEP = 0.02  # between the marks of two lines at one learning rate, in powers of ten


def wilson(count: int, of: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's score interval of a share: all rates from which the count lies no further than the confidence allows.

    It keeps its width where the count is 0 or all, and so can be read at 20 runs (Wilson, JASA 22, 1927; Newcombe,
    Statistics in Medicine 17, 1998, method 3).

    Args:
        count: how many were seen.
        of: among how many, at least 1.
        confidence: two-sided.

    Returns:
        The lowest and the highest rate, in [0, 1].

    Raises:
        ValueError: a count that is not among them.
    """
    if not 0 <= count <= of or of < 1:
        raise ValueError(f"{count} of {of} is no share")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    middle = count + z * z / 2
    half = z * math.sqrt(count * (of - count) / of + z * z / 4)
    return max(0.0, (middle - half) / (of + z * z)), min(1.0, (middle + half) / (of + z * z))


@dataclass(frozen=True, eq=False)
class Group:
    """The runs that differ in their seed alone."""

    format: str
    rate: float
    variant: str  # kernel, and stabiliser where there is one
    runs: tuple[SweepRun, ...]  # at least one

    @property
    def names(self) -> tuple[str, str, str]:
        """What tells it from others."""
        return self.variant, self.format, f"{self.rate:g}"

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
    """Return what a column is called."""
    return kernel if stabiliser == NO_STABILISER else f"{kernel} + {stabiliser}"


def groups(sweep: Sweep) -> list[Group]:
    """Return a sweep's runs by all but their seed, in the order of its settings; those of which any is done."""
    by_place: dict[tuple[str, float, str], list[SweepRun]] = {}
    for place in sweep.settings.places():
        by_place.setdefault((place.format, place.rate, variant(place.kernel, place.stabiliser)), [])
    for run in sweep.runs:
        by_place[run.format, run.rate, variant(run.kernel, run.stabiliser)].append(run)
    return [Group(*key, tuple(runs)) for key, runs in by_place.items() if runs]


def _variants(settings: Settings) -> list[str]:
    return [variant(kernel, stabiliser) for kernel in settings.kernels for stabiliser in settings.stabilisers]


def sweep_tables(sweep: Sweep) -> list[Part]:
    """Return two tables, of rates and of losses: formats and learning rates down, kernels across; then the legend."""
    done = {(group.format, group.rate, group.variant): group for group in groups(sweep)}
    names, settings = _variants(sweep.settings), sweep.settings
    lines = [(f"{fmt} {rate:g}", [done.get((fmt, rate, name)) for name in names])
             for fmt, rate in product(settings.formats, settings.rates)]  # fmt: skip
    rates = [[head, *(group and group.rate_text for group in line)] for head, line in lines]
    losses = [[head, *(group and group.loss_text for group in line)] for head, line in lines]
    headers = ["format, lr", *names]
    return [
        Grid(headers, rates, "runs that diverged"),
        Grid(headers, losses, "loss of the others, in nats: median (lowest to highest)"),
        legend(sweep),
    ]


def legend(sweep: Sweep) -> str:
    """Return how many runs there are, what diverged means, how runs diverged, and which rates are apart."""
    ways = Counter((variant(run.kernel, run.stabiliser), run.diverged) for run in sweep.runs if run.diverged)
    counts = "; ".join(f"{name}: {count} by {way}" for (name, way), count in sorted(ways.items())) or "none"
    left = f", {len(sweep.left)} to run" if sweep.left else ""
    lines = [
        f"{counted(len(sweep.runs), 'run')}{left}; diverged: {counts}",
        f"diverged: {sweep.settings.diverged}",
        f"in brackets: Wilson's {CONFIDENCE:.0%} interval of the rate; loss: mean of the last tenth of the steps",
    ]
    return "\n".join([*lines, *_apart(sweep)])


def _apart(sweep: Sweep) -> list[str]:
    """Return pairs that differ in one thing and whose intervals do not overlap, the other by what it differs in."""
    pairs = []
    for group, other in combinations(groups(sweep), 2):
        differing = [text for text, own in zip(other.names, group.names, strict=True) if text != own]
        (low, high), (other_low, other_high) = group.interval, other.interval
        if len(differing) == 1 and (high < other_low or other_high < low):
            share = f"{other.diverged}/{len(other.runs)}"
            pairs.append(f"{' '.join(group.names)} ({group.diverged}/{len(group.runs)}), {differing[0]} ({share})")
    if not pairs:
        return ["no two rates that differ in kernel, format or learning rate alone have intervals that are apart"]
    more = [f"  and {len(pairs) - _APART} more"] if len(pairs) > _APART else []
    return ["intervals that are apart:", *(f"  {pair}" for pair in pairs[:_APART]), *more]


def csv_grid(sweep: Sweep) -> Grid:
    """Return a row a group."""
    names = ("format", "rate", "kernel", "stabiliser", "runs", "diverged", "low", "high", "loss_median", "loss_lowest",
             "loss_highest", "max_logit")  # fmt: skip
    rows = []
    for group in groups(sweep):
        first, losses = group.runs[0], group.losses
        largest = max((run.max_logit for run in group.runs if run.max_logit is not None), default=None)
        numbers = (median(losses), losses[0], losses[-1]) if losses else (None, None, None)
        shares = (len(group.runs), group.diverged, *group.interval)
        rows.append([group.format, group.rate, first.kernel, first.stabiliser, *shares, *numbers, largest])
    return Grid(names, rows)


def sweep_figures(sweep: Sweep, label: str) -> list[Figure]:
    """Of each format how often runs diverged against the learning rate, and what the loss of the others came to."""
    settings, drawn = sweep.settings, list[Figure]()
    for fmt, own in grouped(groups(sweep), lambda group: group.format).items():
        shares = {
            group: [100 * share for share in (group.diverged / len(group.runs), *group.interval)] for group in own
        }
        losses = {group: [median(group.losses), group.losses[0], group.losses[-1]] for group in own if group.losses}
        note = f"Bars: Wilson's {CONFIDENCE:.0%} intervals. {label}."
        drawn.append(_figure(f"{fmt}: runs that diverged", "%", shares, settings, note))
        note = f"Median over the seeds. Bars: lowest to highest. {label}."
        drawn.append(_figure(f"{fmt}: loss of the runs that did not", "loss, nats", losses, settings, note))
    return drawn


def _figure(title: str, y_label: str, marks: Mapping[Group, list[float]], settings: Settings, note: str) -> Figure:
    """Marks, each with the ends of its bar, by their learning rates."""
    series = []
    for number, label in enumerate(_variants(settings)):
        own = sorted((group for group in marks if group.variant == label), key=lambda group: group.rate)
        bars = [(math.log10(group.rate) + number * _STEP, *marks[group]) for group in own]
        if bars:
            points = tuple((x, y) for x, y, *_ in bars)
            series.append(Series(label, points, marked=points, bars=tuple((x, low, high) for x, _, low, high in bars)))
    ticks = tuple((math.log10(rate), f"{rate:g}") for rate in sorted(settings.rates))
    return Figure(title, note, "learning rate", y_label, tuple(series), ticks)
