"""Lays out what `make docs` renders: the repository as a reader finds it, and a page for each group of cases.

Links hold as they are written, for every file has its place of the repository. docs/site/mkdocs.yml names the pages.
"""

import math
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import torch
from torch import Tensor

from tiebreak.backends.provenance import CHECKOUT
from tiebreak.cases.case import Case
from tiebreak.kernels.formats import BF16
from tiebreak.kernels.reference import reference
from tiebreak.matrix.experiment import Experiment
from tiebreak.matrix.experiments.call import OneCall
from tiebreak.programs.listing import described, groups
from tiebreak.reports.page.svg import Figure, Series, draw
from tiebreak.reports.records import store
from tiebreak.reports.records.order import kernel_places
from tiebreak.reports.records.record import Record
from tiebreak.reports.tables.texts import plain_text

_SHOWN = ("call", "training")  # kinds of experiment
_COPIED = ("backends", "cases", "docs", "examples", "findings", "kernels", "reports", "tests", "*.md", "action.yml")
_BASELINE = CHECKOUT / "reports" / "baselines" / "emulation.json"
_SEED, _HEADS = 1, 16  # what is drawn is the first head of the baseline's own input
_KEYS = 512  # of a picture, at most


def main(arguments: Sequence[str]) -> int:
    """Lay the site out in a folder, in the place of what is there."""
    folder = Path(arguments[0])
    shutil.rmtree(folder / "pages", ignore_errors=True)
    for path in (path for name in _COPIED for path in CHECKOUT.glob(name)):
        if path.is_dir():
            shutil.copytree(path, folder / "pages" / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, folder / "pages")
    (folder / "pages" / "docs" / "cases").mkdir()
    for name, text in case_pages():
        (folder / "pages" / "docs" / "cases" / name).write_text(text, encoding="utf-8")
    settings = (CHECKOUT / "docs" / "site" / "mkdocs.yml").read_text(encoding="utf-8")
    (folder / "mkdocs.yml").write_text(settings.replace("ROOT/", f"{CHECKOUT.as_posix()}/"), encoding="utf-8")
    return 0


def case_pages() -> Iterator[tuple[str, str]]:
    """Yield the pages of the cases: their names and their Markdown, an index first."""
    baseline = store.read(_BASELINE)
    places = kernel_places([baseline])
    records: dict[str, list[Record]] = {}
    for record in sorted(baseline.records, key=lambda record: places[record.kernel]):
        records.setdefault(record.case, []).append(record)
    index = ["# Cases", "Inputs of attention, each made from a seed, with claims about what rounding does to it."]
    for about, named in groups().items():
        group = [each for each in named.values() if each.kind in _SHOWN]
        if not group:
            continue
        page = f"{_slug(about)}.md"
        links = " ".join(f"[`{case.name}`]({page}#{_slug(case.name)})" for case in group)
        index.append(f"## [{_title(about)}]({page})\n\n{links}")
        sections = (_section(case, records.get(case.name, [])) for case in group)
        yield page, "\n\n".join([f"# {_title(about)}", *sections]) + "\n"
    yield "index.md", "\n\n".join(index) + "\n"


def _section(case: Experiment, records: Sequence[Record]) -> str:
    """Return what `tiebreak list cases` says of a case, its input, and what the emulated kernels make of it."""
    parts = [f"## `{case.name}` {{ #{_slug(case.name)} }}", "\n".join(["```text", *described(case), "```"])]
    if isinstance(case, OneCall):
        parts += _pictures(case.case)
    shown = [(record.kernel, plain_text(record)) for record in records if record.shown is not None]
    if shown:
        cells = " ".join(
            f'<span class="cell"><code>{escape(name)}</code> {escape(text)}</span>' for name, text in shown
        )
        parts += ["Emulated, in bf16, from the committed baseline:", f'<p class="cells">{cells}</p>']
    return "\n\n".join(parts)


def _pictures(case: Case) -> Iterator[str]:
    """Yield the scores of the last row of the first head, and the largest column of V, by key."""
    inputs = case.make(_SEED, 0, _HEADS, BF16)
    s, hidden, v = reference(inputs).s, inputs.hidden(), inputs.expanded_v()[0, 0].double()
    seen = ~(torch.zeros_like(s, dtype=torch.bool) if hidden is None else hidden.expand_as(s))[0, 0, -1]
    column = v[:, int(v.nan_to_num(0, 0, 0).abs().sum(0).argmax())]
    for values, label in ((s[0, 0, -1], "scores S of one row"), (column, "one column of V")):
        yield draw(_figure(f"{label} of {case.name}", label, values[:_KEYS], seen[:_KEYS]))


def _figure(title: str, label: str, values: Tensor, seen: Tensor) -> Figure:
    """Return stems from zero, by key; dots on the largest: of the scores the row's maxima."""
    finite = [
        (float(key), value)
        for key, (value, is_seen) in enumerate(zip(values.tolist(), seen.tolist(), strict=True))
        if is_seen and math.isfinite(value)
    ]
    largest = max((value for _, value in finite), default=0.0)
    stems = tuple((key, min(0.0, value), max(0.0, value)) for key, value in finite)
    maxima = tuple((key, value) for key, value in finite if value == largest)
    line = ((0.0, 0.0), (float(len(values)), 0.0))
    return Figure(title, "", "key", label, (Series(label, line, marked=maxima, bars=stems),))


def _title(text: str) -> str:
    return text[:1].upper() + text[1:]


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
