"""What a call may ask beyond softmax(Q K^T) V: the reference against torch's autograd, the algorithms against it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from numpy.random import default_rng
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.cases.batch import Batch
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.features import FEATURES, SINK, SOFTCAP, VALUE_DIM, WINDOW, Feature
from tiebreak.kernels.formats import BF16, FP32, Formats
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import run_declared
from tiebreak.kernels.reference import reference, reference_gradients, sink_gradient

BATCH, HEADS, KEY_HEADS, QUERIES, KEYS, D, D_V = 2, 4, 2, 9, 13, 8, 6


def _draw(*shape: int) -> Tensor:
    return torch.from_numpy(default_rng(shape).standard_normal(shape, dtype="float32")).bfloat16().float()


def _d_v(inputs: AttentionInputs) -> AttentionInputs:
    return replace(inputs, v=inputs.v[..., :D_V], do=inputs.do[..., :D_V])


def _with(**fields: Any) -> Callable[[AttentionInputs], AttentionInputs]:
    return lambda inputs: replace(inputs, **fields)


#: What makes inputs ask for a feature, of all that a call has a value of.
ASKING: Mapping[Feature, Callable[[AttentionInputs], AttentionInputs]] = {
    VALUE_DIM: _d_v,
    WINDOW: _with(window=(3, 1)),
    SOFTCAP: _with(softcap=2.0),
    SINK: _with(sink=_draw(HEADS)),
}
PLAIN = AttentionInputs(
    _draw(BATCH, HEADS, QUERIES, D),
    _draw(BATCH, KEY_HEADS, KEYS, D),
    _draw(BATCH, KEY_HEADS, KEYS + 1, D)[:, :, 1:],
    _draw(BATCH, HEADS, QUERIES, D) + 1.0,
    Formats.of(FP32),
)
SEEN: Mapping[str, Callable[[AttentionInputs], AttentionInputs]] = {
    "full": lambda inputs: inputs,
    "causal": _with(causal=True),
    "padded": _with(key_padding=torch.tensor([[True] * 10 + [False] * 3, [False] * 2 + [True] * 11])),
}
SETS = [names for size in (1, 2, 3) for names in combinations(ASKING, size)]


def asking(features: tuple[Feature, ...], seen: str = "full") -> AttentionInputs:
    """Inputs that ask for these."""
    inputs = SEEN[seen](PLAIN)
    for feature in features:
        inputs = ASKING[feature](inputs)
    assert set(features) <= set(inputs.asks())
    return inputs


def visible(inputs: AttentionInputs) -> Tensor:
    """Which keys a row sees, asked one by one, (batch, heads, queries, keys)."""
    batch, heads, queries, keys = *inputs.q.shape[:3], inputs.k.shape[2]
    left, right = (10**9 if side is None else side for side in inputs.window)
    seen = torch.zeros(batch, heads, queries, keys, dtype=torch.bool)
    for b in range(batch):
        for i in range(queries):
            own = i + keys - queries
            for j in range(keys):
                within = own - left <= j <= own + right and not (inputs.causal and j > own)
                padded = inputs.key_padding is not None and not inputs.key_padding[b, j]
                seen[b, :, i, j] = within and not padded
    return seen


def by_torch(inputs: AttentionInputs) -> tuple[Tensor, tuple[Tensor, ...]]:
    """O and the gradients of q, k, v and the sink in fp64: PyTorch's own softmax of scores given as a mask."""
    q, k, v = (tensor.double().requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v))
    leaves, groups = [q, k, v], inputs.groups
    s = torch.einsum("bhid,bhjd->bhij", q, k.repeat_interleave(groups, 1)) * inputs.scale
    if inputs.softcap:
        s = inputs.softcap * torch.tanh(s / inputs.softcap)
    s = torch.where(visible(inputs), s, -1e30)
    values = v.repeat_interleave(groups, 1)
    if inputs.sink is not None:  # one more key, whose V is 0
        sink = inputs.sink.double().requires_grad_()
        leaves.append(sink)
        s = torch.cat([s, sink[:, None, None].expand(*s.shape[:-1], 1)], -1)
        values = torch.cat([values, torch.zeros_like(values[:, :, :1])], 2)
    nothing = torch.zeros(*s.shape[:-1], 1, dtype=torch.float64)
    with sdpa_kernel(SDPBackend.MATH):
        o = sdpa(nothing, torch.zeros_like(values[..., :1]), values, attn_mask=s)
    return o.detach(), torch.autograd.grad(o, leaves, inputs.do.double())


