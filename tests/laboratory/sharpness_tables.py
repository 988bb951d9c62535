"""What runs of a measurement of sharpness came to, as tables in Markdown."""

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from tiebreak.laboratory.sharpness_run import BACK, ON, TRAINED, Point, Run, Settings
from tiebreak.reports.tables import grids
from tiebreak.reports.tables.grids import Grid


def summary(runs: Sequence[Run], settings: Settings) -> str:
    """The tables, in Markdown: against steps, at the end of the stretch in a run's own format, and after it."""
    names = sorted({run.reduction for run in runs}, key=lambda name: (":" in name, name))
    of = {name: [run for run in runs if run.reduction == name] for name in names}
    parts = [_over_steps(of, settings), _at_the_end(of, settings)]
    if settings.more:
        parts.append(_gone_on(of, settings))
    return "\n\n".join(parts + [_order(each) for each in _groups(of, settings)])


def _values(runs: Sequence[Run], phase: str, step: int, of: Callable[[Point], float]) -> str:
    """Mean and standard deviation over seeds."""
    return _mean_and_spread(
        [of(point) for run in runs for point in run.measured if (point.phase, point.step) == (phase, step)]
    )


def _mean_and_spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4g}{spread}"


def table(rows: Iterable[Sequence[str]], head: Sequence[str], title: str) -> str:
    return grids.text([Grid(head, list(rows), title)], "github")


def _over_steps(of: Mapping[str, Sequence[Run]], settings: Settings) -> str:
    first = f"{settings.epsilons[0]:g}"
    steps = range(settings.every, settings.steps + 1, settings.every)
    rows = [
        [name, str(len(runs)), *(_values(runs, TRAINED, step, lambda point: point.masked[first]) for step in steps)]
        for name, runs in of.items()
    ]
    title = f"Sharpness in per cent at epsilon {first} after so many steps, mean ± standard deviation over seeds"
    return table(rows, ["format", "seeds", *map(str, steps)], title)


def _at_the_end(of: Mapping[str, Sequence[Run]], settings: Settings) -> str:
    columns: dict[str, Callable[[Point], float]] = {
        "held-out loss": lambda point: point.held_out,
        "norm of W_Q": lambda point: point.w_q,
        "mean logit magnitude": lambda point: point.logit,
    }
    for epsilon in settings.epsilons:
        columns[f"eps {epsilon:g}"] = lambda point, key=f"{epsilon:g}": point.masked[key]  # type: ignore[misc]
    first = f"{settings.epsilons[0]:g}"
    columns[f"eps {first}, logits in fp32"] = lambda point: point.unmasked[first]
    rows = [
        [
            name,
            *(_values(runs, TRAINED, settings.steps, column) for column in columns.values()),
            _against(runs, of.get(settings.back, ()), settings),
        ]
        for name, runs in of.items()
    ]
    head = ["format", *columns, f"eps {first}, in per cent of {settings.back}'s"]
    return table(rows, head, f"After {settings.steps} steps")


def _against(runs: Sequence[Run], others: Sequence[Run], settings: Settings) -> str:
    """Sharpness at the end in per cent of the other format's at the same seed, so with the same batches."""
    own, other = _at_end(runs, settings), _at_end(others, settings)
    shares = [100 * own[seed] / other[seed] for seed in own.keys() & other.keys()]
    return _mean_and_spread(shares)


def _at_end(runs: Sequence[Run], settings: Settings) -> dict[int, float]:
    """Sharpness by seed at the end of the stretch in a run's own format."""
    first = f"{settings.epsilons[0]:g}"
    points = ((run.seed, point) for run in runs for point in run.measured)
    return {
        seed: point.masked[first] for seed, point in points if (point.phase, point.step) == (TRAINED, settings.steps)
    }


def _gone_on(of: Mapping[str, Sequence[Run]], settings: Settings) -> str:
    first, end = f"{settings.epsilons[0]:g}", settings.steps + settings.more
    rows = []
    for name, runs in of.items():
        masked = [_values(runs, phase, end, lambda point: point.masked[first]) for phase in (ON, BACK)]
        unmasked = [_values(runs, phase, end, lambda point: point.unmasked[first]) for phase in (ON, BACK)]
        losses = [_values(runs, phase, end, lambda point: point.held_out) for phase in (ON, BACK)]
        rows.append([name, *masked, *unmasked, *losses])
    places = ("on in it", f"in {settings.back}")
    head = [f"{what}, {place}" for what in ("sharpness", "logits in fp32", "held-out loss") for place in places]
    return table(rows, ["format", *head], f"After {settings.more} more steps, from one state")


def _groups(of: Mapping[str, Sequence[Run]], settings: Settings) -> Iterator[dict[str, dict[int, float]]]:
    """Sharpness at the end by format and seed, of each way to mask, beside the format that training goes back to."""
    for suffix in sorted({name.partition(":")[2] for name in of}):
        alike = {name: runs for name, runs in of.items() if name.partition(":")[2] == suffix or name == settings.back}
        group = {name: ends for name, runs in alike.items() if (ends := _at_end(runs, settings))}
        if len(group) > 1:
            yield group


def _order(group: Mapping[str, Mapping[int, float]]) -> str:
    """Which is sharper, by mean, and in how many seeds each step of that order is seen."""
    ranked = sorted(group, key=lambda name: -statistics.fmean(group[name].values()))
    order = [ranked[0]] if ranked else []
    for sharper, flatter in itertools.pairwise(ranked):
        both = set(group[sharper]) & set(group[flatter])
        seen = sum(group[sharper][seed] > group[flatter][seed] for seed in both)
        order.append(f"> ({seen} of {len(both)} seeds) {flatter}")
    return "Order: " + " ".join(order)
