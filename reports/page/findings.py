"""Runs in sentences: the verdicts on their kernels, the worst first, and the differences between platforms."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from tiebreak.reports.names import first_few
from tiebreak.reports.records.order import grouped, kernel_places
from tiebreak.reports.records.record import BIASED, FAILED, SKIPPED, Run
from tiebreak.reports.tables.compare import Agreement, Comparison, compare, summary
from tiebreak.reports.tables.run import counted
from tiebreak.reports.verdict import FAILING, FAIR, TIED, Verdict, verdicts

_NAMED = 6  # names of a list that are said; the map has them all
_ALONE = 3  # kernels of one severity that have a separate sentence

_Judged = tuple[int, Verdict]  # with the number of the platform


def findings(runs: Sequence[Run], labels: Sequence[str]) -> Iterator[str]:
    """Yield the findings of runs, the most urgent first, with names between backticks.

    In order: interrupted runs; for runs of users' kernels, all that their verdicts say below the first line; for
    others, the kernels, the worst first; differences between the platforms; cells that should have run.
    """
    for run, label in zip(runs, labels, strict=True):
        if not run.complete:
            left = len(run.not_run) + len(run.running)
            more = f": {counted(left, 'cell')} did not finish" if left else ""
            yield f"The run on {_name(label)} was interrupted{more}."
    judged = [(number, verdict) for number, run in enumerate(runs, 1) for verdict in verdicts(run)]
    if all(run.has_users_kernel for run in runs):
        yield from _by_platform(_of_users(judged), len(runs))
    else:
        yield from _kernels(judged, kernel_places(runs), len(runs))
    if len(runs) > 1:
        yield from _different(compare(runs, labels))
    assumed = {name: how for run in runs for name, how in run.platform.get("assumed", {}).items()}
    yield from (f"The backend {_name(name)} computed {how}." for name, how in assumed.items())
    missing = {name: why for run in runs for name, why in run.unavailable.items()}
    yield from (f"The backend {_name(name)} did not run: {why}." for name, why in missing.items())


def _of_users(judged: Sequence[_Judged]) -> Iterator[tuple[int, str]]:
    """Yield the findings of every verdict; of several kernels with their names."""
    several = len({(verdict.kernel, verdict.backend) for _, verdict in judged}) > 1
    for number, verdict in judged:
        prefix = f"{_name(verdict.kernel)} on {verdict.backend}, " if several else ""
        yield from ((number, f"{prefix}{finding.name}: {finding.text}") for finding in verdict.findings)


def _kernels(judged: Sequence[_Judged], places: Mapping[str, int], platforms: int) -> Iterator[str]:
    """Yield the kernels of each severity, the worst first; those named for a plan, to compare with, last."""
    ran = [pair for pair in judged if pair[1].cells.keys() - {SKIPPED}]
    ran.sort(key=lambda pair: ("@" in pair[1].kernel, -pair[1].biased - pair[1].nonfinite, places[pair[1].kernel]))
    if not ran:
        yield "No cell ran: all were skipped."
    by_severity = grouped(ran, lambda pair: _severity(pair[1]))
    for severity in (*FAILING, FAILED, BIASED, TIED):
        alike = by_severity.get(severity, [])
        kernels = list(dict.fromkeys(verdict.kernel for _, verdict in alike))
        sentences = ((number, _sentence(verdict)) for number, verdict in alike if verdict.kernel in kernels[:_ALONE])
        yield from (f"{text}." for text in _by_platform(sentences, platforms))
        if rest := list(map(_name, kernels[_ALONE:])):
            yield f"{severity.capitalize()}, too: {first_few(rest, _NAMED)}."
    elsewhere = {(verdict.kernel, verdict.backend) for _, verdict in ran if _severity(verdict) != FAIR}
    fair = dict.fromkeys((verdict.kernel, verdict.backend) for _, verdict in by_severity.get(FAIR, []))
    backends = grouped((pair for pair in fair if pair not in elsewhere), lambda pair: pair[1])
    if texts := [f"{first_few([_name(name) for name, _ in named], _NAMED)} on {at}" for at, named in backends.items()]:
        yield f"Fair, unbiased on every failure input: {'; '.join(texts)}."
    if silent := list(dict.fromkeys(_name(verdict.kernel) for _, verdict in by_severity.get(None, []))):
        yield f"No failure input was run, and nothing is known of the bias, of {first_few(silent, _NAMED)}."


def _severity(verdict: Verdict) -> str | None:
    """Return a verdict's severity, or that the kernel failed for another reason than the worst that there is to say."""
    return FAILED if verdict.failed and verdict.severity not in FAILING else verdict.severity


def _sentence(verdict: Verdict) -> str:
    rounding = [finding.text for finding in verdict.findings if finding.name == "rounding"]
    return f"{_name(verdict.kernel)} on {verdict.backend}: {'; '.join([verdict.statement, *rounding])}"


def _by_platform(texts: Iterable[tuple[int, str]], platforms: int) -> Iterator[str]:
    """Yield each text once, with the numbers of its platforms unless it is told of all."""
    for text, alike in grouped(texts, lambda pair: pair[1]).items():
        numbers = ", ".join(str(number) for number, _ in alike)
        yield text if len(alike) == platforms else f"{text} (platform {numbers})"


def _different(comparison: Comparison) -> Iterator[str]:
    differing = [row.record for row in comparison.rows if row.agreement is Agreement.DISAGREE]
    kernels = grouped(differing, lambda record: f"{_name(record.kernel)} on {record.backend}")
    yield f"{summary(comparison)}."
    if texts := [f"{name} ({first_few([_name(record.case) for record in here], 3)})" for name, here in kernels.items()]:
        yield f"Different in verdict or outcome: {first_few(texts, _NAMED)}."


def _name(text: str) -> str:
    """Return a name between backticks, which no name may end early."""
    return f"`{text.replace('`', chr(39))}`"
