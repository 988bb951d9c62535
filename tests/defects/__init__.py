"""One kernel in steps, planted defects that replace a step for a bug that someone reported, and their sound twins."""

import tiebreak.kernels  # noqa: F401  # before torch: keeps it from loading device packages on its own
