"""`tiebreak page FILE... -o DIR`: one HTML file that needs no network, to look at runs, audits and sweeps."""

import re
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import sha256
from html import escape
from pathlib import Path
from string import Template

from tiebreak.reports import files
from tiebreak.reports.cli import PASSED, Parser
from tiebreak.reports.errors import UsageError
from tiebreak.reports.page.data import page_data
from tiebreak.reports.page.figures import figures, mechanism, save_training
from tiebreak.reports.page.findings import findings
from tiebreak.reports.page.mechanism import drawing
from tiebreak.reports.page.svg import Figure, section
from tiebreak.reports.records import selection, store
from tiebreak.reports.records.order import grouped
from tiebreak.reports.records.record import Run
from tiebreak.reports.tables import run as tables
from tiebreak.reports.tables.compare import match_kernels, platform_labels
from tiebreak.reports.tables.grids import html
from tiebreak.reports.tables.training import pooled, training_grids, training_legend
from tiebreak.reports.verdict import SEVERITIES, verdicts

_HERE = Path(__file__).parent
_SCRIPTS = ("page.js", "page_map.js", "page_about.js")
_DIGEST = 8  # findings that are open at first


def main(arguments: Sequence[str]) -> int:
    """Run the verb `page`; see `tiebreak.reports.cli.main`."""
    parser = Parser(prog="tiebreak page", description="One HTML file of runs, pairs, audits and sweeps.")
    what = "records of runs, pairs (--json), audits, folders of sweeps"
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help=what)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder for index.html; FILE.svg: a figure of the short training runs over their seeds",
    )
    selection.add_match(parser)
    options = parser.parse_args(arguments)
    if options.output.is_file() or options.output.suffix == ".html":
        raise UsageError(f"-o {options.output}: name a folder; the page is index.html in it")
    read = files.read_all(options.files)
    by_file = {path: each for path, each in read.items() if isinstance(each, Run)}
    if options.output.suffix == ".svg":
        save_training(training_grids(pooled(by_file)), options.output)
        print(f"figure: {options.output}")
        return PASSED
    others = grouped((path for path in read if path not in by_file), lambda path: files.kind_of(read[path]))
    more = [kind.page({path: read[path] for path in paths}) for kind, paths in others.items()]
    runs = match_kernels(list(by_file.values())) if options.match and by_file else list(by_file.values())
    labels = platform_labels(runs, list(by_file))
    path = options.output / "index.html"
    store.write_text(page(runs, labels, figures(runs, labels), more), path)
    print(f"page: {path}")
    return PASSED


def page(
    runs: Sequence[Run],
    labels: Sequence[str],
    drawn: Sequence[Figure],
    others: Sequence[str] = (),
) -> str:
    """Return the page as HTML; `others` is that of files that are no records.

    Every string of the records is escaped, or is data that the script shows as text. `others` are HTML.
    """
    names = ("page.css", "page.html", *_SCRIPTS)
    style, template, *scripts = ((_HERE / name).read_text(encoding="utf-8") for name in names)
    more = [section(drawn, '<h2 id="figures">Where it comes from</h2>')] if drawn else []
    more += others
    if not runs:
        return _document(style, "\n".join([template.partition("\n")[0], *more]))
    kinds = {name: about for run in reversed(runs) for name, about in run.experiments.items() if not about.pooled}
    sides, script = mechanism(runs), "".join(scripts)
    body = Template(template).substitute(
        answers=_answers(runs, labels),
        failed=_fell(runs, labels),
        mechanism=f'<figure class="mechanism">{drawing(*sides)}</figure>' if sides is not None else "",
        findings=_findings(findings(runs, labels)),
        platforms=_platforms(runs, labels),
        legends="".join(f"<p>{escape(name)}: {escape(kind.legend or kind.about)}</p>" for name, kind in kinds.items()),
        pooled=_pooled(runs),
        more="\n".join(more),
        words=_words(runs),
        data=page_data(runs, labels),
        script=script,
    )
    return _document(style, body, script)


def _document(style: str, body: str, script: str = "") -> str:
    """Return the file. Its policy lets its own style and script in and nothing else, whatever a record smuggles in."""
    policy = f"default-src 'none'; img-src data:; style-src '{_hash(style)}'"
    policy += f"; script-src '{_hash(script)}'" if script else ""
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
{body}
</body>
</html>
"""


def _hash(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def _answers(runs: Sequence[Run], labels: Sequence[str]) -> str:
    """Return the answers to the page's title, with their platforms where they differ."""
    answers = list(map(_answer, runs))
    several = len(set(answers)) > 1
    named = [f"{label}: {text}" if several else text for label, text in zip(labels, answers, strict=True) if text]
    return html(dict.fromkeys(named))


