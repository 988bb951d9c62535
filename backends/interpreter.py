"""The backend `interpreter`: the Triton kernels, run by Triton's interpreter on any CPU."""

from collections.abc import Mapping
from functools import partial
from importlib.metadata import version

from tiebreak.backends.backend import Backend
from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.kernels.triton.loading import installed, not_interpreting
from tiebreak.kernels.triton.roster import triton_kernels


class Interpreter(Backend):
    """The Triton kernels alone.

    Under the interpreter fp32 carries every format and integer arithmetic inside the kernels rounds: its own cast to
    bf16 truncates, and its products of bf16 multiply raw bits (triton issue 11584). So its casts are the emulation's.
    """

    def fingerprint(self) -> Mapping[str, str | float]:
        """As `Backend.fingerprint`, and whose products, sums and exponentials the kernels are made of."""
        return {**super().fingerprint(), "triton": installed() or "unknown", "numpy": version("numpy")}


INTERPRETER = Interpreter(
    "interpreter",
    "the Triton kernels, in Triton's interpreter on this CPU",
    "cpu",
    EmulatedArithmetic(),
    not_interpreting,
    partial(triton_kernels, interpreted=True),
    composed=False,
)
