"""From names on the command line to cells."""

from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest

from tiebreak.backends.backend import CPU, EMULATION
from tiebreak.backends.interpreter import INTERPRETER
from tiebreak.cases.feature_cases import EVERY
from tiebreak.cases.gpt2.snippets import SNIPPETS
from tiebreak.cases.scripted import EIGHT_BITS
from tiebreak.kernels.roster import DEFAULT_ROSTER, composed_kernel, eight_bit_kernels
from tiebreak.matrix.experiments.call import OneCall
from tiebreak.matrix.experiments.captured import OWN
from tiebreak.matrix.selection import Selection, cells
from tiebreak.reports.errors import UsageError

pytestmark = pytest.mark.quick

OFFERED = [case for case in EVERY if not case.on_request]


def chosen(selection: Selection) -> list[str]:
    """Ids of the cells."""
    return [cell.id for cell in cells(selection)[0]]


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text("def mine(q, k, v, *, causal=False, scale=None):\n    return q\n")
    return f"{tmp_path / 'mine.py'}:mine"


def test_what_is_run_on_request_is_named() -> None:
    (cell,) = cells(Selection("cpu", "standard", "decode_64k"))[0]
    assert cell.experiment.time_limit > OneCall(OFFERED[0]).time_limit


def test_all_of_everything_is_chosen_once_and_a_case_of_one_feature_by_kernels_that_it_claims_something_of() -> None:
    ids = chosen(Selection())
    assert len(set(ids)) == len(ids)
    kernels = {kernel.name for kernel in CPU.kernels()}
    of_random = {f"cpu-{name}-random-bf16" for name in kernels - {kernel.name for kernel in eight_bit_kernels()}}
    assert {name for name in ids if name.startswith("cpu-") and name.endswith("-random-bf16")} == of_random
    claimed = next(case for case in OFFERED if case.only_claimed)
    roster = {name for name in DEFAULT_ROSTER if claimed.claim_about(composed_kernel(name).declaration) is not None}
    assert roster < set(DEFAULT_ROSTER)
    assert {name for name in DEFAULT_ROSTER if f"cpu-{name}-{claimed.name}-bf16" in ids} == roster


@pytest.mark.skipif(INTERPRETER.unavailable() is not None, reason="no Triton")
def test_a_kernel_of_eight_bits_meets_a_v_that_it_can_hold() -> None:
    expected = [f"interpreter-triton_fp8-{name}-bf16" for name in EIGHT_BITS]
    assert chosen(Selection(kernels="triton_fp8")) == expected
    message = r"^no cell is left: .*triton_fp8 runs in the cases called fp8_\.\.\. alone"
    with pytest.raises(UsageError, match=message):
        cells(Selection(kernels="triton_fp8", cases="random"))


def test_a_composed_kernel_of_eight_bits_meets_every_input_where_it_is_named() -> None:
    assert "emulation-flash@fp8-random-bf16" not in chosen(Selection(backends="emulation"))
    named = Selection(backends="emulation", kernels="flash@fp8", cases="random")
    assert chosen(named) == ["emulation-flash@fp8-random-bf16"]


def test_cells_of_a_case_stand_together() -> None:
    cases = [cell.experiment.name for cell in cells(Selection(formats="*16", experiments="call,training"))[0]]
    changes = sum(case != other for case, other in pairwise(cases))
    asked = [case for case in OFFERED if not case.needs]  # the others of users' kernels
    assert changes == 2 * len(asked) + len(OWN) + len(SNIPPETS) - 1  # the suite's own captured ones are in bf16 alone


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (" no_tail , random,", ["no_tail", "random"]),
        ("tied_maxima[k=?]", [f"tied_maxima[k={k}]" for k in (2, 3, 4, 8)]),
        ("*[k=1*", ["tied_maxima[k=16]"]),
        ("random_o*,random_odd", ["random_odd"]),
    ],
)
def test_cases_are_named_in_lists_and_globs(names: str, expected: list[str]) -> None:
    found = chosen(Selection(backends="emulation", kernels="standard", cases=names))
    assert found == [f"emulation-standard-{name}-bf16" for name in expected]


def test_any_rule_at_any_plan_is_a_kernel_and_one_of_a_backend_alone_runs_there() -> None:
    assert "dithered@all_bf16" not in DEFAULT_ROSTER
    composed = Selection(backends="cpu", kernels="dithered@all_bf16", cases="random")
    assert chosen(composed) == ["cpu-dithered@all_bf16-random-bf16"]
    assert chosen(Selection(kernels="sdpa_flash", cases="random")) == ["cpu-sdpa_flash-random-bf16"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"cases": "tied_maxima[[]k=2]"}, "--cases: unknown case"),
        ({"formats": "fp32"}, "--dtype: unknown format 'fp32': known are bf16, fp16$"),  # it is no format of the matrix
        (
            {"backends": "emulation", "kernels": "sdpa_flash"},
            "--kernels: unknown kernel 'sdpa_flash': any rule@plan is one, and `tiebreak list kern",
        ),
        *(
            ({name: empty}, r"--\w+: no \w+ named: (known are|.*`tiebreak list \w+` names them)")
            for name, empty in product(("backends", "kernels", "cases", "formats"), ("", ",", " "))
        ),
    ],
)
def test_a_name_that_stands_for_nothing_is_refused_and_an_empty_list_is_no_list_of_all(
    words: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        cells(Selection(**words))


def test_a_users_kernel_runs_alone_on_the_cpu_and_never_in_the_emulation(mine: str) -> None:
    assert chosen(Selection(kernel=(mine,), cases="random")) == ["cpu-mine-random-bf16"]
    # With a plan the emulation would compare that plan with itself, and every kernel would pass.
    message = "^a kernel of your own runs on a device, not in the emulation: --backend cpu, ascend, cuda, files, inter"
    with pytest.raises(UsageError, match=message):
        cells(Selection(backends="emulation", kernel=(mine,), plan="fused"))
    both = chosen(Selection(backends="emulation,cpu", kernel=(mine,), kernels="fair", cases="random"))
    assert both == ["emulation-fair-random-bf16", "cpu-fair-random-bf16", "cpu-mine-random-bf16"]


def test_a_backend_that_cannot_run_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = replace(CPU, name="abacus", unavailable=lambda: "its beads are stuck")
    monkeypatch.setattr("tiebreak.matrix.selection.BACKENDS", {"emulation": EMULATION, "abacus": absent})
    found, unavailable = cells(Selection(kernels="standard", cases="random"))
    assert [cell.id for cell in found] == ["emulation-standard-random-bf16"]
    assert unavailable == {"abacus": "its beads are stuck"}
    with pytest.raises(UsageError, match=r"^--backend: abacus can't run here: its beads are stuck$"):
        cells(Selection(backends="abacus"))
