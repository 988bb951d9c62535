"""Gradients are held to the backward pass that they show, by bits and by the size of their errors."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention, softmax

from tiebreak.cases.case import Case, Shape, normal_numbers
from tiebreak.cases.verdicts import LIMIT
from tiebreak.defects.kernel import Attention, Request
from tiebreak.defects.planted import twin, users
from tiebreak.kernels.backward_passes import BACKWARD_PASSES, passes_after
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.external import external_kernel
from tiebreak.kernels.formats import BF16, FP16, Format
from tiebreak.kernels.kernel import Kernel
from tiebreak.matrix.workbench import Settings, Workbench
from tiebreak.reports.records.record import FOLLOWED_BACKWARD, Record
from tiebreak.studies.cells import CASES, judged

GROUPED_IN_TILES = replace(
    CASES["random_grouped"], name="grouped_in_tiles", recipe=partial(normal_numbers, shape=Shape(queries=40, groups=4))
)
FLASH_2 = "FlashAttention-2's (P and dS in 16 bits)"
PYTORCH = "PyTorch's for CPUs (P and dS in 16 bits, sums in 16 bits after every 32 queries)"


def flash(q: Tensor, k: Tensor, v: Tensor, *, scale: float, enable_gqa: bool = False) -> Tensor:
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        return scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=enable_gqa)


def of_repeated_keys(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """As Keras calls it: autograd adds up what the heads of a group give."""
    groups = q.shape[1] // k.shape[1]
    return flash(q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), scale=scale)


def composed(q: Tensor, k: Tensor, v: Tensor, *, scale: float, enable_gqa: bool = False) -> Tensor:
    with sdpa_kernel([SDPBackend.MATH]):
        return scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=enable_gqa)


def hugging_face(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    return softmax(q @ k.mT * scale, -1, dtype=torch.float32).to(q.dtype) @ v


def in_16_bits(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    return softmax(q @ k.mT * scale, -1) @ v


def scaling_q(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    return softmax(q * scale @ k.mT, -1, dtype=torch.float32).to(q.dtype) @ v


def excess_precision(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """P is cast, and dP, as XLA may leave it, not."""
    p = softmax(q.float() @ k.float().mT * scale, -1)
    return ((p + (p.to(q.dtype) - p).detach()) @ v.float()).to(q.dtype)


def _unnormalised(q: Tensor, k: Tensor, v: Tensor, scale: float, p: Callable[[Tensor], Tensor]) -> Tensor:
    s = q.float() @ k.float().mT * scale
    p_bar = p(s)
    o_bar = p_bar.to(q.dtype) @ v
    return (o_bar / p_bar.sum(-1, keepdim=True)).to(q.dtype)


def through_the_maximum(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """The README's kernel."""
    return _unnormalised(q, k, v, scale, lambda s: torch.exp(s - s.amax(-1, keepdim=True)))


