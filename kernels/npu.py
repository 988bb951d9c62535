"""The vendor's attention on an Ascend NPU: torch-npu's operators, each called in one way.

What an operator rounds where is not documented: no kernel here declares a plan, and the matrix finds which known one it
follows. The meaning of `inner_precise` has changed between releases of CANN, so its value is part of a kernel's
name, the versions are in the backend's fingerprint, and nothing is concluded from either. Importing this imports no
torch_npu.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.features import COMMON
from tiebreak.kernels.formats import FP32
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionInputs, AttentionOutput, Gradients
from tiebreak.kernels.kernel import Kernel

# "S" and "N" of the operators' documents are our N and heads; H is heads x d.
LAYOUTS = ("BNSD", "BSND", "SBH")
INNER_PRECISE = (0, 1, 2)
_COMPRESSED = 2048  # side of the triangle that stands for any causal mask
_NO_LIMIT = 2**31 - 1  # of the tokens before and after that a query sees
_FULL_MASK, _CAUSAL = 1, 3  # sparse modes: the mask as it is; causal, from the lower right corner

Operator = Callable[..., Any]


class Operators(Protocol):
    """Where the operators come from."""

    def __call__(self, name: str) -> Operator | None:
        """The operator called `name`, None where this release has none."""
        ...


def torch_npu_operators(name: str) -> Operator | None:
    """torch-npu's operator called `name`, None before it is imported or where its release has none."""
    operator: Operator | None = getattr(torch.ops.npu, name, None)
    return operator


def pack(x: Tensor, layout: str) -> Tensor:
    """A tensor in the order that a layout names.

    Args:
        x: (batch, heads, N, d).
        layout: letters B, N (heads), S (our N) and D, or H for heads and d together, in the order of the dimensions.

    Returns:
        Contiguous tensor of the same values: the operators take no other.
    """
    order = layout.replace("H", "ND")
    moved = x.permute(["BNSD".index(letter) for letter in order])
    return (moved.flatten(-2) if "H" in layout else moved).contiguous()


def unpack(x: Tensor, layout: str, heads: int) -> Tensor:
    """(batch, heads, N, d) of what `pack` made."""
    order = layout.replace("H", "ND")
    split = x.reshape(*x.shape[:-1], heads, -1) if "H" in layout else x
    return split.permute([order.index(letter) for letter in "BNSD"])


def masking(inputs: AttentionInputs) -> dict[str, Any]:
    """The arguments that say which scores are masked out, of every operator here.

    Args:
        inputs: on the NPU.

    Returns:
        `atten_mask`, bool, True where a score is masked out, and `sparse_mode`; nothing where no score is.
    """
    if inputs.causal and inputs.key_padding is None:
        return causal_mask(inputs.q.device)
    hidden = inputs.hidden()
    if hidden is None:
        return {}
    shape = (inputs.q.shape[0], 1, inputs.q.shape[2], inputs.k.shape[2])
    return {"atten_mask": hidden.to(inputs.q.device).expand(shape).contiguous(), "sparse_mode": _FULL_MASK}


def causal_mask(device: torch.device) -> dict[str, Any]:
    """The arguments of a causal mask, query i seeing keys up to i + keys - queries, whatever the lengths."""
    return {"atten_mask": _triangle(device), "sparse_mode": _CAUSAL}


@cache
def _triangle(device: torch.device) -> Tensor:
    """The mask that `_CAUSAL` asks for, whatever the lengths."""
    return torch.ones(_COMPRESSED, _COMPRESSED, dtype=torch.bool).triu(1).to(device)


@dataclass(frozen=True)
class Forward:
    """What npu_fusion_attention returns, in its order, as the operator laid it out."""

    o: Tensor  # O in the layout
    softmax_max: Tensor  # row maximum of the scores, fp32, (batch, heads, N, 8): one number eight times
    softmax_sum: Tensor  # row sum of exp(S - maximum), likewise
    softmax_in: Tensor  # not used by the operator
    seed: int  # of a dropout, which is off
    offset: int  # likewise
    numels: int  # likewise


@dataclass(frozen=True)
class FusionAttention:
    """torch_npu.npu_fusion_attention and npu_fusion_attention_grad."""

    layout: str  # one of LAYOUTS
    inner_precise: int  # one of INNER_PRECISE
    operators: Operators = torch_npu_operators  # where they come from

    def forward(self, inputs: AttentionInputs) -> Forward:
        """Run the forward operator.

        Args:
            inputs: q, k, v and masks on the NPU.

        Returns:
            All that it returns.
        """
        q, k, v = _packed(inputs, self.layout, inputs.q, inputs.k, inputs.v)
        common = masking(inputs) | {"scale": inputs.scale, "inner_precise": self.inner_precise}
        heads = inputs.q.shape[1]
        return Forward(*_operator(self.operators, "npu_fusion_attention")(q, k, v, heads, self.layout, **common))

    def backward(self, inputs: AttentionInputs, forward: Forward) -> Gradients:
        """Run the backward operator.

        Args:
            inputs: q, k, v, dO and masks on the NPU.
            forward: what the forward operator returned.

        Returns:
            dQ, dK and dV in the inputs' shapes.
        """
        q, k, v, do = _packed(inputs, self.layout, inputs.q, inputs.k, inputs.v, inputs.do)
        heads, key_heads = inputs.q.shape[1], inputs.k.shape[1]
        # Newer releases return gradients of arguments that are not used here, too.
        dq, dk, dv, *_ = _operator(self.operators, "npu_fusion_attention_grad")(
            q,
            k,
            v,
            do,
            heads,
            self.layout,
            softmax_max=forward.softmax_max,
            softmax_sum=forward.softmax_sum,
            softmax_in=forward.softmax_in,
            attention_in=forward.o,
            scale_value=inputs.scale,
            inner_precise=self.inner_precise,
            seed=forward.seed,
            offset=forward.offset,
            numels=forward.numels,
            **masking(inputs),
        )
        unpacked = (unpack(x, self.layout, n) for x, n in ((dq, heads), (dk, key_heads), (dv, key_heads)))
        return Gradients(*unpacked)

    def __call__(self, inputs: AttentionInputs, arithmetic: Arithmetic, gradients: bool) -> AttentionOutput:
        """As `tiebreak.kernels.kernel.Compute`."""
        del arithmetic
        forward = self.forward(inputs)
        # The kernel's own statistics, so that log-sum-exp is checked with them.
        lse = (forward.softmax_max + torch.log(forward.softmax_sum))[..., :1]
        o = unpack(forward.o, self.layout, inputs.q.shape[1])
        return AttentionOutput(o, lse, self.backward(inputs, forward) if gradients else None)


