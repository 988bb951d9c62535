"""What a kernel raised, in one line."""

import traceback
from pathlib import Path


def first_line(error: Exception) -> str:
    """Of its message."""
    return (str(error).strip().splitlines() or ["no message"])[0]


def raised(error: Exception) -> str:
    """What was raised, and the line of code that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return noted(
        f"{type(error).__name__}: {first_line(error)} ({Path(frame.filename).name}, line {frame.lineno})", error
    )


def noted(text: str, error: Exception) -> str:
    """With what is known of the error's cause."""
    return "; ".join([text, *getattr(error, "__notes__", ())])
