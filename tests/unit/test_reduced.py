"""Products with fewer bits: bf16's own at E8M7, masked however they are spelled, and modules that go another way."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tiebreak.backends.backend import EMULATION
from tiebreak.backends.emulation.rounding import round_to
from tiebreak.cases.gpt2.attention import HeadKernel, Observation
from tiebreak.cases.gpt2.model import GPT2, Configuration, everywhere
from tiebreak.kernels.formats import FP32, TF32, Rounding, parse_format
from tiebreak.kernels.kernel import Declaration, run_backward, run_forward
from tiebreak.kernels.sdpa import cpu_sdpa_flash
from tiebreak.laboratory.reduced import (
    Reduction,
    emulated_gpt2,
    masked_attention,
    parse_reduction,
    reduce_precision,
    reduced_gpt2,
    reduction_at,
)
from tiebreak.studies import truncation

E8M7, E8M3 = parse_reduction("E8M7"), parse_reduction("E8M3")
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"))
each_mode = pytest.mark.parametrize("mode", [Rounding.RNE, Rounding.RTZ], ids=lambda mode: mode.value)
SMALL = Configuration(layers=2, heads=2, width=16, context=8, vocabulary=11)


def _normal(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    numbers = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(numbers).to(device)


def _equal(actual: Tensor | None, expected: Tensor) -> bool:
    assert actual is not None
    return torch.equal(actual.view(torch.int32), expected.contiguous().view(torch.int32))


def _bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("name", ["E8M7", "E8M3", "E5M4:rtz"])
def test_products_are_masked_forward_and_backward_and_e8m7_is_bf16_to_the_bit(name: str, device: str) -> None:
    """Y, dA, dB of a matrix product are the paper's figure, written out with another mask."""
    reduction = parse_reduction(name)

    def mask(x: Tensor) -> Tensor:
        return _bf16(x) if name == "E8M7" else round_to(x, reduction.fmt, reduction.mode)

    shapes = ((1, 64, 48), (30, 48, 32), (1e-3, 64, 32))
    a, b, dy = (size * _normal(*shape, seed=int(size), device=device) for size, *shape in shapes)
    ma, mb, mdy = map(mask, (a, b, dy))
    expected = mask(ma @ mb), mask(mdy @ mb.mT), mask(ma.mT @ mdy)
    a.requires_grad_(), b.requires_grad_()
    with reduce_precision(reduction):
        y = a @ b
    y.backward(dy)  # type: ignore[no-untyped-call]
    assert all(map(_equal, (y, a.grad, b.grad), expected))


def test_a_linear_layer_keeps_its_weights_and_masks_all_else() -> None:
    layer, x, dy = nn.Linear(16, 8), _normal(3, 5, 16), _normal(3, 5, 8, seed=1)
    weight = layer.weight.detach().clone()
    with reduce_precision(E8M7):
        y = layer(x)
    y.backward(dy)
    low, w, b = _bf16(dy).flatten(0, 1), _bf16(weight), _bf16(layer.bias.detach())
    assert _equal(y, _bf16(functional.linear(_bf16(x), w, b)))
    assert _equal(layer.weight.grad, _bf16(low.mT @ _bf16(x).flatten(0, 1)))
    assert _equal(layer.bias.grad, _bf16(low.sum(0)))
    assert torch.equal(layer.weight, weight)  # not one bit masked in the master copy


A, B = _normal(4, 4), _normal(4, 4, seed=1)
SPELLINGS: dict[str, Callable[[], Tensor]] = {
    "@": lambda: A @ B,
    "method": lambda: A.matmul(B),
    "reflected": lambda: B.__rmatmul__(A),
    "linalg": lambda: torch.linalg.matmul(A, B),
    "mm": lambda: torch.mm(A, B),
    "bmm": lambda: torch.bmm(A[None], B[None])[0],
    "linear": lambda: functional.linear(A, B.mT),
    "addmm": lambda: torch.addmm(torch.zeros(4), A, B),
    "baddbmm": lambda: torch.baddbmm(torch.zeros(4, 4), A[None], B[None])[0],
    "einsum": lambda: torch.einsum("ij,jk->ik", A, B),
    "einsum of a list": lambda: torch.einsum("ij,jk->ik", [A, B]),
    "tensordot": lambda: torch.tensordot(A, B, dims=1),
    "mv": lambda: torch.stack([A.mv(column) for column in B.mT], -1),
}


@pytest.mark.parametrize("spelled", SPELLINGS.values(), ids=SPELLINGS)
def test_a_product_is_masked_however_it_is_spelled(spelled: Callable[[], Tensor]) -> None:
    with reduce_precision(E8M3):
        actual = spelled()
    expected = E8M3.mask(E8M3.mask(A) @ E8M3.mask(B))
    assert torch.equal(actual, expected)
    assert not torch.equal(spelled(), expected)  # the context is over


