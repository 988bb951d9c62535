"""Attention of JAX: XLA's, and its kernels in Pallas for TPUs, interpreted. None of these was run on a TPU.

An interpreter computes each product of matrices as XLA does on a CPU. How a TPU's matrix unit adds up it does not say.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from tiebreak.kernels.external.adapters.foreign import Foreign
from tiebreak.kernels.external.options import kernel, needs
from tiebreak.kernels.formats import BF16, FP32

_TPU = "jax.experimental.pallas.ops.tpu"
_FORMATS = BF16, FP32  # of a TPU
_BLOCK = 128  # of queries, and of keys where no other number is asked for: the package's own
_HEADS = 16  # of keys in one call: the interpreters' time goes by the square of it

JAX = Foreign("jax.nn:dot_product_attention", "jax", "0.4.31 to 0.10")
INTERPRETER = Foreign("jax.experimental.pallas.tpu:force_tpu_interpret_mode", "jax", "0.10")
FLASH = Foreign(f"{_TPU}.flash_attention:flash_attention", "jax", "0.10", formats=_FORMATS)
SPLASH = Foreign(f"{_TPU}.splash_attention:make_splash_mha_single_device", "jax", "0.10", formats=_FORMATS)


@dataclass(frozen=True)
class _JaxAttention:
    """A function of JAX' arrays, called with tensors."""

    function: Callable[..., Any]  # (q, k, v, mask=array or None, options by name) -> O
    pallas: bool = True  # whether it compiles its own kernels, here for the interpreter; else all of it is compiled

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, **options: Any) -> Tensor:
        return self._called(_computed(self, False, **options), attn_mask, q, k, v)[0]

    def gradients(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, *, attn_mask: Any = None, **options: Any
    ) -> tuple[Tensor, ...]:
        """Return the gradients of q, k and v, by jax.vjp."""
        del o
        return self._called(_computed(self, True, **options), attn_mask, do, q, k, v)

    def _called(self, function: Any, mask: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the result of a function of a mask and tensors, the last of which is v."""
        if not self.pallas:
            return tuple(map(_tensor, function(*map(_array, (mask, *tensors)))))
        key_heads, masks = tensors[-1].shape[1], None if mask is None else mask.expand(-1, tensors[0].shape[1], -1, -1)
        parts = [
            repeat(None) if x is None else torch.split(x, _HEADS * x.shape[1] // key_heads, 1)
            for x in (masks, *tensors)
        ]
        # True is Pallas' own interpreter: it has the bits of that of TPUs, whose memory it does not act out.
        with INTERPRETER(True):
            made = [function(*map(_array, part)) for part in zip(*parts, strict=False)]
        return tuple(torch.cat(list(map(_tensor, each)), 1) for each in zip(*made, strict=True))


@cache
def _computed(attention: _JaxAttention, backward: bool, **options: Any) -> Any:
    library = importlib.import_module("jax")

    def forward(mask: Any, q: Any, k: Any, v: Any) -> Any:
        return (attention.function(q, k, v, mask=mask, **options),)

    def gradients(mask: Any, do: Any, q: Any, k: Any, v: Any) -> Any:
        return library.vjp(partial(attention.function, mask=mask, **options), q, k, v)[1](do)

    function = gradients if backward else forward
    return function if attention.pallas else library.jit(function)


def _array(x: Tensor | None) -> Any:
    return None if x is None else importlib.import_module("jax").dlpack.from_dlpack(x.detach().contiguous())


def _tensor(x: Any) -> Tensor:
    return from_dlpack(x).clone()  # type: ignore[no-untyped-call, unused-ignore]


def _flash(q: Any, k: Any, v: Any, *, mask: Any, is_causal: bool, scale: float, block_k: int | None = _BLOCK) -> Any:
    numpy, package = importlib.import_module("jax.numpy"), importlib.import_module(f"{_TPU}.flash_attention")
    block, hidden = block_k or k.shape[2], numpy.float32(package.DEFAULT_MASK_VALUE)
    sizes = package.BlockSizes(_BLOCK, block, block, 1, _BLOCK, block, block, _BLOCK, block, block, _BLOCK)
    bias = None if mask is None else numpy.where(mask, 0, hidden)
    return FLASH(q, k, v, bias, causal=is_causal, sm_scale=scale, block_sizes=sizes)


def _splash(q: Any, k: Any, v: Any, *, mask: Any, is_causal: bool, scale: float, block_k: int | None = _BLOCK) -> Any:
    numpy, package = importlib.import_module("jax.numpy"), importlib.import_module(f"{_TPU}.splash_attention")
    block, shape = block_k or k.shape[2], (q.shape[2], k.shape[2])
    sizes = package.BlockSizes(_BLOCK, block, block, _BLOCK, block, block, _BLOCK, block)
    base_mask = package.CausalMask(shape) if is_causal else package.FullMask(shape)
    masks = [package.MultiHeadMask([base_mask] * q.shape[1])] * len(q) if mask is None else list(np.asarray(mask))
    calls = zip(masks, q * scale, k, v, strict=True)
    return numpy.stack([SPLASH(visible, block_sizes=sizes)(*sequence) for visible, *sequence in calls])


_DOT_PRODUCT = _JaxAttention(partial(JAX, implementation="xla"), pallas=False)
_FLASH = _JaxAttention(_flash)
_SPLASH = _JaxAttention(_splash)


@needs(JAX)
@kernel(layout="bnhd", takes="gqa", refuses="blind_rows", backward=_DOT_PRODUCT.gradients)
def jax(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool, scale: float) -> Tensor:
    """Call JAX's dot_product_attention, jitted, by XLA and not cuDNN; its backward pass is jax.vjp's.

    Its mask is aligned at the upper left. A row without a key is a mean of all. Whether P is rounded depends on the
    shape of the call, unless XLA_FLAGS has --xla_allow_excess_precision=false.
    """
    if q.dtype == torch.float16 and q.device.type == "cpu":
        raise NotImplementedError("jax.jit finds no product of fp16 with a sum in fp32 on a CPU")
    return _DOT_PRODUCT(q, k, v, attn_mask, is_causal=is_causal, scale=scale)


@needs(FLASH, INTERPRETER)
@kernel(multiple_of=_BLOCK, refuses="gqa value_dim blind_rows", backward=_FLASH.gradients)
def pallas_flash(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Any = None, is_causal: bool, scale: float, block_k: Any = _BLOCK
) -> Tensor:
    """Call Pallas' flash attention for TPUs, interpreted, in both passes; a mask is its bias of the scores.

    `--declare options.block_k=None` is all keys in one block, which is other code: P is normalised, then cast. So are
    up to 128 keys; `--declare multiple_of=256` gives a call more.
    """
    return _FLASH(q, k, v, attn_mask, is_causal=is_causal, scale=scale, block_k=block_k)


@needs(SPLASH, INTERPRETER)
@kernel(multiple_of=_BLOCK, takes="gqa", refuses="blind_rows", backward=_SPLASH.gradients)
def pallas_splash(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Any = None, is_causal: bool, scale: float, block_k: Any = _BLOCK
) -> Tensor:
    """Call Pallas' splash attention for TPUs, interpreted, in both passes; it has no scale, so q is multiplied by it.

    Its blocks are those of `pallas_flash`. P and V are fp32 in its product, which a TPU need not compute in fp32.
    """
    return _SPLASH(q, k, v, attn_mask, is_causal=is_causal, scale=scale, block_k=block_k)
