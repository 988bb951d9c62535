"""The backends that there are, by name."""

from collections.abc import Mapping

from tiebreak.backends.ascend import ASCEND
from tiebreak.backends.backend import CPU, EMULATION, Backend
from tiebreak.backends.cuda import CUDA
from tiebreak.backends.interpreter import INTERPRETER
from tiebreak.backends.interpreter.assumptions import CARDS
from tiebreak.backends.ptx import PTX
from tiebreak.backends.torch_device import PREFIX

__all__ = ["BACKENDS", "CARDS", "COMMONLY"]

BACKENDS: Mapping[str, Backend] = {
    backend.name: backend for backend in (EMULATION, CPU, INTERPRETER, PTX, CUDA, ASCEND)
}
#: What people also call a backend.
COMMONLY = {"gpu": "cuda", "nvidia": "cuda", "amd": "cuda", "rocm": "cuda", "hip": "cuda", "npu": "ascend",
            "triton": "interpreter", "emulator": "emulation",
            **{PREFIX + backend.device: backend.name for backend in (CPU, CUDA, ASCEND)}}  # fmt: skip
