"""PyTorch's own scaled_dot_product_attention, one implementation forced at a time."""

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.flash import Block
from tiebreak.kernels.formats import BF16
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionInputs, AttentionOutput, Gradients
from tiebreak.kernels.kernel import Declaration, Kernel
from tiebreak.kernels.plans import FP32_PLAN, FUSED, Cast, DeltaSource, Exponential
from tiebreak.kernels.shift_rules import SHIFT_RULES

# Key block of PyTorch's CPU flash kernel (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp).
_CPU_FLASH_BLOCK = Block(queries=32, keys=512)


def _call(implementation: SDPBackend, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> Tensor:
    """One call; PyTorch raises RuntimeError rather than falling back where the forced implementation can't run."""
    hidden = inputs.hidden()
    mask = None if hidden is None else ~hidden.to(q.device)
    with sdpa_kernel([implementation]):
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=inputs.groups > 1)


def _compute(
    implementation: SDPBackend, inputs: AttentionInputs, arithmetic: Arithmetic, gradients: bool
) -> AttentionOutput:
    del arithmetic
    dtype = TORCH_DTYPES[inputs.fmt]
    # Copies also where the format is fp32: leaves of a graph of their own.
    q, k, v = (tensor.to(dtype, copy=True) for tensor in (inputs.q, inputs.k, inputs.v))
    if not gradients:
        return AttentionOutput(_call(implementation, q, k, v, inputs))
    leaves = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
    out = _call(implementation, q, k, v, inputs)
    dq, dk, dv = torch.autograd.grad(out, leaves, inputs.do.to(dtype))
    return AttentionOutput(out.detach(), gradients=Gradients(dq, dk, dv))


def flash_compute(inputs: AttentionInputs, arithmetic: Arithmetic, gradients: bool) -> AttentionOutput:
    """SDPA's flash implementation."""
    return _compute(SDPBackend.FLASH_ATTENTION, inputs, arithmetic, gradients)


def math_compute(inputs: AttentionInputs, arithmetic: Arithmetic, gradients: bool) -> AttentionOutput:
    """SDPA's composed implementation."""
    return _compute(SDPBackend.MATH, inputs, arithmetic, gradients)


def measure_exp_at_zero(scores: int = 64) -> float:
    """exp(0) as PyTorch's CPU flash kernel computes it, from the log-sum-exp of equal scores.

    Its log-sum-exp of n zeros is log(n exp(0)). The fast exponential of the AVX2 and AVX-512 builds misses 1 by 5.3e-5.
    """
    zeros = torch.zeros(1, 1, scores, 16, dtype=torch.bfloat16)
    _, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(zeros, zeros, zeros)
    return math.exp(lse[0, 0, 0].item()) / scores


def _fp32_exp_at_zero() -> float:
    """The measured constant, on the fp32 grid: log-sum-exp carries it with an error of some fp32 ulps."""
    value = measure_exp_at_zero()
    return 1.0 if abs(value - 1.0) < 1e-6 else value


def cpu_sdpa_flash() -> Kernel:
    """PyTorch's CPU flash kernel: `fused` in every point but the value of its exponential at 0."""
    exponential = Exponential(at_zero=_fp32_exp_at_zero())
    plan = FUSED if exponential.at_zero == 1.0 else replace(FUSED, name="fused_fast_exp", exponential=exponential)
    declaration = Declaration("flash", plan, SHIFT_RULES["safe"], _CPU_FLASH_BLOCK)
    return Kernel("sdpa_flash", flash_compute, declaration)


def sdpa_math() -> Kernel:
    """PyTorch's composed implementation, which upcasts narrow inputs to fp32 and casts O only."""
    plan = replace(FP32_PLAN, name="fp32_inside", o=Cast(BF16), delta_from=DeltaSource.PROBABILITIES)
    return Kernel("sdpa_math", math_compute, Declaration("flash", plan, SHIFT_RULES["safe"]))
