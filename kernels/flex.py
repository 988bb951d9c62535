"""PyTorch's FlexAttention, compiled: a kernel that torch.compile generates from the mask it is given.

Not run on a GPU yet. On a CPU it compiles too, but has no backward pass.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from tiebreak.kernels.features import COMMON
from tiebreak.kernels.flash import Block
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import Kernel
from tiebreak.kernels.triton.loading import missing
from tiebreak.kernels.vendor import empty, fused_on_gpu, through_autograd

SMALLEST_HEAD = 16  # of the head dimension: torch/_inductor/kernel/flex/flex_attention.py
# Hopper's default at a head dimension of 64: torch/_inductor/template_heuristics/triton.py.
_BLOCK = Block(queries=128, keys=128)
# The kernel for long rows for short ones too, whose own kernel splits the keys.
_OPTIONS = {"FORCE_USE_FLEX_ATTENTION": True}
_SHAPES = 256  # that one process may compile for; PyTorch's own limit is 8

# (batch, head, query, key) -> whether the key is seen
Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def flex() -> Kernel:
    """FlexAttention through torch.compile, forward and backward."""
    return Kernel(
        "flex",
        partial(through_autograd, _call),
        fused_on_gpu(_BLOCK),
        takes=COMMON,
        missing_requirement=_missing_requirement,
    )


def _missing_requirement(inputs: AttentionInputs) -> str | None:
    if inputs.q.shape[3] < SMALLEST_HEAD:
        return f"FlexAttention takes head dimensions from {SMALLEST_HEAD} on, not {inputs.q.shape[3]}"
    return empty(inputs) or missing() or _uncompiled()


def _uncompiled() -> str | None:
    """None, or why torch.compile would run FlexAttention without compiling it, which is another implementation."""
    from torch._dynamo import config

    switches = "TORCH_COMPILE_DISABLE and TORCHDYNAMO_DISABLE"
    return f"torch.compile is switched off: unset {switches}" if config.disable else None


@cache
def _compiled() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    # fullgraph: what can't be compiled is an error. Without dynamic shapes a kernel does not depend on those before it.
    return torch.compile(flex_attention, fullgraph=True, dynamic=False)  # type: ignore[no-any-return, unused-ignore]


def _mask(inputs: AttentionInputs) -> Mask | None:
    """The mask as a function; None where every key is seen."""
    if not inputs.causal and inputs.key_padding is None:
        return None
    ahead, causal, padding = inputs.k.shape[2] - inputs.q.shape[2], inputs.causal, inputs.key_padding

    def visible_key(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del head
        visible = key <= query + ahead if causal else key >= 0
        return visible if padding is None else visible & padding[batch, key]

    return visible_key


def _block_mask(inputs: AttentionInputs) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    mask, queries, keys = _mask(inputs), inputs.q.shape[2], inputs.k.shape[2]
    if mask is None:
        return None
    batch = None if inputs.key_padding is None else inputs.q.shape[0]
    return create_block_mask(mask, batch, None, queries, keys, device=str(inputs.q.device))


def _call(inputs: AttentionInputs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch._dynamo import config

    with config.patch(recompile_limit=_SHAPES):
        return _compiled()(
            q,
            k,
            v,
            block_mask=_block_mask(inputs),
            scale=inputs.scale,
            enable_gqa=inputs.groups > 1,
            kernel_options=_OPTIONS,
        )
