"""Which plan an undeclared kernel follows."""

from collections.abc import Mapping

import pytest

from tiebreak.matrix.candidates import ONE_TILE
from tiebreak.matrix.explain import Explanation, explain
from tiebreak.reports.records import Estimate, Record

FITS, MISSES, STRADDLES = Estimate(0.01, 0.02), Estimate(0.2, 0.02), Estimate(0.04, 0.03)
NOT_A_NUMBER, ONE_HEAD = Estimate(None, None), Estimate(0.0, None)


def record(case: str, kernel: str = "mine", backend: str = "cpu", **fits: Estimate) -> Record:
    return compared(case, fits, kernel, backend)


def compared(case: str, fits: Mapping[str, Estimate], kernel: str = "mine", backend: str = "cpu") -> Record:
    name = f"{backend}-{kernel}-{case}-bf16"
    evidence = {"fits": fits} if fits else {}
    return Record(name, backend, kernel, case, 1, "bf16", 1, 256, "call", "measured", "pytest", evidence=evidence)


def only(*records: Record) -> Explanation:
    (found,) = explain(records)
    return found


def test_the_plan_that_fits_in_all_cells_is_named() -> None:
    found = only(record("a", paper=FITS, fused=MISSES), record("b", paper=FITS, fused=FITS))
    assert found.explained
    assert found.text == "follows paper in all 2 cells compared (mean difference 0.0100 ulp)"


def test_a_single_cell() -> None:
    assert only(record("a", paper=FITS)).text.startswith("follows paper in the 1 cell compared")


@pytest.mark.parametrize("bad", [MISSES, NOT_A_NUMBER])
def test_one_miss_makes_it_unexplained(bad: Estimate) -> None:
    found = only(record("a", paper=FITS), record("b", paper=bad), record("c", paper=STRADDLES))
    assert not found.explained
    assert found.text == "unexplained: no known plan fits; paper is nearest but misses 1 of 3 cells (b)"


@pytest.mark.parametrize("open_", [STRADDLES, ONE_HEAD])
def test_a_cell_that_does_not_tell_is_no_fit(open_: Estimate) -> None:
    found = only(record("a", paper=FITS), record("b", paper=open_))
    assert not found.explained
    assert found.text == (
        "unexplained: too few heads; paper is nearest but 1 of 2 cells do not tell (b): it takes more"
    )


def test_fewest_misses_then_fewest_open_cells_then_the_smallest_distance() -> None:
    near_miss, far_fit = Estimate(0.06, 0.001), Estimate(0.03, 0.001)
    assert only(record("a", paper=near_miss, fused=STRADDLES)).plan == "fused"
    assert only(record("a", paper=STRADDLES, fused=far_fit)).plan == "fused"
    assert only(record("a", paper=far_fit, fused=FITS)).plan == "fused"


def test_the_first_of_two_that_fit_alike_is_named_and_so_is_the_other() -> None:
    tiled = {"fused": FITS, f"fused{ONE_TILE}": FITS, f"paper{ONE_TILE}": FITS, "standard": MISSES}
    found = only(compared("a", tiled))
    assert found.plan == "fused"
    assert found.others == ("paper",)
    assert found.text.endswith("; fit too: paper)")


def test_long_lists_are_cut() -> None:
    found = only(*(record(name, paper=MISSES) for name in "abcd"))
    assert found.text.endswith("misses 4 of 4 cells (a, b, c, ...)")


def test_kernels_and_backends_are_explained_each_on_its_own() -> None:
    found = explain(
        [
            record("a", kernel="one", paper=FITS),
            record("a", kernel="two", paper=MISSES),
            record("a", kernel="one", backend="cuda", paper=MISSES),
        ]
    )
    assert [(one.backend, one.kernel, one.explained) for one in found] == [
        ("cpu", "one", True),
        ("cpu", "two", False),
        ("cuda", "one", False),
    ]


def test_cells_without_comparison_are_left_aside() -> None:
    assert explain([record("a")]) == []
    assert only(record("a"), record("b", paper=FITS)).cells == 1


def test_only_plans_that_every_cell_was_compared_with_count() -> None:
    found = only(record("a", fp32=FITS, paper=FITS), record("b", paper=MISSES))
    assert (found.plan, found.misses) == ("paper", ("b",))
