"""What acceptance rules in public use see: tables of docs/rules.md.

    python -m tiebreak.studies.rules                     # all, into the page
    python -m tiebreak.studies.rules 'random'            # one: sources, a case, gradients of one

Everything is emulated, and so the same on every machine.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from tiebreak.cases.acceptance import OF_GRADIENTS, RULES, answers
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.cases.verdicts import judge
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.formats import BF16
from tiebreak.kernels.kernel import Declaration
from tiebreak.matrix.acceptance import compared, recorded
from tiebreak.matrix.settings import Settings
from tiebreak.matrix.workbench import CaseBench
from tiebreak.reports.records.record import RuleAnswer, Shown
from tiebreak.reports.tables.marks import shown_text
from tiebreak.reports.tables.rules import share_text
from tiebreak.studies.pages import Tables, renew_tables, table

PAGE = Path(__file__).parents[2] / "docs" / "rules.md"
SEED, HEADS, FEWER_HEADS = 1, 1024, 256  # the fewer are those of gradients
CASES = ("tied_maxima[k=2]", "sink_tie", "random")
KERNELS: Mapping[str, Declaration] = {
    **{
        name: parse_declaration(name) for name in ("flash@paper", "stabilized@paper", "flash@fused", "stabilized@fused")
    },
    **{name: parse_declaration(name) for name in ("fair", "standard")},
    "sdpa_flash": parse_declaration("flash@fused_fast_exp,tile=32x512"),
}
_WITH_GRADIENTS = ("flash@fused", "stabilized@fused", "fair", "sdpa_flash")  # whose plans say how gradients are made


def column(bench: CaseBench, kernel: str, gradients: bool = False) -> dict[str, str]:
    """What this suite says of a kernel, and every rule on the same heads: of O, or of its gradients."""
    output, errors = bench.emulated(0, KERNELS[kernel])
    shown = Shown.of("bias", errors.bias.mean, verdict=judge(errors.bias).value)
    said = {name: recorded(answer) for name, answer in answers(*compared(output, bench))}
    return {"this suite": shown_text(shown)} | {
        f"`{name}`": _text(answer) for name, answer in said.items() if name.endswith(OF_GRADIENTS) is gradients
    }


def _text(answer: RuleAnswer) -> str:
    text = share_text(answer)
    return text if answer.passed is not False else f"**{text}**"


def _table(bench: CaseBench, kernels: Sequence[str], gradients: bool = False) -> Iterator[str]:
    columns = [column(bench, kernel, gradients) for kernel in kernels]
    rows = ([rule, *(each[rule] for each in columns)] for rule in columns[0])
    yield from table(("rule", *(f"`{name}`" for name in kernels)), rows)


def bench_of(name: str, heads: int, gradients: bool = False) -> CaseBench:
    """A case's heads, with a backward pass or without."""
    case = next(case for case in SCRIPTED if case.name == name)
    return CaseBench(replace(case, gradients=gradients), BF16, Settings(SEED, heads))


def of_case(name: str) -> Iterator[str]:
    """What each rule says of each kernel's O on one case."""
    yield from _table(bench_of(name, HEADS), tuple(KERNELS))


def of_gradients(name: str) -> Iterator[str]:
    """What rules say of gradients."""
    yield from _table(bench_of(name, FEWER_HEADS, gradients=True), _WITH_GRADIENTS, gradients=True)


def sources() -> Iterator[str]:
    """The rules, their formulas and their sources."""
    rows = (
        (f"`{rule.name}`", f"{rule.formula}{f'; {rule.note}' if rule.note else ''}".replace("|", "\\|"), rule.source,
         rule.version)
        for rule in RULES.values()
    )  # fmt: skip
    yield from table(("rule", "formula", "source", "version"), rows, right=False)


def columns(source: str) -> dict[str, dict[str, str]]:
    """The columns of a table of the page, by kernel."""
    marked = PAGE.read_text(encoding="utf-8").partition(f"<!-- from {source} -->")[2]
    (_, *kernels), _, *rows = (
        line.strip("| ").split(" | ") for line in marked.partition("<!--")[0].strip().splitlines()
    )
    return {kernel.strip("`"): {row[0]: row[place + 1] for row in rows} for place, kernel in enumerate(kernels)}


TABLES: Tables = {
    "sources": sources,
    **{name: partial(of_case, name) for name in CASES},
    **{f"gradients of {name}": partial(of_gradients, name) for name in ("random", "tied_maxima[k=2]")},
}


if __name__ == "__main__":
    sys.exit(renew_tables(PAGE, TABLES))
