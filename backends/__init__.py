"""Where kernels run: a device and the arithmetic on it."""
