"""The error that the command line answers with one line and exit code 2."""


class UsageError(Exception):
    """An error in the command line or the configuration, in one line."""
