"""Where kernels run: a device and the arithmetic on it."""

import tiebreak.kernels  # noqa: F401  # before torch: keeps it from loading device packages on its own
