"""What stops an interpreted kernel."""

from tiebreak.kernels.kernel import CannotRunError


class UnfaithfulError(CannotRunError):
    """The kernel does what can't be interpreted as a card does it; one line that names it. Its cell is skipped."""


class OutOfBoundsError(IndexError):
    """The kernel reads or writes where none of its arguments lies; one line with the kernel and the argument."""