def _exact(inputs: AttentionInputs) -> tuple[Tensor, list[Tensor]]:
    ref = reference(inputs)
    dsink = sink_gradient(inputs, ref)
    return ref.o, [*reference_gradients(inputs, ref), *([] if dsink is None else [dsink])]


def test_all_that_goes_by_a_value_is_tested_here() -> None:
    asked = {feature for features in SETS for feature in asking(features).asks()}
    assert asked >= set(FEATURES[FEATURES.index(VALUE_DIM) :])


@pytest.mark.parametrize("features", SETS, ids=lambda features: "+".join(feature.name for feature in features))
@pytest.mark.parametrize("seen", SEEN)
def test_reference_is_what_torch_and_its_autograd_make_of_it(features: tuple[Feature, ...], seen: str) -> None:
    inputs = asking(features, seen)
    o, gradients = _exact(inputs)
    expected, expected_gradients = by_torch(inputs)
    assert torch.allclose(o, expected, rtol=0.0, atol=1e-13)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("features", SETS, ids=lambda features: "+".join(feature.name for feature in features))
@pytest.mark.parametrize(
    "plan",
    ["flash@fp32,tile=4", "flash@fp32,contract=yes,sink=last,tile=5", "lazy@fp32,sink=maximum,base=2,tile=4x5",
     "flash_1@fp32,tile=4", "split@fp32,tile=5", "standard,p_bar=fp32,o=fp32"],
)  # fmt: skip
def test_algorithms_in_fp32_are_the_reference(features: tuple[Feature, ...], plan: str) -> None:
    inputs = asking(features, "causal")
    output = run_declared(parse_declaration(plan), inputs, EmulatedArithmetic(), True)
    o, exact = _exact(inputs)
    assert torch.allclose(output.o.double(), o, rtol=0.0, atol=2e-6)
    assert output.gradients is not None
    made = [output.gradients.dq, output.gradients.dk, output.gradients.dv, output.gradients.dsink]
    for ours, theirs in zip((gradient for gradient in made if gradient is not None), exact, strict=True):
        assert torch.allclose(ours.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("features", SETS, ids=lambda features: "+".join(feature.name for feature in features))
@pytest.mark.parametrize("plan", ["flash@fused,tile=4", "flash@paper,tile=4", "dithered@all_bf16", "standard"])
def test_rounded_plans_keep_within_their_bounds(features: tuple[Feature, ...], plan: str) -> None:
    inputs = replace(asking(features, "causal"), formats=Formats.of(BF16))
    batch, declaration = Batch(inputs, reference(inputs)), parse_declaration(plan)
    output = run_declared(declaration, inputs, EmulatedArithmetic(), True)
    share = (output.o.double() - batch.ref.o).abs() / batch.bounds.of(declaration)
    assert 1e-3 < share.max() <= 1.0
    assert batch.outside_values(output.o, declaration) <= 1.0
    assert output.gradients is not None
    errors = batch.gradients.errors(output.gradients, batch.gradient_bounds.of(declaration), inputs.groups)
    assert all(0.0 < each.over_bound <= 1.0 for each in errors.each)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window": (-1, 0)}, "window \\(-1, 0\\): its sides are 0 or more keys, or None for all"),
        ({"softcap": -2.0}, "softcap -2.0: expected a positive number, or 0 for none"),
        ({"sink": torch.zeros(3)}, "sink \\(3,\\): expected one logit for each of 4 heads"),
    ],
    ids=["window", "soft cap", "sink"],
)
def test_values_that_make_no_sense_are_refused(fields: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(PLAIN, **fields)
