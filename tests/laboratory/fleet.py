"""The verb `tiebreak lab fleet`: the matrix on each kind of machine of a Ray cluster, compared, and a page."""

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiebreak.backends.levels import LEVELS
from tiebreak.laboratory import flags
from tiebreak.laboratory.levels.command import environment
from tiebreak.laboratory.ray_cluster import Cluster, Node, address_of, connected, first_line
from tiebreak.laboratory.resumable import show_progress
from tiebreak.programs.processes import CELLS, finished
from tiebreak.reports.cli import FAILED, INTERRUPTED, PASSED
from tiebreak.reports.errors import UsageError
from tiebreak.reports.names import split
from tiebreak.reports.page import command as page
from tiebreak.reports.records import store
from tiebreak.reports.records.record import Run
from tiebreak.reports.records.store import UnreadableRecordsError
from tiebreak.reports.tables import compare
from tiebreak.reports.tables.run import counted, counts

LEVEL_LABEL = "tiebreak-level"  # a node's label: the instruction-set level that its runs are forced to
_NAME = "records"  # of the file that a node writes
_LAST_LINES = 20  # of what pytest said, that come home
_ABOUT = """The matrix once on each kind of machine of a Ray cluster, with each machine's own PyTorch.
Arguments of pytest follow after --."""
_EPILOG = f"""A node's label {LEVEL_LABEL} forces an instruction-set level.
exit codes: 0 all passed, 1 something failed or a kind gave no records, 2 bad usage or no cluster, 130 stopped: records
that came are kept"""
_OPTIONS: flags.Options = {
    "--on": {"required": True, "metavar": "WHERE", "help": "ray://HOST:PORT, HOST:PORT, or ray: here alone"},
    "--labels": {"default": "", "metavar": "NAMES", "help": "labels that make a kind (default: all of them)"},
    "--out": {**flags.FOLDER, "default": Path("out", "fleet"), "help": "for the records and the page"},
}


@dataclass(frozen=True)
class MatrixResult:
    code: int  # pytest's exit code
    records: bytes  # the file; empty: there is none
    last: str  # the last lines that pytest said


def main(argv: Sequence[str]) -> int:
    """The verb `fleet`: 0 if every kind passed, 1 if something failed or a kind gave no records, 130 after Ctrl-C."""
    given = list(argv)
    at = given.index("--") if "--" in given else len(given)
    options, matrix = flags.parser("fleet", _ABOUT, _EPILOG, where=_OPTIONS).parse_args(given[:at]), given[at + 1 :]
    address = address_of(options.on)
    store.check_writable(options.out)
    home: list[Path] = []
    try:
        with connected(address) as cluster:
            machines = kinds(cluster.nodes, split(options.labels))
            if not machines:
                raise UsageError(f"--on {options.on}: the cluster has no node with a core")
            code = _run(cluster, machines, matrix, options.out, home)
    except KeyboardInterrupt:
        print(f"\nstopped; {options.out} has the records of {counted(len(home), 'kind')}", file=sys.stderr)
        return INTERRUPTED
    if not home:
        print("no records came home", file=sys.stderr)
        return FAILED
    files = list(map(str, home))
    if len(files) > 1:
        compare.main(files)
    page.main([*files, "-o", str(options.out)])
    return code


def kinds(nodes: Sequence[Node], labels: Sequence[str] = ()) -> dict[str, list[Node]]:
    """Return which machines are alike, by the name of their file: one type of accelerator and the same labels.

    The labels that count are those named; none: all that Ray has not set itself. UsageError: a label that no node has.
    """
    for name in labels:
        if not any(name in node.labels for node in nodes):
            known = sorted({label for node in nodes for label in node.labels})
            raise UsageError(f"--labels {name}: no node has it; they have {', '.join(known) or 'none'}")
    machines: dict[str, list[Node]] = {}
    for node in nodes:
        values = [value for name, value in sorted(node.labels.items()) if not labels or name in labels]
        accelerator = node.accelerator or ("gpu" if node.gpus else "cpu")
        machines.setdefault(re.sub(r"[^\w.+-]", "_", "-".join([accelerator, *values])), []).append(node)
    return dict(sorted(machines.items()))


