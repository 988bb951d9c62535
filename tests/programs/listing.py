"""`tiebreak list`: what there is, a line each; `tiebreak rules`: acceptance rules, and what they said, from records."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tiebreak.backends.registry import BACKENDS
from tiebreak.cases.acceptance import OF_GRADIENTS, RULES, Rule
from tiebreak.cases.case import Case
from tiebreak.cases.claims import Claim
from tiebreak.cases.gpt2.snippets import GROUP, SNIPPETS, Snippet
from tiebreak.cases.scripted import GROUPS
from tiebreak.kernels.declarations import values_apart
from tiebreak.kernels.external.adapters import ADAPTERS
from tiebreak.kernels.plans import FP32_PLAN, PLANS, DeltaSource, RoundingPlan
from tiebreak.kernels.shift_rules import SHIFT_RULES, ShiftRule
from tiebreak.kernels.vendor_plans import VENDOR_PLANS
from tiebreak.matrix.questions import invariance, usage
from tiebreak.matrix.questions.session import Question
from tiebreak.reports.cli import HELD, Parser
from tiebreak.reports.errors import UsageError
from tiebreak.reports.names import pick
from tiebreak.reports.records import selection, store
from tiebreak.reports.tables import grids
from tiebreak.reports.tables.texts import answers_of, rules_tables

_Listed = Case | Snippet | Question
_INDENT = "  "
_DECLARED = "A kernel's declared plan is an assumption: each run compares it with the kernel's bits."
_FAILURE = "!"  # before the line of a failure input
_INPUT = "; a failure input"


def cases(arguments: Sequence[str]) -> int:
    groups: dict[str, Iterable[_Listed]] = {
        **GROUPS,
        GROUP: SNIPPETS.values(),
        f"{usage.GROUP}: users' kernels, a device's own where it is named": usage.QUESTIONS,
        f"{invariance.GROUP}: where --experiments or --cases names it": invariance.QUESTIONS,
    }
    known = {case.name: case for group in groups.values() for case in group}
    about = "Inputs and short training runs that kernels are put through."
    if chosen := _chosen("case", about, arguments, known):
        print("\n\n".join("\n".join(described(known[name])) for name in chosen))
        return HELD
    failing = {name for name, case in known.items() if isinstance(case, Case) and case.failure}
    marks = {name: _FAILURE if name in failing else " " for name in known}
    _print(
        {about: {each.name: f"{marks[each.name]} {each.about}" for each in group} for about, group in groups.items()},
        f"{_FAILURE}: an input on which rounding is known to fail. `tiebreak list cases NAME` tells all of one.",
    )
    return HELD


def kernels(arguments: Sequence[str]) -> int:
    about = "The kernels of a default run, by backend, and adapters that --kernel takes."
    Parser(prog="tiebreak list kernels", description=about).parse_args(arguments)
    groups: dict[str, dict[str, str]] = {}
    for backend in BACKENDS.values():
        reason, heading = backend.unavailable(), f"{backend.name}: {backend.about}"
        declared = {} if reason else {kernel.name: kernel.declaration for kernel in backend.kernels()}
        groups[f"{heading}; can't run here: {reason}" if reason else heading] = {
            name: f"declares {it.label}" if it is not None and it.label != name else "" for name, it in declared.items()
        }
    groups["adapters: attention of packages, by --kernel NAME or tiebreak check NAME"] = dict.fromkeys(ADAPTERS, "")
    _print(groups, f"{_DECLARED}\n--kernels takes any rule@plan too (`tiebreak list plans`), --kernel one of your own.")
    return HELD


def plans(arguments: Sequence[str]) -> int:
    about = "Rounding plans and shift rules: --plan and --kernels take rule@plan."
    Parser(prog="tiebreak list plans", description=about).parse_args(arguments)
    plans = {name: _plan_text(plan) for name, plan in PLANS.items()}
    shifts = {name: _shift_text(rule) for name, rule in SHIFT_RULES.items()}
    _print(
        {
            "plans: what is not as in fp32; input: the format of q, k and v": plans,
            "rules: the shift of a row whose maximum is r_m": shifts,
        },
        "docs/words.md explains rounding points, and what of a plan can be changed: flash@fused,s=bf16,base=2,tile=64.",
    )
    return HELD


def vendors(arguments: Sequence[str]) -> int:
    about = "What vendors' kernels round, by their sources, as --plan takes it."
    told = []
    for plan in (VENDOR_PLANS[name] for name in _chosen("vendor", about, arguments, VENDOR_PLANS) or VENDOR_PLANS):
        rows = [("plan", plan.plan), ("source", f"{plan.source} ({plan.version})")]
        rows += [("rests on", plan.rests_on), ("note", plan.note)]
        told.append("\n".join(_described(f"{plan.name}: {plan.kernel}", rows)))
    print("\n\n".join(told))
    return HELD


def rules(arguments: Sequence[str]) -> int:
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
        return HELD
    if len(options.what) > 1:
        raise UsageError(f"{files[0]}: give one file of records alone, and --cases or --kernels to narrow it")
    run = store.read(files[0])
    if not any(map(answers_of, run.records)):
        cure = "run the matrix, or `tiebreak check`, with --rules"
        raise UsageError(f"{files[0]}: no rule was asked of its cells; {cure}")
    (chosen,) = selection.narrowed([run], options)
    grids.show(rules_tables(chosen), options.format)
    return HELD


def _chosen(kind: str, about: str, arguments: Sequence[str], known: Collection[str]) -> list[str]:
    """Return the known names that a command line's names and globs stand for; UsageError says that one has none."""
    parser = Parser(prog=f"tiebreak list {kind}s", description=about)
    parser.add_argument("names", nargs="*", metavar="NAME", help="tell all of these alone; globs allowed")
    names = parser.parse_args(arguments).names
    return pick(kind, ",".join(names), known, f"`tiebreak list {kind}s` names") if names else []