def _answer(run: Run) -> str:
    """Return the verdicts on users' kernels; for others, how many have each."""
    judged = verdicts(run)
    if run.has_users_kernel:
        return "\n".join(verdict.headline for verdict in judged)
    severities = Counter(verdict.severity for verdict in judged if verdict.inputs)
    numbers = ", ".join(f"{severities[name]} {name}" for name in SEVERITIES if severities[name])
    return f"Of {tables.counted(severities.total(), 'kernel')}: {numbers}." if numbers else ""


def _fell(runs: Sequence[Run], labels: Sequence[str]) -> str:
    """Return the cells that do not pass, as the terminal has them; empty where all do."""
    items = []
    for run, label in zip(runs, labels, strict=True):
        for entry in tables.failures(run.records, str):
            head, *lines = map(escape, (f"{label}: {entry}" if len(runs) > 1 else entry).split("\n"))
            text = "".join(f"<code>{line}</code>" if "rerun" in line else f"<div>{line}</div>" for line in lines)
            items.append(f"<li><b>{head}</b>{text}</li>")
    return f'<h2 id="failed">What failed</h2>\n{_folded(items, "failed")}' if items else ""


def _folded(items: Sequence[str], kind: str) -> str:
    """Return items of a list, the first of them open."""
    first, rest = (items[:_DIGEST], items[_DIGEST:]) if len(items) > _DIGEST + 1 else (items, [])
    more = f'<details><summary>{len(rest)} more</summary><ul class="{kind}">{"".join(rest)}</ul></details>'
    return f'<ul class="{kind}">{"".join(first)}</ul>{more if rest else ""}'


def _findings(sentences: Iterable[str]) -> str:
    """Return the findings, the first of them open, with words between backticks as code; empty without any."""
    marked = (re.sub("`(.*?)`", r"<code>\1</code>", escape(line)) for line in sentences)
    items = [f"<li>{line}</li>" for line in marked]
    return f'<h2 id="findings">Findings</h2>\n{_folded(items, "findings")}' if items else ""


def _pooled(runs: Sequence[Run]) -> str:
    kinds = {name: run.experiments[name].about for run in runs for name in run.pooled}
    heading = f'<h2 id="pooled">Over seeds: {escape(", ".join(kinds.values()))}</h2>'
    parts = [heading, html([training_legend(runs)]), '<div id="pooled-map"></div>']
    return "\n".join(parts) if training_grids(runs) else ""


def _platforms(runs: Sequence[Run], labels: Sequence[str]) -> str:
    items = []
    for run, label in zip(runs, labels, strict=True):
        fields = {name: run.platform.get(name) for name in ("torch", "os", "commit")}
        fields |= {name: run.options.get(name) for name in ("seed", "heads")}
        number, dash, changed = str(fields["commit"] or "").partition("-")
        fields["commit"] = f"{number[:12]}{dash}{changed}"
        facts = escape(", ".join(f"{name} {value}" for name, value in fields.items() if value))
        note = "" if run.complete else ". Interrupted: these are the cells that were done"
        items.append(f"<li><b>{escape(label)}</b> ({facts}): {tables.counts(run.records)}{note}</li>")
    return "\n".join(['<h2>Platforms</h2>\n<ol id="platforms">', *items, "</ol>"])


def _words(runs: Sequence[Run]) -> str:
    """Return descriptions of the runs' measures, checks and cases, by their files: folded lists."""
    parts = ['<h2 id="vocabulary">Words</h2>']
    for name in ("measures", "checks", "cases"):
        descriptions = {key: kind.about for run in runs for key, kind in getattr(run, name).items() if kind.about}
        items = "".join(f"<dt>{escape(key)}</dt><dd>{escape(text)}</dd>" for key, text in descriptions.items())
        if items:
            parts.append(f'<details id="vocabulary-{name}"><summary>{name}</summary><dl>{items}</dl></details>')
    note = "<p>Plans and shift rules: tiebreak list plans. Outcomes, and the field's own terms: docs/words.md.</p>"
    return "\n".join([*parts, note])
