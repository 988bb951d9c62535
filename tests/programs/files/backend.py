"""The backend `files`: a kernel whose answers lie in a folder; and the same kernel while its calls are recorded."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import Tensor

from tiebreak.backends.backend import Backend
from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.kernels.external.options import kernel
from tiebreak.kernels.kernel import CannotRunError, NotAskedError
from tiebreak.programs.files import runner
from tiebreak.reports.calls import MANIFEST, Calls, Stored, StoredCall, digest_of
from tiebreak.reports.errors import UsageError
from tiebreak.reports.records import store
from tiebreak.reports.records.store import UnreadableRecordsError, one_line
from tiebreak.reports.statement import digest

TARGET = f"{__name__}:attention"
DEVICE = "device.json"
NOT_ASKED = "whether calls change their inputs or the process, leak, or depend on calls before them; and time"
_NAMES = {dtype: name for name, (_, dtype) in runner.FORMATS.items()}
_PLACED = ("q", "k", "v", "do")

Tensors = Mapping[str, Tensor]
Values = Mapping[str, Any]


class Answering(Protocol):
    """What answers the calls of the kernel: a folder, or who records them."""

    def forward(self, tensors: Tensors, values: Values) -> tuple[Tensor, ...]:
        """Return O, and perhaps the log-sum-exp."""

    def backward(self, tensors: Tensors, values: Values) -> tuple[Tensor, ...]:
        """Return dQ, dK and dV."""


def stored(tensors: Tensors) -> dict[str, Stored]:
    """Return tensors as a manifest has them."""
    return {
        name: Stored(
            _NAMES[x.dtype],
            tuple(x.shape),
            digest(runner.to_bytes(x)),
            tuple(x.stride()) if name in _PLACED and not x.is_contiguous() else None,
        )
        for name, x in tensors.items()
    }


@dataclass
class Folder:
    """A folder of calls, and the outputs that somebody wrote into it."""

    path: Path
    manifest: Calls
    times: Counter[str] = field(default_factory=Counter)  # how often each call was asked for in this process

    @classmethod
    def read(cls, path: Path) -> "Folder":
        """Read the manifest; UsageError: there is none, or it can't be used."""
        try:
            return cls(path, store.load(path / MANIFEST, Calls))
        except UnreadableRecordsError as error:
            raise UsageError(str(error)) from error

    def __post_init__(self) -> None:
        self._by_digest = {call.digest: call for call in self.manifest.calls}
        self._forward: dict[str, StoredCall] = {}
        for call in self.manifest.calls:
            tensors = {name: x for name, x in call.tensors.items() if name != "do"}
            self._forward.setdefault(digest_of(tensors, call.values), call)

    @property
    def stated(self) -> dict[str, Any]:
        """What device.json says of the device; UsageError: it is no JSON object."""
        path = self.path / DEVICE
        try:
            said = json.loads(path.read_bytes()) if path.exists() else {}
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}: not JSON ({one_line(str(error))})") from error
        if not isinstance(said, dict):
            raise UsageError(f'{path}: expected an object, such as {{"device": "..."}}')
        return said

    def faults(self) -> Iterator[str]:
        """Yield what is missing or wrong in the folder, a line each; without any, all can be judged."""
        for call in self.manifest.calls:
            try:
                yield from self._input_faults(call)
                yield from self._output_faults(call)
            except (OSError, ValueError) as error:
                yield f"{self.path}: {call.id} ({call.case}): {one_line(str(error))}"

    def _input_faults(self, call: StoredCall) -> Iterator[str]:
        there = [*self.path.glob(f"{call.id}.in.safetensors"), *self.path.glob(f"{call.id}.q.bin")]
        if there and stored_without_strides(runner.inputs(self.path, _plain(call))) != without_strides(call.tensors):
            yield f"{self.path}: {call.id} ({call.case}): its inputs are not those that were exported: export again"

    def _output_faults(self, call: StoredCall) -> Iterator[str]:
        where = f"{self.path}: {call.id} ({call.case}):"
        outputs, metadata = self.outputs(call)
        if (of := metadata.get("call")) != call.digest:
            other = self._by_digest.get(str(of))
            yield f"{where} its output says that it is of {f'call {other.id}' if other else 'another call'}"
        elif not {"refused", "raised"} & metadata.keys():
            expected = (f"{name}.{run}" if run else name for run in range(call.runs) for name in self._wanted(call))
            yield from (f"{where} its output has no {name}: write it" for name in expected if name not in outputs)
            for name, x in outputs.items():
                yield from (f"{where} {fault}" for fault in _shape_faults(name, x, call, self.manifest.layout))

    def _wanted(self, call: StoredCall) -> tuple[str, ...]:
        return call.outputs if self.has_gradients else call.outputs[:1]

    @property
    def has_gradients(self) -> bool:
        """True if any call is answered with gradients: then all that ask for some have to be."""
        if not hasattr(self, "_gradients"):
            self._gradients = any("dq" in self._names(call) for call in self.manifest.calls if "do" in call.tensors)
        return self._gradients

    def _names(self, call: StoredCall) -> Collection[str]:
        try:
            return self.outputs(call)[0]
        except (OSError, ValueError):
            return ()

    def outputs(self, call: StoredCall) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return what was written for a call, and what is said of it; ValueError: none, or nothing to be read."""
        path, described = (self.path / f"{call.id}.out.{end}" for end in ("safetensors", "json"))
        if path.exists():
            return _read(path, path.stat().st_mtime_ns)
        if not described.exists():
            raise ValueError("it has no output: run it, or say why not (docs/files.md)")
        said = json.loads(described.read_bytes())
        if not isinstance(said, dict) or not isinstance(said.setdefault("tensors", {}), dict):
            raise ValueError(f"{described.name}: expected an object of call and tensors")
        tensors = {}
        for name, entry in said.pop("tensors").items():
            if not isinstance(entry, dict) or entry.get("format") not in runner.FORMATS or "shape" not in entry:
                raise ValueError(f"{described.name}: {name}: expected a format and a shape")
            content = (self.path / f"{call.id}.{name}.bin").read_bytes()
            tensors[name] = runner.from_bytes(content, runner.FORMATS[entry["format"]][1], entry["shape"])
        return tensors, said

    def _answer(self, call: StoredCall | None, names: tuple[str, ...]) -> tuple[Tensor, ...]:
        if call is None:
            raise NotAskedError(f"not among the calls of {self.path}: nobody has been asked for it")
        outputs, metadata = self.outputs(call)
        if "refused" in metadata:
            raise CannotRunError(f"refused: {metadata['refused']}")
        if "raised" in metadata:
            raise RuntimeError(metadata["raised"])
        run = self.times[call.digest + names[0]] % call.runs
        self.times[call.digest + names[0]] += 1
        found = [outputs.get(f"{name}.{run}" if run else name) for name in names]
        return tuple(x.clone() for x in found if x is not None)

    def forward(self, tensors: Tensors, values: Values) -> tuple[Tensor, ...]:
        """Return O, and the log-sum-exp if it was written."""
        return self._answer(self._forward.get(digest_of(stored(tensors), values)), ("o", "lse"))

    def backward(self, tensors: Tensors, values: Values) -> tuple[Tensor, ...]:
        """Return dQ, dK and dV."""
        return self._answer(self._by_digest.get(digest_of(stored(tensors), values)), ("dq", "dk", "dv", "dsink"))


@lru_cache(maxsize=4)
def _read(path: Path, changed: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    del changed
    return runner.read(path)


def _plain(call: StoredCall) -> dict[str, Any]:
    tensors = {name: {"format": x.format, "shape": x.shape} for name, x in call.tensors.items()}
    return {"id": call.id, "tensors": tensors}


def without_strides(tensors: Mapping[str, Stored]) -> dict[str, tuple[object, ...]]:
    """Return what a file shows of tensors."""
    return {name: (x.format, x.shape, x.sha256) for name, x in tensors.items()}


def stored_without_strides(tensors: Tensors) -> dict[str, tuple[object, ...]]:
    """Return what a file shows of tensors, from the tensors."""
    return without_strides(stored(tensors))


def _shape_faults(name: str, x: Tensor, call: StoredCall, layout: str) -> Iterator[str]:
    """Yield why an output is not in the shape and format that it is to have; of a log-sum-exp its question tells."""
    like = {"o": "q", "dq": "q", "dk": "k", "dv": "v", "dsink": "sink"}.get(name.partition(".")[0])
    if like is None or like not in call.tensors:
        if name.partition(".")[0] != "lse":
            yield f"its output has {name}, which was not asked for"
        return
    entry, shape = call.tensors[like], list(call.tensors[like].shape)
    if like == "q" and name.startswith("o"):
        shape[layout.index("d")] = call.tensors["v"].shape[-1 if "block_table" in call.tensors else layout.index("d")]
    formats = {entry.format, *(("fp32",) if like == "sink" else ())}
    if list(x.shape) != shape:
        yield f"{name} has the shape {list(x.shape)}, expected {shape}"
    if _NAMES[x.dtype] not in formats:
        yield f"{name} is in {_NAMES[x.dtype]}, expected {entry.format}"


class _Current:
    answering: ClassVar[Answering | None] = None  # of the calls that are being made
    opened: ClassVar[dict[Path, Answering]] = {}


def opened(path: Path) -> Answering:
    """Return what answers the calls of a folder, read once in this process."""
    path = path.resolve()
    if path not in _Current.opened:
        _Current.opened[path] = Folder.read(path)
    return _Current.opened[path]


def reopened(path: Path) -> Folder:
    """Read a folder anew; UsageError: it is none."""
    _Current.opened[path.resolve()] = folder = Folder.read(path)
    return folder


@contextmanager
def recording(path: Path, recorder: Answering) -> Iterator[None]:
    """Let calls of a folder be recorded."""
    _Current.opened[path.resolve()] = recorder
    try:
        yield
    finally:
        del _Current.opened[path.resolve()]


def _called(tensors: dict[str, Tensor], values: dict[str, Any]) -> tuple[Tensors, Values, Answering]:
    """Return the tensors and values of a call that say something, and what answers it."""
    given = {name: x for name, x in values.items() if name in ("causal", "scale") or x is not None}
    tensors |= {name: x for name, x in given.items() if isinstance(x, Tensor)}
    plain = {name: list(x) if isinstance(x, tuple) else x for name, x in given.items() if name not in tensors}
    if _Current.answering is None:
        raise CannotRunError("it is the kernel of `tiebreak judge` alone")
    return tensors, plain, _Current.answering


def _backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, **values: Any) -> tuple[Tensor, ...]:
    """Return the gradients that a folder has."""
    del o
    tensors, plain, answering = _called({"q": q, "k": k, "v": v, "do": do}, values)
    return answering.backward(tensors, plain)


@kernel(backward=_backward, name="files")
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int, int] | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    attn_bias: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    cache_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return the O that a folder has for these arguments, with its log-sum-exp if there is one."""
    values = {name: value for name, value in locals().items() if name not in _PLACED}
    tensors, plain, answering = _called({"q": q, "k": k, "v": v}, values)
    return answering.forward(tensors, plain)


