"""Attention inside a model: any declared kernel on any arithmetic, as one differentiable function."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tiebreak.kernels.algorithms import FLASH_ATTENTION
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.counter import random_bits
from tiebreak.kernels.external.kernels import UserKernel
from tiebreak.kernels.flash import Wanted
from tiebreak.kernels.formats import BF16, Formats
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput, Gradients
from tiebreak.kernels.kernel import CannotRunError, Declaration, Kernel, run_backward, run_forward
from tiebreak.kernels.plans import FP32_PLAN, FUSED, Cast
from tiebreak.kernels.sdpa import Implementation
from tiebreak.kernels.shift_rules import SHIFT_RULES

_LAYER_STREAM = 3
_BF16 = Cast(BF16)
FP32_ATTENTION = Declaration(FLASH_ATTENTION, FP32_PLAN, SHIFT_RULES["safe"])
_UNTOLD = Declaration(FLASH_ATTENTION, FUSED, SHIFT_RULES["safe"])


@dataclass(frozen=True)
class HeadKernel:
    """The kernel of one head."""

    implementation: Declaration | Kernel  # a declaration, or a device's or a user's kernel
    inputs: Cast = _BF16  # what q, k and v are rounded to first; what follows the call's format in a plan is in it too

    @property
    def declaration(self) -> Declaration:
        """The kernel's declaration; if there is none, monitors assume that of production kernels."""
        if isinstance(self.implementation, Declaration):
            return self.implementation
        return self.implementation.declaration or _UNTOLD

    @property
    def own_backward(self) -> bool:
        """True if gradients are those of the kernel's own backward pass."""
        return isinstance(self.implementation, Kernel) and self.implementation.has_backward


Heads = tuple[HeadKernel, ...]  # of every head of a layer
#: The layers' heads; a layer without heads is skipped, since it writes nothing.
Kernels = tuple[Heads, ...]


@dataclass(frozen=True)
class Observation:
    """The tensors of one call of attention, forward and backward, that monitors use."""

    layer: int  # of the model, from 0
    heads: tuple[int, ...]  # the heads that this call computed: those of the layer that share a kernel
    kernel: HeadKernel  # theirs
    arithmetic: Arithmetic  # it ran on this
    inputs: AttentionInputs  # q, k, v as rounded, dO: each (batch, heads, tokens, d)
    output: AttentionOutput  # O, log-sum-exp and gradients
    x: Tensor  # the layer's normalised input, which the weights multiply, (batch, tokens, width)


Observer = Callable[[Observation], None]


@dataclass(frozen=True)
class LayerCall:
    """The place of one call of a layer's attention in a run, and its observers."""

    arithmetic: Arithmetic  # the device's operations
    layer: int  # from 0
    noise_seed: int  # of the layer at this step: see `noise_seed`
    observers: Sequence[Observer]  # called in the backward pass; without any nothing is kept for them
    x: Tensor  # the layer's normalised input, (batch, tokens, width), for the observers


def noise_seed(seed: int, step: int, layer: int) -> int:
    """Return the seed of a layer's dither and stochastic casts at one step."""
    return int(random_bits(seed, _LAYER_STREAM, step, layer))


def attend(q: Tensor, k: Tensor, v: Tensor, kernels: Heads, call: LayerCall) -> Tensor:
    """Compute causal attention, every head with its kernel, of unrounded q, k and v: (batch, heads, tokens, d), fp32.

    O is differentiable. The gradient passes the rounding of q, k and v unchanged. With more keys than queries, the
    queries are the last tokens. In a model in fp64 it is PyTorch's attention in fp64, whatever the kernels.
    """
    if q.dtype == torch.float64:
        return scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
    if kernels.count(kernels[0]) == len(kernels):  # hashing them takes longer than comparing what is mostly one object
        return _apply(q, k, v, kernels[0], tuple(range(len(kernels))), call)
    out = torch.zeros_like(q)
    for kernel in dict.fromkeys(kernels):
        heads = tuple(index for index, other in enumerate(kernels) if other == kernel)
        at = torch.tensor(heads, device=q.device)
        q_part, k_part, v_part = (tensor.index_select(1, at) for tensor in (q, k, v))
        out = out.index_copy(1, at, _apply(q_part, k_part, v_part, kernel, heads, call))
    return out


def _apply(q: Tensor, k: Tensor, v: Tensor, kernel: HeadKernel, heads: tuple[int, ...], call: LayerCall) -> Tensor:
    # Under autocast too, and where a model's products are masked, the plan alone says what is rounded.
    with torch.autocast(q.device.type, enabled=False), torch._C.DisableTorchFunction():
        out: Tensor = _HeadAttention.apply(q.float(), k.float(), v.float(), kernel, heads, call)  # type: ignore[no-untyped-call]
    return out


