"""The tables of the page that need no script: audits, sweeps, and words."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from tiebreak.reports.audit.record import Audits
from tiebreak.reports.audit.tables import HEADERS, LEGEND, AuditGrid, Row, about, audit_grids
from tiebreak.reports.records.record import Run
from tiebreak.reports.sweeps.store import Sweep
from tiebreak.reports.sweeps.tables import grids, legend


def audits(found: Mapping[str, Audits]) -> str:
    """A table a kernel, a row a target, of every audit; empty without any.

    Args:
        found: by what tells them apart.

    Returns:
        HTML.
    """
    if not found:
        return ""
    parts = ['<h2 id="audit">Audit: what GPUs that need not be here would round</h2>']
    for number, (label, one) in enumerate(found.items()):
        parts += [f"<h3>{escape(label)}</h3>"] if len(found) > 1 else []
        parts.append(f"<p>{escape(about(one))}</p>")
        parts += [_audited(grid, opened=number == at == 0) for at, grid in enumerate(audit_grids(one))]
    return "\n".join([*parts, lines(LEGEND)])


def sweep(label: str, found: Sweep) -> str:
    """A sweep's tables, of rates and of losses, with what they say.

    Args:
        label: what tells it from others.
        found: as far as it is done.

    Returns:
        HTML.
    """
    parts = [f'<h2 class="sweep">Sweep {escape(label)}: how often training diverged</h2>']
    for title, (headers, *rows) in zip(
        ("runs that diverged", "loss of the others, in nats"), grids(found), strict=True
    ):
        body = [
            f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(text)}</td>" for text in rest)}</tr>'
            for first, *rest in rows
        ]
        table = _table("swept", headers, body, f"<caption>{escape(title)}</caption>")
        parts.append(f'<div class="wide" tabindex="0" role="region" aria-label="{escape(title)}">{table}</div>')
    return "\n".join([*parts, lines(legend(found))])


def words(runs: Sequence[Run]) -> str:
    """What the runs' measures, checks and cases are, as their files say; empty where they say nothing.

    Args:
        runs: what to explain.

    Returns:
        HTML: a folded list of each kind.
    """
    parts = []
    for name in ("measures", "checks", "cases"):
        found = {key: about for run in runs for key, about in getattr(run, name).items() if about.about}
        items = "".join(f"<dt>{escape(key)}</dt><dd>{escape(about.about)}</dd>" for key, about in found.items())
        if items:
            parts.append(f'<details id="vocabulary-{name}"><summary>{name}</summary><dl>{items}</dl></details>')
    if not parts:
        return ""
    note = "<p>Plans, shift rules and outcomes, with the field's own terms: docs/words.md in the suite's folder.</p>"
    return "\n".join(['<h2 id="vocabulary">Words</h2>', *parts, note])


def _audited(grid: AuditGrid, *, opened: bool) -> str:
    """One kernel's table. A page has a dozen, most of them alike: all but one are folded."""
    name = escape(grid.kernel)
    table = _table("audited", HEADERS, [_target(row) for row in grid.rows])
    wide = f'<div class="wide" tabindex="0" role="region" aria-label="audit, {name}">{table}</div>'
    return f"<details{' open' if opened else ''}><summary>{name}</summary>{wide}</details>"


def _target(row: Row) -> str:
    cells = "".join(f"<td>{'<br>'.join(map(escape, cell))}</td>" for cell in row.cells)
    if row.skipped is not None:
        cells = f'<td class="skipped" colspan="{len(HEADERS) - 1}">skipped: {escape(row.skipped)}</td>'
    head = f"<div>{escape(row.target)}<br><small>{escape(row.cards)}</small></div>"
    return f'<tr><th scope="row">{head}</th>{cells}</tr>'


def lines(text: str) -> str:
    """A paragraph of a text, line by line."""
    return f"<p>{escape(text).replace(chr(10), '<br>')}</p>"


def _table(kind: str, heads: Iterable[str], rows: Iterable[str], caption: str = "") -> str:
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    return f'<table class="{kind}">{caption}<thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
