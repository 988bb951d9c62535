"""The cells: every backend x kernel x case x format, run under pytest."""

import tiebreak.kernels  # noqa: F401  # before torch: keeps it from loading device packages on its own
