"""The check `accuracy`: errors no larger than those of the plan that a kernel declares, or follows."""

import pytest
import torch

from tiebreak.backends.backend import CPU
from tiebreak.cases.measures.accuracy import LIMIT, ROUNDED_ONCE, ratio_of_means
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.defects.planted import twin
from tiebreak.kernels.formats import BF16
from tiebreak.kernels.kernel import Kernel
from tiebreak.kernels.shift_rules import SHIFT_RULES
from tiebreak.matrix.candidates import accepted, candidates
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.experiments.call import Call
from tiebreak.matrix.run import run_cell
from tiebreak.matrix.settings import Settings
from tiebreak.matrix.workbench import Workbench
from tiebreak.reports.records.record import Answer

CASES = {case.name: case for case in SCRIPTED}
HEADS = 64


def answer(kernel: Kernel, case: str) -> Answer:
    record = run_cell(Cell(CPU, kernel, Call(CASES[case]), BF16), Workbench(Settings(seed=3, heads=HEADS)))
    return record.answers["accuracy"]


@pytest.mark.parametrize("case", ["near_tie_inside", "random_scaled", "mixed_sign_v", "repeated_large[r=105]"])
def test_a_sound_kernel_that_has_no_plans_bits_passes(case: str) -> None:
    """Split in two it has 87 % of the bits of any plan in the first case, and errs no more."""
    assert answer(twin("split"), case).met is True


def test_one_head_that_cancels_does_not_fall_and_a_share_of_all_heads_does() -> None:
    plans = torch.linspace(0.05, 0.15, HEADS, dtype=torch.float64)
    outlier = plans.clone()
    outlier[0] *= 1000
    one, all_heads = ratio_of_means(outlier, plans), ratio_of_means(plans * (LIMIT + 0.02), plans)
    assert one is not None
    assert all_heads is not None
    assert one.mean > LIMIT > one.low
    assert all_heads.low > LIMIT


def test_errors_of_an_exact_plan_count_as_those_of_one_rounding() -> None:
    exact, last_bits = torch.zeros(HEADS), torch.full((HEADS,), ROUNDED_ONCE / 2)
    ratio = ratio_of_means(last_bits, exact, ROUNDED_ONCE)
    assert ratio is not None
    assert ratio.mean == pytest.approx(0.5)
    assert ratio_of_means(torch.full((HEADS,), torch.nan), exact) is None


def test_plans_that_nobody_ships_are_known_and_not_accepted() -> None:
    refused = {plan.shift_rule.name for text, plan in candidates().items() if text not in accepted(candidates())}
    assert refused == {name for name, rule in SHIFT_RULES.items() if not rule.accepted} - {"as_printed_v1"}
    assert {"always_scaled", "gamma", "fixed_offset", "as_printed_v2"} <= refused