def _print(groups: Mapping[str, Mapping[str, str]], legend: str) -> None:
    width = max(len(name) for group in groups.values() for name in group)
    for about, group in groups.items():
        print(about)
        for name, line in group.items():
            print(f"{_INDENT}{name:{width}}  {line}".rstrip())
        print()
    print(legend)


def described(case: _Listed) -> Iterator[str]:
    rows = [("is", case.about), ("source", case.source), ("version", str(case.version))]
    if isinstance(case, Case):
        rows.append(("measured", f"{'dQ, dK and dV too' if case.gradients else 'O alone'}{_INPUT * case.failure}"))
        rows += [("claim", _claim_text(claim)) for claim in case.claims]
    elif isinstance(case, Snippet):
        rows.append(("steps", str(case.steps)))
        claims = ((", ".join(sorted(claim.variants)), claim) for claim in case.claims)
        rows += [("claim", f"{variants}: {claim.text} ({claim.source})") for variants, claim in claims]
    if not isinstance(case, Question) and case.unclaimed:
        rows.append(("of others", f"nothing is claimed: {case.unclaimed}"))
    return _described(case.name, rows)


def _described(name: str, rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield name
    yield from (f"{_INDENT}{label:11}{text}" for label, text in rows if text)


def _claim_text(claim: Claim) -> str:
    rules, plans = (" ".join(sorted(names)) or "any" for names in (claim.rules, claim.plans))
    tiles = {None: "", True: ", in tiles", False: ", in one tile"}[claim.tiled]
    formats = ", ".join(sorted(claim.formats))
    return f"{claim.expectation.name}: rule {rules}, plan {plans}{tiles}, in {formats} ({claim.source})"


def _plan_text(plan: RoundingPlan) -> str:
    """What is not as in fp32, as --plan takes it, and what no text of a plan says."""
    apart, fast = values_apart(FP32_PLAN, plan), plan.exponential.correction
    parts = [f"{key}={value}" for key, value in apart.items() if key != "base" or not fast]
    parts += ["a fast exp"] if fast else []
    parts += [] if plan.delta_from is DeltaSource.OUTPUT else [f"delta from {plan.delta_from.value}"]
    return ", ".join(parts) or "nothing"


def _shift_text(rule: ShiftRule) -> str:
    terms = [f"{rule.above:g} r_m above 0, {rule.below:g} r_m below" if rule.scales else "r_m"]
    terms += [f"{rule.offset:+g}"] if rule.offset else []
    terms += ["+ u ln 2"] if rule.dithered else []
    terms += [f", followed once it is {rule.lag:g} behind"] if rule.lag else []
    where = f", where a score within {rule.epsilon:g} repeats it" if rule.detects else ""
    return f"m = {' '.join(terms).replace(' ,', ',')}{where} ({rule.source})"


def _rule_lines(name: str, rule: Rule) -> Iterator[str]:
    yield f"{name}{' (and' + OF_GRADIENTS + ')' if rule.gradients else ''}"
    yield f"  {rule.formula}"
    yield f"  {rule.source}"
    if rule.note:
        yield f"  {rule.note}"
