"""Attention in a model is the suite's kernel, to the bit, and its gradients are those of attention."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tiebreak.backends.backend import EMULATION
from tiebreak.cases.gpt2.attention import FP32_ATTENTION, Call, HeadKernel, Heads, Observation, attend, noise_seed
from tiebreak.cases.gpt2.variants import variants
from tiebreak.kernels.counter import random_bits
from tiebreak.kernels.external import external_kernel
from tiebreak.kernels.formats import BF16, FP32, Formats
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import run_declared
from tiebreak.kernels.plans import FP32_PLAN, Cast
from tiebreak.kernels.sdpa import cpu_sdpa_flash

SHAPE = (2, 3, 12, 8)
VARIANTS = variants(rounded=True)
EXACT = HeadKernel(FP32_ATTENTION, Cast(FP32))
LOW = HeadKernel(VARIANTS["flash"].scripted)
FAIR = HeadKernel(VARIANTS["fair"].scripted)


def _tensors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    q, k, v, do = (torch.randn(SHAPE, generator=generator) for _ in range(4))
    return q, k, v, do


def _call(seed: int = 0, observer: list[Observation] | None = None) -> Call:
    x = torch.zeros(SHAPE[0], SHAPE[2], 4)
    return Call(EMULATION.arithmetic, 0, seed, () if observer is None else (observer.append,), x)


def _run(kernels: Heads, call: Call) -> tuple[Tensor, ...]:
    """O and the gradients of q, k and v."""
    q, k, v, do = _tensors()
    for leaf in (q, k, v):
        leaf.requires_grad_()
    out = attend(q, k, v, kernels, call)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), do))


@pytest.mark.parametrize("name", ["flash", "standard", "stabilized_fused", "fair"])
def test_it_is_the_declared_kernel_to_the_bit(name: str) -> None:
    declared = HeadKernel(VARIANTS[name].scripted).declaration
    q, k, v, do = _tensors()
    q, k, v = (tensor.bfloat16().float() for tensor in (q, k, v))
    seed = int(random_bits(5, 0))  # of the group that begins with head 0
    inputs = AttentionInputs(q, k, v, do, Formats.of(BF16), causal=True, noise_seed=seed)
    expected = run_declared(declared, inputs, EMULATION.arithmetic, True)
    assert expected.gradients is not None
    computed = _run((HeadKernel(declared),) * SHAPE[1], _call(seed=5))
    exact = (expected.o, expected.gradients.dq, expected.gradients.dk, expected.gradients.dv)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(computed, exact, strict=True))


def test_a_kernel_without_a_backward_pass_gets_that_of_fp32_attention_with_its_o() -> None:
    """As a user's own: here plain attention in fp64, O rounded once, which the emulation has as a plan."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
        hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
        scores = (q.double() @ k.double().transpose(-1, -2) * scale).masked_fill(hidden & causal, -torch.inf)
        return (torch.softmax(scores, -1) @ v.double()).to(q.dtype)

    module = ModuleType("mine")
    module.attention = attention  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "mine", module)
        kernel = external_kernel("mine:attention", flags=("backward=none",))
    rounded_once = replace(FP32_ATTENTION, plan=replace(FP32_PLAN, o=Cast(BF16)))
    expected = _run((HeadKernel(rounded_once),) * SHAPE[1], _call())
    for ours, theirs in zip(_run((HeadKernel(kernel),) * SHAPE[1], _call()), expected, strict=True):
        assert (ours - theirs).norm() < 1e-6 * theirs.norm()


def test_a_kernel_with_a_backward_pass_of_its_own_is_trained_with_by_it() -> None:
    """PyTorch's, whose gradients are those of its own autograd, dO rounded as it takes it."""
    q, k, v, do = (tensor.bfloat16() for tensor in _tensors())
    leaves = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
    hidden = torch.ones(SHAPE[2], SHAPE[2], dtype=torch.bool).triu(1)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        out = scaled_dot_product_attention(q, k, v, attn_mask=~hidden)
    expected = (out.detach(), *torch.autograd.grad(out, leaves, do))
    computed = _run((HeadKernel(cpu_sdpa_flash()),) * SHAPE[1], _call())
    assert all(torch.equal(ours, theirs.float()) for ours, theirs in zip(computed, expected, strict=True))


def test_every_head_has_its_own_kernel() -> None:
    mixed = _run((LOW, EXACT, LOW), _call())
    low, exact = _run((LOW,) * 3, _call()), _run((EXACT,) * 3, _call())
    assert not torch.equal(low[0], exact[0])
    for part, all_low, all_exact in zip(mixed, low, exact, strict=True):
        assert torch.equal(part[:, [0, 2]], all_low[:, [0, 2]])
        assert torch.equal(part[:, 1], all_exact[:, 1])


def test_groups_of_heads_do_not_share_their_noise() -> None:
    """Kernels number their heads from 0: two groups with equal inputs would otherwise be rounded alike."""
    other = HeadKernel(replace(FAIR.declaration, plan=replace(FAIR.declaration.plan, name="the same, named otherwise")))
    q, k, v, _ = (tensor[:, :1].expand(-1, 2, -1, -1) for tensor in _tensors())
    out = attend(q, k, v, (FAIR, other), _call())
    assert not torch.equal(out[:, 0], out[:, 1])


def test_noise_depends_on_seed_step_and_layer() -> None:
    seeds = {noise_seed(seed, step, layer) for seed in range(3) for step in range(3) for layer in range(3)}
    assert len(seeds) == 27
    once, again, otherwise = (_run((FAIR,) * 3, _call(seed))[0] for seed in (1, 1, 2))
    assert torch.equal(once, again)
    assert not torch.equal(once, otherwise)


def test_an_observer_sees_all_and_changes_nothing() -> None:
    observations: list[Observation] = []
    watched, alone = _run((LOW, EXACT, LOW), _call(observer=observations)), _run((LOW, EXACT, LOW), _call())
    assert all(torch.equal(a, b) for a, b in zip(watched, alone, strict=True))
    assert sorted(observation.heads for observation in observations) == [(0, 2), (1,)]
    low = next(observation for observation in observations if observation.heads == (0, 2))
    assert torch.equal(low.inputs.q, _tensors()[0][:, [0, 2]].bfloat16().float())
    assert torch.equal(low.inputs.do, _tensors()[3][:, [0, 2]])
    assert low.output.gradients is not None
    assert torch.equal(low.output.gradients.dq, watched[1][:, [0, 2]])
