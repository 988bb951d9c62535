"""No edit of a run talks the gate round: of any one leaf of its file, or of a number with all that follows from it."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from tiebreak.defects import mutations
from tiebreak.defects.made_up import failing, record, run, skip, trained
from tiebreak.defects.mutations import consistent_edits, following, leaves, name_of, plain_of, unnoticed
from tiebreak.reports.errors import UsageError
from tiebreak.reports.gate.consistency import WORDS
from tiebreak.reports.gate.expected import Limits
from tiebreak.reports.gate.gate import gate
from tiebreak.reports.records import record as records
from tiebreak.reports.records import store
from tiebreak.reports.records.record import Estimate, LimitRecord, Record, Run

EXAMPLES = int(os.environ.get("TIEBREAK_FUZZ", "1"))

#: Paths of leaves that may be edited, and why that does not matter.
FREE = {
    **mutations.FREE,
    "platform.*": "software, cores and what probes found: told as notes; of what decides numbers a change is refused",
    "narrowing[[]*.given*": "words of a note",
    "narrowing[[][0-9]]": "without it the run asks for more cells",
    "plans": "which rule a plan has, for the report; another one is refused",
    "plans.flash@paper": "the same",
    **{f"*.{word}": "words, or how something is drawn: nothing is decided by them" for word in WORDS},
    "*.figure.*": "how something is drawn",
    "records*.digest": "other bits, told as a note: a sound kernel may have them",
    "records*.evidence.series*": "drawn, and no baseline keeps it",
    "records*.evidence": "a baseline does not keep what is drawn",
}
#: The same of a record whose bits its digest does not tell: what got better, or no worse than its limit, may be so.
UNDECIDED_ANSWER = {
    "records*.measures.*": "a number that is no worse by more than its limit, or that has none",
    "records*.heads": "half or twice the heads: its interval says what that tells",
    "records*.tied": "whether O itself ties where it is biased: words of a verdict",
    "records*.in_training": "no worse",
    "records*.shown.spec": "how a number is written in tables",
    "records*.shown.unit": "the same",
    "records*.shown.verdict": "beside a number that is no bias of O",
    "records*.shown.number": "of what has none: tables write NaN",
    "records*.evidence.*": "what answers were drawn from: the answers are compared",
    "records*.answers.[!c]*.asked": "of a check that is no claim and passed: a kernel may be held to another plan",
}
#: The same between platforms.
ACROSS = {
    "records*.plan": "a vendor's kernel may have another plan there: told as a note, where it is not biased",
    "records*.in_training": "what both plans foretell",
    "records*.verdict": "what the declared plan foretells, and its interval comes to",
}


def parsed(plain: Mapping[str, Any]) -> Run:
    return store.decoded(json.dumps(plain).encode(), Path("new.json"), Run)


@pytest.fixture
def judged(tmp_path: Path) -> Run:
    """A run with a bit of everything that records have."""
    biased = record(case="tied", measures={"bias": Estimate(0.23, 0.01), "rounded_bias": Estimate(0.2, 0.01)},
                    tied=True, in_training="biased", answers={"extra": records.Answer(True, "more")})  # fmt: skip
    change = records.ChangeRecord(0.1, Estimate(0.0, 0.01), Estimate(0.0, 0.01), Estimate(0.0, 0.01), "unbiased")
    fits = {"fits": {"flash@fused": records.FitRecord(0.0, 0.01, 0.99)}, "changes": {"batch": change}}
    undeclared = record("mine", plan=None, answers={records.PREDICTION: None}, evidence=fits)
    nan = failing("mine", "huge", measures={"bias": Estimate(None, None), "nonfinite": 7})
    untold = record("mine", "odd", measures={"bias": Estimate(0.04, 0.03)}, heads=2048)
    made = (record(), biased, undeclared, nan, untold, skip("mine", "causal"), skip("mine", "late", "crashed"),
               trained())  # fmt: skip
    ordered = tuple(sorted(made, key=lambda each: each.id))
    explained = {"cpu-mine": records.Explanation("follows", ("flash@fused",), 3, 0.99)}
    narrowing = (records.Narrowing(("--dtype bf16",), "format", ("bf16",)),
                 records.Narrowing(("--cases *",), "case", tuple({each.case for each in ordered})))  # fmt: skip
    return run(*ordered, explanations=explained, narrowing=narrowing, unavailable={"cuda": "no GPU"},
               plans={"flash@paper": records.PlanRecord("safe")})  # fmt: skip


def allowed(baseline: Run, name: str, value: Any, lists: Sequence[Mapping[str, str]]) -> bool:
    """Whether a list has a leaf; a number only where it is one, and no worse by more than its limit."""
    if (path := re.fullmatch(r"records\[(\d+)\]\.measures\.(\w+)(\.\w+)?", name)) is None:
        return any(fnmatchcase(name, pattern) for each in lists for pattern in each)
    measure = baseline.measures[path[2]]
    before = baseline.records[int(path[1])].measures[path[2]]
    if UNDECIDED_ANSWER not in lists or not isinstance(value, (int, float)):
        return False
    # What has no interval depends on single bits, which are a platform's own.
    of_the_platform = ACROSS in lists and not isinstance(before, Estimate) and not measure.portable
    if measure.limit is None or of_the_platform:
        return True
    if isinstance(before, Estimate):
        if before.half_width is None:
            return True
        return path[3] == ".half_width" and value <= max(measure.limit, 2 * before.half_width)
    return value - (before or 0.0) <= max(measure.limit, measure.share * (before or 0.0))


@pytest.mark.parametrize("seed", range(EXAMPLES))
@pytest.mark.parametrize("new_bits", [False, True])
@pytest.mark.parametrize("across", [False, True])
def test_no_edit_of_one_leaf_passes(judged: Run, across: bool, new_bits: bool, seed: int) -> None:
    left = record(case="left")
    more = {"records": (*judged.records, left), "cases": {**judged.cases, "left": judged.cases["tied"]}}
    baseline = replace(judged, **more)
    new = judged
    if new_bits:
        turned = tuple(replace(each, digest=each.digest and each.digest[::-1]) for each in new.records)
        new = replace(new, records=turned)
    untold = [f"records[{place}]" for place, each in enumerate(new.records) if str(each.heads) != new.options["heads"]]
    plain = json.loads(json.dumps(plain_of(new)))
    assert gate(baseline, parsed(plain), Limits(), across=across).passed, "unedited it holds"

    def passes(plain: Mapping[str, Any]) -> bool:
        """Whether the gate holds an edited run; one that reads as the unedited is no edit."""
        try:
            run = parsed(plain)
            return run != new and gate(baseline, run, Limits(), across=across).passed
        except UsageError:
            return False

    for path, value in unnoticed(plain, leaves(plain), Random(seed), passes):
        name = name_of(path)
        lists = [
            FREE,
            *([ACROSS] if across else []),
            *([UNDECIDED_ANSWER] if new_bits or name.startswith(tuple(untold)) else []),
        ]
        assert allowed(judged, name, value, lists), f"{name} = {value!r} passes"


#: Consistent edits that may pass, of a record with bits of its own, and why.
NO_WORSE = {
    "measures.*": "a number that is worse by no more than its limit, or has none, and keeps to those of checks; between"
    " platforms one that the declared plan foretells, or that has no interval",
    "answers.*": "an answer that got better, of a check whose limits do not decide it",
}


def no_worse(baseline: Run, before: Record, after: Record, what: str, *, across: bool) -> bool:
    """Tell whether an edit leaves all as good as it was, as far as a limit or an answer says."""
    kind, _, name = what.partition(".")
    not_passed = {check for check in after.not_passed if before.answers[check].passed is True}
    if (
        not_passed
        or name in (before.answers.keys() | before.measures.keys()) - after.answers.keys() - after.measures.keys()
    ):
        return False
    if kind == "answers":
        return after.answers[name].passed is True or before.answers[name].passed is not True
    measure, (old, new) = baseline.measures[name], (each.measures[name] for each in (before, after))
    foretold = all(each.passed(records.PREDICTION) for each in (before, after))
    of_the_platform = across and not measure.portable and (foretold or not isinstance(old, Estimate))
    if measure.limit is None or of_the_platform or records.number_of(old) is None:
        return records.number_of(new) is not None or records.number_of(old) is None
    size = abs if measure.worse == records.FARTHER else float
    was, now = (size(records.number_of(each) or 0.0) for each in (old, new))
    widths = [each.half_width or 0.0 for each in (old, new) if isinstance(each, Estimate)]
    return now - was - sum(widths) <= measure.limit or now - was <= measure.share * was


@pytest.mark.parametrize("seed", range(EXAMPLES))
@pytest.mark.parametrize("across", [False, True])
def test_no_consistent_edit_passes(judged: Run, across: bool, seed: int) -> None:
    chance, told = Random(seed), set[str]()
    for place, before in enumerate(judged.records):
        for what, after in consistent_edits(before, judged, chance):
            others = (*judged.records[:place], replace(after, digest="other bits"), *judged.records[place + 1 :])
            try:
                held = gate(judged, replace(judged, records=others), Limits(), across=across).passed
            except UsageError:
                continue
            assert not held or no_worse(judged, before, after, what, across=across), f"{what}: {after} passes"
            told |= {pattern for pattern in NO_WORSE if held and fnmatchcase(what, pattern)}
    assert told == NO_WORSE.keys()


@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_a_new_cell_that_agrees_with_itself_passes_if_its_checks_are_met_and_by_no_excuse(
    judged: Run, seed: int
) -> None:
    fresh = record(case="fresh")
    about = {"cases": {**judged.cases, "fresh": judged.cases["tied"]}, "narrowing": ()}
    for what, after in consistent_edits(fresh, judged, Random(seed)):
        made = replace(judged, records=(*judged.records, replace(after, excused="known")), **about)
        sound = after.outcome in records.PASSING
        assert gate(judged, made, Limits()).passed is sound, f"{what}: {after}"


@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_no_edit_of_one_leaf_of_a_baseline_lets_a_failure_pass(judged: Run, seed: int) -> None:
    """Nor is it taken without a word."""
    beyond = following(replace(judged.records[0], measures={**judged.records[0].measures, "error_over_bound": 102.0},
                               digest="other bits"), judged)  # fmt: skip
    new, plain = replace(judged, records=(beyond, *judged.records[1:])), json.loads(json.dumps(plain_of(judged)))
    assert beyond.outcome == "failed"
    mine = [path for path in leaves(plain) if path[:2] == ("records", 0) or path[0] == "checks"]

    def passes(plain: Mapping[str, Any]) -> bool:
        try:
            return gate(parsed(plain), new, Limits()).passed
        except UsageError:
            return False

    assert [name_of(path) for path, _ in unnoticed(plain, mine, Random(seed), passes)] == []


@pytest.mark.parametrize(
    "field", [{"limits": ()}, {"limits": (LimitRecord("error_over_bound", 1e3),)}, {"more": True}], ids=str
)
def test_a_description_that_was_made_to_fit_is_refused(judged: Run, field: Mapping[str, Any]) -> None:
    cell = judged.records[0]
    beyond = replace(cell, measures={**cell.measures, "error_over_bound": 102.0}, digest="other bits")
    checks = {**judged.checks, "bound": replace(judged.checks["bound"], **field)}
    with pytest.raises(UsageError, match=r"^checks\.bound\."):
        gate(judged, replace(judged, records=(beyond, *judged.records[1:]), checks=checks), Limits())


@pytest.mark.parametrize("lists", [FREE, UNDECIDED_ANSWER, ACROSS])
def test_the_lists_have_no_more_than_they_need(lists: Mapping[str, str], judged: Run) -> None:
    """Of every entry some leaf of the file is; a name that is gone goes from here too."""
    names = [name_of(path) for path in leaves(json.loads(json.dumps(plain_of(judged))))]
    words = {f"*.{word}" for word in WORDS}
    assert [pattern for pattern in lists.keys() - words if not any(fnmatchcase(name, pattern) for name in names)] == []
