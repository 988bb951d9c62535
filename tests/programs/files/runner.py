"""Run attention on the calls of a folder of `tiebreak export`: python run.py FOLDER.

It needs Python 3.10 or newer and torch, and nothing of tiebreak. Fill in `attention`. What is answered already is left
alone, so a run that was stopped goes on. `tiebreak judge FOLDER` then says what the kernel is worth.
"""

import argparse
import json
import os
import platform
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = {
    "bf16": ("BF16", torch.bfloat16),
    "fp16": ("F16", torch.float16),
    "fp32": ("F32", torch.float32),
    "fp8_e4m3": ("F8_E4M3", torch.float8_e4m3fn),
    "int32": ("I32", torch.int32),
    "bool": ("BOOL", torch.bool),
}


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, **values: Any) -> Any:
    """Return O, or (O, log-sum-exp), of q, k and v on DEVICE; raise NotImplementedError for a call that it is not for.

    `values` are those of the call alone: window_size, softcap, sink, attn_bias, cu_seqlens_q ... (docs/files.md).
    """
    return plain(q, k, v, causal=causal, scale=scale, **values)  # FILL IN: your kernel


#: None: gradients are autograd's; or a function of (do, q, k, v, o, **values) that returns dq, dk and dv
backward: Any = None


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sink: Tensor | None = None,
    attn_bias: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, Tensor]:
    """Return O and the log-sum-exp, fp32 inside, (batch, heads, N, d): the calls in plain torch, as an example."""
    if block_table is not None:  # pages of a pool, each (key heads, tokens, d)
        k, v = (x.float()[block_table.long()].transpose(1, 2).flatten(2, 3) for x in (k, v))
    k, v = (x.float() if by is None else x.float() * by[..., None, None] for x, by in ((k, k_descale), (v, v_descale)))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q.float() @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s if attn_bias is None else s + attn_bias.float()
    s = s.masked_fill(~seen(s, causal, window_size, cu_seqlens_q, cu_seqlens_k, cache_seqlens), float("-inf"))
    if sink is not None:
        s = torch.cat([s, sink.float()[:, None, None].expand(*s.shape[:3], 1)], -1)
    lse = s.logsumexp(-1, keepdim=True)
    p = torch.exp(s - lse.masked_fill(lse == float("-inf"), 0.0))[..., : v.shape[2]]
    return (p @ v).to(q.dtype), lse[..., 0].detach()


def seen(
    s: Tensor,
    causal: bool,
    window_size: tuple[int, int],
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    cache_seqlens: Tensor | None,
) -> Tensor:
    """Return which keys a row sees; its own key is the last of its sequence for the last row."""
    rows, keys = (torch.arange(size, device=s.device) for size in s.shape[2:])
    begins = [torch.tensor([0, n], device=s.device) if x is None else x.long()
              for x, n in ((cu_seqlens_q, s.shape[2]), (cu_seqlens_k, s.shape[3]))]  # fmt: skip
    of_row, of_key = (torch.searchsorted(x, at, right=True) - 1 for x, at in zip(begins, (rows, keys), strict=True))
    (from_q, size_q), (from_k, size_k) = ((x[:-1], x.diff()) for x in begins)
    ends = size_k[of_row] if cache_seqlens is None else cache_seqlens.long()[:, None]
    own = (rows - from_q[of_row] - size_q[of_row] + ends)[..., None]  # the key that is the row's own, in its sequence
    at = (keys - from_k[of_key])[None]
    visible = (of_row[:, None] == of_key) & (at < ends[..., None])
    left, right = window_size[0], 0 if causal else window_size[1]
    visible = visible & (at >= own - left) if left >= 0 else visible
    visible = visible & (at <= own + right) if right >= 0 else visible
    return visible[:, None] if visible.dim() == 3 else visible


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a safetensors file, and its metadata; ValueError: it is none, or is cut short."""
    content = Path(path).read_bytes()
    size = struct.unpack("<Q", content[:8])[0] if len(content) >= 8 else len(content)
    try:
        header = json.loads(content[8 : 8 + size])
        tensors, dtypes, data = {}, dict(FORMATS.values()), content[8 + size :]
        metadata = header.pop("__metadata__", {})
        if max((entry["data_offsets"][1] for entry in header.values()), default=0) != len(data):
            raise ValueError(f"{len(data)} bytes of tensors are not what its header says")
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            tensors[name] = from_bytes(data[begin:end], dtypes[entry["dtype"]], entry["shape"])
    except (AttributeError, IndexError, KeyError, TypeError, RecursionError, RuntimeError, UnicodeError) as error:
        raise ValueError(f"no safetensors file of these formats ({type(error).__name__}: {error})") from error
    return tensors, metadata


def from_bytes(content: bytes, dtype: torch.dtype, shape: Any) -> Tensor:
    """Return a tensor of little-endian bytes; ValueError: they are too few or too many."""
    count = 1
    for size in shape:
        count *= size
    if not all(isinstance(size, int) and size >= 0 for size in shape) or count * dtype.itemsize != len(content):
        raise ValueError(f"{len(content)} bytes are no {dtype} of shape {list(shape)}")
    flat = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape)


def to_bytes(x: Tensor) -> bytes:
    """Return a tensor's bytes, contiguous."""
    content: bytes = x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return content


