"""Kernels that other people wrote: how they are found, how they are called, and the contract that they are held to."""

from tiebreak.kernels.external.kernels import UserKernel, distinct_names, external_kernel, users_kernel
from tiebreak.kernels.external.options import KernelOptions, LoadError, kernel

__all__ = ["KernelOptions", "LoadError", "UserKernel", "distinct_names", "external_kernel", "kernel", "users_kernel"]
