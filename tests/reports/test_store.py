import contextlib
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tiebreak.reports.errors import UsageError
from tiebreak.reports.gate.gate import gate, report
from tiebreak.reports.gate.limits import Limits
from tiebreak.reports.page.command import page
from tiebreak.reports.page.figures import figures
from tiebreak.reports.records import record as records
from tiebreak.reports.records import store
from tiebreak.reports.records.record import SCHEMA, Estimate, Explanation, Record, Run, Shown
from tiebreak.reports.records.store import MAX_BYTES, UnreadableRecordsError, UnwritableFolderError
from tiebreak.reports.tables import run as tables
from tiebreak.reports.tables.compare import parts
from tiebreak.reports.tables.comparison import Agreement, compare, platform_labels
from tiebreak.reports.tables.marks import plain_text
from tiebreak.reports.tables.plans import explanation_text
from tiebreak.reports.tables.show import csv_grid

SCHEMA_FILE = Path(store.__file__).with_name("schema.json")
OLD = Path(__file__).with_name("data") / "schema1.json"
OLD3 = Path(__file__).with_name("data") / "schema3.json"  # every outcome, a training run and a skip among them
OLDER = (OLD, OLD3)


@cache
def validator() -> jsonschema.Draft202012Validator:
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def refusal(path: Path) -> str:
    """The one line that a file is refused with."""
    with pytest.raises(UnreadableRecordsError) as caught:
        store.read(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message.removeprefix(f"{path}: ")


def test_what_is_written_is_read_again_and_fits_the_published_schema(telling: Run, tmp_path: Path) -> None:
    store.write(telling, tmp_path / "a.json")
    again = store.read(tmp_path / "a.json")
    assert sorted(again.records, key=lambda record: record.id) == sorted(telling.records, key=lambda record: record.id)
    for name in ("platform", "options", "narrowing", "seconds"):
        assert getattr(again, name) == getattr(telling, name), name
    validator().validate(json.loads((tmp_path / "a.json").read_text(encoding="utf-8")))


def test_the_published_schema_is_of_this_version_and_has_every_field_with_a_line_on_it() -> None:
    published = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    assert published["properties"]["schema"]["const"] == SCHEMA
    parts = {
        "estimate": Estimate,
        "fit": records.FitRecord,
        "answer": records.Answer,
        "measure": records.MeasureRecord,
        "check": records.CheckRecord,
        "case": records.CaseRecord,
        "series_figure": records.SeriesFigure,
        "experiment": records.ExperimentRecord,
        "narrowing": records.Narrowing,
        "shown": records.Shown,
        "explanation": records.Explanation,
        "plan": records.PlanRecord,
        "trace": records.TraceRecord,
        "histogram": records.HistogramRecord,
        "series": records.SeriesRecord,
        "change": records.ChangeRecord,
        "reading": records.RuleReading,
        "rule": records.RuleAnswer,
        "record": Record,
    }
    assert set(published["$defs"]) == {*parts, "value", "evidence"}
    for name, kind in parts.items():
        part = published["$defs"][name]
        assert part["properties"].keys() == {field.name for field in fields(kind)}, name
        needed = {field.name for field in fields(kind) if field.default is field.default_factory is MISSING}
        assert set(part["required"]) == needed, name
    assert published["properties"].keys() == set(published["required"]) == {field.name for field in fields(Run)}
    assert published["$defs"]["evidence"]["properties"].keys() == records.EVIDENCE.kinds.keys()
    assert published["$defs"]["record"]["properties"]["outcome"]["enum"] == list(records.OUTCOMES)
    assert published["$defs"]["explanation"]["properties"]["state"]["enum"] == list(records.STATES)
    for part in (published, *published["$defs"].values()):
        assert part["description"]
        for name, field in part.get("properties", {}).items():
            assert field.get("description") or "$ref" in field, name


def test_the_file_describes_what_its_records_have(telling: Run) -> None:
    for run in (telling, *map(store.read, OLDER)):
        assert {name for record in run.records for name in record.measures} == run.measures.keys()
        assert {name for record in run.records for name in record.answers} == run.checks.keys()
        assert {record.case for record in run.records} == run.cases.keys()
        assert {record.experiment for record in run.records} == run.experiments.keys()


def test_an_older_schema_is_read() -> None:
    run = store.read(OLD)
    plain = json.loads(OLD.read_text(encoding="utf-8"))
    assert (plain["schema"], run.schema) == (1, SCHEMA)
    traced, untraced = sorted(run.records, key=lambda record: "trace" not in record.evidence)
    assert traced.evidence["trace"].error == tuple(plain["records"][1]["trace"]["error"])
    assert "trace" not in untraced.evidence
    assert [record.measures["max_ulps"] for record in run.records] == [
        old["measures"]["max_ulps"] for old in plain["records"]
    ]
    assert all("repeatable" not in record.answers for record in run.records), "nobody had looked"
    validator().validate(json.loads(json.dumps(run.as_dict())))


def test_what_the_options_of_an_older_file_left_out_is_known(tmp_path: Path) -> None:
    plain = json.loads(OLD3.read_text(encoding="utf-8"))
    plain["options"] |= {"backend": "cpu", "kernels": None, "cases": None, "captured": "here"}
    path = tmp_path / "old.json"
    path.write_text(json.dumps(plain), encoding="utf-8")
    by_field = {each.field: each for each in store.read(path).narrowing}
    assert by_field.keys() == {"backend", "kernel", "format", "case"}
    assert by_field["kernel"].names == ("flash@paper", "mine", "undeclared"), "the suite's beside it, and the user's"
    assert by_field["backend"] == records.Narrowing(("--backend cpu",), "backend", ("cpu",))
    assert set(by_field["case"].names) == {record["case"] for record in plain["records"]}
    plain["options"]["cases"] = "random*"
    path.write_text(json.dumps(plain), encoding="utf-8")
    (cases,) = (each for each in store.read(path).narrowing if each.field == "case")
    assert cases == records.Narrowing(("--cases random*",), "case", ("random*",))


def test_schema_3_keeps_what_it_said() -> None:
    """Outcomes, reasons, numbers and evidence of a run of the suite when it wrote schema 3."""
    plain = json.loads(OLD3.read_text(encoding="utf-8"))
    assert plain["schema"] == 3
    run = store.read(OLD3)
    validator().validate(json.loads(json.dumps(run.as_dict())))
    before, after = (
        {record["id"]: record for record in plain["records"]},
        {record.id: record for record in run.records},
    )
    assert before.keys() == after.keys()
    outcomes = {name.removeprefix("cpu-").removesuffix("-bf16"): one.outcome for name, one in after.items()}
    assert outcomes == {
        "flash@paper-random_mixed_v": "measured",  # it cancels: neither a claim nor a prediction was asked of it
        "flash@paper-tied_maxima[k=2]": "held",
        "flash@paper-train_drift": "measured",
        "mine-padded": "skipped",
        "mine-random_causal": "crashed",
        "mine-random_odd": "fell",
        "mine-tied_maxima[k=2]": "fell",
        "undeclared-tied_maxima[k=2]": "measured",
    }
    for name, old in before.items():
        new = after[name]
        assert all(text in "; ".join(new.reasons) for text in old["reasons"])
        assert bool(old["reasons"]) == bool(new.reasons)
        if old["claim"] is not None:
            claim = new.answers["claim"]
            assert (claim.met, claim.asked, claim.source) == tuple(
                old["claim"][key] for key in ("met", "expectation", "source")
            )
        if old["prediction"] is not None:
            assert new.answers["prediction"].met == old["prediction"]["met"]
            assert new.measures["equal_bits"] == old["prediction"]["equal_bits"]
        if old["measures"] is not None:
            assert new.number("bias") == old["measures"]["bias"]["mean"]
            assert new.met("repeatable") == old["measures"]["repeatable"]
            assert {key: new.measures[key] for key in old["measures"]["gradients"]} == old["measures"]["gradients"]
        assert new.evidence.get("fits", {}).keys() == old["fits"].keys()
        assert ("histogram" in new.evidence) == (old["histogram"] is not None)
    trained, said = after["cpu-flash@paper-train_drift-bf16"], before["cpu-flash@paper-train_drift-bf16"]["training"]
    assert trained.measures == said["measures"]
    assert (plain_text(trained), run.cases["train_drift"].label) == (said["shown"], said["label"])
    assert trained.shown == Shown("delta_error_mean", said["measures"]["delta_error_mean"], spec="+.1e")
    assert list(trained.evidence["series"].steps) == said["steps"]
    fallen = after["cpu-mine-tied_maxima[k=2]-bf16"]
    assert {name for name, answer in fallen.answers.items() if answer.met is False} == {"claim", "prediction"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("-0.46 B", Shown("bias", -0.4567, verdict="biased")),
        ("+0.04 ?", Shown("bias", 0.04, verdict="inconclusive")),  # another number than its measure's: the text's
        ("-0.46", Shown("bias", -0.4567, verdict="unbiased")),
        ("NaN", Shown("nonfinite")),
        ("x0.28", Shown("shrunk", 0.2811)),
        ("x0", Shown("shrunk", 0.0011)),
        ("none", Shown("none")),
        ("1.5 deg", Shown("bias", 1.5, "deg", spec=".1f")),
    ],
)
def test_what_older_tables_showed_is_data_that_is_written_the_same(
    text: str, shown: Shown, record: Callable[..., Record], run: Callable[..., Run], keep: Callable[[Run, str], Path]
) -> None:
    measures = {"bias": Estimate(-0.4567, 0.01), "gain": 0.0011 if text == "x0" else 0.2811}
    plain = json.loads(keep(run(record(measures=measures, verdict=shown.verdict)), "a").read_text(encoding="utf-8"))
    plain["schema"], plain["records"][0]["shown"] = 6, text
    (old,) = store.decode(plain, Path("a.json")).records
    assert old.shown == shown
    assert plain_text(old) == text


