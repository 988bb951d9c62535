"""`tiebreak export FOLDER`: the calls that a run would make, as files for a device or a program that is not here."""

import argparse
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec

from tiebreak import kernels
from tiebreak.backends.backend import EMULATION
from tiebreak.cases import runner
from tiebreak.cases.capture.folder import MB
from tiebreak.cases.captured import captured_cases
from tiebreak.cases.case import HEADS_PER_BATCH, JOINED, Case
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.external.call import Call, Made, Placed, Triple
from tiebreak.kernels.external.caller import Caller
from tiebreak.kernels.external.kernels import external_kernel
from tiebreak.kernels.external.options import TAKEN
from tiebreak.kernels.formats import BF16, FP16, Rounding
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import Declaration, run_backward, run_forward
from tiebreak.kernels.triton.roster import DECLARATIONS
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.experiments.call import OneCall
from tiebreak.matrix.plugin import selection_of
from tiebreak.matrix.scheduling import cell_id
from tiebreak.matrix.selection import cells, check_usable
from tiebreak.programs import check
from tiebreak.programs.files import backend, dump, own
from tiebreak.programs.files.backend import DEVICE, FILES, NOT_ASKED, TARGET, Tensors, Values, as_called, stored
from tiebreak.reports.calls import MANIFEST, Calls, StoredCall, digest_of
from tiebreak.reports.cli import PASSED, Parser, count, positive
from tiebreak.reports.errors import UsageError
from tiebreak.reports.names import first_few, split
from tiebreak.reports.records import store
from tiebreak.reports.records.decode import SCHEMA
from tiebreak.reports.records.store import digest
from tiebreak.reports.tables.run import counted

#: What files can show, by kind of experiment: all of its cases, or these. A new kind is left out until it stands here.
_ASKED: dict[str, tuple[str, ...] | None] = {
    "call": None,
    "contract": None,
    "usage": ("strided_views", "many_heads", "hidden_keys", "sizes", "long_keys", "log_sum_exp", "scaled_do",
              "shapes", "head_dimensions", "extremes", "broadcast_shapes"),
    "invariance": tuple(f"invariance[{word}]" for word in ("batch", "split", "padding", "decode", "chunks")),
}  # fmt: skip
_QUESTIONS = ("strided_views", "log_sum_exp", "scaled_do", "sizes")  # of a default folder
# A usual kernel is undecided there after all heads, which would be an eighth of a default folder.
_COSTLY = "repeated_large[r=10000]"
_TAKES = "causal,oblong_causal,gqa,scale,blind_rows"
FORMATS = {fmt.name: fmt for fmt in (BF16, FP16)}  # of an engine's dump
_RUNS = 3  # of one call, at most: as many as the contract of a call compares
_RUN = ("cases", "dtype", "heads", "seed", "features", "captured")  # options of the run that are kept
_FUSED = parse_declaration("flash@fused")
#: Whose answers a run is given, so that it takes every path: a known plan, none, and random bits. No answer is kept.
_ANSWERING = (
    _FUSED,
    replace(_FUSED, plan=replace(_FUSED.plan, name="cut_off", o=replace(_FUSED.plan.o, rounding=Rounding.RTZ))),
    parse_declaration("flash@fused_stochastic"),
)


@dataclass
class Recorder:
    """The calls that a kernel is given, in several runs."""

    answering: Declaration = _FUSED  # the plan whose answers the kernel has
    case: str = ""  # that runs
    calls: dict[str, tuple[Tensors, StoredCall]] = field(default_factory=dict)  # by digest, without a number yet
    often: Counter[str] = field(default_factory=Counter)  # how often each is made, in the run that makes it most often
    now: Counter[str] = field(default_factory=Counter)  # in this run

    def keep(self, tensors: Tensors, values: Values) -> None:
        """Keep a call."""
        described = stored(tensors)
        digest = digest_of(described, values)
        if digest not in self.calls:
            copies = {name: x.detach().clone() for name, x in tensors.items()}
            finite = all(bool(x.float().isfinite().all()) for x in copies.values())
            self.calls[digest] = copies, StoredCall("", digest, self.case, described, values, 1, finite)
        self.now[digest] += 1
        self.often[digest] = max(self.often[digest], self.now[digest])

    def merged(self) -> Iterator[tuple[Tensors, StoredCall]]:
        """Yield the calls: one whose gradients are asked for is asked for O alone there too."""
        every = self.calls.values()
        of_o = {digest_of(call.forward, call.values) for _, call in every if "do" in call.tensors}
        left = [(x, call) for x, call in every if call.digest not in of_o]
        for number, (tensors, call) in enumerate(left, 1):
            runs = max(self.often[call.digest], self.often[digest_of(call.forward, call.values)])
            yield tensors, msgspec.structs.replace(call, id=f"{number:04}", runs=min(runs, _RUNS))


