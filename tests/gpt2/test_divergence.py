"""The one definition of divergence."""

import math

import pytest

from tiebreak.laboratory.progress import EXPLODED, LARGEST_LOGIT, LOGITS, NOT_FINITE, Divergence


def test_the_watch_waits_for_a_loss_that_stays_high() -> None:
    watch = Divergence()
    losses = (9.0, 4.0, 6.5, 6.5, 6.5, 6.5, 5.0, 6.5, 6.5, 6.5, 6.5)
    assert [watch.after(loss) for loss in losses] == [None] * len(losses)
    assert watch.after(6.5) == EXPLODED


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_has_diverged_at_once(loss: float) -> None:
    assert Divergence().after(loss) == NOT_FINITE


def test_logits_count_where_a_limit_is_set() -> None:
    watch = Divergence(limit=LARGEST_LOGIT)
    assert watch.after(3.0, LARGEST_LOGIT) is None
    assert watch.after(3.0, math.nan) is None
    assert watch.after(3.0, 2 * LARGEST_LOGIT) == LOGITS
    assert Divergence().after(3.0, 2 * LARGEST_LOGIT) is None
