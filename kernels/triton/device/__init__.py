"""The kernels' source. Loaded by `tiebreak.kernels.triton.loading`, once to be compiled and once to be interpreted."""
