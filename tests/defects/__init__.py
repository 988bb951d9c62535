"""Kernels with planted defects, each for a bug that someone reported in public, and their sound twins."""

import tiebreak.kernels  # noqa: F401  # before torch: keeps it from loading device packages on its own
