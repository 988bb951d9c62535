"""Triton attention of packages that people use, for `--backend interpreter`: a few lines each.

    TIEBREAK_SOURCES=folder tiebreak check examples/public-kernels/public_kernels.py:vllm_unified --backend interpreter

The folder holds unpacked wheels and checkouts; without it the package must be installed. Nothing of a package is here:
its file is executed as it is, with stand-ins for what it imports (public_sources.py). Where a launcher chooses by the
card, it sees an sm_80.

    python examples/public-kernels/public_kernels.py --sources FOLDER

puts all of them through the matrix and prints the table of docs/other-kernels.md.
"""

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from public_sources import CUDA, FOLDER, StandIn, as_if_on_a_gpu, source, version_of
from torch import Tensor

from tiebreak import kernel


def _flat(x: Tensor) -> Tensor:
    """(batch, N, heads, d) as the tokens of all sequences, one after the other."""
    return x.flatten(0, 1)


def _starts(batch: int, tokens: int) -> Tensor:
    return torch.arange(batch + 1, dtype=torch.int32) * tokens


def _lengths(batch: int, tokens: int) -> Tensor:
    return torch.full((batch,), tokens, dtype=torch.int32)


def _yes(*_: object, **__: object) -> bool:
    return True


def _no(*_: object, **__: object) -> bool:
    return False


# Triton's tutorial.


@kernel(square=True, multiple_of=128, head_dims=[64, 128, 256])
def triton_tutorial(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, sm_scale: float) -> Any:
    """Triton's tutorial, forward and backward. It rounds to fp16, whatever it is given."""
    if q.dtype != torch.float16:
        raise NotImplementedError("the tutorial rounds P and O to fp16: --dtype fp16")
    return source("tutorials.06-fused-attention").attention(q, k, v, is_causal, sm_scale, False)


# vLLM, whose keys and values lie in pages.

_VLLM = "vllm.v1.attention.ops."
_PAGE = 16


class _VllmPlatform(StandIn):
    is_rocm = is_xpu = staticmethod(_no)
    is_cuda = is_cuda_alike = has_device_capability = staticmethod(_yes)

    def fp8_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn


_PLATFORM = _VllmPlatform("vllm.platforms.current_platform")


def _paged(x: Tensor) -> tuple[Tensor, Tensor]:
    """(batch, N, heads, d) as pages (pages, 16, heads, d), and which pages are whose, in a table with room to spare."""
    batch, tokens = x.shape[:2]
    pages = -(-tokens // _PAGE)
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pages * _PAGE - tokens))
    table = torch.arange(batch * pages, dtype=torch.int32).view(batch, pages)
    table = torch.nn.functional.pad(table, (0, _PAGE))  # as engines' have: a tile may look up pages past the last
    return padded.reshape(batch * pages, _PAGE, *x.shape[2:]), table


