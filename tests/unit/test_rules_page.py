"""What acceptance rules see, docs/rules.md: its table is what the script makes."""

import pytest

from tiebreak.programs.pages import rules as script


def test_columns_of_the_biased_kernel_and_the_fix_are_what_a_run_gives() -> None:
    bench, told = script.bench_of(script.CASE, script.HEADS), script.columns(script.CASE)
    assert tuple(told) == tuple(script.KERNELS)
    for kernel in ("flash@paper", "stabilized@paper"):
        assert script.column(bench, kernel) == told[kernel]


def agrees(column: dict[str, str]) -> bool:
    """Whether `signed_mean` fails a kernel where this suite calls it biased, and only there."""
    return column["this suite"].endswith("B") is column["`signed_mean`"].startswith("**")


def test_one_line_agrees_with_this_suite_on_every_kernel() -> None:
    assert [kernel for kernel, column in script.columns(script.CASE).items() if not agrees(column)] == []


@pytest.mark.parametrize("case", ["sink_tie", "random"])
def test_one_line_agrees_with_this_suite_on_other_inputs(case: str) -> None:
    bench = script.bench_of(case, heads=64)
    assert all(agrees(script.column(bench, kernel)) for kernel in ("flash@paper", "flash@fused", "stabilized@paper"))
