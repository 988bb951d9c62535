"""The backward passes that people ship: what each rounds, whatever the forward pass before it does."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tiebreak.kernels.flash import ONE_TILE, Block
from tiebreak.kernels.formats import BF16, FP32
from tiebreak.kernels.kernel import Declaration
from tiebreak.kernels.plans import BACKWARD_POINTS, OUTPUT, Cast, DeltaSource, Follows

_FP32, _LOW = Cast(FP32), Cast(BF16, follows=Follows.OPERANDS)
_FROM_P = DeltaSource.PROBABILITIES
_POINTS = tuple(name for name in BACKWARD_POINTS if name != "gradients")
_UNROUNDED: Mapping[str, Any] = {**dict.fromkeys(_POINTS, _FP32), "shift_attached": False}


@dataclass(frozen=True)
class BackwardPass:
    """A way to compute gradients from the S, the log-sum-exp and the O of some forward pass."""

    points: Mapping[str, Any]  # fields of a rounding plan of the backward pass that are not fp32 throughout
    block: Block = ONE_TILE  # tiles after which sums are cast; where they are not, tiles change next to nothing

    @property
    def source(self) -> DeltaSource:
        """The numbers that delta is computed from."""
        return DeltaSource(self.points.get("delta_from", DeltaSource.OUTPUT))

    def shows(self, source: DeltaSource) -> bool:
        """Return whether dQ and dK show a delta from this source."""
        return self.source is source and not self.points.get("shift_attached")

    def after(self, forward: Declaration) -> Declaration:
        """Return the plan of a forward pass, with this backward pass."""
        return _with_backward(forward, {**self.points, "gradients": OUTPUT}, self._block(forward))

    def _block(self, forward: Declaration) -> Block:
        """Return the tiles that matter: the forward pass's, where delta comes from an O-bar that is cast after each."""
        tiled = self.source is DeltaSource.UNNORMALISED and forward.plan.o_bar.narrows
        return forward.block if tiled else self.block

    def exact_after(self, forward: Declaration) -> Declaration:
        """Return the plan without roundings but those of the O or O-bar that delta comes from: the baseline of errors.

        Without it the error of delta, part of which autograd sends through the maximum, would hide a cast of dS.
        """
        kept = {name: self.points[name] for name in ("delta_from", "shift_attached") if name in self.points}
        return _with_backward(forward, {**kept, "gradients": _FP32}, self._block(forward))


def _with_backward(forward: Declaration, points: Mapping[str, Any], block: Block) -> Declaration:
    plan = replace(forward.plan, **{"delta_from": DeltaSource.OUTPUT, **_UNROUNDED, **points})
    return replace(forward, plan=plan, block=block)


_FLASH_2: Mapping[str, Any] = {"p": _LOW, "ds": _LOW}
_EAGER: Mapping[str, Any] = {"delta_from": _FROM_P, "p": _LOW, "dp": _LOW, "ds": _LOW, "sums": OUTPUT}
_UPCAST: Mapping[str, Any] = {"delta_from": _FROM_P}
_UNNORMALISED: Mapping[str, Any] = {"delta_from": DeltaSource.UNNORMALISED, "p": _LOW, "dp": _LOW}
_BY_HEAD = "heads of a group added in 16 bits"
_PYTORCH = "PyTorch's for CPUs (P and dS in 16 bits, sums in 16 bits after every 32 queries)"
_PYTORCH_TILES = Block(queries=32, keys=512)