def test_products_of_integers_stay_as_they_are_and_those_that_no_mask_reaches_are_refused() -> None:
    counts, x = torch.arange(100, 104).view(2, 2), _normal(2, 4, 8)
    with reduce_precision(E8M3):
        assert torch.equal(counts @ counts, torch.tensor([[20302, 20503], [20706, 20911]]))
        with pytest.raises(NotImplementedError, match="multi_head_attention_forward multiplies where no mask"):
            nn.MultiheadAttention(8, 2)(x, x, x)
        with pytest.raises(NotImplementedError, match="out="):
            torch.mm(A, B, out=torch.empty(4, 4))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": torch.arange(30).view(5, 6) % 4 != 0},
        {"attn_mask": torch.arange(30).view(5, 6) * 0.1},
        {"attn_mask": torch.arange(5)[:, None].expand(5, 6) > 0},  # the first query sees no key
    ],
    ids=["plain", "causal", "scale", "hidden keys", "bias", "hidden row"],
)
def test_attention_whose_masks_change_nothing_is_torchs(options: dict[str, object]) -> None:
    q, k, v = _normal(2, 4, 5, 8), _normal(2, 2, 6, 8, seed=1), _normal(2, 2, 6, 8, seed=2)
    given = {**options, "enable_gqa": True}
    expected = functional.scaled_dot_product_attention(q, k, v, **given)  # type: ignore[arg-type]
    actual = masked_attention(Reduction(FP32), q, k, v, **given)  # type: ignore[arg-type]
    torch.testing.assert_close(actual, expected)
    if not options:  # else it is two masked products
        with reduce_precision(E8M7):
            masked = functional.scaled_dot_product_attention(q, q, q)
        scores = _bf16(_bf16(q) @ _bf16(q).mT) * 8**-0.5
        assert _equal(masked, _bf16(_bf16(scores.softmax(-1)) @ _bf16(q)))


@pytest.mark.parametrize("reduction", [E8M3, Reduction(TF32)])
def test_narrow_types_are_rounded_once_and_kept_and_autocast_rounds_nothing_more(reduction: Reduction) -> None:
    a, b = _normal(32, 64), _normal(64, 32, seed=1)
    for dtype in (torch.bfloat16, torch.float32):
        x, y = a.to(dtype), b.to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32), reduce_precision(reduction):
            actual = x @ y
        assert actual.dtype == dtype
        exact = reduction.mask(reduction.mask(x.float()) @ reduction.mask(y.float()))
        assert torch.equal(actual, exact.to(dtype))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inside(x) @ x
        return y


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Block(), _Block()])
        self.head = nn.Linear(8, 8, bias=False)


def test_modules_go_another_way_by_name() -> None:
    model, x = _Model(), _normal(8, 8)
    otherwise = {"head": None, "blocks.0.inside": None, "blocks.0": Reduction(TF32)}
    with reduce_precision(E8M3, model, otherwise):
        first, second, head = model.blocks[0](x), model.blocks[1](x), model.head(x)
        after = x @ x  # outside of any module

    def product(reduction: Reduction, a: Tensor, b: Tensor) -> Tensor:
        return reduction.mask(reduction.mask(a) @ reduction.mask(b))

    def inside(at: int) -> Tensor:
        weight = model.get_parameter(f"blocks.{at}.inside.weight")
        return weight.detach().mT

    assert _equal(first, product(Reduction(TF32), x @ inside(0), x))
    assert _equal(second, product(E8M3, product(E8M3, x, inside(1)), x))
    assert _equal(head, x @ model.head.weight.mT)
    assert _equal(after, product(E8M3, x, x))
    # What the inner context leaves unmasked no other masks, and what it masks it masks alone.
    with reduce_precision(E8M3), reduce_precision(E8M7, model, {"head": None}):
        head, masked = model.head(x), x @ x
        with pytest.raises(RuntimeError):
            model.head(_normal(3, 3))
        assert torch.equal(x @ x, masked), "a module that raises leaves the context as it was"
    assert torch.equal(head, model.head(x))
    assert torch.equal(masked, product(E8M7, x, x))


def test_the_innermost_name_and_the_first_glob_count_and_one_that_matches_nothing_is_refused() -> None:
    rest = {"blocks.0": None, "blocks.*": E8M7}
    assert reduction_at("blocks.0.wq", E8M3, rest) == E8M7  # * takes dots too
    assert reduction_at("blocks.0", E8M3, rest) is None
    assert reduction_at("head", E8M3, rest) == E8M3
    for model, message in ((_Model(), r"haed: no module .*blocks\.0, .*head"), (None, "there is no model")):
        with pytest.raises(ValueError, match=message), reduce_precision(E8M3, model, {"haed": None}):
            pass