def test_plans_that_were_renamed_have_their_new_names_wherever_an_older_file_names_them(
    record: Callable[..., Record], run: Callable[..., Run], keep: Callable[[Run, str], Path]
) -> None:
    fits = {"flash@fused_half_up": {"mean": 0.0, "half_width": 0.1}}
    cell = record("flash@fused_ties_away", plan="flash@fused_ties_away", evidence={"fits": fits})
    plain = json.loads(keep(run(cell), "a").read_text(encoding="utf-8")) | {"schema": 6}
    assert store.decode(plain, Path("a.json")).seconds == {"cpu-flash@fused_p_bar_o_away-random-bf16": 0.25}
    (old,) = store.decode(plain, Path("a.json")).records
    assert {old.id, old.kernel, old.plan, *old.evidence["fits"]} == {
        "cpu-flash@fused_p_bar_o_away-random-bf16", "flash@fused_p_bar_o_away", "flash@fused_p_bar_away"
    }  # fmt: skip
    assert old.command == "pytest tests/matrix --kernels flash@fused_p_bar_o_away --cases 'random'"


@pytest.mark.parametrize(
    ("text", "explanation"),
    [
        ("follows flash@fused,base=2 (99.98 % of bits in 1 cell)",
         Explanation("follows", ("flash@fused,base=2",), 1, 0.9998)),
        ("can't tell apart: paper,tile=64, standard on these cases (100.00 % of bits in 9 cells)",
         Explanation("ambiguous", ("paper,tile=64", "standard"), 9, 1.0)),
        ("behaves like fair or dithered@paper in 2 cells (its random bits are its own)",
         Explanation("behaves_like", ("fair", "dithered@paper"), 2)),
        ("unexplained: no known plan agrees; nearest is paper with 89.50 % of bits in 6 cells"
         " (c[r=6] 70.00 %, e 80.00 %)",
         Explanation("unexplained", ("paper",), 6, 0.895, {"c[r=6]": 0.7, "e": 0.8})),
    ],
)  # fmt: skip
def test_what_older_files_said_of_plans_is_data_that_reads_the_same(
    text: str, explanation: Explanation, run: Callable[..., Run], keep: Callable[[Run, str], Path]
) -> None:
    plain = json.loads(keep(run(), "a").read_text(encoding="utf-8"))
    plain |= {"schema": 6, "explanations": {"cpu-mine": text}}
    assert store.decode(plain, Path("a.json")).explanations == {"cpu-mine": explanation}
    if explanation.share is not None:
        assert explanation_text(explanation) == text
    plain |= {"schema": 6, "explanations": {"cpu-mine": "no such words"}}
    with pytest.raises(
        UnreadableRecordsError, match=r"explanations.cpu-mine: expected an object, found 'no such words'"
    ):
        store.decode(plain, Path("a.json"))


