"""The rounding plans of kernels that vendors ship, by their sources. None was measured on the device that it is for,
but for PyTorch's on CPUs.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class VendorPlan:
    """What a vendor's kernel rounds in bf16, as `--plan` takes it."""

    name: str
    kernel: str  # what it is called where it is used, and when
    plan: str  # as `tiebreak.kernels.declarations.parse_declaration` takes it
    source: str  # repository, path and lines
    version: str  # commit or release, and date
    note: str = ""  # what the source does not say, or a plan cannot


_ASCEND = "cann/ops-transformer attention"
_AT_ASCEND = "c29bc10, 2025-11-15"
_FLASH = "Dao-AILab/flash-attention"
_AT_FLASH = "0251105, 2026-08-15"
_AITER = "ROCm/aiter hsa/gfx942/fmha_v3_fwd/fmha_fwd.csv, aiter/ops/mha.py:1775"
_GFX950 = "ROCm/aiter hsa/gfx950/fmha_v3_fwd/fmha_fwd.csv, csrc/cpp_itfs/mha_fwd.cu:47, aiter/ops/mha.py:2369"
_AT_AITER = "e404860, 2026-08-22"
_BINARY = "the kernel is a binary: its name says how it casts to bf16, its table has the tiles of d = 128"
_TORCH = "pytorch/pytorch aten/src/ATen/native/cpu/FlashAttentionKernel.cpp"
_TILES = "tiles of d = 64; with d = 128 they are"

_PLANS = (
    VendorPlan(
        "ascend_training",
        "npu_fusion_attention",
        "flash@fused_p_bar_o_away",
        f"{_ASCEND}/flash_attention_score/op_kernel/flash_attention_score_s1s2_bn2gs1.h:1470 (P), 2354 (O)",
        _AT_ASCEND,
        "CAST_ROUND, half away from zero; the mode is what the source names, not measured",
    ),
    VendorPlan(
        "ascend_prefill",
        "npu_prompt_flash_attention, the high-precision kernel in bf16",
        "flash@fused",
        f"{_ASCEND}/prompt_flash_attention/op_kernel/prompt_flash_attention_base_api.h:3675 (P), 4735 (O)",
        _AT_ASCEND,
        "CAST_RINT, half to even; prompt_flash_attention_s1s2_bns1_x910_base.h:890 casts O with CAST_ROUND",
    ),
    VendorPlan(
        "ascend_decode",
        "npu_incre_flash_attention, in bf16",
        "flash@fused_p_bar_away",
        f"{_ASCEND}/incre_flash_attention/op_kernel/incre_flash_attention_preload.h:2353 (P), 2262 (O)",
        _AT_ASCEND,
        "P half away from zero, O half to even; in fp16 both away from zero (2264)",
    ),
    VendorPlan(
        "aiter_gfx942",
        "aiter.flash_attn_func on MI300, how_v3_bf16_cvt=1, its default",
        "flash@fused_p_bar_o_away,tile=256x32",
        _AITER,
        _AT_AITER,
        _BINARY,
    ),
    VendorPlan(
        "aiter_gfx942_zero",
        "the same with how_v3_bf16_cvt=2",
        "flash@fused,p_bar=input:zero,o=input:zero,tile=256x32",
        _AITER,
        _AT_AITER,
        _BINARY,
    ),
    VendorPlan(
        "aiter_gfx942_even",
        "the same with how_v3_bf16_cvt=0",
        "flash@fused,tile=256x32",
        _AITER,
        _AT_AITER,
        _BINARY,
    ),
    VendorPlan(
        "aiter_gfx950",
        "aiter.flash_attn_func on MI350, with whatever how_v3_bf16_cvt",
        "flash@fused,tile=256x64",
        _GFX950,
        _AT_AITER,
        "half to even: the other casts are deprecated there (2368); the kernel is a binary, its table has the tiles of"
        " d = 128",
    ),
    VendorPlan(
        "flash_attention_2",
        "flash_attn 2",
        "flash@fused_contracted,tile=128x128",
        f"{_FLASH} csrc/flash_attn/src/softmax.h:88, flash_fwd_launch_template.h:210",
        f"2.8.4 {_AT_FLASH}",
        f"{_TILES} 128 x 64; PyTorch's build sets UNFUSE_FMA: flash@fused,base=2",
    ),
    VendorPlan(
        "flash_attention_3",
        "flash_attn_interface on Hopper",
        "flash@fused_contracted,tile=192x192",
        f"{_FLASH} hopper/softmax.h:85, hopper/tile_size.h:24",
        f"3.0.0 {_AT_FLASH}",
        f"{_TILES} 128 x 176, under a mask 192 x 128 and 128 x 128",
    ),
    VendorPlan(
        "flash_attention_4",
        "flash_attn.cute on Blackwell",
        "lazy@fused_contracted,tile=128x128",
        f"{_FLASH} flash_attn/cute/softmax.py:294, 354, flash_attn/cute/flash_fwd_sm100.py:150, 2190",
        f"4.0.0.beta27 {_AT_FLASH}",
        "some exponentials are a polynomial's (ex2_emu_freq), which no plan has",
    ),
    VendorPlan(
        "flashinfer",
        "flashinfer's fa2 backend",
        "flash@fused_contracted,l_from=rounded",
        "flashinfer-ai/flashinfer include/flashinfer/attention/prefill.cuh:1637, 1710, 1722",
        "0.6.18+27 fb28d72, 2026-08-22",
        "l is a product of the P that is cast; contraction is the compiler's; 1 / l is approximate",
    ),
    VendorPlan(
        "flashinfer_hopper",
        "flashinfer's fa3 backend",
        "flash@fused_contracted",
        "flashinfer-ai/flashinfer include/flashinfer/attention/hopper/attention_updater.cuh:139, 219",
        "0.6.18+27 fb28d72, 2026-08-22",
        "l sums P before its cast",
    ),
    VendorPlan(
        "cudnn",
        "cuDNN's SDPA",
        "flash@fused",
        "docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html",
        "9.18.1",
        "closed: the page says FlashAttention-2's algorithm, and computing in FLOAT, which is the default",
    ),
    VendorPlan(
        "pytorch_x86",
        "scaled_dot_product_attention on x86 with AVX-512",
        "flash@fused_fast_exp,tile=32x512",
        f"{_TORCH}, aten/src/ATen/cpu/vec (fexp_u20)",
        "2.13.0",
        "measured; with AVX2 the fast exponential takes 8 keys at a time, not 16",
    ),
    VendorPlan(
        "pytorch_aarch64",
        "the same on aarch64, and on x86 without AVX2",
        "flash@fused,tile=32x512",
        _TORCH,
        "2.13.0 and 2.9.1",
        "measured; of aarch64 under QEMU",
    ),
)
VENDOR_PLANS: Mapping[str, VendorPlan] = {plan.name: plan for plan in _PLANS}
