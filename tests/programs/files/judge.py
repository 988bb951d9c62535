"""`tiebreak judge FOLDER`: the verdict on the outputs that some device wrote for the calls of `tiebreak export`."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tiebreak.programs import check
from tiebreak.programs.files.backend import Folder, reopened
from tiebreak.programs.files.export import run_words
from tiebreak.reports.cli import USAGE, Parser
from tiebreak.reports.tables.run import counted

_SHOWN = 8  # faults of a folder


def main(arguments: Sequence[str]) -> int:
    """Run the verb `judge`; see `tiebreak.reports.cli.main`."""
    parser = Parser(
        prog="tiebreak judge",
        description="Judge the outputs that another program wrote for the calls in a folder of tiebreak export, as"
        " tiebreak check judges a kernel that it can call. All else that is given is an option of tiebreak check.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, help="that tiebreak export wrote, with outputs in it")
    parser.add_argument("--name", help="of the kernel, in tables and verdict (default: that of the folder)")
    own, rest = parser.parse_known_args(arguments)
    folder = reopened(own.folder)
    if faults := [*folder.faults()]:
        more = [f"{counted(len(faults) - _SHOWN, 'fault')} more"] if len(faults) > _SHOWN else []
        print("\n".join(f"tiebreak judge: {line}" for line in (*faults[:_SHOWN], *more)), file=sys.stderr)
        return USAGE
    words = words_of(folder, own.name or own.folder.resolve().name, rest)
    options = check.parsed(words, "tiebreak judge")
    options.command = shlex.join(["tiebreak", "judge", *arguments])
    return check.checked(options, check.Follower(sys.stderr))


def words_of(folder: Folder, name: str, more: Sequence[str] = ()) -> list[str]:
    """Return the words of `tiebreak check` that judge a folder; of its cases those alone that further words name."""
    manifest = folder.manifest
    options = {key: value for key, value in manifest.options.items() if f"--{key}" not in more}
    words = run_words(folder.path, options, manifest.takes, manifest.layout)
    declared = {"name": name, **({} if folder.has_gradients else {"backward": "none"})}
    return [*words, *(word for key, value in declared.items() for word in ("--declare", f"{key}={value}")), *more]
