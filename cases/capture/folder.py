"""A folder of captures under a budget: the least telling give way, and no reader ever sees half a file."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from tiebreak.cases import runner
from tiebreak.cases.capture.interest import Candidate
from tiebreak.cases.capture.watch import CaptureError
from tiebreak.cases.captured import FILE

_HEADER = 2**13  # of a file, about
MB = 10**6


class Kept(NamedTuple):
    """A file of this process's captures."""

    bytes: int
    telling: float
    words: Mapping[str, str]  # its metadata

    def shown(self, name: str) -> str:
        """Return what it tells of its most telling layer; - where it does not."""
        layers = [key.removesuffix(".telling") for key in self.words if key.endswith(".telling")]
        most = max(layers, key=lambda layer: float(self.words[f"{layer}.telling"]), default="")
        return self.words.get(f"{most}.{name}", "-")


class Folder:
    """The files of one process in a folder that several may share: each has its own names and its own share."""

    def __init__(self, path: Path, budget: int, rank: int, ranks: int) -> None:
        """Make the folder if it is missing, and read which files earlier runs left.

        The budget, in bytes, is that of the whole folder; the processes, `rank` of `ranks`, have equal shares.
        CaptureError: no right to write, or no room next to files that are not of `capture`.
        """
        self.path, self._suffix = path, f"-rank{rank}" if ranks > 1 else ""
        with _write_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path, prefix=".writable-"):
                pass
            for left in path.glob(f"inputs-*{self._suffix or '[0-9]'}.safetensors.partial"):
                left.unlink(missing_ok=True)  # of a run that was killed
            suffixes = {file: match[2] or "" for file in path.iterdir() if (match := FILE.fullmatch(file.name))}
            sizes = {file: file.stat().st_size for file in suffixes}
        ours = {f"-rank{other}" for other in range(ranks)} if ranks > 1 else {""}
        files_here = {file: Kept(sizes[file], *told) for file in sizes if (told := _told(file)) is not None}
        of_this_run = {file: kept for file, kept in files_here.items() if suffixes[file] in ours}
        foreign = sum(size for file, size in sizes.items() if file not in of_this_run)
        self.budget = (budget - foreign) // ranks
        if self.budget <= 0:
            raise CaptureError(
                f"budget_mb={budget / MB:g}: {path} has {foreign / MB:.1f} MB of captures that are not this run's to"
                " replace; raise it, or name another folder"
            )
        self.kept = {file: kept for file, kept in of_this_run.items() if suffixes[file] == self._suffix}
        self._make_room(0)

    @property
    def last_step(self) -> int | None:
        """The highest step of any file in the folder."""
        steps = [int(match[1]) for path in self.path.iterdir() if (match := FILE.fullmatch(path.name))]
        return max(steps, default=None)

    @property
    def bytes(self) -> int:
        """The size of this process's files."""
        return sum(file.bytes for file in self.kept.values())

    @property
    def room(self) -> int:
        """The bytes of tensors that fit in the whole budget."""
        return self.budget - _HEADER

    def write(self, step: int, layers: Sequence[Candidate]) -> Path | None:
        """Write layers, the most telling first, and delete less telling files; None: nothing there is less telling.

        CaptureError: it can't be written. FileExistsError: there is a file of this step. What was there stays.
        """
        path = self.path / f"inputs-{step:06d}{self._suffix}.safetensors"
        telling = layers[0].findings.telling
        weaker = sum(file.bytes for file in self.kept.values() if file.telling < telling)
        if self.bytes - weaker + sum(layer.bytes for layer in layers) + _HEADER > self.budget:
            return None
        if path.exists():
            raise FileExistsError(path)
        tensors, metadata = _content(step, layers)
        metadata["telling"] = f"{telling:.6g}"
        with _write_errors(self.path):
            runner.write(path, tensors, metadata)
            size = path.stat().st_size
        self._make_room(size)
        self.kept[path] = Kept(size, telling, metadata)
        return path

    def _make_room(self, size: int) -> None:
        for path, _ in sorted(self.kept.items(), key=lambda item: item[1].telling):
            if self.bytes + size <= self.budget:
                break
            path.unlink(missing_ok=True)
            del self.kept[path]


@contextmanager
def _write_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CaptureError(f"capture: cannot write to {folder}: {error.strerror or error}") from error


def _told(path: Path) -> tuple[float, Mapping[str, str]] | None:
    """Return how telling a file is, and its metadata; None where `capture` did not write it, which it never touches."""
    try:
        _, words = runner.read(path)
        return float(words["telling"]), words
    except (OSError, KeyError, ValueError):
        return None


def _content(step: int, layers: Sequence[Candidate]) -> tuple[dict[str, Tensor], dict[str, str]]:
    tensors: dict[str, Tensor] = {}
    details = {"step": str(step), "causal": str(all(layer.call.causal for layer in layers)).lower()}
    for layer in layers:
        key, call = f"layer{layer.layer}", layer.call
        parts = {"q": call.q, "k": call.k, "v": call.v, "o": layer.o, **({} if layer.do is None else {"do": layer.do})}
        tensors |= {f"{key}.{name}": part for name, part in parts.items()} | {f"{key}.heads": layer.heads}
        details |= {f"{key}.causal": str(call.causal).lower(), f"{key}.name": layer.name}
        details |= {} if layer.trained else {f"{key}.forward": "true"}
        details |= {} if call.scale is None else {f"{key}.scale": repr(call.scale)}
        for name in ("telling", "repeated", "delta_bias", "largest", "sinks", "bias"):
            details[f"{key}.{name}"] = f"{getattr(layer.findings, name):.6g}"
        entry, head = layer.heads[int(layer.findings.worst)].tolist()
        details[f"{key}.worst"] = f"{head} of batch entry {entry}"
    return tensors, details
