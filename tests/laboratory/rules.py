"""`tiebreak rules`: acceptance rules of other projects, and what they say of kept records."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tiebreak.kernels.backward_passes import BACKWARD_PASSES
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.inputs import GRADIENT_NAMES, AttentionOutput
from tiebreak.kernels.kernel import Declaration
from tiebreak.laboratory.acceptance import OF_GRADIENTS, RULES, ComparedTensor, Rule, answers
from tiebreak.matrix.checks import Look
from tiebreak.matrix.sample import Sample
from tiebreak.matrix.workbench import CaseBench
from tiebreak.reports.cli import PASSED, Parser
from tiebreak.reports.errors import UsageError
from tiebreak.reports.names import pick
from tiebreak.reports.records import record as records
from tiebreak.reports.records import selection, store
from tiebreak.reports.records.order import grouped
from tiebreak.reports.records.record import Run
from tiebreak.reports.tables import grids
from tiebreak.reports.tables.grids import Grid, Part
from tiebreak.reports.tables.texts import answers_of, plain_text

_LEGEND = (
    "A number is the largest that a rule looks at, as a share of its limit; FAILS: the rule turns the kernel down;"
    "\nneeds: it lacks what it takes. Rules see the heads drawn at first. tiebreak: the bias in ulps, B: biased."
)


def main(arguments: Sequence[str]) -> int:
    """Run the verb `rules`; see `tiebreak.reports.cli.main`."""
    about = "Acceptance rules in public use, with their sources; of records made with --rules, what they say."
    parser = Parser(prog="tiebreak rules", description=about)
    parser.add_argument("what", nargs="*", metavar="NAME|FILE", help="rules to tell of, or one file of records")
    parser.add_argument("--format", choices=("simple", "github", "latex"), default="simple", help="of the table")
    selection.add_options(parser)
    options = parser.parse_args(arguments)
    files = [Path(each) for each in options.what if each.endswith((".json", ".json.gz")) or Path(each).is_file()]
    if not files:
        if given := next((flag for flag in selection.FILTERS if getattr(options, flag) is not None), None):
            raise UsageError(f"--{given}: it narrows what a file of records says; name one")
        names = pick("rule", ",".join(options.what), RULES, "`tiebreak rules` lists") if options.what else RULES
        print("\n\n".join("\n".join(_rule_lines(name, RULES[name])) for name in names))
        return PASSED
    if len(options.what) > 1:
        raise UsageError(f"{files[0]}: give one file of records alone, and --cases or --kernels to narrow it")
    run = store.read(files[0])
    if not any(map(answers_of, run.records)):
        cure = "run the matrix, or `tiebreak check`, with --rules"
        raise UsageError(f"{files[0]}: no rule was asked of its cells; {cure}")
    (run,) = selection.filtered([run], options)
    grids.show(rules_tables(run), options.format)
    return PASSED


def _rule_lines(name: str, rule: Rule) -> Iterator[str]:
    yield f"{name}{' (and' + OF_GRADIENTS + ')' if rule.gradients else ''}"
    yield f"  {rule.formula}"
    yield f"  {rule.source}"
    if rule.note:
        yield f"  {rule.note}"


def rules_tables(run: Run) -> list[Part]:
    """Return the tables of a run, one for each backend, format and case, without records that no rule judged."""
    judged = [record for record in run.records if answers_of(record)]
    parts: list[Part] = []
    for (backend, fmt, case), alike in grouped(judged, lambda each: (each.backend, each.format, each.case)).items():
        answers = [(name, answer) for record in alike for name, answer in answers_of(record).items()]
        rows = [["tiebreak", *map(plain_text, alike)]]
        for name in dict.fromkeys(name for name, _ in answers):
            rows.append([name, *(_rule_text(answers_of(record).get(name)) for record in alike)])
        headers = ["rule", *(record.kernel for record in alike)]
        parts.append(Grid(headers, rows, f"{run.backend_text(backend)}, {fmt}: {case}"))
        parts += dict.fromkeys(f"{name} needs {answer.needs}" for name, answer in answers if answer.needs)
    return [*parts, _LEGEND] if parts else []


def _rule_text(answer: records.RuleAnswer | None) -> str:
    return "" if answer is None else f"{share_text(answer)}{' FAILS' if answer.passed is False else ''}"


def share_text(answer: records.RuleAnswer) -> str:
    """Return the largest number that a rule looks at, as a share of its limit."""
    if answer.passed is None:
        return "needs"
    share = max(map(_share, answer.readings.values()))
    return "NaN" if math.isinf(share) else f"{share:.2f}"


def _share(reading: records.RuleReading) -> float:
    """Return the share of its limit that a number has reached; infinite for NaN, or where the limit is 0."""
    if reading.number is None or reading.limit is None:
        return math.inf
    return reading.number / reading.limit if reading.limit else math.inf if reading.number else 0.0


@cache
def eager() -> Declaration:
    """Return PyTorch's eager attention in the inputs' format, with autograd, as flash-attention's tests compute it."""
    backward = BACKWARD_PASSES["autograd's of a softmax in 16 bits (P, dP and dS in 16 bits)"]
    return backward.after(parse_declaration("standard,s=input,q=input"))


def compared(output: AttentionOutput, bench: CaseBench) -> tuple[ComparedTensor, list[ComparedTensor]]:
    """Return O of the first batch, and its gradients if any, with the tensors that rules compare them with."""
    batch = bench.batch(0)
    eagers, fused = (bench.emulated(0, declaration)[0] for declaration in (eager(), parse_declaration("flash@fused")))
    fmt = batch.inputs.formats.output
    o = ComparedTensor(output.o.double(), batch.ref.o, fmt, eagers.o.double(), fused.o.double())
    if output.gradients is None:
        return o, []
    gradients = []
    for name, exact in zip(GRADIENT_NAMES, batch.gradients.gradients, strict=True):
        out, theirs, other = (getattr(made.gradients, name).double() for made in (output, eagers, fused))
        gradients.append(ComparedTensor(out, exact, fmt, theirs, other, f"d{name[1].upper()}"))
    return o, gradients


def rule_answers(output: AttentionOutput, bench: CaseBench) -> dict[str, records.RuleAnswer]:
    """Return the verdict of every acceptance rule in public use on the first batch's output, as records have it."""
    rules = {}
    for name, answer in answers(*compared(output, bench)):
        numbers = {each.what: map(records.finite, (each.number, each.limit)) for each in answer.readings}
        readings = {what: records.RuleReading(*pair) for what, pair in numbers.items()}
        rules[name] = records.RuleAnswer(answer.passed, readings, answer.needs)
    return rules


def _looks(sample: Sample) -> Mapping[str, Any]:
    return {"rules": rule_answers(sample.outputs[0], sample.bench)} if sample.bench.settings.rules else {}


LOOK = Look(looks=_looks)
