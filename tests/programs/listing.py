"""`tiebreak list`: what there is, a line each."""

import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from tiebreak import plugins
from tiebreak.backends.registry import BACKENDS
from tiebreak.cases.claims import Claim
from tiebreak.cases.shapes import dimensions, reported
from tiebreak.kernels.declarations import values_apart
from tiebreak.kernels.external.loading import ADAPTERS
from tiebreak.kernels.plans import FP32_PLAN, PLANS, DeltaSource, RoundingPlan
from tiebreak.kernels.shift_rules import SHIFT_RULES, ShiftRule
from tiebreak.matrix.experiment import Experiment
from tiebreak.matrix.experiments import kinds, offered
from tiebreak.matrix.experiments.call import OneCall
from tiebreak.reports import terminal
from tiebreak.reports.cli import PASSED, Parser
from tiebreak.reports.names import pick
from tiebreak.reports.records.decode import encode
from tiebreak.reports.records.order import grouped
from tiebreak.reports.records.record import CaseRecord

_INDENT = "  "
SCRIPTED, SEEN = "scripted", "seen"  # marks of inputs: made up, or met by trained models
_DECLARED = "A kernel's declared plan is an assumption: each run compares it with the kernel's bits."


@dataclass(frozen=True)
class VendorPlan:
    """The rounding of a vendor's kernel in bf16, as `--plan` takes it."""

    name: str
    kernel: str  # what it is called where it is used, and when
    plan: str  # as `tiebreak.kernels.declarations.parse_declaration` takes it
    source: str  # repository, path and lines
    version: str  # commit or release, and date
    rests_on: str = "source lines; no device that it is for was asked"  # the plan, in words
    note: str = ""  # what the source does not say, or a plan cannot


_TABLES = tomllib.loads((files("tiebreak.kernels") / "vendor_plans.toml").read_text("utf-8"))
VENDOR_PLANS: Mapping[str, VendorPlan] = {name: VendorPlan(name, **table) for name, table in _TABLES.items()}


def groups() -> dict[str, dict[str, Experiment]]:
    """Return experiments by group and name; calls first."""
    by_group: dict[str, dict[str, Experiment]] = {}
    for each in sorted(offered(cases_named=True), key=lambda each: each.kind != OneCall.kind):
        kind = kinds()[each.kind]
        heading = each.described().group or kind.described.about
        condition = ": where --experiments or --cases names it" if kind.on_request else ""
        by_group.setdefault(heading + condition, {})[each.name] = each
    return by_group


def cases(arguments: Sequence[str]) -> int:
    """Print inputs and training runs, a line each; all of those that are named."""
    experiments = {name: each for group in groups().values() for name, each in group.items()}
    about = "Inputs and short training runs that kernels are put through."
    parser = parser_of("case", about)
    parser.add_argument("--json", metavar="FILE", help="write them as JSON too; -: to the terminal, and nothing else")
    options = parser.parse_args(arguments)
    terminal.check_folders(json=options.json)
    named = matching("case", options.names, experiments)
    told = {name: experiments[name].described() for name in named or experiments}
    terminal.write(encode(told, indent=2) + "\n", options.json)
    if options.json == terminal.STDOUT:
        return PASSED
    if named:
        print("\n\n".join("\n".join(described(experiments[name])) for name in named))
        return PASSED
    lines = {name: f"{_origin(it):8} {it.about}{f' ({it.seen})' if it.seen else ''}" for name, it in told.items()}
    _print(
        {heading: {name: lines[name] for name in group} for heading, group in groups().items()},
        f"{SCRIPTED}: an input on which rounding is known to fail, which no trained model is known to meet; {SEEN}: two"
        " models do, so often. `tiebreak list cases NAME` tells all of one.",
    )
    return PASSED


def _origin(case: CaseRecord) -> str:
    """Return the mark of a case: whether trained models meet it, or it is a failure input that is made up."""
    return SEEN if case.seen else SCRIPTED if case.failure else ""


def backends(arguments: Sequence[str]) -> int:
    """Print where kernels run, and which package brings each."""
    about = "Where kernels run: what --backend takes, or path/to/file.py:NAME."
    Parser(prog="tiebreak list backends", description=about).parse_args(arguments)
    groups: dict[str, dict[str, str]] = {}
    for name, backend in BACKENDS.usable().items():
        reason = backend.unavailable()
        line = f"{backend.about}; can't run here: {reason}" if reason else backend.about
        groups.setdefault(BACKENDS.origin(name), {})[name] = line
    _print(groups, "\n".join(["By the package that brings them.", *plugins.problems()]))
    return PASSED


