"""What the GPUs of this machine are, NVIDIA's and AMD's.

Functions that read the system take `root`, the file system's root, so that a test can hand in a made-up one.
"""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tiebreak.backends.platform import read
from tiebreak.kernels.triton import loading


@dataclass(frozen=True)
class Gpu:
    """The GPUs that a run has used with their software, as far as they can change the bits of a result."""

    gpu: str  #: model names of the visible GPUs, each once
    gpu_arch: str  #: what kernels are compiled for: sm_90, gfx942; each once
    gpu_driver: str | None  #: version of the kernel's driver
    cuda: str | None  #: version of CUDA that PyTorch is built with; None if that is ROCm
    hip: str | None  #: version of ROCm's HIP that PyTorch is built with; None if that is CUDA
    cudnn: str | None  #: version of cuDNN, of MIOpen with ROCm, as one number: 91002 is 9.10.2
    triton: str | None  #: version of Triton

    def as_dict(self) -> dict[str, Any]:
        """The fields under their names."""
        return asdict(self)


def describe_gpu(root: Path = Path("/")) -> Gpu:
    """Describe the visible GPUs and their software. It initialises CUDA: not to be called where none is used.

    Args:
        root: the file system's root.

    Returns:
        The GPUs; what a system does not tell is None.
    """
    devices = range(torch.cuda.device_count())
    cudnn: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return Gpu(
        gpu=_each_once(torch.cuda.get_device_name(device) for device in devices),
        gpu_arch=_each_once(_gpu_arch(device) for device in devices),
        gpu_driver=_gpu_driver(root),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        cudnn=None if cudnn is None else str(cudnn),
        triton=loading.installed(),
    )


def _each_once(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _gpu_arch(device: int) -> str:
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _gpu_driver(root: Path) -> str | None:
    """Version of the driver: NVIDIA's stands in a sentence, AMD's alone."""
    text = read(root / "proc/driver/nvidia/version") or read(root / "sys/module/amdgpu/version")
    version = re.search(r"\d+(\.\d+)+", text)
    return version[0] if version else None
