"""`tiebreak page FILE... -o DIR`: one HTML file that needs no network, to look at runs and audits."""

import base64
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from html import escape
from pathlib import Path
from types import MappingProxyType

from tiebreak.reports import files, marks, page_tables, store, tables
from tiebreak.reports.audit import Audits
from tiebreak.reports.cli import HELD, Parser
from tiebreak.reports.comparison import distinct, platform_labels
from tiebreak.reports.errors import UsageError
from tiebreak.reports.figures import Figure, figures
from tiebreak.reports.records import Estimate, MeasureRecord, Record, Run, number_of
from tiebreak.reports.svg import draw
from tiebreak.reports.training import TRAINING

_HERE = Path(__file__).parent
_DIGITS = 6  # significant ones of a number on the page: the files have them all
_SCALE = 0.35  # ulp at which the colours of the heat map end
_KEY = (
    ("background:#05488a;color:#fff", "-0.35", "toward zero"),
    ("background:#fff;color:#000;border:1px solid #b3b3b3", "0", "fair"),
    ("background:#a63603;color:#fff", "+0.35", "away from zero"),
    ("color:#4d4d4d;font-style:italic", "+1.73", "no verdict: the sum cancels, and an error in ulps is of any size"),
    ("background:#333;color:#fff", "NaN", "NaN or Inf where the reference is finite"),
    ("background:#fff;color:#000", "-0.02 ·", "held: as claimed or predicted; no mark: measured, nothing was asked"),
    ("outline:2px solid #000;outline-offset:-2px;font-weight:700", "+0.23!", "the cell fell; in parentheses: excused"),
    ("outline:2px dotted #000;outline-offset:-2px;font-weight:700", "+0.03?", "not known yet"),
    ("border:1px dashed #b3b3b3;color:#4d4d4d", "skip", "skipped or missing: no pass"),
    ("background:#000;color:#fff", "crash", "crashed or timed out"),
)


def main(arguments: Sequence[str]) -> int:
    """The verb `page`; see `tiebreak.reports.cli.main`."""
    parser = Parser(prog="tiebreak page", description="One HTML file of runs and audits.")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="records of runs, audits")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="folder for index.html")
    parser.add_argument("--figures", action="store_true", help="also every figure as SVG and PNG (needs matplotlib)")
    options = parser.parse_args(arguments)
    by_file, audited = files.read_all(options.files)
    if options.figures and not by_file:
        raise UsageError("--figures: an audit has none; name records of a run, too")
    runs = list(by_file.values())
    labels = platform_labels(runs, list(by_file))
    found = figures(runs, labels)
    path = options.output / "index.html"
    store.write_text(page(runs, labels, found, _by_compiler(audited)), path)
    print(f"page: {path}")
    if options.figures:
        from tiebreak.reports import plots

        print("\n".join(f"figure: {file}" for file in plots.save(found, runs, labels, options.output / "figures")))
    return HELD


def _by_compiler(audited: Mapping[Path, Audits]) -> dict[str, Audits]:
    labels = distinct([f"Triton {one.triton}" for one in audited.values()], list(audited))
    return dict(zip(labels, audited.values(), strict=True))


