"""Inputs, what is claimed about them, and how outputs are measured and judged."""

import tiebreak.kernels  # noqa: F401  # before torch: keeps it from loading device packages on its own