@dataclass(frozen=True)
class _Files(Backend):
    """A backend that runs nothing: somebody has run it elsewhere."""

    folder: str = ""

    @property
    def evidence(self) -> str:
        return self.bits

    @property
    def options(self) -> tuple[str, ...]:
        return ("--as", self.folder) if self.folder else ()

    def notice(self) -> str:
        return f"outputs in {self.folder}, {_device_of(self.folder)}; not asked: {NOT_ASKED}"

    def assuming(self, card: str) -> Backend:
        return replace(self, folder=card, unavailable=partial(_unreadable, card))

    def describe(self) -> dict[str, Any]:
        return {"assumed": {self.name: _device_of(self.folder)}, "stated": _stated(self.folder)}

    def fingerprint(self) -> Mapping[str, str | float]:
        return {}  # nothing of the device can be measured here

    @contextmanager
    def in_use(self) -> Iterator[Collection[str]]:
        before, _Current.answering = _Current.answering, opened(Path(self.folder))
        try:
            yield ()
        finally:
            _Current.answering = before


def _stated(folder: str) -> dict[str, Any]:
    answering: Any = _Current.opened.get(Path(folder).resolve()) or Folder.read(Path(folder))
    return dict(getattr(answering, "stated", {}))


def _device_of(folder: str) -> str:
    name = _stated(folder).get("device")
    stated = f"from {one_line(str(name))}, as {DEVICE} states (not measured)"
    return stated if name else "from a device that nobody states"


def _unreadable(folder: str) -> str | None:
    if Path(folder).resolve() in _Current.opened:
        return None
    try:
        Folder.read(Path(folder))
    except UsageError as error:
        return str(error)
    return None


_NO_FOLDER: Callable[[], str | None] = lambda: "no folder of calls: tiebreak judge FOLDER, or --as FOLDER"  # noqa: E731
FILES = _Files(
    "files",
    "outputs that another program wrote into a folder of `tiebreak export`",
    "cpu",
    EmulatedArithmetic(),
    _NO_FOLDER,
    tuple,
    composed=False,
    on_request=True,
    bits="bits that files have",
    resident=False,
)
