"""Statements: what they refuse to be, and what verifying finds of one that was made up."""

import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from msgspec.structs import replace
from torch import Tensor

from tiebreak.backends.backend import CPU, EMULATION, Backend
from tiebreak.backends.platform import describe
from tiebreak.backends.registry import BACKENDS
from tiebreak.cases import runner
from tiebreak.cases.case import Case
from tiebreak.cases.feature_cases import EVERY
from tiebreak.defects import mutations
from tiebreak.defects.mutations import consistent_edits, found, leaves, name_of, plain_of, unnoticed
from tiebreak.kernels.external import external_kernel
from tiebreak.kernels.formats import BF16, Format
from tiebreak.kernels.kernel import Kernel
from tiebreak.kernels.roster import composed_kernel
from tiebreak.laboratory.statement import command as program
from tiebreak.laboratory.statement import format as statements
from tiebreak.laboratory.statement import profiles, verification
from tiebreak.laboratory.statement.verification import cells_and_faults, recomputed, sample
from tiebreak.matrix import measures, options
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.experiments import kinds
from tiebreak.matrix.experiments.call import OneCall
from tiebreak.matrix.record_collector import described
from tiebreak.matrix.run import run_cell
from tiebreak.matrix.selection import Selection, cells
from tiebreak.matrix.workbench import CaseBench, Settings, Workbench
from tiebreak.programs.files import export, judge
from tiebreak.reports.cli import main
from tiebreak.reports.gate.consistency import differing
from tiebreak.reports.records import store
from tiebreak.reports.records.record import (
    SKIPPED,
    Answer,
    CaseRecord,
    CheckRecord,
    Estimate,
    ExperimentRecord,
    Explanation,
    FitRecord,
    HistogramRecord,
    Narrowing,
    PlanRecord,
    Record,
    Run,
)
from tiebreak.reports.schemas import schema_of

CASES = ("tied_maxima[k=2]", "no_tail")
KERNELS = ("flash@paper", "fair")
BASELINE = Path(__file__).parents[2] / "reports" / "baselines" / "emulation.json"
COMMIT = "c" * 40
WHEEL = f"1.0 sha256:{'a' * 64}"
OURS = "emulation-flash@paper-tied_maxima[k=2]-bf16"
DEVICE = "cpu-flash@paper-tied_maxima[k=2]-bf16"
VENDORS = "cpu-sdpa_math-no_tail-bf16"
KERNEL = """
def mine(q, k, v, *, causal=False, scale=None):
    scores = q.float() @ k.float().mT * scale
    return (scores.softmax(-1) @ v.float()).to(q.dtype)
"""
Calls = Callable[..., tuple[int, list[str]]]
Keep = Callable[..., Path]
WAIVER = '[[expected]]\ncells = "cpu-sdpa_math-*"\ncheck = "bound"\nreason = "issue 12"\nexpires = 2999-01-31\n'


def made(kernels: Sequence[tuple[Backend, Kernel]], kernel: str | None, name: str) -> Run:
    """A run of some kernels on both cases, and of one's own called in another way."""
    offered = {each.name: each for each in kinds()["call"].offered(None, cases_named=True)}
    asked = [*(offered[case] for case in CASES), *(kinds()["usage"].experiments[:1] if kernel else ())]
    cells = [Cell(*pair, each, BF16) for each in asked for pair in kernels]
    bench = Workbench(Settings())
    platform = describe() | {"commit": COMMIT, "fingerprint": {"cpu": {"matmul_subnormals": "kept"}}}
    platform |= {"evidence": {cell.backend.name: cell.backend.evidence for cell in cells}}
    typed = {"seed": "1", "heads": "256", "kernel": kernel, "dtype": "bf16",
             "cases": ",".join(each.name for each in asked)}  # fmt: skip
    narrowed = options.narrowing(options.stated(typed), cells, ())
    whole = Run(platform, typed, tuple(run_cell(cell, bench) for cell in cells), narrowing=narrowed, run=name * 32)
    return described(whole, {cell.id: cell for cell in cells})


@pytest.fixture(scope="module")
def ran() -> Run:
    """Two cases on two backends: the two kernels of a small profile, and one of the backend's own."""
    kernels = [(EMULATION, EMULATION.kernel(name)) for name in KERNELS]
    return made([*kernels, *((CPU, CPU.kernel(name)) for name in (*KERNELS, "sdpa_math"))], None, "a")


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A kernel of one's own on the same cases."""
    path = tmp_path_factory.mktemp("users") / "mine.py"
    path.write_text(KERNEL)
    kernel = external_kernel(f"{path}:mine", "flash@fp32_inside")
    kernel = dataclasses.replace(kernel, origin=("--kernel", "mine.py:mine"))
    return made([(CPU, kernel)], "mine.py:mine", "b")