def _run(
    cluster: Cluster, machines: Mapping[str, Sequence[Node]], matrix: Sequence[str], out: Path, home: list[Path]
) -> int:
    """Run the matrix on each kind, its records brought home as it ends; 0, or 1 if something failed."""
    for kind, nodes in machines.items():
        level = f" on {nodes[0].labels[LEVEL_LABEL]}" if LEVEL_LABEL in nodes[0].labels else ""
        print(f"{kind}{level}: {counted(len(nodes), 'node')}, one of them runs the matrix", flush=True)
    codes = [PASSED]

    def ended() -> Iterator[str]:
        for kind, result in run_each(cluster, machines, matrix):
            codes.append(FAILED if isinstance(result, Exception) or result.code else PASSED)
            yield f"{kind}: {result if isinstance(result, Exception) else _bring(result, out / f'{kind}.json', home)}"

    show_progress(ended(), len(machines), "kind")
    return max(codes)


def run_each(
    cluster: Cluster, machines: Mapping[str, Sequence[Node]], matrix: Sequence[str]
) -> Iterator[tuple[str, MatrixResult | Exception]]:
    """Yield what came of each kind, as it ends; where a node dies, the kind's next has a try."""
    running: dict[Any, tuple[str, Sequence[Node]]] = {}

    def start(kind: str, node: Node, *others: Node) -> None:
        running[cluster.start(on_node, node, list(matrix), level_of(node))] = kind, others

    for kind, nodes in machines.items():
        start(kind, *nodes)
    while running:
        for reference, result in cluster.finished(list(running)):
            kind, others = running.pop(reference)
            if not isinstance(result, Exception):
                yield kind, result
            elif others:
                start(kind, *others)
            else:
                yield kind, UsageError(f"no records: {first_line(result)}")


def level_of(node: Node) -> str | None:
    """Return the instruction-set level that a node's label asks for; UsageError: there is no such level."""
    name, known = node.labels.get(LEVEL_LABEL), [level.name for level in LEVELS]
    if name not in (None, *known):
        raise UsageError(f"a node's label {LEVEL_LABEL}={name}: known are {', '.join(known)}")
    return name


def _bring(result: MatrixResult, path: Path, home: list[Path]) -> str:
    """Keep what came; return what to say of it."""
    if not result.records:
        print(result.last, file=sys.stderr)
        return f"no records (pytest's exit code {result.code})"
    try:
        run = store.decoded(result.records, path, Run)
    except UnreadableRecordsError as error:
        return f"no records: {error}"
    store.write_text(result.records.decode("utf-8"), path)
    home.append(path)
    return f"{counts(run.records)}, PyTorch {run.platform.get('torch')}"


def on_node(matrix: Sequence[str], level: str | None) -> MatrixResult:
    """Run the matrix with this machine's Python and PyTorch, on an instruction-set level or as it is: a node's task."""
    forced = [each for each in LEVELS if each.name == level]
    environ = environment(forced[0]) if forced else os.environ
    # What Ray told its worker is not the matrix' own.
    environ = {name: value for name, value in environ.items() if name not in ("OMP_NUM_THREADS", "PYTEST_ADDOPTS")}
    with tempfile.TemporaryDirectory(prefix="tiebreak-fleet-") as folder:
        words = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", folder, "--import-mode=importlib"]
        words += ["-p", "no:cacheprovider", *CELLS, *matrix, "--save", _NAME, "--out", folder]
        done = finished(words, environ, Path(folder))
        path = Path(folder, f"{_NAME}.json")
        records = path.read_bytes() if path.exists() else b""
    last = "\n".join([*done.stdout.splitlines()[-_LAST_LINES:], *done.stderr.splitlines()[-_LAST_LINES:]])
    return MatrixResult(done.returncode, records, last)