@pytest.mark.parametrize(
    ("steps", "value", "message"),
    [
        (["records", 0, "reasons"], ["a", 1], "records[0].reasons: unknown field"),
        (["records", 0, "claim"], "unbiased", "records[0].claim: unknown field"),
        (["records", 0, "measures"], 3, "records[0].measures: expected an object, found 3"),
        (["records", 0, "measures", "gradients"], 3, ""),
        (["records", 2, "training"], [], "records[2].training: unknown field"),
        (["records", 2, "training", "stable"], [], ""),
        (["records", 2, "training", "shown"], 1, "records[2].shown: expected an object, found 1"),
        (["records", 1, "prediction", "bias"], {"mean": []}, "records[1].measures.predicted_bias.half_width: missing"),
        (["records", 1, "evidence"], 1, ""),
        (["records", 1, "verdict"], ["x"], "records[1].verdict: expected one of"),
    ],
)
def test_an_older_file_with_a_wrong_field_is_refused_in_one_line(
    steps: Sequence[str | int],
    value: Any,
    message: str,
    tmp_path: Path,
    change: Callable[[Path, Sequence[str | int], Any], None],
) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(OLD3.read_bytes())
    change(path, steps, value)
    if message:
        assert refusal(path).startswith(message)
    else:
        store.read(path)  # what no reader needs any more