def past_the_maximum(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    return _unnormalised(q, k, v, scale, lambda s: torch.exp(s - s.detach().amax(-1, keepdim=True)))


def with_o_bar_in_fp32(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    s = q.float() @ k.float().mT * scale
    p = torch.exp(s - s.detach().amax(-1, keepdim=True))
    return (p.to(q.dtype).float() @ v.float() / p.sum(-1, keepdim=True)).to(q.dtype)


def of_heads_in_16_bits(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """The same of keys that are repeated in their own format, as transformers' repeat_kv does."""
    groups = q.shape[1] // k.shape[1]
    return with_o_bar_in_fp32(q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), scale=scale)


def of_its_own(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """S in 16 bits, P not before it is normalised: autograd's of no kernel that is known."""
    s = (q @ k.mT).float() * scale
    p = torch.exp(s - s.amax(-1, keepdim=True))
    return (p / p.sum(-1, keepdim=True)).to(q.dtype) @ v


def _in_tiles(q: Tensor, k: Tensor, v: Tensor, scale: float, cast_first: Callable[[Tensor], Tensor]) -> Tensor:
    """Online softmax with O in 16 bits between its tiles of 64 keys."""
    o, m, l = torch.zeros_like(q), torch.full((*q.shape[:3], 1), -torch.inf), torch.zeros(*q.shape[:3], 1)
    for keys in (slice(0, 64), slice(64, 128)):
        s = q.float() @ k[:, :, keys].float().mT * scale
        new = torch.maximum(m, s.amax(-1, keepdim=True))
        p, alpha = torch.exp(s - new), torch.exp(m - new)
        m, l = new, l * alpha + p.sum(-1, keepdim=True)
        added = p.to(q.dtype).float() @ v[:, :, keys].float()
        o = (cast_first(o.float() * alpha) + cast_first(added)).to(q.dtype)
    return (o.float() / l).to(q.dtype)


def in_tiles(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    return _in_tiles(q, k, v, scale, lambda x: x)


def in_tiles_at_every_step(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    return _in_tiles(q, k, v, scale, lambda x: x.to(q.dtype))


def of_heads_through_the_maximum(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """The same, and the gradient goes through the maximum."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q.float() @ k.float().mT * scale
    p = torch.exp(s - s.amax(-1, keepdim=True))
    return (p.to(q.dtype).float() @ v.float() / p.sum(-1, keepdim=True)).to(q.dtype)


class Coarse(torch.autograd.Function):
    """Nothing, of which the gradient keeps three significant bits."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(gradients[0].float())
        return torch.ldexp((mantissa * 8).round() / 8, exponent).to(gradients[0].dtype)


_coarse: Callable[[Tensor], Tensor] = Coarse.apply


def coarse_dk(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    return through_the_maximum(q, _coarse(k), v, scale=scale)


def coarse_dk_of_heads(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    return of_heads_through_the_maximum(q, _coarse(k), v, scale=scale)


def coarse_throughout(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    return of_its_own(_coarse(q), _coarse(k), _coarse(v), scale=scale)


@cache
def _bench(heads: int) -> Workbench:
    """The part of one case that kernels share: its inputs, and the outputs of all plans."""
    return Workbench(Settings(seed=2, heads=heads))


def run(kernel: Kernel, case: str | Case, heads: int = 32, fmt: Format = BF16) -> Record:
    return judged(kernel, case, fmt=fmt, bench=_bench(heads))


CAST, BY_HEAD = "(dO / l, P and dP in 16 bits)", "heads of a group added in 16 bits"
SHIPPED: dict[Any, tuple[str | Case, str]] = {
    flash: ("random_odd", FLASH_2),
    composed: ("random_odd", "autograd's in fp32"),
    hugging_face: ("random_odd", "autograd's of eager attention (P, dP and dS in 16 bits)"),
    in_16_bits: ("random_odd", "autograd's of a softmax in 16 bits (P, dP and dS in 16 bits)"),
    scaling_q: ("random_odd", "autograd's of eager attention that scales q (P, dP and dS in 16 bits)"),
    excess_precision: ("random_odd", "autograd's of a P that is cast (P in 16 bits)"),
    through_the_maximum: ("random_odd", f"autograd's of an unnormalised O that is cast, through the maximum {CAST}"),
    past_the_maximum: ("random_odd", f"autograd's of an unnormalised O that is cast {CAST}"),
    with_o_bar_in_fp32: ("random_odd", "autograd's of an unnormalised O (P and dP in 16 bits)"),
    of_repeated_keys: (GROUPED_IN_TILES, f"{PYTORCH[:-1]}, {BY_HEAD})"),
    of_heads_in_16_bits: ("random_grouped", f"autograd's of an unnormalised O (P and dP in 16 bits, {BY_HEAD})"),
    of_heads_through_the_maximum: (
        "random_grouped",
        f"autograd's of an unnormalised O, through the maximum (P and dP in 16 bits, {BY_HEAD})",
    ),
}


@pytest.mark.parametrize(
    ("kernel", "case", "expected", "fmt"),
    [
        *((kernel, *expected, BF16) for kernel, expected in SHIPPED.items()),
        (flash, "random_grouped", PYTORCH, BF16),
        (flash, *SHIPPED[flash], FP16),
    ],
)
def test_gradients_of_what_people_ship_have_the_bits_of_a_known_backward_pass(
    kernel: Any, case: str | Case, expected: str, fmt: Format
) -> None:
    record = run(external_kernel(f"{Path(__file__)}:{kernel.__name__}"), case, heads=8, fmt=fmt)
    bits = record.evidence["backward"]
    assert max(bits, key=lambda name: sum(bits[name].values())) == expected
    assert sorted(bits[expected].values())[1] >= FOLLOWED_BACKWARD  # two show a backward pass
    assert record.passed("gradients") is not False  # 8 heads tell little


def test_gradients_that_err_no_more_than_a_shipped_pass_are_not_held_to_a_finer_one() -> None:
    """With dS in fp16, dQ and dK have the bits of fp32's and dV has FlashAttention-2's."""
    finer = partial(Attention, rounded_ds=lambda _, ds, request: ds.half().float())
    assert run(users(finer, "finer"), "random").passed("gradients")


class LostUpdate(Attention):
    """Right as it is called first, and in one tile of a later call without one of the sums."""

    calls = 0

    def dq(self, dq: Tensor, added: Tensor, request: Request, keys: slice) -> Tensor:
        self.calls += 1
        return dq if self.calls == 4 else super().dq(dq, added, request, keys)


def test_a_backward_pass_that_errs_more_fails_in_one_line_with_numbers() -> None:
    answer = run(users(LostUpdate, "LostUpdate"), "random_odd", heads=64).answers["gradients"]
    assert answer.passed is False
    assert "of dQ " in answer.why
    assert "1.1 is allowed" in answer.why
    assert run(twin("tiled"), "random_odd", heads=64).passed("gradients")


@pytest.mark.parametrize(
    ("sound", "coarse", "gradient", "held_to", "case"),
    [
        (through_the_maximum, coarse_dk, "dK", "through the maximum", "random"),
        (of_its_own, coarse_throughout, "dV", "the loosest known backward pass", "random"),
        (of_heads_through_the_maximum, coarse_dk_of_heads, "dK", "through the maximum", "random_grouped"),
    ],
)
def test_what_autograd_makes_is_held_to_its_own_pass_or_to_the_largest_errors_of_all(
    sound: Any, coarse: Any, gradient: str, held_to: str, case: str
) -> None:
    good, bad = (run(external_kernel(f"{Path(__file__)}:{each.__name__}"), case, 128) for each in (sound, coarse))
    assert good.passed("gradients")
    answer = bad.answers["gradients"]
    assert answer.passed is False
    assert f"of {gradient} " in answer.why
    assert held_to in answer.why


@pytest.mark.parametrize(
    ("kernel", "plan"),
    [(in_tiles, "flash@paper,o_bar=input:once,tile=64"), (in_tiles_at_every_step, "flash@paper,tile=64")],
)
def test_a_delta_of_the_forward_pass_in_tiles_is_no_fault_of_the_backward_pass(kernel: Any, plan: str) -> None:
    """An O that is cast after each tile is farther off than one that is cast once, and delta comes from it."""
    record = run(external_kernel(f"{Path(__file__)}:{kernel.__name__}"), "random", heads=128)
    fits = record.evidence["fits"]
    assert max(fits, key=lambda name: fits[name].bits) == plan
    assert record.passed("accuracy")
    assert max(record.number(f"{name}_square_ratio") or 9.0 for name in ("dq", "dk", "dv")) <= LIMIT


def test_what_a_plan_says_of_the_backward_pass_is_tried_first() -> None:
    assert list(passes_after(parse_declaration("fused"), groups=2)) == list(BACKWARD_PASSES)
    assert list(passes_after(parse_declaration("standard"), groups=2)) == list(BACKWARD_PASSES)
    own, by_head, *known = passes_after(parse_declaration("fused,ds=fp16"), groups=2)
    assert own == "that of flash@fused,ds=fp16"
    assert by_head.startswith(own)
    assert known == list(BACKWARD_PASSES)


def test_passes_that_add_heads_up_are_tried_where_heads_share_keys() -> None:
    alone = passes_after(parse_declaration("fused"), groups=1)
    assert not any(BY_HEAD in name for name in alone)
    assert {name for name in BACKWARD_PASSES if BY_HEAD not in name} == set(alone)
