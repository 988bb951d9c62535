"""`tiebreak judge FOLDER`: the verdict on the outputs that some device wrote for the calls of `tiebreak export`."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from tiebreak.cases.verdicts import LOOKS, BiasVerdict, Interval, heads_to_tell
from tiebreak.matrix.questions.comparison import WithinError
from tiebreak.matrix.questions.log_sum_exp import judge_lse
from tiebreak.programs import check
from tiebreak.programs.files import backend, export
from tiebreak.programs.files.backend import CallFolder
from tiebreak.reports.cli import FAILED, PASSED, USAGE, Parser
from tiebreak.reports.names import first_few
from tiebreak.reports.records.record import CAPTURED, UNDECIDED, Estimate, Run
from tiebreak.reports.tables.run import counted
from tiebreak.reports.verdict import Finding, Verdict, verdicts

_SHOWN = 8  # faults of a folder
_NAMED = 3  # cells that lack heads


def main(arguments: Sequence[str]) -> int:
    """Run the verb `judge`; see `tiebreak.reports.cli.main`."""
    parser = Parser(
        prog="tiebreak judge",
        description="Judge the outputs that another program wrote for the calls in a folder of tiebreak export, as"
        " tiebreak check judges a kernel that it can call. It takes the options of tiebreak check, too.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, help="the folder that tiebreak export wrote, with outputs in it")
    parser.add_argument("--name", help="what tables and verdict call the kernel (default: the name of the folder)")
    own, rest = parser.parse_known_args(arguments)
    backend.opened.cache_clear()
    folder = backend.opened(str(own.folder))
    if faults := [*folder.faults()]:
        more = [f"{counted(len(faults) - _SHOWN, 'fault')} more"] if len(faults) > _SHOWN else []
        print("\n".join(f"tiebreak judge: {line}" for line in (*faults[:_SHOWN], *more)), file=sys.stderr)
        return USAGE
    asked = {word: value for word, value in folder.manifest.options.items() if f"--{word}" not in rest}
    declared = declared_of(folder, own.name or own.folder.resolve().name)
    options = check.parsed([*export.run_words(folder.path, asked, declared), *rest], "tiebreak judge")
    options.command = shlex.join(["tiebreak", "judge", *arguments])
    follower = _Judging(folder, [str(own.folder), *(["--name", own.name] if own.name else [])])
    code = check.checked(options, follower)
    return FAILED if code == PASSED and follower.unjudged else code


def _wrong_sums(folder: CallFolder) -> Iterator[str]:
    """Yield the calls of an engine's dump that have another log-sum-exp, which no cell judges.

    Of calls with a sink or a soft cap it is asked for NaN alone.
    """
    options = folder.manifest.options
    dumped = export.captured_inputs(folder.path, options) if options.get("captured") == "." else ()
    calls = {call.case: call for call in folder.manifest.calls}
    for case, inputs in dumped:
        lse, results = folder.outputs(calls[case.name])[0].get("lse"), WithinError(inputs.formats.output)
        if lse is not None and inputs.sink is None and not inputs.softcap:
            judge_lse(lse, inputs, folder.stated.get("declare", {}).get("lse", ""), results)
        elif lse is not None and lse.isnan().any():
            results.requirements["a number"] = "log-sum-exp has NaN"
        yield from (f"call {calls[case.name].id} ({case.name}): {why}" for why in results.requirements.values() if why)


class _Judging(check.Follower):
    """A follower of the run by which no answer that is an error, NaN or Inf passes."""

    def __init__(self, folder: CallFolder, words: Sequence[str]) -> None:
        super().__init__(sys.stderr)
        self._asked, self._words = folder.manifest.asked, words
        self.unjudged = [*folder.unjudged(), *_wrong_sums(folder)]

    def verdicts(self, run: Run, command: str = "") -> list[Verdict]:
        assert self.collector is not None
        every = verdicts(run, command, self.collector.failures or self.unjudged)
        return [replace(each, findings=tuple(map(self._shorter, each.findings))) for each in every]

    def _shorter(self, finding: Finding) -> Finding:
        """Return a finding; of the next step with the words of this command, which has the kernel's in the folder."""
        if finding.name != "next":
            return finding
        command = shlex.join(["tiebreak", "judge", *self._words, "-v", "--cases", *finding.cases])
        return replace(finding, text=f"judge {finding.cases[0]} alone: {command}")

    def report(self, run: Run, *, verbose: bool) -> str:
        return "\n".join([super().report(run, verbose=verbose), *self._more_heads(run)])

    def _more_heads(self, run: Run) -> Iterator[str]:
        """Yield for which cells too few heads were exported, and the command that exports enough for all of them."""
        heads = dict[str, int]()
        for it in run.records:
            near, bias = it.verdict == BiasVerdict.UNDECIDED.value, it.measures.get("bias")
            if (near or it.outcome == UNDECIDED) and not {CAPTURED, "heads_to_tell"} & it.evidence.keys():
                heads[it.case] = 2 * it.heads
                if near and isinstance(bias, Estimate) and bias.mean is not None and bias.half_width is not None:
                    known = Interval(bias.mean, bias.half_width)
                    heads[it.case] = heads_to_tell(known, it.heads * 2 ** (LOOKS - 1))  # in a single look
        if heads:
            most = str(max(heads.values()))
            words = [x for name, x in {**self._asked, "heads": most}.items() for x in (f"--{name}", x) if x]
            cells = first_few([f"{case} {count}" for case, count in heads.items()], _NAMED)
            yield f"heads that would tell, about: {cells}: {shlex.join(['tiebreak', 'export', 'NEW', *words])}"


def declared_of(folder: CallFolder, name: str) -> dict[str, str]:
    """Return what is declared of the kernel whose answers a folder has, by word."""
    manifest, backward = folder.manifest, {} if folder.has_gradients else {"backward": "none"}
    declared = {**folder.stated.get("declare", {}), "name": name, **backward}
    return declared | export.declared(manifest.takes, manifest.layout)
