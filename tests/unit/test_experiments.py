"""Another kind of experiment is one file more: everything else finds it, runs it and shows what came of it."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tiebreak.laboratory.statement import profiles
from tiebreak.laboratory.statement.profiles import PROFILES, Selector, profile
from tiebreak.matrix.selection import Selection, cells
from tiebreak.reports import cli
from tiebreak.reports.records.record import CLAIM, FAILED, PASSED, Run

MatrixRun = Callable[..., pytest.RunResult]
Kept = Callable[..., Run]

# All of it: the experiment, its measure, what it claims, and how tables show it.
ALONE = '''
"""A call compared with itself: a head alone has the bits that it has in a batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from tiebreak.cases.case import Case
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.matrix.experiment import SelectionContext, Cell, Experiment, Kind, Pair
from tiebreak.matrix.result import Claimed, Result
from tiebreak.matrix.workbench import Workbench
from tiebreak.reports.records import record as records


@dataclass(frozen=True)
class Alone(Experiment):
    kind: ClassVar[str] = "alone"
    case: Case

    @property
    def name(self) -> str:
        return f"alone[{self.case.name}]"

    @property
    def tags(self) -> frozenset[str]:
        return frozenset({"alone"})

    def described(self) -> records.CaseRecord:
        return records.CaseRecord(f"{self.case.about}; every head alone", self.case.source)

    def pairs(self, asked: SelectionContext) -> Sequence[Pair]:
        return asked.pairs

    def run(self, cell: Cell, bench: Workbench) -> Result:
        inputs = bench.case(self.case, cell.fmt).batch(0).inputs
        together = cell.backend.run(cell.kernel, inputs, gradients=False).o
        heads = inputs.q.shape[1]
        equal = 0
        for h in range(heads):
            parts = {part: getattr(inputs, part)[:, h : h + 1] for part in ("q", "k", "v", "do")}
            alone = cell.backend.run(cell.kernel, replace(inputs, **parts), gradients=False).o
            equal += torch.equal(alone, together[:, h : h + 1])
        share = equal / heads
        met = Claimed("the same bits alone", "a test", share == 1.0, f"{equal} of {heads} heads have them")
        shown = records.Shown("equal_alone", 100 * share, "%", spec=".0f")
        return Result({"equal_alone": share}, shown, claims=(met,), heads=heads)


TOLD = "share of heads that have the same bits alone as in a batch"
KIND = Kind(
    Alone.kind,
    records.ExperimentRecord("a call compared with its heads alone", "the share of heads with the same bits alone"),
    experiments=[Alone(case) for case in SCRIPTED if case.name in ("random", "no_tail")],
    measured={"equal_alone": records.MeasureRecord(TOLD, worse="less", limit=0.0, column=True)},
)
'''


@pytest.fixture
def alone(plugged: Callable[..., Path]) -> Iterator[None]:
    """The one file more, of a package that registers it."""
    plugged("heads-alone", "[tiebreak.experiments]\nalone = alone_kind:KIND\n", alone_kind=ALONE)
    yield
    profile.cache_clear()
    sys.modules.pop("alone_kind", None)


def hashes() -> dict[str, str]:
    """Of what every profile asks for."""
    profile.cache_clear()
    return {name: profile(name).hash for name in PROFILES}


def test_no_profile_asks_for_it_but_one_that_names_its_tag(request: pytest.FixtureRequest) -> None:
    before = hashes()
    request.getfixturevalue("alone")
    assert hashes() == before
    selector = Selector("heads alone", frozenset({"alone"}), ("flash@fused",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiles, "PROFILES", {**PROFILES, "alone": selector})
        asked = profile("alone")
    assert set(asked.versions) == {"alone[random]", "alone[no_tail]"}
    assert asked.suite["cpu"] == {"flash@fused": ("alone[no_tail]", "alone[random]")}
    assert asked.own == {}


@pytest.mark.usefixtures("alone")
def test_kernels_of_another_kind_are_not_for_it() -> None:
    named = Selection(backends="emulation", kernels="flash@train,fair", experiments="alone,training")
    assert {(cell.experiment.kind, cell.kernel.name) for cell in cells(named)[0]} == {
        ("alone", "fair"),
        ("training", "flash@train"),
    }


@pytest.mark.usefixtures("alone")
def test_it_goes_the_whole_way(matrix: MatrixRun, kept: Kept, pytester: pytest.Pytester) -> None:
    """Dithering draws by a head's number, which is another when it is alone: `fair` is told from plain flash."""
    words = ("--backend", "emulation", "--kernels", "flash@fused,fair", "--heads", "16", "--junitxml", "junit.xml")
    result = matrix(*words, "--cases", "alone[*,random")
    assert result.ret == 1

    run = kept()
    by_cell = {(record.backend, record.kernel, record.case): record for record in run.records}
    assert len(by_cell) == 2 + 4
    for case in ("alone[random]", "alone[no_tail]"):
        sound, failed = by_cell["emulation", "flash@fused", case], by_cell["emulation", "fair", case]
        assert (sound.experiment, sound.outcome, sound.measures) == ("alone", PASSED, {"equal_alone": 1.0})
        assert (failed.outcome, failed.passed(CLAIM)) == (FAILED, False)
        assert "claim failed: the same bits alone (a test); 1 of 16 heads have them" in failed.reasons[0]
        assert f"--cases '{case}'" in failed.command
    assert by_cell["emulation", "fair", "random"].experiment == "call"

    measure = run.measures["equal_alone"]
    assert (measure.worse, measure.limit, measure.column) == ("less", 0.0, True)
    assert run.experiments["alone"].about == "a call compared with its heads alone"
    assert run.cases["alone[random]"].about.endswith("every head alone")

    shown = "\n".join(result.outlines)
    assert "100 % ·" in shown
    assert "!6 %!" in shown
    assert "the share of heads with the same bits alone" in shown
    assert 'name="tiebreak.equal_alone" value="1.0"' in (pytester.path / "junit.xml").read_text(encoding="utf-8")
    assert cli.main(["page", str(pytester.path / "out" / "last.json"), "-o", "page"]) == 0
    assert "equal_alone" in (pytester.path / "page" / "index.html").read_text(encoding="utf-8")
