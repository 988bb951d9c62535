"""A command run to its end in another process, which Ctrl-C ends too."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tiebreak.reports.errors import UsageError

CELLS = ("-p", "tiebreak.matrix.plugin", "--pyargs", "tiebreak.matrix.test_cells")  # pytest's words for the matrix
_GRACE_SECONDS = 20.0


def finished(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    *,
    shown: bool = False,
    seconds: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; return its exit code and what it printed, or with `shown` print it as it comes.

    On Ctrl-C, which a terminal sends to both, the command first gets time to end by itself.
    UsageError: there is no such program, or it took more than `seconds`.
    """
    pipe = None if shown else subprocess.PIPE
    try:
        started = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=pipe, stderr=pipe, text=True, errors="replace"
        )
    except FileNotFoundError as error:
        raise UsageError(f"{command[0]} is not on the PATH") from error
    with started as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as error:
            process.kill()
            raise UsageError(f"{' '.join(command[:2])}: did not end in {seconds:g} s") from error
        except KeyboardInterrupt:
            try:
                process.communicate(timeout=_GRACE_SECONDS)
            except (KeyboardInterrupt, subprocess.TimeoutExpired):
                process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out or "", err or "")
