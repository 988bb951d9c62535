"""The kernels' source. Loaded by `tiebreak.kernels.triton.compiling`."""
