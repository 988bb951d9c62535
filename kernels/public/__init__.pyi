"""The types of the public names: type checkers read it instead of __init__.py, and nothing imports it."""

from tiebreak.kernels.external import kernel as kernel
from tiebreak.programs.assertions import assert_fair as assert_fair
from tiebreak.programs.assertions import inputs as inputs
from tiebreak.programs.checking import check as check
from tiebreak.programs.pair import pair as pair

__all__ = ["assert_fair", "check", "inputs", "kernel", "pair"]
