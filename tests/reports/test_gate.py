import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tiebreak.cases.verdicts import MARGIN_ULPS, Interval
from tiebreak.cases.verdicts import judge as judge_interval
from tiebreak.defects.made_up import Call, failing, record, run, skip, trained
from tiebreak.reports.errors import UsageError
from tiebreak.reports.gate.expected import PLAN, Expected, Limits, limits
from tiebreak.reports.gate.gate import gate, update
from tiebreak.reports.records import record as records
from tiebreak.reports.records import store
from tiebreak.reports.records.record import CLAIM, Answer, Estimate, Record, Run
from tiebreak.reports.terminal import runnable

pytestmark = pytest.mark.quick


def measured(**measures: Any) -> dict[str, Any]:
    return {"measures": measures}


def answered(check: str, *answer: Any, **fields: Any) -> dict[str, Any]:
    """An answer; without any words it was not asked for."""
    return {"answers": {check: Answer(*answer) if answer else None}, **fields}


def bias(mean: float | None, half_width: float | None) -> dict[str, Any]:
    return measured(bias=Estimate(mean, half_width))


BIASED: dict[str, Any] = {"verdict": "biased", **bias(0.2, 0.01)}
ROUNDED = {**BIASED["measures"], "rounded_bias": Estimate(0.2, 0.01)}
TIED = {**BIASED, "measures": ROUNDED, "tied": True, "in_training": "unbiased"}
NAN: dict[str, Any] = {"bias": Estimate(None, None), "nonfinite": 5}
NARROW = bias(0.01, 0.001)
SHOWN = records.Shown("bias", None, verdict="unbiased")
TWICE = "the same bits twice"
BIAS = records.MeasureRecord("a bias", "ulp", worse="farther", limit=0.02)
LARGEST = records.MeasureRecord("an error", "ulp", worse="more", limit=1.0, share=0.1)


def judge(old: Record, new: Record, *, across: bool = False, fail: Limits | None = None) -> list[tuple[bool, str]]:
    """What changed, worse or not, and the text."""
    comparison = gate(run(old), run(new), fail or Limits(), across=across)
    assert comparison.compared == 1
    assert comparison.passed is not any(change.worse for change in comparison.changes)
    return [(change.worse, change.text) for change in comparison.changes]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ({}, {"verdict": "biased"}, "verdict biased, unbiased in the baseline"),
        (BIASED, {**BIASED, "verdict": "nonfinite"}, "verdict nonfinite, biased in the baseline"),
        (TIED, {**TIED, **BIASED}, "NaN or missing: rounded_bias; a number in the baseline"),
        (TIED, {**TIED, "in_training": None}, "in training verdict none, unbiased in the baseline"),
        (NARROW, bias(0.0321, 0.001), "bias +0.0321 ±0.0010 ulp, +0.0100 ±0.0010"),
        (NARROW, bias(0.01, 0.021), "bias +0.0100 ±0.0210 undecided, +0.0100 ±0.0010 in"),
        ({}, measured(max_ulps=2.6), "max_ulps 2.6 ulp, 1.5 in the baseline"),
        (measured(max_ulps=50.0), measured(max_ulps=55.1), "max_ulps 55.1 ulp, 50 in the"),
        (
            {},
            answered("repeatable", False, TWICE, "they differ", outcome="passed"),
            "repeatable no longer passed: they di",
        ),
        ({}, answered("repeatable"), f"repeatable no longer asked: {TWICE}, in the baseline"),
        (
            {"verdict": None, **measured(nonfinite=0)},
            {"verdict": None, "shown": SHOWN, **measured(nonfinite=1)},
            "nonfinite 1 of 65536 elements, 0 of 65536 elements in the baseline",
        ),
        (measured(nonfinite=5), measured(nonfinite=5, elements=512), "nonfinite 5 of 512 elements"),
        ({}, {"verdict": "unbiased", "shown": SHOWN, **bias(None, None)}, "NaN or missing: bias, interval of bias; a"),
        ({}, measured(delta_bias=1e-5), "NaN or missing: interval of delta_bias; a number"),
        ({}, answered("extra", False, "more", "why", outcome="failed"), "failed, passed in the baseline: why"),
        (answered(CLAIM, False, "any"), {"replaced": skip(outcome="timed_out")}, "timed_out, failed in the baseline"),
        ({}, answered(CLAIM, True, "any", "", "us"), "claim: asks any, as claimed in the baseline"),
        (
            answered("extra", False, "more"),
            answered("extra", outcome="failed"),
            "extra no longer asked: more, in the ba",
        ),
        ({}, {"case_version": 2}, "not comparable: case_version 2, 1 in the baseline"),
        (
            {},
            answered("brand_new", False, "something", "not so", outcome="failed"),
            "failed, passed in the baseline: not so",
        ),
    ],
)
def test_what_makes_the_gate_fail(old: Any, new: Any, message: str) -> None:
    comparison = judge(record(**old), new.get("replaced") or record(**new))
    assert [worse for worse, _ in comparison] == [True]
    assert comparison[0][1].startswith(message)


