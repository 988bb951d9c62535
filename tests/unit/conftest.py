"""Shapes that a kernel must take."""

import pytest

# Queries, keys, d, query heads, key heads, causal.
SHAPES = {
    "one_of_each": (1, 1, 16, 1, 1, False),
    "d32": (33, 70, 32, 2, 2, False),
    "d256": (5, 70, 256, 2, 1, False),
    "d20_odd_heads": (37, 37, 20, 3, 3, True),
    "grouped_causal": (70, 70, 16, 6, 2, True),
    "fewer_queries_causal": (19, 150, 16, 2, 2, True),
    "fewer_keys_causal": (150, 19, 16, 2, 2, True),  # the first 131 queries see no key
}


@pytest.fixture(params=SHAPES.values(), ids=list(SHAPES))
def attention_shape(request: pytest.FixtureRequest) -> tuple[int, int, int, int, int, bool]:
    """Sizes of a call of attention: queries, keys, d, query heads, key heads, and whether it is causal."""
    shape: tuple[int, int, int, int, int, bool] = request.param
    return shape
