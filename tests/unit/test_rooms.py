"""The import graph, drawn from the sources, held to the arrows of CONTRIBUTING.md."""

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

from tiebreak import plugins

pytestmark = pytest.mark.quick

CHECKOUT = Path(__file__).parents[2]
PUBLIC = "tiebreak.kernels.public"  # the package that is installed as tiebreak itself
CORE_LINES = 16_000  # at most, of modules that are no plug-in's and are shipped
PLUGIN_ROW = re.compile(r"\| [\w, ]+ \| ((?:`[\w/]+(?:/|\.py)` ?)+)\|")
ROW = re.compile(r"\| `([\w/]+)/` \| `tiebreak\.(\w+)` \| ([\w, ]+) \|")


class Room(NamedTuple):
    """A row of the table."""

    folder: str  # from the checkout
    may_import: frozenset[str]  # other rooms


class Module(NamedTuple):
    """A file of a room, by its import name."""

    text: str
    package: bool  # whether it is an __init__


def rooms() -> dict[str, Room]:
    """The table of CONTRIBUTING.md, by name."""
    rows = ROW.findall((CHECKOUT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    return {
        name: Room(folder, frozenset() if about == "nothing" else frozenset(about.split(", ")))
        for folder, name, about in rows
    }


ROOMS = rooms()


def modules() -> dict[str, Module]:
    """Every module of every room, by its import name."""
    modules = {}
    for name, room in ROOMS.items():
        for path in (CHECKOUT / room.folder).rglob("*.py"):
            inside = path.relative_to(CHECKOUT / room.folder).with_suffix("").parts
            package = inside[-1] == "__init__"
            parts = ("tiebreak", name, *(inside[:-1] if package else inside))
            modules[".".join(parts)] = Module(path.read_text(encoding="utf-8"), package)
    return modules


def graph(sources: Mapping[str, Module]) -> dict[str, set[str]]:
    """What of `sources` each of them imports, wherever in it the import stands."""
    return {
        name: {imported for imported in _imported(name, module) if imported in sources} - {name}
        for name, module in sources.items()
    }


def _imported(name: str, module: Module) -> Iterator[str]:
    """Names that may be modules: of `from a import b` both a and a.b."""
    for node in ast.walk(ast.parse(module.text)):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                parts = name.split(".")
                above = parts[: len(parts) - node.level + module.package] if node.level else []
                origin = ".".join([*above, *([node.module] if node.module else [])])
                yield origin
                yield from (f"{origin}.{alias.name}" for alias in node.names)
            case ast.Call(func=ast.Name(id="import_module"), args=[ast.Constant(value=str(told)), *_]):
                yield told


def plug_ins() -> list[str]:
    """The folders and files of CONTRIBUTING.md's table of plug-ins, from the checkout."""
    rows = PLUGIN_ROW.findall((CHECKOUT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    return [place for row in rows for place in re.findall("`(.+?)`", row)]


def is_core(name: str) -> bool:
    """Whether a module is shipped and no plug-in's."""
    if _room(name) in ("defects", "studies"):
        return False
    inside = "/".join([ROOMS[_room(name)].folder, *name.split(".")[2:]])
    return not any(f"{inside}/".startswith(place) or f"{inside}.py" == place for place in plug_ins())


def broken_arrows(arrows: Mapping[str, set[str]]) -> list[str]:
    """Imports that the table does not allow, one line each."""
    return [
        f"{name} imports {other}: {_room(name)} may not import {_room(other)} (CONTRIBUTING.md)"
        for name, others in arrows.items()
        for other in sorted(others)
        if _room(other) not in ROOMS[_room(name)].may_import | {_room(name)}
    ]


def circle(arrows: Mapping[str, set[str]]) -> list[str]:
    """Modules that import one another, the first once more at the end; empty if none do."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _room(name: str) -> str:
    return name.split(".")[1]


@cache
def drawn() -> dict[str, set[str]]:
    """The graph of the sources: not as this file is imported, for every worker collects every test."""
    return graph(modules())


def test_the_table_names_every_room_where_it_is_installed_from() -> None:
    settings = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {"tiebreak": "kernels/public"} | {f"tiebreak.{name}": room.folder for name, room in ROOMS.items()}
    assert settings["package-dir"] == folders
    packages = {name for name, module in modules().items() if module.package}
    data = {f"tiebreak.reports.{name}" for name in ("baselines", "platforms")}  # without a module
    assert set(settings["packages"]) == packages - {PUBLIC} | {"tiebreak"} | data
    links = {path.name: path.resolve() for path in (CHECKOUT / ".typing/tiebreak").iterdir()}
    public = {name: CHECKOUT / "kernels/public" / name for name in ("__init__.py", "__init__.pyi", "plugins.py")}
    assert links == {name: CHECKOUT / room.folder for name, room in ROOMS.items()} | public


def test_every_import_goes_along_an_arrow() -> None:
    assert sum(map(len, drawn().values())) > 300, "the graph was not drawn"
    assert broken_arrows(drawn()) == []


def test_no_modules_import_one_another() -> None:
    assert circle(drawn()) == []


def test_the_core_imports_no_plug_in() -> None:
    assert len(plug_ins()) > 20, "the table was not read"
    assert [place for place in plug_ins() if not (CHECKOUT / place).exists()] == []
    core = [name for name in drawn() if is_core(name)]
    imported = {(name, other) for name in core for other in drawn()[name] if not is_core(other)}
    assert imported == set()


def test_the_core_is_small() -> None:
    lines = {name: module.text.count("\n") for name, module in modules().items() if is_core(name)}
    assert 10_000 < sum(lines.values()) <= CORE_LINES


def test_what_is_plugged_in_is_a_plug_in_s_and_loads() -> None:
    groups = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    registered = {name: group for name, group in groups.items() if name.startswith("tiebreak.")}
    assert len(registered) > 3
    for group, entries in registered.items():
        assert set(entries) <= set(plugins.registered(group))
        for name, target in entries.items():
            assert plugins.registered(group)[name].entry.value == target
            assert not is_core(target.partition(":")[0])
            assert plugins.loaded(group, name) is not None


@pytest.mark.parametrize(
    "text",
    [
        "from tiebreak import backends",
        "import tiebreak.backends.registry as known",
        "def late():\n    from tiebreak.backends.registry import BACKENDS",
        "from ..backends import registry",
        "module = import_module('tiebreak.backends.registry')",
    ],
)
def test_a_case_that_knows_a_backend_is_found(text: str) -> None:
    names = ("tiebreak.backends", "tiebreak.backends.registry", "tiebreak.cases", "tiebreak.cases.mine")
    empty = {name: Module("", package=name.count(".") == 1) for name in names}
    broken = broken_arrows(graph({**empty, "tiebreak.cases.mine": Module(text, package=False)}))
    assert broken
    assert all(line.startswith("tiebreak.cases.mine imports tiebreak.backends") for line in broken)


def test_a_circle_is_found() -> None:
    sources = {
        "tiebreak.cases": Module("", package=True),
        "tiebreak.cases.one": Module("from tiebreak.cases.two import x", package=False),
        "tiebreak.cases.two": Module("from . import three", package=False),
        "tiebreak.cases.three": Module("def late():\n    import tiebreak.cases.one", package=False),
    }
    assert set(circle(graph(sources))) == {f"tiebreak.cases.{name}" for name in ("one", "two", "three")}
