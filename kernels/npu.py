"""The vendor's attention on an Ascend NPU: torch-npu's operators, each called in one way.

What an operator rounds where is not documented: no kernel here declares a plan, and the matrix finds which known one it
follows. The meaning of `inner_precise` has changed between releases of CANN, so its value is part of a kernel's
name, the versions are in the backend's fingerprint, and nothing is concluded from either. Importing this imports no
torch_npu.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.features import CAUSAL, COMMON, LENGTHS, MASKS, SINK, WINDOW
from tiebreak.kernels.formats import FP32
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionInputs, AttentionOutput, Gradients
from tiebreak.kernels.kernel import Kernel

# "S" and "N" of the operators' documents are our N and heads; H is heads x d.
LAYOUTS = ("BNSD", "BSND", "SBH")
INNER_PRECISE = (0, 1, 2)
_COMPRESSED = 2048  # side of the triangle that represents any causal mask
_NO_LIMIT = 2**31 - 1  # of the tokens before and after that a query sees
# Sparse modes: the mask as it is; causal, and a window, both from the lower right corner.
_FULL_MASK, _CAUSAL, _BAND = 1, 3, 4
_TOKENS = ("pre_tokens", "next_tokens")
_TOCKENS = ("pre_tockens", "next_tockens")  # so spelt by the training operators
_PACKED = "TND"  # the layout of packed sequences
_SINKS = ("sink", "learnable_sink")  # what operators call it; whether one has it, its schema tells
_TAKES = COMMON | MASKS | {SINK}
_TRAINING = ("npu_fusion_attention", "npu_fusion_attention_grad")
# The outputs of the first, by the second's names: O in the layout; a row's maximum and sum of exp(S - maximum), fp32,
# (batch, heads, N, 8), one number eight times; what is not used; and a dropout's state, which is off.
_RETURNED = ("attention_in", "softmax_max", "softmax_sum", "softmax_in", "seed", "offset", "numels")
_NEWER = "install a newer {} (docs/devices.md)"

Operator = Callable[..., Any]
Operators = Callable[[str], Operator | None]  # the operator of a name; None where this release has none


def torch_npu_operators(name: str) -> Operator | None:
    """Return torch-npu's operator of a name; None before torch_npu is imported, or where its release lacks it."""
    operator: Operator | None = getattr(torch.ops.npu, name, None)
    return operator


def pack(x: Tensor, layout: str) -> Tensor:
    """Return (batch, heads, N, d) in the order that a layout names, contiguous: the operators take no other.

    The layout's letters are B, N (heads), S (our N) and D, or H for heads and d together, in the order of the
    dimensions; or T for a batch of 1 and S together.
    """
    order = layout.replace("H", "ND").replace("T", "S")
    x = x[0] if "T" in layout else x
    moved = x.permute(["BNSD"[4 - x.dim() :].index(letter) for letter in order])
    return (moved.flatten(-2) if "H" in layout else moved).contiguous()


def unpack(x: Tensor, layout: str, heads: int) -> Tensor:
    """Return (batch, heads, N, d) from what `pack` made."""
    if "T" in layout:
        return x.transpose(0, 1)[None]
    order = layout.replace("H", "ND")
    split = x.reshape(*x.shape[:-1], heads, -1) if "H" in layout else x
    return split.permute([order.index(letter) for letter in "BNSD"])


def masking(inputs: AttentionInputs, tokens: tuple[str, str] = _TOCKENS) -> dict[str, Any]:
    """Return the arguments that say which scores are masked out, for every operator here; none where no score is.

    They are `atten_mask`, a bool that is True where a score is masked out, `sparse_mode` and, for a window, its sides:
    the `tokens` before and after its own that a query sees.
    """
    masks = inputs.masks().keys() - ({LENGTHS} if packs(inputs) else set())
    if masks == {CAUSAL}:
        return causal_mask(inputs.q.device)
    if masks and masks <= {CAUSAL, WINDOW}:
        sides = inputs.window[0], 0 if inputs.causal else inputs.window[1]
        limits = (_NO_LIMIT if side is None else side for side in sides)
        return {**causal_mask(inputs.q.device), "sparse_mode": _BAND, **dict(zip(tokens, limits, strict=True))}
    hidden = inputs.hidden() if masks else None
    if hidden is None:
        return {}
    shape = (inputs.q.shape[0], hidden.shape[1], inputs.q.shape[2], inputs.k.shape[2])
    return {"atten_mask": hidden.to(inputs.q.device).expand(shape).contiguous(), "sparse_mode": _FULL_MASK}