@pytest.mark.parametrize("version", [SCHEMA + 1, 10**6])
def test_a_newer_schema_is_refused(version: int, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"schema": version}))
    assert re.match(rf"schema: {version} is newer than {SCHEMA}.* update tiebreak$", refusal(tmp_path / "a.json"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "empty"),
        (" \n", "empty"),
        ('{"schema": 2, "records": [{"id": "a', "not JSON (Unterminated string"),
        ("[" * 100_000, "nested too deeply"),
        ('{"schema": 2, "run": ' + "[" * 500 + "]" * 500 + "}", "complete: missing|platform: missing"),
        ("[1]", "the whole: expected an object"),
        ("{}", "schema: expected a version"),
        ('{"schema": "2"}', "schema: expected a version"),
        ('{"schema": true}', "schema: expected a version"),
        ('{"schema": 0}', "schema: expected a version"),
        ('{"schema": NaN}', "not JSON (NaN is no number"),
        ('{"schema": 2, "platform": {"a": -Infinity}}', "not JSON (-Infinity is no number"),
        ('{"schema": 2, "platform": {"cpu": "\\ud800"}}', "not UTF-8"),
        ("\udcff", "not UTF-8"),
    ],
)
def test_a_file_that_is_no_file_of_records(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content, encoding="utf-8", errors="surrogateescape")
    assert any(refusal(tmp_path / "a.json").startswith(start) for start in message.split("|"))


