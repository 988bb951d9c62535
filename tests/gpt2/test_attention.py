"""Attention in a model is the suite's kernel, to the bit, and its gradients are those of attention."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tiebreak.backends.backend import EMULATION
from tiebreak.cases.gpt2.attention import FP32_ATTENTION, Call, HeadKernel, Heads, Observation, attend, noise_seed
from tiebreak.cases.gpt2.variants import variants
from tiebreak.kernels.counter import random_bits
from tiebreak.kernels.formats import BF16, FP32, Formats
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import run_declared
from tiebreak.kernels.plans import Cast

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
