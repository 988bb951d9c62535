import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tiebreak.backends.backend import CPU
from tiebreak.backends.interpreter import INTERPRETER
from tiebreak.cases import runner
from tiebreak.defects.planted import DEFECTS, twin
from tiebreak.kernels.external import external_kernel
from tiebreak.kernels.external.kernels import UserKernel
from tiebreak.kernels.external.loading import imported
from tiebreak.programs import check
from tiebreak.programs.files import backend, export, judge
from tiebreak.reports import cli
from tiebreak.reports.calls import MANIFEST, Calls
from tiebreak.reports.errors import UsageError
from tiebreak.reports.records import store
from tiebreak.reports.records.decode import encode
from tiebreak.reports.records.record import Run
from tiebreak.reports.schemas import schema_of
from tiebreak.studies.cells import judged
from tiebreak.studies.power import EXPERIMENTS

pytestmark = pytest.mark.usefixtures("shared_cases")
CASES = "tied_maxima[k=2],random,contract_tile,strided_views,scaled_do"
KERNEL = """
import torch


def plain(q, k, v, *, causal=False, scale=None):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q.float() @ k.float().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1 + s.shape[3] - s.shape[2]), -torch.inf)
    lse = s.logsumexp(-1, keepdim=True)
    p = torch.exp(s - lse.masked_fill(lse == -torch.inf, 0.0))
    return (p @ v.float()).to(q.dtype), lse[..., 0].detach()


def cut_off(q, k, v, *, causal=False, scale=None):
    o, lse = plain(q.float(), k.float(), v.float(), causal=causal, scale=scale)
    short = (o.detach().view(torch.int32) & -65536).view(torch.float32)
    return (o + (short - o).detach()).bfloat16(), lse


def no_scale(q, k, v, *, causal=False, scale=None):
    return plain(q, k, v, causal=causal, scale=1.0)


def not_causal(q, k, v, *, causal=False, scale=None):
    if causal:
        raise ValueError("causal")
    return plain(q, k, v, scale=scale)


def noisy(q, k, v, *, causal=False, scale=None):
    o, lse = plain(q, k, v, causal=causal, scale=scale)
    return o * (1 + 0.01 * torch.randn(())), lse
"""

#: Its first call ends the process, and its second does not end.
TWO = """
import os
from pathlib import Path
from threading import Event

count = Path(__file__).with_name("count")


def attention():
    made = int(count.read_text()) if count.exists() else 0
    count.write_text(str(made + 1))
    if made == 0:
        os._exit(3)
    if made == 1:
        Event().wait()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of calls that nobody has answered."""
    path = tmp_path_factory.mktemp("files") / "calls"
    assert export.main([str(path), "--cases", CASES, "--heads", "16", "--runner", str(path.parent / "run.py")]) == 0
    (path.parent / "kernels.py").write_text(KERNEL)
    return path


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same calls for readers without a library."""
    path = tmp_path_factory.mktemp("raw") / "calls"
    assert export.main([str(path), "--cases", CASES, "--heads", "16", "--raw"]) == 0
    return path


def answered(folder: Path, to: Path, function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the folder with the answers of a kernel."""
    shutil.copytree(folder, to)
    monkeypatch.setattr(runner, "attention", function)
    monkeypatch.setattr(runner, "DEVICE", "cpu")
    runner.work(to, json.loads((to / MANIFEST).read_bytes())["calls"], 60.0)
    return to


@pytest.fixture(scope="module")
def good(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that a sound kernel has answered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder.parent))
        kernels: Any = __import__("kernels")
        yield answered(folder, tmp_path_factory.mktemp("good") / "calls", kernels.plain, patch)


def outcome(run: Any, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, list[dict[str, Any]]]:
    """Return exit code, first line and records of a command, without what names kernel and backend."""
    out = words[words.index("--out") + 1]
    code = run([*words, "-n", "0"])
    # The order of a tensor in memory, which a file does not have, is that of fp64 sums over it: their last bit.
    text = (Path(out) / "last.json").read_text()
    records = json.loads(text, parse_float=lambda number: f"{float(number):.12g}")["records"]
    kept = ("case", "outcome", "verdict", "heads", "measures", "digest", "answers", "shown")
    line = capsys.readouterr().out.splitlines()[0]
    return code, line.partition(":")[0] + line.partition(", bf16:")[2], [{x: r.get(x) for x in kept} for r in records]


