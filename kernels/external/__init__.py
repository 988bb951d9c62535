"""Kernels that other people wrote: how they are found, how they are called, and the contract that they are held to."""

from tiebreak.kernels.external.declaring import kernel
from tiebreak.kernels.external.errors import ContractError, LoadError
from tiebreak.kernels.external.kernels import Given, external_kernel, external_kernels, told_apart

__all__ = ["ContractError", "Given", "LoadError", "external_kernel", "external_kernels", "kernel", "told_apart"]
