"""Shapes that a kernel must take, calls that many kernels are asked, and packages that bring plug-ins."""

import hashlib
from collections.abc import Callable, Hashable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tiebreak import plugins
from tiebreak.cases.bounds import UNDECLARED
from tiebreak.kernels.inputs import AttentionInputs, Gradients
from tiebreak.kernels.kernel import Declaration
from tiebreak.matrix import checks, experiments, resolver, workbench
from tiebreak.matrix.identification import settling
from tiebreak.matrix.identification.asking import threads
from tiebreak.matrix.identification.backward_attribution import backward_pass_of
from tiebreak.matrix.questions import comparison, session
from tiebreak.matrix.questions.comparison import exact
from tiebreak.matrix.questions.session import Session
from tiebreak.matrix.workbench import Settled

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


@pytest.fixture(scope="module")
def shared_cases() -> Iterator[None]:
    """Make inputs of a case, and what the candidates make of them, once for all kernels of a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workbench, "CaseBench", lru_cache(maxsize=9)(workbench.CaseBench))
        yield


@pytest.fixture(scope="module")
def settled_once() -> Iterator[None]:
    """Ask kernels of the same text for their plan once for all tests of a file."""
    known, settle = dict[Hashable, Settled](), settling._settle

    def once(probed: Any, seed: int) -> Settled:
        caller, at = probed.kernel.caller, (probed.backend.name, probed.fmt.name, seed)
        file = Path(caller.function.__code__.co_filename)
        text = file.read_text(encoding="utf-8") if file.is_file() else caller.function
        key = text, caller.function.__qualname__, str(caller.convention.options), *at
        if key not in known:
            known[key] = settle(probed, seed)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settling, "_settle", once)
        yield


@lru_cache(maxsize=4)  # parts of one answer, one after the other
def _numbers(inputs: AttentionInputs | Gradients) -> Hashable:
    """A key that inputs with equal numbers and features share, or gradients with equal numbers."""
    values = vars(inputs).values()
    return tuple((x.shape, _digest(x)) if isinstance(x, Tensor) else x for x in values)


def _digest(x: Tensor) -> bytes:
    return hashlib.blake2b(x.contiguous().view(-1).view(torch.uint8).numpy().data).digest()


@pytest.fixture(scope="module")
def alike() -> Iterator[Callable[[str], None]]:
    """Compute what a question compares with once for all kernels that are asked it; called with the next question.

    That is a plan's emulation of a call, and the exact answers. Which backward pass a kernel's gradients come from,
    before any question, is found once for all whose O and gradients there have the same bits.
    """
    made, asked, emulated = dict[Hashable, Any](), [""], Session.emulated
    found = dict[Hashable, tuple[str, int]]()

    def of_gradients(gradients: Gradients, o: Tensor, *forward: Any) -> tuple[str, int]:
        key = _numbers(gradients), _digest(o), *forward
        return found[key] if key in found else found.setdefault(key, backward_pass_of(gradients, o, *forward))

    def once(what: Hashable, inputs: AttentionInputs, make: Callable[[], Any]) -> Any:
        key = what, _numbers(inputs)
        if key not in made:
            made[key] = make()
        return made[key]

    def of_plan(
        self: Session, inputs: AttentionInputs, plan: Declaration | None = None, *, gradients: bool = True
    ) -> Any:
        what = plan or self.kernel.declaration or UNDECLARED, gradients and self.has_gradients
        return once(what, inputs, lambda: emulated(self, inputs, plan, gradients=gradients))

    def of(question: str) -> None:
        if asked != [question]:
            asked[:] = [question]
            made.clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "emulated", of_plan)
        patch.setattr(settling, "backward_pass_of", of_gradients)
        for module in (comparison, session):
            patch.setattr(module, "exact", lambda x, part: once(part, x, lambda: exact(x, part)))
        yield of


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute in one thread: sums come in one order then."""
    with threads(1):
        yield


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user stands, with the kernels of a test's file, its KERNEL, in mine.py."""
    (tmp_path / "mine.py").write_text(request.module.KERNEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
