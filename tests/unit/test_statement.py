"""Statements: what they refuse to be, and what verifying finds of one that was made up."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from msgspec.structs import replace

from tiebreak.backends.backend import CPU, EMULATION
from tiebreak.backends.platform import describe
from tiebreak.backends.registry import BACKENDS
from tiebreak.cases.case import Case
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.kernels.formats import BF16
from tiebreak.kernels.kernel import Kernel
from tiebreak.kernels.roster import composed_kernel
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.experiments import kinds
from tiebreak.matrix.experiments.call import Call
from tiebreak.matrix.record_collector import described
from tiebreak.matrix.run import run_cell
from tiebreak.matrix.settings import Settings
from tiebreak.matrix.workbench import Workbench
from tiebreak.programs import profiles
from tiebreak.programs import rejudgement as rejudging
from tiebreak.programs import statement as program
from tiebreak.reports.cli import main
from tiebreak.reports.records import store
from tiebreak.reports.records.record import SKIPPED, Answer, Estimate, Record, Run, Shown
from tiebreak.reports.schemas import schema_of
from tiebreak.reports.statement import folder as statements

CASES = ("tied_maxima[k=2]", "no_tail")
KERNELS = ("flash@paper", "fair")
COMMIT = "c" * 40
WHEEL = f"1.0 sha256:{'a' * 64}"
OURS = "emulation-flash@paper-tied_maxima[k=2]-bf16"
DEVICE = "cpu-flash@paper-tied_maxima[k=2]-bf16"
VENDORS = "cpu-sdpa_math-no_tail-bf16"
WAIVER = '[[expected]]\ncells = "cpu-sdpa_math-*"\ncheck = "repeatable"\nreason = "issue 12"\nexpires = 2999-01-31\n'


@pytest.fixture(scope="module")
def ran() -> Run:
    """Two cases on two backends: the two kernels of a small profile, and one of the backend's own."""
    offered = {input.name: input for input in kinds()["call"].offered(None, cases_named=True)}
    bench = Workbench(Settings())
    kernels = [(EMULATION, EMULATION.kernel(name)) for name in KERNELS]
    kernels += [(CPU, CPU.kernel(name)) for name in (*KERNELS, "sdpa_math")]
    cells = [Cell(*pair, offered[case], BF16) for case in CASES for pair in kernels]
    made = Run(
        platform=describe().as_dict() | {"commit": COMMIT, "fingerprint": {}},
        options={"seed": "1", "heads": "256", "kernel": None},
        records=tuple(run_cell(cell, bench) for cell in cells),
        run="a" * 32,
    )
    return described(made, {cell.id: cell for cell in cells})