class _HeadAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: HeadKernel, heads: tuple[int, ...], call: LayerCall
    ) -> Tensor:
        q, k, v = (call.arithmetic.cast(tensor, kernel.inputs) for tensor in (q, k, v))
        # The kernel numbers its heads from 0: without the first head, two groups of heads would share their noise.
        noise = int(random_bits(call.noise_seed, heads[0]))
        # dO is not known yet; the forward pass does not look at it.
        inputs, ctx.started = _inputs(q, k, v, q, noise, kernel), None
        if isinstance(kernel.implementation, Kernel) and (reason := kernel.implementation.refusal(inputs)):
            raise CannotRunError(reason)
        if isinstance(kernel.implementation, UserKernel) and kernel.own_backward:
            # As frameworks call it: other layers' forward passes lie between this one and its backward pass.
            ctx.started = kernel.implementation.caller.started(inputs, gradients=True)
            output = AttentionOutput(ctx.started.o)
        elif isinstance(kernel.implementation, Kernel):
            run = kernel.implementation.compute
            if kernel.own_backward and isinstance(run, Implementation):
                ctx.started = run.started(inputs)
                output = AttentionOutput(ctx.started.o.detach().float())
            else:
                output = run(inputs, call.arithmetic, False)
                output = AttentionOutput(output.o.float(), output.lse)
        else:
            output = run_forward(kernel.implementation, inputs, call.arithmetic)
        ctx.save_for_backward(q, k, v, output.o, output.lse)
        ctx.kernel, ctx.heads, ctx.call, ctx.noise, ctx.tiles = kernel, heads, call, noise, output.tiles
        return output.o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        kernel, call = ctx.kernel, ctx.call
        if kernel.own_backward:
            do = call.arithmetic.cast(do, kernel.inputs)  # as it takes it; the suite's backward pass works in fp32
        inputs = _inputs(q, k, v, do, ctx.noise, kernel)
        if lse is None and (call.observers or not kernel.own_backward):
            lse = run_forward(FP32_ATTENTION, inputs, call.arithmetic).lse
        wanted = ctx.needs_input_grad[:3]
        output = AttentionOutput(o, lse, tiles=ctx.tiles)
        if ctx.started is None:
            computed = _backward(kernel.implementation, inputs, output, call.arithmetic, wanted)
        else:
            computed = _own_gradients(kernel.implementation, ctx.started.finished(do))
        if call.observers:
            output = AttentionOutput(o, lse, computed)
            observation = Observation(call.layer, ctx.heads, kernel, call.arithmetic, inputs, output, call.x)
            for observer in call.observers:
                observer(observation)
        gradients = zip((computed.dq, computed.dk, computed.dv), wanted, strict=True)
        return (*(gradient if needed else None for gradient, needed in gradients), None, None, None)


def _backward(
    implementation: Declaration | Kernel,
    inputs: AttentionInputs,
    output: AttentionOutput,
    arithmetic: Arithmetic,
    wanted: Wanted,
) -> Gradients:
    """Return gradients by the kernel's own backward pass; without one, by fp32 flash attention's, from its O."""
    if isinstance(implementation, Declaration) or not implementation.has_backward:
        declaration = implementation if isinstance(implementation, Declaration) else FP32_ATTENTION
        return run_backward(declaration, inputs, output, arithmetic, wanted)
    with torch.enable_grad():  # which autograd turns off in here, and a kernel may rest on
        return _own_gradients(implementation, implementation.compute(inputs, arithmetic, True))


def _own_gradients(implementation: Kernel, computed: AttentionOutput) -> Gradients:
    """Return the gradients of the kernel's own backward pass; raise if it failed or there is none."""
    if computed.backward_error is not None:
        raise RuntimeError(f"the backward pass of {implementation.name} {computed.backward_error}")
    gradients = computed.gradients
    if gradients is None:
        raise CannotRunError(
            f"{implementation.name} has no backward pass that autograd knows; declare backward, or train it with"
            " --backward emulated"
        )
    return Gradients(gradients.dq.float(), gradients.dk.float(), gradients.dv.float(), gradients.delta)


def _inputs(q: Tensor, k: Tensor, v: Tensor, do: Tensor, noise_seed: int, kernel: HeadKernel) -> AttentionInputs:
    causal = q.shape[2] > 1  # the last token sees all
    return AttentionInputs(q, k, v, do, Formats.of(kernel.inputs.fmt), causal=causal, noise_seed=noise_seed)
