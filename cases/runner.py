"""Run attention on the calls of a folder of `tiebreak export`: python run.py FOLDER.

It needs Python 3.10 or newer and torch, and nothing of tiebreak. Fill in `attention`. What is answered already is left
alone, so a run that was stopped goes on; what raised is run again. `tiebreak judge FOLDER` then says what the kernel is
worth.
"""

import argparse
import faulthandler
import importlib
import json
import math
import mmap
import operator
import os
import platform
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = {
    "bf16": ("BF16", torch.bfloat16),
    "fp16": ("F16", torch.float16),
    "fp32": ("F32", torch.float32),
    "fp64": ("F64", torch.float64),
    "fp8_e4m3": ("F8_E4M3", torch.float8_e4m3fn),
    "fp8_e5m2": ("F8_E5M2", torch.float8_e5m2),
    "int8": ("I8", torch.int8),
    "int16": ("I16", torch.int16),
    "int32": ("I32", torch.int32),
    "int64": ("I64", torch.int64),
    "uint8": ("U8", torch.uint8),
    "bool": ("BOOL", torch.bool),
}
_USAGE = 2  # exit code: there is no kernel to run


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, **values: Any) -> Any:
    """Return O, or (O, log-sum-exp), of q, k and v on DEVICE; raise NotImplementedError for a call that it is not for.

    `values` are those of the call alone: window_size, softcap, sink, attn_bias, cu_seqlens_q ... (docs/files.md).
    """
    # FILL IN: your kernel. This is PyTorch's, whose causal mask is aligned at the upper left.
    unmet = [*values, *(["a causal mask that is not square"] if causal and q.shape[2] != k.shape[2] else [])]
    if unmet:
        raise NotImplementedError(", ".join(unmet))
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


#: None: gradients are autograd's; or a function of (do, q, k, v, o, **values) that returns dq, dk and dv
backward: Any = None
#: What tiebreak check is told of such a kernel by --declare, such as {"lse": "2", "plan": "flash@fused"}
declare: dict[str, Any] = {}


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a safetensors file, and its metadata; ValueError: it is none, or is cut off.

    A tensor is read as it is used; what is written into it does not reach the file.
    """
    try:
        with open(path, "rb") as file:
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        size = struct.unpack("<Q", content[:8])[0] if len(content) >= 8 else len(content)
        header = json.loads(bytes(content[8 : 8 + size]))
        tensors, dtypes, data = {}, dict(FORMATS.values()), content[8 + size :]
        metadata = {name: text for name, text in header.pop("__metadata__", {}).items() if isinstance(text, str)}
        if max((entry["data_offsets"][1] for entry in header.values()), default=0) != len(data):
            raise ValueError(f"{len(data)} bytes of tensors are not what its header says")
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            tensors[name] = from_bytes(data[begin:end], dtypes[entry["dtype"]], entry["shape"])
    except (AttributeError, LookupError, TypeError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"cut off or no safetensors file of these formats ({type(error).__name__}: {error})"
        ) from error
    return tensors, metadata


def from_bytes(content: bytearray | memoryview, dtype: torch.dtype, shape: Any) -> Tensor:
    """Return a tensor of little-endian bytes, in their place if it can lie there; ValueError: too few or too many."""
    whole = all(isinstance(size, int) and size >= 0 for size in shape)
    if not whole or math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"{len(content)} bytes are no {dtype} of shape {list(shape)}")
    flat = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    if flat.data_ptr() % dtype.itemsize:  # of a header that is not padded: a copy lies where it may
        flat = torch.frombuffer(bytearray(content), dtype=torch.uint8)
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
    text += b" " * (-len(text) % 8)  # so that each tensor lies where its format may
    replace(path, struct.pack("<Q", len(text)), text, *contents)


def replace(path: Path, *contents: bytes) -> None:
    """Write a file, whole or not at all."""
    partial = Path(f"{path}.partial")
    try:
        with partial.open("wb") as file:
            file.writelines(contents)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def inputs(folder: Path, call: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a call by name, on the host."""
    if (path := folder / f"{call['id']}.in.safetensors").exists():
        return read(path)[0]
    files = {name: folder / f"{call['id']}.{name}.bin" for name in call["tensors"]}
    kinds = {name: (FORMATS[entry["format"]][1], entry["shape"]) for name, entry in call["tensors"].items()}
    return {name: from_bytes(bytearray(path.read_bytes()), *kinds[name]) for name, path in files.items()}


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


