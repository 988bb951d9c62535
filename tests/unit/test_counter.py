"""The counter-based random numbers: fixed to the bit, and independent from one row to the next."""

import pytest
import torch

from tiebreak.kernels.counter import random_bits


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
