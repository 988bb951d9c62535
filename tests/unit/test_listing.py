"""`tiebreak list` lists what there is, and what they list can be run."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tiebreak.backends.backend import CPU
from tiebreak.cases.captured import TRAINED_SINK
from tiebreak.cases.feature_cases import EVERY, FEATURED
from tiebreak.cases.gpt2.snippets import SNIPPETS
from tiebreak.cases.scripted import SEEN
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.external.loading import ADAPTERS
from tiebreak.kernels.plans import PLANS
from tiebreak.kernels.shift_rules import SHIFT_RULES
from tiebreak.matrix.experiments import contract
from tiebreak.matrix.questions import invariance, shapes, usage
from tiebreak.reports import cli

ALL = [
    *(case.name for case in EVERY if case not in FEATURED),
    TRAINED_SINK.name,
    *(case.name for case in FEATURED),
    *(case.name for case in contract.CASES),
    "identity",
    *(each.name for each in invariance.QUESTIONS),
    "log_probabilities",
    *SNIPPETS,
    *(each.name for each in (*usage.QUESTIONS, *shapes.QUESTIONS)),
]


def names(lines: list[str]) -> list[str]:
    """The first words of indented lines."""
    return [line.split()[0] for line in lines if line.startswith("  ")]


def told(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert cli.main(words) == 0
    return capsys.readouterr().out.splitlines()


def test_every_case_and_training_run_is_listed_with_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, "list", "cases")
    assert names(lines) == ALL
    marked = {line.split()[0]: line.split()[1] for line in lines if line.startswith("  ")}
    listed = [name for name, word in marked.items() if word in ("scripted", "seen") and name != TRAINED_SINK.name]
    assert listed == [case.name for case in EVERY if case.failure]
    assert all(any(case.about in line for line in lines) for case in EVERY)
    heads = [line for line in told(capsys, "list", "cases", "*,random") if line and not line.startswith(" ")]
    assert heads == ALL, "of all, all is told"
    assert cli.main(["list", "cases", "none"]) == 2
    message = "tiebreak list cases: unknown case 'none': `tiebreak list cases` names them\n"
    assert capsys.readouterr() == ("", message)


def test_what_trained_models_meet_is_marked_with_how_often_as_the_study_has_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = {line.split()[0]: line for line in told(capsys, "list", "cases") if line.startswith("  ")}
    data = json.loads("\n".join(told(capsys, "list", "cases", "--json", "-")))
    study = (Path(__file__).parents[2] / "docs" / "science.md").read_text(encoding="utf-8")
    assert list(data) == ALL
    seen = {name: each["seen"] for name, each in data.items() if "seen" in each}
    assert seen == SEEN
    assert TRAINED_SINK.name in seen
    for name, text in seen.items():
        assert lines[name].split()[1] == "seen"
        assert text in lines[name]
        shares = re.findall(r"([\d.]+) %", text)
        assert shares
        assert all(f" {share}±" in study for share in shares)


def test_of_a_case_that_is_named_all_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, "list", "cases", "sink_tie", "train_d*")
    assert [line for line in lines if line and not line.startswith(" ")] == ["sink_tie", "train_drift"]
    sink = next(case for case in EVERY if case.name == "sink_tie")
    of_sink = lines[: lines.index("")]
    assert sum(line.startswith("  claim ") for line in of_sink) == len(sink.claims)
    assert any(
        "biased away from zero: rule as_printed_v1 safe, plan" in line and sink.claims[0].source in line
        for line in of_sink
    )


def test_the_kernels_of_a_backend_are_listed_and_why_one_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, "list", "kernels")
    at = next(number for number, line in enumerate(lines) if line.startswith("cpu: "))
    assert names(lines[at : lines.index("", at)]) == [kernel.name for kernel in CPU.kernels()]
    assert any(line.startswith("ascend: ") and "; can't run here: " in line for line in lines)
    assert set(ADAPTERS) < set(names(lines))


def test_backends_are_listed_by_the_package_that_brings_them(
    plugged: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    module = (
        "from dataclasses import replace\nfrom tiebreak.backends.backend import CPU\nOTHER = replace(CPU, name='other')"
    )
    plugged("others", "[tiebreak.backends]\nother = other_device:OTHER\n", other_device=module)
    lines = told(capsys, "list", "backends")
    at = lines.index("others 1.0")
    assert {"emulation", "cpu", "interpreter", "cuda"} < set(names(lines[lines.index("tiebreak") : at]))
    assert names(lines[at:]) == ["other"]


def test_every_plan_and_rule_is_listed_and_plan_takes_them(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, "list", "plans")
    assert names(lines) == [*PLANS, *SHIFT_RULES]
    for name in PLANS:
        assert parse_declaration(name).plan.name == name
    described = {line.split()[0]: line for line in lines if line.startswith("  ")}
    assert described["fused_stochastic"].endswith("p_bar=input, o=input:stochastic, p=input, ds=input, gradients=input")
    assert "accumulator=hopper" in described["fused_hopper"]
    assert "m = r_m + u ln 2" in described["dithered"]