def page(
    runs: Sequence[Run],
    labels: Sequence[str],
    found: Sequence[Figure],
    audits: Mapping[str, Audits] = MappingProxyType({}),
) -> str:
    """The page as HTML. Every string of the records is escaped or is data that the script shows as text.

    Args:
        runs: what to show.
        labels: of their platforms.
        found: the figures.
        audits: of compiled kernels, by what tells them apart.

    Returns:
        The whole file.
    """
    style, script = ((_HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    sections = [_figures(found), page_tables.training(runs, labels), page_tables.audits(audits)]
    if runs:
        cells = [_cells(runs, labels), page_tables.words(runs), f"<script>{script}</script>"]
        sections = [_platforms(runs, labels), _heat(runs), *sections, *cells]
    body = "\n".join(section for section in sections if section)
    # The policy lets this page's own script run and nothing else, whatever a record smuggles in.
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src '{_hash(script)}'"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>tiebreak</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<h1>tiebreak: does this kernel round fairly?</h1>
{body}
</body>
</html>
"""


def _heat(runs: Sequence[Run]) -> str:
    kinds = {name: about for run in reversed(runs) for name, about in run.experiments.items() if name != TRAINING}
    legends = [f"<p>{escape(name)}: {escape(about.legend or about.about)}</p>" for name, about in kinds.items()]
    return f"""<h2 id="heat">Kernels and cases</h2>
{"".join(legends)}
<p>Hover over a cell for its numbers, or find it in the table of all cells.</p>
{_key()}
<noscript><p>The maps and the table of all cells need JavaScript; the rest does not.</p></noscript>
<div id="maps"></div>
<div id="tip" role="tooltip" hidden></div>"""


def _cells(runs: Sequence[Run], labels: Sequence[str]) -> str:
    return f"""<h2 id="all">All cells but the training runs</h2>
{_TABLE}
<script type="application/json" id="data">{_data(runs, labels)}</script>"""


_TABLE = """<form>
<label>Words in backend, kernel, case, format, verdict<input id="words" type="search"></label>
<label>Platform<select id="platform"><option value="">all</option></select></label>
<label>Outcome<select id="outcome"><option value="">all</option></select></label>
</form>
<p id="count" role="status"></p>
<div class="wide" tabindex="0" role="region" aria-label="all cells">
<table id="cells"><thead><tr></tr></thead><tbody></tbody></table>
</div>
<button id="more" type="button">Show more</button>"""


def _hash(script: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def _platforms(runs: Sequence[Run], labels: Sequence[str]) -> str:
    items = []
    for run, label in zip(runs, labels, strict=True):
        software = ", ".join(f"{name} {run.platform[name]}" for name in ("torch", "os") if run.platform.get(name))
        note = "" if run.complete else ". Interrupted: these are the cells that were done"
        items.append(f"<li><b>{escape(label)}</b> ({escape(software)}): {tables.counts(run.records)}{note}</li>")
    return "\n".join(["<ul>", *items, "</ul>"])


def _key() -> str:
    items = [f'<li><span style="{style}">{escape(text)}</span> {escape(words)}</li>' for style, text, words in _KEY]
    return "\n".join(['<ul class="key">', *items, "</ul>"])


def _figures(found: Sequence[Figure]) -> str:
    if not found:
        return ""
    parts = [
        f"<figure>\n<figcaption><b>{escape(one.title)}</b>. {escape(one.note)}</figcaption>\n{draw(one)}\n</figure>"
        for one in found
    ]
    return "\n".join(['<h2 id="figures">Where it comes from</h2>', '<div class="figures">', *parts, "</div>"])


def _data(runs: Sequence[Run], labels: Sequence[str]) -> str:
    """The cells as JSON that can stand inside a script element; each string is there once."""
    strings: dict[str, int] = {}

    def number(text: str) -> int:
        return strings.setdefault(text, len(strings))

    heats = {kind: about.headline for run in reversed(runs) for kind, about in run.experiments.items()}
    measures = _columns(runs, heats.values())
    cells = []
    for run, label in zip(runs, labels, strict=True):
        platform = number(label)
        for one in run.records:
            if one.experiment == TRAINING:
                continue
            names = (one.backend, one.format, one.kernel, one.case, one.outcome, one.verdict or "", one.experiment)
            told = ("; ".join(one.reasons), marks.plain_text(one), one.excused or "")
            numbers = (part for name, (_, estimated) in measures.items() for part in _parts(one, name, estimated))
            cells.append([platform, *map(number, names), *map(number, told), *map(_short, numbers)])
    described = [[name, about.unit, about.about, estimated] for name, (about, estimated) in measures.items()]
    plain = {"strings": list(strings), "scale": _SCALE, "measures": described, "heats": heats, "cells": cells}
    text = json.dumps(plain, separators=(",", ":"), allow_nan=False)
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def _columns(runs: Sequence[Run], coloured: Collection[str | None]) -> dict[str, tuple[MeasureRecord, bool]]:
    """The measures that the table of all cells has columns of, and whether they have intervals anywhere."""
    found = {name: about for run in reversed(runs) for name, about in run.measures.items()}
    records = [one for run in runs for one in run.records]
    return {
        name: (about, any(isinstance(one.measures.get(name), Estimate) for one in records))
        for name, about in found.items()
        if about.column or name in coloured
    }


def _parts(record: Record, name: str, estimated: bool) -> tuple[float | None, ...]:
    """The number of a measure, and, where some cell has one, the half width of its interval."""
    value = record.measures.get(name)
    if not estimated:
        return (number_of(value),)
    return number_of(value), value.half_width if isinstance(value, Estimate) else None


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{_DIGITS}g}")
