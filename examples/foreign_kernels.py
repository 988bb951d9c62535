"""Attention of packages that have no adapter, as docs/other-kernels.md calls it: a few lines each.

    tiebreak check examples/foreign_kernels.py:sdpa_flash

Each imports its package when it is called.
"""

import os
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tiebreak import kernel


def sdpa_flash(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool, scale: float, enable_gqa: bool
) -> Tensor:
    """PyTorch's SDPA, its flash kernel: nothing else is allowed, so it raises where that can't be."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(q, k, v, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)


def sdpa_math(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool, scale: float, enable_gqa: bool
) -> Tensor:
    """PyTorch's SDPA, its plain products."""
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)


@cache
def _module(d: int, dtype: torch.dtype) -> torch.nn.MultiheadAttention:
    """Four heads of d. The first has q, k and v from the first three quarters of a token; the others are 0."""
    module = torch.nn.MultiheadAttention(4 * d, 4, batch_first=True, dtype=dtype).eval().requires_grad_(False)
    weights, quarter = torch.zeros(3, 4 * d, 4 * d), torch.eye(d)
    for part in range(3):
        weights[part, :d, part * d : (part + 1) * d] = quarter
    module.in_proj_weight.copy_(weights.flatten(0, 1))
    module.out_proj.weight.copy_(torch.eye(4 * d))
    module.in_proj_bias.zero_()
    module.out_proj.bias.zero_()
    return module


@kernel(square=True, refuses="gqa", backward="none")
def multihead_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch.nn.MultiheadAttention on its fast path, whose projections are exact copies.

    That path is for one tensor that is query, key and value: q, k and v are quarters of it.
    """
    if not all(part.isfinite().all() for part in (q, k, v)):
        raise NotImplementedError("its projections spread what is not finite to q, k and v, by a product with 0")
    tokens = torch.cat([part.flatten(0, 1) for part in (q, k, v, torch.zeros_like(q))], -1)
    out, _ = _module(q.shape[-1], q.dtype)(tokens, tokens, tokens, need_weights=False)
    return out[..., : q.shape[-1]].reshape(q.shape).clone()


@cache
def _flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = 256
    return torch.compile(flex_attention, fullgraph=True, dynamic=False)


def _block_mask(queries: int, keys: int) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, i, j: j <= i + keys - queries, None, None, queries, keys, device="cpu")


@kernel(takes="gqa", backward="none")
def flex(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """FlexAttention, compiled; on a CPU it has no backward pass."""
    mask = _block_mask(q.shape[2], k.shape[2]) if causal else None
    return _flex()(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


@kernel(layout="bnhd", refuses="blind_rows")
def keras(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool, scale: float) -> Tensor:
    """keras.ops on PyTorch."""
    os.environ.setdefault("KERAS_BACKEND", "torch")
    from keras import ops

    return ops.dot_product_attention(q, k, v, mask=attn_mask, scale=scale, is_causal=is_causal, flash_attention=False)


@cache
def _flax() -> Any:
    import jax
    from flax import linen

    return jax.jit(lambda q, k, v, mask: linen.dot_product_attention(q, k, v, mask=mask))


def _through_jax(function: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    import jax

    arrays = [None if x is None else jax.dlpack.from_dlpack(x.contiguous()) for x in (q, k, v, mask)]
    return torch.from_dlpack(function(*arrays)).clone()


@kernel(layout="bnhd", refuses="blind_rows", backward="none")
def flax(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None) -> Tensor:
    """flax.linen's dot_product_attention, jitted: the softmax in the format of its inputs, its default."""
    return _through_jax(_flax(), q, k, v, attn_mask)


def _pallas(q: Any, k: Any, v: Any, o: Any, *, scale: float) -> None:
    """One head in Pallas, all keys at once: P is cast, and divided by l behind the product."""
    import jax.numpy as jnp

    s = jnp.dot(q[...], k[...].T, preferred_element_type=jnp.float32) * scale
    p = jnp.exp(s - s.max(1, keepdims=True))
    product = jnp.dot(p.astype(v.dtype), v[...], preferred_element_type=jnp.float32)
    o[...] = (product / p.sum(1, keepdims=True)).astype(o.dtype)


@kernel(layout="hnd", refuses="gqa", backward="none")
def pallas(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """A Pallas kernel of one's own, interpreted; without `interpret` it takes a GPU or a TPU."""
    import jax
    from jax.experimental import pallas as pl

    def heads(q: Any, k: Any, v: Any, _: None) -> Any:
        q_block, *key_blocks = (pl.BlockSpec((None, *x.shape[1:]), lambda head: (head, 0, 0)) for x in (q, k, v))
        o = jax.ShapeDtypeStruct((*q.shape[:2], v.shape[2]), q.dtype)
        out_block = pl.BlockSpec((None, *o.shape[1:]), lambda head: (head, 0, 0))
        blocks = {"grid": q.shape[0], "in_specs": [q_block, *key_blocks], "out_specs": out_block}
        return pl.pallas_call(partial(_pallas, scale=scale), o, interpret=True, **blocks)(q, k, v)

    return _through_jax(heads, q, k, v, None)


@kernel(takes="gqa", refuses="blind_rows", backward="none")
def mlx(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, scale: float) -> Tensor:
    """mlx.core.fast's on a CPU."""
    import mlx.core as mx

    kinds = {torch.bfloat16: mx.bfloat16, torch.float16: mx.float16}
    arrays = [mx.array(x.view(torch.int16).numpy()).view(kinds[x.dtype]) for x in (q, k, v)]
    mask = None if attn_mask is None else mx.array(attn_mask.contiguous().numpy())
    o = mx.fast.scaled_dot_product_attention(*arrays, scale=scale, mask=mask)
    return torch.from_numpy(np.array(o.view(mx.int16))).view(q.dtype)
