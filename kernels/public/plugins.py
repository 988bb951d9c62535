"""The one door for what is no core: entry points, by which the suite's own plug-ins come in as anybody's package does.

A package names its objects in its pyproject.toml under these groups (examples/my-device):

- ``tiebreak.backends``: a `tiebreak.backends.backend.Backend`
- ``tiebreak.experiments``: a `tiebreak.matrix.experiment.Kind`
- ``tiebreak.checks``: a `tiebreak.matrix.checks.Check`
- ``tiebreak.adapters``: a function that is attention
- ``tiebreak.verbs``: a function from a command's arguments to its exit code; `lab.train` is `tiebreak lab train`
- ``tiebreak.files``: a `tiebreak.reports.files.FileKind`
"""

import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_T = TypeVar("_T")
_OWN, _EVERYWHERE = "tiebreak", "tiebreak.verbs"  # the distribution of this suite, and a group that it is always in
_PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"  # where this is a clone
_problems: dict[str, None] = {}  # each said once, in their order


class PluginError(Exception):
    """A plug-in can't be used: one line that names it and says what to do."""


class Door(Mapping[str, _T]):
    """What there is of a group, by name: the core's own, then what packages bring, imported as its value is asked for.

    A value that can't be had is a `PluginError`.
    """

    def __init__(self, group: str, kind: Any = object, own: Mapping[str, _T] | None = None) -> None:
        """Open the door to a group, whose values are of a type, beside the core's own."""
        self.group, self.kind, self.own = group, kind, dict(own or {})

    def __iter__(self) -> Iterator[str]:
        return iter({**self.own, **registered(self.group)})

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:  # a Mapping's own would import it
        return name in self.own or name in registered(self.group)

    def __getitem__(self, name: str) -> _T:
        if name in self.own:
            return self.own[name]
        value: _T = loaded(self.group, name)
        if not isinstance(value, self.kind):
            raise PluginError(f"{_place(self.group, name)} is no {self.kind.__name__}: {_cure(self.group, name)}")
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
            _problems[f"{_place(self.group, name)} is left out: the core has one of that name"] = None
        return found

    def ours(self) -> list[str]:
        """Return the names that this suite brings: the core's, and those of its own plug-ins."""
        return [name for name in self if origin(self.group, name) == _OWN]


@cache
def registered(group: str) -> "Mapping[str, EntryPoint]":
    """Return a group's entry points by name, the suite's own first; of two of one name the first.

    Raises:
        PluginError: the suite's own are not registered: cells would be missing without a word.
    """
    from importlib.metadata import EntryPoint, entry_points  # slow to import, and most commands don't ask

    found = {each.name: each for each in entry_points(group=group) if _owner(each) == _OWN}
    if _PROJECT.is_file():  # of a clone, which its installation may be older than
        known = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]["entry-points"].get(group, {})
        found = {name: EntryPoint(name, value, group) for name, value in known.items()}
    elif not entry_points(group=_EVERYWHERE):
        raise PluginError("tiebreak: its plug-ins are not registered: install it again")
    for each in sorted(entry_points(group=group), key=lambda each: each.name):
        if _owner(each) != _OWN and (first := found.setdefault(each.name, each)) is not each:
            left = f"{group}: {each.name} of {_owner(each)} is left out"
            _problems[f"{left}: {_owner(first)} has one of that name"] = None
    return found


@cache
def loaded(group: str, name: str) -> Any:
    """Import an entry point's object; PluginError: that fails; KeyError: there is none of that name."""
    entry = registered(group)[name]
    try:
        return entry.load()
    except (Exception, SystemExit) as error:  # whatever somebody's module raises as it is imported
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise PluginError(f"{_place(group, name)} can't be loaded, {reason}: {_cure(group, name)}") from error


def origin(group: str, name: str) -> str:
    """Return the distribution that brings a name of a group, with its version; of the suite's own the name alone."""
    entry = registered(group).get(name)
    if entry is None or entry.dist is None or entry.dist.name == _OWN:
        return _OWN
    return f"{entry.dist.name} {entry.dist.version}"


def problems() -> list[str]:
    """Return a line for each plug-in that was asked for and can't be used."""
    return list(_problems)


def _owner(entry: "EntryPoint") -> str:
    return _OWN if entry.dist is None else entry.dist.name


def _place(group: str, name: str) -> str:
    return f"{group}: {name} of {origin(group, name)}"


def _cure(group: str, name: str) -> str:
    return f"install {_owner(registered(group)[name])} again, or uninstall it"
