"""The backend `cuda` and its workers: NVIDIA's GPUs, and AMD's, which are the same device to torch (ROCm).

Nothing here has run on a GPU yet: tests put stand-ins in torch.cuda's place.
"""

import os
import re
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tiebreak.backends.emulation.tensor_cores import MATMULS
from tiebreak.backends.platform import read
from tiebreak.backends.torch_arithmetic import TorchArithmetic
from tiebreak.backends.torch_device import TorchDevice
from tiebreak.kernels.external import external_kernel
from tiebreak.kernels.flex import flex
from tiebreak.kernels.kernel import Kernel, first_line
from tiebreak.kernels.plans import Accumulator, Cast
from tiebreak.kernels.sdpa import ON_GPUS, forced, sdpa_math
from tiebreak.kernels.triton.loading import installed
from tiebreak.kernels.triton.roster import triton_kernels
from tiebreak.kernels.varlen import varlen
from tiebreak.kernels.vendor import exact_products, fused_on_gpu

_FIRST_WITH_BF16 = (8, 0)  # compute capability


class CudaArithmetic(TorchArithmetic):
    """Eager torch on a GPU, its products never narrower than the plan.

    It repeats to the bit: cuBLAS does on one stream, and torch's casts, exponential and row sums always do.
    """

    def matmul(self, a: Tensor, b: Tensor, cast: Cast, accumulator: Accumulator) -> Tensor:
        """Return the device's product: of narrow operands where the result is narrow, of fp32 operands otherwise."""
        with exact_products():
            return super().matmul(a, b, cast, accumulator)


def unavailable() -> str | None:
    """Return None, or why no GPU can be used here, in one line; without CUDA in torch, CUDA is not touched."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"PyTorch {torch.__version__} is built without CUDA and ROCm: install a build for your GPU"
    if not torch.cuda.is_available():
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:  # no driver, too old a driver, no device
            return f"PyTorch finds no GPU: {first_line(error)}"
        return f"PyTorch finds no GPU; {_visible_variable()} is {os.environ.get(_visible_variable())!r}"
    count, needed = torch.cuda.device_count(), "".join(map(str, _FIRST_WITH_BF16))
    for device in range(0 if torch.version.hip else count):
        if torch.cuda.get_device_capability(device) < _FIRST_WITH_BF16:
            reason = f"{torch.cuda.get_device_name(device)} ({_gpu_arch(device)}) has no bf16, which needs sm_{needed}"
            return reason if count == 1 else f"{reason}; leave it out with {_visible_variable()}"
    return None


def gpu_sdpa_kernels() -> tuple[Kernel, ...]:
    """Return PyTorch's kernels on a GPU: FlashAttention-2, cuDNN's, the memory-efficient one, the composed one."""
    kernels = (forced(name, each, fused_on_gpu(block)) for name, (each, block) in ON_GPUS.items())
    return (*kernels, sdpa_math())


@cache
def cuda_kernels() -> tuple[Kernel, ...]:
    """Return the Triton kernels, PyTorch's own and flash-attn's; missing ones skip with their reasons."""
    packaged = external_kernel("flash_attn", "flash@fused_contracted,tile=128")
    # Where the package is missing no training run has it.
    flash_attn = replace(packaged, external=False, has_backward=find_spec("flash_attn") is not None)
    return (*triton_kernels(interpreted=False), flex(), *gpu_sdpa_kernels(), varlen(), flash_attn)


def _visible_variable() -> str:
    return "HIP_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES"


def describe_gpu(root: Path = Path("/")) -> dict[str, str | None]:
    """Return properties of the visible GPUs and their software that can change bits. It initialises CUDA.

    Returns:
        Model names and what kernels are compiled for, each once; versions of the driver, of CUDA or HIP that PyTorch is
        built with, of cuDNN or MIOpen as one number (91002 is 9.10.2), of Triton. What a system does not tell is None.
    """
    devices = range(torch.cuda.device_count())
    cudnn: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    # NVIDIA's version is part of a sentence, AMD's is not.
    driver = re.search(
        r"\d+(\.\d+)+", read(root / "proc/driver/nvidia/version") or read(root / "sys/module/amdgpu/version")
    )
    return {
        "gpu": ", ".join(dict.fromkeys(map(torch.cuda.get_device_name, devices))),
        "gpu_arch": ", ".join(dict.fromkeys(map(_gpu_arch, devices))),
        "gpu_driver": driver[0] if driver else None,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": None if cudnn is None else str(cudnn),
        "triton": installed(),
    }


def _gpu_arch(device: int) -> str:
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


class _Cuda(TorchDevice):
    """The GPUs of this machine. Nothing is set up: a worker sees its own GPU alone."""

    def worker_environment(self, worker: int) -> dict[str, str]:
        count, name = torch.cuda.device_count(), _visible_variable()
        if count < 2:
            return {}
        visible = os.environ.get(name)
        devices = visible.split(",") if visible else [str(device) for device in range(count)]
        return {name: devices[worker % count]}

    def describe(self) -> dict[str, Any]:
        return describe_gpu()


CUDA = _Cuda(
    "cuda",
    f"this GPU by {'ROCm' if torch.version.hip else 'CUDA'}: eager torch, Triton and its vendor's kernels",
    "cuda",
    CudaArithmetic(),
    unavailable,
    cuda_kernels,
    accumulators=MATMULS,
    bits="bits on this GPU",
)
