"""A sweep as tables and figures: how often runs diverged, and what their loss came to."""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from html import escape
from itertools import combinations, product
from pathlib import Path
from statistics import NormalDist, median

from msgspec.structs import replace

from tiebreak.laboratory.sweep_store import SETTINGS, Sweep, SweepRun, SweepSettings, read_sweep
from tiebreak.reports.files import FileKind
from tiebreak.reports.page.svg import Figure, Series, section
from tiebreak.reports.records.order import grouped
from tiebreak.reports.tables.compare import distinct
from tiebreak.reports.tables.grids import Grid, Part, html
from tiebreak.reports.tables.run import counted

CONFIDENCE = 0.95
_APART = 12  # pairs that a table lists
_STEP = 0.02  # between the marks of two lines at one learning rate, in powers of ten


def wilson(count: int, of: int) -> tuple[float, float]:
    """Return Wilson's score interval of a share, in [0, 1], at 95 % confidence.

    It keeps its width where the count is 0 or all, and so can be read at 20 runs (Wilson, JASA 22, 1927; Newcombe,
    Statistics in Medicine 17, 1998, method 3).
    """
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    middle = count + z * z / 2
    half = z * math.sqrt(count * (of - count) / of + z * z / 4)
    return max(0.0, (middle - half) / (of + z * z)), min(1.0, (middle + half) / (of + z * z))


@dataclass(frozen=True, eq=False)
class Group:
    """The runs that differ in their seed alone."""

    names: tuple[str, str, float]  # kernel and stabiliser, format, learning rate: what tells it from others
    runs: list[SweepRun]  # at least one

    @property
    def diverged(self) -> int:
        """How many."""
        return sum(run.diverged is not None for run in self.runs)

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's, of the rate."""
        return wilson(self.diverged, len(self.runs))

    @property
    def losses(self) -> tuple[float, float, float] | None:
        """Median, lowest and highest of the runs that have not diverged; None: all have."""
        losses = sorted(run.loss for run in self.runs if run.diverged is None and run.loss is not None)
        return (median(losses), losses[0], losses[-1]) if losses else None


def groups(sweep: Sweep) -> list[Group]:
    """Return a sweep's runs by all but their seed, in the order of its settings; those of which any is done."""
    order = {place: number for number, place in enumerate(sweep.settings.places())}
    runs = sorted(sweep.runs, key=lambda run: order[run.place])
    return [Group(*both) for both in grouped(runs, lambda run: (run.variant, run.format, run.rate)).items()]


def _variants(settings: SweepSettings) -> list[str]:
    return list(dict.fromkeys(place.variant for place in settings.places()))


def sweep_tables(sweep: Sweep) -> list[Part]:
    """Return two tables, of rates and of losses: formats and learning rates down, kernels across; then the legend."""
    done, settings = {group.names: group for group in groups(sweep)}, sweep.settings
    variants = _variants(settings)
    rates, losses = list[list[str | None]](), list[list[str | None]]()
    for fmt, rate in product(settings.formats, settings.rates):
        line = [_texts(done.get((name, fmt, rate))) for name in variants]
        rates.append([f"{fmt} {rate:g}", *(share for share, _ in line)])
        losses.append([f"{fmt} {rate:g}", *(loss for _, loss in line)])
    headers = ["format, lr", *variants]
    return [
        Grid(headers, rates, "runs that diverged"),
        Grid(headers, losses, "loss of the others, in nats: median (lowest to highest)"),
        legend(sweep),
    ]


def _texts(group: Group | None) -> tuple[str | None, str | None]:
    """Return how many runs of a group diverged, and the losses of the others."""
    if group is None:
        return None, None
    low, high = (round(100 * end) for end in group.interval)
    loss = "{:.2f} ({:.2f} to {:.2f})".format(*group.losses) if group.losses else "-"
    return f"{group.diverged}/{len(group.runs)} ({low} to {high} %)", loss


