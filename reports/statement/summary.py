"""The summary of a statement: one page, as Markdown and as HTML."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from tiebreak.reports.names import first_few
from tiebreak.reports.page.document import document
from tiebreak.reports.records.order import grouped
from tiebreak.reports.records.record import BIASED, FELL, HELD, NONFINITE, SKIPPED, Record, Run
from tiebreak.reports.records.store import one_line
from tiebreak.reports.statement.folder import Profile, Statement, is_users, waived
from tiebreak.reports.tables import grids
from tiebreak.reports.tables import run as tables
from tiebreak.reports.tables.grids import Grid, Part
from tiebreak.reports.tables.marks import plain_text
from tiebreak.reports.tables.run import counted

_LISTED = 20  # cells of a list that the page has; the records have them all
_NAMED = 3  # inputs of a kernel that the page names
_SHOWN = 16  # digits of a digest
_STYLE = (
    "body{font:1rem/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;display:block;overflow-x:auto}"
    "th,td{border:1px solid #8c8c8c;padding:.2rem .5rem;text-align:left;overflow-wrap:anywhere}"
    ":root{color-scheme:light dark}"
)


def result(records: Iterable[Record]) -> str:
    """Return `held` where nothing fell and nothing is inconclusive but what is waived, else `fell`."""
    return FELL if any(record.fails for record in records) else HELD


def counts(records: Sequence[Record]) -> str:
    """Return how many cells there are of each outcome, or waived."""
    return tables.counts(records, "waived")


def pages(statement: Statement, runs: Sequence[Run], profile: Profile) -> tuple[str, str]:
    """Return the page as Markdown, and as HTML that needs no script and no network.

    Args:
        statement: what is handed in.
        runs: of its files.
        profile: that it is held to.
    """
    records = waived(runs, statement.waivers)
    where = ", ".join(sorted({record.backend for record in records}))
    title = one_line(f"tiebreak statement, profile {statement.profile}, on {where}: {result(records)}")
    sections = _sections(records, statement, runs, profile)
    lines = [grids.text([f"# {title}", f"{counts(records)}."], "github")]
    body = [f"<h1>{escape(title)}</h1>", grids.html([f"{counts(records)}."])]
    for heading, parts in sections.items():
        lines += [f"## {heading}", grids.text(parts, "github")]
        body += [f"<h2>{escape(heading)}</h2>", grids.html(parts)]
    return "\n\n".join(lines) + "\n", document(title, _STYLE, "\n".join(body))


def _sections(
    records: Sequence[Record], statement: Statement, runs: Sequence[Run], profile: Profile
) -> Mapping[str, Sequence[Part]]:
    fell = [(record.id, "; ".join(record.reasons)) for record in records if record.fails]
    covered = [(record.id, record.excused or "") for record in records if record.excused is not None]
    waivers = [(waiver.cells, waiver.check, waiver.reason, str(waiver.expires)) for waiver in statement.waivers]
    return {
        "Platform": [_grid(("what", "is"), _platform(statement, runs, profile))],
        "Fell, without a waiver": _listed(("cell", "why"), fell),
        "Waived": _listed(("cell", "reason"), covered),
        "Waivers": [_grid(("cells", "check", "reason", "last day"), waivers)] if waivers else ["None."],
        "Biased or NaN": [
            "Of the inputs on which rounding is known to fail: O biased beyond 0.05 ulp (99.9 % confidence), NaN or"
            " Inf.",
            _grid(("backend", "kernel", "inputs", "such as"), _biased(records, runs)),
        ],
    }


def _grid(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> Grid:
    """Return a table without control characters, which a file may carry in its names."""
    return Grid(headers, [list(map(one_line, row)) for row in rows])


def _listed(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Sequence[Part]:
    if not rows:
        return ["None."]
    more = f", of which {_LISTED} are shown" if len(rows) > _LISTED else ""
    return [f"{counted(len(rows), 'cell')}{more}.", _grid(headers, rows[:_LISTED])]


def _platform(statement: Statement, runs: Sequence[Run], profile: Profile) -> Iterator[tuple[str, str]]:
    yield "profile", f"{profile.name} ({profile.about}), {statement.profile_hash[:_SHOWN]}"
    records = [record for run in runs for record in run.records]
    for backend, own in sorted(grouped(records, lambda record: record.backend).items()):
        brought = {record.kernel: is_users(record) for record in own}
        suite = sorted(brought.keys() & profile.suite.get(backend, {}).keys())
        names = [f"{name} (given by --kernel)" if brought[name] else name for name in sorted(brought.keys() - {*suite})]
        suites = [f"{counted(len(suite), 'kernel')} of the suite"] if suite else []
        yield f"on {backend}", ", ".join([*suites, *names])
    for name, value in runs[0].platform.items():
        if value is not None and value != [] and name != "fingerprint":
            yield name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    fingerprints = {name: probes for run in runs for name, probes in run.platform.get("fingerprint", {}).items()}
    for backend, probes in fingerprints.items():
        yield f"fingerprint of {backend}", ", ".join(f"{name} {value}" for name, value in probes.items())
    for file, run in zip(statement.files, runs, strict=True):
        yield file.name, f"{counted(len(run.records), 'cell')}, SHA-256 {file.sha256}"


def _biased(records: Sequence[Record], runs: Sequence[Run]) -> Iterator[tuple[str, ...]]:
    """Yield a row a kernel that failure inputs were run with: of how many it is biased, or has NaN, on which."""
    failure = {name for run in runs for name, about in run.cases.items() if about.failure}
    ran = (record for record in records if record.case in failure and record.outcome != SKIPPED)
    for (backend, kernel), asked in grouped(ran, lambda record: (record.backend, record.kernel)).items():
        failing = [record for record in asked if record.verdict in (BIASED, NONFINITE)]
        texts = [f"{record.case} {plain_text(record)}" for record in failing]
        yield backend, kernel, f"{len(failing)} of {len(asked)}", first_few(texts, _NAMED)
