"""Attention of runtimes that compile or read a model of their own, on a CPU: one node of it, forward alone."""

import ctypes
import importlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from tiebreak.kernels.external.adapters.foreign import Foreign
from tiebreak.kernels.external.options import NO_BACKWARD, kernel, needs
from tiebreak.kernels.formats import BF16, FP16, FP32

ONNXRUNTIME = Foreign("onnxruntime:InferenceSession", "onnxruntime", "1.23 to 1.32", formats=(FP16, FP32))
ONNX = Foreign("onnx.helper:make_node", "onnx", "1.18 to 1.23")
EVALUATOR = Foreign("onnx.reference:ReferenceEvaluator", "onnx", "1.23")
IREE_COMPILER = Foreign("iree.compiler:compile_str", "iree-base-compiler", "3.13", formats=(BF16, FP16))
IREE = Foreign("iree.runtime:SystemContext", "iree-base-runtime", "3.13")
TINYGRAD = Foreign("tinygrad:Tensor", "tinygrad", "0.14", formats=(BF16, FP16, FP32))
GGML = Foreign("_pywhispercpp:whisper_print_system_info", "pywhispercpp", "1.5 (ggml 0.13)", formats=(FP16, BF16))
KERAS = Foreign("keras.ops:dot_product_attention", "keras", "3.15")
TENSORFLOW = Foreign("tensorflow.experimental.dlpack:from_dlpack", "tensorflow-cpu", "2.21")
EXECUTORCH = Foreign("executorch.version:__version__", "executorch", "1.5")

_ELEMENTS = {torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16", torch.float32: "FLOAT"}
_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_KINDS = {"mask": "BOOL", "last": "INT32", "total": "INT32"}
_MICROSOFT = "com.microsoft"  # where ONNX Runtime's own operators are


def as_array(tensor: Tensor) -> Any:
    """Return a tensor as NumPy's, bf16 in the type of ml_dtypes, which NumPy lacks."""
    if tensor.dtype != torch.bfloat16:
        return tensor.contiguous().numpy()
    return tensor.contiguous().view(torch.int16).numpy().view(importlib.import_module("ml_dtypes").bfloat16)


def as_tensor(array: Any, dtype: torch.dtype) -> Tensor:
    """Return an array as a tensor of a type that has its bits."""
    bits = np.ascontiguousarray(array)
    return torch.from_numpy(bits.view(f"int{8 * bits.itemsize}")).view(dtype).clone()


@cache
def _model(operator: str, domain: str, dtype: torch.dtype, more: tuple[str, ...], **attributes: Any) -> Any:
    """Return an ONNX model of one node, whose inputs are q, k, v, and what more it takes."""
    onnx = importlib.import_module("onnx")
    kinds = dict.fromkeys(("q", "k", "v", "o"), getattr(onnx.TensorProto, _ELEMENTS[dtype]))
    kinds |= {name: kinds["q"] if name.startswith("past") else getattr(onnx.TensorProto, _KINDS[name]) for name in more}
    outputs = ["o", *(name.replace("past", "now") for name in more if name.startswith("past"))]
    kinds |= dict.fromkeys(outputs, kinds["q"])
    tensors = {name: onnx.helper.make_tensor_value_info(name, kind, None) for name, kind in kinds.items()}
    node = ONNX(operator, ["q", "k", "v", *more], outputs, domain=domain, **attributes)
    inputs = [tensor for name, tensor in tensors.items() if name not in outputs]
    graph = onnx.helper.make_graph([node], "attention", inputs, [tensors[name] for name in outputs])
    opsets = [onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid(_MICROSOFT, 1)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=11)


@cache
def _session(*node: Any, **attributes: Any) -> Any:
    model = _model(*node, **attributes).SerializeToString()
    return ONNXRUNTIME(model, providers=["CPUExecutionProvider"])


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, run: Callable[..., Any], **attributes: Any
) -> Tensor:
    """Return O of the standard's Attention, of opset 23, by a function of a node that returns a session."""
    tensors = {"q": q, "k": k, "v": v} | ({} if mask is None else {"mask": mask})
    session = run("Attention", "", q.dtype, () if mask is None else ("mask",), **attributes)
    (o,) = session.run(None, {name: as_array(tensor) for name, tensor in tensors.items()})
    return as_tensor(o, q.dtype)