def legend(sweep: Sweep) -> str:
    """Return how many runs there are, what diverged means, how runs diverged, and which rates are apart."""
    ways = Counter((run.variant, run.diverged) for run in sweep.runs if run.diverged)
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
        differing = [name for name, own in zip(other.names, group.names, strict=True) if name != own]
        (low, high), (other_low, other_high) = group.interval, other.interval
        if len(differing) == 1 and (high < other_low or other_high < low):
            names = "{} {} {:g}".format(*group.names)
            share, other_share = (f"{each.diverged}/{len(each.runs)}" for each in (group, other))
            pairs.append(f"  {names} ({share}), {differing[0]} ({other_share})")
    if not pairs:
        return ["no two rates that differ in kernel, format or learning rate alone have intervals that are apart"]
    more = [f"  and {len(pairs) - _APART} more"] if len(pairs) > _APART else []
    return ["intervals that are apart:", *pairs[:_APART], *more]


def csv_grid(sweep: Sweep) -> Grid:
    """Return a row a group."""
    names = ("format", "rate", "kernel", "stabiliser", "runs", "diverged", "low", "high", "loss_median", "loss_lowest",
             "loss_highest", "max_logit")  # fmt: skip
    rows = []
    for group in groups(sweep):
        first, losses = group.runs[0], group.losses or (None, None, None)
        largest = max((run.max_logit for run in group.runs if run.max_logit is not None), default=None)
        shares = (len(group.runs), group.diverged, *group.interval)
        rows.append([first.format, first.rate, first.kernel, first.stabiliser, *shares, *losses, largest])
    return Grid(names, rows)


def sweep_figures(sweep: Sweep, label: str) -> list[Figure]:
    """Of each format how often runs diverged against the learning rate, and what the loss of the others came to."""
    drawn = list[Figure]()
    for fmt, own in grouped(groups(sweep), lambda group: group.names[1]).items():
        shares = {
            group: (100 * group.diverged / len(group.runs), 100 * group.interval[0], 100 * group.interval[1])
            for group in own
        }
        losses = {group: group.losses for group in own if group.losses}
        note = f"Bars: Wilson's {CONFIDENCE:.0%} intervals. {label}."
        drawn.append(_figure(f"{fmt}: runs that diverged", "%", shares, sweep.settings, note))
        note = f"Median over the seeds. Bars: lowest to highest. {label}."
        drawn.append(_figure(f"{fmt}: loss of the runs that did not", "loss, nats", losses, sweep.settings, note))
    return drawn


def _figure(
    title: str, y_label: str, marks: Mapping[Group, tuple[float, float, float]], settings: SweepSettings, note: str
) -> Figure:
    """Marks, each with the ends of its bar, by their learning rates."""
    series = []
    for number, variant in enumerate(_variants(settings)):
        own = sorted((group.names[2], marks[group]) for group in marks if group.names[0] == variant)
        marked = [(math.log10(rate) + number * _STEP, *mark) for rate, mark in own]
        points, bars = tuple((x, y) for x, y, *_ in marked), tuple((x, low, high) for x, _, low, high in marked)
        series += [Series(variant, points, marked=points, bars=bars)] if marked else []
    ticks = tuple((math.log10(rate), f"{rate:g}") for rate in sorted(settings.rates))
    return Figure(title, note, "learning rate", y_label, tuple(series), ticks)


def _only(sweep: Sweep, names: Collection[str]) -> Sweep:
    kernels = tuple(name for name in sweep.settings.kernels if name in names)
    return Sweep(replace(sweep.settings, kernels=kernels), tuple(run for run in sweep.runs if run.kernel in names))


def _on_page(files: Mapping[Path, Sweep]) -> str:
    parts = []
    for label, sweep in zip(distinct([folder.name for folder in files], list(files)), files.values(), strict=True):
        heading = f'<h2 class="sweep">Sweep {escape(label)}: how often training diverged</h2>'
        parts.append(section(sweep_figures(sweep, label), f"{heading}\n{html(sweep_tables(sweep))}"))
    return "\n".join(parts)


SETTINGS_KIND, RUN_KIND = FileKind(SweepSettings), FileKind(SweepRun)
KIND = FileKind(
    Sweep,
    "a sweep",
    told_by=SETTINGS,
    folder=read_sweep,
    parts=sweep_tables,
    grid=csv_grid,
    kernels=lambda sweep: sweep.settings.kernels,
    only=_only,
    page=_on_page,
)
