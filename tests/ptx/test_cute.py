"""Kernels of CuTe DSL by their own host code: FlashAttention-4's forward pass, where it is installed."""

from importlib.util import find_spec

import pytest
import torch

from tiebreak.backends.ptx import CARDS
from tiebreak.backends.ptx.driver import map_of
from tiebreak.backends.ptx.session import executing
from tiebreak.kernels.kernel import CannotRunError

# As CuTe DSL 4.8.1 encodes them: 256 rows of two heads, 64 numbers wide in bf16, 96 in bf16, 128 in bf16.
Q_64 = (
    "40846e92b15500003265040010000000080000000010000000000000000000003f000000ff0000000100000000000000000000000000003fbf"
)
Q_96 = (
    "404e0d08c255000032450400180000000c0000000018000000000000000000005f000000ff0000000100000000000000000000000000001fbf"
)
K_128 = (
    "409d1c6df15500003265240020000000100000000020000000000000000000007f000000ff0000000100000000000000000000000000003f7f"
)


@pytest.mark.parametrize(
    ("held", "lengths", "strides", "box", "swizzle"),
    [
        (Q_64, (64, 256, 2, 1), (2, 256, 128, 65536), (64, 192, 1, 1), 3),
        (Q_96, (96, 256, 2, 1), (2, 384, 192, 98304), (32, 192, 1, 1), 2),
        (K_128, (128, 256, 2, 1), (2, 512, 256, 131072), (64, 128, 1, 1), 3),
    ],
)
def test_a_tensor_map_says_what_it_was_made_of(
    held: str, lengths: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: int
) -> None:
    found = map_of(bytes.fromhex(held).ljust(128, b"\0"))
    assert (found.lengths, found.strides, found.box, found.swizzle) == (lengths, strides, box, swizzle)
    assert hex(found.start) in ("0x55b1926e8440", "0x55c2080d4e40", "0x55f16d1c9d40")
    with pytest.raises(CannotRunError, match="tensor map of another kind"):
        map_of(bytes.fromhex(held.replace("000032", "000033")).ljust(128, b"\0"))


@pytest.mark.skipif(find_spec("cutlass") is None, reason="FlashAttention-4 and CuTe DSL are not installed")
@pytest.mark.parametrize(
    ("card", "d", "causal"),
    [(card, d, causal) for card in ("sm_80", "sm_90", "sm_100") for d in (64, 128) for causal in (False, True)],
)
def test_flash_attention_4_is_attention(card: str, d: int, causal: bool) -> None:
    """With 4 queries, so that most rows of a tile are none, and with more than a tile of keys; not on sm_80 backward.

    There it has no backward pass, and on sm_100 that of d = 128 is for clusters of two blocks.
    """
    from flash_attn.cute import flash_attn_func

    generator = torch.Generator().manual_seed(0)
    q, k, v, out = (torch.randn((1, n, 2, d), generator=generator).bfloat16() for n in (4, 200, 200, 4))
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    given = [x.requires_grad_() for x in (q, k, v)]
    s = torch.einsum("bqhd,bkhd->bhqk", *wide[:2]) / d**0.5
    hidden = torch.ones(4, 200, dtype=torch.bool).tril(196).logical_not() if causal else torch.zeros(4, 200).bool()
    exact = torch.einsum("bhqk,bkhd->bqhd", s.masked_fill(hidden, -torch.inf).softmax(-1), wide[2])
    torch.autograd.backward(exact, out.double())
    with executing(card, CARDS[card]):
        o = flash_attn_func(*given, causal=causal, deterministic=True)
        o = o[0] if isinstance(o, tuple) else o
        if card != "sm_80" and (card, d) != ("sm_100", 128):
            torch.autograd.backward(o, out)
        elif card == "sm_100":
            with pytest.raises(CannotRunError, match=r"instruction barrier\.cluster\.arrive\.relaxed"):
                torch.autograd.backward(o, out)
    pairs = [(o, exact), *((x.grad, y.grad) for x, y in zip(given, wide, strict=True))]
    for x, y in pairs:
        assert y is not None
        assert x is None or (x.double() - y).abs().max() < 0.006 * y.abs().max()
