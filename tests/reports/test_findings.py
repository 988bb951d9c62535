"""The findings, rule by rule: each sentence is made from what the records say, and from nothing else."""

from collections.abc import Callable, Sequence

import pytest
from msgspec.structs import replace

from tiebreak.reports.page.findings import findings
from tiebreak.reports.records.order import cases_of
from tiebreak.reports.records.record import (
    FOLLOWS,
    SHRUNK,
    Answer,
    CaseRecord,
    Estimate,
    Explanation,
    Record,
    Run,
    Shown,
)

Make = Callable[..., Record]
MakeRun = Callable[..., Run]

TIES = ("tie[k=2]", "tie[k=3]", "tie[k=4]", "tie[k=8]")
CASES = {name: CaseRecord("ties", failure=True, group="ties") for name in TIES} | {
    "random": CaseRecord("numbers", group="controls")
}


def told(*runs: Run) -> tuple[str, ...]:
    return findings(runs, [f"platform {number}" for number in range(1, len(runs) + 1)])


def biased(record: Make, kernel: str, cases: Sequence[str], bias: float = 0.2, **fields: object) -> list[Record]:
    return [record(kernel, case, verdict="biased", measures={"bias": Estimate(bias, 0.01)}, **fields) for case in cases]


@pytest.fixture
def fair(record: Make) -> list[Record]:
    return [record("fair", case) for case in TIES]


def test_what_fell_comes_first_with_its_kernels_and_cases(
    run: MakeRun, record: Make, fallen: Make, skip: Make, fair: list[Record]
) -> None:
    fell = [fallen("a", "tie[k=2]"), fallen("a", "tie[k=3]"), fallen("b", "random")]
    ended = [skip("c", "odd", "crashed"), skip("d", "odd"), skip("e", "slow", "timed_out")]
    cells = [*fair, *fell, *ended, record("f", "few", outcome="inconclusive")]
    lines = told(run(*cells, cases=CASES))
    assert lines[:4] == (
        "3 of 10 cells fell: `a` on cpu (`tie[k=2]`, `tie[k=3]`), `b` on cpu (`random`).",
        "1 of 10 cells crashed: `c` on cpu (`odd`).",
        "1 of 10 cells timed out: `e` on cpu (`slow`).",
        "1 of 10 cells drew too few heads to tell: `f` on cpu (`few`).",
    )
    assert not any(line.startswith("No cell fell") for line in lines)


def test_what_fell_is_said_in_the_order_of_the_cases(run: MakeRun, fallen: Make) -> None:
    cells = run(fallen("a", "random"), fallen("a", "tie[k=2]"), cases=CASES)
    ordered = replace(cells, cases={name: cells.cases[name] for name in ("tie[k=2]", "random")})
    assert told(ordered)[0] == "2 of 2 cells fell: `a` on cpu (`tie[k=2]`, `random`)."


def test_what_is_excused_is_counted_apart(run: MakeRun, record: Make, fallen: Make) -> None:
    assert told(run(record(), fallen("a", excused="known")))[-2:] == (
        "No cell fell: 1 held, 0 measured without a claim.",
        "1 cell fell and is excused.",
    )


def test_a_run_of_skips_alone_has_not_held(run: MakeRun, skip: Make) -> None:
    assert told(run(skip("a"), skip("b"))) == ("No cell ran: 2 cells skipped.",)


def test_the_titles_question_is_answered_before_it_is_said_that_nothing_fell(run: MakeRun, record: Make) -> None:
    first, *_, last = told(run(*biased(record, "a", TIES), cases=CASES))
    assert first.startswith("`a` is biased away from zero in 4 of 4 failure inputs on cpu")
    assert last.startswith("No cell fell")


def test_an_interrupted_run_says_so_before_all_else(run: MakeRun, record: Make) -> None:
    lines = told(run(record(), complete=False, not_run=("x", "y"), running=("z",)))
    assert lines[0] == "The run on `platform 1` was interrupted: 3 cells did not finish."


def test_platforms_are_compared_by_verdict_and_by_bits(run: MakeRun, record: Make, fair: list[Record]) -> None:
    first = run(*fair, record("a", "random"), cases=CASES)
    other = replace(first, run="b", records=(*fair[:3], replace(fair[3], digest="f" * 16), record(
        "a", "random", verdict="biased", digest="e" * 16, measures={"bias": Estimate(0.2, 0.01)})))  # fmt: skip
    assert told(first, other)[-1] == (
        "1 of the 5 cells that both platforms ran differs in verdict or outcome, 3 agree to the bit:"
        " `a` on cpu (`random`)."
    )
    lacking = run(*fair[:2], run="c", cases=CASES)
    assert told(first, first, lacking)[-1] == (
        "None of the 5 cells that at least two of the 3 platforms ran differs in verdict or outcome;"
        " 5 agree to the bit."
    )
    assert not any("agree" in line for line in told(first))


