"""Dumps of engines: tensors in files, which a mapping in TOML makes captured calls with the answers that they had.

A sequence that is packed, or whose keys lie in pages, is judged as a call of its own; those of equal sizes are the
batch of one call, and so are those of one query.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor
from torch.nn.functional import pad

from tiebreak.cases.captured import Positive, used_part
from tiebreak.cases.runner import read
from tiebreak.kernels.formats import BF16, FP16
from tiebreak.kernels.inputs import TORCH_DTYPES
from tiebreak.reports.errors import UsageError
from tiebreak.reports.gate.expected import toml
from tiebreak.reports.names import first_few
from tiebreak.reports.records.decode import Count, Data, FieldError
from tiebreak.reports.tables.run import counted

_PLACES = ("step", "rank", "layer")  # what a pattern may have in braces
_FILE = re.compile(r"(.+?\.(?:safetensors|npz|npy|pth?|bin))(?::(.+))?")
_FORMATS = {fmt.name: TORCH_DTYPES[fmt] for fmt in (BF16, FP16)}
_PARTS = {"qkv": ("q", "k", "v"), "kv": ("k", "v")}
_HOLDING = {"q": ("qkv",), "k": ("kv", "qkv"), "v": ("kv", "qkv")}  # the tensors that may hold one
_MAY_LACK = ("batch", "heads", "tokens", "page")  # dimensions that may be left out: they are 1
_ROWS, _POOL = ("batch", "heads", "tokens", "dim"), ("pages", "page", "heads", "dim")
_BITS = ("|V2", "<u2")  # numpy's names of numbers of two bytes that are none of its own
_SHOWN = 6  # tensors of a file

Tensors = dict[str, Tensor]
Size = Annotated[int, Meta(ge=1, le=2**31)]


class Own(Data, frozen=True):
    """A tensor with a layout of its own."""

    tensor: str
    layout: str


class Mapped(Data, frozen=True):
    """A mapping. A tensor is `FILE` or `FILE:KEY`; {layer}, {step} and {rank} in it stand for numbers."""

    layout: str  # dimensions in their order, such as "batch tokens heads dim" or "tokens (heads dim)"
    causal: bool  # aligned at the last key
    o: str | Own
    q: str | Own | None = None
    k: str | Own | None = None
    v: str | Own | None = None
    qkv: str | Own | None = None  # all in one: by a dimension `qkv`, or behind each other in `heads`
    kv: str | Own | None = None  # the same of k and v
    lse: str | Own | None = None  # log-sum-exp
    sink: str | None = None  # a logit a head
    cu_seqlens_q: str | tuple[Count, ...] | None = None  # where packed sequences begin, and the last one ends
    cu_seqlens_k: str | tuple[Count, ...] | None = None  # the same of k and v, if it is another
    seqused_k: str | tuple[Count, ...] | None = None  # how many keys of each sequence count
    block_table: str | tuple[tuple[int, ...], ...] | None = None  # pages of each sequence in the pools k and v
    scale: Positive | None = None  # of the scores; none: 1/sqrt(dim)
    window: Size | None = None  # keys that a row sees, its own among them
    softcap: Positive | None = None
    heads: Size | None = None  # of q, where no dimension tells
    kv_heads: Size | None = None
    dtype: Literal["bf16", "fp16"] | None = None  # that the kernel was given, where files hold it as fp32
    layers: tuple[Count, ...] | None = None  # that are taken; none: all
    folder: str = "."  # of the files, from the mapping's
    device: str = ""  # that the engine ran on, as device.json is to state


@dataclass(frozen=True)
class Dumped:
    """Captured calls of one shape, with their answers; tensors are (batch, heads, tokens, dim)."""

    file: str  # the name of the captured file that it belongs in
    layer: str
    tensors: Mapping[str, Tensor]  # q, k, v; key_padding, sink
    answers: Mapping[str, Tensor]  # o, lse
    words: Mapping[str, str]  # of the captured file's metadata

    @property
    def format(self) -> str:
        """The format of q, k and v."""
        return next(name for name, dtype in _FORMATS.items() if dtype is self.tensors["q"].dtype)


def dumped(path: Path) -> tuple[Mapped, list[Dumped]]:
    """Return a mapping and the calls that it finds, by step, rank and layer; UsageError: one line of what is wrong."""
    mapped = toml(path, Mapped, str(path))
    folder = path.parent / mapped.folder
    _contents.cache_clear()  # files may have changed
    try:
        given = {name for name in ("q", "k", "v", "kv", "qkv") if getattr(mapped, name) is not None}
        if given not in ({"q", "k", "v"}, {"q", "kv"}, {"qkv"}):
            raise FieldError("give q, k and v, or q and kv, or qkv", ", ".join(sorted(given)) or "no q")
        if mapped.window is not None and not mapped.causal:
            raise FieldError("it counts keys up to a row's own: causal = true", "window")
        places = _places(folder, _named(mapped.q or mapped.qkv or "")[0], mapped.layers)
        calls = [call for place in places for call in _Source(mapped, folder, place).calls()]
        if len({call.format for call in calls}) > 1:
            raise FieldError("some are in bf16, some in fp16: export them one by one", "layers")
    except FieldError as error:
        raise UsageError(f"{path}: {error}") from error
    return mapped, calls


def _places(folder: Path, text: str, layers: Sequence[int] | None) -> list[dict[str, str]]:
    """Return the steps, ranks and layers that a tensor is there for, in their order."""
    named = _split(text)[1]
    file, key = (re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[0-9]+)", re.escape(part)) for part in _split(text))
    if unknown := {*re.findall(r"\{(.*?)\}", text)} - {*_PLACES}:
        expected = ", ".join(f"{{{word}}}" for word in _PLACES)
        raise FieldError(f"{{{unknown.pop()}}}: expected {expected}", text)
    found = [
        match.groupdict() | of_key.groupdict()
        for path in sorted(folder.rglob("*.*"))
        if (match := re.fullmatch(file, path.relative_to(folder).as_posix()))
        for name in (_contents(path) if "{" in named else [named])  # a file may be large
        if (of_key := re.fullmatch(key, name))
    ]
    if not found:
        raise FieldError(f"there is none in {folder}", text)
    chosen = [place for place in found if layers is None or int(place.get("layer", 0)) in layers]
    if not chosen:
        raise FieldError(f"the dump has {first_few([place.get('layer', '0') for place in found], _SHOWN)}", "layers")
    return sorted(chosen, key=lambda place: [int(place.get(word, 0)) for word in _PLACES])


def _named(where: str | Own) -> tuple[str, str | None]:
    return (where, None) if isinstance(where, str) else (where.tensor, where.layout)


def _split(text: str) -> tuple[str, str]:
    """Return the file and the key of a tensor, which is empty where a file has one."""
    match = _FILE.fullmatch(text)
    if match is None:
        raise FieldError("expected FILE or FILE:KEY, of .safetensors, .npz, .npy, .pt, .pth or .bin", text)
    return match[1], match[2] or ""


@lru_cache(maxsize=4)
def _contents(path: Path) -> Mapping[str, Any]:
    """Return the tensors of a file, or arrays of numpy's, which are read as they are looked up."""
    try:
        if path.suffix == ".safetensors":
            return read(path)[0]
        if path.suffix in (".npy", ".npz"):
            arrays: Any = np.load(path, allow_pickle=False)
            return {"": arrays} if isinstance(arrays, np.ndarray) else arrays
        return dict(_flattened(torch.load(path, map_location="cpu", weights_only=True)))
    except Exception as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> FieldError:
    """Return an error of a library that reads tensors, which may be of any kind, in one line."""
    return FieldError(f"cannot be read: {' '.join(str(error).split())[:200] or type(error).__name__}", str(path))


