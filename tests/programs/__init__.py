"""Programs: what the command `tiebreak` and make call, above backends, cases and reports; none is imported by them."""

import tiebreak.kernels  # noqa: F401  # before torch: keeps it from loading device packages on its own
