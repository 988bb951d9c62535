"""`tiebreak page FILE... -o DIR`: one HTML file that needs no network, to look at runs."""

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from tiebreak.reports import store, tables
from tiebreak.reports.cli import HELD, Parser
from tiebreak.reports.comparison import platform_labels
from tiebreak.reports.figures import Figure, figures
from tiebreak.reports.records import Record, Run
from tiebreak.reports.svg import draw
from tiebreak.reports.training import training_grids, training_legend

_HERE = Path(__file__).parent
_DIGITS = 6  # significant ones of a number on the page: the files have them all
_SCALE = 0.35  # ulp at which the colours of the heat map end
_KEY = (
    ("background:#05488a;color:#fff", "-0.35", "toward zero"),
    ("background:#fff;color:#000;border:1px solid #b3b3b3", "0", "fair"),
    ("background:#a63603;color:#fff", "+0.35", "away from zero"),
    ("color:#4d4d4d;font-style:italic", "+1.73", "no verdict: the sum cancels, and an error in ulps is of any size"),
    ("background:#333;color:#fff", "NaN", "NaN or Inf where the reference is finite"),
    ("outline:2px solid #000;outline-offset:-2px;font-weight:700", "+0.23!", "the cell fell"),
    ("outline:2px dotted #000;outline-offset:-2px;font-weight:700", "+0.03?", "not known yet"),
    ("border:1px dashed #b3b3b3;color:#4d4d4d", "skip", "skipped or missing: no pass"),
    ("background:#000;color:#fff", "crash", "crashed or timed out"),
)


def main(arguments: Sequence[str]) -> int:
    """The verb `page`; see `tiebreak.reports.cli.main`."""
    parser = Parser(prog="tiebreak page", description="One HTML file with heat maps and figures.")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="records of runs")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="folder for index.html")
    parser.add_argument("--figures", action="store_true", help="also every figure as SVG and PNG (needs matplotlib)")
    options = parser.parse_args(arguments)
    runs = store.read_all(options.files)
    labels = platform_labels(runs, options.files)
    found = figures(runs, labels)
    path = options.output / "index.html"
    store.write_text(page(runs, labels, found), path)
    print(f"page: {path}")
    if options.figures:
        from tiebreak.reports import plots

        print("\n".join(f"figure: {file}" for file in plots.save(found, runs, labels, options.output / "figures")))
    return HELD


def page(runs: Sequence[Run], labels: Sequence[str], found: Sequence[Figure]) -> str:
    """The page as HTML. Every string of the records is escaped or is data that the script shows as text.

    Args:
        runs: what to show.
        labels: of their platforms.
        found: the figures.

    Returns:
        The whole file.
    """
    style, script = ((_HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
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
{_platforms(runs, labels)}
<h2 id="heat">Bias by kernel and case</h2>
<p>Bias of O in ulps. Hover over a cell for all its numbers, or find it in the table of all cells.</p>
{_key()}
<noscript><p>The maps and the table need JavaScript; the figures do not.</p></noscript>
<div id="maps"></div>
<div id="tip" role="tooltip" hidden></div>
{_figures(found)}
{_training(runs, labels)}
<h2 id="all">All cells but the training runs</h2>
{_TABLE}
<script type="application/json" id="data">{_data(runs, labels)}</script>
<script>{script}</script>
</body>
</html>
"""


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


def _training(runs: Sequence[Run], labels: Sequence[str]) -> str:
    """A table a platform and backend of the short training runs."""
    parts = []
    for run, label in zip(runs, labels, strict=True):
        for grid in training_grids(run.records):
            head = "".join(
                f'<th scope="col">{escape(text)}</th>' for text in ("kernel", *map(grid.heading, grid.cases))
            )
            rows = []
            for kernel in grid.kernels:
                cells = "".join(f"<td>{escape(grid.text(kernel, case))}</td>" for case in grid.cases)
                rows.append(f'<tr><th scope="row">{escape(kernel)}</th>{cells}</tr>')
            caption = f"<caption>{escape(label)}: {escape(grid.backend)}</caption>"
            head = f"<thead><tr>{head}</tr></thead>"
            parts.append(f'<table class="trained">{caption}{head}<tbody>{"".join(rows)}</tbody></table>')
    if not parts:
        return ""
    about = escape(training_legend([record for run in runs for record in run.records])).replace("\n", "<br>")
    return "\n".join(['<h2 id="training">Short training runs</h2>', f"<p>{about}</p>", '<div class="wide">', *parts,
                      "</div>"])  # fmt: skip


def _data(runs: Sequence[Run], labels: Sequence[str]) -> str:
    """The cells as JSON that can stand inside a script element; each string is there once."""
    strings: dict[str, int] = {}

    def number(text: str) -> int:
        return strings.setdefault(text, len(strings))

    cells = []
    for run, label in zip(runs, labels, strict=True):
        platform = number(label)
        for one in run.records:
            if one.trained:
                continue
            names = (one.backend, one.format, one.kernel, one.case, one.outcome, one.verdict or "")
            cells.append([platform, *map(number, names), number("; ".join(one.reasons)), *_numbers(one)])
    plain = {"strings": list(strings), "scale": _SCALE, "cells": cells}
    text = json.dumps(plain, separators=(",", ":"), allow_nan=False)
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def _numbers(record: Record) -> list[Any]:
    measures = record.measures
    if measures is None:
        return [None] * 7
    bias, delta = measures.bias, measures.delta_bias
    found = (bias.mean, bias.half_width, measures.rms_ulps, measures.max_ulps, measures.nonfinite, delta.mean)
    return [None if value is None else float(f"{value:.{_DIGITS}g}") for value in (*found, measures.gain)]
