"""Kernels that other people wrote: how they are found, how they are called, and the contract that they are held to."""

from tiebreak.kernels.external.declaring import kernel
from tiebreak.kernels.external.errors import ContractError, LoadError
from tiebreak.kernels.external.kernels import KernelTarget, external_kernel, external_kernels, told_apart

__all__ = ["ContractError", "KernelTarget", "LoadError", "external_kernel", "external_kernels", "kernel", "told_apart"]
