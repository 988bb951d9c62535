"""`tiebreak export FOLDER`: the calls that a run would make, as files for a device or a program that is not here."""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from tiebreak.cases.capture.folder import MB
from tiebreak.cases.case import JOINED
from tiebreak.kernels.external.options import TAKEN
from tiebreak.kernels.formats import BF16
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.experiments.call import OneCall
from tiebreak.matrix.scheduling import cell_id
from tiebreak.matrix.selection import Selection, cells, check_usable
from tiebreak.programs import check
from tiebreak.programs.files import runner
from tiebreak.programs.files.backend import FILES, NOT_ASKED, TARGET, Tensors, Values, recording, stored
from tiebreak.reports.calls import MANIFEST, Calls, Stored, StoredCall, digest_of
from tiebreak.reports.cli import PASSED, Parser, count, positive
from tiebreak.reports.errors import UsageError
from tiebreak.reports.names import first_few, split
from tiebreak.reports.records import store
from tiebreak.reports.records.decode import SCHEMA
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
_COSTLY = (
    "repeated_large[r=10000]"  # a usual kernel is undecided there after all heads, which are an eighth of the size
)
_TAKES = "causal,oblong_causal,gqa,scale,blind_rows"
Rounding = Callable[[Tensor, torch.dtype], Tensor]
Made = tuple[Tensors, StoredCall]
_LAYOUTS = ("bhnd", "bnhd")
_RUNS = 3  # of one call, at most: as many as the contract of a call compares
_RUN = ("cases", "dtype", "heads", "seed", "features", "captured")  # options of the run that are kept


class Recorder:
    """The kernel while its calls are recorded.

    To go on, a run needs answers. It gets those of attention in plain torch, with O rounded in one of three ways, by
    which it takes every path: as a kernel that follows a known plan, one that follows none, and one with random bits.
    No answer is kept.
    """

    def __init__(self, layout: str) -> None:
        self.calls: dict[str, tuple[Tensors, dict[str, Stored], Values, str]] = {}
        self.often: Counter[str] = Counter()  # how often each is made, in the run that makes it most often
        self.case = ""  # that runs
        self._layout, self._now = layout, Counter[str]()
        self._round: Rounding = _nearest

    def start(self, rounding: Rounding) -> None:
        """Begin another run, whose answers are rounded so."""
        self._round, self._now = rounding, Counter()

    def _keep(self, tensors: Tensors, values: Values) -> None:
        described = stored(tensors)
        digest = digest_of(described, values)
        if digest not in self.calls:
            copies = {name: x.detach().clone() for name, x in tensors.items()}
            self.calls[digest] = copies, described, values, self.case
        self._now[digest] += 1
        self.often[digest] = max(self.often[digest], self._now[digest])

    def _plain(self, tensors: Tensors, values: Values) -> tuple[Tensor, Tensor]:
        """Return O in fp32, in the kernel's layout, and the log-sum-exp."""
        paged, at = "block_table" in tensors, [self._layout.index(letter) for letter in "bhnd"]
        q, k, v = (tensors[name].float() for name in ("q", "k", "v"))
        q, k, v = q.permute(at), *((x if paged else x.permute(at)) for x in (k, v))
        more: dict[str, Any] = {name: x for name, x in tensors.items() if name not in ("q", "k", "v", "do")}
        o, lse = runner.plain(q, k, v, **values, **more)
        return o.permute([("bhnd").index(letter) for letter in self._layout]), lse

    def forward(self, tensors: Tensors, values: Values) -> tuple[Tensor, ...]:
        """Keep a call."""
        self._keep(tensors, values)
        o, lse = self._plain(tensors, values)
        return self._round(o.contiguous(), tensors["q"].dtype), lse

    def backward(self, tensors: Tensors, values: Values) -> tuple[Tensor, ...]:
        """Keep a call with gradients."""
        self._keep(tensors, values)
        names = ("q", "k", "v", *(("sink",) if "sink" in tensors else ()))
        with torch.enable_grad():
            leaves = [tensors[name].float().detach().requires_grad_() for name in names]
            o, _ = self._plain({**tensors, **dict(zip(names, leaves, strict=True))}, values)
            made = torch.autograd.grad(o, leaves, tensors["do"].float())
        return tuple(x.to(tensors[name].dtype) for name, x in zip(names, made, strict=True))

    def merged(self) -> Iterator[Made]:
        """Yield the calls: one whose gradients are asked for is asked for O alone there too."""
        with_gradients = {
            digest_of({name: x for name, x in described.items() if name != "do"}, values)
            for _, described, values, _ in self.calls.values()
            if "do" in described
        }
        left = {digest: call for digest, call in self.calls.items() if digest not in with_gradients}
        for number, (digest, (tensors, described, values, case)) in enumerate(left.items(), 1):
            forward = digest_of({name: x for name, x in described.items() if name != "do"}, values)
            runs = min(_RUNS, max(self.often[digest], self.often[forward]))
            yield tensors, StoredCall(f"{number:04}", digest, case, described, values, runs)


def _nearest(o: Tensor, dtype: torch.dtype) -> Tensor:
    return o.to(dtype)


def _toward_zero(o: Tensor, dtype: torch.dtype) -> Tensor:
    lost = 16 if dtype == torch.bfloat16 else 13  # bits of fp32
    return (o.view(torch.int32) & -(1 << lost)).view(torch.float32).to(dtype)


def _at_random(o: Tensor, dtype: torch.dtype) -> Tensor:
    lost = 16 if dtype == torch.bfloat16 else 13
    return _toward_zero((o.view(torch.int32) + torch.randint(1 << lost, o.shape)).int().view(torch.float32), dtype)


