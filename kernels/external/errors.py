"""What goes wrong with a kernel that someone else wrote."""


class LoadError(ValueError):
    """The kernel can't be found, imported or called as it is; one line, and the traceback of its own code if any."""

    def __init__(self, message: str, own_traceback: str = "") -> None:
        super().__init__(message)
        self.own_traceback = own_traceback


class ContractError(Exception):
    """The kernel broke its contract; the message says which part."""


class ShapeError(ContractError):
    """What it returned does not have the shape of O."""
