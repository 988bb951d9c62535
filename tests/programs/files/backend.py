"""The backend `files`: a kernel whose answers lie in a folder of `tiebreak export`."""

import inspect
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from msgspec import structs
from torch import Tensor

from tiebreak.backends.backend import Backend
from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.cases import runner
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.external.options import BINARY, declared_options, kernel
from tiebreak.kernels.features import FEATURES, GROUPED
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import CannotRunError, Kernel, NotAskedError
from tiebreak.reports.calls import MANIFEST, Calls, Stored, StoredCall, digest_of
from tiebreak.reports.errors import UsageError
from tiebreak.reports.records import store
from tiebreak.reports.records.decode import convert, decode
from tiebreak.reports.records.store import digest, one_line

TARGET = f"{__name__}:attention"
DEVICE = "device.json"
NOT_ASKED = "whether calls change their inputs or the process, leak, or depend on calls before them; and time"
_NAMES = {dtype: name for name, (_, dtype) in runner.FORMATS.items()}
_LIKE = {"o": "q", "dq": "q", "dk": "k", "dv": "v", "dsink": "sink"}  # the input whose shape and format an output has
_ARGUMENTS = ("q", "k", "v", "do")

Tensors = Mapping[str, Tensor]
Values = Mapping[str, Any]


def stored(tensors: Tensors) -> dict[str, Stored]:
    """Return tensors as a manifest has them."""
    return {
        name: Stored(
            _NAMES[x.dtype],
            tuple(x.shape),
            digest(runner.to_bytes(x)),
            tuple(x.stride()) if name in _ARGUMENTS and not x.is_contiguous() else None,
        )
        for name, x in tensors.items()
    }


def as_called(arguments: Tensors, keywords: Values) -> tuple[Tensors, Values]:
    """Return the tensors and the other values of a call, by name, without those that say nothing."""
    given = {name: x for name, x in keywords.items() if name in ("causal", "scale") or x is not None}
    tensors = {**arguments, **{name: x for name, x in given.items() if isinstance(x, Tensor)}}
    return tensors, {name: list(x) if isinstance(x, tuple) else x for name, x in given.items() if name not in tensors}


class _Told(msgspec.Struct):
    """The fields of device.json that are more than words to print: it may have any others."""

    products: tuple[str, ...] = ()  # how the device adds up products, as points of a plan: accumulator=amx
    declare: Mapping[str, Any] = {}  # what --declare says of the kernel


