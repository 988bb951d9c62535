"""The one door for what is no core: entry points, by which the suite's own plug-ins come in as anybody's package does.

A package names its objects in its pyproject.toml under these groups (examples/my-device):

- ``tiebreak.backends``: a `tiebreak.backends.backend.Backend`
- ``tiebreak.experiments``: a `tiebreak.matrix.experiment.Kind`, or an `Offer` of more experiments
- ``tiebreak.checks``: a `tiebreak.matrix.checks.Check`, or a `Look` at every call
- ``tiebreak.adapters``: a function that is attention
- ``tiebreak.verbs``: a function from a command's arguments to its exit code; `lab.train` is `tiebreak lab train`
- ``tiebreak.files``: a `tiebreak.reports.files.FileKind`
"""

import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_T = TypeVar("_T")
_OWN, _EVERYWHERE = "tiebreak", "tiebreak.verbs"  # the distribution of this suite, and a group that it is always in
_PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"  # where this is a clone
_problems: dict[str, None] = {}  # each said once, in their order


class PluginError(Exception):
    """A plug-in can't be used: one line that names it and says what to do."""


class PlugIn(NamedTuple):
    """An object that a package registers."""

    entry: "EntryPoint"
    origin: str  # the package, with its version; of the suite's own its name alone

    def broken(self, why: str) -> PluginError:
        """Return the error that this can't be used."""
        cure = f"install {self.origin.partition(' ')[0]} again, or uninstall it"
        return PluginError(f"{self.entry.group}: {self.entry.name} of {self.origin} {why}: {cure}")


class Door(Mapping[str, _T]):
    """All that a group has, by name: the core's own, then what packages bring, imported as its value is asked for.

    A value that can't be had is a `PluginError`.
    """

    def __init__(self, group: str, kind: Any = object, own: Mapping[str, _T] | None = None) -> None:
        """Open the door to a group, whose values are of a type, beside the core's own."""
        self.group, self.kind, self.own = group, kind, dict(own or {})

    def __iter__(self) -> Iterator[str]:
        return iter({**self.own, **registered(self.group)})

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:  # a Mapping's own would import it
        return name in self.own or name in registered(self.group)

    def __getitem__(self, name: str) -> _T:
        if name in self.own:
            return self.own[name]
        value: _T = loaded(self.group, name)
        if not isinstance(value, self.kind):
            raise registered(self.group)[name].broken(f"is no {self.kind.__name__}")
        return value

    def usable(self) -> dict[str, _T]:
        """Return all that can be had; what can't is a line among the `problems`, and changes nothing else."""
        found = {}
        for name in self:
            try:
                found[name] = self[name]
            except PluginError as error:
                _problems[str(error)] = None
        for name in self.own.keys() & registered(self.group).keys():
            _problems[str(registered(self.group)[name].broken("is left out, the core has one of that name"))] = None
        return found

    def origin(self, name: str) -> str:
        """Return which package brings a name, with its version; of the suite's own its name alone."""
        return _OWN if name in self.own or name not in self else registered(self.group)[name].origin


@cache
def registered(group: str) -> Mapping[str, PlugIn]:
    """Return what a group has, by name, the suite's own first; of two of one name the first.

    PluginError: the suite's own are not registered: cells would be missing without a word.
    """
    from importlib.metadata import EntryPoint, entry_points  # slow to import, and most commands don't ask

    every = [(each, each.dist.name, each.dist.version) for each in entry_points(group=group) if each.dist is not None]
    own = [each for each, package, _ in every if package == _OWN]
    if _PROJECT.is_file():  # of a clone, which its installation may be older than
        known = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]["entry-points"].get(group, {})
        own = [EntryPoint(name, value, group) for name, value in known.items()]
    elif not (own if group == _EVERYWHERE else registered(_EVERYWHERE)):
        raise PluginError("tiebreak: its plug-ins are not registered: install it again")
    found = {each.name: PlugIn(each, _OWN) for each in sorted(own, key=lambda each: each.name)}
    for each, package, version in sorted(every, key=lambda each: (each[0].name, each[1])):
        plug_in = PlugIn(each, f"{package} {version}")
        if package != _OWN and (first := found.setdefault(each.name, plug_in)) is not plug_in:
            _problems[str(plug_in.broken(f"is left out, {first.origin} has one of that name"))] = None
    return found


@cache
def loaded(group: str, name: str) -> Any:
    """Import what is registered; PluginError: that fails; KeyError: there is none of that name."""
    plug_in = registered(group)[name]
    try:
        return plug_in.entry.load()
    except (Exception, SystemExit) as error:  # whatever somebody's module raises as it is imported
        raise plug_in.broken(" ".join(f"can't be loaded, {type(error).__name__}: {error}".split())) from error


def problems() -> list[str]:
    """Return a line for each plug-in that was asked for and can't be used."""
    return list(_problems)
