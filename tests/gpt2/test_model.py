"""The model: sizes, initial weights, causality, errors."""

import pytest
import torch

from tiebreak.backends.backend import EMULATION
from tiebreak.cases.gpt2.attention import HeadKernel
from tiebreak.cases.gpt2.model import GPT2, PRESETS, Configuration, everywhere
from tiebreak.cases.gpt2.variants import FP32_ATTENTION
from tiebreak.kernels.formats import FP32
from tiebreak.kernels.plans import Cast

SMALL = Configuration(layers=2, heads=2, width=8, context=6, vocabulary=11)
EXACT = HeadKernel(FP32_ATTENTION, Cast(FP32))


def _model(seed: int = 0, configuration: Configuration = SMALL) -> GPT2:
    return GPT2(configuration, everywhere(EXACT, configuration), EMULATION.arithmetic, seed)


@pytest.mark.parametrize(
    ("preset", "millions"),
    # GPT-2's 124 and 355 million with the vocabulary padded to 50,304 and without biases.
    [("gpt2_small", 124.4), ("gpt2_medium", 354.6)],
)
def test_presets_have_the_papers_sizes(preset: str, millions: float) -> None:
    configuration = PRESETS[preset]
    block = 12 * configuration.width**2 + 2 * configuration.width  # as the next test counts in a model
    embeddings = (configuration.vocabulary + configuration.context) * configuration.width
    assert round((configuration.layers * block + embeddings + configuration.width) / 1e6, 1) == millions


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_those_of_gpt_2_without_biases(tied: bool) -> None:
    configuration = Configuration(layers=3, heads=2, width=8, context=6, vocabulary=11, tied=tied)
    block = 12 * 8**2 + 2 * 8
    embeddings = (11 + 6) * 8 + (0 if tied else 11 * 8)
    assert sum(weight.numel() for weight in _model(0, configuration).parameters()) == 3 * block + embeddings + 8


def test_weights_depend_on_the_seed_alone() -> None:
    one, again, other = (dict(_model(seed).named_parameters()) for seed in (0, 0, 1))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["head.weight"], other["head.weight"])


def test_weights_that_write_to_the_residual_stream_start_smaller() -> None:
    configuration = Configuration(layers=8, heads=2, width=64, context=6, vocabulary=11)
    block = _model(0, configuration).block(0)
    assert block.wq.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.wo.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert block.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)


def test_a_token_does_not_see_later_ones() -> None:
    tokens = torch.arange(6)[None]
    changed = tokens.clone()
    changed[0, 4] = 10
    first, second = (_model()(each, step=0) for each in (tokens, changed))
    assert torch.equal(first[0, :4], second[0, :4])
    assert not torch.equal(first[0, 4:], second[0, 4:])


def test_the_loss_is_the_mean_cross_entropy() -> None:
    model, tokens, targets = _model(), torch.tensor([[1, 2]]), torch.tensor([[2, 3]])
    logits = model(tokens, 0).double()
    by_hand = -(torch.log_softmax(logits, -1)[0, [0, 1], [2, 3]]).mean()
    assert model.loss(tokens, targets, 0).item() == pytest.approx(by_hand.item(), rel=1e-6)


def test_more_heads_than_the_width_divides_is_one_clear_line() -> None:
    with pytest.raises(ValueError, match=r"^width 8 is no multiple of 3 heads$"):
        Configuration(layers=1, heads=3, width=8, context=4, vocabulary=5)
    with pytest.raises(ValueError, match="at least 1"):
        Configuration(layers=0, heads=1, width=8, context=4, vocabulary=5)


def test_every_head_needs_a_kernel() -> None:
    with pytest.raises(ValueError, match="expected 2 layers of 2 kernels"):
        GPT2(SMALL, ((EXACT,), (EXACT, EXACT)), EMULATION.arithmetic, 0)