def packs(inputs: AttentionInputs) -> bool:
    """Return whether a call passes packed sequences to the training operator; with other masks it passes a mask."""
    return inputs.lengths is not None and inputs.masks().keys() <= {CAUSAL, WINDOW, LENGTHS}


@cache
def causal_mask(device: torch.device) -> dict[str, Any]:
    """Return the arguments of a causal mask, query i seeing keys up to i + keys - queries, whatever the lengths."""
    triangle = torch.ones(_COMPRESSED, _COMPRESSED, dtype=torch.bool).triu(1).to(device)
    return {"atten_mask": triangle, "sparse_mode": _CAUSAL}


@dataclass(frozen=True)
class FusionAttention:
    """torch_npu.npu_fusion_attention and npu_fusion_attention_grad."""

    layout: str  # one of LAYOUTS
    inner_precise: int  # one of INNER_PRECISE
    operators: Operators = torch_npu_operators  # where they come from

    def forward(self, inputs: AttentionInputs) -> dict[str, Any]:
        """Return the forward operator's outputs on the NPU, by the backward operator's names."""
        layout, options = self._layout_and_arguments(inputs)
        tensors, heads = _packed(inputs, layout, inputs.q, inputs.k, inputs.v), inputs.q.shape[1]
        returned = _operator(self.operators, _TRAINING[0])(*tensors, heads, layout, scale=inputs.scale, **options)
        return dict(zip(_RETURNED, returned, strict=True))

    def _layout_and_arguments(self, inputs: AttentionInputs) -> tuple[str, dict[str, Any]]:
        """Return the layout, its own except for packed sequences, which have one; and both operators' arguments."""
        options = masking(inputs) | {"inner_precise": self.inner_precise}
        options |= _sink(self.operators, _TRAINING[0], inputs)
        if inputs.lengths is None or not packs(inputs):
            return self.layout, options
        ends = (list(begins[1:]) for begins in inputs.lengths)
        return _PACKED, options | dict(zip(("actual_seq_qlen", "actual_seq_kvlen"), ends, strict=True))

    def _backward(self, inputs: AttentionInputs, forward: dict[str, Any]) -> Gradients:
        layout, options = self._layout_and_arguments(inputs)
        tensors = _packed(inputs, layout, inputs.q, inputs.k, inputs.v, inputs.do)
        heads, key_heads = inputs.q.shape[1], inputs.k.shape[1]
        # Newer releases return gradients of arguments that are not used here, too; that of a sink is the last.
        dq, dk, dv, *others = _operator(self.operators, _TRAINING[1])(
            *tensors, heads, layout, scale_value=inputs.scale, **forward, **options
        )
        dq, dk, dv = (unpack(x, layout, n) for x, n in ((dq, heads), (dk, key_heads), (dv, key_heads)))
        return Gradients(dq, dk, dv, dsink=None if inputs.sink is None else others[-1])

    def __call__(self, inputs: AttentionInputs, arithmetic: Arithmetic, gradients: bool) -> AttentionOutput:
        """Compute attention: `Compute` of a kernel."""
        del arithmetic
        forward, (layout, _), heads = self.forward(inputs), self._layout_and_arguments(inputs), inputs.q.shape[1]
        # The kernel's own statistics, so that log-sum-exp is checked with them. Whether a sink is in them nobody says.
        lse = None
        if inputs.sink is None:
            lse = (forward["softmax_max"] + torch.log(forward["softmax_sum"]))[..., :1]
            lse = unpack(lse, layout, heads) if layout == _PACKED else lse
        o = unpack(forward["attention_in"], layout, heads)
        return AttentionOutput(o, lse, self._backward(inputs, forward) if gradients else None)


