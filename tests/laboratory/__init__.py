"""The training laboratory: real runs, sweeps, sharpness, Ray clusters. But for studies nothing imports it."""

import tiebreak.kernels  # noqa: F401  # before torch: keeps it from loading device packages on its own
