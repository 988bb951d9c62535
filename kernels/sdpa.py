"""PyTorch's own scaled_dot_product_attention, one implementation forced at a time.

The statements about implementations on a GPU are from PyTorch's source; none of them has been run on one yet.
"""

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from tiebreak.kernels.algorithms import FLASH_ATTENTION
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.features import BIAS, CAUSAL, COMMON, GROUPED, MASKS, OWN_SCALE, VALUE_DIM, Feature
from tiebreak.kernels.flash import BLOCK, Block
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import Declaration, Kernel
from tiebreak.kernels.plans import FEXP_U20, FP32_INSIDE, FUSED, FUSED_FAST_EXP
from tiebreak.kernels.shift_rules import SHIFT_RULES
from tiebreak.kernels.vendor import StartedCall, empty, through_autograd

# Key block of PyTorch's CPU flash kernel (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp).
_CPU_FLASH_BLOCK = Block(queries=32, keys=512)
# At a head dimension of 64: FlashAttention-2's flash_fwd_launch_template.h (run_mha_fwd_hdim64), which PyTorch carries,
# and the kernel fmha_cutlassF_bf16_aligned_64x64_rf_sm80 of PyTorch's mem_eff_attention. cuDNN does not publish its own
FLASH_2_BLOCK = Block(queries=128, keys=128)
_EFFICIENT_BLOCK = Block(queries=64, keys=64)

# `missing_requirement` asks PyTorch about a separate head dimension of V. Without a mask, only is_causal gives a causal
# one, which differs unless there are as many queries as keys.
_WITHOUT_MASK = frozenset({CAUSAL, GROUPED, OWN_SCALE, VALUE_DIM})
_WITH_MASK = COMMON | MASKS | {VALUE_DIM, BIAS}
_MASK_ARGUMENTS = frozenset({"attn_mask", "attn_bias"})  # what operators call it
_FUSED_OPERATORS = "aten::_scaled_dot_product_"
_COMPOSED_OPERATOR = "aten::_scaled_dot_product_attention_math"


