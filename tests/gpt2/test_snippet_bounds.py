"""The rule that bounds of snippets follow, the data they come from, and the page that tells of both."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tiebreak.cases.gpt2.snippets import DRIFT, FROZEN, SNIPPETS, read_claims
from tiebreak.studies import spread as program
from tiebreak.studies.bounds import (
    ALARMS,
    EMULATION,
    RULES,
    SPREADS,
    BoundRule,
    Ran,
    Spread,
    bounded,
    claims,
    read_spreads,
    spread,
    student,
    write_claims,
    write_spreads,
)

ABOVE = BoundRule(("flash@train",), "row_max_rise", "a test", "above", "fair@train")
BELOW = BoundRule(("fair@train",), "row_max_rise", "a test", "below", "flash@train")
WITHIN = replace(BELOW, side="within")
FLASH, FAIR = (Spread(101, mean, 0.1, mean - 0.3, mean + 0.3) for mean in (3.0, -1.0))


def of(measure: str = "row_max_rise", **spreads: Spread) -> dict[Ran, Spread]:
    return {Ran("a", 1, EMULATION, f"{name}@train", measure): each for name, each in spreads.items()}


@pytest.mark.parametrize(
    ("freedom", "p", "known"),
    [(1, 1e-5, 31830.9886), (2, 1e-5, 223.6034), (9, 1e-5, 8.1021), (3, 1e-3, 10.2145), (30, 0.05, 1.69726)],
)
def test_students_quantile_is_the_tables(freedom: int, p: float, known: float) -> None:
    assert student(freedom, p) == pytest.approx(known, rel=1e-5)
    with pytest.raises(ValueError, match="two seeds"):
        student(0, p)


def test_a_bound_is_the_limit_of_one_more_run_rounded_outwards() -> None:
    (low,) = bounded("a", 1, [ABOVE], of(flash=FLASH, fair=FAIR))
    limit = 3.0 - student(100, ALARMS) * 0.1 * math.sqrt(1 + 1 / 101)
    assert low.low == pytest.approx(limit, abs=0.01)
    assert (low.low < limit, low.high) == (True, math.inf)
    (high,) = bounded("a", 1, [BELOW], of(flash=FLASH, fair=FAIR))
    assert high.high == pytest.approx(-1.0 + student(100, ALARMS) * 0.1 * math.sqrt(1 + 1 / 101), abs=0.01)
    (shared, _) = bounded("a", 1, [ABOVE, replace(ABOVE, source="another")], of(flash=FLASH, fair=FAIR))
    assert shared.low < low.low  # they share the alarms
    (both,) = bounded("a", 1, [WITHIN], of(flash=FLASH, fair=FAIR))
    assert both.low == -both.high
    assert both.high == pytest.approx(1.0 + student(100, ALARMS / 2) * 0.1005, abs=0.01)


def test_rise_of_the_loss_is_taken_as_its_cube_root() -> None:
    # 400 quantiles of an exponential distribution, whose tail is known: a share p lies beyond -mean log(p). The normal
    # distribution of that mean and deviation would end at half of it.
    mean = 0.03
    fair = [-mean * math.log((number + 0.5) / 400) for number in range(400)]
    risen = {"fair": spread("loss_rise", fair), "flash": spread("loss_rise", [6.0 + value for value in fair])}
    (claim,) = bounded("a", 1, [replace(BELOW, measure="loss_rise")], of("loss_rise", **risen))
    assert -mean * math.log(ALARMS) == pytest.approx(claim.high, rel=0.15)


def test_nothing_is_claimed_of_a_recipe_without_runs_or_of_runs_without_a_number() -> None:
    assert bounded("a", 2, [ABOVE], of(flash=FLASH, fair=FAIR)) == ()
    assert bounded("a", 1, [ABOVE], of(flash=replace(FLASH, mean=math.nan), fair=FAIR)) == ()
    assert replace(DRIFT, version=99).claims == ()


def test_data_come_back_as_written(tmp_path: Path) -> None:
    write_spreads(SPREADS, "0123", tmp_path / "spread.csv")
    assert read_spreads(tmp_path / "spread.csv") == SPREADS
    write_claims(FROZEN, "0123", tmp_path / "claims.csv")
    assert read_claims(tmp_path / "claims.csv") == FROZEN


def test_the_claims_are_those_that_follow_from_the_spreads() -> None:
    assert claims(SPREADS) == FROZEN


def test_no_run_that_the_data_have_is_beyond_a_bound() -> None:
    """On the emulation and on the CPU's own arithmetic."""
    beyond = [
        ran
        for ran, found in SPREADS.items()
        for claim in SNIPPETS[ran.snippet].claims
        if ran.variant in claim.variants and ran.measure == claim.measure
        if not all(claim.passes({ran.measure: value}) for value in (found.lowest, found.highest))
    ]
    assert beyond == []


def test_every_seed_has_all_that_statements_speak_of() -> None:
    asked = list(program.tasks(2))
    assert len(set(asked)) == len(asked)
    first = {(each.snippet, each.variant) for each in asked if (each.backend, each.seed) == ("emulation", 1)}
    named = {
        (each.name, name) for each in SNIPPETS.values() for one in RULES.get(each.name, ()) for name in one.variants
    }
    assert first >= named | {(each.name, name) for each in SNIPPETS.values() for name in each.roster}


def test_runs_become_spreads_and_those_beyond_a_bound_are_named() -> None:
    def runs(*means: float, version: int = DRIFT.version) -> dict[program.Task, dict[str, float]]:
        return {
            program.Task("emulation", "train_drift", version, "fair@train", seed): {
                "delta_error_mean": mean,
                "output_delta_error_mean": 0.0,
            }
            for seed, mean in enumerate(means, 1)
        }

    found = program.spreads(runs(1.0, 2.0, 3.0) | runs(9.0, 9.0, version=DRIFT.version - 1))
    assert found == {Ran("train_drift", DRIFT.version, "emulation", "fair@train", "delta_error_mean"):
                     Spread(3, 2.0, 1.0, 1.0, 3.0)}  # fmt: skip
    count, fallen = program.alarms(runs(1.0, 0.0), SPREADS)
    assert count == 2
    assert len(fallen) == 1
    assert fallen[0].startswith("emulation train_drift fair@train seed 1: ")
    assert program.alarms(runs(math.nan), SPREADS)[1] != []