def test_a_range_is_clamped_at_both_ends_apart() -> None:
    x = torch.tensor([0.0, -0.0, 0.24, -0.24, 0.25, 1.0, 7.9, -8.0, 100.0, torch.inf, torch.nan])
    inner = [0.0, -0.0, 0.25, -0.25, 0.25, 1.0, 8.0, -8.0, 96.0, torch.inf, torch.nan]
    outer = [0.0, -0.0, 0.234375, -0.234375, 0.25, 1.0, 7.5, -7.5, 7.5, torch.inf, torch.nan]
    assert _equal(parse_reduction("E8M3:inner=-2").mask(x), torch.tensor(inner))
    assert _equal(parse_reduction("E8M3:outer=2").mask(x), torch.tensor(outer))
    for text in ("E8M3", "E8M3:rtz", "E8M7:inner=-20:outer=15", "fp8_e4m3:outer=3", "E5M2:rtz:inner=-3"):
        assert parse_reduction(text).name == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("E8M3:inner=4:outer=3", "from inner 4 to outer 3 the range is empty"),
        ("E5M2:inner=-15", "inner is an exponent from -14 to 15, not -15"),
        ("E5M2:outer=16", "outer is an exponent from -14 to 15, not 16"),
        ("E8M3:up", "not 'up'"),
    ],
)
def test_what_makes_no_sense_is_one_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        parse_reduction(text)
    assert "\n" not in str(raised.value)


def _step(model: GPT2) -> list[Observation]:
    """Forward and backward pass; what attention saw, the last layer first."""
    seen: list[Observation] = []
    model.observers = [seen.append]
    tokens = torch.arange(16).view(2, 8) % SMALL.vocabulary
    model.loss(tokens, tokens.flip(0), 0).backward()  # type: ignore[no-untyped-call]
    return seen


@each_mode
@pytest.mark.parametrize("kernel", ["flash@paper", "flash@fused", "fair"])
def test_gpt2s_attention_is_its_kernel_in_the_format_and_masked_by_nothing_else(kernel: str, mode: Rounding) -> None:
    reduction = Reduction(parse_format("E8M4"), mode)
    with reduced_gpt2(emulated_gpt2(kernel, SMALL, 5), reduction) as model:
        seen = _step(model)
    assert len(seen) == SMALL.layers
    for each in seen:
        declared = each.kernel.implementation
        assert isinstance(declared, Declaration)
        assert declared.label == kernel.replace("fair", "dithered@fused_stochastic")
        casts = {(cast.fmt.name, cast.rounding) for _, cast in declared.plan.casts() if cast.follows}
        assert casts == {("E8M4", mode)} | ({("E8M4", Rounding.STOCHASTIC)} if kernel == "fair" else set())
        # Once more outside of the context: a product that the context masked had other bits.
        assert _equal(each.output.o, run_forward(declared, each.inputs, EMULATION.arithmetic).o)
        assert each.output.gradients is not None
        again = run_backward(declared, each.inputs, each.output, EMULATION.arithmetic)
        assert _equal(each.output.gradients.dq, again.dq)
        for tensor in (each.inputs.q, each.inputs.v, each.inputs.do, each.output.o):
            assert _equal(tensor, replace(reduction, mode=Rounding.RNE).mask(tensor))  # of the format


def test_gpt2s_blocks_go_another_way_with_their_attention() -> None:
    model = emulated_gpt2("flash@paper", SMALL, 5)
    former = model.kernels
    with reduced_gpt2(model, E8M3, {"head": None, "blocks.0": None}):
        second, first = _step(model)
    assert (first.kernel.inputs.fmt, second.kernel.inputs.fmt.name) == (FP32, "E8M3")
    assert not torch.equal(first.output.o, E8M3.mask(first.output.o))
    assert torch.equal(second.output.o, E8M3.mask(second.output.o))
    assert model.kernels is former
    with reduced_gpt2(model, E8M3, {"blocks.0": None}, attention=E8M7):
        alone = _step(model)
    assert [each.kernel.inputs.fmt.name for each in alone] == ["E8M7"] * 2
    assert all(torch.equal(each.inputs.q, E8M7.mask(each.inputs.q)) for each in alone)
    assert [torch.equal(each.inputs.q, E8M3.mask(each.inputs.q)) for each in alone] == [True, False]  # a product's


def test_gpt2_refuses_what_it_can_not_round() -> None:
    model = emulated_gpt2("flash@paper", SMALL, 5)
    model.kernels = everywhere(HeadKernel(cpu_sdpa_flash()), SMALL)
    with pytest.raises(ValueError, match="only a declared kernel"), reduced_gpt2(model, E8M3):
        pass


def test_the_page_has_what_its_script_measures() -> None:
    page = (Path(__file__).parents[2] / "docs" / "fewer-bits.md").read_text(encoding="utf-8")
    fmt, *measured = truncation.row("E8M3")
    line = next(line for line in page.splitlines() if line.startswith(f"| {fmt} | -"))
    for actual, written in zip(measured, line.strip("| ").split(" | ")[1:], strict=True):
        # Sums of fp32 in another order leave the third digit in doubt.
        assert float(actual.split()[0]) == pytest.approx(float(written.split()[0]), abs=2e-3)