@pytest.mark.parametrize(
    ("steps", "value", "message"),
    [
        (["platform"], ..., "platform: missing"),
        (["platform", "cpu"], ..., "platform.cpu: expected a string"),
        (["platform", "fingerprint"], [], "platform.fingerprint: expected an object, found []"),
        (["platform", "fingerprint"], {"cpu": {"a": []}}, "platform.fingerprint.cpu.a: expected a string or a number"),
        (["platform", "extra"], [1, {"deep": float("1e999")}], "not JSON"),
        (["complete"], "yes", "complete: expected true or false, found 'yes'"),
        (["records"], {}, "records: expected a list, found {}"),
        (["records", 0], None, "records[0]: expected an object, found null"),
        (["records", 0, "verdict"], "fine", "records[0].verdict: expected one of biased"),
        (["records", 0, "outcome"], None, "records[0].outcome: expected one of crashed"),
        (["records", 0, "case"], ..., "records[0].case: missing"),
        (["records", 0, "colour"], "red", "records[0].colour: unknown field"),
        (["records", 0, "heads"], -1, "records[0].heads: expected at least 0, found -1"),
        (["records", 0, "heads"], 2**70, "records[0].heads: expected an integer of 64 bits"),
        (["records", 0, "heads"], True, "records[0].heads: expected an integer"),
        (["not_run"], ["a", 1], "not_run[1]: expected a string, found 1"),
        (["records", 0, "measures", "bias", "mean"], "0", "records[0].measures.bias.mean: expected a finite number"),
        (["records", 0, "measures", "bias", "half_width"], -0.1, "records[0].measures.bias.half_width: expected at"),
        (["records", 0, "measures", "gain"], [], "records[0].measures.gain: expected a finite number or null"),
        (["records", 0, "answers", "claim", "met"], "yes", "records[0].answers.claim.met: expected true or false"),
        (["records", 0, "answers", "claim", "asked"], ..., "records[0].answers.claim.asked: missing"),
        (["records", 0, "evidence"], {"trace": {"error": [0]}}, "records[0].evidence.trace.at_one: missing"),
        (["records", 0, "evidence"], {"fits": {"x": 1}}, "records[0].evidence.fits.x: expected an object, found 1"),
        (["measures", "bias", "worse"], "up", "measures.bias.worse: expected one of farther, less, more, found 'up'"),
        (["measures", "bias", "limit"], -1, "measures.bias.limit: expected at least 0, found -1"),
        (["measures", "bias"], ..., "records[0]: bias: not described in measures"),
        (["checks", "claim"], ..., "records[0]: claim: not described in checks"),
        (["cases"], {}, "records[0]: random: not described in cases"),
        (["experiments"], {}, "records[0]: call: not described in experiments"),
        (["records", 0, "id"], "x\n\x1b[31m", ""),
        (["seconds", "a"], None, "seconds.a: expected a finite number, found null"),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(
    steps: Sequence[str | int],
    value: Any,
    message: str,
    keep: Callable[[Run, str], Path],
    run: Callable[..., Run],
    change: Callable[[Path, Sequence[str | int], Any], None],
) -> None:
    path = keep(run(), "a")
    change(path, steps, value)
    if message:
        assert refusal(path).startswith(message)
    else:
        store.read(path)  # any string is a name; what shows it keeps control characters from the terminal


def test_a_number_beyond_all_bounds_is_refused(
    tmp_path: Path, keep: Callable[..., Path], run: Callable[..., Run]
) -> None:
    path = keep(run(), "a")
    text = path.read_text(encoding="utf-8")
    assert '"gain": 1.0' in text
    path.write_text(text.replace('"gain": 1.0', '"gain": 1e999'))
    assert refusal(path) == "records[0].measures.gain: expected a finite number or null, found inf"


def test_two_records_of_one_cell_are_refused(run: Callable[..., Run], record: Callable[..., Record], keep: Any) -> None:
    path = keep(run(record(), record()), "a")
    assert refusal(path) == "records[1].id: a second record of cpu-flash@paper-random-bf16"


def test_the_same_run_twice_is_refused(run: Callable[..., Run], keep: Callable[..., Path], tmp_path: Path) -> None:
    first, other = keep(run(), "first"), keep(run(), "other")
    store.read_all([first, other])
    copy = tmp_path / "copy.json"
    copy.write_bytes(first.read_bytes())
    with pytest.raises(UnreadableRecordsError, match=r"copy\.json: run: the same run as in .*first\.json"):
        store.read_all([first, other, copy])
    with pytest.raises(UnreadableRecordsError, match="the same run as in"):
        store.read_all([OLD, OLD])  # older files have no name of the run


def test_a_folder_a_missing_file_and_a_huge_file_are_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path) == "Is a directory"
    assert refusal(tmp_path / "none.json") == "No such file or directory"
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(200 * 2**20)
    assert refusal(huge) == f"larger than {MAX_BYTES >> 20} MiB: not a file of records"
    assert refusal(Path("/dev/null")) == "not a regular file"


def test_a_failed_write_leaves_the_old_file(run: Callable[..., Run], tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "a.json"
    store.write(run(), path)
    before = path.read_bytes()

    def full(self: Path, text: str, encoding: str) -> int:
        with self.open("w", encoding=encoding) as file:
            file.write(text[: len(text) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UnwritableFolderError, match=r"a\.json: No space left on device"):
        store.write(run(complete=False), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_that_is_no_number_is_written(
    run: Callable[..., Run], record: Callable[..., Record], tmp_path: Path
) -> None:
    bad = run(record(measures={"bias": Estimate(float("nan"), 0.1)}))
    with pytest.raises(ValueError, match="not JSON compliant"):
        store.write(bad, tmp_path / "a.json")
    assert list(tmp_path.iterdir()) == []


# -- Fuzzing: whatever a file holds, the reader answers with a run that fits the schema, or with its own error. --------

VALUES = [
    "null",
    "true",
    "-1",
    "0",
    "1e999",
    "-1e999",
    "1" * 400,
    "NaN",
    "Infinity",
    '""',
    '"\\u001b[31m"',
    '"\\ud800"',
]
VALUES += [
    "[]",
    "{}",
    "[" * 90 + "]" * 90,
    '{"mean": null}',
    '"biased"',
    '"skipped"',
    "2",
    "0.5",
    "[null]",
    '[{"": {}}]',
]
MARK = "\ufffe"


@cache
def seed_files() -> list[bytes]:
    """A file of every schema."""
    return [*(path.read_bytes() for path in OLDER), store.as_text(store.read(OLD3)).encode()]


def mutate(content: bytes, chance: random.Random) -> bytes:
    """One to three mutations of bytes or of the tree."""
    for _ in range(chance.randint(1, 3)):
        content = chance.choice((flip, cut, splice, graft, graft, graft))(content, chance)
    return content


def flip(content: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(content) + 1)
    return content[:at] + chance.randbytes(1) + content[at + chance.randint(0, 1) :]


def cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content) + 1)]


def splice(content: bytes, chance: random.Random) -> bytes:
    start, end, at = (chance.randrange(len(content) + 1) for _ in range(3))
    return content[:at] + content[start : min(end, start + 80)] + content[at:]


def graft(content: bytes, chance: random.Random) -> bytes:
    """Put a value where another was, take one away, or add one."""
    try:
        at = plain = json.loads(content)
    except (ValueError, RecursionError):
        return content
    while isinstance(at, dict | list) and at:
        key = chance.choice(list(at) if isinstance(at, dict) else range(len(at)))
        if chance.random() < 0.3 or not isinstance(at[key], dict | list):
            if chance.random() < 0.2:
                del at[key]
            elif chance.random() < 0.1 and isinstance(at, dict):
                at[chance.choice(["extra", "\x1b", ""])] = MARK
            else:
                at[key] = MARK
            break
        at = at[key]
    return json.dumps(plain, ensure_ascii=False).replace(f'"{MARK}"', chance.choice(VALUES)).encode(errors="replace")


# Not hypothesis' examples: of a mutation's seed it can draw and shrink nothing, and that takes as long as the reading.
@pytest.mark.parametrize("thousand", range(10))
def test_the_reader_raises_nothing_but_its_own_error(thousand: int) -> None:
    for seed in range(1000 * thousand, 1000 * thousand + 1000):
        try:
            read_mutated(random.Random(seed))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def read_mutated(chance: random.Random) -> None:
    content = mutate(chance.choice(seed_files()), chance)
    run, message = None, "fuzzed.json: "
    try:
        run = store.parse(content, Path("fuzzed.json"))
    except UnreadableRecordsError as error:
        message = str(error)
    assert message.startswith("fuzzed.json: ")
    assert message.isprintable()
    if run and chance.random() < 0.2:  # the validator is slow
        validator().validate(json.loads(json.dumps(run.as_dict(), allow_nan=False)))
    if run and chance.random() < 0.1:  # and so are tables
        shown_everywhere(run)


def shown_everywhere(run: Run) -> None:
    """What is read is shown by every command; a comparison may be refused, in one line, or fall."""
    runs, labels = [run, run], platform_labels([run, run], [Path("a"), Path("b")])
    assert tables.tables(run) or not run.records
    assert tables.summary(run)
    assert len(csv_grid(run).rows) == len(run.records)
    assert page(runs, labels, figures(runs, labels))
    assert parts(compare(runs, labels), set(Agreement))
    with contextlib.suppress(UsageError):
        assert report(gate(run, run, Limits()), Path("a"))