def test_platforms_that_drew_other_inputs_are_not_compared(run: MakeRun, record: Make, fair: list[Record]) -> None:
    first, other = run(*fair, cases=CASES), run(*(replace(cell, seed=2) for cell in fair), cases=CASES)
    assert told(first, other)[-2:] == (
        "No cell can be compared: both platforms ran none with the same inputs.",
        "4 cells can't be compared: the platforms drew other inputs.",
    )


def test_what_differs_is_named_by_case_where_that_is_shorter(run: MakeRun, record: Make) -> None:
    cells = [record(kernel, "random") for kernel in "abcdef"]
    first, other = run(*cells), run(*(replace(cell, verdict="biased") for cell in cells))
    assert "`random` (`a` on cpu, `b` on cpu, `c` on cpu, and 3 more kernels)." in told(first, other)[-1]


def test_biased_kernels_are_counted_on_failure_inputs_alone(run: MakeRun, record: Make) -> None:
    cells = [*biased(record, "sdpa", [*TIES[:2], "random"], plan=None), record("sdpa", TIES[2])]
    assert "`sdpa` is biased away from zero in 2 of 3 failure inputs on cpu." in told(run(*cells, cases=CASES))
    # Older files do not say which inputs are known to fail.
    old = dict.fromkeys(CASES, CaseRecord(""))
    assert "`sdpa` is biased away from zero in 3 of 4 inputs on cpu." in told(run(*cells, cases=old))


@pytest.mark.parametrize(
    ("signs", "way"), [((1, 1), "away from zero"), ((-1, -1), "toward zero"), ((1, -1), "both ways")]
)
def test_a_bias_has_a_direction(run: MakeRun, record: Make, signs: tuple[int, int], way: str) -> None:
    cells = [cell for case, sign in zip(TIES, signs, strict=False) for cell in biased(record, "a", [case], 0.2 * sign)]
    assert any(f"`a` is biased {way} in 2 of 2 " in line for line in told(run(*cells, cases=CASES)))


def test_most_biased_come_first_then_those_named_for_a_plan_and_the_rest_share_a_sentence(
    run: MakeRun, record: Make
) -> None:
    names = {"mild": 1, "worst": 4, "flash@paper": 4, "worse": 3, "flash@fused": 2}
    cells = [cell for name, count in names.items() for cell in biased(record, name, TIES[:count], plan=name)]
    lines = [line for line in told(run(*cells, cases=CASES)) if "biased " in line.lower() and "`" in line]
    assert [line.split("`")[1] for line in lines] == ["worst", "worse", "mild", "flash@paper"]
    assert lines[3] == "Biased in some failure inputs: `flash@paper` (4 of 4), `flash@fused` (2 of 2)."


def test_platforms_and_backends_that_differ_are_both_said(run: MakeRun, record: Make) -> None:
    first = run(*biased(record, "a", TIES), *biased(record, "a", TIES[:2], backend="emulation"), cases=CASES)
    second = run(*biased(record, "a", TIES[:3]), record("a", TIES[3]), cases=CASES)
    assert any(
        line.startswith(
            "`a` is biased away from zero in 4 of 4 (1), 3 of 4 (2) failure inputs on cpu and 2 of 2 on emulation"
        )
        for line in told(first, second)
    )


def test_the_plan_that_a_kernel_follows_is_said_and_how_well(run: MakeRun, record: Make) -> None:
    cells = biased(record, "a", TIES)
    missed = replace(cells[0], answers={**cells[0].answers, "prediction": Answer(False, "p", "no")})
    assert "on cpu; its declared plan `flash@paper` predicts every cell." in told(run(*cells, cases=CASES))[0]
    assert "; its declared plan `flash@paper` predicts 3 of 4 cells." in told(run(missed, *cells[1:], cases=CASES))[0]
    undeclared = run(*cells, cases=CASES, explanations={"cpu-a": Explanation(FOLLOWS, ("flash@fused",), 4, 0.999)})
    assert "; it follows flash@fused (99.90 % of bits in 4 cells)." in told(undeclared)[0]


