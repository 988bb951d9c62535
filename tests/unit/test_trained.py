"""The head of a trained model that is a case: plain flash is biased on it, and `fair` is not."""

from dataclasses import replace

import pytest
import torch

from tiebreak.backends.backend import EMULATION
from tiebreak.cases.captured import CANCELLED, TEXTS, TRAINED_SINK
from tiebreak.cases.errors import signed_error_ulps
from tiebreak.cases.verdicts import Interval, interval
from tiebreak.kernels.formats import BF16
from tiebreak.kernels.reference import reference
from tiebreak.kernels.roster import composed_kernel
from tiebreak.matrix.experiments import offered

INPUTS = TRAINED_SINK.make(1, 0, TEXTS, BF16)
EXACT = reference(INPUTS)


def bias(kernel: str, noise_seeds: int = 1) -> Interval:
    """The mean error of O, in ulps, over texts, each the mean of so many draws of noise."""
    counts = EXACT.o.abs() >= CANCELLED * EXACT.magnitude
    means = []
    for seed in range(noise_seeds):
        o = EMULATION.run(composed_kernel(kernel), replace(INPUTS, noise_seed=seed), gradients=False).o
        means.append(signed_error_ulps(o, EXACT.o, BF16).masked_fill(~counts, torch.nan).nanmean(dim=(1, 2, 3)))
    return interval(torch.stack(means).mean(0))


def test_plain_flash_is_biased_and_the_published_fix_changes_nothing() -> None:
    assert (EXACT.p.amax(-1) > 0.9).double().mean() > 0.9
    plain = bias("flash@paper")
    assert plain.low > 0
    assert bias("stabilized@paper") == plain


@pytest.mark.parametrize(("kernel", "noise_seeds"), [("flash@fused", 1), ("fair", 32)])
def test_kernels_that_keep_the_rest_of_the_row_are_not(kernel: str, noise_seeds: int) -> None:
    other = bias(kernel, noise_seeds)
    assert other.low < 0 < other.high
    assert other.high < bias("flash@paper").mean


def test_the_matrix_runs_it_by_default() -> None:
    assert TRAINED_SINK.name in {experiment.name for experiment in offered(cases_named=False)}
