"""The tables of the page that need no script: audits, sweeps, and words."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from tiebreak.reports.audit.record import Audit, Audits
from tiebreak.reports.audit.tables import HEADERS, LEGEND, about, cells
from tiebreak.reports.records.order import grouped
from tiebreak.reports.records.record import Run
from tiebreak.reports.sweeps.store import Sweep
from tiebreak.reports.sweeps.tables import grids, legend


def audited(files: Mapping[str, Audits]) -> str:
    """Files of audits, by what tells them apart, as HTML: a table a kernel, a row a target; empty without any."""
    if not files:
        return ""
    parts = ['<h2 id="audit">Audit: what GPUs that need not be here would round</h2>']
    opened = " open"  # a page has a dozen tables, most of them alike: all but the first are folded
    for label, audits in files.items():
        parts += [f"<h3>{escape(label)}</h3>"] if len(files) > 1 else []
        parts.append(f"<p>{escape(about(audits))}</p>")
        for kernel, own in grouped(audits.audits, lambda audit: audit.kernel).items():
            table = _table("audited", f"audit, {kernel}", HEADERS, [_target(each, audits) for each in own])
            parts.append(f"<details{opened}><summary>{escape(kernel)}</summary>{table}</details>")
            opened = ""
    return "\n".join([*parts, lines(LEGEND)])


def swept(label: str, sweep: Sweep) -> str:
    """A sweep's tables, of rates and of losses, with what they say, as HTML; the label tells it from others."""
    parts = [f'<h2 class="sweep">Sweep {escape(label)}: how often training diverged</h2>']
    for title, (headers, *rows) in zip(
        ("runs that diverged", "loss of the others, in nats"), grids(sweep), strict=True
    ):
        body = [
            f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(text)}</td>" for text in rest)}</tr>'
            for first, *rest in rows
        ]
        parts.append(_table("swept", title, headers, body, f"<caption>{escape(title)}</caption>"))
    return "\n".join([*parts, lines(legend(sweep))])


def words(runs: Sequence[Run]) -> str:
    """What the runs' measures, checks and cases are, as their files say: folded lists; empty where they say nothing."""
    parts = []
    for name in ("measures", "checks", "cases"):
        known = {key: kind.about for run in runs for key, kind in getattr(run, name).items() if kind.about}
        items = "".join(f"<dt>{escape(key)}</dt><dd>{escape(text)}</dd>" for key, text in known.items())
        if items:
            parts.append(f'<details id="vocabulary-{name}"><summary>{name}</summary><dl>{items}</dl></details>')
    if not parts:
        return ""
    note = "<p>Plans and shift rules: tiebreak list plans. Outcomes, and the field's own terms: docs/words.md.</p>"
    return "\n".join(['<h2 id="vocabulary">Words</h2>', *parts, note])


def _target(audit: Audit, audits: Audits) -> str:
    texts = "".join(f"<td>{'<br>'.join(map(escape, cell))}</td>" for cell in cells(audit))
    if audit.skipped is not None:
        texts = f'<td class="skipped" colspan="{len(HEADERS) - 1}">skipped: {escape(audit.skipped)}</td>'
    head = f"<div>{escape(audit.target)}<br><small>{escape(audits.cards[audit.target])}</small></div>"
    return f'<tr><th scope="row">{head}</th>{texts}</tr>'


def lines(text: str) -> str:
    """A paragraph of a text, line by line."""
    return f"<p>{escape(text).replace(chr(10), '<br>')}</p>"


def _table(kind: str, label: str, heads: Iterable[str], rows: Iterable[str], caption: str = "") -> str:
    """A table in a box that scrolls where it is wider than the screen."""
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    table = f'<table class="{kind}">{caption}<thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    return f'<div class="wide" tabindex="0" role="region" aria-label="{escape(label)}">{table}</div>'