@pytest.fixture(autouse=True)
def small_profile(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A profile of those cells."""
    monkeypatch.setattr(OneCall, "tags", property(lambda call: frozenset({call.name})))
    asks = {"small": profiles.Selector("two cases", frozenset(CASES), KERNELS, recomputed=2)}
    for module in (profiles, program):
        monkeypatch.setattr(module, "PROFILES", asks)
    profiles.profile.cache_clear()
    yield
    profiles.profile.cache_clear()


@pytest.fixture(scope="module")
def computed() -> tuple[dict[str, Record], dict[str, CaseBench]]:
    """What the emulation has made of cells and cases so far."""
    return {}, {}


@pytest.fixture
def once(computed: tuple[dict[str, Record], dict[str, CaseBench]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulation computes every cell of those runs once, however often they are verified."""
    kept, benches = computed

    def run_once(cell: Cell, bench: Workbench) -> Record:
        if cell.id not in kept:
            kept[cell.id] = run_cell(cell, bench)
        return kept[cell.id]

    def case_once(bench: Workbench, case: Case, fmt: Format) -> CaseBench:
        return benches.setdefault(case.name, CaseBench(case, fmt, bench.settings))

    monkeypatch.setattr(verification, "run_cell", run_once)
    monkeypatch.setattr(Workbench, "case", case_once)


@pytest.fixture
def keep(ran: Run, tmp_path: Path) -> Keep:
    """Writes the run, some of its records otherwise."""

    def write(records: Mapping[str, Mapping[str, Any] | None] | None = None, name: str = "last", **fields: Any) -> Path:
        changes = records or {}
        changed = (replace(record, **(changes.get(record.id) or {})) for record in ran.records)
        kept = tuple(record for record in changed if changes.get(record.id, {}) is not None)
        path = tmp_path / f"{name}.json"
        cells = {each.record.id: each.cell for each in cells_and_faults(ran, profiles.profile("small"))[0]}
        store.write(replace(described(replace(ran, records=kept), cells), run=name * 8, **fields), path)
        return path

    return write


@pytest.fixture
def called(capsys: pytest.CaptureFixture[str]) -> Calls:
    """Calls the verb; the exit code and the lines on either stream."""

    def call(*words: str | Path) -> tuple[int, list[str]]:
        capsys.readouterr()
        code = main(["statement", *map(str, words)])
        output = capsys.readouterr()
        assert not output.err or not output.out
        return code, (output.out + output.err).splitlines()

    return call


@pytest.fixture
def verified(called: Calls, once: None) -> Calls:
    """Verifies a statement."""
    return lambda *words: called("--verify", *words)


@pytest.fixture
def stating(called: Calls, tmp_path: Path) -> Calls:
    """Makes a statement of files, with more words, in the folder `handed_in`."""
    return lambda *words: called(*words, "-o", tmp_path / "handed_in", "--profile", "small")


@pytest.fixture
def stated(keep: Keep, stating: Calls, tmp_path: Path) -> Path:
    """A statement that holds."""
    assert stating(keep())[0] == 0
    return tmp_path / "handed_in"


def forge(folder: Path, change: Callable[[Run], Run]) -> None:
    """Change the records, and make all else that the statement says as if they had been so."""
    path = folder / "records-1.json"
    store.write(change(store.read(path)), path)
    asked = profiles.profile("small")
    made = statements.statement_of(
        {path.name: path.read_bytes()}, asked, store.load(folder / "statement.json", statements.Statement).waivers
    )
    (folder / "statement.json").write_text(store.as_text(made))
    (folder / "summary.md").write_text(statements.summary(made, [store.read(path)], asked), encoding="utf-8")


def left_out(record: Record) -> Record:
    """As if it had been skipped."""
    return replace(record, outcome=SKIPPED, skipped="no device", shown=None, verdict=None, tied=None, in_training=None,
                   measures={}, answers={}, evidence={}, digest=None, heads=0)  # fmt: skip


def changing(name: str, change: Callable[[Record], Record]) -> Callable[[Run], Run]:
    return lambda run: replace(
        run, records=tuple(change(record) if record.id == name else record for record in run.records)
    )


def test_a_statement_of_a_run_verifies_and_says_what_nobody_can_check(stated: Path, verified: Calls) -> None:
    assert sorted(path.name for path in stated.iterdir()) == ["records-1.json", "statement.json", "summary.md"]
    summary = (stated / "summary.md").read_text(encoding="utf-8")
    for told in (describe()["cpu"], COMMIT, "10 cells: ", "two cases", "sdpa_math", "flash@paper", "1 of 1"):
        assert told in summary
    code, (told, *unchecked) = verified(stated, "--sample", "99")
    assert code == 0
    assert told.startswith("verified: profile small, 10 cells: ")
    assert "of 10 cells that the emulation can tell of 10 recomputed (4 its own, 6 predictions of a device's)" in told
    device, as_stated = unchecked
    assert device == "NOT checked: that the records came from the device that they name; that its bits repeat"
    assert as_stated.startswith("NOT checked, as it is stated: platform, fingerprints, options, ")
    assert "2 recomputed" in verified(stated)[1][0]
    assert verified(stated, "--sample", "1") == (1, ["refused: 1 cell recomputed; profile small asks for 2"])


def test_what_an_installed_wheel_ran_is_a_statement_and_fits_the_published_schema(
    keep: Keep, ran: Run, tmp_path: Path, stating: Calls, verified: Calls
) -> None:
    folder = tmp_path / "handed_in"
    assert stating(keep(platform={**ran.platform, "commit": None, "wheel": WHEEL}))[0] == 0
    plain = json.loads((folder / "statement.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema_of("statement")).validate(plain)
    assert f"wheel | {WHEEL}" in re.sub(" +", " ", (folder / "summary.md").read_text(encoding="utf-8"))
    assert verified(folder)[0] == 0


def predicted_otherwise(record: Record) -> Record:
    """As if the plan had predicted a bias that is 0.01 ulp further off, well within the margin."""
    bias = record.measures["bias"]
    assert isinstance(bias, Estimate)
    assert bias.mean is not None
    measures = {"predicted_bias": Estimate(bias.mean - 0.01, 0.01), "prediction_difference": Estimate(0.01, 0.001)}
    return replace(record, measures={**record.measures, **measures})


def in_table(table: str, name: str, value: Any) -> Callable[[Run], Run]:
    """With another entry in one of a run's tables."""
    return lambda run: replace(run, **{table: {**getattr(run, table), name: value}})


def telling(run: Run, name: str, **evidence: Any) -> Run:
    """With other evidence of a cell."""
    return changing(name, lambda cell: replace(cell, evidence={**cell.evidence, **evidence}))(run)


def unbound(run: Run) -> Run:
    """As if a cell that is beyond its bound were within it, and the check had no limit."""
    checks = {**run.checks, "bound": replace(run.checks["bound"], limits=())}
    number = {"error_over_bound": 102.0}
    made = changing(VENDORS, lambda cell: replace(cell, measures={**cell.measures, **number}))(run)
    return replace(made, checks=checks)


NO_BINS = HistogramRecord(-2.0, 0.0625, (), 0)
#: What a record that was made up is found out by: most go together with all else that the file says.
FORGED: Mapping[str, Callable[[Run], Run]] = {
    # An answer, with the outcome that follows.
    f"{DEVICE}: answers.claim: failed, and its measures say passed": changing(
        DEVICE,
        lambda cell: replace(cell, outcome="failed", answers={**cell.answers, "claim": Answer(False, "biased", "no")}),
    ),
    # A bound that is not asked for.
    f"{VENDORS}: answers.bound: not asked, and such a cell is: largest error is 3 times": changing(
        VENDORS,
        lambda cell: replace(cell, measures={**cell.measures, "error_over_bound": 3.0},
                             answers={"claim": cell.answers["finite"]}),
    ),
    f"missing: {VENDORS}, which profile small asks for": lambda run: replace(
        run, records=tuple(record for record in run.records if record.id != VENDORS)
    ),
    f"{VENDORS.replace('bf16', 'bf17')}: format: bf17: the suite has no such format": changing(
        VENDORS, lambda cell: replace(cell, format="bf17", id=cell.id.replace("bf16", "bf17"))
    ),
    "0 of 10 cells ran; profile small asks for 90% of them": lambda run: replace(
        run, records=tuple(map(left_out, run.records))
    ),
    f"{DEVICE}: skipped: no device, and it can be run": changing(DEVICE, left_out),
    f"{VENDORS}: excused: and nothing failed": changing(VENDORS, lambda cell: replace(left_out(cell), excused="known")),
    f"{DEVICE}: heads: 0, and a cell draws 256, 512, 1024, 2048": changing(DEVICE, lambda cell: replace(cell, heads=0)),
    f"{DEVICE}: command: rm -rf /, and its cell has pytest tests/matrix --backend cpu --kernels flash@paper": changing(
        DEVICE, lambda cell: replace(cell, command="rm -rf /")
    ),
    "command: pytest /x tests/matrix: not where the cells are": lambda run: replace(
        run, records=tuple(replace(each, command=each.command.replace("pytest", "pytest /x")) for each in run.records)
    ),
    "complete: the run was interrupted": lambda run: replace(run, complete=False),
    f"{OURS}: says failed, and its answers come to passed": changing(
        OURS, lambda cell: replace(cell, outcome="failed")
    ),
    "options.seed: 2, profile small asks": lambda run: replace(run, options={**run.options, "seed": "2"}),
    "checks.claim: not as the suite describes it": lambda run: replace(
        run, checks={**run.checks, "claim": replace(run.checks["claim"], judges=False)}
    ),
    # Tables of a run that nothing else in it depends on.
    "checks.bound: not as the suite describes it": unbound,
    "checks.contract: not as the suite describes it": in_table("checks", "contract", CheckRecord("kept")),
    "measures.bias: not as the suite describes it": lambda run: in_table(
        "measures", "bias", replace(run.measures["bias"], margin=9.0)
    )(run),
    "cases.no_tail: not as the suite describes it": in_table("cases", "no_tail", CaseRecord("else")),
    "experiments.call: not as the suite describes it": in_table("experiments", "call", ExperimentRecord("else")),
    "plans.flash@paper: not as the suite describes it": in_table("plans", "flash@paper", PlanRecord("flash", fix=True)),
    "plans.dithered@paper: not as the suite describes it": in_table("plans", "dithered@paper", PlanRecord("dithered")),
    "explanations.cpu-sdpa_math: not as the suite describes it": in_table(
        "explanations", "cpu-sdpa_math", Explanation("follows", ("flash@paper",), 2, 1.0)
    ),
    "narrowing: case: not what the options come to": lambda run: replace(run, narrowing=run.narrowing[1:]),
    "narrowing: case: random: not of this run": lambda run: replace(
        run, narrowing=(replace(run.narrowing[0], names=(*run.narrowing[0].names, "random")), *run.narrowing[1:])
    ),
    "narrowing: its cells are not those of the records": lambda run: replace(
        run, narrowing=(*run.narrowing, Narrowing(("-k tied",), "id", (*(each.id for each in run.records), "cpu-x")))
    ),
    "options: --fair means nothing alone: it needs --kernel TARGET": in_table("options", "fair", True),
    "platform.evidence.cpu: bits on this GPU, and the suite says bits on this machine": lambda run: replace(
        run, platform={**run.platform, "evidence": {**run.platform["evidence"], "cpu": "bits on this GPU"}}
    ),
    f"{OURS}: evidence.histogram": lambda run: telling(run, OURS, histogram=NO_BINS),
    f"{OURS}: evidence.assumed: recomputed, there is none": lambda run: telling(run, OURS, assumed="a card"),
    f"{DEVICE}: evidence.histogram": lambda run: telling(run, DEVICE, histogram=NO_BINS),
    "platform.commit: unknown: run the suite from a git checkout or an installed wheel": lambda run: replace(
        run, platform={**run.platform, "commit": None}
    ),
    f"platform.wheel: {WHEEL}-dirty: files differ from the wheel; install it anew": lambda run: replace(
        run, platform={**run.platform, "commit": None, "wheel": f"{WHEEL}-dirty"}
    ),
    # What contradicts nothing in its own file: the emulation does.
    f"{OURS}: digest: 0000000000000000, recomputed ": changing(OURS, lambda cell: replace(cell, digest="0" * 16)),
    "cpu-flash@paper-no_tail-bf16: measures.rms_ulps: 0.2, recomputed 0.": changing(
        "cpu-flash@paper-no_tail-bf16", lambda cell: replace(cell, measures={**cell.measures, "rms_ulps": 0.2})
    ),
    f"{DEVICE}: measures.predicted_bias.mean: ": changing(DEVICE, predicted_otherwise),
}  # fmt: skip


def explained_otherwise(run: Run) -> Run:
    """A kernel's evidence, and the explanation that follows from it."""
    fits = {"fits": {"flash@fused": FitRecord(0.0, 0.01, 0.99)}}
    made = replace(changing(VENDORS, lambda cell: replace(cell, evidence={**cell.evidence, **fits}))(run))
    follows = Explanation("follows", ("flash@fused",), 1, 0.99)
    return replace(made, explanations={"cpu-sdpa_math": follows},
                   plans={**run.plans, "flash@fused": PlanRecord("flash")})  # fmt: skip


def typed_otherwise(run: Run) -> Run:
    """Other words, and what they come to."""
    typed = {**run.options, "cases": "*"}
    return replace(run, options=typed, narrowing=(Narrowing(("--cases *",), "case", ("*",)), *run.narrowing[1:]))


#: What nobody can tell from a statement: a word of what verifying says that it takes as it is stated.
STATED: Mapping[str, Callable[[Run], Run]] = {
    "platform": lambda run: replace(run, platform={**run.platform, "memory_gib": 1e6, "cpu": "a faster one"}),
    "fingerprints": lambda run: replace(run, platform={**run.platform, "fingerprint": {"cpu": {"matmul": "rne"}}}),
    "options": typed_otherwise,
    "why a backend": in_table("unavailable", "cuda", "stolen"),
    "seconds": in_table("seconds", OURS, 1e-9),
    "evidence": explained_otherwise,
}


@pytest.mark.parametrize("word", STATED)
def test_what_nobody_can_tell_is_named(word: str, stated: Path, verified: Calls) -> None:
    forge(stated, STATED[word])
    code, lines = verified(stated, "--sample", "99")
    assert (code, word in lines[2]) == (0, True), lines


@pytest.mark.parametrize("name", ["records-1.json", "summary.md", "statement.json"])
def test_a_statement_has_regular_files_alone(name: str, stated: Path, verified: Calls) -> None:
    elsewhere = stated.parent / "elsewhere.json"
    (stated / name).rename(elsewhere)
    (stated / name).symlink_to(elsewhere)
    code, lines = verified(stated)
    if name == "statement.json":
        assert (code, len(lines), "a link" in lines[0]) == (2, 1, True)
        return
    expected = 1, f"refused: {name}: a link, or no regular file"
    assert (code, lines[0]) == expected
    (stated / name).unlink()
    os.mkfifo(stated / name)
    code, lines = verified(stated)
    assert (code, lines[0]) == expected


@pytest.mark.parametrize("message", FORGED)
def test_an_edited_record_with_a_digest_of_its_own_is_found_out(message: str, stated: Path, verified: Calls) -> None:
    forge(stated, FORGED[message])
    code, lines = verified(stated, "--sample", "99")
    assert code == 1
    assert any(message in line for line in lines), lines
    assert all(line.startswith("refused: ") for line in lines)
    assert not [line for line in lines if "SHA-256" in line or "not what the records come to" in line]


# The 16384 keys of decode_equal_keys take as long as all other cases together. What one recipe makes of several values,
# which stand in brackets, is computed alike: two of them stand for all.
STEMS: dict[str, list[Case]] = {}
for case in EVERY:
    if not case.on_request and case.name != "decode_equal_keys":
        STEMS.setdefault(case.name.partition("[")[0], []).append(case)
OF_RUNS = [case for cases in STEMS.values() for case in cases[:2]]
TURNS = 4  # over which every scripted recipe has its turn


@pytest.mark.parametrize("turn", range(TURNS))
@pytest.mark.parametrize("name", ["cpu", "interpreter"])
def test_what_a_device_has_come_to_contradicts_nothing(name: str, turn: int) -> None:
    slow, heads = name == "interpreter", 16
    if slow:
        pytest.importorskip("triton")
    backend, bench, verifying = BACKENDS[name], *(Workbench(Settings(turn + 1, heads)) for _ in range(2))
    backend.set_up()
    kernels = (*map(composed_kernel, () if slow else ("stabilized@fused", "standard")), *backend.vendor_kernels())
    cells: dict[str, Cell] = {}
    for place, case in enumerate(OF_RUNS[turn::TURNS][: 2 if slow else None]):
        able = [kernel for kernel in kernels if kernel.unsuited(case.formats(BF16)) is None]
        claimed = [kernel for kernel in able if not case.only_claimed or case.claim_about(kernel.declaration)]
        cell = Cell(backend, (claimed or able)[place % len(claimed or able)], OneCall(case), BF16)
        cells[cell.id] = cell
    records = tuple(run_cell(cell, bench) for cell in cells.values())
    run = described(Run({"evidence": {name: backend.evidence}}, {"seed": turn + 1, "heads": heads}, records), cells)
    known, problems = cells_and_faults(run, dataclasses.replace(profiles.profile("small"), seed=turn + 1, heads=heads))
    assert problems == []
    able_again = [each for each in known if each.is_recomputable]
    assert able_again
    assert [text for each in able_again for text in recomputed(each, verifying)] == []


def test_what_the_emulation_has_come_to_contradicts_nothing() -> None:
    kept = store.read(BASELINE)
    part = replace(kept, records=kept.records[::3], platform={"evidence": {"emulation": EMULATION.evidence}})
    known, _ = cells_and_faults(part, profiles.profile("small"))
    _, problems = cells_and_faults(
        described(part, {each.record.id: each.cell for each in known}), profiles.profile("small")
    )
    assert problems == []


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("records-1.json", '"passed": true', '"passed": true ', "records-1.json: SHA-256 is not as in statement.json"),
        ("statement.json", '"profile_hash": "', '"profile_hash": "0', "statement.json: of profile small, 0"),
        ("summary.md", "10 cells", "9 cells", "summary.md: not what the records come to"),
        # A file elsewhere is not read.
        *(
            ("statement.json", '"name": "records-1.json"', f'"name": "{name}"', "records-1.json: not a file of the")
            for name in ("../records-1.json", "records-1.json/../../secret.json", "statement.json")
        ),
    ],
)
def test_what_was_edited_by_hand_is_found(
    name: str, old: str, new: str, message: str, stated: Path, verified: Calls
) -> None:
    path = stated / name
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    code, lines = verified(stated)
    assert (code, lines[0].startswith(f"refused: {message}")) == (1, True)
    assert not any("secret" in line and "SHA" in line for line in lines)


def test_a_statement_of_another_profile_than_the_wanted_one_is_refused(
    stated: Path, verified: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = {**profiles.PROFILES, "other": profiles.Selector("one case", frozenset({"no_tail"}), KERNELS)}
    for module in (profiles, program):
        monkeypatch.setattr(module, "PROFILES", both)
    assert verified(stated, "--profile", "small")[0] == 0
    message = "refused: statement.json: of profile small, not of other"
    assert verified(stated, "--profile", "other") == (1, [message])


def test_other_files_and_lost_ones_are_found(stated: Path, verified: Calls) -> None:
    (stated / "note.txt").write_text("x")
    (stated / "summary.md").unlink()
    expected = ["refused: note.txt: not a file of the statement", "refused: summary.md: missing"]
    assert verified(stated) == (1, expected)
    (stated / "records-1.json").unlink()
    assert "refused: records-1.json: missing" in verified(stated)[1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ('{"schema": 7}', "Object missing required field `profile`"),
        (
            '{"schema": 7, "profile": "small", "profile_hash": "", "files": [],'
            ' "waivers": [{"cells": "x", "check": "claim", "reason": "slipped in later"}]}',
            "waivers[0].expires: missing",
        ),
        ('{"schema": 2}', "schema: 2 is not 7, the one that this tiebreak reads: make the file anew"),
    ],
)
def test_a_statement_that_is_none_is_one_line_and_exit_code_2(
    content: str | None, message: str, tmp_path: Path, verified: Calls
) -> None:
    if content is not None:
        (tmp_path / "statement.json").write_text(content)
    code, (line,) = verified(tmp_path)
    assert (code, message in line) == (2, True)


@pytest.fixture
def failing(keep: Keep, ran: Run) -> Path:
    """A run in which a kernel of the backend's own errs beyond its bound, as it says, excused in the run itself."""
    (record,) = (cell for cell in ran.records if cell.id == VENDORS)
    answers = {**record.answers, "bound": replace(record.answers["bound"], passed=False, why="too large")}
    measures = {**record.measures, "error_over_bound": 3.0}
    changed = {
        VENDORS: {"answers": answers, "measures": measures, "outcome": "failed", "excused": "so it is in baseline.json"}
    }
    return keep(changed, "failing")


def test_what_failed_makes_the_statement_fail_unless_a_waiver_covers_it_until_its_last_day(
    failing: Path, tmp_path: Path, stating: Calls, verified: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, waivers = tmp_path / "handed_in", tmp_path / "waivers.toml"
    waivers.write_text(WAIVER)
    assert stating(failing)[0] == 1
    assert "10 cells: 9 passed, 1 failed" in (folder / "summary.md").read_text()
    assert verified(folder) == (1, [f"refused: failed, and no waiver: {VENDORS}: too large"])
    assert stating(failing, "--waivers", waivers)[0] == 0
    assert "issue 12" in (folder / "summary.md").read_text()
    message = "refused: waiver cpu-sdpa_math-*, bound: expired on 2999-01-31"
    for today, expected in ((date(2999, 1, 31), 0), (date(2999, 2, 1), (1, [message]))):
        monkeypatch.setattr("tiebreak.reports.gate.expected.date", SimpleNamespace(today=lambda today=today: today))
        told = verified(folder)
        assert expected in (told, told[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("expires = 2999-01-31\n", ""), "expected[0].expires: missing: a waiver of a statement has a last day"),
        (("2999-01-31", "2020-01-31"), "waiver cpu-sdpa_math-*, bound: expired on 2020-01-31"),
        (("bound", "finite"), "waiver cpu-sdpa_math-*, finite: covers nothing: every cell that it names meets"),
        (("sdpa_math", "nothing"), "waiver cpu-nothing-*, bound: covers nothing"),
    ],
)
def test_a_waiver_that_does_not_hold_is_refused_and_nothing_is_written(
    change: tuple[str, str], message: str, failing: Path, tmp_path: Path, stating: Calls
) -> None:
    waivers = tmp_path / "waivers.toml"
    waivers.write_text(WAIVER.replace(*change))
    before = sorted(tmp_path.iterdir())
    code, (line,) = stating(failing, "--waivers", waivers)
    assert (code, message in line) == (2, True)
    assert sorted(tmp_path.iterdir()) == before


def test_two_files_make_one_statement_if_no_cell_is_in_both(
    keep: Keep, ran: Run, tmp_path: Path, stating: Calls, verified: Calls
) -> None:
    on_cpu = {record.id: None for record in ran.records if record.backend != "cpu"}
    emulated = {record.id: None for record in ran.records if record.backend == "cpu"}
    first, second, whole = keep(on_cpu, "first"), keep(emulated, "second"), keep(None, "whole")
    other = keep(emulated, "other", platform={**ran.platform, "cpu": "another"})
    for second_file, message in (
        (whole, "a second record of this cell, the first is in"),
        (first, "the same as in"),
        (other, "platform.cpu: 'another'"),
    ):
        code, (line,) = stating(first, second_file)
        assert (code, message in line) == (2, True)
    assert not (tmp_path / "handed_in").exists()
    assert stating(first, second)[0] == 0
    assert verified(tmp_path / "handed_in")[0] == 0


def test_a_folder_with_something_else_is_left_alone_and_an_older_statement_is_replaced(
    failing: Path, stated: Path, stating: Calls
) -> None:
    assert stating(failing)[0] == 1
    assert "on cpu, emulation: failed" in (stated / "summary.md").read_text()
    (stated / "thesis.tex").write_text("years of work")
    code, (line,) = stating(failing)
    assert (code, "there is something else in it" in line) == (2, True)
    assert (stated / "thesis.tex").read_text() == "years of work"


def test_a_users_kernel_has_every_kind_of_input_and_the_suites_kernels_need_not_be_there(
    users: Run, tmp_path: Path, stating: Calls, verified: Calls
) -> None:
    path, folder = tmp_path / "mine.json", tmp_path / "handed_in"
    store.write(replace(users, records=users.records[:1]), path)
    code, (line,) = stating(path)
    assert (code, "missing: cpu-mine-no_tail-bf16" in line) == (2, True)
    assert "; a complete record: pytest -n auto tests/matrix --backend cpu --kernel mine.py:mine --seed 1" in line
    store.write(users, path)
    assert stating(path)[0] == 0
    assert "mine (given by --kernel)" in (folder / "summary.md").read_text()
    code, lines = verified(folder)
    assert code == 0
    assert lines[3].startswith("NOT checked: the numbers of 3 cells, which no emulation computes: training runs, and")


@pytest.fixture
def from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Records of outputs that another program wrote, in a profile of few heads; the outputs are gone."""
    monkeypatch.setattr(profiles, "Settings", lambda: Settings(heads=16))
    monkeypatch.setattr(runner, "attention", mine)
    calls = tmp_path / "calls"
    assert export.main([str(calls), "--cases", ",".join(CASES), "--heads", "16"]) == 0
    runner.work(calls, json.loads((calls / "calls.json").read_bytes())["calls"], 60.0)
    (calls / "device.json").write_text('{"device": "a card of ours"}')
    judge.main([str(calls), "--name", "mine", "-n", "0", "--out", str(tmp_path / "out")])
    shutil.rmtree(calls)
    run = store.read(tmp_path / "out/last.json")
    store.write(replace(run, platform={**run.platform, "commit": COMMIT}), path := tmp_path / "files.json")
    return path


def mine(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Attention, of square causal calls alone."""
    if causal:
        raise NotImplementedError("a causal mask")
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return ((q.float() @ k.float().mT * scale).softmax(-1) @ v.float()).to(q.dtype)


def as_measured(run: Run) -> Run:
    return replace(run, platform={**run.platform, "gpu": "H200"})


def unstated(run: Run) -> Run:
    return replace(run, platform={name: x for name, x in run.platform.items() if name not in ("stated", "assumed")})


def of_another(run: Run) -> Run:
    return replace(run, platform={**run.platform, "stated": {"device": "H200"}})


def less_biased(run: Run) -> Run:
    first, *others = run.records
    return replace(run, records=(replace(first, measures={**first.measures, "bias": Estimate(0.4, 0.01)}), *others))


def test_a_statement_of_outputs_from_files_names_their_device_as_stated_and_no_edit_of_one_verifies(
    from_files: Path, tmp_path: Path, stating: Calls, verified: Calls
) -> None:
    folder = tmp_path / "handed_in"
    assert stating(from_files)[0] == 0
    assert "stated, not measured: device" in (folder / "summary.md").read_text()
    code, lines = verified(folder)
    assert code == 0
    assert any("device.json states" in line for line in lines)
    whole = store.read(folder / "records-1.json")
    for change, word in (
        (as_measured, "platform.gpu"),
        (unstated, "platform.stated"),
        (of_another, "platform.stated"),
        (less_biased, "verdict"),
    ):
        forge(folder, lambda _, change=change: change(whole))  # type: ignore[misc]
        code, lines = verified(folder)
        assert (code, any(word in line for line in lines)) == (1, True), change.__name__
    store.write(replace(whole, records=whole.records[:1]), from_files)
    code, (line,) = stating(from_files)
    assert (code, "tiebreak export NEW --cases" in line) == (2, True)


@pytest.mark.parametrize(("option", "words"), [("fair", "--fair"), ("no-worse-than", "--no-worse-than rounded")])
def test_who_says_that_a_kernel_was_held_to_more_has_to_have_the_answers(option: str, words: str, users: Run) -> None:
    typed = {**users.options, option: words.partition(" ")[2] or True}
    records = tuple(replace(record, command=record.command.replace(" --cases", f" {words} --cases"))
                    for record in users.records)  # fmt: skip
    _, problems = cells_and_faults(replace(users, options=typed, records=records), profiles.profile("small"))
    assert [text.split(": ")[:2] for text in problems] == [["cpu-mine-tied_maxima[k=2]-bf16", "answers.claim"]]


def test_the_sample_is_drawn_by_its_seed(ran: Run) -> None:
    known, _ = cells_and_faults(ran, profiles.profile("small"))
    one, again, other = ([each.record.id for each in sample(known, 4, seed)] for seed in (1, 1, 2))
    assert one == again != other
    assert len(sample(known, 99, 1)) == 10


EXAMPLES = int(os.environ.get("TIEBREAK_FUZZ", "10"))
LEAVES = 4  # of an example

#: Paths of leaves that may be edited, and why that does not matter, or nobody can tell.
FREE = {
    **{pattern: why for pattern, why in mutations.FREE.items() if pattern != "explanations*"},
    "platform.*": "which machine it was, who hands the records in says; the summary shows it",
    "records[[]10]": "a training run, for which this profile does not ask",
    "records*.why": "words",
    "records*.evidence*": "drawn: nothing is decided by it; the emulation's own is compared",
    "records*.answers.accuracy.asked": "which plan a kernel that declares none was held to is not recorded",
    "records*.answers.accuracy.source": "the same",
}
#: The same of what is not run again: nobody knows without the device, or without the kernel.
UNKNOWN = {
    "records*.measures.*": "a number that fits its verdict and its answers",
    "records*.digest": "bits",
    "records*.shown.*": "of a kernel that is called in other ways: how a number is written that is no bias of O",
    "records*.answers.claim": "of a user's kernel: which tiles it works in, and so what is claimed, is not recorded",
}
#: Answers of a user's kernel of which no number is recorded, or not all that they rest on.
UNDECIDED_ANSWER = {"claim", "usage"}
OF_O = {"row_coherence", "row_coherence_independent", *measures.OF_O}
OF_GRADIENTS = frozenset(verification._OF_GRADIENTS)  # what equal bits of O tell nothing of


@pytest.fixture
def whole(ran: Run, users: Run, once: None) -> tuple[Run, Run]:
    """The runs of a statement with a bit of everything."""
    trained = next(record for record in store.read(BASELINE).records if record.case == "train_drift")
    (cell,) = (each for each in cells(Selection("emulation", trained.kernel, trained.case))[0])
    known, _ = cells_and_faults(ran, profiles.profile("small"))
    by_id = {each.record.id: each.cell for each in known} | {cell.id: cell}
    typed = {**ran.options, "cases": ",".join((*CASES, cell.experiment.name))}
    narrowed = options.narrowing(options.stated(typed), by_id.values(), ())
    more = replace(ran, records=(*ran.records, trained), options=typed, narrowing=narrowed)
    runs = explained_otherwise(described(more, by_id)), users
    assert problems_of(runs) == []
    return runs


def problems_of(runs: Sequence[Run]) -> list[str]:
    """What is wrong with a statement of these runs."""
    named = {f"records-{at}.json": run for at, run in enumerate(runs)}
    return program.problems_of_records(named, (), profiles.profile("small"), 99, 1)[0]


@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_no_edit_of_one_leaf_verifies(whole: tuple[Run, Run], seed: int) -> None:
    chance, place = Random(seed), seed % 2
    plain = json.loads(json.dumps(plain_of(whole[place])))
    paths = chance.sample([*leaves(plain)], LEAVES)
    for path, value in unnoticed(plain, paths, chance, lambda edited: verifies(whole, place, edited)):
        assert allowed(plain, path, value), f"{name_of(path)} = {value!r} verifies"


def verifies(runs: Sequence[Run], place: int, plain: Mapping[str, Any]) -> bool:
    """Whether a statement holds in which one run is edited; one that reads as the unedited is no edit."""
    try:
        run = store.decoded(json.dumps(plain).encode(), Path("records.json"), Run)
    except store.UnreadableRecordsError:
        return False
    return run != runs[place] and not problems_of([run if at == place else each for at, each in enumerate(runs)])


@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_no_consistent_edit_verifies(whole: tuple[Run, Run], seed: int) -> None:
    """Of a number or an answer, with all that follows, and a digest of its own."""
    chance, place = Random(seed), seed % 2
    run = whole[place]
    for at in chance.sample(range(len(run.records)), 2):
        before = run.records[at]
        for what, after in chance.sample([*consistent_edits(before, run, chance)], LEAVES):
            made = replace(run, records=(*run.records[:at], after, *run.records[at + 1 :]))
            if after != before and not problems_of([made if each is run else each for each in whole]):
                told = f"{after.measures.get(what[9:])}, {after.answers.get(what[8:])}"
                assert unknown(before, after, what), f"{before.id}: {what}: {told} verifies"


def unknown(before: Record, after: Record, what: str) -> bool:
    """Whether nobody knows: a number of what is not run again, or an answer of which no number is recorded."""
    kind, _, name = what.partition(".")
    if before.experiment == "training":
        return True  # for which this profile does not ask
    if kind == "answers":
        return before.kernel == "mine" and name in UNDECIDED_ANSWER
    if name not in after.measures:
        return name not in verification._OF_EVERY_CALL | verification._OF_PREDICTION and before.backend != "emulation"
    if before.backend == "emulation" or (before.number("equal_bits") == 1.0 and name in OF_O - OF_GRADIENTS
                                         and before.kernel != "mine"):  # fmt: skip
        return not [*differing(before.measures.get(name), after.measures.get(name))]
    return True


def allowed(plain: Mapping[str, Any], path: Sequence[str | int], value: Any) -> bool:
    """Whether a list has a leaf; a number of what is run again only where it is the same but for noise."""
    name, before = name_of(tuple(path)), found(plain, tuple(path))
    if any(fnmatchcase(name, pattern) for pattern in FREE):
        return True
    if path[0] != "records" or not any(fnmatchcase(name, pattern) for pattern in UNKNOWN):
        return False
    record = plain["records"][path[1]]
    if path[2] == "shown":
        return bool(record["experiment"] == "usage")
    if path[2] == "answers" and record["kernel"] != "mine":
        return False
    bits = record["measures"].get("equal_bits") == 1.0 and record["kernel"] != "mine"
    again = record["backend"] == "emulation" and record["experiment"] == "call"
    of_o = path[2] == "digest" or path[3] in OF_O
    if again or (bits and of_o and path[-2] not in OF_GRADIENTS and path[-1] not in OF_GRADIENTS):
        return (
            isinstance(value, float)
            and isinstance(before, float)
            and math.isclose(value, before, rel_tol=1e-4, abs_tol=1e-6)
        )
    return True
