"""The store of a sweep: a folder with what all its runs share, and a file for each run that is done."""

import re
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Annotated, Any, TypeVar

from msgspec import Meta, to_builtins

from tiebreak.reports.errors import UsageError
from tiebreak.reports.records import store
from tiebreak.reports.records.decode import Data, FileData, Integer, Schema, encode
from tiebreak.reports.records.store import UnreadableRecordsError

SETTINGS = "settings.json"
RUNS = "runs"
NO_STABILISER = "none"

_D = TypeVar("_D", bound=Data)


class Place(Data, frozen=True, order=True, omit_defaults=False):
    """Where a run stands in its sweep."""

    format: str  # of the masked products
    rate: float  # learning rate, the highest of its schedule
    kernel: str  # of attention
    stabiliser: str  # the one switch that is on
    seed: Integer  # of weights, batches and noise

    @property
    def variant(self) -> str:
        """Kernel, and stabiliser where there is one."""
        return self.kernel if self.stabiliser == NO_STABILISER else f"{self.kernel} + {self.stabiliser}"

    @property
    def text(self) -> str:
        """As lines of progress and messages name it."""
        return f"{self.kernel} {self.format} lr {self.rate:g} {self.stabiliser} seed {self.seed}"

    @property
    def file(self) -> str:
        """The name of its file: no sweep has two places of one name."""
        named = f"{self.kernel},{self.format},lr{self.rate!r},{self.stabiliser},seed{self.seed}"
        return re.sub(r"[^\w.,@+=-]", "_", named) + ".json"


class SweepSettings(FileData, frozen=True):
    """What a sweep is: the recipe of all runs, and what varies between them."""

    schema: Schema  # version of this layout
    recipe: Mapping[str, Any]  # what all runs share, by name
    diverged: str  # when a run counts as diverged, in words
    seeds: Annotated[int, Meta(ge=1)]  # from 1
    rates: tuple[float, ...]  # learning rates
    formats: tuple[str, ...]  # of the masked products
    kernels: tuple[str, ...]  # of attention
    stabilisers: tuple[str, ...]  # switches, one at a time

    def places(self) -> Iterator[Place]:
        """Every run; all of one seed before the next, so that at any stop each setting has been run equally often."""
        for seed in range(1, self.seeds + 1):
            for fmt, rate, kernel, stabiliser in product(self.formats, self.rates, self.kernels, self.stabilisers):
                yield Place(fmt, rate, kernel, stabiliser, seed)


class SweepRun(Place, frozen=True, order=True):
    """What a run came to."""

    diverged: str | None  # how; null: it has not
    steps: Integer  # that it took
    loss: float | None  # mean over the last tenth of its steps, in nats; null where that is no number
    lowest: float | None  # loss of a step
    max_logit: float | None  # the largest of all steps looked at
    seconds: float  # that it took, of one core
    platform: Mapping[str, str | None]  # where it ran

    @property
    def place(self) -> Place:
        """Where it stands."""
        return Place(**{name: getattr(self, name) for name in Place.__struct_fields__})


class Sweep(Data, frozen=True, omit_defaults=False):
    """A sweep, as far as it is done."""

    settings: SweepSettings
    runs: tuple[SweepRun, ...]  # in the order of the settings

    @property
    def left(self) -> list[Place]:
        """Runs that are still to be done, in their order."""
        done = {run.place for run in self.runs}
        return [place for place in self.settings.places() if place not in done]


def open_store(folder: Path, settings: SweepSettings) -> Sweep:
    """Begin a sweep in a folder, or go on with the same one; it may have got more seeds.

    UsageError: it has another sweep, or is not a sweep's. UnreadableRecordsError: a file is not whole. Neither changes
    anything.
    """
    path = folder / SETTINGS
    if not path.exists():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            told = "so it is no sweep's, but it is not empty: name another --out"
            raise UsageError(f"{folder}: has no {SETTINGS}, {told}")
        store.write(settings, path)
        return Sweep(settings, ())
    kept = read_sweep(folder)
    there, here = ({**to_builtins(each), **each.recipe} for each in (kept.settings, settings))
    for name in dict.fromkeys([*here, *there]):
        if name not in ("recipe", "seeds") and there.get(name) != here.get(name):
            was, now = encode(there.get(name)), encode(here.get(name))
            raise UsageError(f"{path}: another sweep: its {name} is {was}, not {now}; name another --out")
    if settings.seeds > kept.settings.seeds:
        store.write(settings, path)
    return Sweep(settings, tuple(run for run in kept.runs if run.seed <= settings.seeds))


def keep(run: SweepRun, folder: Path) -> None:
    """Put a run into its sweep's folder, whole or not at all; UnwritableFolderError: it can't be written."""
    store.write_text(encode(run) + "\n", folder / RUNS / run.file)


def read_sweep(folder: Path) -> Sweep:
    """Return the sweep in a folder; UnreadableRecordsError: a file is missing, cut short, or of something else."""
    if not (folder / SETTINGS).exists():
        raise UnreadableRecordsError(f"{folder / SETTINGS}: no such file: no sweep's folder?")
    settings, runs = _read(folder / SETTINGS, SweepSettings, "name another --out"), list[SweepRun]()
    for place in settings.places():
        path = folder / RUNS / place.file
        if path.exists():
            runs.append(_read(path, SweepRun, "delete it, and its run is run again"))
            if runs[-1].place != place:
                raise UnreadableRecordsError(f"{path}: holds another run: {runs[-1].text}")
    return Sweep(settings, tuple(runs))


def _read(path: Path, kind: type[_D], cure: str) -> _D:
    try:
        return store.load(path, kind)
    except UnreadableRecordsError as error:
        raise UnreadableRecordsError(f"{error}; {cure}") from None