def test_a_pass_that_its_own_answers_contradict_or_without_a_result_fails() -> None:
    """Though the baseline has the same answers: nothing in it got worse."""
    missed = answered(CLAIM, False, "unbiased", "+0.2", "us")
    assert judge(record(**missed), record(**missed)) == []
    comparison = judge(record(**missed), record(outcome="passed", digest="q", **missed))
    assert comparison[-1] == (True, "says passed, and its answers come to failed: was the file edited?")
    ((worse, text),) = judge(record(), replace(record(), shown=None, measures={}))
    assert (worse, text.startswith("NaN or missing: bias, ")) == (True, True)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({}, {}),
        ({}, bias(0.0299, 0.02)),
        ({}, measured(max_ulps=2.4)),
        ({}, {"digest": "q"}),
        ({}, bias(-0.01, 0.02)),
        # A large error has to grow by more than a tenth; NaN that the baseline has is not new; a case that cancels has
        # no bias to speak of.
        (measured(max_ulps=50.0), measured(max_ulps=54.9)),
        ({"verdict": "nonfinite", "measures": NAN}, {"verdict": "nonfinite", "measures": NAN}),
        (
            {"verdict": None, **measured(max_ulps=1e4)},
            {"verdict": None, **measured(max_ulps=3e4, bias=Estimate(0.9, 0.1))},
        ),
        ({}, answered("brand_new", True, "something")),  # a new check is no loss
    ],
)
def test_what_does_not(old: Any, new: Any) -> None:
    assert judge(record(**old), record(**new)) == []


@pytest.mark.parametrize(
    ("old", "messages"),
    [
        (BIASED, ["verdict unbiased, biased in the baseline", "bias +0.0100 ±0.0200 ulp, +0.2000 ±0.0100"]),
        (TIED, ["verdict unbiased, biased in the baseline", "bias +0.0100 ±0.0200 ulp, +0.2000 ±0.0100"]),
        (measured(max_ulps=9.0), ["max_ulps 1.5 ulp, 9 in the baseline"]),
        (answered("repeatable", False, TWICE), ["passed, failed in the baseline", f"repeatable passes now: {TWICE}"]),
        (
            measured(nonfinite=5),
            ["verdict unbiased, nonfinite in the baseline", "nonfinite 0 of 65536 elements, 5 of 65536 elements in"],
        ),
        # That a kernel runs to its end in its time is asked of none that did.
        *(({"replaced": skip(outcome=outcome)}, [f"passed, {outcome} in the baseline"])
          for outcome in ("crashed", "timed_out")),
    ],
)  # fmt: skip
def test_improvements_are_listed(old: Any, messages: list[str]) -> None:
    comparison = judge(old.get("replaced") or record(**old), record(digest="other bits"))
    assert all(not worse for worse, _ in comparison)
    assert all(text.startswith(start) for (_, text), start in zip(comparison, messages, strict=True))


def test_what_is_shown_may_not_turn_into_nothing() -> None:
    assert judge(trained(), trained(value=5e-3, digest="0")) == []
    assert judge(trained(), trained(value=None)) == [
        (True, "shows nonfinite, delta_error_mean in the baseline"),
        (True, "NaN or missing: delta_error_mean; a number in the baseline"),
    ]