@dataclass(frozen=True)
class Implementation:
    """One implementation of `scaled_dot_product_attention`. To call it computes attention, by this one alone."""

    backend: SDPBackend  # PyTorch's name of it
    operator: str | None  # the one operator that PyTorch calls where it runs; None: it is composed of many
    causal_flag: bool = False  # whether is_causal gives it a causal mask, where queries and keys are as many

    @property
    def takes(self) -> frozenset[Feature]:
        """The features of inputs that it takes: all where its operator takes a tensor that masks scores."""
        if self.operator is None:
            return _WITH_MASK
        schema = getattr(torch.ops.aten, self.operator.removeprefix("aten::")).default._schema
        return _WITH_MASK if _MASK_ARGUMENTS & {argument.name for argument in schema.arguments} else _WITHOUT_MASK

    def __call__(self, inputs: AttentionInputs, arithmetic: Arithmetic, gradients: bool) -> AttentionOutput:
        """Compute attention by it; RuntimeError where PyTorch ran another, or none: it can't take the inputs."""
        return through_autograd(self._o, inputs, arithmetic, gradients)

    def started(self, inputs: AttentionInputs) -> StartedCall:
        """Run its forward pass, before others', as frameworks do."""
        return StartedCall.of(self._o, inputs)

    def _arguments(self, inputs: AttentionInputs) -> dict[str, Any]:
        """Return a call's arguments after q, k and v: a mask, True where a key is seen, or with a bias that and -Inf.

        PyTorch's flag lets query i see keys 0 .. i, this suite's inputs keys 0 .. i + keys - queries.
        """
        square = inputs.q.shape[2] == inputs.k.shape[2]
        flag = self.causal_flag and square and inputs.masks().keys() == {CAUSAL} and inputs.bias is None
        hidden, mask = None if flag else inputs.hidden(), None
        if inputs.bias is not None:
            mask = inputs.bias.to(TORCH_DTYPES[inputs.formats.inputs])
            mask = mask if hidden is None else mask.masked_fill(hidden.to(mask.device), -torch.inf)
        elif hidden is not None:
            mask = ~hidden.to(inputs.q.device)
        grouped = inputs.groups > 1
        return {"attn_mask": mask, "is_causal": flag, "scale": inputs.softmax_scale, "enable_gqa": grouped}

    def _o(self, inputs: AttentionInputs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return O of one call, and check which operator ran. Its backward pass is bound to the same one."""
        arguments = self._arguments(inputs)
        with sdpa_kernel([self.backend]), Operators() as ran:
            out = scaled_dot_product_attention(q, k, v, **arguments)
        fused = {name for name in ran.names if name.startswith(_FUSED_OPERATORS)}
        fused -= {name for name in fused if name.startswith(_COMPOSED_OPERATOR)}  # also MPS's own writing of it
        if fused != {self.operator} - {None}:
            names = ", ".join(sorted(fused)) or "the composed implementation"
            raise RuntimeError(f"{self.backend.name} was forced, but PyTorch ran {names}")
        return out

    def missing_requirement(self, inputs: AttentionInputs) -> str | None:
        """Return None, or what keeps it from running some inputs on their device, in one line.

        PyTorch gives the reason: the head dimensions, formats and grouped heads that an implementation takes vary with
        releases and cards. Nothing is computed.
        """
        if (reason := empty(inputs)) is not None:
            return reason
        arguments, dtype = self._arguments(inputs), TORCH_DTYPES[inputs.formats.inputs]
        # With gradients, since some implementations take more without.
        q, k, v = (tensor.to(dtype, copy=True).requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v))
        with warnings.catch_warnings(record=True) as caught, sdpa_kernel([self.backend]):
            warnings.simplefilter("always")
            try:
                chosen = torch._fused_sdp_choice(q, k, v, **arguments)
            except RuntimeError as error:
                # The warning about the implementation that was left on, or else the error.
                of_others = ("kernel not used because", "runtime disabled")
                warned = (str(warning.message) for warning in caught)
                text = next((text for text in warned if not any(part in text for part in of_others)), str(error))
                return f"{self.backend.name}: {' '.join(text.partition('(Triggered internally')[0].split())}"
        if chosen == self.backend.value:
            return None
        return f"{self.backend.name} can't take these inputs: PyTorch would run {SDPBackend(chosen).name}"


CPU_FLASH = Implementation(SDPBackend.FLASH_ATTENTION, "aten::_scaled_dot_product_flash_attention_for_cpu")
MATH = Implementation(SDPBackend.MATH, None)
CUDA_FLASH = Implementation(SDPBackend.FLASH_ATTENTION, "aten::_scaled_dot_product_flash_attention", causal_flag=True)
CUDA_CUDNN = Implementation(SDPBackend.CUDNN_ATTENTION, "aten::_scaled_dot_product_cudnn_attention", causal_flag=True)
CUDA_EFFICIENT = Implementation(
    SDPBackend.EFFICIENT_ATTENTION, "aten::_scaled_dot_product_efficient_attention", causal_flag=True
)
# The dispatch key of out-of-tree devices, and that of Intel's GPUs.
OVERRIDEABLE = Implementation(
    getattr(SDPBackend, "OVERRIDEABLE", SDPBackend.ERROR),  # older releases don't name it
    "aten::_scaled_dot_product_fused_attention_overrideable",
    causal_flag=True,
)


ON_GPUS = {
    "sdpa_flash": (CUDA_FLASH, FLASH_2_BLOCK),
    "sdpa_cudnn": (CUDA_CUDNN, BLOCK),
    "sdpa_efficient": (CUDA_EFFICIENT, _EFFICIENT_BLOCK),
}


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """A recorder of the operators that PyTorch calls, below autograd: what runs, not what was requested."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.names: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to keep it out of what is compiled loads torch's compiler, and nothing is compiled here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def measure_exp_at_zero(scores: int = 64) -> float:
    """Return exp(0) as PyTorch's CPU flash kernel computes it: its log-sum-exp of n zeros is log(n exp(0)).

    It is a mean if a fast exponential takes only some of the scores.
    """
    zeros = torch.zeros(1, 1, scores, 16, dtype=torch.bfloat16)
    _, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(zeros, zeros, zeros)
    return math.exp(lse[0, 0, 0].item()) / scores


def forced(name: str, implementation: Implementation, declaration: Declaration | None) -> Kernel:
    """Return the kernel that an implementation is."""
    takes, lacking = implementation.takes, implementation.missing_requirement
    return Kernel(name, implementation, declaration, takes=takes, missing_requirement=lacking)


def cpu_sdpa_flash() -> Kernel:
    """Return PyTorch's CPU flash kernel: `fused` but for the exponential, which its build for the CPU decides."""
    plan = FUSED
    for lanes in (1, 2, 4, 8, 16, 32, 64):  # the keys that it takes at a time: with fewer, all have the exact one
        measured = measure_exp_at_zero(lanes)
        if abs(measured - FEXP_U20.at_zero) < abs(measured - 1.0):
            plan = replace(FUSED_FAST_EXP, exponential=replace(FEXP_U20, lanes=lanes))
            break
    # Without the fast exponential its plan has the name of one in other tiles.
    tiled, rule = plan is FUSED, SHIFT_RULES["safe"]
    declared = Declaration(FLASH_ATTENTION, plan, rule, _CPU_FLASH_BLOCK, tile_named=tiled)
    return forced("sdpa_flash", CPU_FLASH, declared)


def sdpa_math() -> Kernel:
    """Return PyTorch's composed implementation, which upcasts narrow inputs to fp32 and casts O only."""
    return Kernel("sdpa_math", MATH, Declaration(FLASH_ATTENTION, FP32_INSIDE, SHIFT_RULES["safe"]), takes=MATH.takes)


def registered_sdpa_kernels(device: str) -> tuple[Kernel, ...]:
    """Return PyTorch's implementations that have code for a device, which declare nothing, and the composed one.

    The composed one declares nothing either where a device replaces it with its own code, as MPS does.
    """
    key, has = torch._C._dispatch_key_for_device(device), torch._C._dispatch_has_kernel_for_dispatch_key
    implementations = {name: each for name, (each, _) in ON_GPUS.items()} | {"sdpa_overrideable": OVERRIDEABLE}
    kernels = [forced(name, each, None) for name, each in implementations.items() if has(str(each.operator), key)]
    places = (f"{_COMPOSED_OPERATOR}_for_mps", "aten::scaled_dot_product_attention")
    replaced = any(has(place, at) for place in places for at in (key, f"Autograd{key}"))
    return (*kernels, replace(sdpa_math(), declaration=None) if replaced else sdpa_math())