@pytest.fixture(autouse=True)
def small_profile(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A profile of those cells."""
    monkeypatch.setattr(Call, "tags", property(lambda call: frozenset({call.name})))
    asks = {"small": profiles.Selector("two cases", frozenset(CASES), KERNELS)}
    for module in (profiles, program):
        monkeypatch.setattr(module, "PROFILES", asks)
    profiles.profile.cache_clear()
    yield
    profiles.profile.cache_clear()


@pytest.fixture
def keep(ran: Run, tmp_path: Path) -> Callable[..., Path]:
    """Writes the run, some of its records otherwise."""

    def write(records: Mapping[str, Mapping[str, Any] | None] | None = None, name: str = "last", **fields: Any) -> Path:
        changes = records or {}
        changed = (replace(record, **(changes.get(record.id) or {})) for record in ran.records)
        kept = tuple(record for record in changed if changes.get(record.id, {}) is not None)
        path = tmp_path / f"{name}.json"
        store.write(replace(ran, records=kept, run=name * 8, **fields), path)
        return path

    return write


@pytest.fixture
def stated(keep: Callable[..., Path], tmp_path: Path) -> Path:
    """A statement that holds."""
    assert main(["statement", str(keep()), "-o", str(tmp_path / "handed_in"), "--profile", "small"]) == 0
    return tmp_path / "handed_in"


@pytest.fixture
def verified(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[str]]]:
    """Verifies a statement; the exit code and the lines."""

    def verify(folder: Path, *words: str) -> tuple[int, list[str]]:
        capsys.readouterr()
        code = main(["statement", "--verify", str(folder), *words])
        output = capsys.readouterr()
        assert not output.err
        return code, output.out.splitlines()

    return verify


def forge(folder: Path, change: Callable[[Run], Run]) -> None:
    """Change the records, and make all else that the statement says as if they had been so."""
    path = folder / "records-1.json"
    store.write(change(store.read(path)), path)
    run, asked = store.read(path), profiles.profile("small")
    made = statements.derive([run], [path.read_bytes()], [path.name], asked, statements.read(folder).waivers)
    for name, content in program._texts(made, [run], asked).items():
        (folder / name).write_bytes(content)


def left_out(record: Record) -> Record:
    """As if it had been skipped."""
    return replace(record, outcome=SKIPPED, skipped="no device", shown=None, verdict=None, tied=None, in_training=None,
                   measures={}, answers={}, evidence={}, digest=None, heads=0)  # fmt: skip


def changing(name: str, change: Callable[[Record], Record]) -> Callable[[Run], Run]:
    return lambda run: replace(
        run, records=tuple(change(record) if record.id == name else record for record in run.records)
    )


def measured(name: str, **measures: Any) -> Callable[[Run], Run]:
    return changing(name, lambda cell: replace(cell, measures={**cell.measures, **measures}))


def without(name: str, check: str) -> Callable[[Run], Run]:
    return changing(
        name,
        lambda cell: replace(cell, answers={key: answer for key, answer in cell.answers.items() if key != check}),
    )


def answered(name: str, check: str, met: bool, **fields: Any) -> Callable[[Run], Run]:
    def change(record: Record) -> Record:
        why = "" if met else "it is not"
        answer = replace(record.answers[check], met=met, why=why)
        return replace(record, answers={**record.answers, check: answer}, **fields)

    return changing(name, change)


def test_a_statement_of_a_run_verifies_and_says_what_was_not_shown(
    stated: Path, verified: Callable[..., tuple[int, list[str]]]
) -> None:
    names = ["records-1.json", "statement.json", "summary.html", "summary.md"]
    assert sorted(path.name for path in stated.iterdir()) == names
    code, (told,) = verified(stated, "--sample", "99")
    assert code == 0
    assert told.startswith("verified: profile small, 10 cells: ")
    assert "of 10 cells that the emulation can tell of 10 recomputed (4 its own, 6 predictions of a device's)" in told
    assert told.endswith("NOT shown: that the records came from the device that they name")


def test_what_an_installed_wheel_ran_is_a_statement_and_fits_the_published_schema(
    keep: Callable[..., Path], ran: Run, tmp_path: Path, verified: Callable[..., tuple[int, list[str]]]
) -> None:
    folder = tmp_path / "wheels"
    records = keep(platform={**ran.platform, "commit": None, "wheel": WHEEL})
    assert main(["statement", str(records), "-o", str(folder), "--profile", "small"]) == 0
    plain = json.loads((folder / "statement.json").read_text(encoding="utf-8"))
    assert plain["suite"] == f"wheel {WHEEL}"
    jsonschema.Draft202012Validator(schema_of("statement")).validate(plain)
    assert verified(folder, "--sample", "1")[0] == 0


def test_the_summary_has_platform_profile_counts_and_biased_cells(stated: Path) -> None:
    page, text = ((stated / name).read_text(encoding="utf-8") for name in ("summary.html", "summary.md"))
    for summary in (page, text):
        for told in (describe().cpu, COMMIT, "10 cells: ", "two cases", "sdpa_math", "flash@paper", "1 of 1"):
            assert told in summary
    assert "<script" not in page


# A record that was changed and whose file has the digest of the change: by what it is found out all the same.
FORGED: Mapping[str, tuple[Callable[[Run], Run], str]] = {
    "bias": (measured(DEVICE, bias=Estimate(0.001, 0.001)), f"{DEVICE}: verdict: biased, and its bias comes to unb"),
    "shown": (
        changing(DEVICE, lambda cell: replace(cell, shown=Shown("bias", 0.0))),
        f"{DEVICE}: shown: '+0.00', and its measures",
    ),
    "verdict": (changing(DEVICE, lambda cell: replace(cell, verdict="unbiased")), f"{DEVICE}: verdict: unbiased, and"),
    "where a bias goes": (
        changing(DEVICE, lambda cell: replace(cell, in_training="unbiased")),
        f"{DEVICE}: in_training: unbiased, and its measures come to None",
    ),
    "where a bias comes from": (
        changing(DEVICE, lambda cell: replace(cell, tied=True)),
        f"{DEVICE}: tied: True, and its measures come to None",
    ),
    "difference": (
        measured(DEVICE, prediction_difference=Estimate(0.01, 0.001)),
        f"{DEVICE}: measures: bias less predicted_bias is not prediction_difference",
    ),
    "bound": (measured(DEVICE, error_over_bound=3.0), f"{DEVICE}: answers.bound: met, and its measures say not met"),
    "bound not asked": (
        lambda run: without(VENDORS, "bound")(measured(VENDORS, error_over_bound=3.0)(run)),
        f"{VENDORS}: answers.bound: not asked, and its measures do not meet it",
    ),
    "claim not asked": (without(DEVICE, "claim"), f"{DEVICE}: answers.claim: None, and the case claims biased away"),
    "claim": (
        answered(DEVICE, "claim", met=False, outcome="fell"),
        f"{DEVICE}: answers.claim: not met, and its measures say met",
    ),
    "prediction": (
        answered(DEVICE, "prediction", met=False, outcome="fell"),
        f"{DEVICE}: answers.prediction: not met, and its measures say met",
    ),
    "prediction not asked": (without(DEVICE, "prediction"), f"{DEVICE}: answers.prediction: not asked, and the kernel"),
    "outcome": (
        answered(VENDORS, "repeatable", met=False),
        f"{VENDORS}: outcome: held, and its answers come to fell: was the file edited?",
    ),
    "plan": (changing(DEVICE, lambda cell: replace(cell, plan="flash@fused")), f"{DEVICE}: plan: flash@fused, and fla"),
    "case_version": (
        changing(VENDORS, lambda cell: replace(cell, case_version=7)),
        f"{VENDORS}: case_version: 7, profile small asks for 1",
    ),
    "seed": (changing(VENDORS, lambda cell: replace(cell, seed=7)), f"{VENDORS}: seed: 7, profile small asks for 1"),
    "missing": (
        lambda run: replace(run, records=tuple(record for record in run.records if record.id != OURS)),
        f"missing: {OURS}, which profile small asks for",
    ),
    "missing of the backend's own": (
        lambda run: replace(run, records=tuple(record for record in run.records if record.id != VENDORS)),
        f"missing: {VENDORS}, which profile small asks for",
    ),
    "format": (
        changing(VENDORS, lambda cell: replace(cell, format="bf17", id=cell.id.replace("bf16", "bf17"))),
        "format: bf17: no kernel is run in it",
    ),
    "backend": (
        changing(VENDORS, lambda cell: replace(cell, backend="zzz", id=cell.id.replace("cpu-", "zzz-"))),
        "backend: unknown backend 'zzz'",
    ),
    "nothing ran": (
        lambda run: replace(run, records=tuple(map(left_out, run.records))),
        "0 of 10 cells ran; profile small asks for 90% of them",
    ),
    "a cell of the emulation that did not run": (
        changing(OURS, left_out),
        f"{OURS}: skipped (no device), and the emulation can run it",
    ),
    "no heads": (changing(DEVICE, lambda cell: replace(cell, heads=0)), f"{DEVICE}: heads: 0, and there is a result"),
    "another command": (
        changing(DEVICE, lambda cell: replace(cell, command="rm -rf /")),
        f"{DEVICE}: command: not one that runs the cell again",
    ),
    "an excuse for nothing": (
        changing(DEVICE, lambda cell: replace(cell, excused="known")),
        f"{DEVICE}: excused: and nothing fell",
    ),
    "garbage for a plan": (
        changing(VENDORS, lambda cell: replace(cell, plan="x")),
        f"{VENDORS}: plan: unknown plan 'x'",
    ),
    "dirty": (
        lambda run: replace(run, platform={**run.platform, "commit": f"{COMMIT}-dirty"}),
        f"platform.commit: {COMMIT}-dirty: files differ from the commit",
    ),
    "no checkout": (
        lambda run: replace(run, platform={**run.platform, "commit": None}),
        "platform.commit: unknown: run the suite from a git checkout or an installed wheel",
    ),
    "edited wheel": (
        lambda run: replace(run, platform={**run.platform, "commit": None, "wheel": f"{WHEEL}-dirty"}),
        f"platform.wheel: {WHEEL}-dirty: files differ from the wheel; install it anew",
    ),
    "no commit": (
        lambda run: replace(run, platform={**run.platform, "commit": "xyz"}),
        "platform.commit: 'xyz': not a commit's 40 hexadecimal digits",
    ),
    "interrupted": (lambda run: replace(run, complete=False), "complete: the run was interrupted"),
    "heads": (
        lambda run: replace(run, options={**run.options, "heads": "32"}),
        "options.heads: 32, profile small asks for 256",
    ),
}  # fmt: skip


def predicted_otherwise(record: Record) -> Record:
    """As if the plan had predicted a bias that is 0.01 ulp further off, well within the margin."""
    bias = record.measures["bias"]
    assert isinstance(bias, Estimate)
    assert bias.mean is not None
    measures = {"predicted_bias": Estimate(bias.mean - 0.01, 0.01), "prediction_difference": Estimate(0.01, 0.001)}
    return replace(record, measures={**record.measures, **measures})


# What contradicts nothing in its own file: the emulation does.
RECOMPUTED: Mapping[str, tuple[Callable[[Run], Run], str]] = {
    "digest of the emulation": (changing(OURS, lambda cell: replace(cell, digest="0" * 16)), f"{OURS}: digest: 0000"),
    "a measure of the emulation": (measured(OURS, max_ulps=0.8), f"{OURS}: measures.max_ulps: 0.8, recomputed 0.9"),
    "heads without end": (
        changing(DEVICE, lambda cell: replace(cell, heads=10**12)),
        f"{DEVICE}: heads: 1000000000000, and a cell draws at most 2048",
    ),
    "an error where bits are equal": (
        measured("cpu-flash@paper-no_tail-bf16", rms_ulps=0.2),
        "cpu-flash@paper-no_tail-bf16: measures.rms_ulps: 0.2, recomputed 0.",
    ),
    "another prediction": (changing(DEVICE, predicted_otherwise), f"{DEVICE}: measures.predicted_bias: "),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), FORGED.values(), ids=FORGED)
def test_an_edited_record_with_a_digest_of_its_own_is_found_out(
    change: Callable[[Run], Run], message: str, stated: Path, verified: Callable[..., tuple[int, list[str]]]
) -> None:
    forge(stated, change)
    code, lines = verified(stated, "--sample", "0")
    assert code == 1
    assert any(message in line for line in lines), lines
    assert all(line.startswith("refused: ") for line in lines)
    assert not [line for line in lines if "SHA-256" in line or "not what the records come to" in line]


@pytest.mark.parametrize(("change", "message"), RECOMPUTED.values(), ids=RECOMPUTED)
def test_a_record_made_up_without_a_contradiction_is_found_out_where_it_is_in_the_sample(
    change: Callable[[Run], Run], message: str, stated: Path, verified: Callable[..., tuple[int, list[str]]]
) -> None:
    forge(stated, change)
    assert verified(stated, "--sample", "0")[0] == 0
    code, lines = verified(stated, "--sample", "99")
    assert code == 1
    assert any(message in line for line in lines), lines


def test_digests_of_a_cell_that_agrees_with_the_emulation_to_the_bit_are_the_emulations(ran: Run) -> None:
    record = next(cell for cell in ran.records if cell.id == "cpu-flash@paper-no_tail-bf16")
    assert record.number("equal_bits") == 1.0
    assert not list(rejudging.recomputed(record, 256))
    assert next(rejudging.recomputed(replace(record, digest="f" * 16), 256)).startswith("digest: ffffffffffffffff, and")


SEEDS = 12  # over which every scripted case has its turn
OF_RUNS = [case for case in SCRIPTED if not case.on_request]
NAN_OF_TWO_SIGNS = (9, 10, 12)  # seeds at which they came of nan_in_q


def round_trip(seed: int, kernels: Sequence[Kernel]) -> Iterator[tuple[Case, Kernel]]:
    """The cases whose turn it is at a seed, with the kernel whose turn it is; all where NaN came of two signs."""
    for kernel in kernels if seed in NAN_OF_TWO_SIGNS else ():
        yield next(case for case in SCRIPTED if case.name == "nan_in_q"), kernel
    for turn, case in enumerate(OF_RUNS[seed % SEEDS :: SEEDS], start=seed):
        able = [kernel for kernel in kernels if kernel.unsuited(case.formats(BF16)) is None]
        if case.only_claimed:
            able = [kernel for kernel in able if case.claim_about(kernel.declaration)] or able
        yield case, able[turn % len(able)]


@pytest.mark.parametrize("seed", range(1, SEEDS + 1))
@pytest.mark.parametrize("name", ["emulation", "cpu", "interpreter"])
def test_what_a_device_has_come_to_contradicts_nothing(name: str, seed: int) -> None:
    slow = name == "interpreter"
    if slow:
        pytest.importorskip("triton")
    backend, bench, verifying = BACKENDS[name], Workbench(Settings(seed, 16)), Workbench(Settings(seed, 16))
    backend.set_up()
    named = () if slow else ("stabilized@fused", "standard")
    kernels = (*map(composed_kernel, named), *backend.vendor_kernels())
    recomputed = 0
    for case, kernel in islice(round_trip(seed, kernels), 2 if slow else None):
        record = run_cell(Cell(backend, kernel, Call(case), BF16), bench)
        assert list(rejudging.contradictions(record)) == [], record.id
        if rejudging.recomputable(record):
            recomputed += 1
            assert list(rejudging.recomputed(record, 16, verifying)) == [], record.id
    assert recomputed


def edited(folder: Path, name: str, old: str, new: str) -> None:
    path = folder / name
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("records-1.json", '"met": true', '"met": true ', "records-1.json: SHA-256 is not as in statement.json"),
        ("statement.json", '"profile_hash": "', '"profile_hash": "0', "statement.json: of profile small, 0"),
        (
            "statement.json",
            '"profile": "small"',
            '"profile": "large"',
            "statement.json: unknown profile 'large': known",
        ),
        ("statement.json", '"result": "held"', '"result": "fell"', "statement.json: result: not what the records come"),
        ("statement.json", '"machine": "', '"machine": "x', "statement.json: platform: not what the records come to"),
        ("statement.json", '"cells": 10', '"cells": 11', "statement.json: files: cells: not what the records come to"),
        ("summary.md", "10 cells", "9 cells", "summary.md: not what the records come to"),
        ("summary.html", "10 cells", "9 cells", "summary.html: not what the records come to"),
    ],
)
def test_what_was_edited_by_hand_is_one_line(
    name: str, old: str, new: str, message: str, stated: Path, verified: Callable[..., tuple[int, list[str]]]
) -> None:
    edited(stated, name, old, new)
    code, (line,) = verified(stated, "--sample", "0")
    assert code == 1
    assert line.startswith(f"refused: {message}")


@pytest.mark.parametrize("name", ["../records-1.json", "records-1.json/../../secret.json", "statement.json"])
def test_a_file_elsewhere_is_not_read(name: str, stated: Path, verified: Callable[..., tuple[int, list[str]]]) -> None:
    edited(stated, "statement.json", '"name": "records-1.json"', f'"name": "{name}"')
    code, lines = verified(stated, "--sample", "0")
    assert code == 1
    assert "refused: records-1.json: not a file of the statement" in lines
    assert not any("secret" in line and "SHA" in line for line in lines)


def test_a_statement_of_another_profile_than_the_wanted_one_is_refused(
    stated: Path, verified: Callable[..., tuple[int, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = {**profiles.PROFILES, "other": profiles.Selector("one case", frozenset({"no_tail"}), KERNELS)}
    for module in (profiles, program):
        monkeypatch.setattr(module, "PROFILES", both)
    assert verified(stated, "--profile", "small", "--sample", "0")[0] == 0
    message = "refused: statement.json: of profile small, not of other"
    assert verified(stated, "--profile", "other", "--sample", "0") == (1, [message])


def test_other_files_and_lost_ones_are_found(stated: Path, verified: Callable[..., tuple[int, list[str]]]) -> None:
    (stated / "note.txt").write_text("x")
    (stated / "summary.md").unlink()
    expected = ["refused: note.txt: not a file of the statement", "refused: summary.md: missing"]
    assert verified(stated, "--sample", "0") == (1, expected)
    (stated / "records-1.json").unlink()
    assert "refused: records-1.json: missing" in verified(stated, "--sample", "0")[1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("", "empty"),
        ("[]", "Expected `object`, got `array`"),
        ('{"schema": 7}', "Object missing required field `profile`"),
        ('{"schema": 2}', "schema: 2 is not 7, the one that this tiebreak reads: make the file anew"),
        ("{", "not JSON"),
    ],
)
def test_a_statement_that_is_none_is_one_line_and_exit_code_2(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "statement.json").write_text(content)
    assert main(["statement", "--verify", str(tmp_path)]) == 2
    output = capsys.readouterr()
    assert output.err.count("\n") == 1
    assert message in output.err


def failing(keep: Callable[..., Path], ran: Run) -> Path:
    """A run in which a kernel of the backend's own did not repeat to the bit, as it says, excused in the run itself."""
    (record,) = (cell for cell in ran.records if cell.id == VENDORS)
    answers = {**record.answers, "repeatable": Answer(False, "the same bits twice", "other bits")}
    return keep({VENDORS: {"answers": answers, "outcome": "fell", "excused": "so it is in baseline.json"}})


def state(path: Path, folder: Path, waivers: Path | None = None) -> int:
    words = ["statement", str(path), "-o", str(folder), "--profile", "small"]
    return main([*words, *([] if waivers is None else ["--waivers", str(waivers)])])


def test_what_fell_makes_the_statement_fall_whatever_excused_it_in_the_run(
    keep: Callable[..., Path], ran: Run, tmp_path: Path, verified: Callable[..., tuple[int, list[str]]]
) -> None:
    folder = tmp_path / "handed_in"
    assert state(failing(keep, ran), folder) == 1
    assert json.loads((folder / "statement.json").read_text())["counts"]["fell"] == 1
    assert verified(folder, "--sample", "0") == (1, [f"refused: fell, and no waiver: {VENDORS}: other bits"])


def test_a_waiver_covers_what_fell_until_its_last_day(
    keep: Callable[..., Path], ran: Run, tmp_path: Path, verified: Callable[..., tuple[int, list[str]]]
) -> None:
    folder, waivers = tmp_path / "handed_in", tmp_path / "waivers.toml"
    waivers.write_text(WAIVER)
    assert state(failing(keep, ran), folder, waivers) == 0
    assert "issue 12" in (folder / "summary.md").read_text()
    assert verified(folder, "--sample", "0", "--as-of", "2999-01-31")[0] == 0
    message = "refused: waiver cpu-sdpa_math-*, repeatable: expired on 2999-01-31"
    assert verified(folder, "--sample", "0", "--as-of", "2999-02-01") == (1, [message])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("expires = 2999-01-31\n", ""), "expected[0].expires: missing: a waiver of a statement has a last day"),
        (("2999-01-31", '"2999-01-31"'), "expected[0].expires: expected a day such as 2027-06-30, without quotes"),
        (("2999-01-31", "2999-01-31T10:00:00"), "expected[0].expires: expected a day such as 2027-06-30"),
        (("2999-01-31", "2020-01-31"), "waiver cpu-sdpa_math-*, repeatable: expired on 2020-01-31"),
        (("repeatable", "bound"), "waiver cpu-sdpa_math-*, bound: covers nothing: every cell that it names meets"),
        (("sdpa_math", "nothing"), "waiver cpu-nothing-*, repeatable: covers nothing"),
    ],
)
def test_a_waiver_that_does_not_hold_is_refused_and_nothing_is_written(
    change: tuple[str, str],
    message: str,
    keep: Callable[..., Path],
    ran: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    waivers = tmp_path / "waivers.toml"
    waivers.write_text(WAIVER.replace(*change))
    path = failing(keep, ran)
    before = sorted(tmp_path.iterdir())
    assert state(path, tmp_path / "handed_in", waivers) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_a_waiver_slipped_in_later_is_found_to_cover_nothing(
    stated: Path, verified: Callable[..., tuple[int, list[str]]]
) -> None:
    waiver = {"cells": "cpu-*", "check": "claim", "reason": "x", "expires": "2999-01-31"}
    plain = json.loads((stated / "statement.json").read_text())
    (stated / "statement.json").write_text(json.dumps(plain | {"waivers": [waiver]}))
    code, lines = verified(stated, "--sample", "0")
    assert code == 1
    assert any("waiver cpu-*, claim: covers nothing" in line for line in lines)


@pytest.mark.parametrize(
    ("changes", "fields", "message"),
    [
        ({OURS: None}, {}, f"missing: {OURS}, which profile small asks for"),
        ({}, {"complete": False}, "complete: the run was interrupted"),
        ({OURS: {"outcome": "fell"}}, {}, f"{OURS}: outcome: fell, and its answers come to held"),
        ({}, {"options": {"seed": "2", "heads": "256"}}, "options.seed: 2, profile small asks"),
    ],
)
def test_records_that_are_no_statement_are_refused_in_one_line(
    changes: Mapping[str, Any],
    fields: Mapping[str, Any],
    message: str,
    keep: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = keep(changes, **fields)
    assert state(path, tmp_path / "handed_in") == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == [path]


def test_two_files_make_one_statement_if_no_cell_is_in_both(
    keep: Callable[..., Path], ran: Run, tmp_path: Path, verified: Callable[..., tuple[int, list[str]]],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    on_cpu = {record.id: None for record in ran.records if record.backend != "cpu"}
    emulated = {record.id: None for record in ran.records if record.backend == "cpu"}
    first, second, whole = keep(on_cpu, "first"), keep(emulated, "second"), keep(None, "whole")
    words = ["-o", str(tmp_path / "handed_in"), "--profile", "small"]
    assert main(["statement", str(first), str(whole), *words]) == 2
    assert "a second record of this cell, the first is in" in capsys.readouterr().err
    assert main(["statement", str(first), str(first), *words]) == 2
    assert "the same run as in" in capsys.readouterr().err
    other = keep(emulated, "other", platform={**ran.platform, "cpu": "another"})
    assert main(["statement", str(first), str(other), *words]) == 2
    assert "platform.cpu: 'another'" in capsys.readouterr().err
    assert main(["statement", str(first), str(second), *words]) == 0
    assert verified(tmp_path / "handed_in", "--sample", "0")[0] == 0


def test_a_folder_with_something_else_is_left_alone_and_an_older_statement_is_replaced(
    stated: Path, keep: Callable[..., Path], ran: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert state(failing(keep, ran), stated) == 1
    assert json.loads((stated / "statement.json").read_text())["result"] == "fell"
    (stated / "thesis.tex").write_text("years of work")
    capsys.readouterr()
    assert state(keep(), stated) == 2
    assert "there is something else in it" in capsys.readouterr().err
    assert (stated / "thesis.tex").read_text() == "years of work"
    assert sorted(path.name for path in stated.parent.iterdir()) == ["handed_in", "last.json"]


def test_a_folder_that_cannot_be_written_leaves_nothing(
    keep: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = keep()

    def full(self: Path, content: bytes) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "write_bytes", full)
    assert state(path, tmp_path / "handed_in") == 2
    assert "No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]


def test_a_users_kernel_has_every_kind_of_input_and_the_suites_kernels_need_not_be_there(
    keep: Callable[..., Path], ran: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    verified: Callable[..., tuple[int, list[str]]],
) -> None:  # fmt: skip
    others = {record.id: None for record in ran.records if record.kernel != "sdpa_math"}
    options = {"seed": "1", "heads": "256", "kernel": "mine.py:sdpa_math"}
    assert state(keep({**others, VENDORS: None}, options=options), tmp_path / "handed_in") == 2
    assert f"missing: {VENDORS}" in capsys.readouterr().err
    assert state(keep(others, options=options), tmp_path / "handed_in") == 0
    plain = json.loads((tmp_path / "handed_in" / "statement.json").read_text())
    assert (plain["kernels"], plain["users"]) == ({"cpu": ["sdpa_math"]}, ["sdpa_math"])
    assert verified(tmp_path / "handed_in", "--sample", "0")[0] == 0


def test_the_sample_is_drawn_by_its_seed(ran: Run) -> None:
    one, again, other = (rejudging.sample(list(ran.records), 4, seed) for seed in (1, 1, 2))
    assert one == again != other
    assert len(rejudging.sample(list(ran.records), 99, 1)) == 10


def test_a_day_can_be_named(stated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check = program.Verification(stated, None, date(2026, 1, 1), 0, 1)
    assert check.findings() == []
    assert main(["statement", "--verify", str(stated), "--as-of", "soon"]) == 2
    assert "expected a day such as 2027-06-30" in capsys.readouterr().err
