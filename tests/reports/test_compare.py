from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tiebreak.defects.made_up import Call, record, run, skip
from tiebreak.reports.records.order import cases_of, kernel_places
from tiebreak.reports.records.record import NUMBERS, CaseRecord, Estimate, NumbersRecord, PlanRecord, Record
from tiebreak.reports.tables.compare import Agreement, Row, cell_texts, compare, platform_labels

pytestmark = pytest.mark.quick


def one_row(*records: Record | None, other: Record, **fields: Any) -> Row:
    """The row of the first cell, in runs that each have `other` as well."""
    runs = [run(*([record] if record else []), other, **fields) for record in records]
    comparison = compare(runs, [str(number) for number in range(len(runs))])
    return next(row for row in comparison.rows if row.record.id != other.id)


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        ({}, Agreement.BITS),
        ({"digest": "f" * 16}, Agreement.VERDICT),
        ({"digest": None}, Agreement.VERDICT),
        ({"outcome": "measured"}, Agreement.BITS),
        ({"verdict": "biased"}, Agreement.DISAGREE),
        ({"outcome": "failed"}, Agreement.DISAGREE),
        ({"seed": 2}, Agreement.NOT_COMPARABLE),
        ({"case_version": 2, "digest": "f" * 16, "verdict": "biased"}, Agreement.NOT_COMPARABLE),
    ],
)
def test_what_two_runs_agree_on(there: dict[str, Any], expected: Agreement) -> None:
    row = one_row(record(), record(**there), other=record(case="other"))
    assert row.agreement is expected


def test_a_cell_that_one_side_lacks_is_shown_and_never_equal() -> None:
    other = record(case="other")
    lacking = one_row(record(), None, other=other)
    assert (lacking.agreement, cell_texts(lacking)[1]) == (Agreement.LACKING, "missing")
    skipped = one_row(record(), skip(), other=other)
    assert (skipped.agreement, cell_texts(skipped)[1]) == (Agreement.LACKING, "skip")
    assert one_row(skip(), skip(), other=other).agreement is Agreement.LACKING
    differing = one_row(record(), None, record(verdict="biased"), other=other)
    assert differing.agreement is Agreement.DISAGREE, "a run that lacks it hides nothing"
    crashed = one_row(skip(outcome="crashed"), skip(outcome="crashed"), other=other)
    assert (crashed.agreement, cell_texts(crashed)) == (Agreement.VERDICT, ["!crash!", "!crash!"])


def test_texts_have_bias_interval_verdict_and_largest_error() -> None:
    held = record(verdict="biased", measures={"bias": Estimate(0.2314, 0.0071), "max_ulps": 1.953})
    nan: dict[str, Any] = {"verdict": "nonfinite", "measures": {"nonfinite": 3, "max_ulps": None}, "digest": "q"}
    failed, excused = record(**nan, outcome="failed"), record(**nan, outcome="failed", excused="known")
    row = one_row(held, failed, excused, replace(held, outcome="undecided"), other=record(case="other"))
    assert cell_texts(row) == ["a +0.231±0.007 B max 1.95", "b !NaN!", "b (NaN)", "a ?+0.231±0.007 B max 1.95?"]
    assert one_row(held, record(digest=None), other=record(case="other")).letters == ("a", "")


@pytest.mark.parametrize(
    ("only", "case"), [("agree", "a"), ("bits", "b"), ("different", "c"), ("missing", "d"), ("incomparable", "e")]
)
def test_only_shows_one_agreement_and_counts_all(only: str, case: str, tiebreak: Call) -> None:
    changed: dict[str, dict[str, Any]] = {"a": {}, "b": {"digest": "q"}, "c": {"verdict": "biased"}, "e": {"seed": 2}}
    there = [record(case=name, **fields) for name, fields in changed.items()]
    out = tiebreak("compare", run(*(record(case=name) for name in "abcde")), run(*there), "--only", only).out
    # A row stands twice where the terminal is too narrow for all of it.
    assert {line.split()[2] for line in out.splitlines() if " flash@paper " in line} == {case}
    assert (
        "5 cells on 2 platforms: 1 agree to the bit, 1 agree in verdict, not in bits, 1 disagree in verdict or outcome,"
        " 1 missing or skipped somewhere, 1 not comparable (other inputs)\n"
    ) in out
    assert "left out: 4 rows; --all shows all" in out


def grouped(**groups: str) -> dict[str, CaseRecord]:
    return {name: CaseRecord(name, group=group) for name, group in groups.items()}


def test_cases_stand_group_after_group_and_those_of_none_last() -> None:
    cases = grouped(zebra="ties", odd="", ant="range", yak="ties")
    ours = run(*(record(case=name) for name in ("ant", "odd", "yak", "zebra")), cases=cases)
    old = run(record(case="zebra"), record(case="older"), cases=grouped(zebra="", older=""))
    ours, old = (replace(case, cases={name: case.cases[name] for name in order})
                 for case, order in ((ours, cases), (old, ("older", "zebra"))))  # fmt: skip
    order = ["zebra", "yak", "ant", "odd", "older"]
    assert list(cases_of([old, ours])) == order
    assert [row.record.case for row in compare([old, ours], ["x", "y"]).rows] == order


GPU = {"gpu": "Made-up GPU"}
QEMU = {"machine": "aarch64", "emulated": "QEMU", "level": "aarch64-max"}


