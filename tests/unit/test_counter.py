"""The counter-based random numbers: fixed, uniform, and independent from one counter to the next."""

import math
from collections.abc import Callable, Mapping

import pytest
import torch

from tiebreak.kernels.counter import random_bits

N = 2**20


def _reference(seed: int, *counters: int) -> int:
    """The same hash in Python integers, as a kernel writes it on uint32."""

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ x >> 16

    state = mix((seed + 0x9E3779B9) % 2**32)
    for counter in counters:
        state = mix((mix(counter % 2**32) + state) % 2**32)
    return state


@pytest.mark.parametrize(
    ("seed", "counters", "expected"),
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
def test_known_answers(seed: int, counters: tuple[int, ...], expected: int) -> None:
    assert random_bits(seed, *counters).item() == expected
    assert _reference(seed, *counters) == expected


def test_agrees_with_the_reference_on_many_counters() -> None:
    rows = torch.arange(40)
    columns = torch.tensor([0, 1, 5, 2**16, 2**31 - 1, 2**31, 2**32 - 1])
    bits = random_bits(7, 3, rows[:, None], columns)
    expected = [[_reference(7, 3, row, column) for column in columns.tolist()] for row in range(40)]
    assert bits.tolist() == expected


def test_shape_type_and_range() -> None:
    bits = random_bits(0, torch.arange(5)[:, None], 3, torch.arange(7, dtype=torch.int32))
    assert bits.shape == (5, 7)
    assert bits.dtype == torch.int64
    assert bits.min() >= 0
    assert bits.max() < 2**32
    assert random_bits(0, 1).shape == ()
    assert random_bits(0).shape == ()


def test_a_part_has_the_bits_of_the_whole() -> None:
    whole = random_bits(11, torch.arange(64)[:, None], torch.arange(32))
    assert torch.equal(random_bits(11, torch.arange(16, 24)[:, None], torch.arange(32)), whole[16:24])
    assert torch.equal(random_bits(11, 5, torch.arange(32)), whole[5])


def test_counters_are_taken_modulo_32_bits() -> None:
    x = torch.tensor([-1, 2**32 + 9])
    assert torch.equal(random_bits(0, x), random_bits(0, torch.tensor([2**32 - 1, 9])))
    assert random_bits(0, -1) == random_bits(0, 2**32 - 1)
    assert torch.equal(random_bits(0, torch.tensor([-1], dtype=torch.int32)), random_bits(0, torch.tensor([-1])))


def test_the_input_is_left_as_it_was() -> None:
    counters = torch.arange(100)
    random_bits(0, counters, counters)
    assert torch.equal(counters, torch.arange(100))


def test_the_order_and_number_of_counters_matter() -> None:
    assert len({random_bits(*args).item() for args in [(0,), (0, 0), (0, 0, 0), (0, 1, 2), (0, 2, 1), (1, 0, 2)]}) == 6


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
def test_every_byte_is_uniform(stream: str) -> None:
    bits = STREAMS[stream]()
    for shift in (0, 8, 16, 24):
        counts = torch.bincount((bits >> shift) & 0xFF, minlength=256).to(torch.float64)
        chi_square = ((counts - N / 256) ** 2 / (N / 256)).sum().item()
        # 255 degrees of freedom: mean 255, variance 510. The lower bound catches what is more even than random.
        assert abs(chi_square - 255) < 5 * math.sqrt(510)


@pytest.mark.parametrize("stream", STREAMS)
def test_neighbours_are_uncorrelated(stream: str) -> None:
    bits = STREAMS[stream]()
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
