"""Shapes that a kernel must take, and packages that bring plug-ins."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tiebreak import plugins
from tiebreak.matrix import checks, experiments, resolver

# Queries, keys, d, query heads, key heads, causal.
SHAPES = {
    "one_of_each": (1, 1, 16, 1, 1, False),
    "d32": (33, 70, 32, 2, 2, False),
    "d256": (5, 70, 256, 2, 1, False),
    "d20_odd_heads": (37, 37, 20, 3, 3, True),
    "grouped_causal": (70, 70, 16, 6, 2, True),
    "fewer_queries_causal": (19, 150, 16, 2, 2, True),
    "fewer_keys_causal": (150, 19, 16, 2, 2, True),  # the first 131 queries see no key
}


@pytest.fixture(params=SHAPES.values(), ids=list(SHAPES))
def attention_shape(request: pytest.FixtureRequest) -> tuple[int, int, int, int, int, bool]:
    """Sizes of a call of attention: queries, keys, d, query heads, key heads, and whether it is causal."""
    shape: tuple[int, int, int, int, int, bool] = request.param
    return shape


@pytest.fixture
def laid() -> Callable[..., None]:
    """Lays a package into a folder as pip does: its name, what it registers and its modules."""

    def lay(folder: Path, name: str, entries: str, **modules: str) -> None:
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(entries, encoding="utf-8")
        for module, text in modules.items():
            (folder / f"{module}.py").write_text(text, encoding="utf-8")

    return lay


def forget() -> None:
    """Look for plug-ins anew."""
    for known in (
        plugins.registered,
        plugins.loaded,
        experiments.offers,
        experiments.kinds,
        checks.checks,
        checks.looks,
        resolver.resolver,
    ):
        known.cache_clear()
    plugins._problems.clear()


@pytest.fixture
def plugged(
    laid: Callable[..., None], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Path]]:
    """Installs a package for this process: its name, entry_points.txt and modules; returns its folder."""

    def install(name: str, entries: str, **modules: str) -> Path:
        folder = tmp_path_factory.mktemp("plugged")
        laid(folder, name, entries, **modules)
        monkeypatch.syspath_prepend(folder)
        forget()
        return folder

    yield install
    monkeypatch.undo()
    forget()