@pytest.mark.parametrize(
    ("platforms", "expected"),
    [
        ({"a.json": {}, "b.json": {}, "c.json": {"level": "avx2"}}, ["M (a)", "M (b)", "M, avx2"]),
        ({"x/a.json": {}, "y/a.json": {}}, ["M (x/a.json)", "M (y/a.json)"]),
        (
            {"a": GPU, "b": GPU | {"torch": "2.14"}, "c": {"torch": "2.14"}},
            ["M, Made-up GPU, torch 2.13.0", "M, Made-up GPU, torch 2.14", "M"],
        ),
        (
            {name: QEMU | {"cpu": f"{name} (emulated processor)"} for name in ("max", "aarch64")},
            ["aarch64 max (emulated processor)", "aarch64 (emulated processor)"],
        ),
    ],
)
def test_labels_say_what_tells_platforms_apart(platforms: dict[str, dict[str, str]], expected: list[str]) -> None:
    runs = [run(platform={"cpu": "M", **fields}) for fields in platforms.values()]
    assert platform_labels(runs, list(map(Path, platforms))) == expected


def test_kernels_stand_with_the_users_first_then_the_named_then_the_composed_in_the_suites_order() -> None:
    names = ("always@b", "flash@a", "mine", "sdpa")
    plans = {name: PlanRecord("flash") for name in ("flash@a", "always@b")}
    ran = run(*map(record, names), plans=plans)
    ran = replace(ran, options={**ran.options, "kernel": "my.py:mine"})
    order = ["mine", "sdpa", "flash@a", "always@b"]
    assert sorted(names, key=kernel_places([ran]).__getitem__) == order
    assert [row.record.kernel for row in compare([ran, ran], ["x", "y"]).rows] == order


def test_the_command(tiebreak: Call) -> None:
    cells = record(), record(case="same")
    other = run(record(digest="q"), cells[1], complete=False, platform={"level": "avx2"})
    files = run(*cells, record(case="other")), other
    out = tiebreak("compare", *files).out
    for told in ("2.json, 2 cells, torch 2.13.0, numpy 2.4.6, INCOMPLETE", "3 cells on 2 platforms", "missing",
                 "~ flash@paper random", "left out: 1 row with the same bits everywhere"):  # fmt: skip
        assert told in out
    heads = tiebreak("compare", files[0], run(cells[0], options={"heads": "64"}), "--only", "incomparable").out
    assert "case v1, seed 1, 64 heads" in heads
    assert " same" not in out.replace(" same bits", "").replace("The same letter", "")
    assert "= flash@paper same" in tiebreak("compare", *files, "--all").out
    out = tiebreak("compare", *files, "--cases", "rand*", "--format", "github").out
    assert "1 cell on 2 platforms" in out
    assert "| kernel, case" in out
    refused = tiebreak("compare", *files, "--cases", "nope")
    assert refused.code == 2
    assert "unknown case 'nope': known are other, random, same" in refused.err
    refused = tiebreak("compare", *files, "--all", "--only", "agree")
    assert refused == (2, "", "tiebreak compare: --all and --only exclude one another: give one of them\n")


def test_an_old_kernel_stands_beside_a_new_one(tiebreak: Call) -> None:
    """Each file's own kernel; one that both have stays what it is."""
    suite = record("flash@fused")
    files = run(record("mine"), suite), run(record("yours", measures={"bias": Estimate(0.2, 0.01)}), suite)
    out = tiebreak("compare", *files, "--all").out
    assert "3 cells on 2 platforms: 1 agree to the bit, 2 missing or skipped somewhere" in out
    out = tiebreak("compare", *files, "--all", "--match", "kernel").out
    assert "2 cells on 2 platforms: 1 agree to the bit, 1 disagree in verdict or outcome" in out
    assert "! mine -> yours random" in out
    assert tiebreak("page", *files, "--match", "kernel", "-o", ".").code == 0
    assert "mine -&gt; yours" in Path("index.html").read_text(encoding="utf-8")


def test_kernels_of_which_it_is_not_clear_which_is_which_are_refused(tiebreak: Call) -> None:
    files = run(record("mine")), run(record("yours"), record("theirs"))
    refused = tiebreak("compare", *files, "--match", "kernel")
    assert (refused.code, refused.out) == (2, "")
    assert "--match kernel: file 2 has theirs, yours" in refused.err
    assert tiebreak("compare", *files, "--match", "kernel", "--kernels", "mine,theirs").code == 0


def test_numbers_that_records_keep_are_told_apart_in_their_unit(tiebreak: Call) -> None:
    def kept(*values: float | None, inputs: str = "i") -> Record:
        return record(
            evidence={NUMBERS: NumbersRecord("errors of something", "nats", inputs, values)}, digest=f"{values}"
        )

    first, apart = kept(3.0, 4.0), kept(3.1, 4.3)
    others = [kept(3.0, 4.0), apart, kept(None, 4.0), kept(3.0, 4.0, inputs="j"), record(case="other")]
    out = tiebreak("compare", *(run(each) for each in (first, *others)), "--format", "github").out
    (line,) = (line for line in out.splitlines() if line.startswith("| flash@paper, "))
    # rms of 3 and 4, and of 0.1 and 0.3, whose mean is 0.2.
    assert [cell.strip() for cell in line.split("|")[2:-1]] == ["3.54", "0 (+0)", "0.22 (+0.2)", "nan (+nan)",
                                                                "other inputs", "missing"]  # fmt: skip
    assert "errors of something, nats" in out
    assert "nats" not in tiebreak("compare", run(record()), run(record())).out
