"""The Triton kernels as a differentiable function of torch tensors."""

from typing import Any

import torch
from torch import Tensor

from tiebreak.kernels.formats import Formats
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionInputs
from tiebreak.kernels.kernel import Declaration
from tiebreak.kernels.triton.launch import Call, backward, forward


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    declaration: Declaration,
    *,
    causal: bool = False,
    noise_seed: int = 0,
) -> Tensor:
    """softmax(Q K^T / sqrt(d)) V by the Triton kernels, differentiable in q, k and v.

    Args:
        q: (batch, heads, queries, d), bf16, fp16 or fp32, of any strides.
        k: (batch, key heads, keys, d), of q's type and on its device; heads is a multiple of key heads.
        v: as k.
        declaration: algorithm, plan, shift rule and tile sizes, for instance of `roster.DECLARATIONS`.
        causal: query i sees keys 0 .. i + keys - queries.
        noise_seed: seeds the dither and the stochastic casts; give every call its own.

    Returns:
        O in q's shape, in the format that the plan casts O to.

    Raises:
        ValueError: no triton, or tensors that do not fit or that the kernels or the device can't take; one line.
    """
    o: Tensor = _Attention.apply(q, k, v, declaration, causal, noise_seed)  # type: ignore[no-untyped-call]
    return o


def _inputs(q: Tensor, k: Tensor, v: Tensor, causal: bool, noise_seed: int) -> AttentionInputs:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not (batch, heads, n, d)")
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, q is {q.dtype} on {q.device}")
    formats = {dtype: fmt for fmt, dtype in TORCH_DTYPES.items()}
    if q.dtype not in formats:
        raise ValueError(f"q, k and v are {q.dtype}: the Triton kernels take {', '.join(map(str, formats))}")
    q, k, v = (tensor.detach() for tensor in (q, k, v))
    return AttentionInputs(q, k, v, q, Formats.of(formats[q.dtype]), causal=causal, noise_seed=noise_seed)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        declaration: Declaration,
        causal: bool,
        noise_seed: int,
    ) -> Tensor:
        call = Call.of(_inputs(q, k, v, causal, noise_seed), declaration)
        o, lse = forward(call)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.settings = (declaration, causal, noise_seed)
        return o.view(q.shape)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override, unused-ignore]
        q, k, v, o, lse = ctx.saved_tensors
        declaration, causal, noise_seed = ctx.settings
        call = Call.of(_inputs(q, k, v, causal, noise_seed), declaration)
        dq, dk, dv, _ = backward(call, o, lse, do)
        gradients = ((dq, q), (dk, k), (dv, v))
        return (*(gradient.view(like.shape).to(like.dtype) for gradient, like in gradients), *[None] * 3)
