"""What acceptance rules in public use see, emulated: the table of docs/rules.md."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from tiebreak.cases.scripted import SCRIPTED
from tiebreak.cases.verdicts import judge
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.formats import BF16
from tiebreak.kernels.kernel import Declaration
from tiebreak.laboratory.acceptance import OF_GRADIENTS
from tiebreak.laboratory.rules import rule_answers, share_text
from tiebreak.matrix.workbench import CaseBench, Settings
from tiebreak.reports.records.record import RuleAnswer, Shown
from tiebreak.reports.tables.texts import shown_text
from tiebreak.studies.pages import PageTable, table

SEED, HEADS = 1, 1024
CASE = "tied_maxima[k=2]"
PLANS = ("flash@paper", "stabilized@paper", "flash@fused", "stabilized@fused", "fair", "standard")
KERNELS: Mapping[str, Declaration] = {
    **{name: parse_declaration(name) for name in PLANS},
    "sdpa_flash": parse_declaration("flash@fused_fast_exp,tile=32x512"),
}


def column(bench: CaseBench, kernel: str) -> dict[str, str]:
    """Return what this suite says of a kernel's O, and every rule on the same heads."""
    output, errors = bench.emulated(0, KERNELS[kernel])
    shown = Shown.of("bias", errors.bias.mean, verdict=judge(errors.bias).value)
    rules = {name: answer for name, answer in rule_answers(output, bench).items() if not name.endswith(OF_GRADIENTS)}
    return {"this suite": shown_text(shown)} | {f"`{name}`": _text(answer) for name, answer in rules.items()}


def _text(answer: RuleAnswer) -> str:
    text = share_text(answer)
    return text if answer.passed is not False else f"**{text}**"


def bench_of(name: str, heads: int) -> CaseBench:
    """Return a case's heads, without a backward pass."""
    case = next(case for case in SCRIPTED if case.name == name)
    return CaseBench(replace(case, gradients=False), BF16, Settings(SEED, heads))


def of_case() -> Iterator[str]:
    """Yield what each rule says of each kernel's O."""
    bench = bench_of(CASE, HEADS)
    columns = {kernel: column(bench, kernel) for kernel in KERNELS}
    rows = ([rule, *(each[rule] for each in columns.values())] for rule in columns["fair"])
    yield from table(("rule", *(f"`{name}`" for name in columns)), rows)


TABLES = [PageTable("rules.md", CASE, of_case)]
