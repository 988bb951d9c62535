"""The backends that there are, by name."""

from collections.abc import Mapping
from types import MappingProxyType

from tiebreak.backends import cuda
from tiebreak.backends.ascend.backend import ASCEND
from tiebreak.backends.backend import CPU, EMULATION, Backend
from tiebreak.backends.interpreter import INTERPRETER

CUDA = Backend(
    "cuda",
    cuda.about(),
    "cuda",
    cuda.CudaArithmetic(),
    cuda.unavailable,
    cuda.cuda_kernels,
    poisoned=cuda.poisoned,
)
BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {backend.name: backend for backend in (EMULATION, CPU, INTERPRETER, CUDA, ASCEND)}
)
