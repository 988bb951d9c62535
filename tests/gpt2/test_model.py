"""The model: sizes, weights, QK-norm, gates; and that its attention is the suite's kernel, to the bit."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tiebreak.backends.backend import EMULATION
from tiebreak.cases.gpt2.attention import FP32_ATTENTION, HeadKernel, Heads, LayerCall, Observation, attend, noise_seed
from tiebreak.cases.gpt2.model import GPT2, PRESETS, Configuration, Gate, HeadNorm, everywhere
from tiebreak.cases.gpt2.variants import variants
from tiebreak.kernels.counter import random_bits
from tiebreak.kernels.formats import BF16, FP32, Formats
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import run_declared
from tiebreak.kernels.plans import Cast

SMALL = Configuration(layers=2, heads=2, width=8, context=6, vocabulary=11)
EXACT = HeadKernel(FP32_ATTENTION, Cast(FP32))
SHAPE = (2, 3, 12, 8)
VARIANTS = variants(rounded=True)
LOW = HeadKernel(VARIANTS["flash"].scripted)
FAIR = HeadKernel(VARIANTS["fair"].scripted)


def _model(seed: int = 0, configuration: Configuration = SMALL) -> GPT2:
    return GPT2(configuration, everywhere(EXACT, configuration), EMULATION.arithmetic, seed)


def _parameters(sizes: Configuration) -> int:
    """Of GPT-2 without biases."""
    embeddings = (sizes.vocabulary * (1 if sizes.tied else 2) + sizes.context) * sizes.width
    return sizes.layers * (12 * sizes.width**2 + 2 * sizes.width) + embeddings + sizes.width


def test_sizes_are_the_papers_and_those_of_gpt_2_without_biases() -> None:
    """GPT-2's 124 and 355 million with the vocabulary padded to 50,304."""
    for preset, millions in (("gpt2_small", 124.4), ("gpt2_medium", 354.6)):
        assert round(_parameters(PRESETS[preset]) / 1e6, 1) == millions
    for tied in (False, True):
        sizes = Configuration(layers=3, heads=2, width=8, context=6, vocabulary=11, tied=tied)
        assert sum(weight.numel() for weight in _model(0, sizes).parameters()) == _parameters(sizes)


def test_a_token_does_not_see_later_ones() -> None:
    tokens = torch.arange(6)[None]
    changed = tokens.clone()
    changed[0, 4] = 10
    first, second = (_model()(input_tokens, step=0) for input_tokens in (tokens, changed))
    assert torch.equal(first[0, :4], second[0, :4])
    assert not torch.equal(first[0, 4:], second[0, 4:])
    # The loss is the mean cross-entropy.
    log_p = torch.log_softmax(first.double(), -1)[0]
    by_hand = -log_p[torch.arange(6), changed[0]].mean().item()
    assert _model().loss(tokens, changed, 0).item() == pytest.approx(by_hand, rel=1e-6)


def test_what_is_no_model_is_one_clear_line() -> None:
    with pytest.raises(ValueError, match=r"^width 8 is no multiple of 3 heads$"):
        Configuration(layers=1, heads=3, width=8, context=4, vocabulary=5)
    with pytest.raises(ValueError, match="at least 1"):
        Configuration(layers=0, heads=1, width=8, context=4, vocabulary=5)
    with pytest.raises(ValueError, match="expected 2 layers of 2 kernels"):
        GPT2(SMALL, ((EXACT,), (EXACT, EXACT)), EMULATION.arithmetic, 0)


def test_the_random_stream_of_the_weights_is_as_ever() -> None:
    """The first and the last number drawn: records and checkpoints of earlier versions rest on them."""
    model, other = _model(), _model(1)
    assert not torch.equal(model.head.weight, other.head.weight)
    assert model.tokens.weight[0, 0].item() == pytest.approx(-0.0049645831, rel=1e-7)
    assert model.head.weight[-1, -1].item() == pytest.approx(0.0113639729, rel=1e-7)
    # Weights that write to the residual stream start smaller.
    block = _model(0, Configuration(layers=8, heads=2, width=64, context=6, vocabulary=11)).block(0)
    stds = [weight.std().item() for weight in (block.wq.weight, block.wo.weight, block.down.weight)]
    assert stds == pytest.approx([0.02, 0.02 / 4, 0.02 / 4], rel=0.05)


def test_qk_norm_and_gates_leave_the_other_weights_alone_and_gates_start_open() -> None:
    plain = dict(_model().named_parameters())
    for qk_norm, gated in ((True, False), (False, True), (True, True)):
        model = _model(0, replace(SMALL, qk_norm=qk_norm, gated=gated))
        changed = dict(model.named_parameters())
        assert all(torch.equal(changed[name], weight) for name, weight in plain.items())
        assert len(changed) - len(plain) == SMALL.layers * (2 * qk_norm + gated)
        if not qk_norm:
            assert torch.equal(model(torch.arange(6)[None], 0), _model()(torch.arange(6)[None], 0))


def test_a_gate_by_hand() -> None:
    """2 sigmoid(ln 3) = 1.5 on the second dimension of the second head; a gate of a token depends on that token."""
    gate = Gate(SMALL)
    with torch.no_grad():
        gate.weight[5, 0] = math.log(3)
    h = torch.zeros(1, 3, 8)
    h[0, 1, 0] = 1.0
    o = torch.ones(1, 2, 3, 4)
    expected = o.clone()
    expected[0, 1, 1, 1] = 1.5
    torch.testing.assert_close(gate(o, h).detach(), expected)


def test_a_head_norm_by_hand() -> None:
    """(3, 4, 0, 0) has a root mean square of 2.5, whatever the other head and token have."""
    norm = HeadNorm(SMALL)
    with torch.no_grad():
        norm.gain[4:] = torch.tensor([1.0, 10.0, 1.0, 1.0])
    x = torch.full((1, 2, 2, 4), 7.0)
    x[0, 1, 1] = torch.tensor([3.0, 4.0, 0.0, 0.0])
    normed = norm(x).detach()
    torch.testing.assert_close(normed[0, 1, 1], torch.tensor([1.2, 16.0, 0.0, 0.0]))
    torch.testing.assert_close(normed[0, 0], torch.ones(2, 4))
    # In a model the size of the weights of queries and keys is so irrelevant.
    tokens, model = torch.arange(6)[None], _model(0, replace(SMALL, qk_norm=True))
    before = model(tokens, 0)
    with torch.no_grad():
        model.block(0).wq.weight.mul_(64.0)
        model.block(1).wk.weight.mul_(16.0)
    torch.testing.assert_close(model(tokens, 0), before, rtol=1e-3, atol=1e-5)


def _tensors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    q, k, v, do = (torch.randn(SHAPE, generator=generator) for _ in range(4))
    return q, k, v, do


def _call(seed: int = 0, observer: list[Observation] | None = None) -> LayerCall:
    x = torch.zeros(SHAPE[0], SHAPE[2], 4)
    return LayerCall(EMULATION.arithmetic, 0, seed, () if observer is None else (observer.append,), x)


def _run(kernels: Heads, call: LayerCall) -> tuple[Tensor, ...]:
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
