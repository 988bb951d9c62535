"""What vendors' kernels round, by their sources, and what it does on the failure inputs, emulated: docs/vendors.md."""

from collections.abc import Iterator
from dataclasses import replace

from tiebreak.cases.scripted import SCRIPTED
from tiebreak.cases.verdicts import Verdict, judge
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.formats import BF16, Formats
from tiebreak.kernels.vendor_plans import VENDOR_PLANS
from tiebreak.matrix.experiments.call import shown
from tiebreak.matrix.settings import Settings
from tiebreak.matrix.workbench import CaseBench
from tiebreak.reports.tables.marks import shown_text
from tiebreak.studies.pages import PageTable, table

SETTINGS = Settings(seed=1, heads=256)
_BESIDE = ("no_tail", "random")  # exact ties, and none
CASES = {
    case.name: case
    for case in SCRIPTED
    if (case.failure or case.name in _BESIDE) and case.formats(BF16) == Formats.of(BF16)
}


def columns() -> dict[str, list[str]]:
    """Return the vendors whose plans differ in more than tiles, by plan without them."""
    alike: dict[str, list[str]] = {}
    for name, known in VENDOR_PLANS.items():
        alike.setdefault(known.plan.partition(",tile=")[0], []).append(name)
    return alike


def row(case: str) -> list[str]:
    """Return what each plan's output is like on one failure input."""
    bench, texts = CaseBench(replace(CASES[case], gradients=False), BF16, SETTINGS), []
    for plan in columns():
        errors = bench.emulated(0, parse_declaration(plan))[1]
        verdict = Verdict.NONFINITE if errors.nonfinite else judge(errors.bias)
        text = shown_text(shown(errors.nonfinite, errors.gain, errors.bias.mean, verdict.value))
        texts.append(text if verdict is Verdict.UNBIASED else f"**{text}**")
    return [f"`{case}`", *texts]


def sources() -> Iterator[str]:
    """Yield the plans and where they stand."""
    rows = (
        (f"`{known.name}`: {known.kernel}", f"`{known.plan}`", f"{known.source} ({known.version}); {known.note}")
        for known in VENDOR_PLANS.values()
    )
    yield from table(("kernel", "plan", "source"), rows, right=False)


def biases() -> Iterator[str]:
    """Yield failure inputs, and two beside them, by plan."""
    yield from table(("input", *(f"`{plan}`" for plan in columns())), map(row, CASES))


TABLES = [PageTable("vendors.md", "sources", sources), PageTable("vendors.md", "failure inputs", biases)]
