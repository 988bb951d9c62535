"""What the command line answers with one line and exit code 2."""


class UsageError(Exception):
    """Something wrong with the command line or the configuration, in one line."""