PASSING, FAILING, NOTHING = Answer(True, "b"), Answer(False, "b"), {"shown": None, "verdict": None}


@pytest.mark.parametrize(
    ("measures", "answers", "fields", "message"),
    [
        ({"error_over_bound": 102.0}, {"bound": PASSING}, {}, "bound passed, and its measures come to failed"),
        ({"error_over_bound": None}, {"bound": PASSING}, {}, "bound passed, and its measures come to failed"),
        ({"error_over_bound": 0.4}, {"bound": FAILING}, {"outcome": "failed"}, "bound failed, and its measures"),
        ({"apart": Estimate(0.2, 0.01)}, {}, {}, "prediction passed, and its measures come to failed"),
        ({"error_over_bound": 102.0}, {"bound": None, CLAIM: None}, {}, "is not asked bound, and its measures"),
        ({}, {CLAIM: Answer(True, "biased away from zero")}, {}, "unbiased, and that a claim passed: biased"),
        (None, {"bound": None, records.PREDICTION: None}, NOTHING, "says passed, and has no result"),
        ({}, {}, {"outcome": "skipped", "skipped": "no time"}, "says skipped, and its answers come to passed"),
    ],
)
def test_what_its_own_numbers_refute_fails_in_a_new_cell_too_and_is_no_baseline(
    measures: dict[str, Any] | None, answers: dict[str, Any], fields: dict[str, Any], message: str, tiebreak: Call
) -> None:
    sound = record(case="b")
    asked = {name: it for name, it in {**sound.answers, **answers}.items() if it is not None}
    measured = {} if measures is None else {**sound.measures, **measures}
    cell = replace(sound, measures=measured, answers=asked, digest="other bits", **fields)
    edited = run(record(), cell)
    assert not gate(run(record(), sound), edited, Limits()).passed
    assert [each for each in gate(run(record()), edited, Limits()).worse if message in each.text or fields]
    told = tiebreak("gate", edited, run(record(), sound))
    assert (told.code, message in told.err, told.err.count("\n")) == (2, True, 1)
    update(run(record()), Path("kept.json"))
    before = Path("kept.json").read_bytes()
    updated = tiebreak("gate", "kept.json", edited, "--update-baseline")
    assert (updated.code, message in updated.err, Path("kept.json").read_bytes() == before) == (2, True, True)
    assert tiebreak("gate", edited, run(record(), sound), "--update-baseline").code == 0, "a sound run takes its place"


def test_a_skip_is_no_pass() -> None:
    assert judge(record(), skip()) == [(True, "turned into a skip (no backward pass), passed in the baseline")]
    assert judge(failing(), skip())[0][0]
    assert judge(skip(outcome="crashed"), skip())[0][0]
    assert judge(skip(), failing(excused="known"))[0] == (True, "failed, skipped in the baseline")
    assert judge(skip(), record(**BIASED)) == []
    assert judge(skip(), skip()) == []


def test_a_narrowed_run_is_judged_by_its_own_cells_and_says_so() -> None:
    baseline = run(record(case="tied[k=2]"), record(case="tied[k=3]"), record(case="other"))
    cases, calls = (
        records.Narrowing(("--cases tied*",), "case", ("tied*",)),
        records.Narrowing(("--experiments call",), "experiment", ("call",)),
    )
    outcome = gate(baseline, run(record(case="tied[k=2]"), narrowing=(cases, calls)), Limits())
    gone = [(change.record.case, change.text) for change in outcome.worse]
    assert gone == [("tied[k=3]", "vanished: the new run lacks it")]
    assert "1 cell of the baseline NOT compared: outside --cases tied* --experiments call" in outcome.notes
    outside = gate(run(record(case="other")), run(record(case="tied"), narrowing=(cases,)), Limits())
    assert (outside.compared, outside.worse, outside.passed) == (0, [], False), "nothing compared is no pass"


def test_a_new_cell_is_told_and_has_to_hold() -> None:
    comparison = gate(run(record()), run(record(), record(case="new")), Limits())
    assert comparison.passed
    assert "1 cell not in the baseline, or skipped there; --update-baseline adds what is new" in comparison.notes
    failed = gate(run(record()), run(record(), failing(case="new", excused="it says so itself")), Limits())
    assert [change.text for change in failed.worse] == ["not in the baseline, and failed"]


