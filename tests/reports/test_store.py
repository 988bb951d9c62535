import contextlib
import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import jsonschema
import pytest

from tiebreak.defects.made_up import record, run
from tiebreak.defects.mutations import GONE, edited, leaves
from tiebreak.reports.cli import main
from tiebreak.reports.errors import UsageError
from tiebreak.reports.files import FILES
from tiebreak.reports.gate.expected import Limits
from tiebreak.reports.gate.gate import gate
from tiebreak.reports.gate.report import report
from tiebreak.reports.page.command import page
from tiebreak.reports.page.figures import figures
from tiebreak.reports.records import store
from tiebreak.reports.records.decode import SCHEMA, decode, encode
from tiebreak.reports.records.record import OUTCOMES, Estimate, FitRecord, Record, Run
from tiebreak.reports.records.store import MAX_BYTES, UnreadableRecordsError, UnwritableFolderError
from tiebreak.reports.schemas import schema_of
from tiebreak.reports.tables import run as tables
from tiebreak.reports.tables.compare import Agreement, compare, parts, platform_labels
from tiebreak.reports.tables.show import csv_grid

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema_of("records"))


def refusal(path: Path) -> str:
    """The one line that a file is refused with."""
    with pytest.raises(UnreadableRecordsError) as caught:
        store.read(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message.removeprefix(f"{path}: ")


def test_what_is_written_is_read_again_and_fits_the_schema(
    telling: Run, tmp_path: Path, validator: jsonschema.Draft202012Validator
) -> None:
    store.write(telling, tmp_path / "a.json")
    again = store.read(tmp_path / "a.json")
    assert sorted(again.records, key=lambda record: record.id) == sorted(telling.records, key=lambda record: record.id)
    assert store.as_text(again) == store.as_text(telling)
    validator.validate(json.loads((tmp_path / "a.json").read_text(encoding="utf-8")))


def test_a_number_that_is_none_stays_none_and_an_integer_an_integer() -> None:
    measures = {"bias": Estimate.of(float("nan"), float("inf")), "gain": None, "elements": 65536, "rms_ulps": 0.5}
    fits = {"flash@paper": FitRecord(None, 0.1, 0.5)}
    made = record(measures=measures, evidence={"fits": fits, "other": [{"x": 1}]})
    assert decode(encode(made), Record) == made
    text = encode(made)
    assert '"bias": {"mean": null, "half_width": null}' in text
    assert '"gain": null' in text
    assert '"elements": 65536,' in text
    assert decode(text, Record).number("bias") is None


@pytest.mark.parametrize("name", sorted(FILES.keys() - {"sweep-folder"}))
def test_a_schema_describes_every_field(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", name]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["title"].endswith(f"schema {SCHEMA}")
    for kind, part in schema["$defs"].items():
        assert part["description"]
        assert part["additionalProperties"] is False
        for field, about in part["properties"].items():
            assert about["description"], (kind, field)


def test_the_schema_of_records_says_what_values_there_are() -> None:
    parts = schema_of("records")["$defs"]
    assert parts["Run"]["properties"]["schema"]["const"] == SCHEMA
    assert parts["Record"]["properties"]["outcome"]["enum"] == list(OUTCOMES)
    assert parts["Record"]["properties"]["evidence"]["properties"]["trace"] == {"$ref": "#/$defs/TraceRecord"}
    assert parts["FitRecord"]["required"] == ["mean", "half_width"]


@pytest.mark.parametrize(
    ("version", "cure"),
    [
        ("6", "make the file anew, or read it with the tiebreak that made it"),
        ("1" * 5000, "update tiebreak"),
        ('"7"', "make the file anew"),
    ],
)
def test_another_schema_is_refused_with_what_to_do(version: str, cure: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(f'{{"schema": {version}, "records": []}}')
    expected = f"schema: {version[:20]} is not {SCHEMA}, the one that this tiebreak reads: {cure}"
    assert refusal(tmp_path / "a.json").startswith(expected)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "empty"),
        ('{"schema": 7, "records": [{"id": "a', "not JSON (Input data was truncated)"),
        ('{"schema": 7, "options": {"a": ' + "[" * 100_000, "nested too deeply"),
        ("[1]", "Expected `object`, got `array`"),
        ("{}", "schema: missing is not 7"),
        ('{"schema": NaN}', "not JSON (JSON is malformed: invalid character"),
        ('{"schema": 7, "run": "\\ud800"}', "not JSON"),
        ("\udcff", "not JSON"),
    ],
)
def test_a_file_that_is_no_file_of_records(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content, encoding="utf-8", errors="surrogateescape")
    assert refusal(tmp_path / "a.json").startswith(message)


