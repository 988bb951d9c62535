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
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("card", ["sm_80", "sm_90", "sm_100"])
def test_flash_attention_4_is_attention(card: str, causal: bool) -> None:
    """With 4 queries, so that most rows of a tile are none, and with more than a tile of keys."""
    from flash_attn.cute import flash_attn_func

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((1, n, 2, 64), generator=generator).bfloat16() for n in (4, 200, 200))
    with executing(card, CARDS[card]):
        o = flash_attn_func(q, k, v, causal=causal)
    o = o[0] if isinstance(o, tuple) else o
    s = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / 8
    hidden = torch.ones(4, 200, dtype=torch.bool).tril(196).logical_not() if causal else torch.zeros(4, 200).bool()
    exact = torch.einsum("bhqk,bkhd->bqhd", s.masked_fill(hidden, -torch.inf).softmax(-1), v.double())
    assert (o.double() - exact).abs().max() < 2**-8 * exact.abs().max()
