import json
import random
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiebreak.reports
from tiebreak.reports import store
from tiebreak.reports.records import SCHEMA, Estimate, Record, Run
from tiebreak.reports.store import MAX_BYTES, UnreadableRecordsError, UnwritableFolderError

SCHEMA_FILE = Path(tiebreak.reports.__file__).with_name("schema.json")
OLD = Path(__file__).with_name("data") / "schema1.json"


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
    assert (again.platform, again.options, again.seconds) == (telling.platform, telling.options, telling.seconds)
    validator().validate(json.loads((tmp_path / "a.json").read_text(encoding="utf-8")))


def test_the_published_schema_is_of_this_version() -> None:
    assert json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))["properties"]["schema"]["const"] == SCHEMA


def test_an_older_schema_is_read() -> None:
    run = store.read(OLD)
    plain = json.loads(OLD.read_text(encoding="utf-8"))
    assert (plain["schema"], run.schema) == (1, SCHEMA)
    traced, untraced = sorted(run.records, key=lambda record: record.trace is None)
    assert traced.trace is not None
    assert traced.trace.error == tuple(plain["records"][1]["trace"]["error"])
    assert untraced.trace is None
    assert all(record.measures is not None and record.measures.repeatable is None for record in run.records)
    validator().validate(json.loads(json.dumps(run.as_dict())))


@pytest.mark.parametrize("version", [SCHEMA + 1, 10**6])
def test_a_newer_schema_is_refused(version: int, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"schema": version}))
    assert re.match(rf"schema: {version} is newer than {SCHEMA}.* update tiebreak$", refusal(tmp_path / "a.json"))


@pytest.mark.parametrize(
    ("content", "said"),
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
def test_a_file_that_is_no_file_of_records(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content, encoding="utf-8", errors="surrogateescape")
    assert any(refusal(tmp_path / "a.json").startswith(one) for one in said.split("|"))


@pytest.mark.parametrize(
    ("steps", "value", "said"),
    [
        (["platform"], ..., "platform: missing"),
        (["platform", "cpu"], ..., "platform.cpu: expected a string"),
        (["platform", "extra"], [1, {"deep": float("1e999")}], "not JSON"),
        (["complete"], "yes", "complete: expected true or false, found 'yes'"),
        (["records"], {}, "records: expected a list, found {}"),
        (["records", 0], None, "records[0]: expected an object, found null"),
        (["records", 0, "verdict"], "fine", "records[0].verdict: expected one of biased"),
        (["records", 0, "outcome"], None, "records[0].outcome: expected one of crashed"),
        (["records", 0, "digest"], ..., "records[0].digest: missing"),
        (["records", 0, "colour"], "red", "records[0].colour: unknown field"),
        (["records", 0, "heads"], -1, "records[0].heads: expected at least 0, found -1"),
        (["records", 0, "heads"], 2**70, "records[0].heads: expected an integer of 64 bits"),
        (["records", 0, "heads"], True, "records[0].heads: expected an integer"),
        (["records", 0, "reasons"], ["a", 1], "records[0].reasons[1]: expected a string, found 1"),
        (["records", 0, "measures", "bias", "mean"], "0", "records[0].measures.bias.mean: expected a finite number"),
        (["records", 0, "measures", "bias", "half_width"], -0.1, "records[0].measures.bias.half_width: expected at"),
        (["records", 0, "measures", "gradients", "dq"], [], "records[0].measures.gradients.dq: expected a finite"),
        (["records", 0, "id"], "x\n\x1b[31m", ""),
        (["seconds", "a"], None, "seconds.a: expected a finite number, found null"),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(
    steps: Sequence[str | int],
    value: Any,
    said: str,
    keep: Callable[[Run, str], Path],
    run: Callable[..., Run],
    change: Callable[[Path, Sequence[str | int], Any], None],
) -> None:
    path = keep(run(), "a")
    change(path, steps, value)
    if said:
        assert refusal(path).startswith(said)
    else:
        store.read(path)  # any string is a name; what shows it keeps control characters from the terminal


def test_a_number_beyond_all_bounds_is_refused(
    tmp_path: Path, keep: Callable[..., Path], run: Callable[..., Run]
) -> None:
    path = keep(run(), "a")
    text = path.read_text(encoding="utf-8")
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
    old = json.loads(OLD.read_text(encoding="utf-8"))
    new = json.loads(json.dumps(store.read(OLD).as_dict()))
    return [json.dumps(plain).encode() for plain in (old, new)]


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


@settings(max_examples=10_000, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
@given(st.integers(0, 2**63))
def test_the_reader_raises_nothing_but_its_own_error(seed: int) -> None:
    chance = random.Random(seed)
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
