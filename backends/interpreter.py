"""The backend `interpreter`: the Triton kernels, run by Triton's interpreter on any CPU."""

from functools import partial
from typing import Any

from tiebreak.backends.backend import Backend
from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.kernels.triton.loading import installed, not_interpreting
from tiebreak.kernels.triton.roster import triton_kernels


class Interpreter(Backend):
    """The Triton kernels alone.

    Under the interpreter fp32 carries every format and integer arithmetic inside the kernels rounds: its own cast to
    bf16 truncates, and its products of bf16 multiply raw bits (triton issue 11584). So its casts are the emulation's.
    """

    def describe(self) -> dict[str, Any]:
        """Triton's version. NumPy's, whose products, sums and exponentials the kernels are made of, is in every run."""
        return {"triton": installed()}


INTERPRETER = Interpreter(
    "interpreter",
    "the Triton kernels, in Triton's interpreter on this CPU",
    "cpu",
    EmulatedArithmetic(),
    not_interpreting,
    partial(triton_kernels, interpreted=True),
    composed=False,
    call_steps=60,
)
