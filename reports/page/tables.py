"""The tables of the page that need no script: audits, sweeps, and words."""

from collections.abc import Mapping, Sequence
from html import escape

from tiebreak.reports.audit.record import Audits
from tiebreak.reports.audit.tables import audit_tables
from tiebreak.reports.records.record import Run
from tiebreak.reports.sweeps.store import Sweep
from tiebreak.reports.sweeps.tables import sweep_tables
from tiebreak.reports.tables.grids import html


def audited(files: Mapping[str, Audits]) -> str:
    """Return files of audits, by what tells them apart, as HTML; empty without any."""
    if not files:
        return ""
    parts = ['<h2 id="audit">Audit: what GPUs that need not be here would round</h2>']
    for label, audits in files.items():
        parts += [f"<h3>{escape(label)}</h3>"] if len(files) > 1 else []
        parts.append(html(audit_tables(audits)))
    return "\n".join(parts)


def swept(label: str, sweep: Sweep) -> str:
    """Return a sweep's tables, with what they say, as HTML; the label tells it from others."""
    heading = f'<h2 class="sweep">Sweep {escape(label)}: how often training diverged</h2>'
    return f"{heading}\n{html(sweep_tables(sweep))}"


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
    note = "<p>Plans, shift rules and outcomes, with the field's own terms: docs/words.md in the suite's folder.</p>"
    return "\n".join(['<h2 id="vocabulary">Words</h2>', *parts, note])


def lines(text: str) -> str:
    """A paragraph of a text, line by line."""
    return f"<p>{escape(text).replace(chr(10), '<br>')}</p>"