@dataclass(frozen=True)
class _RecordedCall(Call):
    """A call that is kept, and answered by the emulation of a plan."""

    recorder: Recorder

    def _returned(self, arguments: Triple, part: AttentionInputs) -> Any:
        self.recorder.keep(*as_called(dict(zip("qkv", arguments, strict=True)), self.keywords(part)))
        output = run_forward(self.recorder.answering, part, EMULATION.arithmetic)
        return self.laid(output.o), None if output.lse is None else output.lse[..., 0]

    def backward(self, placed: Placed, o: object) -> Made | None:
        if not self._trains:
            return None
        arguments = {**dict(zip("qkv", placed.arguments, strict=True)), "do": placed.do}
        self.recorder.keep(*as_called(arguments, self.keywords(self.inputs)))
        inputs, plan = replace(self.inputs, do=self.restored(placed.do)), self.recorder.answering
        made = run_backward(plan, inputs, run_forward(plan, inputs, EMULATION.arithmetic), EMULATION.arithmetic)
        return (*map(self.laid, (made.dq, made.dk, made.dv)), *(() if made.dsink is None else (made.dsink,)))


def run_words(folder: Path, options: Mapping[str, str], declared: Mapping[str, str]) -> list[str]:
    """Return the words of `tiebreak check` for the run that makes a folder's calls."""
    words = [TARGET, "--backend", FILES.name, "--as", str(folder)]
    words += [word for name, value in declared.items() for word in ("--declare", f"{name}={value}")]
    own = str(folder)  # of captured tensors that lie in the folder itself
    return words + [word for name, value in options.items() for word in (f"--{name}", value if value != "." else own)]


def declared(takes: Sequence[str], layout: str) -> dict[str, str]:
    """Return what is declared of the kernel that has a folder's answers."""
    return {"takes": " ".join(takes), "refuses": " ".join(w for w in TAKEN if w not in takes), "layout": layout}


def recorded(folder: Path, given: Mapping[str, str], options: Mapping[str, str]) -> tuple[Recorder, str]:
    """Return the calls of a run with these options of it and of its kernel, and the cases that make them."""
    recorder = Recorder()
    with (
        patch.object(Caller, "call", lambda self, x: _RecordedCall(self.function, self.convention, x, recorder)),
        patch.object(backend, "opened", lambda _: SimpleNamespace(stated={})),
        tempfile.TemporaryDirectory(prefix="tiebreak-") as out,
    ):
        names = _names(folder, given, options)
        for recorder.answering in _ANSWERING:
            recorder.now.clear()
            words = [*run_words(folder, {**given, "cases": names}, options), "-n", "0", "--out", out]
            _, printed = check.run(check.parsed(words, "tiebreak export"), follower := _Recording(recorder))
            if follower.run is None:
                raise UsageError("interrupted" if follower.interrupted else check.refusal(printed))
    return recorder, names