@needs(ONNXRUNTIME, ONNX)
@kernel(takes="gqa", refuses="blind_rows", backward=NO_BACKWARD)
def onnxruntime(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool, scale: float
) -> Tensor:
    """Call ONNX Runtime's Attention on a CPU, which has none in bf16. Its causal mask is aligned at the upper left."""
    return _attention(q, k, v, attn_mask, _session, is_causal=int(is_causal), scale=scale)


@needs(EVALUATOR, ONNX)
@kernel(name="onnx", takes="gqa", backward=NO_BACKWARD)
def onnx_evaluator(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool, scale: float
) -> Tensor:
    """Call ONNX' own reference evaluator, what the standard means. Its mask is aligned at the upper left; no key: 0."""
    evaluator = lambda *node, **attributes: EVALUATOR(_model(*node, **attributes))  # noqa: E731
    return _attention(q, k, v, attn_mask, evaluator, is_causal=int(is_causal), scale=scale)


def _packed(x: Tensor) -> Any:
    """Return (batch, tokens, heads, d) as ONNX Runtime's own operators take it, (batch, tokens, heads d)."""
    return as_array(x.flatten(2))


@needs(ONNXRUNTIME, ONNX)
@kernel(name="onnxruntime_mha", layout="bnhd", refuses="gqa", backward=NO_BACKWARD)
def onnxruntime_mha(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> Tensor:
    """Call com.microsoft's MultiHeadAttention. It has no fp16 kernel on a CPU, and casts around one of fp32.

    Its causal mask is aligned at the upper left, but the last row sees every key: it is asked of squares alone.
    """
    how = {"num_heads": q.shape[2], "unidirectional": int(is_causal), "scale": scale}
    session = _session("MultiHeadAttention", _MICROSOFT, q.dtype, (), **how)
    (o,) = session.run(None, {"q": _packed(q), "k": _packed(k), "v": _packed(v)})
    return as_tensor(o, q.dtype).view(q.shape)


@needs(ONNXRUNTIME, ONNX)
@kernel(name="onnxruntime_gqa", layout="nhd", takes="gqa", refuses="blind_rows", backward=NO_BACKWARD)
def onnxruntime_gqa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Call com.microsoft's GroupQueryAttention of decoders, whose causal mask is aligned at the lower right.

    Its keys are those of a cache, then those of the queries' own tokens. Without a mask every row is a sequence.
    """
    q, batch = (q[None], 1) if causal else (q[:, None], len(q))
    k, v = (x.transpose(0, 1).expand(batch, -1, -1, -1) for x in (k, v))
    cached, total = k.shape[2] - q.shape[1], k.shape[2]
    how = {"num_heads": q.shape[2], "kv_num_heads": k.shape[1], "scale": scale}
    session = _session("GroupQueryAttention", _MICROSOFT, q.dtype, ("past_k", "past_v", "last", "total"), **how)
    inputs = {"past_k": as_array(k[:, :, :cached]), "past_v": as_array(v[:, :, :cached]), "q": _packed(q)}
    inputs |= {name: _packed(x[:, :, cached:].transpose(1, 2)) for name, x in (("k", k), ("v", v))}
    inputs |= {"last": np.full(batch, total - 1, np.int32), "total": np.array([total], np.int32)}
    return as_tensor(session.run(None, inputs)[0], q.dtype).view(-1, *q.shape[2:])


_IREE = """
func.func @attention({arguments}) -> {o} {{
  %scale = arith.constant {scale:.9e} : f32
  %empty = tensor.empty() : {o}
  %o = iree_linalg_ext.attention <{{indexing_maps = [{maps}]}}> ins({names} : {types}) outs(%empty : {o}) {{
    ^bb0(%score: f32): iree_linalg_ext.yield %score : f32
  }} -> {o}
  return %o : {o}
}}"""
_MAPS = {"q": "(b, m, d)", "k": "(b, n, d)", "v": "(b, n, e)", "scale": "()", "mask": "(b, m, n)", "o": "(b, m, e)"}


@cache
def _compiled(shapes: tuple[tuple[str, tuple[int, ...]], ...], scale: float, element: str) -> Any:
    """Return IREE's function of one attention of these shapes, compiled for the processor that is here."""
    sizes = {name: "x".join(map(str, shape)) for name, shape in shapes}
    types = {name: f"tensor<{size}x{'i1' if name == 'mask' else element}>" for name, size in sizes.items()}
    o, given = types.pop("o"), {**dict(list(types.items())[:3]), "scale": "f32", **dict(list(types.items())[3:])}
    text = _IREE.format(
        o=o,
        arguments=", ".join(f"%{name}: {kind}" for name, kind in types.items()),
        scale=scale,
        names=", ".join(f"%{name}" for name in given),
        types=", ".join(given.values()),
        maps=", ".join(f"affine_map<(b, m, e, d, n) -> {_MAPS[name]}>" for name in (*given, "o")),
    )
    library = importlib.import_module("iree.runtime")
    compiled = IREE_COMPILER(text, target_backends=["llvm-cpu"], extra_args=["--iree-llvmcpu-target-cpu=host"])
    context = IREE(config=library.Config("local-sync"))
    context.add_vm_module(library.VmModule.copy_buffer(context.instance, compiled))
    return context.modules.module.attention


@needs(IREE_COMPILER, IREE)
@kernel(refuses="gqa blind_rows", backward=NO_BACKWARD)
def iree(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, scale: float) -> Tensor:
    """Call IREE's iree_linalg_ext.attention, compiled for the CPU that is here."""
    tensors = {name: x.flatten(0, 1) for name, x in (("q", q), ("k", k), ("v", v))}
    if attn_mask is not None:
        tensors["mask"] = attn_mask.expand(*q.shape[:3], k.shape[2]).flatten(0, 1)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    shapes["o"] = (*shapes["q"][:2], v.shape[3])
    attend = _compiled(tuple(shapes.items()), scale, "bf16" if q.dtype == torch.bfloat16 else "f16")
    return as_tensor(attend(*map(as_array, tensors.values())).to_host(), q.dtype).view(*q.shape[:3], v.shape[3])


@needs(TINYGRAD)
@kernel(takes="gqa", refuses="blind_rows", backward=NO_BACKWARD)
def tinygrad(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool, enable_gqa: bool
) -> Tensor:
    """Call tinygrad's scaled_dot_product_attention on its CPU device, which compiles by the clang that CC names.

    Its causal mask is aligned at the upper left.
    """
    types, bits = importlib.import_module("tinygrad").dtypes, _BITS[q.dtype]
    kind, whole = (getattr(types, str(each).removeprefix("torch.")) for each in (q.dtype, bits))
    ours, *others = (TINYGRAD(x.contiguous().view(bits).numpy(), device="CPU").bitcast(kind) for x in (q, k, v))
    mask = None if attn_mask is None else TINYGRAD(attn_mask.contiguous().numpy(), device="CPU")
    o = ours.scaled_dot_product_attention(*others, mask, is_causal=is_causal, enable_gqa=enable_gqa)
    return torch.from_numpy(o.bitcast(whole).numpy()).view(q.dtype)


@needs(KERAS, TENSORFLOW)
@kernel(name="keras_tensorflow", layout="bnhd", takes="gqa", refuses="blind_rows", backward=NO_BACKWARD)
def keras_tensorflow(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool, scale: float
) -> Tensor:
    """Call Keras' dot_product_attention on TensorFlow. Its causal mask is aligned at the upper left."""
    if importlib.import_module("keras").backend.backend() != "tensorflow":
        raise NotImplementedError("Keras is on another backend: set KERAS_BACKEND=tensorflow")
    if k.shape[2] == 1 < q.shape[2]:
        raise NotImplementedError("on TensorFlow it repeats several key heads, not a single one")
    tensors = (TENSORFLOW(x.contiguous().__dlpack__()) for x in (q, k, v))
    mask = None if attn_mask is None else attn_mask.expand(len(q), 1, q.shape[1], k.shape[1]).numpy()
    o = KERAS(*tensors, mask=mask, scale=scale, is_causal=is_causal)
    return from_dlpack(importlib.import_module("tensorflow").experimental.dlpack.to_dlpack(o))


@cache
def _custom_sdpa() -> Any:
    """Return ExecuTorch's operator, of the library that its Python module would load with all that it needs."""
    folder = Path(*importlib.import_module("executorch").__path__)
    torch.ops.load_library(  # type: ignore[no-untyped-call]
        str(folder / "extension" / "llm" / "custom_ops" / "libcustom_ops_aot_lib.so")
    )
    return torch.ops.llama.custom_sdpa


@needs(EXECUTORCH)
@kernel(layout="bnhd", takes="gqa", refuses="blind_rows", backward=NO_BACKWARD)
def executorch(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Call llama.custom_sdpa, whose mask is aligned at the lower right: its keys end with the queries' own."""
    if k.shape[1] < q.shape[1]:
        raise NotImplementedError("its keys are those before the queries, and theirs: there are at least as many")
    q, k, v = (x.contiguous() for x in (q, k, v))
    o: Tensor = _custom_sdpa()(q, k, v, k.shape[1] - q.shape[1], None, 0.0, causal, scale)
    return o


class _Parameters(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


@cache
def _ggml() -> SimpleNamespace:
    """Return the functions of ggml's C interface that one graph takes, from the libraries beside pywhispercpp."""
    folder = Path(str(importlib.import_module("_pywhispercpp").__file__)).parent
    base, cpu = (ctypes.CDLL(str(folder / f"libggml-{name}.so.0"), ctypes.RTLD_GLOBAL) for name in ("base", "cpu"))
    at, number, whole = ctypes.c_void_p, ctypes.c_float, ctypes.c_int
    found: dict[str, tuple[Any, ...]] = {
        "init": (base.ggml_init, at, _Parameters),
        "free": (base.ggml_free, None, at),
        "tensor": (base.ggml_new_tensor_4d, at, at, whole, *[ctypes.c_int64] * 4),
        "data": (base.ggml_get_data, at, at),
        "flash": (base.ggml_flash_attn_ext, at, *[at] * 5, *[number] * 3),
        "graph": (base.ggml_new_graph, at, at),
        "expand": (base.ggml_build_forward_expand, None, at, at),
        "compute": (cpu.ggml_graph_compute_with_ctx, whole, at, at, whole),
    }
    for function, result, *arguments in found.values():
        function.restype, function.argtypes = result, arguments
    cpu.ggml_cpu_init()
    return SimpleNamespace(**{name: function for name, (function, *_) in found.items()})


_GGML_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}


@needs(GGML)
@kernel(takes="gqa", refuses="blind_rows", backward=NO_BACKWARD)
def ggml(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, scale: float) -> Tensor:
    """Call ggml_flash_attn_ext with one thread: q and O are in fp32 there, K and V in the inputs' format."""
    c, sizes = _ggml(), (q.numel(), k.numel(), v.numel(), 0 if attn_mask is None else attn_mask.numel())
    context = c.init(_Parameters(2**20 + 16 * sum(sizes), None, False))

    def given(x: Tensor) -> Any:
        new = c.tensor(context, _GGML_TYPES[x.dtype], *reversed(x.shape))
        ctypes.memmove(c.data(new), x.contiguous().data_ptr(), x.numel() * x.element_size())
        return new

    try:
        hidden = None if attn_mask is None else torch.zeros(attn_mask.shape).masked_fill(~attn_mask, -torch.inf)
        mask = None if hidden is None else given(hidden.half())
        out = c.flash(context, given(q.float()), given(k), given(v), mask, scale, 0.0, 0.0)
        graph = c.graph(context)
        c.expand(graph, out)
        c.compute(context, graph, 1)
        o = torch.empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])  # fp32, tokens before heads
        ctypes.memmove(o.data_ptr(), c.data(out), o.numel() * o.element_size())
    finally:
        c.free(context)
    return o.transpose(1, 2).to(q.dtype)
