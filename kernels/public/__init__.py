"""Does this attention kernel round fairly, on this device, and does the fix hold?

For files with a kernel: ``tiebreak.kernel``, the decorator that declares what a kernel's signature does not show
(docs/your-kernel.md). To import ``tiebreak`` imports nothing else; torch comes with the name.
"""

from typing import TYPE_CHECKING, Any

__all__ = ["kernel"]

if TYPE_CHECKING:
    from tiebreak.kernels.external import kernel
else:

    def __getattr__(name: str) -> Any:
        """The public names, each imported when it is first used: the command answers before torch has loaded."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from tiebreak.kernels import external

        return getattr(external, name)
