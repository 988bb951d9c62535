"""The summary of a statement: one page, written once and rendered as Markdown and as HTML."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from tiebreak.reports.names import first_few
from tiebreak.reports.page.document import document
from tiebreak.reports.records.order import grouped
from tiebreak.reports.records.record import BIASED, FELL, HELD, NONFINITE, OUTCOMES, SKIPPED, Record, Run
from tiebreak.reports.records.store import one_line
from tiebreak.reports.statement.folder import Profile, Statement, is_users, waived
from tiebreak.reports.tables.grids import grid_text
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


@dataclass(frozen=True)
class _Part:
    """A heading with what stands below it."""

    heading: str
    text: str = ""
    headers: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def result(records: Iterable[Record]) -> str:
    """Return `held` where nothing fell and nothing is inconclusive but what is waived, else `fell`."""
    return FELL if any(record.fails for record in records) else HELD


def counts(records: Sequence[Record]) -> str:
    """Return how many cells there are of each outcome; those that are waived count as waived alone."""
    found = Counter("waived" if record.excused is not None else record.outcome for record in records)
    told = (f"{found[name]} {name.replace('_', ' ')}" for name in (*OUTCOMES, "waived") if found[name])
    return f"{counted(len(records), 'cell')}: {', '.join(told)}"


def markdown(statement: Statement, runs: Sequence[Run], profile: Profile) -> str:
    """The page as Markdown, of a statement, the runs of its files and the profile that it is held to."""
    lines = [f"# {_escaped(_title(statement, runs))}"]
    for part in _parts(statement, runs, profile):
        lines += [f"## {part.heading}"] if part.heading else []
        lines += [_escaped(part.text)] if part.text else []
        lines += [grid_text(part.rows, part.headers, "github")] if part.rows else []
    return "\n\n".join(lines) + "\n"


def html(statement: Statement, runs: Sequence[Run], profile: Profile) -> str:
    """The page as HTML that needs no script and no network; see `markdown`."""
    title = _title(statement, runs)
    body = [f"<h1>{escape(title)}</h1>"]
    for part in _parts(statement, runs, profile):
        body += [f"<h2>{escape(part.heading)}</h2>"] if part.heading else []
        body += [f"<p>{escape(part.text)}</p>"] if part.text else []
        if part.rows:
            heads = "".join(f'<th scope="col">{escape(text)}</th>' for text in part.headers)
            rows = "\n".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in part.rows)
            body.append(f"<table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>")
    return document(title, _STYLE, "\n".join(body))


def _escaped(text: str) -> str:
    return "".join(f"\\{character}" if character in "<>&*_`[]" else character for character in text)


def _title(statement: Statement, runs: Sequence[Run]) -> str:
    records = waived(runs, statement.waivers)
    where = ", ".join(sorted({record.backend for record in records}))
    return f"tiebreak statement, profile {statement.profile}, on {one_line(where)}: {result(records)}"


def _parts(statement: Statement, runs: Sequence[Run], profile: Profile) -> Iterator[_Part]:
    records = waived(runs, statement.waivers)
    yield _Part("", f"{counts(records)}.")
    yield _Part("Platform", "", ("what", "is"), _clean(_platform(statement, runs, profile)))
    yield _listed("Fell, without a waiver", ("cell", "why"), [_cell(record) for record in records if record.fails])
    covered = [(record.id, record.excused) for record in records if record.excused is not None]
    yield _listed("Waived", ("cell", "reason"), covered)
    rows = [(waiver.cells, waiver.check, waiver.reason, str(waiver.expires)) for waiver in statement.waivers]
    yield _Part("Waivers", "" if rows else "None.", ("cells", "check", "reason", "last day"), _clean(rows))
    yield _Part(
        "Biased or NaN",
        "Of the inputs on which rounding is known to fail: O biased beyond 0.05 ulp (99.9 % confidence), NaN or Inf.",
        ("backend", "kernel", "inputs", "such as"),
        _clean(_biased(records, runs)),
    )


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


def _cell(record: Record) -> tuple[str, str]:
    return record.id, "; ".join(record.reasons)


def _listed(heading: str, headers: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> _Part:
    if not rows:
        return _Part(heading, "None.")
    more = len(rows) - _LISTED
    text = counted(len(rows), "cell") + (f", of which {_LISTED} are shown." if more > 0 else ".")
    return _Part(heading, text, headers, _clean(rows[:_LISTED]))


def _clean(rows: Iterable[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """Without control characters, which a file may carry in its names."""
    return tuple(tuple(map(one_line, row)) for row in rows)


def _biased(records: Sequence[Record], runs: Sequence[Run]) -> Iterator[tuple[str, ...]]:
    """A row a backend and kernel that failure inputs were run with: of how many it is biased, or has NaN, on which."""
    failure = {name for run in runs for name, about in run.cases.items() if about.failure}
    ran = (record for record in records if record.case in failure and record.outcome != SKIPPED)
    for (backend, kernel), asked in grouped(ran, lambda record: (record.backend, record.kernel)).items():
        failing = [record for record in asked if record.verdict in (BIASED, NONFINITE)]
        texts = [f"{record.case} {plain_text(record)}" for record in failing]
        yield backend, kernel, f"{len(failing)} of {len(asked)}", first_few(texts, _NAMED)
