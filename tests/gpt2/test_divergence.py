"""The one definition of divergence."""

import math

import pytest

from tiebreak.laboratory.divergence import EXPLODED, LARGEST_LOGIT, LOGITS, NOT_FINITE, Watch


def test_the_watch_waits_for_a_loss_that_stays_high() -> None:
    watch = Watch()
    losses = (9.0, 4.0, 6.5, 6.5, 6.5, 6.5, 5.0, 6.5, 6.5, 6.5, 6.5)
    assert [watch.diverged(loss) for loss in losses] == [None] * len(losses)
    assert watch.diverged(6.5) == EXPLODED


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_has_diverged_at_once(loss: float) -> None:
    assert Watch().diverged(loss) == NOT_FINITE


def test_logits_count_where_a_limit_is_set() -> None:
    watch = Watch(limit=LARGEST_LOGIT)
    assert watch.diverged(3.0, LARGEST_LOGIT) is None
    assert watch.diverged(3.0, math.nan) is None
    assert watch.diverged(3.0, 2 * LARGEST_LOGIT) == LOGITS
    assert Watch().diverged(3.0, 2 * LARGEST_LOGIT) is None
