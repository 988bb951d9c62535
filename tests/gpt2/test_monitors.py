"""Monitors against computations by hand, and equation 2 against gradients of a real call."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tiebreak.backends.backend import EMULATION
from tiebreak.cases.gpt2 import monitors
from tiebreak.cases.gpt2.attention import Call, HeadKernel, Observation, attend
from tiebreak.cases.gpt2.model import Block, Configuration
from tiebreak.cases.gpt2.monitors import MEASURES, Recorder, View, direction_cosine, drift
from tiebreak.cases.gpt2.variants import variants
from tiebreak.kernels.shift_rules import SHIFT_RULES
from tiebreak.laboratory.training import sign_diversity

VARIANTS = variants(rounded=True)
LOW = HeadKernel(VARIANTS["flash"].scripted)


def _observe(q: Tensor, k: Tensor, v: Tensor, do: Tensor, x: Tensor, kernel: HeadKernel = LOW) -> Observation:
    observations: list[Observation] = []
    leaf = q.clone().requires_grad_()
    call = Call(EMULATION.arithmetic, 3, 0, (observations.append,), x)
    attend(leaf, k, v, (kernel,) * q.shape[1], call).backward(do)  # type: ignore[no-untyped-call]
    return observations[0]


@pytest.fixture
def tie() -> View:
    """Two tokens, d = 1: the second sees two equal scores of 2, and two values whose sum -4.703125 is a tie in bf16."""
    q, k = torch.tensor([3.0, 1.0]), torch.tensor([2.0, 2.0])
    v, do = torch.tensor([-2.40625, -2.296875]), torch.tensor([0.5, 1.0])
    q, k, v, do = (tensor.view(1, 1, 2, 1) for tensor in (q, k, v, do))
    return View(_observe(q, k, v, do, torch.ones(1, 2, 3)))


@pytest.fixture
def drawn() -> View:
    """Random tensors with three heads; scores of 8 to a few decimals, so that no row repeats its maximum."""
    generator = torch.Generator().manual_seed(1)
    q, k, v, do = (torch.randn(2, 3, 8, 4, generator=generator) for _ in range(4))
    return View(_observe(q, k, v, do, torch.randn(2, 8, 5, generator=generator)))


def test_a_tie_by_hand(tie: View) -> None:
    """-4.703125 goes to the even -4.6875, O to -2.34375; exact is -2.3515625. The first row is exact."""
    values = {name: measure(tie).item() for name, measure in MEASURES.items()}
    assert tie.output_error.flatten().tolist() == [0.0, 0.0078125]
    assert values["output_delta_error"] == 0.0078125  # dO is 1 in that row
    assert values["delta_error"] == pytest.approx(0.0078125, rel=1e-4)
    assert values["repeated_rows"] == 0.5
    assert values["row_max"] == 4.0
    assert values["max_logit"] == 6.0


@pytest.mark.parametrize("rule", ["safe", "stabilized", "dithered"])
def test_p_bar_is_rounded_as_in_the_kernel(drawn: View, rule: str) -> None:
    """With O in fp32 all of its error is P-bar's: the same P-bar in fp64 leaves none. Another shift leaves 1e-3."""
    inputs, declared = drawn.observation.inputs, HeadKernel(VARIANTS["o_fp32"].scripted).declaration
    k = inputs.k.clone()
    k[:, :, 1] = k[:, :, 0]  # repeated maxima, for the rule that looks for them
    kernel = HeadKernel(replace(declared, shift_rule=SHIFT_RULES[rule]))
    view = View(_observe(inputs.q, k, inputs.v, inputs.do, drawn.observation.x, kernel))
    assert view.output_error.abs().max() < 1e-6


def test_equation_2_gives_the_error_of_the_query_weights_gradient(drawn: View) -> None:
    """dW_Q = dQ^T X with delta in fp64 less dW_Q as the kernel has it, per head."""
    view, inputs = drawn, drawn.observation.inputs
    dp = inputs.do.double() @ inputs.v.double().transpose(-1, -2)
    exact_delta = (dp * view.p).sum(-1, keepdim=True) / view.p.sum(-1, keepdim=True)
    dq = inputs.scale * (view.p * (dp - exact_delta)) @ inputs.k.double()
    error = torch.einsum("bhtd,btc->hdc", dq - view.gradients.dq.double(), view.observation.x.double())
    predicted = inputs.scale * view.direction(view.delta_error)
    assert (error - predicted).norm() < 1e-3 * error.norm()
    assert error.norm() > 1e-4


