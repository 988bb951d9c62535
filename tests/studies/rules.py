"""What acceptance rules in public use see, emulated: tables of docs/rules.md."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from tiebreak.cases.acceptance import OF_GRADIENTS, RULES
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.cases.verdicts import judge
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.formats import BF16
from tiebreak.kernels.kernel import Declaration
from tiebreak.matrix.acceptance import said
from tiebreak.matrix.settings import Settings
from tiebreak.matrix.workbench import CaseBench
from tiebreak.reports.records.record import RuleAnswer, Shown
from tiebreak.reports.tables.marks import shown_text
from tiebreak.reports.tables.rules import share_text
from tiebreak.studies.pages import PageTable, table

SEED, HEADS, FEWER_HEADS = 1, 1024, 256  # the fewer are those of gradients
CASES = ("tied_maxima[k=2]", "sink_tie", "random")
KERNELS: Mapping[str, Declaration] = {
    **{name: parse_declaration(name) for name in ("flash@paper", "stabilized@paper", "flash@fused", "stabilized@fused",
                                                  "fair", "standard")},
    "sdpa_flash": parse_declaration("flash@fused_fast_exp,tile=32x512"),
}  # fmt: skip
_WITH_GRADIENTS = ("flash@fused", "stabilized@fused", "fair", "sdpa_flash")  # whose plans say how gradients are made


def column(bench: CaseBench, kernel: str, gradients: bool = False) -> dict[str, str]:
    """Return what this suite says of a kernel, and every rule on the same heads: of O, or of its gradients."""
    output, errors = bench.emulated(0, KERNELS[kernel])
    shown = Shown.of("bias", errors.bias.mean, verdict=judge(errors.bias).value)
    rules = {name: answer for name, answer in said(output, bench).items() if name.endswith(OF_GRADIENTS) is gradients}
    return {"this suite": shown_text(shown)} | {f"`{name}`": _text(answer) for name, answer in rules.items()}


def _text(answer: RuleAnswer) -> str:
    text = share_text(answer)
    return text if answer.passed is not False else f"**{text}**"


def bench_of(name: str, heads: int, gradients: bool = False) -> CaseBench:
    """Return a case's heads, with a backward pass or without."""
    case = next(case for case in SCRIPTED if case.name == name)
    return CaseBench(replace(case, gradients=gradients), BF16, Settings(SEED, heads))


def of_case(name: str, gradients: bool = False) -> Iterator[str]:
    """Yield what each rule says of each kernel on one case: of its O, or of its gradients."""
    bench = bench_of(name, FEWER_HEADS if gradients else HEADS, gradients)
    columns = {kernel: column(bench, kernel, gradients) for kernel in (_WITH_GRADIENTS if gradients else KERNELS)}
    rows = ([rule, *(each[rule] for each in columns.values())] for rule in next(iter(columns.values())))
    yield from table(("rule", *(f"`{name}`" for name in columns)), rows)


def sources() -> Iterator[str]:
    """Yield the rules, their formulas and their sources."""
    rows = (
        (f"`{rule.name}`", f"{rule.formula}{f'; {rule.note}' if rule.note else ''}".replace("|", "\\|"), rule.source,
         rule.version)
        for rule in RULES.values()
    )  # fmt: skip
    yield from table(("rule", "formula", "source", "version"), rows, right=False)


TABLES = [
    PageTable("rules.md", "sources", sources),
    *(PageTable("rules.md", name, partial(of_case, name)) for name in CASES),
    *(
        PageTable("rules.md", f"gradients of {name}", partial(of_case, name, gradients=True))
        for name in ("random", CASES[0])
    ),
]
