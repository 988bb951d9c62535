"""`tiebreak judge FOLDER`: the verdict on the outputs that some device wrote for the calls of `tiebreak export`."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tiebreak.cases.verdicts import LOOKS
from tiebreak.programs import check
from tiebreak.programs.files import backend, export
from tiebreak.programs.files.backend import CallFolder
from tiebreak.reports.cli import FAILED, PASSED, USAGE, Parser
from tiebreak.reports.records.record import UNDECIDED, Run
from tiebreak.reports.tables.run import counted
from tiebreak.reports.verdict import Verdict, verdicts

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
    backend.opened.cache_clear()
    folder = backend.opened(str(own.folder))
    if faults := [*folder.faults()]:
        more = [f"{counted(len(faults) - _SHOWN, 'fault')} more"] if len(faults) > _SHOWN else []
        print("\n".join(f"tiebreak judge: {line}" for line in (*faults[:_SHOWN], *more)), file=sys.stderr)
        return USAGE
    options = check.parsed(words_of(folder, own.name or own.folder.resolve().name, rest), "tiebreak judge")
    options.command = shlex.join(["tiebreak", "judge", *arguments])
    follower = _Judging(folder)
    code = check.checked(options, follower)
    return FAILED if code == PASSED and follower.unjudged else code


class _Judging(check.Follower):
    """A follower of the run by which no answer that is an error, NaN or Inf passes."""

    def __init__(self, folder: CallFolder) -> None:
        super().__init__(sys.stderr)
        self.unjudged = [*folder.unjudged()]

    def verdicts(self, run: Run, command: str = "") -> list[Verdict]:
        assert self.collector is not None
        return verdicts(run, command, self.collector.failures or self.unjudged)

    def report(self, run: Run, *, verbose: bool) -> str:
        heads = [it.evidence.get("heads_to_tell", 0) * 2 ** (LOOKS - 1) for it in run.records]
        heads += [2 * it.heads for it in run.records if it.outcome == UNDECIDED]
        more = [f"more heads were not exported: tiebreak export --heads {max(heads)} would tell, about"]
        return "\n".join([super().report(run, verbose=verbose), *(more if any(heads) else [])])


def words_of(folder: CallFolder, name: str, more: Sequence[str] = ()) -> list[str]:
    """Return the words of `tiebreak check` that judge a folder; of its cases those alone that further words name."""
    manifest = folder.manifest
    options = {key: value for key, value in manifest.options.items() if f"--{key}" not in more}
    declared = {"name": name, **({} if folder.has_gradients else {"backward": "none"})}
    declared |= export.declared(manifest.takes, manifest.layout)
    return [*export.run_words(folder.path, options, declared), *more]
