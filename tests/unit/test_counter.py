"""The counter-based random numbers: fixed, uniform, and independent from one counter to the next."""

import math
from collections.abc import Callable, Mapping

import pytest
import torch

from tiebreak.kernels.counter import random_bits

N = 2**20


@pytest.mark.parametrize(
    ("seed", "counters", "expected"),  # the same hash in Python integers, as a kernel writes it on uint32
    [
        (0, (), 0x01FCE552),
        (0, (0,), 0xAE6F80F1),
        (1, (0,), 0x23064794),
        (0, (1,), 0xB8B715EA),
        (42, (0, 1, 2), 0x40748918),
        (42, (2, 1, 0), 0x27F8371E),
        (2**32 - 1, (2**32 - 1, 2**31), 0xBFBBF9EA),
        (20251004, (3, 5, 1023, 63), 0x24AF0826),
    ],
)
def test_known_answers_of_numbers_and_of_tensors(seed: int, counters: tuple[int, ...], expected: int) -> None:
    assert random_bits(seed, *counters).item() == expected
    tensors = [torch.arange(counter, counter + 2) for counter in counters]
    if tensors:  # each counter modulo 2^32, in a tensor of any shape
        corners = torch.meshgrid(*tensors, indexing="ij")
        assert random_bits(seed, *(corner - 2**32 for corner in corners)).flatten()[0].item() == expected


def test_shape_type_and_range() -> None:
    counters = torch.arange(5)
    bits = random_bits(0, counters[:, None], 3, torch.arange(7, dtype=torch.int32))
    assert (bits.shape, bits.dtype, random_bits(0, 1).shape, random_bits(0).shape) == ((5, 7), torch.int64, (), ())
    assert bits.min() >= 0
    assert bits.max() < 2**32
    assert torch.equal(counters, torch.arange(5)), "which are left as they were"
    assert torch.equal(random_bits(0, counters[2:4, None], 3, torch.arange(7)), bits[2:4]), "a part has the whole's"


def test_errors() -> None:
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match="seed"):
            random_bits(seed, 0)
    for counter in (torch.tensor(1.0), torch.tensor(1j), torch.tensor(True)):
        with pytest.raises(TypeError, match=str(counter.dtype)):
            random_bits(0, counter)


SIDE = torch.arange(2**10)
# What attention kernels count, in orders in which a poor hash shows: rows, (head, row) pairs, tiles at a stride, seeds.
STREAMS: Mapping[str, Callable[[], torch.Tensor]] = {
    "consecutive": lambda: random_bits(0, torch.arange(N)),
    "stride 2**12": lambda: random_bits(0, torch.arange(N) << 12),
    "stride 3 * 2**7": lambda: random_bits(0, torch.arange(N) * 384),
    "pairs": lambda: random_bits(0, SIDE[:, None], SIDE).flatten(),
    "pairs, first fastest": lambda: random_bits(0, SIDE, SIDE[:, None]).flatten(),
    "seeds": lambda: torch.stack([random_bits(seed, SIDE) for seed in range(2**10)], dim=1).flatten(),
}


@pytest.mark.parametrize("stream", STREAMS)
def test_every_byte_is_uniform_and_neighbours_are_uncorrelated(stream: str) -> None:
    bits = STREAMS[stream]()
    for shift in (0, 8, 16, 24):
        counts = torch.bincount((bits >> shift) & 0xFF, minlength=256).to(torch.float64)
        chi_square = ((counts - N / 256) ** 2 / (N / 256)).sum().item()
        # 255 degrees of freedom: mean 255, variance 510. The lower bound catches what is more even than random.
        assert abs(chi_square - 255) < 5 * math.sqrt(510)
    for lag in (1, 2, 3, 64):
        for u in (bits / 2.0**32, (bits & 0xFFFF) / 2.0**16):
            a, b = u[:-lag] - 0.5, u[lag:] - 0.5
            # The product of two independent centred uniform numbers has mean 0 and variance 1/144.
            assert abs((a * b).mean().item()) < 5 / 12 / math.sqrt(N)


@pytest.mark.parametrize("which", ["first", "second"])
def test_flipping_a_bit_of_a_counter_flips_half_of_the_bits(which: str) -> None:
    n = 2**13
    a, b = torch.arange(n), torch.arange(n) * 7 + 1
    bits = random_bits(1, a, b)
    for flipped in range(32):
        mask = 1 << flipped
        changed = bits ^ (random_bits(1, a ^ mask, b) if which == "first" else random_bits(1, a, b ^ mask))
        flips = ((changed[:, None] >> torch.arange(32)) & 1).sum(0)
        # Binomial with n draws of probability 1/2.
        assert ((flips - n / 2).abs() < 5 * math.sqrt(n / 4)).all()


def test_no_two_rows_have_the_same_numbers_in_another_order() -> None:
    rows, columns = 2**14, 2**9
    sums = random_bits(0, torch.arange(rows)[:, None], torch.arange(columns)).sum(1)
    # Sums of independent numbers spread over about 2**36: among the 2**27 pairs of rows, 0.003 equal ones expected.
    # Without the inner mix, mix(c ^ state), there are 2**27 * 2**9 / 2**32 = 16 pairs of rows that are permutations.
    assert len(set(sums.tolist())) == rows