def test_what_is_lost_is_said_of_all_inputs_in_the_order_of_the_cases(run: MakeRun, record: Make) -> None:
    def nan(kernel: str, case: str) -> Record:
        return record(kernel, case, verdict="nonfinite", measures={"bias": Estimate(None, None), "nonfinite": 7})

    cells = [nan("b", "random"), nan("b", "tie[k=2]"), nan("a", "tie[k=2]"), nan("a", "random")]
    lines = told(run(*cells, cases={"tie[k=2]": CASES["tie[k=2]"], "random": CASES["random"]}))
    order = "`random`, `tie[k=2]`"  # as the run's own mapping of cases has them
    assert f"NaN or Inf where the reference is finite: `b`, `a` on cpu in {order}." in lines


def test_an_output_that_shrinks_is_no_bias(run: MakeRun, record: Make) -> None:
    cells = [replace(cell, shown=Shown(SHRUNK, share)) for cell, share in
             zip(biased(record, "a", TIES[:2], -113.0), (0.281, 0.5), strict=True)]  # fmt: skip
    lines = told(run(*cells, cases=CASES))
    assert "The output shrinks, to x0.28 at the least: `a` on cpu in `tie[k=2]`, `tie[k=3]`." in lines
    assert not any("is biased" in line for line in lines)


def test_a_kernel_is_fair_if_every_failure_input_says_so(
    run: MakeRun, record: Make, skip: Make, fair: list[Record]
) -> None:
    undecided = record("doubtful", TIES[0], verdict="inconclusive")
    cells = [*fair, record("short", TIES[0]), undecided, record("ended", TIES[0]), skip("ended", TIES[1], "crashed"),
             *biased(record, "short", ["random"])]  # fmt: skip
    lines = told(run(*cells, cases=CASES))
    assert lines[-1] == (
        "Fair, unbiased on every failure input: `fair` on cpu (4 failure inputs); `short` on cpu (1 failure input)."
    )
    assert told(run(undecided, cases=CASES))[0] == "No kernel is unbiased on every failure input."


def test_a_kernel_that_is_biased_on_one_platform_is_not_fair(run: MakeRun, record: Make, fair: list[Record]) -> None:
    other = run(*fair[1:], *biased(record, "fair", TIES[:1]), cases=CASES)
    assert any(line.startswith("Fair, ") for line in told(run(*fair, cases=CASES)))
    assert not any(line.startswith("Fair, ") for line in told(run(*fair, cases=CASES), other))
    assert not any(line.startswith("Fair, ") for line in told(other, run(*fair, cases=CASES)))


def test_what_was_assumed_and_what_did_not_run_come_last(run: MakeRun, record: Make) -> None:
    assumed = {"interpreter": "as sm_90 (assumed; nothing ran on a GPU)"}
    lines = told(run(record(), platform={"assumed": assumed}, unavailable={"cuda": "no device"}))
    assert lines[-2:] == (
        "The backend `interpreter` computed as sm_90 (assumed; nothing ran on a GPU).",
        "The backend `cuda` did not run: no device.",
    )


def test_no_name_ends_its_backticks(run: MakeRun, fallen: Make) -> None:
    (line, *_) = told(run(fallen("a`b`", "c`")))
    assert line == "1 of 1 cell fell: `a'b'` on cpu (`c'`)."


def test_a_digest_stays_short(run: MakeRun, record: Make, fallen: Make) -> None:
    cells = [cell for kernel in range(40) for cell in biased(record, f"kernel_{kernel}", TIES)]
    cells += [fallen(f"kernel_{kernel}", f"case_{kernel}") for kernel in range(40)]
    lines = told(run(*cells, cases=CASES), run(*cells, cases=CASES))
    assert len(lines) <= 12
    assert max(map(len, lines)) < 300


def test_cases_of_several_files_stand_in_their_groups(run: MakeRun, record: Make) -> None:
    old = run(record("a", "random"), record("a", "late"), record("a", TIES[1]),
              cases=dict.fromkeys(("random", "late", TIES[1]), CaseRecord("")))  # fmt: skip
    new = run(*(record("a", case) for case in CASES), cases=CASES)
    known = cases_of([old, new])
    assert list(known) == [*CASES, "late"]
    assert known["random"].group == "controls"
    newer = run(record("a", "tie[k=9]"), cases={"tie[k=9]": CASES[TIES[0]]})
    assert list(cases_of([new, newer])) == [*TIES, "tie[k=9]", "random"]