def _flattened(x: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in dictionaries and lists, by names with dots."""
    if isinstance(x, Tensor):
        yield name, x
    inside = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, (list, tuple)) else ()
    for key, value in inside:
        yield from _flattened(value, f"{name}.{key}" if name else str(key))


def _as_tensor(x: Any) -> Tensor:
    """Return a tensor or array as a tensor; numbers of two bytes that are none of numpy's are bits of bf16."""
    if isinstance(x, Tensor):
        return x
    own = np.ascontiguousarray(x)
    return torch.from_numpy(own.view(np.int16)).view(torch.bfloat16) if x.dtype.str in _BITS else torch.from_numpy(own)


@dataclass(frozen=True)
class _Source:
    """One layer of a dump. A sequence of it has q, k, v, o (heads, tokens, dim), perhaps lse (heads, tokens)."""

    mapped: Mapped
    folder: Path
    place: Mapping[str, str]

    def calls(self) -> Iterator[Dumped]:
        """Yield its calls: sequences of equal sizes are one, and those of one query."""
        groups = dict[tuple[int, int], dict[int, Tensors]]()
        for at, each in enumerate(self._sequences()):
            queries, keys = each["q"].shape[1], each["k"].shape[1]
            if queries:
                groups.setdefault((queries, keys if queries > 1 else 0), {})[at] = each
        step, rank, layer = (self.place.get(word) for word in _PLACES)
        for members in groups.values():
            file = f"inputs-{int(step or 0):06}" + ("" if rank is None else f"-rank{int(rank)}")
            file += f"-sequence{min(members)}" if len(groups) > 1 else ""
            yield Dumped(f"{file}.safetensors", str(int(layer or 0)), *self._joined([*members.values()]))

    def _joined(self, members: Sequence[Tensors]) -> tuple[Tensors, Tensors, dict[str, str]]:
        """Return the tensors, answers and metadata of sequences of one length, or of one query each."""
        (heads, queries, _), window = members[0]["q"].shape, self.mapped.window
        decoding = queries == 1  # its row sees all keys, or the last ones: no mask is needed
        last = slice(-window if decoding and window else None, None)
        counts = [x["k"][:, last].shape[1] for x in members]
        keys, groups, causal = max(counts), heads // len(members[0]["k"]), self.mapped.causal and not decoding
        part, cut = used_part(len(members), heads, groups, queries=queries, keys=keys, causal=causal)
        entries, each, rows, seen = part
        of_q, of_k = (slice(entries), slice(each), slice(rows)), (slice(entries), slice(each // groups), slice(seen))
        whole = {name: torch.stack([x[name] for x in members])[of_q] for name in members[0] if name not in "kv"}
        for name in "kv":
            every = (x[name][:, last] for x in members)
            whole[name] = torch.stack([pad(x, (0, 0, 0, keys - x.shape[1])) for x in every])[of_k]
        if min(counts) < keys:
            whole["key_padding"] = (torch.arange(keys) < torch.tensor(counts)[:, None])[of_k[::2]].float()
        if self.mapped.sink is not None:
            whole["sink"] = self._sink(self.mapped.sink, heads)[:each]
        answers: Tensors = {name: whole.pop(name) for name in ("o", "lse") if name in whole}
        numbers = {"scale": self.mapped.scale, "softcap": self.mapped.softcap, "window": None if decoding else window}
        words = {name: repr(number) for name, number in numbers.items() if number is not None}
        return whole, answers, {"causal": str(causal).lower(), "forward": "true", "cut": cut, **words}

    def _sequences(self) -> list[Tensors]:
        """Return its sequences, whole, of tensors that fit and q, k and v without NaN."""
        names = ("q", "k", "v", "o", *(["lse"] if self.mapped.lse else []))
        every = {name: self._keys(name) if name in "kv" else self._parts(name) for name in names}
        for name, parts in every.items():
            if len(parts) != len(every["q"]):
                raise self._wrong(name, f"{len(parts)} sequences, and q has {len(every['q'])}")
        made = [dict(zip(names, parts, strict=True)) for parts in zip(*every.values(), strict=True)]
        for at, each in enumerate(made):
            (heads, queries, d), (key_heads, keys, of_k) = each["q"].shape, each["k"].shape
            rows, of_v = (heads, queries), each["v"].shape
            if heads % key_heads or d != of_k or of_v[:2] != each["k"].shape[:2] or each["o"].shape != (*rows, of_v[2]):
                shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in each.items())
                raise self._wrong("o", f"they do not fit, as heads, tokens, dim of sequence {at}: {shapes}")
            if "lse" in each and each["lse"].shape != rows:
                raise self._wrong("lse", f"{list(each['lse'].shape)}, expected {list(rows)}: heads, tokens")
            if keys == 0 or (self.mapped.causal and queries > keys):
                raise self._wrong("k", f"sequence {at} has {queries} queries and {keys} keys")
            if len({each[name].dtype for name in names[:4]}) > 1:
                raise self._wrong("dtype", f"they differ: {', '.join(f'{x} {each[x].dtype}' for x in names[:4])}")
            for name in "qkv":
                if not each[name].isfinite().all():
                    raise self._wrong(name, f"sequence {at} has NaN or Inf")
        return made

    def _parts(self, name: str) -> list[Tensor]:
        """Return q, k, v, o or the log-sum-exp of each sequence."""
        x = self._laid(name, _ROWS[:3] if name == "lse" else _ROWS)
        word = "cu_seqlens_k" if name in "kv" and self.mapped.cu_seqlens_k is not None else "cu_seqlens_q"
        if (packed := getattr(self.mapped, word)) is None:
            return list(x)
        begins = self._index(word, packed).tolist()
        if len(x) > 1:
            raise self._wrong(name, f"packed sequences lie in a batch of 1, not of {len(x)}")
        if begins[0] or begins != sorted(begins) or begins[-1] != x.shape[2]:
            raise self._wrong(word, f"{_shown(begins)}: expected to rise from 0 to the {x.shape[2]} rows of {name}")
        return [x[0, :, first:end] for first, end in pairwise(begins)]

    def _keys(self, name: str) -> list[Tensor]:
        """Return K or V of each sequence, by its pages if it has some."""
        used = None if self.mapped.seqused_k is None else self._index("seqused_k", self.mapped.seqused_k).tolist()
        if self.mapped.block_table is None:
            every = self._parts(name)
        else:
            pool, table = self._laid(name, _POOL), self._index("block_table", self.mapped.block_table, dimensions=2)
            if used is None:
                raise self._wrong("block_table", "it takes seqused_k, the keys of each sequence")
            pages = [row[: -(-n // pool.shape[1])] for row, n in zip(table.tolist(), used, strict=False)]
            if wrong := sorted({page for row in pages for page in row if not 0 <= page < len(pool)}):
                raise self._wrong("block_table", f"page {wrong[0]}: {name} has {len(pool)} pages")
            every = [pool[row].flatten(0, 1).transpose(0, 1) for row in pages]
        if used is None:
            return every
        room = [x.shape[1] for x in every]
        if len(used) != len(room) or any(not 0 <= n <= most for n, most in zip(used, room, strict=True)):
            raise self._wrong("seqused_k", f"{_shown(used)}: {name} has room for {_shown(room)} keys")
        return [x[:, :n] for x, n in zip(every, used, strict=True)]

    def _laid(self, name: str, order: Sequence[str]) -> Tensor:
        """Return a tensor of the mapping in this order of dimensions, and in its format."""
        whole = next((each for each in _HOLDING.get(name, ()) if getattr(self.mapped, each) is not None), name)
        text, layout = _named(getattr(self.mapped, whole))
        if name == "lse" and layout is None:
            layout = "batch heads tokens" if "batch" in re.findall(r"\w+", self.mapped.layout) else "heads tokens"
        x, layout = self._numbers(whole, self._tensor(whole, text)), layout or self.mapped.layout
        names = _PARTS.get(whole, (whole,))
        parts = [self.mapped.kv_heads if part in "kv" else self.mapped.heads for part in names]
        if whole == name:
            return self._arranged(name, x, layout, order, parts[0])
        if whole in layout.split():  # a dimension of its own
            return self._arranged(whole, x, layout, (whole, *order), parts[0])[names.index(name)]
        sizes = [n for n in parts if n is not None]
        x = self._arranged(whole, x, layout, order, sum(sizes) if len(sizes) == len(parts) else None)
        axis = list(order).index("heads")
        if len(sizes) < len(parts):  # as many of each
            sizes = [x.shape[axis] // len(parts)] * len(parts)
        if sum(sizes) != x.shape[axis] or parts[0] not in (None, sizes[0]):
            raise self._wrong(whole, f"{x.shape[axis]} heads are not those of {', '.join(names)}: say heads, kv_heads")
        return torch.split(x, sizes, axis)[names.index(name)]

    def _arranged(self, name: str, x: Tensor, layout: str, order: Sequence[str], heads: int | None) -> Tensor:
        """Return a tensor with its dimensions taken apart and in order; those that it lacks are 1."""
        groups = [group.strip("()").split() for group in re.findall(r"\([^()]*\)|[^\s()]+", layout)]
        words = [word for group in groups for word in group]
        wrong = [word for word in words if word not in order or words.count(word) > 1]
        missing = [word for word in order if word not in words and word not in _MAY_LACK]
        if wrong or missing:
            why = f"{(wrong or missing)[0]} is {'not one' if wrong else 'missing'} of {', '.join(order)}, each once"
            raise self._wrong(name, f'layout "{layout}": {why}')
        if len(groups) != x.dim():
            raise self._wrong(name, f'layout "{layout}" has {len(groups)} dimensions, the tensor is {list(x.shape)}')
        for at in reversed(range(len(groups))):
            try:
                x = torch.unflatten(x, at, [heads or -1 if word == "heads" else -1 for word in groups[at]])
            except RuntimeError as error:
                why = f"{x.shape[at]} is no ({' '.join(groups[at])}) of {heads or 'unknown'} heads: say heads, kv_heads"
                raise self._wrong(name, f'layout "{layout}": {why}') from error
        sizes = dict(zip(words, x.shape, strict=True))
        if heads is not None and sizes.get("heads", 1) != heads:
            raise self._wrong(name, f"it has {sizes.get('heads', 1)} heads, and {heads} were named")
        laid = x.permute([words.index(word) for word in order if word in words])
        return laid[tuple(slice(None) if word in words else None for word in order)]

    def _numbers(self, name: str, x: Tensor) -> Tensor:
        """Return a tensor in the format of the call, whose values it has, or the log-sum-exp in fp32."""
        if name == "lse":
            return x.float()
        wanted = _FORMATS[self.mapped.dtype] if self.mapped.dtype else x.dtype
        if wanted not in _FORMATS.values() or not x.is_floating_point():
            raise self._wrong(name, f"it is {x.dtype}: say the kernel's format, dtype = {' or '.join(_FORMATS)}")
        rounded = x.to(wanted)
        if not ((rounded.double() == x.double()) | x.isnan()).all():
            raise self._wrong(name, f"it has numbers that are none of {self.mapped.dtype}: the kernel had others")
        return rounded

    def _index(self, name: str, value: Any, dimensions: int = 1) -> Tensor:
        """Return whole numbers that a mapping names or lists, in so many dimensions."""
        if not isinstance(value, str) and len({len(row) for row in value if isinstance(row, tuple)}) > 1:
            raise self._wrong(name, "its rows differ in length")
        x = self._tensor(name, value) if isinstance(value, str) else torch.tensor(value)
        if x.is_floating_point() or x.is_complex() or x.dtype is torch.bool:
            raise self._wrong(name, f"it is {x.dtype}, expected whole numbers")
        if x.dim() != dimensions or not len(x):
            raise self._wrong(name, f"{list(x.shape)}: expected {counted(dimensions, 'dimension')} of numbers")
        return x.long()

    def _sink(self, text: str, heads: int) -> Tensor:
        sink = self._tensor("sink", text).float()
        if sink.shape != (heads,) or not sink.isfinite().all():
            raise self._wrong("sink", f"{list(sink.shape)}, expected [{heads}], a finite number a head")
        return sink

    def _tensor(self, name: str, text: str) -> Tensor:
        """Return a tensor of the dump as its file has it."""
        absent = [word for word in re.findall(r"\{(\w+)\}", text) if word not in self.place]
        if absent:
            raise FieldError(f"{{{absent[0]}}}: q does not have it in its name", name)
        file, key = _split(re.sub(r"\{(\w+)\}", lambda word: self.place[word[1]], text))
        if not (path := self.folder / file).is_file():
            raise self._wrong(name, f"there is no {path}")
        if key not in (contents := _contents(path)):
            names = first_few(sorted(contents), _SHOWN)
            raise self._wrong(name, f"{path} has no {key or 'tensor without a key'}; it has {names}")
        try:
            return _as_tensor(contents[key])
        except Exception as error:
            raise _unreadable(path, error) from error

    def _wrong(self, name: str, why: str) -> FieldError:
        place = ", ".join(f"{word} {self.place[word]}" for word in _PLACES if word in self.place)
        return FieldError(why, f"{name} of {place}" if place else name)


def _shown(numbers: Sequence[int]) -> str:
    return first_few(list(map(str, numbers)), _SHOWN)