def test_delta_s_error_is_found_in_dq_where_a_kernel_keeps_delta_to_itself(drawn: View) -> None:
    """Equation 1 backwards. P sums to 1 and the backward pass is in fp32 here: nothing but delta's error is in dQ."""
    inputs, kernel = drawn.observation.inputs, HeadKernel(variants(rounded=False)["flash"].scripted)
    view = View(_observe(inputs.q, inputs.k, inputs.v, inputs.do, drawn.observation.x, kernel))
    silent = replace(view.observation.output, gradients=replace(view.gradients, delta=None))
    delta_error = View(replace(view.observation, output=silent)).delta_error
    assert (delta_error - view.delta_error).norm() < 1e-3 * view.delta_error.norm()
    assert view.delta_error.norm() > 1e-3


def test_the_gradient_direction_is_that_of_the_first_step(drawn: View) -> None:
    direction = direction_cosine()
    opposite = View(replace(drawn.observation, x=-drawn.observation.x))
    # The gradient error's cosine to R, by hand for one head.
    r = np.einsum("btd,btc->dc", drawn.pk[:, 1].numpy(), drawn.observation.x.double().numpy())
    error = np.einsum("bt,btd,btc->dc", drawn.delta_error[:, 1], drawn.pk[:, 1], drawn.observation.x.double())
    cosine = (error * r).sum() / np.linalg.norm(error) / np.linalg.norm(r)
    assert direction(drawn)[1].item() == pytest.approx(cosine)
    assert direction(opposite)[1].item() == pytest.approx(-cosine)
    assert drift((1.0, -1.0, 2.0)) == 0.5
    assert math.isnan(drift((0.0, 0.0)))


def test_a_recorder_keeps_series_by_layer_and_head(drawn: View) -> None:
    recorder = Recorder(MEASURES, [3])
    recorder(drawn.observation)
    recorder(replace(drawn.observation, layer=1))  # not asked for
    other = Recorder(MEASURES, [3], 1)
    other(replace(drawn.observation, heads=(0, 2, 3)))  # another call computes it
    recorder(drawn.observation)
    for head in range(3):
        expected = MEASURES["max_logit"](drawn)[head].item()
        assert recorder.series("max_logit", 3, head) == (expected, expected)
    for without, layer, head in ((recorder, 1, 0), (other, 3, 1)):
        with pytest.raises(KeyError):
            without.series("max_logit", layer, head)


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("rule", ["stabilized", "dithered"])
def test_what_is_read_of_one_head_is_the_same_without_the_others(drawn: View, rule: str, silent: bool) -> None:
    """Sums to the bit. Also where the kernel keeps delta to itself, and where its noise tells heads apart."""
    inputs, declared = drawn.observation.inputs, HeadKernel(VARIANTS["flash"].scripted).declaration
    kernel = HeadKernel(replace(declared, shift_rule=SHIFT_RULES[rule]))
    observation = _observe(inputs.q, inputs.k, inputs.v, inputs.do, drawn.observation.x, kernel)
    if silent:
        observation = replace(
            observation, output=replace(observation.output, gradients=replace(View(observation).gradients, delta=None))
        )
    measures = {**MEASURES, "direction": direction_cosine()}
    whole = Recorder(measures, [3])
    whole(observation)
    for head in range(3):
        alone = Recorder({**MEASURES, "direction": direction_cosine()}, [3], head)
        alone(observation)
        for name in measures:
            ours, theirs = (recorder.series(name, 3, head) for recorder in (alone, whole))
            assert ours == (pytest.approx(theirs) if name == "direction" else theirs)
        with pytest.raises(KeyError):
            alone.series("row_max", 3, (head + 1) % 3)


def test_spectral_norms_are_the_largest_singular_values_of_each_head_and_nan_of_nan() -> None:
    torch.manual_seed(0)
    block = Block(Configuration(layers=1, heads=3, width=12, context=4, vocabulary=5))
    expected = [np.linalg.svd(part)[1][0] for part in np.split(block.wq.weight.detach().numpy(), 3)]
    assert monitors.spectral_norms(block).tolist() == pytest.approx(expected, rel=1e-5)
    with torch.no_grad():
        block.wq.weight[5, 0] = torch.nan
    assert torch.isnan(monitors.spectral_norms(block)).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("along", "share"),
    [([4.0, 2.0, 1.0, -4.0], 0.5), ([-4.0, -1.0], 0.0), ([-4.0, 1.0], 1.0), ([math.nan, 1.0], math.nan)],
)
def test_the_sign_diversity_by_hand(along: list[float], share: float) -> None:
    weight = torch.tensor([[0.0, 3.0], [1.0, 0.0]])  # its principal right singular vector is +-(0, 1)
    x = torch.tensor([[3.0 - at, second] for at, second in enumerate(along)])
    assert sign_diversity(weight, x) == pytest.approx(share, nan_ok=True)
    assert math.isnan(sign_diversity(weight * math.nan, x))
