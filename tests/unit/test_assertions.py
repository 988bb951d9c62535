"""A kernel's own tests: `tiebreak.inputs` and `tiebreak.assert_fair`."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import tiebreak
from tiebreak.backends.emulation.rounding import round_to
from tiebreak.backends.provenance import CHECKOUT
from tiebreak.kernels.formats import BF16, Rounding, ulp


def unfused(call: Any) -> Tensor:
    """Attention whose O-bar is in the format of its inputs, as the paper's kernel has it."""
    s = call.q.float() @ call.k.float().mT * call.scale
    p_bar = (s - s.amax(-1, keepdim=True)).exp()
    o_bar = (p_bar.to(call.v.dtype).float() @ call.v.float()).to(call.v.dtype)
    o: Tensor = (o_bar.float() / p_bar.sum(-1, keepdim=True)).to(call.v.dtype)
    return o


def test_a_rounded_exact_answer_is_fair_and_an_unfused_kernels_is_not() -> None:
    call = tiebreak.inputs("tied_maxima[k=2]")
    tiebreak.assert_fair(call.exact.bfloat16(), call.exact)
    o = unfused(call)
    with pytest.raises(
        AssertionError, match=r"bias \+0\.2\d+ \+- 0\.0\d+ ulp of torch.bfloat16 over 64 heads: O is .* away.*fair$"
    ):
        tiebreak.assert_fair(o, call.exact)


def test_a_causal_case_says_so_and_gives_its_own_answer() -> None:
    call = tiebreak.inputs("random_causal", heads=8, dtype=torch.float32)
    o = scaled_dot_product_attention(call.q, call.k, call.v, is_causal=call.causal, scale=call.scale)
    assert call.causal
    assert (o - call.exact).abs().max() < 1e-5 * call.exact.abs().max()


def test_inputs_have_the_seed_and_the_heads_that_are_asked_for() -> None:
    first, again, other = (tiebreak.inputs("sink_tie", heads=16, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.v, again.v)
    assert not torch.equal(first.v, other.v)
    assert first.q.shape[0] * first.q.shape[1] == 16


def test_a_bias_towards_zero_nan_and_too_few_heads_are_no_pass() -> None:
    call = tiebreak.inputs("random", heads=64)
    rounded = call.exact.bfloat16()
    lower = (rounded.double() - 0.2 * call.exact.sign() * ulp(call.exact, BF16)).float()  # in fp32: an ulp is smaller
    with pytest.raises(AssertionError, match="towards zero"):
        tiebreak.assert_fair(lower, call.exact)
    broken = rounded.clone()
    broken[0, 0, 0, 0] = torch.nan
    with pytest.raises(AssertionError, match=r"NaN or Inf in 1 of"):
        tiebreak.assert_fair(broken, call.exact)
    with pytest.raises(AssertionError, match=r"over 2 heads: too few to tell; take \d+"):
        tiebreak.assert_fair(rounded[:1, :2], call.exact[:1, :2])


def test_where_o_itself_ties_the_message_says_what_passes_and_that_does() -> None:
    call = tiebreak.inputs("sink_tie")
    for o in (call.exact.bfloat16(), unfused(call)):
        with pytest.raises(AssertionError, match=r"O itself ties .*-0\.2\d+\): only a stochastic cast"):
            tiebreak.assert_fair(o, call.exact)
    bits = torch.randint(2**32, call.exact.shape, generator=torch.Generator().manual_seed(1))
    tiebreak.assert_fair(round_to(call.exact, BF16, Rounding.STOCHASTIC, random_bits=bits).bfloat16(), call.exact)


def test_heads_of_a_group_are_one_sample() -> None:
    call = tiebreak.inputs("tied_maxima[k=2]", heads=64)
    with pytest.raises(AssertionError, match="over 16 heads"):
        tiebreak.assert_fair(unfused(call), call.exact, groups=4)


@pytest.mark.parametrize(
    ("case", "dtype", "message"),
    [
        ("tied_maxima[k=]", torch.bfloat16, r"unknown case 'tied_maxima\[k=\]': did you mean tied_maxima"),
        ("padded", torch.bfloat16, "padded asks for .*: use tiebreak check"),
        ("random", torch.float64, "dtype torch.float64: cases come in torch.bfloat16"),
    ],
)
def test_what_can_not_be_made_is_one_line(case: str, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiebreak.inputs(case, dtype=dtype)


def test_an_output_of_another_shape_is_refused() -> None:
    call = tiebreak.inputs("random", heads=16)
    with pytest.raises(ValueError, match="expected"):
        tiebreak.assert_fair(call.exact.bfloat16()[0], call.exact)
    with pytest.raises(ValueError, match="samples=DIM"):
        tiebreak.assert_fair(call.exact.bfloat16()[0], call.exact[0])
    with pytest.raises(ValueError, match="samples 3: O has 3 dimensions"):
        tiebreak.assert_fair(call.exact.bfloat16()[0], call.exact[0], samples=(0, 3))
    nothing: Any = [call.exact.bfloat16()[:0], call.exact.bfloat16().tolist()]
    for o in nothing:
        with pytest.raises(ValueError, match="not empty"):
            tiebreak.assert_fair(o, call.exact[:0])


def cut_off(x: Tensor) -> Tensor:
    """To bf16, toward zero."""
    return round_to(x.double(), BF16, Rounding.RTZ)


def test_the_rms_norm_of_the_page_is_fair_where_it_rounds_and_is_not_where_it_cuts_off() -> None:
    page = (CHECKOUT / "docs" / "your-kernel.md").read_text(encoding="utf-8")
    code = next(block for block in page.split("```python\n") if block.startswith("def rms_norm")).partition("```")[0]
    torch.manual_seed(1)
    with pytest.raises(
        AssertionError, match=r"bias \+0\.2\d+ .* over 2048 samples: .*; it is \+0\.1\d% a call, .* after 72$"
    ):
        exec(code, {"torch": torch, "tiebreak": tiebreak})
    assert "repeat=72" in code.splitlines()[-1], "what raises is the last line, so the one before it passed"


@pytest.mark.parametrize(
    ("shape", "samples"), [((300, 40), 0), ((40, 300), 1), ((5, 8, 60), (0, -1)), ((300, 2, 3, 5), 0)]
)
def test_any_shape_has_its_samples_where_it_is_told(shape: tuple[int, ...], samples: int | tuple[int, ...]) -> None:
    exact = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.5
    tiebreak.assert_fair(exact.bfloat16(), exact, samples=samples)
    with pytest.raises(AssertionError, match="over 300 samples: O is rounded towards zero"):
        tiebreak.assert_fair(cut_off(exact).bfloat16(), exact, samples=samples)


def test_what_is_said_of_many_calls_is_what_many_calls_come_to() -> None:
    generator = torch.Generator().manual_seed(1)
    x = exact = 1.0 + torch.rand(400, 50, dtype=torch.float64, generator=generator)
    for call in range(200):
        factors = 0.7 + 0.7 * torch.rand(400, 50, dtype=torch.float64, generator=generator)
        x, exact = cut_off(x * factors), exact * factors
        if call == 0:
            with pytest.raises(AssertionError) as caught:
                tiebreak.assert_fair(x.bfloat16(), exact, samples=0, repeat=200)
    said = float(str(caught.value).rpartition(", ")[2].partition("%")[0])
    assert said == pytest.approx(100 * (x / exact).mean().item() - 100, rel=0.1)
    assert -60 < said < -30, "where 200 times one call is more"
