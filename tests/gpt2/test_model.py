"""The model: sizes, initial weights, causality, QK-norm, gates, errors."""

import math
from dataclasses import replace

import pytest
import torch

from tiebreak.backends.backend import EMULATION
from tiebreak.cases.gpt2.attention import FP32_ATTENTION, HeadKernel
from tiebreak.cases.gpt2.model import GPT2, PRESETS, Configuration, Gate, HeadNorm, everywhere
from tiebreak.kernels.formats import FP32
from tiebreak.kernels.plans import Cast

SMALL = Configuration(layers=2, heads=2, width=8, context=6, vocabulary=11)
EXACT = HeadKernel(FP32_ATTENTION, Cast(FP32))


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