@kernel(layout="bnhd", takes="gqa")
def vllm_unified(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """vLLM's unified attention, one pass over the keys."""
    file = source(
        f"{_VLLM}triton_unified_attention",
        also=(f"{_VLLM}triton_attention_helpers",),
        current_platform=_PLATFORM,
        KVQuantMode=SimpleNamespace(NONE=0, INT8_PER_TOKEN_HEAD=2, FP8_PER_TOKEN_HEAD=3, INT4_PER_TOKEN_HEAD=4),
    )
    batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    o = torch.empty_like(q)
    (key_pages, table), (value_pages, _) = _paged(k), _paged(v)
    file.unified_attention(
        q=_flat(q), k=key_pages, v=value_pages, out=_flat(o), cu_seqlens_q=_starts(batch, queries),
        max_seqlen_q=queries, seqused_k=_lengths(batch, keys), max_seqlen_k=keys, softmax_scale=scale, causal=causal,
        window_size=(-1, -1), block_table=table, softcap=0, q_descale=None, k_descale=None, v_descale=None,
        kv_quant_mode=0,
    )  # fmt: skip
    return o


@kernel(layout="bnhd", takes="gqa", square=True)
def vllm_prefill(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> Tensor:
    """vLLM's attention without a cache, for encoders."""
    file = source(f"{_VLLM}triton_prefill_attention", current_platform=_PLATFORM, RCP_LN2=1.4426950408889634)
    batch, tokens = q.shape[:2]
    o = torch.empty_like(q)
    file.context_attention_fwd(
        _flat(q), _flat(k), _flat(v), _flat(o), _starts(batch, tokens), _lengths(batch, tokens), tokens,
        is_causal=is_causal, softmax_scale=scale,
    )  # fmt: skip
    return o


@kernel(layout="bnhd", takes="gqa", head_dims=[32, 64, 128])
def vllm_prefix_prefill(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """vLLM's attention of a chunk behind a cached prefix: the last keys are those of the chunk."""
    if q.shape[1] > k.shape[1]:
        raise NotImplementedError("a chunk is no longer than its sequence")
    file = source(f"{_VLLM}prefix_prefill", current_platform=_PLATFORM)
    batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    before = keys - queries
    (key_pages, table), (value_pages, _) = _paged(k), _paged(v)  # tiles of the prefix read on into the chunk's pages
    wide = 16 // q.element_size()  # keys lie in memory in pieces of 16 bytes
    key_cache = key_pages.view(*key_pages.shape[:3], -1, wide).permute(0, 2, 3, 1, 4).contiguous()
    value_cache = value_pages.permute(0, 2, 3, 1).contiguous()
    o, unit = torch.empty_like(q), torch.ones(1)
    file.context_attention_fwd(
        _flat(q), _flat(k[:, before:]), _flat(v[:, before:]), _flat(o), "auto", key_cache, value_cache, table,
        _starts(batch, queries), _lengths(batch, keys), keys, queries, unit, unit, sm_scale=scale, causal=causal,
    )  # fmt: skip
    return o


def _as_heads(q: Tensor) -> Tensor:
    """The queries of a sequence as heads that share its keys, (batch, heads N, d): decoding knows one token."""
    return q.transpose(1, 2).flatten(1, 2)


def _as_queries(o: Tensor, like: Tensor) -> Tensor:
    return o.view(like.shape[0], like.shape[2], like.shape[1], -1).transpose(1, 2)


@kernel(layout="bnhd", takes="gqa")
def vllm_decode(q: Tensor, k: Tensor, v: Tensor, *, sm_scale: float, num_splits: int = 4) -> Tensor:
    """vLLM's attention of one token, of as many heads as there are queries."""
    file = source(f"{_VLLM}triton_decode_attention", current_platform=_PLATFORM)
    batch, keys = k.shape[:2]
    heads = _as_heads(q)
    o = torch.empty_like(heads)
    tokens = torch.arange(batch * keys, dtype=torch.int32).view(batch, keys)
    parts, lse = torch.empty(*heads.shape[:2], num_splits, q.shape[3] + 1), torch.empty(heads.shape[:2])
    file.decode_attention_fwd(
        heads, _flat(k).unsqueeze(1), _flat(v).unsqueeze(1), o, lse, tokens, _lengths(batch, keys), parts, num_splits,
        sm_scale,
    )  # fmt: skip
    return _as_queries(o, q)


# SGLang.

_SGLANG = "sglang.kernels.ops.attention."


@kernel(layout="bnhd", takes="gqa", square=True)
def sglang_prefill(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> Tensor:
    """SGLang's attention without a cache, for encoders."""
    file = source(f"{_SGLANG}prefill_attention", is_cuda=_yes, is_hip=_no)
    batch, tokens = q.shape[:2]
    o = torch.empty_like(q)
    file.context_attention_fwd(
        _flat(q), _flat(k), _flat(v), _flat(o), _starts(batch, tokens), _lengths(batch, tokens), tokens,
        is_causal=is_causal, sm_scale=scale,
    )  # fmt: skip
    return o


@kernel(layout="bnhd", takes="gqa")
def sglang_extend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """SGLang's attention of a chunk behind a cached prefix: the last keys are those of the chunk."""
    if q.shape[1] > k.shape[1]:
        raise NotImplementedError("a chunk is no longer than its sequence")
    file = source(
        f"{_SGLANG}extend_attention", also=(f"{_SGLANG}decode_attention", f"{_SGLANG}score_mod"),
        is_cuda=_yes, is_hip=_no, is_gfx95_supported=_no, is_gfx1250_supported=_no,
    )  # fmt: skip
    batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    before = keys - queries
    tokens = torch.arange(batch * keys).view(batch, keys)[:, :before].flatten()
    o = torch.empty_like(q)
    file.extend_attention_fwd(
        _flat(q), _flat(k[:, before:]).contiguous(), _flat(v[:, before:]).contiguous(), _flat(o), _flat(k), _flat(v),
        _starts(batch, queries), _starts(batch, before), tokens, None, causal, None, queries, 1.0, 1.0,
        sm_scale=sm_scale,
    )  # fmt: skip
    return o


@kernel(layout="bnhd", takes="gqa")
def sglang_decode(q: Tensor, k: Tensor, v: Tensor, *, sm_scale: float, num_splits: int = 4) -> Tensor:
    """SGLang's attention of one token, of as many heads as there are queries."""
    file = source(
        f"{_SGLANG}decode_attention", also=(f"{_SGLANG}score_mod",),
        is_cuda=_yes, is_hip=_no, is_gfx95_supported=_no, is_gfx1250_supported=_no,
    )  # fmt: skip
    batch, keys = k.shape[:2]
    heads = _as_heads(q)
    o, parts = torch.empty_like(heads), torch.empty(*heads.shape[:2], num_splits, q.shape[3])
    file.decode_attention_fwd(
        heads, _flat(k), _flat(v), o, _starts(batch, keys), torch.arange(batch * keys), parts, parts[..., 0].clone(),
        _lengths(batch, num_splits), num_splits, sm_scale, 1.0, 1.0,
    )  # fmt: skip
    return _as_queries(o, q)


# FlagGems.


def _tuned(configs: Any, key: list[str], **_: object) -> Any:
    """In the place of FlagGems' tuner: Triton's, of which the interpreter takes the first configuration."""
    import triton

    return triton.autotune(configs=configs, key=key)


def _configurations(name: str) -> Any:
    """FlagGems' own for NVIDIA's cards that its filter leaves, in one number of warps; its file adds some."""
    import triton

    blocks: list[dict[str, Any]] = [
        {"BLOCK_M": 128, "BLOCK_N": keys, "PRE_LOAD_V": loads} for keys in (32, 128) for loads in (True, False)
    ]
    if name == "attention_bwd":
        sizes = ((32, 128, 128, 32), (64, 128, 64, 64), (64, 128, 64, 32))
        blocks = [dict(zip(("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"), each, strict=True)) for each in sizes]
    return [triton.Config(each, num_warps=4, num_stages=2) for each in blocks]


@kernel(takes="gqa", head_dims=[32, 64, 128, 256])
def flag_gems(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> Any:
    """FlagGems' scaled_dot_product_attention, forward and backward."""
    runtime = SimpleNamespace(get_tuned_config=_configurations)
    file = source("flag_gems.ops.attention", runtime=runtime, keep=_yes, libtuner=_tuned, torch_device_fn=CUDA)
    return file.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=True)


# FlagAttention.


@kernel(takes="gqa", head_dims=[16, 32, 64, 128])
def flag_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """FlagAttention's flash attention, forward and backward."""
    file = source("flag_attn.flash", also=("flag_attn.total", "flag_attn.split_kv", "flag_attn.dropout"))
    return file.attention(q, k, v, causal, sm_scale)  # type: ignore[no-any-return]


# SageAttention.

_SAGE = "sageattention."


@kernel(takes="gqa", head_dims=[64, 96, 128], backward="none")
def sage_attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, sm_scale: float) -> Tensor:
    """SageAttention 1: q and k in 8 bits, the sum over P V in fp16. It takes the mean of k from k in place."""
    parts = ("per_block_int8", "quant_per_block", "quant_per_block_hd96", "quant_per_block_varlen")
    forms = ("per_block", "per_block_causal", "per_block_h96", "per_block_h96_causal")
    also = tuple(_SAGE + name for name in (*parts[1:], *(f"attn_qk_int8_{form}" for form in forms)))
    file = source("sageattention.core", also=also)
    return file.sageattn(as_if_on_a_gpu(q), k.clone(), v, is_causal=is_causal, sm_scale=sm_scale)  # type: ignore[no-any-return]


# flash-linear-attention.


def _is_ampere(name: str, *_: object) -> bool:
    return name == "ampere"


def _summed(x: Tensor, pattern: str, *, g: int, reduction: str) -> Tensor:
    """The one call of einops there: query heads of one key head."""
    del pattern, reduction
    return x.view(*x.shape[:2], -1, g, x.shape[3]).sum(3)


@kernel(layout="bnhd", takes="gqa")
def fla(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> Any:
    """flash-linear-attention's softmax attention, forward and backward, always causal.

    Without a mask every row is the last of a sequence.
    """
    file = source(
        "fla.ops.attn.parallel", also=("fla.ops.utils.op", "fla.ops.utils.constant"),
        check_shared_mem=_is_ampere, reduce=_summed,
    )  # fmt: skip
    if is_causal:
        return file.parallel_attn(q, k, v, scale=scale)
    rows = (torch.nn.functional.pad(row, (0, 0, 0, 0, k.shape[1] - 1, 0)) for row in torch.split(q, 1, 1))
    with torch.no_grad():  # autograd would add up dK and dV in the format of q
        return torch.cat([file.parallel_attn(row, k, v, scale=scale)[:, -1:] for row in rows], 1)


# Liger.


@kernel(square=True)
def liger(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Any:
    """Liger's neighborhood attention with a neighborhood of all tokens, forward and backward."""
    file = source(
        "liger_kernel.ops.fused_neighborhood_attention", also=("liger_kernel.ops.softmax", "liger_kernel.ops.utils")
    )
    tokens = q.shape[2]
    return file.LigerFusedNeighborhoodAttentionFunction.apply(q, k, v, 2 * tokens + 1, 1, scale)


# Conch.


def _conch(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, part: Tensor | None = None, lse: Tensor | None = None
) -> Tensor:
    file = source("conch.kernels.attention.varlen_attention", current_platform=SimpleNamespace(get_device_name=str))
    batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    (key_pages, table), (value_pages, _) = _paged(k), _paged(v)
    o = torch.empty_like(q)
    file.varlen_attention_launcher(
        _flat(o), _flat(q), key_pages, value_pages, _starts(batch, queries), queries, _lengths(batch, keys), keys,
        table, output_scratchpad=part, lse_scratchpad=lse, causal=causal, scale=scale, strict=True,
    )  # fmt: skip
    return o


@kernel(layout="bnhd", takes="gqa")
def conch(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Conch's attention of sequences of any lengths, keys in one part."""
    return _conch(q, k, v, causal, scale)


@kernel(layout="bnhd", takes="gqa")
def conch_split(q: Tensor, k: Tensor, v: Tensor, *, scale: float, num_splits: int = 2) -> Tensor:
    """The same with keys in parts, one query a sequence: as its own operator, it has the parts' O in q's format."""
    batch, queries = q.shape[:2]
    single_queries = q.flatten(0, 1).unsqueeze(1)
    repeated = k.repeat_interleave(queries, 0), v.repeat_interleave(queries, 0)
    parts = q.new_empty(num_splits, batch * queries, *q.shape[2:])
    return _conch(single_queries, *repeated, True, scale, parts, parts[..., 0].clone()).view(q.shape)


# AITER.

_AITER = "aiter.ops.triton."


def _aiter(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, file: Any, **descale: Tensor) -> Any:
    blocks = {"BLOCK_M": 128, "BLOCK_N": 64, "PRELOAD_V": False}
    return file._flash_attn_forward(
        q, k, v, 0.0, scale, causal, -1, -1, None, None, False, False, q.shape[1], k.shape[1], config=blocks, **descale
    )[0]


def _aiter_source(*more: str, **replacements: Any) -> Any:
    inner = ("_triton_kernels.attention.mha", "utils.types", "utils._triton.pid_preprocessing", *more)
    also = tuple(_AITER + name for name in inner)
    return source(f"{_AITER}attention.mha", also=also, get_num_xcds=lambda: 8, **replacements)


@kernel(layout="bnhd", takes="gqa", backward="none")
def aiter_mha(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, softmax_scale: float) -> Any:
    """AITER's Triton flash attention, with the blocks of a gfx942."""
    return _aiter(q, k, v, causal, softmax_scale, _aiter_source())


def _in_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """(batch, N, heads, d) in e4m3, and a scale for each head, (batch, heads)."""
    scale = (x.float().abs().amax((1, 3)) / 448.0).clamp(min=1e-30)
    return (x.float() / scale[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn), scale


@kernel(layout="bnhd", takes="gqa", backward="none")
def aiter_mha_fp8(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, softmax_scale: float) -> Any:
    """The same in fp8: q, k and v in e4m3 with a scale a head, P with one of its own in every tile."""
    gfx950 = SimpleNamespace(get_arch=lambda: "gfx950", is_fp8_avail=_yes)
    file = _aiter_source("utils._triton.mha_kernel_utils", arch_info=gfx950)
    (q8, q_scale), (k8, k_scale), (v8, v_scale) = map(_in_e4m3, (q, k, v))
    descale = {"descale_q": q_scale, "descale_k": k_scale, "descale_v": v_scale}
    return _aiter(q8, k8, v8, causal, softmax_scale, file, **descale).to(q.dtype)


# xformers, whose kernel is now in MSLK.

_MSLK = "mslk.attention.fmha."


def _mslk(q: Tensor, k: Tensor, v: Tensor, scale: float, splits: int) -> Any:
    inner = ("_triton.splitk_kernels", "_triton.reduce_kernels", "_triton.vararg_kernel")
    file = source(f"{_MSLK}triton_splitk", also=tuple(_MSLK + name for name in inner), is_triton_available=_yes)
    grouped = tuple(x.unsqueeze(2) for x in (q, k, v))
    inputs = SimpleNamespace(
        query=grouped[0], key=grouped[1], value=grouped[2], attn_bias=None, scale_float=scale,
        quantize_pv_to_fp8=False, quantize_qk_to_fp8=False, use_fp32_scales=False,
        get_qkv_in_bmghk=lambda: grouped, get_output_dtype=lambda: q.dtype,
    )  # fmt: skip
    chosen: Any = type("Chosen", (file.FwOp,), {"SPLIT_K": splits, "AUTOTUNE": False})
    return chosen.apply(inputs, False)[0][:, :, 0]


@kernel(layout="bnhd", backward="none")
def xformers_splitk(q: Tensor, k: Tensor, v: Tensor, *, scale: float, num_splits: int = 2) -> Any:
    """xformers' split-k attention (MSLK)."""
    return _mslk(q, k, v, scale, num_splits)


# FlashAttention.


@kernel(layout="bnhd")
def flash_attn_triton(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, softmax_scale: float) -> Any:
    """FlashAttention's old kernel in Triton. Its products take a keyword that Triton no longer has."""
    file = source("flash_attn.flash_attn_triton")
    return file.flash_attn_func(as_if_on_a_gpu(q), as_if_on_a_gpu(k), as_if_on_a_gpu(v), None, is_causal, softmax_scale)


#: Where each kernel's source is, by its function here.
SOURCES = {
    "triton_tutorial": "tutorials.06-fused-attention",
    "vllm_unified": f"{_VLLM}triton_unified_attention",
    "vllm_prefill": f"{_VLLM}triton_prefill_attention",
    "vllm_prefix_prefill": f"{_VLLM}prefix_prefill",
    "vllm_decode": f"{_VLLM}triton_decode_attention",
    "sglang_prefill": f"{_SGLANG}prefill_attention",
    "sglang_extend": f"{_SGLANG}extend_attention",
    "sglang_decode": f"{_SGLANG}decode_attention",
    "flag_gems": "flag_gems.ops.attention",
    "flag_attention": "flag_attn.flash",
    "fla": "fla.ops.attn.parallel",
    "liger": "liger_kernel.ops.fused_neighborhood_attention",
    "sage_attention": "sageattention.core",
    "conch": "conch.kernels.attention.varlen_attention",
    "conch_split": "conch.kernels.attention.varlen_attention",
    "aiter_mha": f"{_AITER}attention.mha",
    "aiter_mha_fp8": f"{_AITER}attention.mha",
    "xformers_splitk": f"{_MSLK}triton_splitk",
    "flash_attn_triton": "flash_attn.flash_attn_triton",
}

if __name__ == "__main__":
    from tiebreak.studies.public_kernels import main

    versions = {name: partial(version_of, module) for name, module in SOURCES.items()}
    sys.exit(main(__file__, FOLDER, versions, sys.argv[1:]))
