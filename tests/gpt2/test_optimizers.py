"""The optimisers of a real run, each step checked by hand, and their learning rate."""

import pytest
import torch

from tiebreak.backends.backend import CPU
from tiebreak.cases.gpt2.attention import HeadKernel
from tiebreak.cases.gpt2.model import GPT2, Configuration, everywhere
from tiebreak.cases.gpt2.optimizers import Schedule, optimizers
from tiebreak.kernels.roster import composed_kernel

SIZES = Configuration(layers=2, heads=2, width=32, context=8, vocabulary=64, tied=True)
RATE = 1e-3


@pytest.fixture
def model() -> GPT2:
    declared = composed_kernel("flash@fp32").declaration
    assert declared is not None
    made = GPT2(SIZES, everywhere(HeadKernel(declared), SIZES), CPU.arithmetic, 0)
    for index, weight in enumerate(made.parameters()):
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(index))
    return made


def _changes(model: GPT2, name: str) -> dict[str, torch.Tensor]:
    """What one step at RATE adds to every weight."""
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for optimizer in optimizers(name, model):
        for group in optimizer.param_groups:
            group["lr"] = RATE
        optimizer.step()
    return {name: weight.detach() - before[name] for name, weight in model.named_parameters()}


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest(model: GPT2) -> None:
    changes = _changes(model, "muon")
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        by_sign = torch.allclose(changes[name], -RATE * weight.grad.sign(), rtol=0, atol=2e-6)
        assert by_sign == (not name.startswith("blocks.") or weight.dim() == 1), name


def test_muon_decays_the_matrices_by_a_hundredth_of_the_rate(model: GPT2) -> None:
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    before = model.block(0).wq.weight.detach().clone()
    changes = _changes(model, "muon")
    torch.testing.assert_close(changes["blocks.0.wq.weight"], -RATE * 0.01 * before, rtol=1e-3, atol=1e-8)
    assert not changes["tokens.weight"].any()


def test_an_optimizer_that_is_not_there_is_told(model: GPT2, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="unknown optimizer 'sgd': known are adamw, muon"):
        optimizers("sgd", model)
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ValueError, match=r"has no Muon: 2\.9 and newer do"):
        optimizers("muon", model)


def test_the_schedule_warms_up_and_falls_to_a_hundredth() -> None:
    schedule = Schedule(steps=110, rate=1.0, warm_up=10)
    assert [schedule.at(step) for step in (0, 9, 10)] == pytest.approx([0.1, 1.0, 1.0])
    assert schedule.at(60) == pytest.approx(0.505)
    assert schedule.at(110) == pytest.approx(0.01)
