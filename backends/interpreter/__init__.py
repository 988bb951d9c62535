"""Triton kernels on a CPU: Triton's own interpreter, made to round as the language defines it.

Upstream's interpreter holds bf16 as 16 bits of an integer: its cast truncates, its products multiply those bits (triton
issue 11584, closed as unsupported). Here a number of a narrow format is a number; see `builder`.
"""

from tiebreak.backends.interpreter.backend import INTERPRETER

__all__ = ["INTERPRETER"]
