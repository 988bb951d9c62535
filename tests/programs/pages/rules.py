"""What acceptance rules in public use see: the table of docs/rules.md.

    python -m tiebreak.programs.pages.rules

Everything is emulated, and so the same on every machine.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from tiebreak.cases.acceptance import OF_GRADIENTS, answers
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.cases.verdicts import judge
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.formats import BF16
from tiebreak.kernels.kernel import Declaration
from tiebreak.matrix.acceptance import compared, recorded
from tiebreak.matrix.settings import Settings
from tiebreak.matrix.workbench import CaseBench
from tiebreak.programs.pages.tables import Tables, renew_tables, table
from tiebreak.reports.records.record import RuleAnswer, Shown
from tiebreak.reports.tables.marks import shown_text
from tiebreak.reports.tables.rules import share_text

PAGE = Path(__file__).parents[3] / "docs" / "rules.md"
SEED, HEADS = 1, 1024
CASE = "tied_maxima[k=2]"
KERNELS: Mapping[str, Declaration] = {
    **{
        name: parse_declaration(name) for name in ("flash@paper", "stabilized@paper", "flash@fused", "stabilized@fused")
    },
    **{name: parse_declaration(name) for name in ("fair", "standard")},
    "sdpa_flash": parse_declaration("flash@fused_fast_exp,tile=32x512"),
}


def column(bench: CaseBench, kernel: str) -> dict[str, str]:
    """What this suite says of a kernel's O, and every rule on the same heads."""
    output, errors = bench.emulated(0, KERNELS[kernel])
    shown = Shown.of("bias", errors.bias.mean, verdict=judge(errors.bias).value)
    said = {name: recorded(answer) for name, answer in answers(*compared(output, bench))}
    return {"this suite": shown_text(shown)} | {
        f"`{name}`": _text(answer) for name, answer in said.items() if not name.endswith(OF_GRADIENTS)
    }


def _text(answer: RuleAnswer) -> str:
    text = share_text(answer)
    return text if answer.passed is not False else f"**{text}**"


def bench_of(name: str, heads: int) -> CaseBench:
    """A case's heads, without a backward pass."""
    case = next(case for case in SCRIPTED if case.name == name)
    return CaseBench(replace(case, gradients=False), BF16, Settings(SEED, heads))


def of_case(name: str) -> Iterator[str]:
    """What each rule says of each kernel's O on one case."""
    bench = bench_of(name, HEADS)
    columns = [column(bench, kernel) for kernel in KERNELS]
    rows = ([rule, *(each[rule] for each in columns)] for rule in columns[0])
    yield from table(("rule", *(f"`{name}`" for name in KERNELS)), rows)


def columns(source: str) -> dict[str, dict[str, str]]:
    """The columns of a table of the page, by kernel."""
    marked = PAGE.read_text(encoding="utf-8").partition(f"<!-- from {source} -->")[2]
    (_, *kernels), _, *rows = (
        line.strip("| ").split(" | ") for line in marked.partition("<!--")[0].strip().splitlines()
    )
    return {kernel.strip("`"): {row[0]: row[place + 1] for row in rows} for place, kernel in enumerate(kernels)}


TABLES: Tables = {CASE: partial(of_case, CASE)}


if __name__ == "__main__":
    sys.exit(renew_tables(PAGE, TABLES))
