"""`tiebreak list cases`, `kernels`, `plans`, `vendors`: what there is, a line each; of a case that is named, all."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from tiebreak.backends.backend import Backend
from tiebreak.backends.registry import BACKENDS
from tiebreak.cases.case import Case
from tiebreak.cases.claims import Claim
from tiebreak.cases.gpt2.snippets import GROUP, SNIPPETS, Snippet
from tiebreak.cases.scripted import GROUPS
from tiebreak.kernels.external.adapters import ADAPTERS
from tiebreak.kernels.formats import FP32, Rounding
from tiebreak.kernels.plans import PLANS, Accumulator, Cast, DeltaSource, RoundingPlan, SumOf
from tiebreak.kernels.shift_rules import SHIFT_RULES, ShiftRule
from tiebreak.kernels.vendor_plans import VENDOR_PLANS
from tiebreak.matrix.questions import invariance, usage
from tiebreak.matrix.questions.session import Question
from tiebreak.reports.cli import HELD, Parser
from tiebreak.reports.errors import UsageError
from tiebreak.reports.names import matching, unknown

_Listed = Case | Snippet | Question
_INDENT = "  "
_FAILURE = "!"  # before the line of a failure input
_INPUT = "; a failure input"


def cases(arguments: Sequence[str]) -> int:
    """The verb `cases`; see `tiebreak.reports.cli.main`."""
    parser = _parser("cases", "Inputs and short training runs that kernels are put through.", "NAME")
    groups: dict[str, Iterable[_Listed]] = {
        **GROUPS,
        GROUP: SNIPPETS.values(),
        f"{usage.GROUP}: users' kernels, a device's own where it is named": usage.QUESTIONS,
        f"{invariance.GROUP}: where --experiments or --cases names it": invariance.QUESTIONS,
    }
    known = {case.name: case for group in groups.values() for case in group}
    names = parser.parse_args(arguments).names
    if names:
        chosen = [match for name in names for match in _named(name, known)]
        print("\n\n".join("\n".join(described(known[name])) for name in dict.fromkeys(chosen)))
        return HELD
    _print(
        {about: {case.name: _line(case) for case in group} for about, group in groups.items()},
        f"{_FAILURE}: an input on which rounding is known to fail. `tiebreak list cases NAME` tells all of one.",
    )
    return HELD


def kernels(arguments: Sequence[str]) -> int:
    """The verb `kernels`; see `tiebreak.reports.cli.main`."""
    _parser("kernels", "The kernels of a default run, by backend, and adapters that --kernel takes.").parse_args(
        arguments
    )
    groups = {_heading(backend): dict(_kernels_of(backend)) for backend in BACKENDS.values()}
    groups["adapters: attention of packages, by --kernel NAME or tiebreak check NAME"] = dict.fromkeys(ADAPTERS, "")
    _print(groups, "--kernels takes any rule@plan too (`tiebreak list plans`), --kernel one of your own.")
    return HELD


def plans(arguments: Sequence[str]) -> int:
    """The verb `plans`; see `tiebreak.reports.cli.main`."""
    _parser("plans", "Rounding plans and shift rules: --plan and --kernels take rule@plan.").parse_args(arguments)
    _print(
        {
            "plans: what is in a narrow format; all else is in fp32": {
                name: _of_plan(plan) for name, plan in PLANS.items()
            },
            "rules: the shift of a row whose maximum is r_m": {
                name: _of_rule(rule) for name, rule in SHIFT_RULES.items()
            },
        },
        "docs/words.md explains rounding points, and what of a plan can be changed: flash@fused,s=bf16,base=2,tile=64.",
    )
    return HELD


def vendors(arguments: Sequence[str]) -> int:
    """The verb `vendors`; see `tiebreak.reports.cli.main`."""
    parser = _parser("vendors", "What vendors' kernels round, by their sources, as --plan takes it.", "NAME")
    names = parser.parse_args(arguments).names or list(VENDOR_PLANS)
    chosen = dict.fromkeys(match for name in names for match in _named(name, VENDOR_PLANS, "vendor"))
    for at, plan in enumerate(VENDOR_PLANS[name] for name in chosen):
        rows = [("plan", plan.plan), ("source", f"{plan.source} ({plan.version})"), ("note", plan.note)]
        print("\n" * bool(at) + "\n".join(_described(f"{plan.name}: {plan.kernel}", rows)))
    return HELD


def _parser(verb: str, about: str, names: str | None = None) -> Parser:
    parser = Parser(prog=f"tiebreak list {verb}", description=about)
    if names is not None:
        parser.add_argument("names", nargs="*", metavar=names, help="tell all of these alone; globs allowed")
    return parser


def _named(name: str, known: Collection[str], kind: str = "case") -> list[str]:
    """The cases, or what else is listed, that a name, or a glob, stands for.

    Raises:
        UsageError: none.
    """
    names = matching(name, known)
    if not names:
        raise UsageError(unknown(kind, name, known, f"`tiebreak list {kind}s` names"))
    return names


def _print(groups: Mapping[str, Mapping[str, str]], legend: str) -> None:
    width = max(len(name) for group in groups.values() for name in group)
    for about, group in groups.items():
        print(about)
        for name, line in group.items():
            print(f"{_INDENT}{name:{width}}  {line}".rstrip())
        print()
    print(legend)


def _line(case: _Listed) -> str:
    return f"{_FAILURE} {case.about}" if isinstance(case, Case) and case.failure else f"  {case.about}"


def described(case: _Listed) -> Iterator[str]:
    """All there is to say of a case, a line each."""
    rows = [("is", case.about), ("source", case.source), ("version", str(case.version))]
    if isinstance(case, Case):
        rows.append(("measured", f"{'dQ, dK and dV too' if case.gradients else 'O alone'}{_INPUT * case.failure}"))
        rows += [("claim", _claimed(claim)) for claim in case.claims]
    elif isinstance(case, Snippet):
        rows.append(("steps", str(case.steps)))
        rows += [
            ("claim", f"{', '.join(sorted(claim.variants))}: {claim.text} ({claim.source})") for claim in case.claims
        ]
    if not isinstance(case, Question) and case.unclaimed:
        rows.append(("of others", f"nothing is claimed: {case.unclaimed}"))
    return _described(case.name, rows)


def _described(name: str, rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield name
    yield from (f"{_INDENT}{label:11}{text}" for label, text in rows if text)


def _claimed(claim: Claim) -> str:
    """What is claimed, of which kernels, and who says so, in one line."""
    rules, plans = (" ".join(sorted(names)) or "any" for names in (claim.rules, claim.plans))
    tiles = {None: "", True: ", in tiles", False: ", in one tile"}[claim.tiled]
    formats = ", ".join(sorted(claim.formats))
    return f"{claim.expectation.name}: rule {rules}, plan {plans}{tiles}, in {formats} ({claim.source})"


def _heading(backend: Backend) -> str:
    reason = backend.unavailable()
    return f"{backend.name}: {backend.about}" + ("" if reason is None else f"; can't run here: {reason}")


def _kernels_of(backend: Backend) -> Iterator[tuple[str, str]]:
    """Name and plan; nothing of a backend whose kernels only the device can list."""
    if backend.unavailable() is None:
        for kernel in backend.kernels():
            declared = "" if kernel.declaration is None else kernel.declaration.label
            yield kernel.name, f"is {declared}" if declared not in ("", kernel.name) else ""


def _of_plan(plan: RoundingPlan) -> str:
    parts = [f"{name} {_of_cast(cast)}" for name, cast in plan.casts() if cast.fmt != FP32]
    parts += ["exp in base two"] if plan.exponential.base_two else []
    parts += ["a fast exp"] if plan.exponential.correction else []
    parts += ["exp contracted"] if plan.contracted else []
    parts += [] if plan.row_sum_of is SumOf.UNROUNDED else [f"l sums {plan.row_sum_of.value} P-bar"]
    parts += [f"P-bar times 2^{plan.offset}"] if plan.offset else []
    parts += [f"{name[0]} as {held}" for name in ("q8", "k8", "v8", "p8") if (held := getattr(plan, name)) is not None]
    parts += ["the mean of k taken off"] if plan.smooth_k else []
    parts += [] if plan.accumulator is Accumulator.EXACT else [f"products as {plan.accumulator.name.lower()}"]
    parts += [] if plan.delta_from is DeltaSource.OUTPUT else [f"delta from {plan.delta_from.value}"]
    return ", ".join(parts) or "nothing"


def _of_cast(cast: Cast) -> str:
    mode = "" if cast.rounding is Rounding.TO_EVEN else f" {cast.rounding.value}"
    return f"{cast.fmt.name}{mode}{' saturating' if cast.saturates else ''}"


def _of_rule(rule: ShiftRule) -> str:
    terms = [f"{rule.above:g} r_m above 0, {rule.below:g} r_m below" if rule.scales else "r_m"]
    terms += [f"{rule.offset:+g}"] if rule.offset else []
    terms += ["+ u ln 2"] if rule.dithered else []
    terms += [f", followed once it is {rule.lag:g} behind"] if rule.lag else []
    where = f", where a score within {rule.epsilon:g} repeats it" if rule.detects else ""
    return f"m = {' '.join(terms).replace(' ,', ',')}{where} ({rule.source})"