def test_other_software_and_another_fingerprint_are_told_not_refused() -> None:
    probes = {"cpu": {"matmul_subnormals": "kept"}, "cuda": {"matmul": "rne"}}
    on, off = "on, Triton 3.9.0's default", "off, Triton 3.10.0's default"
    before = run(record(), platform={"fingerprint": probes, "contraction": on})
    flushed = {"cpu": {"matmul_subnormals": "flushed"}}
    for torch, told in (("2.14.0", "2.14.0"), (None, "not known")):
        new = run(record(), platform={"torch": torch, "cores": 64, "fingerprint": flushed, "contraction": off})
        comparison = gate(before, new, Limits())
        assert comparison.passed
        assert comparison.notes == (
            f"torch 2.13.0 in the baseline, {told} in the new run",
            f"contraction {on} in the baseline, {off} in the new run",
            "cpu, matmul_subnormals: kept in the baseline, flushed in the new run",
        )


UNPREDICTED = answered(records.PREDICTION)
NEAR, FAR = ({"measures": {"bias": Estimate(mean, 0.001)}, **UNPREDICTED} for mean in (0.03, 0.033))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ({}, {"digest": "q", **measured(max_ulps=9.0)}, None),
        ({}, BIASED, None),  # that is what its plan predicts there
        ({**NARROW, **UNPREDICTED}, NEAR, None),
        ({**NARROW, **UNPREDICTED}, FAR, "bias +0.033"),
        (UNPREDICTED, {"verdict": "biased", **UNPREDICTED}, "verdict biased"),
        ({}, answered("repeatable", False, TWICE, outcome="passed"), "repeatable no longer passed"),
        ({}, {"outcome": "failed"}, "failed, passed in the baseline"),
        ({}, answered(CLAIM), "claim no longer asked"),
        ({}, {"measures": NAN}, "NaN or missing: bias"),
    ],
)
def test_across_compares_all_but_bits(old: Any, new: Any, message: str | None) -> None:
    changed = judge(record(**old), record(**new), across=True)
    assert bool(changed) == (message is not None)
    assert message is None or any(worse and text.startswith(message) for worse, text in changed)


