"""Attention of JAX."""

import importlib
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from tiebreak.kernels.external.adapters.foreign import Foreign, needs
from tiebreak.kernels.external.options import kernel

JAX = Foreign("jax.nn:dot_product_attention", "jax", "0.4.31 to 0.10", ("mask", "scale", "is_causal", "implementation"))


def _array(x: Tensor | None) -> Any:
    return None if x is None else importlib.import_module("jax").dlpack.from_dlpack(x.detach().contiguous())


def _tensor(x: Any) -> Tensor:
    return from_dlpack(x).clone()  # type: ignore[no-untyped-call, unused-ignore]


@cache
def _jitted(scale: float, is_causal: bool, backward: bool) -> Any:
    library = importlib.import_module("jax")

    def forward(mask: Any, q: Any, k: Any, v: Any) -> Any:
        return JAX(q, k, v, mask=mask, scale=scale, is_causal=is_causal, implementation="xla")

    def gradients(mask: Any, do: Any, q: Any, k: Any, v: Any) -> Any:
        return library.vjp(partial(forward, mask), q, k, v)[1](do)

    return library.jit(gradients if backward else forward)


def _gradients(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, *, attn_mask: Any = None, is_causal: bool, scale: float
) -> tuple[Tensor, ...]:
    del o
    pull = _jitted(scale, is_causal, backward=True)
    return tuple(map(_tensor, pull(_array(attn_mask), *map(_array, (do, q, k, v)))))


@needs(JAX)
@kernel(layout="bnhd", takes="gqa", refuses="blind_rows", backward=_gradients)
def jax(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool, scale: float) -> Tensor:
    """Its dot_product_attention, jitted, by XLA and not cuDNN; its backward pass is jax.vjp's.

    Its mask is aligned at the upper left. A row without a key is a mean of all. Whether P is rounded depends on the
    shape of the call, unless XLA_FLAGS has --xla_allow_excess_precision=false.
    """
    if q.dtype == torch.float16 and q.device.type == "cpu":
        raise NotImplementedError("jax.jit finds no product of fp16 with a sum in fp32 on a CPU")
    attend = _jitted(scale, is_causal, backward=False)
    return _tensor(attend(_array(attn_mask), *map(_array, (q, k, v))))
