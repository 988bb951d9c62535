"""Kernels that other people wrote: how they are found, how they are called, and the contract that they are held to."""

from tiebreak.kernels.external.errors import LoadError
from tiebreak.kernels.external.kernels import KernelTarget, distinct_names, external_kernel, external_kernels
from tiebreak.kernels.external.options import kernel

__all__ = [
    "KernelTarget",
    "LoadError",
    "distinct_names",
    "external_kernel",
    "external_kernels",
    "kernel",
]