@dataclass(frozen=True)
class _Inference:
    name: str
    scale: str  # what it calls the scale
    operators: Operators
    own: Mapping[str, Any] = field(default_factory=dict)  # what it alone takes

    def __call__(self, inputs: AttentionInputs, arithmetic: Arithmetic, gradients: bool) -> AttentionOutput:
        del arithmetic, gradients
        returned = _operator(self.operators, self.name)(
            *_packed(inputs, "BNSD", inputs.q, inputs.k, inputs.v),
            num_heads=inputs.q.shape[1],
            num_key_value_heads=inputs.k.shape[1],
            input_layout="BNSD",
            # One's default of 0 tokens after a query's own hides every later key, mask or not.
            **dict.fromkeys(_TOKENS, _NO_LIMIT) | {**self.own, self.scale: inputs.scale} | masking(inputs, _TOKENS),
            **_sink(self.operators, self.name, inputs),
        )
        return AttentionOutput(*returned) if isinstance(returned, tuple) else AttentionOutput(returned)


def _sink(operators: Operators, name: str, inputs: AttentionInputs) -> dict[str, Tensor]:
    """Return the argument of a learned sink, in fp32, where a call has one."""
    keyword = None if inputs.sink is None else _keyword(operators, name)
    return {} if inputs.sink is None or keyword is None else {keyword: inputs.sink.float()}


def _keyword(operators: Operators, name: str) -> str | None:
    """Return an operator's keyword for a sink, by its schema; None where it has none."""
    schema = _operator(operators, name).default._schema  # type: ignore[attr-defined]
    names = {argument.name for argument in schema.arguments}
    return next((word for word in _SINKS if word in names), None)


def _packed(inputs: AttentionInputs, layout: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(pack(tensor.to(TORCH_DTYPES[inputs.formats.inputs]), layout) for tensor in tensors)


def _operator(operators: Operators, name: str) -> Operator:
    operator = operators(name)
    if operator is None:
        raise NotImplementedError(f"this torch-npu has no {name}: {_NEWER.format('release')}")
    return operator


def _requirement(operators: Operators, names: tuple[str, ...], inputs: AttentionInputs) -> str | None:
    missing = [name for name in names if operators(name) is None]
    if missing:
        return f"this torch-npu has no {', '.join(missing)}: {_NEWER.format('release')}"
    if names != _TRAINING and inputs.formats.inputs == FP32:
        return f"{names[0]} takes no fp32"
    if inputs.sink is not None and _keyword(operators, names[0]) is None:
        return f"{names[0]} knows no {SINK.words} here: {_NEWER.format('torch-npu')}"
    return None


def _training(layout: str, inner_precise: int, operators: Operators) -> Kernel:
    name, runs = f"npu_fusion_{layout.lower()}_p{inner_precise}", FusionAttention(layout, inner_precise, operators)
    return Kernel(name, runs, None, takes=_TAKES, missing_requirement=partial(_requirement, operators, _TRAINING))


def npu_kernels(operators: Operators = torch_npu_operators) -> tuple[Kernel, ...]:
    """Return the vendor's kernels of a default run.

    They are npu_fusion_attention in every layout, and in the first at every `inner_precise`; and the inference
    operators, forward only. `every_fusion_attention` has the other pairs of layout and `inner_precise`.
    """
    training = [_training(layout, INNER_PRECISE[0], operators) for layout in LAYOUTS]
    training += [_training(LAYOUTS[0], precise, operators) for precise in INNER_PRECISE[1:]]
    inference = {"npu_prompt_flash": _Inference("npu_prompt_flash_attention", "scale_value", operators)}
    for precise in INNER_PRECISE[:2]:  # 2 and 3 differ from them in rows without a visible key only
        arguments = {"inner_precise": precise, "softmax_lse_flag": True}
        scored = _Inference("npu_fused_infer_attention_score", "scale", operators, arguments)
        inference[f"npu_fused_infer_p{precise}"] = scored
    forward_only = (
        Kernel(
            name,
            operator,
            None,
            has_backward=False,
            takes=_TAKES - {LENGTHS},
            missing_requirement=partial(_requirement, operators, (operator.name,)),
        )
        for name, operator in inference.items()
    )
    return (*training, *forward_only)


def every_fusion_attention(operators: Operators = torch_npu_operators) -> tuple[Kernel, ...]:
    """Return npu_fusion_attention in every layout at every `inner_precise`."""
    return tuple(_training(layout, precise, operators) for layout in LAYOUTS for precise in INNER_PRECISE)