def test_across_a_kernel_may_declare_another_plan_with_a_claim_of_its_own() -> None:
    other: dict[str, Any] = {
        "plan": "flash@fused_fast_exp", "answers": {CLAIM: Answer(True, "as we say", source="us")}, **BIASED
    }  # fmt: skip
    changed = [text for _, text in judge(record(), record(**other), across=True)]
    assert changed[-1] == "declares flash@fused_fast_exp, flash@paper in the baseline"
    assert changed[0] == "verdict biased, unbiased in the baseline", "the new plan foretells a bias that there was not"
    sound: dict[str, Any] = {**other, "verdict": "unbiased", "measures": {}}
    held = gate(run(record()), run(record(**sound)), Limits(), across=True)
    assert held.passed
    assert "cpu-flash@paper declares flash@fused_fast_exp, flash@paper in the baseline (1 cell)" in held.notes
    assert judge(record(), record(**sound))[0][0], "on one platform a changed plan is a changed kernel"
    not_passed: dict[str, Any] = {**other, "answers": {CLAIM: Answer(False, "as we say", "no", "us")}}
    assert judge(record(), record(**not_passed), across=True)[0][0]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (run(), run(options={"seed": "7"}), "options.seed: 1 in the baseline, 7 in the new run"),
        (run(), run(options={"heads": "7"}), "options.heads: 256 in the baseline, 7 in the new run"),
        (run(complete=False), run(), "complete: the baseline's run was interrupted"),
        (run(), run(platform={"cpu": "Another"}), "platform.cpu: 'Made-up 9000' in the baseline, 'Another' in the"),
    ],
)
def test_what_tells_nothing_about_a_run_is_refused(old: Run, new: Run, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        gate(old, new, Limits())
    if "platform" in message:
        gate(old, new, Limits(), across=True)


def test_limits_come_from_the_flag_over_the_file_over_the_default(tmp_path: Path) -> None:
    def held_to(flag: str | None) -> tuple[float | None, float | None, float]:
        allowed = limits(flag, deeper)
        bias, largest = allowed.held_to("bias", BIAS), allowed.held_to("max_ulps", LARGEST)
        return bias.limit, largest.limit, largest.share

    deeper = tmp_path / "a" / "b"
    deeper.mkdir(parents=True)
    assert held_to(None) == (0.02, 1.0, 0.1)
    (tmp_path / "pyproject.toml").write_text("[tool.tiebreak.fail]\nbias = 0.5\nmax_ulps = 3\n")
    assert held_to(None) == (0.5, 3.0, 0.1)
    assert held_to("max_ulps:7, max_ulps_share:0") == (0.5, 7.0, 0.0)
    assert held_to("max_ulps:8") == (0.5, 8.0, 0.1)


@pytest.mark.parametrize(
    ("flag", "text", "message"),
    [
        *((flag, "", "--fail: ") for flag in ("bias", "bias:x", "bias:-1", "bias:nan", "max_ulps:inf", "max_ulps:1:2")),
        *(
            (f"bias:1,{name}:1", "", f"--fail: unknown limit '{name}': known are bias, max_ulps, each also NAME_share")
            for name in ("bais", "gain", "max", "gain_share")
        ),
        *(
            (None, text, "FOLDER/pyproject.toml: ")
            for text in ("[", "tool = 1", "[tool.tiebreak]\nfial = 1", "[tool.tiebreak.fail]\nbias = nan",
                         "[tool.tiebreak.fail]\nx = 1")
        ),
    ],
)  # fmt: skip
def test_bad_limits_are_refused_in_one_line(flag: str | None, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    measures = {"bias": BIAS, "max_ulps": LARGEST, "gain": records.MeasureRecord("no way is worse")}
    with pytest.raises(UsageError) as refused:
        limits(flag, tmp_path).check(measures)
    assert str(refused.value).startswith(message.replace("FOLDER", str(tmp_path)))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("worse", "number", "fails"), [
    ("more", 2.0, True), ("more", -2.0, False), ("less", -2.0, True), ("less", 2.0, False),
    ("farther", -2.0, True), ("farther", 0.0, False), (None, 9.0, False),
])  # fmt: skip
@pytest.mark.parametrize("verdict", ["unbiased", None])
def test_a_measure_says_which_way_it_is_worse(
    worse: str | None, number: float, fails: bool, verdict: str | None
) -> None:
    """Also where a sum cancels: that concerns errors in ulps alone."""
    described = {"wobble": records.MeasureRecord("made up", "deg", worse=worse, limit=0.5)}
    old, new = (record(measures={"wobble": value}, verdict=verdict) for value in (1.0, number))
    comparison = gate(run(old, measures=described), run(new, measures=described), Limits())
    assert [change.text for change in comparison.worse] == (
        [f"wobble {number:.4g} deg, 1 in the baseline"] if fails else []
    )


def test_an_interval_of_a_share_is_a_share_too() -> None:
    described = {"late": records.MeasureRecord("made up", worse="more", limit=0.01, per="elements")}
    old, new = (record(measures={"late": Estimate(mean, 100.0)}) for mean in (0.0, 6553.6))
    comparison = gate(run(old, measures=described), run(new, measures=described), Limits())
    assert [change.worse for change in comparison.changes] == [True], "0.1 worse, by intervals of 0.0015"


def test_an_excuse_hides_nothing_from_the_baseline() -> None:
    excused = failing(excused="known")
    assert judge(record(), excused) == [(True, "failed, passed in the baseline: claim failed: unbiased")]
    assert judge(excused, failing(excused="known")) == []
    assert judge(excused, record())[0] == (False, "passed, failed in the baseline")


def test_the_command_fails_with_exit_code_1_and_the_way_to_rerun(tiebreak: Call) -> None:
    old, new = run(record(), record(case="b")), run(record(**BIASED), record(case="b"))
    failed = tiebreak("gate", old, new)
    assert failed.code == 1
    first = "gate FAILED: 2 cells compared with 1.json: 2 regressions, 0 better\nregression  cpu-flash@paper-random"
    assert failed.out.startswith(first)
    assert f"            rerun: {runnable('pytest tests/matrix --kernels flash@paper')}" in failed.out
    assert [tiebreak("gate", *words).code for words in ((new, old), (old, new, "--across"))] == [0, 0]
    assert tiebreak("gate", old, new, "--fail", "bias:0.5,bais:1").err.startswith(
        "tiebreak gate: --fail: unknown limit 'bais': known are bias, "
    )
    refused = tiebreak("gate", old, run(platform={"level": "avx2"}))
    assert refused.code == 2
    assert "tiebreak gate: 1.json: platform.level" in refused.err


def test_an_updated_baseline_has_a_stable_order_and_nothing_that_changes_by_itself(
    telling: Run, tmp_path: Path
) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    update(telling, one)
    shuffled = replace(telling, records=telling.records[::-1], run="b" * 32, seconds={"x": 1.0})
    update(shuffled, two)
    assert one.read_bytes() == two.read_bytes()
    kept = store.read(one)
    assert [record.id for record in kept.records] == sorted(record.id for record in telling.records)
    assert gate(kept, telling, Limits()).notes == ()
    assert gate(kept, telling, Limits()).changes == ()


def test_the_command_updates_the_baseline(tiebreak: Call) -> None:
    baseline, worse, update = "base/line.json", run(record(**BIASED)), "--update-baseline"
    absent = tiebreak("gate", baseline, worse)
    assert (absent.code, update in absent.err) == (2, True)
    assert tiebreak("gate", baseline, run(record()), update).code == 0
    assert tiebreak("gate", baseline, worse).code == 1
    updated = tiebreak("gate", baseline, worse, update)
    assert updated.code == 0
    assert "2 regressions" in updated.out
    assert tiebreak("gate", baseline, worse).code == 0
    elsewhere = tiebreak("gate", baseline, run(record(), options={"seed": "9"}), update)
    assert elsewhere.code == 0
    assert "not compared: options.seed" in elsewhere.out


def test_github_gets_the_findings(tiebreak: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    cases = [f"c{number}" for number in range(30)]
    old, new = run(*(record(case=case) for case in cases)), run(*(failing(case=case, why="<b>") for case in cases))
    assert tiebreak("gate", old, new).code == 1
    text = Path("summary.md").read_text(encoding="utf-8")
    assert text.startswith("### tiebreak: the gate failed (30 cells compared")
    assert text.count("- regression:") == 20
    assert "- and 10 more" in text
    assert "&lt;b>" in text


def test_another_declared_plan_is_worse_until_it_is_accepted() -> None:
    """On one platform wherever it is; between platforms where the kernel is not unbiased (see above)."""
    old, new = run(record(), record(case="b")), run(record(plan=None, digest="q"), record(case="b"))
    worse = gate(old, new, Limits()).worse
    assert [change.text for change in worse] == ["declares no plan, flash@paper in the baseline"]
    entry = Expected("cpu-flash@paper-random-*", PLAN, "we undeclare it", where="pyproject.toml: expected[0]")
    accepted = gate(old, new, Limits(), expected=[entry])
    assert accepted.passed
    told = "cpu-flash@paper declares no plan, flash@paper in the baseline: accepted: we undeclare it (1 cell)"
    assert told in accepted.notes
    with pytest.raises(UsageError, match=r"expected\[0\]: no plan of cpu-flash@paper-random-\* has changed: remove"):
        gate(old, old, Limits(), expected=[entry])


def test_a_verdict_is_recomputed_as_the_suite_judges() -> None:
    described = {"bias": records.MeasureRecord("a bias", margin=MARGIN_ULPS)}
    for mean, width in product((-0.2, -0.05, -0.01, 0.0, 0.01, 0.05, 0.2, 5.0), (0.0, 0.01, 0.04, 0.05, 0.3, 1e9)):
        made = record(measures={"bias": Estimate(mean, width)})
        assert records.verdict_of(made, described) == judge_interval(Interval(mean, width)).value