def write(path: Path, tensors: Any, metadata: dict[str, str]) -> None:
    """Write a safetensors file, whole or not at all."""
    names = {dtype: name for name, dtype in FORMATS.values()}
    header: dict[str, Any] = {"__metadata__": metadata}
    contents, at = list[bytes](), 0
    for name, x in tensors.items():
        contents.append(to_bytes(x))
        offsets = [at, at + len(contents[-1])]
        header[name] = {"dtype": names[x.dtype], "shape": list(x.shape), "data_offsets": offsets}
        at = offsets[1]
    text = json.dumps(header).encode()
    replace(path, struct.pack("<Q", len(text)) + text + b"".join(contents))


def replace(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all."""
    partial = Path(f"{path}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)


def inputs(folder: Path, call: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a call by name, on the host."""
    if (path := folder / f"{call['id']}.in.safetensors").exists():
        return read(path)[0]
    files = {name: folder / f"{call['id']}.{name}.bin" for name in call["tensors"]}
    kinds = {name: (FORMATS[entry["format"]][1], entry["shape"]) for name, entry in call["tensors"].items()}
    return {name: from_bytes(path.read_bytes(), *kinds[name]) for name, path in files.items()}


def placed(x: Tensor, strides: Any) -> Tensor:
    """Return a copy on DEVICE with these strides; what lies between its elements is NaN."""
    if strides is None:
        return x.to(DEVICE, copy=True)
    last = sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True))
    view = torch.full((last + 1,), float("nan"), dtype=x.dtype, device=DEVICE).as_strided(x.shape, strides)
    each = tuple(slice(None) if stride else slice(1) for stride in strides)
    view[each].copy_(x[each])
    return view


def answered(call: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run a call as often as it says; return its outputs by name."""
    outputs = dict[str, Tensor]()
    for run in range(call["runs"]):
        given: dict[str, Any] = {name: placed(x, call["tensors"][name].get("strides")) for name, x in tensors.items()}
        q, k, v, do = (given.pop(name, None) for name in ("q", "k", "v", "do"))
        leaves = [q, k, v] if given.get("sink") is None else [q, k, v, given["sink"]]
        by_autograd = do is not None and backward is None
        for leaf in leaves if by_autograd else ():
            leaf.requires_grad_()
        values = {**{name: tuple(x) if isinstance(x, list) else x for name, x in call["values"].items()}, **given}
        with torch.set_grad_enabled(by_autograd):
            returned = attention(q, k, v, **values)
        o, lse = returned[:2] if isinstance(returned, (tuple, list)) else (returned, None)
        made = {"o": o} if lse is None else {"o": o, "lse": lse}
        gradients: tuple[Any, ...] = ()
        if by_autograd and o.requires_grad:
            gradients = torch.autograd.grad(o, leaves, do, allow_unused=True)
        elif do is not None and backward is not None:
            gradients = backward(do, q, k, v, o, **values)
        made.update(zip(("dq", "dk", "dv", "dsink"), gradients, strict=False))
        outputs.update({name if not run else f"{name}.{run}": x for name, x in made.items() if x is not None})
    return outputs


def work(folder: Path, calls: list[dict[str, Any]]) -> None:
    """Answer calls, one after the other; one that raises is answered by its error."""
    for call in calls:
        metadata, outputs = {"call": call["digest"]}, dict[str, Tensor]()
        try:
            outputs = answered(call, inputs(folder, call))
        except NotImplementedError as error:
            metadata["refused"] = " ".join(str(error).split()) or "NotImplementedError"
        except Exception as error:
            metadata["raised"] = " ".join(f"{type(error).__name__}: {error}".split())
        write(folder / f"{call['id']}.out.safetensors", outputs, metadata)


def describe() -> dict[str, Any]:
    """Return what device.json says: a statement, which nobody has measured."""
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else platform.processor() or platform.machine()
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
    return {"device": name, "system": platform.platform(), "python": platform.python_version(), **versions}


def main() -> None:
    """Run the calls in another process, and start it again after a call that does not end, or ends it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that a call may take (default: 120)")
    parser.add_argument("--worker", metavar="ID", help=argparse.SUPPRESS)
    options = parser.parse_args()
    calls = json.loads((options.folder / "calls.json").read_text())["calls"]
    outputs = {call["id"]: options.folder / f"{call['id']}.out.safetensors" for call in calls}
    left = [call for call in calls if not outputs[call["id"]].exists()]
    if options.worker:
        work(options.folder, [call for call in left if call["id"] >= options.worker])
        return
    replace(options.folder / "device.json", json.dumps(describe(), indent=2).encode())
    while left:
        command = [sys.executable, __file__, str(options.folder), "--worker", left[0]["id"]]
        with subprocess.Popen(command) as child:
            began = time.monotonic()
            while left and (child.poll() is None or outputs[left[0]["id"]].exists()):
                if outputs[left[0]["id"]].exists():
                    left, began = left[1:], time.monotonic()
                elif time.monotonic() - began > options.timeout:
                    break
                else:
                    time.sleep(0.02)
            child.kill()
            died = child.wait()
        if left:
            why = f"its process ended ({died})" if died != -9 else f"did not end in {options.timeout:g} s"
            print(f"{left[0]['id']}: {why}", file=sys.stderr)
            metadata = {"call": left[0]["digest"], "raised": why}
            write(outputs[left[0]["id"]], {}, metadata)
            left = left[1:]
    print(f"{len(calls)} calls answered in {options.folder}: tiebreak judge says what they are worth")


if __name__ == "__main__":
    main()
