"""Triton kernels on a CPU, as NVIDIA's compiler leaves them: the PTX of a card that is not here, executed.

Products add up as that card's tensor cores do (`tiebreak.backends.emulation.tensor_cores`). No GPU runs anything.
"""

from tiebreak.backends.ptx.backend import PTX

__all__ = ["PTX"]