@dataclass
class CallFolder:
    """A folder of calls, and the outputs that somebody wrote into it."""

    path: Path
    manifest: Calls
    times: Counter[str] = field(default_factory=Counter)  # how often each call was asked for in this process

    @cached_property
    def _by_digest(self) -> Mapping[str, StoredCall]:
        """The calls, by the digests of themselves, and of themselves without dO."""
        forward = {digest_of(call.forward, call.values): call for call in reversed(self.manifest.calls)}
        return {**forward, **{call.digest: call for call in self.manifest.calls}}

    @cached_property
    def stated(self) -> dict[str, Any]:
        """The content of device.json; UsageError: it is not an object, or `products` or `declare` has another type."""
        path = self.path / DEVICE
        try:
            said = decode(path.read_bytes(), dict[str, Any]) if path.exists() else {}
            told = convert(said, _Told)
            declared_options(None, [f"{word}={value}" for word, value in told.declare.items()])
            parse_declaration(",".join(["flash@paper", *told.products]))
        except ValueError as error:
            raise UsageError(f"{path}: {one_line(str(error))}") from error
        return said

    def faults(self) -> Iterator[str]:
        """Yield what is missing or wrong in the folder, a line each; without any, all can be judged."""
        for name, sha256 in self.manifest.files.items():
            if not (path := self.path / name).is_file() or digest(path.read_bytes()) != sha256:
                yield f"{path}: is not what was exported: export again"
        for call in self.manifest.calls:
            try:
                faults = [*self._input_faults(call), *self._output_faults(call)]
            except (OSError, ValueError) as error:
                faults = [one_line(str(error))]
            yield from (f"{self.path}: {call.id} ({call.case}): {fault}" for fault in faults)

    def _input_faults(self, call: StoredCall) -> Iterator[str]:
        if any((self.path / f"{call.id}.{end}").exists() for end in ("in.safetensors", "q.bin")):
            exported = {name: structs.replace(x, strides=None) for name, x in call.tensors.items()}
            if stored(runner.inputs(self.path, msgspec.to_builtins(call))) != exported:
                yield "its inputs are not those that were exported: export again"

    def _output_faults(self, call: StoredCall) -> Iterator[str]:
        outputs, metadata = self.outputs(call)
        if (of := metadata.get("call")) != call.digest:
            other = self._by_digest.get(str(of))
            yield f"its output says that it is of {f'call {other.id}' if other else 'another call'}"
        elif not {"refused", "raised"} & metadata.keys():
            wanted = call.outputs if self.has_gradients else call.outputs[:1]
            runs = [f".{run}" if run else "" for run in range(call.runs)]
            yield from (
                f"its output has no {name}{run}: write it"
                for run in runs
                for name in wanted
                if f"{name}{run}" not in outputs
            )
            for name, x in outputs.items():
                expected, shape = self._expected(call, name)
                if name.removeprefix(name.partition(".")[0]) not in runs:
                    yield f"its output has {name}, and the call has {call.runs} of its runs"
                if list(x.shape) != shape and shape:
                    yield f"{name} has the shape {list(x.shape)}, expected {shape}"
                if _NAMES[x.dtype] not in (expected, "fp32" if name[:5] == "dsink" else ""):
                    yield f"{name} is in {_NAMES[x.dtype]}, expected {expected}"

    def _expected(self, call: StoredCall, name: str) -> tuple[str, list[int]]:
        """Return format and shape that an output is to have; of packed sequences' log-sum-exp no shape."""
        kind, layout = name.partition(".")[0], self.manifest.layout
        if kind == "lse":
            q = call.tensors["q"].shape
            return "fp32", [q[layout.index(letter)] for letter in "bhn"] if len(q) == len(layout) else []
        if (like := call.tensors.get(_LIKE.get(kind, ""))) is None:
            raise ValueError(f"its output has {name}, which was not asked for")
        shape = list(like.shape)
        if kind == "o":
            paged = "block_table" in call.tensors
            shape[layout.index("d")] = call.tensors["v"].shape[-1 if paged else layout.index("d")]
        return like.format, shape

    @cached_property
    def has_gradients(self) -> bool:
        """True if any call is answered with gradients: then all that ask for some have to be."""
        for call in self.manifest.calls:
            with suppress(OSError, ValueError):  # which are faults of that call
                if "do" in call.tensors and "dq" in self.outputs(call)[0]:
                    return True
        return False

    def outputs(self, call: StoredCall) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return what was written for a call, and what is said of it; ValueError: none, or nothing to be read."""
        files = [path for end in ("safetensors", "json") if (path := self.path / f"{call.id}.out.{end}").exists()]
        if len(files) > 1:
            raise ValueError(f"it has two outputs, {files[0].name} and {files[1].name}: delete one")
        if not files:
            raise ValueError("it has no output: run it, or say why not (docs/files.md)")
        try:
            if files[0].suffix == ".safetensors":
                return runner.read(files[0])
            said = decode(files[0].read_bytes(), dict[str, Any])
        except ValueError as error:
            raise ValueError(f"{files[0].name}: {one_line(str(error))}") from error
        tensors = {}
        for file in self.path.glob(f"{call.id}.*.bin"):
            if (name := file.name[len(call.id) + 1 : -len(".bin")]) not in call.tensors:
                expected, shape = self._expected(call, name)
                if not shape:
                    raise ValueError(f"{file.name}: the log-sum-exp of packed sequences is not read from raw files")
                tensors[name] = runner.from_bytes(bytearray(file.read_bytes()), runner.FORMATS[expected][1], shape)
        return tensors, said

    def unjudged(self) -> Iterator[str]:
        """Yield the calls whose answer is an error, NaN or Inf: none passes, though no cell may judge it."""
        for call in self.manifest.calls:
            outputs, metadata = self.outputs(call)
            if "raised" in metadata:
                yield f"call {call.id} raised {one_line(str(metadata['raised']))}"
            wrong = [name for name, x in outputs.items() if call.finite and not name.startswith("lse")
                     and not x.isfinite().all()]  # fmt: skip
            yield from (f"call {call.id} has {name} with NaN or Inf, of finite inputs" for name in wrong)

    def answer(self, names: tuple[str, ...], tensors: Tensors, values: Values) -> tuple[Tensor, ...]:
        """Return the outputs of these names that a call has; at each time those of its next run."""
        call = self._by_digest.get(digest_of(stored(tensors), values))
        if call is None:
            raise NotAskedError(f"not among the calls of {self.path}: export with the options that this run has")
        outputs, metadata = self.outputs(call)
        if "refused" in metadata:
            raise CannotRunError(f"refused: {metadata['refused']}")
        if "raised" in metadata:
            raise ElsewhereError(metadata["raised"])
        run = self.times[call.digest + names[0]] % call.runs
        self.times[call.digest + names[0]] += 1
        found = [outputs.get(f"{name}.{run}" if run else name) for name in names]
        return tuple(x.clone() for x in found if x is not None)


class ElsewhereError(Exception):
    """An error that a kernel raised where it ran, in its words."""


@cache
def opened(path: str) -> CallFolder:
    """Read a folder's manifest, once in this process; UsageError: there is none, or it can't be used."""
    return CallFolder(Path(path), store.load(Path(path) / MANIFEST, Calls))


class _Current:
    folder: ClassVar[CallFolder | None] = None  # whose calls are being made
    lse: ClassVar[Tensor | None] = None  # of the last one

    @classmethod
    def answer(cls, names: tuple[str, ...], arguments: Tensors, keywords: Values) -> tuple[Tensor, ...]:
        if cls.folder is None:
            raise CannotRunError("it is the kernel of `tiebreak judge` alone")
        return cls.folder.answer(names, *as_called(arguments, keywords))


def _backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, **keywords: Any) -> tuple[Tensor, ...]:
    """Return the gradients that a folder has."""
    del o
    return _Current.answer(("dq", "dk", "dv", "dsink"), {"q": q, "k": k, "v": v, "do": do}, keywords)


@kernel(backward=_backward, name="files")
def attention(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> tuple[Tensor, ...]:
    """Return the O that a folder has for these arguments, with its log-sum-exp if there is one."""
    found = _Current.answer(("o", "lse"), {"q": q, "k": k, "v": v}, keywords)
    _Current.lse = found[1] if len(found) > 1 else None
    return found


#: The keywords of all features, each by one name.
_KEYWORDS = ("causal", *(word for each in FEATURES if each is not GROUPED for word in each.keywords[: each.parts]))
attention.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        *(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in "qkv"),
        *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in _KEYWORDS),
    ]
)


def device_text(stated: Values) -> str:
    """Return the device of outputs, as device.json states it, in words."""
    if name := stated.get("device"):
        return f"from {one_line(str(name))}, as {DEVICE} states (not measured)"
    return "from a device that nobody states"


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
        return f"outputs in {self.folder}, {device_text(opened(self.folder).stated)}; not asked: {NOT_ASKED}"

    def assuming(self, card: str) -> Backend:
        def unreadable() -> str | None:
            try:
                opened(card)
            except UsageError as error:
                return str(error)
            return None

        return replace(self, folder=card, unavailable=unreadable)

    def describe(self) -> dict[str, Any]:
        stated = opened(self.folder).stated
        return {"assumed": {self.name: device_text(stated)}, "stated": stated}

    def plan_changes(self) -> tuple[str, ...]:
        products: list[str] = opened(self.folder).stated.get("products", [])
        return tuple(products)

    def fingerprint(self) -> Mapping[str, str | float]:
        return {}  # nothing of the device can be measured here

    def run(self, kernel: Kernel, inputs: AttentionInputs, *, gradients: bool) -> AttentionOutput:
        """Return the outputs of a call, its log-sum-exp to the base e among them."""
        _Current.lse = None
        output = super().run(kernel, inputs, gradients=gradients)
        if (lse := _Current.lse) is None or lse.shape != inputs.q.shape[:3]:
            return output
        binary = opened(self.folder).stated.get("declare", {}).get("lse") == BINARY
        return replace(output, lse=lse[..., None] * (math.log(2.0) if binary else 1.0))

    @contextmanager
    def in_use(self) -> Iterator[Collection[str]]:
        before, _Current.folder = _Current.folder, opened(self.folder)
        try:
            yield ()
        finally:
            _Current.folder = before


FILES = _Files(
    "files",
    "outputs that another program wrote into a folder of `tiebreak export`",
    "cpu",
    EmulatedArithmetic(),
    lambda: "no folder of calls: tiebreak judge FOLDER, or --as FOLDER",
    tuple,
    composed=False,
    on_request=True,
    bits="bits that files have",
    resident=False,
)
