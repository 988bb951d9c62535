"""The vendor's attention for NPUs, as a user calls it. The backend `ascend` has it in every layout: kernels/npu.py."""

from typing import Any

from torch import Tensor

from tiebreak.kernels.external.adapters.foreign import Foreign, needs
from tiebreak.kernels.external.options import kernel
from tiebreak.kernels.npu import causal_mask

NPU_FUSION_ATTENTION = Foreign(
    "torch_npu:npu_fusion_attention",
    "torch-npu",
    "2.1 to 2.7",
    ("scale", "atten_mask", "sparse_mode"),
    devices=("npu",),
)


@needs(NPU_FUSION_ATTENTION)
@kernel(takes="gqa", refuses="blind_rows")
def npu_fusion_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Any:
    """Torch-npu's operator. Without a mask it has none; its mode 3 aligns a causal one at the lower right."""
    masked = causal_mask(q.device) if causal else {}
    return NPU_FUSION_ATTENTION(q, k, v, q.shape[1], "BNSD", scale=scale, **masked)[0]