def _infer(
    operators: Operators,
    name: str,
    own: Mapping[str, Any],
    scale: str,
    inputs: AttentionInputs,
    arithmetic: Arithmetic,
    gradients: bool,
) -> AttentionOutput:
    """An inference operator, with what it alone takes, and its scale by the name that it has there."""
    del arithmetic, gradients
    returned = _operator(operators, name)(
        *_packed(inputs, "BNSD", inputs.q, inputs.k, inputs.v),
        num_heads=inputs.q.shape[1],
        num_key_value_heads=inputs.k.shape[1],
        input_layout="BNSD",
        pre_tokens=_NO_LIMIT,
        next_tokens=_NO_LIMIT,  # one's default of 0 hides every later key, mask or not
        **{**own, scale: inputs.scale, **masking(inputs)},
    )
    return AttentionOutput(*returned) if isinstance(returned, tuple) else AttentionOutput(returned)


def _packed(inputs: AttentionInputs, layout: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(pack(tensor.to(TORCH_DTYPES[inputs.formats.inputs]), layout) for tensor in tensors)


def _operator(operators: Operators, name: str) -> Operator:
    operator = operators(name)
    if operator is None:
        raise NotImplementedError(_absent(operators, (name,)))
    return operator


def _absent(operators: Operators, names: tuple[str, ...]) -> str | None:
    missing = [name for name in names if operators(name) is None]
    return f"this torch-npu has no {', '.join(missing)}: install a newer release (docs/ascend.md)" if missing else None


def _training_requirement(operators: Operators, inputs: AttentionInputs) -> str | None:
    del inputs
    return _absent(operators, ("npu_fusion_attention", "npu_fusion_attention_grad"))


def _inference_requirement(operators: Operators, name: str, inputs: AttentionInputs) -> str | None:
    return f"{name} takes no fp32" if inputs.formats.inputs == FP32 else _absent(operators, (name,))


def fusion_attention(layout: str, inner_precise: int, operators: Operators = torch_npu_operators) -> Kernel:
    """npu_fusion_attention in one layout at one `inner_precise`, with its backward operator."""
    compute = FusionAttention(layout, inner_precise, operators)
    name = f"npu_fusion_{layout.lower()}_p{inner_precise}"
    return Kernel(name, compute, None, takes=COMMON, missing_requirement=partial(_training_requirement, operators))


def _inference(
    name: str, operators: Operators, operator: str, scale: str, own: Mapping[str, Any] = MappingProxyType({})
) -> Kernel:
    return Kernel(
        name,
        partial(_infer, operators, operator, own, scale),
        None,
        has_backward=False,
        takes=COMMON,
        missing_requirement=partial(_inference_requirement, operators, operator),
    )


def npu_kernels(operators: Operators = torch_npu_operators) -> tuple[Kernel, ...]:
    """The vendor's kernels of a default run.

    Args:
        operators: where the operators come from.

    Returns:
        npu_fusion_attention in every layout, and in the first at every `inner_precise`; the two inference operators,
        forward only. The other pairs of layout and `inner_precise` are in `every_fusion_attention`.
    """
    training = [fusion_attention(layout, INNER_PRECISE[0], operators) for layout in LAYOUTS]
    training += [fusion_attention(LAYOUTS[0], precise, operators) for precise in INNER_PRECISE[1:]]
    inference = [_inference("npu_prompt_flash", operators, "npu_prompt_flash_attention", "scale_value")]
    for precise in INNER_PRECISE[:2]:  # 2 and 3 differ from them in rows without a visible key only
        own = {"inner_precise": precise, "softmax_lse_flag": True}
        name = f"npu_fused_infer_p{precise}"
        inference.append(_inference(name, operators, "npu_fused_infer_attention_score", "scale", own))
    return (*training, *inference)


def every_fusion_attention(operators: Operators = torch_npu_operators) -> tuple[Kernel, ...]:
    """npu_fusion_attention in every layout at every `inner_precise`."""
    return tuple(fusion_attention(layout, precise, operators) for layout in LAYOUTS for precise in INNER_PRECISE)
