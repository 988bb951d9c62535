"""What acceptance rules see, docs/rules.md: its tables are what the script makes."""

import pytest

from tiebreak.studies import rules as script
from tiebreak.studies.pages import renewed

PAGE = script.PAGE.read_text(encoding="utf-8")


def test_the_sources_are_those_of_the_rules() -> None:
    assert renewed(PAGE, "sources", script.sources()) == PAGE


def test_columns_of_the_disease_and_the_cure_are_what_a_run_gives() -> None:
    name = "tied_maxima[k=2]"
    bench, told = script.bench_of(name, script.HEADS), script.columns(name)
    assert tuple(told) == tuple(script.KERNELS)
    for kernel in ("flash@paper", "stabilized@paper"):
        assert script.column(bench, kernel) == told[kernel]


def test_a_column_of_gradients_is_what_a_run_gives() -> None:
    bench = script.bench_of("tied_maxima[k=2]", script.FEWER_HEADS, gradients=True)
    assert (
        script.column(bench, "flash@fused", gradients=True)
        == script.columns("gradients of tied_maxima[k=2]")["flash@fused"]
    )


@pytest.mark.parametrize("case", script.CASES)
def test_one_line_agrees_with_this_suite_on_every_input_and_kernel(case: str) -> None:
    for kernel, column in script.columns(case).items():
        assert column["this suite"].endswith("B") is column["`signed_mean`"].startswith("**"), kernel