def run_words(folder: Path, options: Mapping[str, str], takes: Sequence[str], layout: str) -> list[str]:
    """Return the words of `tiebreak check` for the run that makes a folder's calls."""
    refused = " ".join(word for word in TAKEN if word not in takes)
    declared = {"takes": " ".join(takes), "refuses": refused, "layout": layout}
    words = [TARGET, "--backend", FILES.name, "--as", str(folder)]
    words += [word for name, value in declared.items() for word in ("--declare", f"{name}={value}")]
    own = str(folder)  # of captured tensors that lie in the folder itself
    return words + [word for name, value in options.items() for word in (f"--{name}", value if value != "." else own)]


def recorded(folder: Path, given: Mapping[str, str], takes: Sequence[str], layout: str) -> tuple[list[Made], str]:
    """Return the calls of a run with these options, and the cases that make them."""
    recorder = Recorder(layout)
    with recording(folder, recorder), tempfile.TemporaryDirectory(prefix="tiebreak-") as out:
        names = _names(folder, given, run_words(folder, given, takes, layout))
        words = run_words(folder, {**given, "cases": names}, takes, layout)
        for rounding in (_nearest, _toward_zero, _at_random):
            recorder.start(rounding)
            asked = check.parsed([*words, "-n", "0", "--out", out], "tiebreak export")
            _, printed = check.run(asked, follower := _Follower(recorder))
            if follower.run is None:
                raise UsageError("interrupted" if follower.interrupted else check.refusal(printed))
    return list(recorder.merged()), names


class _Follower(check.Follower):
    """A plug-in that tells the recorder which case runs."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(sys.stderr)
        self._recorder = recorder

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        super().pytest_runtest_logstart(nodeid)
        assert self.collector is not None
        self._recorder.case = self.collector.expected[cell_id(nodeid)].experiment.name


def _names(folder: Path, given: Mapping[str, str], words: Sequence[str]) -> str:
    """Return the cases that files can show: those that are named, or usual ones that such a kernel takes."""
    selection = Selection(
        backends=FILES.name,
        formats=given["dtype"],
        kernel=(TARGET,),
        declare=tuple(word for flag, word in pairwise(words) if flag == "--declare"),
        card=str(folder),
        cases=given.get("cases"),
        captured=given.get("captured"),
        features=given.get("features"),
    )
    every, _ = cells(selection)
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
    options = _parser().parse_args(arguments)
    folder = options.folder
    if folder.exists() and (not folder.is_dir() or any(folder.glob("*.out.*")) or (folder / MANIFEST).exists()):
        raise UsageError(f"{folder}: has calls already, or is no folder: name a new one")
    takes = tuple(split(options.takes))
    if unknown := [word for word in takes if word not in TAKEN]:
        raise UsageError(f"--takes {unknown[0]}: known are {', '.join(TAKEN)}")
    given = {name: str(value) for name in _RUN if (value := getattr(options, name)) is not None}
    calls, given["cases"] = recorded(folder, given, takes, options.layout)
    size = sum(x.numel() * x.element_size() for tensors, _ in calls for x in tensors.values()) / MB
    print(f"{counted(len(calls), 'call')} of {counted(len(split(given['cases'])), 'case')}, {size:.1f} MB: {folder}")
    if size > options.most:
        raise UsageError(
            f"{size:.0f} MB are more than --most {options.most}: give fewer --heads or --cases, or raise it"
        )
    write(folder, given, takes, options.layout, options.raw, calls)
    if options.runner is not None:
        store.write_text(Path(runner.__file__).read_text(encoding="utf-8"), options.runner)
    return PASSED


def write(
    folder: Path, options: Mapping[str, str], takes: tuple[str, ...], layout: str, raw: bool, calls: Sequence[Made]
) -> None:
    """Write a folder of calls, the manifest last: without it the folder is none."""
    store.check_writable(folder)
    for tensors, call in calls:
        if not raw:
            runner.write(folder / f"{call.id}.in.safetensors", tensors, {"call": call.digest})
        for name, x in tensors.items() if raw else ():
            runner.replace(folder / f"{call.id}.{name}.bin", runner.to_bytes(x))
    if raw:
        store.write_text("".join(f"{_line(call)}\n" for _, call in calls), folder / "calls.txt")
    every = tuple(call for _, call in calls)
    manifest = Calls(SCHEMA, version("tiebreak"), options, takes, layout, raw, every, "")
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
    add("folder", type=Path, help="a new folder")
    add("--cases", metavar="NAMES", help="as of tiebreak check (default: failure inputs, normal numbers, the contract)")
    add("--dtype", default=BF16.name, metavar="NAMES", help="formats of q, k and v (default: bf16)")
    add("--heads", type=positive, default=32, metavar="N", help="of a case at first (default: 32)")
    add("--seed", type=count, default=1, metavar="N", help="of all inputs (default: 1)")
    add("--features", metavar="NAMES", help="added to each case, as of tiebreak check; --takes has to list them")
    add("--captured", metavar="DIR", help="tensors of a training run, as of tiebreak check")
    add("--takes", default=_TAKES, metavar="WORDS", help=f"what it takes, of {', '.join(TAKEN)} (default: {_TAKES})")
    add("--layout", choices=_LAYOUTS, default=_LAYOUTS[0], help="order of dimensions (default: bhnd)")
    add("--raw", action="store_true", help="write files of bytes, and calls.txt, for readers without a library")
    add("--most", type=positive, default=64, metavar="MB", help="refuse to write more (default: 64)")
    add("--runner", type=Path, metavar="FILE.py", help="write the program that runs the calls, with torch alone")
    return parser