_UNNORMALISED_CAST: Mapping[str, Any] = {**_UNNORMALISED, "do_over_l": _LOW, "sums": OUTPUT}
_ATTACHED, _ATTACHED_CAST = ({**each, "shift_attached": True} for each in (_UNNORMALISED, _UNNORMALISED_CAST))
_TABLE: Mapping[str, Mapping[str, Any]] = {
    "FlashAttention-2's (P and dS in 16 bits)": _FLASH_2,
    # aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, cpu_flash_attention_backward: of fewer than 192 queries.
    _PYTORCH: {**_FLASH_2, "sums": OUTPUT, "group_sums": OUTPUT},
    # triton-lang/triton, python/tutorials/06-fused-attention.py
    "the Triton tutorial's (P and dS in 16 bits, P of a K that is scaled and rounded)": {**_FLASH_2, "scaled_k": _LOW},
    "FlashAttention-2's with delta in fp32 (P and dS in 16 bits, delta not from O)": {**_FLASH_2, **_UPCAST},
    "flash attention's in fp32 (delta from O)": {},
    "autograd's in fp32": _UPCAST,
    # XLA leaves the cast of dP out in some shapes, also where it is told to keep to casts.
    "autograd's of a P that is cast (P in 16 bits)": {**_UPCAST, "p": _LOW},
    "autograd's of a P that is cast (P and dP in 16 bits)": {**_UPCAST, "p": _LOW, "dp": _LOW},
    "autograd's of an unnormalised O (P and dP in 16 bits)": _UNNORMALISED,
    "autograd's of an unnormalised O, through the maximum (P and dP in 16 bits)": _ATTACHED,
    "autograd's of an unnormalised O that is cast (dO / l, P and dP in 16 bits)": _UNNORMALISED_CAST,
    "autograd's of an unnormalised O that is cast, through the maximum (dO / l, P and dP in 16 bits)": _ATTACHED_CAST,
    "autograd's of eager attention (P, dP and dS in 16 bits)": {**_EAGER, "scaled_ds": _LOW},
    "autograd's of eager attention that scales q (P, dP and dS in 16 bits)": {**_EAGER, "scaled_q": _LOW},
    # flax.linen.dot_product_attention, whose softmax is in the format of its inputs
    "autograd's with every tensor in 16 bits": {
        **_EAGER,
        **dict.fromkeys(("delta", "do_over_l", "p_of_ds", "scaled_ds"), _LOW),
    },
    "autograd's of a softmax in 16 bits (P, dP and dS in 16 bits)": {**_EAGER, "p_of_ds": _LOW, "scaled_ds": _LOW},
}
_KNOWN = {
    name: BackwardPass(points, _PYTORCH_TILES if name == _PYTORCH else ONE_TILE) for name, points in _TABLE.items()
}


def _with_groups(passes: Mapping[str, BackwardPass]) -> dict[str, BackwardPass]:
    """Return backward passes, each followed by that which adds the heads of a group up in the format of its gradients.

    So does autograd where K and V are repeated in their own format (transformers, models/llama/modeling_llama.py,
    repeat_kv; Keras), and FlashAttention-2 (csrc/flash_attn/flash_api.cpp, mha_bwd: dk_expanded and dv_expanded).
    """
    every = {}
    for name, each in passes.items():
        every[name] = each
        if "sums" not in each.points or "group_sums" in each.points:
            by_head = {**each.points, "sums": OUTPUT, "group_sums": _FP32}
            grouped = f"{name[:-1]}, {_BY_HEAD})" if name.endswith(")") else f"{name} ({_BY_HEAD})"
            every[grouped] = BackwardPass(by_head, each.block)
    return every


#: By their name in reports.
BACKWARD_PASSES: Mapping[str, BackwardPass] = _with_groups(_KNOWN)


def passes_after(forward: Declaration, groups: int) -> dict[str, BackwardPass]:
    """Return the backward passes that may follow a forward pass, by name: its plan's, if any, and known ones."""
    plan, passes = forward.plan, _KNOWN
    narrow = {name: getattr(plan, name) for name in _POINTS if getattr(plan, name).narrows}
    source = {} if plan.delta_from is DeltaSource.OUTPUT else {"delta_from": plan.delta_from}
    if narrow and not any(each.points == {**source, **narrow} for each in BACKWARD_PASSES.values()):
        passes = {f"that of {forward.label}": BackwardPass({**source, **narrow}, forward.block), **_KNOWN}
    return _with_groups(passes) if groups > 1 else dict(passes)