@pytest.mark.parametrize("name", ["plain", "cut_off", "no_scale"])
def test_files_have_the_verdict_and_the_numbers_of_check(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.syspath_prepend(str(folder.parent))
    kernels: Any = __import__("kernels")
    answers = answered(folder, tmp_path / "calls", getattr(kernels, name), monkeypatch)
    target = f"{folder.parent / 'kernels.py'}:{name}"
    live = outcome(check.main, capsys, target, "--cases", CASES, "--heads", "16", "--out", str(tmp_path / "live"))
    *first, records = outcome(judge.main, capsys, str(answers), "--out", str(tmp_path / "files"))
    assert first == [*live[:2]]
    if name == "no_scale":  # undecided, it draws more heads live than were exported, of gradients too
        records, theirs = ([each["outcome"] for each in some] for some in (records, live[2]))
        assert records == theirs
    else:
        assert records == live[2]


def test_a_kernel_that_does_not_repeat_fails(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(folder.parent))
    kernels: Any = __import__("kernels")
    answers = answered(folder, tmp_path / "calls", kernels.noisy, monkeypatch)
    words = (str(answers), "--cases", "contract_tile", "--out", str(tmp_path / "out"))
    code, _, (record,) = outcome(judge.main, capsys, *words)
    assert (code, record["answers"]["repeatable"]["passed"]) == (1, False)


def test_too_few_heads_are_named_with_the_export_that_has_the_verdict_of_check(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(folder.parent))
    kernel, cases = __import__("kernels").plain, "near_tie_outside,repeated_tiny,single_maximum_sink"
    export.main([str(tmp_path / "few"), "--cases", cases, "--heads", "16"])
    few = answered(tmp_path / "few", tmp_path / "answers", kernel, monkeypatch)
    capsys.readouterr()
    assert code_of(few, tmp_path / "out") == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert "at the margin" in first
    told, _, command = last.partition("tiebreak export NEW ")
    assert {"near_tie_outside", "repeated_tiny"} < {*told.replace(",", " ").split()}
    assert "single_maximum_sink" not in told
    words = shlex.split(command)
    assert words[:-1] == ["--cases", cases, "--heads"]
    assert 32 <= int(words[-1]) <= 64  # intervals of 16 heads reach a little over the margin
    export.main([str(tmp_path / "enough"), *words])
    enough = answered(tmp_path / "enough", tmp_path / "more", kernel, monkeypatch)
    capsys.readouterr()
    code, line, _ = outcome(judge.main, capsys, str(enough), "--out", str(tmp_path / "out"))
    live = outcome(check.main, capsys, f"{folder.parent / 'kernels.py'}:plain", *words, "--out", str(tmp_path / "out"))
    assert (code, line) == live[:2]
    assert "margin" not in line


def test_the_next_step_is_short_and_device_json_declares_the_kernel(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(folder.parent))
    path = answered(folder, tmp_path / "calls", __import__("kernels").no_scale, monkeypatch)
    capsys.readouterr()
    words = ("--cases", "random")
    assert code_of(path, tmp_path / "out", *words) == 1
    command = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  next"))
    assert shlex.split(command.partition("tiebreak judge ")[2]) == [str(path), "-v", *words]
    (path / "device.json").write_text(json.dumps({"declare": {"plan": "flash@paper", "head_dims": [64]}}))
    assert code_of(path, tmp_path / "out", *words) == 1
    assert store.load(tmp_path / "out/last.json", Run).records[0].plan == "flash@paper"
    (path / "device.json").write_text(json.dumps({"declare": {"lse": "10"}}))
    assert code_of(path, tmp_path / "out", *words) == 2


def test_no_answer_is_exported_and_the_same_bits_each_time(folder: Path, raw: Path, tmp_path: Path) -> None:
    """Two exports have the same calls, by the digests of all that is in them, and a file is written to the byte."""
    jsonschema.validate(json.loads((folder / MANIFEST).read_bytes()), schema_of("calls"))
    assert not [*folder.glob("*.out.*")]
    assert {name for call in manifest(folder).calls for name in call.tensors} == {"q", "k", "v", "do"}
    assert [call.digest for call in manifest(folder).calls] == [call.digest for call in manifest(raw).calls]
    for path in folder.glob("*.in.*"):
        runner.write(tmp_path / path.name, *runner.read(path))
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()


@pytest.mark.parametrize("spaces", [b"", b" "])
def test_a_file_of_tensors_is_read_wherever_they_lie_and_never_written_to(tmp_path: Path, spaces: bytes) -> None:
    path, tensors = tmp_path / "x.safetensors", {"x": torch.arange(5.0), "y": torch.ones(3)}
    runner.write(path, tensors, {"a": "b"})
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = content[8:end] + spaces
    path.write_bytes(content := len(header).to_bytes(8, "little") + header + content[end:])
    read, metadata = runner.read(path)
    assert metadata == {"a": "b"}
    assert all(torch.equal(x, tensors[name]) and x.data_ptr() % x.itemsize == 0 for name, x in read.items())
    read["x"].zero_()
    assert path.read_bytes() == content


def manifest(folder: Path) -> Calls:
    return store.load(folder / MANIFEST, Calls)


def _first(folder: Path) -> tuple[Path, dict[str, Any], dict[str, str]]:
    """The first output that a cell judges: those before it tell the plan alone, as a live kernel's do."""
    path = folder / f"{next(call.id for call in manifest(folder).calls if call.case == 'random')}.out.safetensors"
    return path, *runner.read(path)


def _with(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path, tensors, metadata = _first(folder)
        runner.write(path, change(tensors), metadata)

    return damage


def _said(**words: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path, tensors, metadata = _first(folder)
        runner.write(path, tensors, {**metadata, **words})

    return damage


def _bytes(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: runner.replace(folder / name, change((folder / name).read_bytes()))


def _neighbour(folder: Path) -> None:
    shutil.copy(folder / "0002.out.safetensors", folder / "0001.out.safetensors")


def _as_its_own(folder: Path) -> None:
    calls = manifest(folder).calls
    one = next(call for call in calls if call.case == "random")
    other = next(each for each in calls if each is not one and each.tensors["q"].shape == one.tensors["q"].shape)
    tensors, _ = runner.read(folder / f"{other.id}.out.safetensors")
    names = runner.read(folder / f"{one.id}.out.safetensors")[0]
    filled = {name: tensors.get(name, names[name]) for name in names}
    runner.write(folder / f"{one.id}.out.safetensors", filled, {"call": one.digest})


def _edited(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: store.write_text(encode(replace(manifest(folder), **fields)), folder / MANIFEST)


def _other_scale(folder: Path) -> None:
    first, *others = manifest(folder).calls
    _edited(calls=(replace(first, values={**first.values, "scale": 1.0}), *others))(folder)


def _other_metadata(content: bytes) -> bytes:
    """The same tensors, with metadata that is no object."""
    header = json.loads(content[8 : 8 + (size := int.from_bytes(content[:8], "little"))]) | {"__metadata__": None}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


OUT, IN = "0001.out.safetensors", "0001.in.safetensors"
DAMAGES: dict[str, Callable[[Path], None]] = {
    "missing": lambda folder: (folder / OUT).unlink(),
    "empty": _bytes(OUT, lambda content: b""),
    "four bytes": _bytes(OUT, lambda content: content[:4]),
    "half": _bytes(OUT, lambda content: content[: len(content) // 2]),
    "one byte short": _bytes(OUT, lambda content: content[:-1]),
    "one byte more": _bytes(OUT, lambda content: content + b"\0"),
    "header alone": _bytes(OUT, lambda content: content[:64]),
    "a huge header": _bytes(OUT, lambda content: b"\xff" * 8 + content[8:]),
    "text": _bytes(OUT, lambda content: b"not computed"),
    "other shape": _with(lambda tensors: {**tensors, "o": tensors["o"].mT.contiguous()}),
    "fewer rows": _with(lambda tensors: {**tensors, "o": tensors["o"][:, :, :1]}),
    "flat": _with(lambda tensors: {**tensors, "o": tensors["o"].flatten()}),
    "fp32": _with(lambda tensors: {**tensors, "o": tensors["o"].float()}),
    "fp16": _with(lambda tensors: {**tensors, "o": tensors["o"].half()}),
    "no o": _with(lambda tensors: {name: x for name, x in tensors.items() if name != "o"}),
    "another name": _with(lambda tensors: {"out": tensors["o"]}),
    "more than asked": _with(lambda tensors: {**tensors, "p": tensors["o"]}),
    "a run more than asked": _with(lambda tensors: {**tensors, "o.7": tensors["o"]}),
    "a log-sum-exp of another shape": _with(lambda tensors: {**tensors, "lse": torch.zeros(3)}),
    "two answers": lambda folder: runner.replace(folder / "0001.out.json", b'{"call": "x"}'),
    "metadata is null": _bytes(OUT, _other_metadata),
    "nothing": _with(lambda tensors: {}),
    "NaN": _with(lambda tensors: {name: x * float("nan") for name, x in tensors.items()}),
    "zeros": _with(lambda tensors: {name: x * 0 for name, x in tensors.items()}),
    "negated": _with(lambda tensors: {name: -x for name, x in tensors.items()}),
    "no call": _said(call=""),
    "another call": _said(call="0" * 64),
    "a neighbour's file": _neighbour,
    "a neighbour's numbers": _as_its_own,
    "inputs cut short": _bytes(IN, lambda content: content[:-2]),
    "inputs edited": _bytes(IN, lambda content: content[:-1] + bytes([content[-1] ^ 1])),
    "raised": _said(raised="RuntimeError: illegal memory access"),
    "no manifest": lambda folder: (folder / MANIFEST).unlink(),
    "manifest cut short": _bytes(MANIFEST, lambda content: content[:-9]),
    "manifest without a call": lambda folder: _edited(calls=manifest(folder).calls[1:])(folder),
    "manifest with another scale": _other_scale,
    "manifest of other cases": _edited(options={"cases": "random", "dtype": "bf16", "heads": "16", "seed": "2"}),
    "device.json is no JSON": lambda folder: runner.replace(folder / "device.json", b"H200"),
}

UNREADABLE = {
    *("empty", "four bytes", "half", "one byte short", "one byte more", "header alone", "a huge header", "text"),
    *("metadata is null", "inputs cut short"),
}


def code_of(folder: Path, out: Path, *words: str) -> int:
    """Return the exit code of the command, an error of usage being 2."""
    try:
        return judge.main([str(folder), "-n", "0", "--out", str(out), *words])
    except UsageError as error:
        print(error)
        return 2


@pytest.mark.parametrize("name", DAMAGES)
def test_no_damage_passes(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    shutil.copytree(good, tmp_path / "calls")
    DAMAGES[name](tmp_path / "calls")
    code, said = code_of(tmp_path / "calls", tmp_path / "out"), capsys.readouterr()
    assert code in (1, 2)
    if code == 1:
        assert said.out.startswith("FAIL")
    else:
        assert str(tmp_path / "calls") in said.out + said.err
    assert ("cut off or no safetensors file" in said.out + said.err) == (name in UNREADABLE)


@pytest.mark.parametrize("what", ["NaN", "zeros", "raised"])
def test_no_answer_to_a_call_that_only_tells_the_plan_passes_for_another(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    shutil.copytree(good, tmp_path / "calls")
    path = good / "0001.out.safetensors"
    monkeypatch.setitem(globals(), "_first", lambda folder: (folder / path.name, *runner.read(path)))
    DAMAGES[what](tmp_path / "calls")
    assert code_of(tmp_path / "calls", tmp_path / "out", "--cases", "random") == 1


def test_a_call_that_hangs_or_ends_the_process_is_told_and_the_others_are_answered(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, path = tmp_path / "run.py", shutil.copytree(folder, tmp_path / "calls")
    # Without backward passes: the first of a process imports what may take longer than the time limit.
    calls = [call for call in manifest(path).calls if "do" not in call.tensors][:4]
    _edited(calls=tuple(calls))(path)
    (tmp_path / "two.py").write_text(TWO)
    text = Path(runner.__file__).read_text()
    run.write_text(text.replace("    # FILL IN", "    __import__('two').attention()\n    # FILL IN", 1))
    monkeypatch.setattr(runner, "__file__", str(run))  # which the processes run
    monkeypatch.setattr(sys, "argv", [str(run), str(path), "--timeout", "2"])
    runner.main()
    first, second, *others = (runner.read(path / f"{call.id}.out.safetensors")[1] for call in calls)
    assert "ended (3)" in first["raised"]
    assert "more than 2 s" in second["raised"]
    assert ["raised" in said for said in others] == [False, False]
    assert json.loads((path / "device.json").read_text())["torch"] == torch.__version__


def test_a_kernel_that_cannot_be_loaded_answers_nothing_and_calls_that_raised_are_run_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    calls = shutil.copytree(folder, tmp_path / "calls")
    exported = sorted(calls.iterdir())
    (tmp_path / "kernels.py").write_text(KERNEL)
    (tmp_path / "dies.py").write_text("__import__('os')._exit(7)")

    monkeypatch.chdir(tmp_path)

    def said_by(kernel: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["run.py", "calls", "--kernel", kernel])
        runner.main()
        return capfd.readouterr()

    for kernel, why in {"none.py": "No such file", "kernels.py": "'attention'", "dies.py": "ended (7)"}.items():
        with pytest.raises(SystemExit, match=r"^2$"):
            said_by(kernel)
        out, err = capfd.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert kernel in err
        assert why in err
        assert sorted(calls.iterdir()) == exported
    causal = sum(call.values["causal"] for call in manifest(folder).calls)
    every = len(manifest(folder).calls)
    assert (
        f"calls: {every - causal} calls answered, 0 refused, {causal} raised, " in said_by("kernels.py:not_causal")[0]
    )
    _bytes(OUT, lambda content: content[:9])(calls)
    assert f"calls: {every} calls answered, 0 refused, 0 raised\n" in said_by("kernels.py:plain")[0]


@pytest.mark.parametrize("content", [None, "", "{}"])
def test_a_folder_without_calls_is_refused_in_one_line(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / MANIFEST).write_text(content)
    monkeypatch.setattr(sys, "argv", ["run.py", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"^2$"):
        runner.main()
    assert f"error: {tmp_path}: no folder of calls: " in capsys.readouterr().err.splitlines()[-1]


def test_raw_files_have_the_verdict_of_the_others(
    good: Path, raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(raw, tmp_path / "calls")
    ids = [line.split()[0] for line in (folder / "calls.txt").read_text().splitlines()]
    assert ids == [call.id for call in manifest(folder).calls]
    for call in manifest(folder).calls:
        for name, x in runner.read(good / f"{call.id}.out.safetensors")[0].items():
            runner.replace(folder / f"{call.id}.{name}.bin", runner.to_bytes(x))
        runner.replace(folder / f"{call.id}.out.json", json.dumps({"call": call.digest}).encode())
    capsys.readouterr()
    theirs = outcome(judge.main, capsys, str(good), "--out", str(tmp_path / "theirs"))
    assert outcome(judge.main, capsys, str(folder), "--out", str(tmp_path / "ours")) == theirs
    _bytes("0001.o.bin", lambda content: content[:-2])(folder)
    assert code_of(folder, tmp_path / "out") == 2


ANSWERS = Path(__file__).parents[2] / "examples/files"
NUMPY_ALONE = """import runpy, sys
sys.modules.update(torch=None, tiebreak=None)
sys.argv.pop(0)
runpy.run_path(sys.argv[0])
"""


def run_numpy(folder: Path) -> None:
    subprocess.run([sys.executable, "-c", NUMPY_ALONE, ANSWERS / "answers.py", folder], check=True)


def run_compiled(folder: Path) -> None:
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("no g++ on the path")
    program = folder.parent / "answers"
    subprocess.run([compiler, "-std=c++17", "-O1", ANSWERS / "answers.cpp", "-o", program], check=True)
    subprocess.run([program, folder], check=True)


@pytest.mark.parametrize("answer", [run_numpy, run_compiled])
def test_programs_without_torch_answer_a_folder(
    request: pytest.FixtureRequest, tmp_path: Path, answer: Callable[[Path], None]
) -> None:
    exported: Path = request.getfixturevalue("folder" if answer is run_numpy else "raw")
    path = shutil.copytree(exported, tmp_path / "calls")
    answer(path)
    assert code_of(path, tmp_path / "out", "--cases", "random") == 0
    assert not any("refused" in backend.opened(str(path)).outputs(call)[1] for call in manifest(path).calls)


def test_a_shell_runs_a_program_of_one_call(raw: Path, tmp_path: Path) -> None:
    folder = backend.CallFolder(shutil.copytree(raw, tmp_path / "calls"), manifest(raw))
    first, second, *others = folder.manifest.calls
    program = tmp_path / "program"
    program.write_text(
        f"""#!/bin/sh
case $2 in {first.id}) exit 7;; {second.id}) exit 3;; esac
cp "$1/$2.q.bin" "$1/$2.o$3.bin"
"""
    )
    program.chmod(0o755)
    subprocess.run(["sh", ANSWERS / "answers.sh", folder.path, program], check=True)
    assert [*folder.faults()] == []
    assert folder.outputs(first)[1]["raised"] == "exit code 7"
    assert "refused" in folder.outputs(second)[1]
    for call in others:
        assert torch.equal(folder.outputs(call)[0]["o"], runner.inputs(raw, json.loads(encode(call)))["q"])


def test_a_kernel_of_ours_goes_along_and_has_the_verdict_of_check_interpreted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--cases", "tied_maxima[k=2]", "--heads", "8")
    export.main([str(tmp_path / "calls"), *asked, "--runner", str(tmp_path / "run.py"), "--kernel", "triton_flash"])
    code = "import sys; sys.path.insert(0, sys.argv[1]); import triton_flash, tiebreak; print(tiebreak.__file__)"
    command = [sys.executable, "-c", code, str(tmp_path)]
    found = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout.strip()
    assert Path(found) == tmp_path / "tiebreak/__init__.py"
    ours: Any = imported(f"{tmp_path / 'triton_flash.py'}")
    monkeypatch.setattr(runner, "backward", ours.backward)
    with INTERPRETER.in_use():
        answers = answered(tmp_path / "calls", tmp_path / "answers", ours.attention, monkeypatch)
    capsys.readouterr()
    target = (f"{tmp_path / 'triton_flash.py'}:attention", "--backend", "interpreter")
    live = outcome(check.main, capsys, *target, *asked, "--out", str(tmp_path / "live"))
    assert outcome(judge.main, capsys, str(answers), "--out", str(tmp_path / "files")) == live


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calls in which planted defects show, with a feature."""
    path = tmp_path_factory.mktemp("questions") / "calls"
    words = ["--cases", "random,random_causal,sink_tie,strided_views,log_sum_exp,served[alibi],cached[descale]"]
    takes = "causal,oblong_causal,gqa,scale,blind_rows,alibi,descale,pages,padding"
    assert export.main([str(path), *words, "--heads", "16", "--takes", takes]) == 0
    return path


def test_gate_compare_and_page_take_what_was_judged_and_say_who_states_the_device(
    good: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = shutil.copytree(good, tmp_path / "first")
    monkeypatch.syspath_prepend(str(folder.parent))
    worse = answered(folder, tmp_path / "worse", __import__("kernels").cut_off, monkeypatch)
    for path in (first, worse):
        (path / "device.json").write_text('{"device": "a card of ours"}')
    baseline = str(tmp_path / "baseline.json")
    words = ("--cases", "random", "--name", "mine", "--baseline", baseline)
    assert code_of(first, tmp_path / "a", *words, "--update-baseline") == 0
    assert code_of(first, tmp_path / "a", *words) == 0
    assert code_of(worse, tmp_path / "b", *words) == 1
    assert "regression" in capsys.readouterr().out
    records = [str(tmp_path / name / "last.json") for name in "ab"]
    assert cli.main(["compare", *records]) == 0
    assert "stated: a card of ours" in capsys.readouterr().out
    assert cli.main(["page", *records, "-o", str(tmp_path / "page")]) == 0
    assert "a card of ours, as device.json states (not measured)" in (tmp_path / "page/index.html").read_text()


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("random", "truncated_p"),
        ("random_causal", "causal_strict"),
        ("sink_tie", "unscaled_dk"),
        ("strided_views", "strides_of_v_ignored"),
        ("log_sum_exp", "returned_in_base_two"),
        ("served[alibi]", "alibi_of_the_first_head"),
        ("cached[descale]", "factors_transposed"),
        ("served[alibi]", "tiled"),
        ("cached[descale]", "tiled"),
    ],
)
def test_a_planted_defect_fails_by_the_same_checks_and_a_sound_kernel_with_features_passes(
    questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, name: str
) -> None:
    kernel = DEFECTS[name].kernel if name in DEFECTS else twin(name)
    assert isinstance(kernel, UserKernel)
    options = kernel.caller.convention.options
    monkeypatch.setattr(runner, "backward", options.backward if callable(options.backward) else None)
    path = str(answered(questions, tmp_path / "calls", kernel.caller.function, monkeypatch))
    flags = [f"{word}={value}" for word, value in judge.declared_of(backend.opened(path), name).items()]
    in_files = external_kernel(backend.TARGET, flags=[*flags, f"lse={options.lse}"])
    live, files = (
        judged(each, EXPERIMENTS[case], backend=on)
        for on, each in ((CPU, kernel), (backend.FILES.assuming(path), in_files))
    )
    assert (files.outcome, files.verdict, files.digest) == (live.outcome, live.verdict, live.digest)
    fell = [{check for check, answer in x.answers.items() if answer.passed is False} for x in (live, files)]
    assert fell[0] == fell[1]
    assert bool(fell[0]) == (name in DEFECTS)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.floats(0, 1, exclude_max=True), byte=st.integers(1, 255), name=st.sampled_from([OUT, IN, MANIFEST]))
@example(at=0.0, byte=1, name=OUT)
@example(at=0.0015, byte=ord(" ") ^ ord("\t"), name=OUT)
def test_every_changed_byte_is_seen_or_is_one_of_the_numbers(good: Path, at: float, byte: int, name: str) -> None:
    path = good / name
    content = path.read_bytes()
    place = int(at * len(content))
    try:
        path.write_bytes(content[:place] + bytes([content[place] ^ byte]) + content[place + 1 :])
        try:
            backend.opened.cache_clear()
            faults = [*backend.opened(str(good)).faults()]
        except UsageError as error:
            faults = [str(error)]
        within = name == OUT and place >= len(content) - sum(x.nbytes for x in _numbers(content, good))
        spaces = not faults and _told(path.read_bytes(), name) == _told(content, name)
        assert faults or within or spaces
        assert all("\n" not in fault for fault in faults)
    finally:
        path.write_bytes(content)


def _numbers(content: bytes, good: Path) -> list[torch.Tensor]:
    whole = good.parent / "whole.safetensors"
    whole.write_bytes(content)
    return [*runner.read(whole)[0].values()]


def _told(content: bytes, name: str) -> tuple[Any, bytes]:
    """Return the JSON of a file, without its spaces, and the bytes behind it."""
    start = 0 if name == MANIFEST else 8
    end = start + int.from_bytes(content[:8], "little") if start else len(content)
    return json.loads(content[start:end]), content[end:]