class _Recording(check.Follower):
    """A plug-in that tells the recorder which case runs."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(sys.stderr)
        self._recorder = recorder

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        super().pytest_runtest_logstart(nodeid)
        assert self.collector is not None
        self._recorder.case = self.collector.expected[cell_id(nodeid)].experiment.name


def _names(folder: Path, given: Mapping[str, str], options: Mapping[str, str]) -> str:
    """Return the cases that files can show: those that are named, or usual ones that such a kernel takes."""
    asked = vars(check.parsed(run_words(folder, given, options), "tiebreak export"))
    every, _ = cells(selection_of({**asked, "kernel": asked["targets"]}.get))
    check_usable(every)
    named = "cases" in given or "captured" in given
    chosen = [cell for cell in every if (_can_show if named else _is_usual)(cell)]
    left_out = dict.fromkeys(cell.experiment.name for cell in every if not _can_show(cell))
    if named and left_out:
        print(f"not asked of files: {first_few(list(left_out), 6)}")
    if not chosen:
        raise UsageError(f"--cases {given.get('cases')}: files show none of them: {NOT_ASKED}")
    return ",".join(dict.fromkeys(cell.experiment.name.partition(JOINED)[0] for cell in chosen))


def _can_show(cell: Cell) -> bool:
    names = _ASKED.get(cell.experiment.kind, ())
    return names is None or cell.experiment.name in names


def _is_usual(cell: Cell) -> bool:
    it = cell.experiment
    if isinstance(it, OneCall):
        telling = it.case.failure or it.case.normal
        return telling and it.name != _COSTLY and not it.refused(cell) and not it.name.startswith("fp8_")
    return it.name in _QUESTIONS or (_can_show(cell) and it.kind == "contract")


def main(arguments: Sequence[str]) -> int:
    """Run the verb `export`; see `tiebreak.reports.cli.main`."""
    asked = _parser().parse_args(arguments)
    if asked.kernel is not None and asked.runner is None:
        raise UsageError(f"--kernel {asked.kernel}: for a runner, say where it is to be with --runner FILE.py")
    if asked.folder is None and asked.runner is None:
        raise UsageError("name a new folder for the calls, or --runner FILE.py alone")
    if asked.dump is not None and asked.folder is None:
        raise UsageError(f"--dump {asked.dump}: name a new folder for its calls")
    if (folder := asked.folder) is not None:
        if folder.exists() and (not folder.is_dir() or any(folder.glob("*.out.*")) or (folder / MANIFEST).exists()):
            raise UsageError(f"{folder}: has calls already, or is no folder: name a new one")
        (_export if asked.dump is None else _export_dump)(asked)
    if asked.runner is not None:
        _write_runner(asked.runner, asked.kernel)
    return PASSED


def _export(asked: argparse.Namespace) -> None:
    """Write the folder that is asked for."""
    folder, takes = asked.folder, tuple(split(asked.takes))
    if unknown := [word for word in takes if word not in TAKEN]:
        raise UsageError(f"--takes {unknown[0]}: known are {', '.join(TAKEN)}")
    given = {name: str(value) for name in _RUN if (value := getattr(asked, name)) is not None}
    recorder, given["cases"] = recorded(folder, given, declared(takes, asked.layout))
    calls = list(recorder.merged())
    cases = counted(len(split(given["cases"])), "case")
    _tell_size(asked, [x for x, _ in calls], f"{counted(len(calls), 'call')} of {cases}", "--heads or --cases")
    every = tuple(call for _, call in calls)
    manifest = Calls(SCHEMA, version("tiebreak"), given, _given(asked), takes, asked.layout, asked.raw, every, {}, "")
    _write(folder, manifest, [x for x, _ in calls])


def _given(asked: argparse.Namespace) -> dict[str, str]:
    """Return the options that say what is asked, other than their defaults; a flag is empty."""
    parser, names = _parser(), (*_RUN, "takes", "layout", "raw")
    given = {name: value for name in names if (value := getattr(asked, name)) != parser.get_default(name)}
    return {name: "" if value is True else str(value) for name, value in given.items()}


def _tell_size(asked: argparse.Namespace, written: Iterable[Tensors], what: str, fewer: str) -> None:
    """Print how much is about to be written; UsageError: it is more than is allowed."""
    size = sum(x.numel() * x.element_size() for tensors in written for x in tensors.values()) / MB
    print(f"{what}, {size:.1f} MB: {asked.folder}")
    if size > asked.most:
        raise UsageError(f"{size:.0f} MB are more than --most {asked.most}: give fewer {fewer}, or raise it")


def _export_dump(asked: argparse.Namespace) -> None:
    """Write the calls of an engine's dump as captured tensors, and its answers to them."""
    if more := _given(asked):
        raise UsageError(f"--{min(more)}: a dump says itself what was asked: leave it out")
    folder, (mapped, every) = asked.folder, dump.dumped(asked.dump)
    written = (x for each in every for x in (each.tensors, each.answers))
    _tell_size(asked, written, counted(len(every), "call"), "layers")
    store.check_writable(folder)
    for name in dict.fromkeys(each.file for each in every):
        of_file = [each for each in every if each.file == name]
        tensors = {f"layer{each.layer}.{part}": x for each in of_file for part, x in each.tensors.items()}
        runner.write(
            folder / name, tensors, {f"layer{x.layer}.{w}": text for x in of_file for w, text in x.words.items()}
        )
    files = {x.file: digest((folder / x.file).read_bytes()) for x in every}
    most = max(x.tensors["q"].shape[0] * x.tensors["q"].shape[1] for x in every)
    heads = -(-most // HEADS_PER_BATCH) * HEADS_PER_BATCH  # as a run takes them: a layer gives as many as it has
    options = {"dtype": every[0].format, "heads": str(heads), "seed": "1", "captured": "."}
    takes, calls = _calls_of_captured(folder, options)
    answers = {(each.file, each.layer): each.answers for each in every}
    for place, call in calls.items():
        runner.write(folder / f"{call.id}.out.safetensors", answers[place], {"call": call.digest})
    if mapped.device:
        store.write_text(json.dumps({"device": mapped.device}), folder / DEVICE)
    manifest = Calls(SCHEMA, version("tiebreak"), options, {}, takes, "bhnd", False, tuple(calls.values()), files, "")
    _write(folder, manifest)


def captured_inputs(folder: Path, options: Mapping[str, str]) -> list[tuple[Case, AttentionInputs]]:
    """Return the cases of a dump's captured tensors, each with the whole of its call."""
    seed, heads, fmt = int(options["seed"]), int(options["heads"]), FORMATS[options["dtype"]]
    return [(case, case.make(seed, 0, heads, fmt)) for case in captured_cases(folder)]


def _calls_of_captured(
    folder: Path, options: Mapping[str, str]
) -> tuple[tuple[str, ...], dict[tuple[str, str], StoredCall]]:
    """Return the features of the calls of a folder's captured tensors, and the calls by file and layer."""
    every = captured_inputs(folder, options)
    takes = tuple(sorted({each.taken for _, x in every for each in x.required_features()}))
    flags = [f"{name}={value}" for name, value in declared(takes, "bhnd").items()]
    caller, calls = external_kernel(TARGET, flags=flags).caller, {}
    for number, (case, x) in enumerate(every, 1):
        made = caller.call(x)
        placed = made.placed(gradients=False)
        tensors, values = as_called(dict(zip("qkv", placed.arguments, strict=True)), made.keywords(x))
        described = stored(tensors)
        call = StoredCall(f"{number:04}", digest_of(described, values), case.name, described, values, 1, finite=True)
        calls[case.source, case.name.rpartition("=")[2].rstrip("]")] = call
    return takes, calls


def _write_runner(path: Path, kernel: str | None) -> None:
    """Write the program that runs calls, and beside it a kernel of ours with what it needs."""
    store.write_text(Path(runner.__file__).read_text(encoding="utf-8"), path)
    if kernel is not None:
        store.write_text(Path(own.__file__).read_text(encoding="utf-8"), path.with_name(f"{kernel}.py"))
        room, ignored = Path(kernels.__file__).parent, shutil.ignore_patterns("__pycache__", "public", "adapters")
        shutil.copytree(room, path.parent / "tiebreak/kernels", ignore=ignored, dirs_exist_ok=True)
        store.write_text("", path.parent / "tiebreak/__init__.py")


def _write(folder: Path, manifest: Calls, inputs: Sequence[Tensors] = ()) -> None:
    """Write a folder of calls, the manifest last: without it the folder is none. A dump's inputs are there already."""
    store.check_writable(folder)
    for tensors, call in zip(inputs, manifest.calls, strict=bool(inputs)):
        if not manifest.raw:
            runner.write(folder / f"{call.id}.in.safetensors", tensors, {"call": call.digest})
        for name, x in tensors.items() if manifest.raw else ():
            runner.replace(folder / f"{call.id}.{name}.bin", runner.to_bytes(x))
    if manifest.raw:
        store.write_text("".join(f"{_line(call)}\n" for call in manifest.calls), folder / "calls.txt")
    store.write(msgspec.structs.replace(manifest, digest=manifest.own_digest), folder / MANIFEST)


def _line(call: StoredCall) -> str:
    """Return a call for readers without JSON: its id, digest, runs, then NAME=VALUE and NAME=FORMAT:SHAPE."""
    values = {name: ",".join(map(str, x)) if isinstance(x, list) else x for name, x in call.values.items()}
    tensors = {name: f"{x.format}:{','.join(map(str, x.shape))}" for name, x in call.tensors.items()}
    words = (f"{name}={x}" for name, x in {**values, **tensors}.items())
    return " ".join([call.id, call.digest, str(call.runs), *words])


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tiebreak export",
        description="Write the calls that a run of the matrix would make, for a program or a device that is not here;"
        " tiebreak judge gives the verdict on what it answers. docs/files.md has the format.",
    )
    add = parser.add_argument
    add("folder", type=Path, nargs="?", help="a new folder; may be missing where --runner is given")
    add("--cases", metavar="NAMES", help="as of tiebreak check (default: failure inputs, normal numbers, the contract)")
    add("--dtype", default=BF16.name, metavar="NAMES", help="formats of q, k and v (default: bf16)")
    add("--heads", type=positive, default=32, metavar="N", help="of a case at first (default: 32)")
    add("--seed", type=count, default=1, metavar="N", help="of all inputs (default: 1)")
    add("--features", metavar="NAMES", help="added to each case, as of tiebreak check; --takes has to list them")
    add("--dump", type=Path, metavar="FILE.toml", help="an engine's dumped tensors, by a mapping (docs/files.md)")
    add("--captured", metavar="DIR", help="tensors of a training run, as of tiebreak check")
    add("--takes", default=_TAKES, metavar="WORDS", help=f"what it takes, of {', '.join(TAKEN)} (default: {_TAKES})")
    add("--layout", choices=("bhnd", "bnhd"), default="bhnd", help="order of dimensions (default: bhnd)")
    add("--raw", action="store_true", help="write files of bytes, and calls.txt, for readers without a library")
    add("--most", type=positive, default=64, metavar="MB", help="refuse to write more (default: 64)")
    add("--runner", type=Path, metavar="FILE.py", help="write the program that runs the calls, with torch alone")
    add("--kernel", choices=DECLARATIONS, help="write a Triton kernel of ours, and what it needs, beside the runner")
    return parser