@pytest.mark.parametrize(
    ("steps", "value", "message"),
    [
        (["platform"], GONE, "Object missing required field `platform`"),
        (["platform", "cpu"], GONE, "platform.cpu: Expected `str`, got `null`"),
        (["platform", "fingerprint"], [], "platform.fingerprint: Expected `object`, got `array`"),
        (["platform", "evidence"], "x", "platform.evidence: Expected `object`, got `str`"),
        (["platform", "assumed"], {"cpu": 1}, "platform.assumed[...]: Expected `str`, got `int`"),
        (["platform", "fingerprint"], {"cpu": {"a": []}}, "platform.fingerprint[...][...]: Expected `int | "),
        (["records", 0, "verdict"], "fine", "records[0].verdict: Expected `str` matching regex '^(unbiased|"),
        (["records", 0, "outcome"], "passed\n", "records[0].outcome: Expected `str` matching regex '^(passed|"),
        (["records", 0, "colour"], "red", "records[0]: Object contains unknown field `colour`"),
        (["records", 0, "heads"], -1, "records[0].heads: Expected `int` >= 0"),
        (["records", 0, "measures", "bias", "half_width"], -0.1, "records[0].measures[...].half_width: Expected"),
        (["records", 0, "measures", "gain"], 10**400, "records[0].measures[...]: Expected `int` <= 922337203685477580"),
        (["records", 0, "measures", "a.b[0]"], {"mean": "x"}, "records[0].measures[...].mean: Expected"),
        (["records", 0, "evidence"], {"fits": {"x": 1}}, "records[0]: evidence.fits[...]: Expected `object`"),
        (["measures", "bias", "worse"], "up", "measures[...].worse: Expected `str` matching regex '^(more|les"),
        (["measures", "bias"], GONE, "records[0]: bias: not described in measures"),
        (["cases"], {}, "records[0]: random: not described in cases"),
        (["experiments"], {}, "records[0]: call: not described in experiments"),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(
    steps: Sequence[str | int], value: Any, message: str, keep: Callable[[Run, str], Path]
) -> None:
    path = keep(run(), "a")
    path.write_text(json.dumps(edited(json.loads(path.read_text(encoding="utf-8")), tuple(steps), value)))
    assert refusal(path).startswith(message)


def test_two_records_of_one_cell_and_a_number_beyond_all_bounds_are_refused(keep: Any) -> None:
    path = keep(run(record(), record()), "a")
    assert refusal(path) == "records[1].id: a second record of cpu-flash@paper-random-bf16"
    path.write_text(path.read_text(encoding="utf-8").replace('"gain": 1.0', '"gain": 1e999'))
    assert refusal(path) == "records[0].measures[...]: Number out of range"


def test_the_same_run_twice_is_refused(keep: Callable[..., Path], tmp_path: Path) -> None:
    first, other = keep(run(), "first"), keep(run(), "other")
    store.read_all([first, other])
    copy = tmp_path / "copy.json"
    copy.write_bytes(first.read_bytes())
    with pytest.raises(UnreadableRecordsError, match=r"copy\.json: the same as in .*first\.json"):
        store.read_all([first, other, copy])
    baseline = keep(run(run=None), "baseline")
    with pytest.raises(UnreadableRecordsError, match="the same as in"):
        store.read_all([baseline, baseline])


def test_a_folder_a_missing_file_and_a_huge_file_are_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path) == "Is a directory"
    assert refusal(tmp_path / "none.json") == "No such file or directory"
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(200 * 2**20)
    assert refusal(huge) == f"larger than {MAX_BYTES >> 20} MiB: not a file of records"
    assert refusal(Path("/dev/null")) == "not a regular file"


def test_nobody_waits_for_the_other_end_of_a_pipe(tmp_path: Path) -> None:
    pipe, told = tmp_path / "pipe.json", list[str]()
    os.mkfifo(pipe)
    reading = Thread(target=lambda: told.append(refusal(pipe)), daemon=True)
    reading.start()
    reading.join(30)
    assert told == ["not a regular file"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: Any) -> None:
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


def test_nothing_that_is_no_number_is_written(tmp_path: Path) -> None:
    bad = run(record(measures={"bias": Estimate(float("nan"), 0.1)}))
    with pytest.raises(ValueError, match="not JSON compliant"):
        store.write(bad, tmp_path / "a.json")
    assert list(tmp_path.iterdir()) == []


# -- Fuzzing: whatever a file holds, the reader answers with a run that fits the schema, or with its own error. --------

VALUES = ["null", "true", "-1", "0", "2", "0.5", "1e999", "-1e999", "1" * 400, "NaN", "Infinity", '""',
          '"\\u001b[31m"', '"\\ud800"', '"biased"', '"skipped"', "[]", "{}", "[" * 90 + "]" * 90, '{"mean": null}',
          "[null]", '[{"": {}}]']  # fmt: skip
MARK = "\ufffe"


def mutate(plain: dict[str, Any], paths: Sequence[tuple[str | int, ...]], chance: random.Random) -> bytes:
    """Put one or two values where others were, or take them away; of some, cut the end off, or move a part."""
    path, value = chance.choice(paths), chance.choice([MARK, MARK, MARK, GONE])
    text = json.dumps(edited(plain, path, value), ensure_ascii=False).replace(f'"{MARK}"', chance.choice(VALUES))
    content = text.encode(errors="replace")
    if chance.random() < 0.7:
        return content
    start, at, end = sorted(chance.randrange(len(content) + 1) for _ in range(3))
    return content[:at] + (content[start : start + 80] + content[end:] if chance.random() < 0.7 else b"")


def test_the_reader_raises_nothing_but_its_own_error(telling: Run, validator: jsonschema.Draft202012Validator) -> None:
    plain = json.loads(store.as_text(telling))
    paths, refusals = list(leaves(plain)), list[str]()
    for seed in range(1200):
        try:
            run = store.decoded(mutate(plain, paths, random.Random(seed)), Path("fuzzed.json"), Run)
        except UnreadableRecordsError as error:
            refusals.append(str(error))
            continue
        if seed % 10 == 0:  # the validator is slow
            validator.validate(json.loads(store.as_text(run)))
        if seed % 10 == 1:  # and so are tables
            shown_everywhere(run)
    assert [text for text in refusals if not (text.startswith("fuzzed.json: ") and text.isprintable())] == []


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
