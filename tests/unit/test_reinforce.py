"""The study of REINFORCE between two kernels: its gradient, what a control is, its reward, and its table."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from tiebreak.cases.gpt2.data import corpus
from tiebreak.studies import reinforce
from tiebreak.studies.reinforce import (
    CONTROL,
    Row,
    Step,
    Weighting,
    lines,
    measured,
    pairs,
    rewards_of,
    surrogate,
    train,
)


def logs(*probabilities: float) -> Tensor:
    """Of sequences of one token each."""
    return torch.tensor(probabilities, dtype=torch.float64)[:, None].log()


# The trainer draws the first of two tokens with 1/4, and each was drawn once, rewarded with 1 and 0: both advantages
# are 1/2 in size, and d log p / d theta is 3/4 and -1/4. The sampler's probabilities give the ratios.
@pytest.mark.parametrize(
    ("weighting", "by_sampler", "gradient"),
    [
        (Weighting.NONE, (0.5, 0.5), -(3 / 4 + 1 / 4) / 4),
        (Weighting.RATIO, (0.5, 0.5), -(1 / 2 * 3 / 4 + 3 / 2 * 1 / 4) / 4),
        (Weighting.RATIO, (0.05, 0.95), -(5 * 3 / 4 + 15 / 19 * 1 / 4) / 4),
        (Weighting.TRUNCATED, (0.05, 0.95), -(2 * 3 / 4 + 15 / 19 * 1 / 4) / 4),
    ],
)
def test_the_gradient_is_that_by_hand(weighting: Weighting, by_sampler: tuple[float, float], gradient: float) -> None:
    theta = torch.tensor(-math.log(3.0), dtype=torch.float64, requires_grad=True)
    chosen = log_softmax(torch.stack([theta, torch.zeros_like(theta)]), 0)[:, None]
    surrogate(chosen, logs(*by_sampler), torch.tensor([1.0, 0.0]), weighting).backward()  # type: ignore[no-untyped-call]
    assert theta.grad is not None
    assert theta.grad.item() == pytest.approx(gradient, rel=1e-12)


def steps(name: str, tokens: int, count: int = 2) -> list[Step]:
    """Of a model that is made at once: training the fixture's takes seconds."""
    return list(train(replace(pairs()[name], failing=True), Weighting.NONE, 1, count, tokens))


def test_a_controls_ratios_are_1_where_decode_and_prefill_are_the_same_call() -> None:
    assert [step.largest for step in steps(CONTROL, tokens=2)] == [1.0, 1.0]


def test_a_control_differs_less_than_two_kernels_do() -> None:
    own, (first, second) = steps(CONTROL, tokens=12), steps("flash@paper", tokens=12)
    # Attention has the same bits either way; products around it, in fp32, may be added up in another order.
    assert max(step.rms for step in own) < 1e-2 * min(first.rms, second.rms)
    assert first.k3 == pytest.approx(first.rms**2 / 2, rel=0.02)  # of ratios near 1
    assert first.reward == own[0].reward  # the same draws, where policies agree


def test_a_step_measures_what_is_worked_out_by_hand() -> None:
    every = logs(1 / 2, 1 / 4, 1 / 8, 1 / 8).mT
    step = measured(every, logs(2.0, 1.0, 0.85, 0.5), torch.tensor([0.25, 0.75]), 3.0)
    logarithms = [math.log(ratio) for ratio in (2.0, 1.0, 0.85, 0.5)]
    assert step.rms == pytest.approx(math.sqrt(sum(x * x for x in logarithms) / 4))
    assert step.k3 == pytest.approx((1 + 0 - 0.15 - 0.5 - sum(logarithms)) / 4)
    assert (step.reward, step.outside, step.gradient) == (0.5, 0.5, 3.0)
    assert (step.largest, step.entropy) == pytest.approx((2.0, 1.75 * math.log(2.0)))


def test_a_step_changes_the_policy_and_a_seed_is_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    one, again = (steps(CONTROL, tokens=12) for _ in range(2))
    assert one == again
    monkeypatch.setattr(reinforce, "RATE", 0.0)
    first, second = steps(CONTROL, tokens=12)
    assert first == one[0]
    assert second.entropy != one[1].entropy


def test_the_reward_is_the_share_of_the_first_ones_class() -> None:
    texts = ["aeib", "zq x", "(.a+"]
    tokens = torch.tensor([[corpus().vocabulary.index(character) for character in text] for text in texts])
    assert rewards_of(tokens).tolist() == pytest.approx([2 / 3, 2 / 3, 2 / 3])


def test_the_table_compares_seed_by_seed_and_marks_what_all_rows_together_tell(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def row(pair: str, seed: int, final: float) -> Row:
        return Row(
            pair, "none", seed, first=0.4, final=final, rms=1e-3, k3=0, outside=0, largest=1, gradient=1, entropy=1
        )

    control = [row(CONTROL, seed, 0.5 + seed / 10) for seed in (1, 2, 3)]
    worse = [row("SDPA", seed, 0.4 + seed / 10 + seed / 1e4) for seed in (1, 2, 3)]
    alike = [row("flash@paper", seed, 0.5 + seed / 10 + (-0.1) ** seed) for seed in (1, 2, 3)]
    _, _, of_control, of_sdpa, of_paper = lines([*control, *worse, *alike])
    # Student's t of two degrees of freedom at 95 % is 4.303: 4.303 * 0.1 / sqrt(3), and 4.303 * 1e-4 / sqrt(3).
    assert of_control.endswith("| 0.700 ± 0.248 |  |")
    assert of_sdpa.endswith("| **-0.100 ± 0.000** |")
    assert "**" not in of_paper
    with pytest.raises(SystemExit) as ended:
        reinforce.main(["--seeds", "1"])
    assert ended.value.code == 2
    assert "--seeds 1" in capsys.readouterr().err