def work(folder: Path, calls: list[dict[str, Any]], timeout: float) -> None:
    """Answer calls, one after the other; one that raises is answered by its error, one that takes too long ends all."""
    for call in calls:
        metadata, outputs = {"call": call["digest"]}, dict[str, Tensor]()
        faulthandler.dump_traceback_later(timeout, exit=True, file=2)
        try:
            outputs = answered(call, inputs(folder, call))
        except NotImplementedError as error:
            metadata["refused"] = " ".join(str(error).split()) or "NotImplementedError"
        except Exception as error:
            metadata["raised"] = " ".join(f"{type(error).__name__}: {error}".split())
        finally:
            faulthandler.cancel_dump_traceback_later()
        write(folder / f"{call['id']}.out.safetensors", outputs, metadata)


def take(target: str) -> None:
    """Take a function from FILE.py:NAME as `attention`, with the file's own `backward` and `declare` if it has them."""
    file, _, name = (target, "", "attention") if target.endswith(".py") else target.rpartition(":")
    path = Path(file).resolve(strict=True)
    sys.path.insert(0, str(path.parent))
    module = importlib.import_module(path.stem)
    if not callable(function := operator.attrgetter(name)(module)):
        raise TypeError(f"{name} is no function")
    more = {name: getattr(module, name, globals()[name]) for name in ("backward", "declare")}
    globals().update(attention=function, **more)


def describe() -> dict[str, Any]:
    """Return what device.json says: a statement, which nobody has measured."""
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else platform.processor() or platform.machine()
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
    told = {"declare": declare} if declare else {}
    return {"device": name, "system": platform.platform(), "python": platform.python_version(), **versions, **told}


def said_of(output: Path) -> str:
    """Return what a call's output says, answered, refused or raised; nothing: there is none that can be read."""
    try:
        metadata = read(output)[1]
    except (OSError, ValueError):
        return ""
    return next((word for word in ("refused", "raised") if word in metadata), "answered")


def child(options: argparse.Namespace, calls: list[dict[str, Any]]) -> None:
    """Load the kernel, which may take the device; then describe that, or run the calls."""
    try:
        if options.kernel is not None:
            take(options.kernel)
    except (Exception, SystemExit) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"--kernel {options.kernel}: {why}; expected FILE.py with attention, or FILE.py:NAME", file=sys.stderr)
        sys.exit(_USAGE)
    if options.child == "load":
        replace(options.folder / "device.json", json.dumps(describe(), indent=2).encode())
    else:
        work(options.folder, calls, options.timeout)


def main() -> None:
    """Run the calls in another process, and start it again after a call that does not end, or ends it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that a call may take (default: 120)")
    kernel = "a function to run instead of this file's (default NAME: attention)"
    parser.add_argument("--kernel", metavar="FILE.py[:NAME]", help=kernel)
    parser.add_argument("--child", choices=("load", "work"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        every = json.loads((options.folder / "calls.json").read_text())["calls"]
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"{options.folder}: no folder of calls: {error}")
    outputs = {call["id"]: options.folder / f"{call['id']}.out.safetensors" for call in every}
    if options.child:
        child(options, [call for call in every if not outputs[call["id"]].exists()])
        return
    left = [call for call in every if said_of(outputs[call["id"]]) in ("", "raised")]
    command = [sys.executable, __file__, *sys.argv[1:], "--child"]
    if left and (code := subprocess.run([*command, "load"], check=False).returncode):
        if code != _USAGE:
            print(f"{options.kernel or __file__}: its process ended ({code}) as it was loaded", file=sys.stderr)
        sys.exit(_USAGE)
    for call in left:
        outputs[call["id"]].unlink(missing_ok=True)
    while left:
        code = subprocess.run([*command, "work"], check=False).returncode
        if left := [call for call in left if not outputs[call["id"]].exists()]:
            call, *left = left
            why = f"its process ended ({code}), or it took more than {options.timeout:g} s"
            print(f"{call['id']}: {why}", file=sys.stderr)
            write(outputs[call["id"]], {}, {"call": call["digest"], "raised": why})
    said = Counter(map(said_of, outputs.values()))
    raised = f"{said['raised']} raised{', which the next run runs again' if said['raised'] else ''}"
    print(f"{options.folder}: {said['answered']} calls answered, {said['refused']} refused, {raised}")
    print(f"tiebreak judge {options.folder} says what they are worth")


if __name__ == "__main__":
    main()