def kernels(arguments: Sequence[str]) -> int:
    """Print the kernels of every backend, and adapters of packages."""
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
    return PASSED


def plans(arguments: Sequence[str]) -> int:
    """Print rounding plans and shift rules: what --plan takes."""
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
    return PASSED


def vendors(arguments: Sequence[str]) -> int:
    """Print plans of kernels that vendors ship, with their sources."""
    about = "What vendors' kernels round, by their sources, as --plan takes it."
    names, lines = parser_of("vendor", about).parse_args(arguments).names, []
    for plan in (VENDOR_PLANS[name] for name in matching("vendor", names, VENDOR_PLANS) or VENDOR_PLANS):
        rows = [("plan", plan.plan), ("source", f"{plan.source} ({plan.version})")]
        rows += [("rests on", plan.rests_on), ("note", plan.note)]
        lines.append("\n".join(lines_of(f"{plan.name}: {plan.kernel}", rows)))
    print("\n\n".join(lines))
    return PASSED


def shapes(arguments: Sequence[str]) -> int:
    """Print the sizes that meet in pairs, then the calls of each question, by which kernels are asked for own paths."""
    about = "Shapes of calls: every two sizes meet, with each parameter of a kernel; and calls of public reports."
    Parser(prog="tiebreak list shapes", description=about).parse_args(arguments)
    sizes = [(name, ", ".join(str(value or "the first that it takes") for value in sizes))
             for name, sizes in dimensions().items()]  # fmt: skip
    parts = [lines_of("shapes: every two of these meet in a call", sizes)]
    for name, calls in grouped(reported(), lambda call: call.asks).items():
        by_source = grouped(calls, lambda call: call.source).items()
        rows = [row for source, own in by_source
                for row in (("calls", "; ".join(call.words for call in own)), ("source", source))]  # fmt: skip
        parts.append(lines_of(f"{name}: calls by what is not as usual", rows))
    print("\n\n".join("\n".join(part) for part in parts))
    return PASSED


def parser_of(kind: str, about: str) -> Parser:
    """Return the parser of a command line that names some of a kind."""
    parser = Parser(prog=f"tiebreak list {kind}s", description=about)
    parser.add_argument("names", nargs="*", metavar="NAME", help="tell all of these alone; globs allowed")
    return parser


def matching(kind: str, names: Sequence[str], known: Collection[str]) -> list[str]:
    """Return the known names that names and globs match, none where none is given; UsageError: one has none."""
    return pick(kind, ",".join(names), known, f"`tiebreak list {kind}s` names") if names else []


def _print(groups: Mapping[str, Mapping[str, str]], legend: str) -> None:
    width = max(len(name) for group in groups.values() for name in group)
    for about, group in groups.items():
        print(about)
        for name, line in group.items():
            print(f"{_INDENT}{name:{width}}  {line}".rstrip())
        print()
    print(legend)


def described(experiment: Experiment) -> Iterator[str]:
    """Yield the lines about an experiment."""
    it = experiment.described()
    rows = [("is", it.about), ("source", it.source), ("version", str(experiment.version))]
    if isinstance(experiment, OneCall):
        rows.append(("measured", "dQ, dK and dV too" if it.backward else "O alone"))
        rows.append(("failure", "rounding is known to fail on it" if it.failure else ""))
        rows.append((_origin(it), it.seen or "no trained model is known to meet it" * it.failure))
        rows += [("claim", _claim_text(claim)) for claim in experiment.case.claims]
    rows += experiment.told()
    if it.unclaimed:
        rows.append(("of others", f"nothing is claimed: {it.unclaimed}"))
    return lines_of(experiment.name, rows)


def lines_of(name: str, rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield the lines of rows under a name."""
    yield name
    yield from (f"{_INDENT}{label:11}{text}" for label, text in rows if text)


def _claim_text(claim: Claim) -> str:
    rules, plans = (" ".join(sorted(names)) or "any" for names in (claim.rules, claim.plans))
    tiles = {None: "", True: ", in tiles", False: ", in one tile"}[claim.tiled]
    formats = ", ".join(sorted(claim.formats))
    return f"{claim.expectation.name}: rule {rules}, plan {plans}{tiles}, in {formats} ({claim.source})"


def _plan_text(plan: RoundingPlan) -> str:
    """Return the points that are not as in fp32, as --plan takes them, and those that no text can express."""
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
