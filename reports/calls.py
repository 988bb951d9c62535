"""`calls.json`: the manifest of a folder of calls, which `tiebreak export` writes and `tiebreak judge` reads."""

import hashlib
from collections.abc import Mapping
from typing import Any

from tiebreak.reports.files import FileKind
from tiebreak.reports.records.decode import Count, Data, FieldError, FileData, Schema, encode

MANIFEST = "calls.json"


class Stored(Data, frozen=True):
    """One tensor of a call."""

    format: str  # bf16, fp16, fp32, fp8_e4m3, int32 or bool
    shape: tuple[Count, ...]  # of q, k, v and do in the order of dimensions that `layout` says
    sha256: str  # of its bytes: little-endian, contiguous, the last dimension fastest
    strides: tuple[Count, ...] | None = None  # in elements, that the kernel is to be given; null: contiguous


class StoredCall(Data, frozen=True):
    """One call of attention."""

    id: str  # its files begin with it
    digest: str  # SHA-256 of its tensors and values: whoever answers copies it
    case: str  # the first that asks for it
    tensors: Mapping[str, Stored]  # q, k, v; do, where dq, dk and dv are wanted; and such as sink, block_table
    values: Mapping[str, Any]  # causal, scale, and such as window_size, softcap
    runs: Count  # how often to run it: outputs of further runs are called o.1, dq.1, o.2 ...
    finite: bool  # whether every number in its tensors is: then NaN and Inf in an answer are wrong

    @property
    def forward(self) -> dict[str, Stored]:
        """The tensors that O comes from."""
        return {name: x for name, x in self.tensors.items() if name != "do"}

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of a run's outputs that must be there once any call has them; the log-sum-exp may be left out."""
        more = ("dsink",) if "sink" in self.tensors else ()
        return ("o", "dq", "dk", "dv", *more) if "do" in self.tensors else ("o",)


class Calls(FileData, frozen=True):
    """The manifest of a folder of calls."""

    schema: Schema  # version of this layout
    made_by: str  # the version of tiebreak
    options: Mapping[str, str]  # of the run that makes these calls, by name
    asked: Mapping[str, str]  # options that tiebreak export was given, other than its defaults; of a flag empty
    takes: tuple[str, ...]  # features of inputs that the kernel is to have, as --declare takes= lists them
    layout: str  # order of dimensions of q, k, v, do, and so of o: b batch, h heads, n tokens, d head dimension
    raw: bool  # tensors are files of bytes, ID.NAME.bin, and not ID.in.safetensors
    calls: tuple[StoredCall, ...]  # in the order in which they were recorded
    files: Mapping[str, str]  # SHA-256 of the captured tensors that hold the inputs of an engine's dump
    digest: str  # SHA-256 of all that stands before

    @property
    def own_digest(self) -> str:
        """The digest that it should have."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name != "digest"}
        return hashlib.sha256(encode(fields).encode()).hexdigest()

    def check(self) -> None:
        """Raise FieldError for a manifest that was edited."""
        for at, call in enumerate(self.calls):
            if call.digest != digest_of(call.tensors, call.values):
                raise FieldError("not that of the call: it was edited, export it again", f"calls[{at}].digest")
        if self.digest != self.own_digest:
            raise FieldError("not that of the file: it was edited, export it again", "digest")


def digest_of(tensors: Mapping[str, Stored], values: Mapping[str, Any]) -> str:
    """Return the digest of a call."""
    ordered = {name: tensors[name] for name in sorted(tensors)}
    return hashlib.sha256(encode([ordered, dict(sorted(values.items()))]).encode()).hexdigest()


KIND = FileKind(Calls)
