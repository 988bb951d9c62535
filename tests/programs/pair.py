"""`tiebreak pair A B`: two kernels, or one in two places, on the same inputs; and `tiebreak.pair(a, b)`."""

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace as with_fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from msgspec.structs import replace

from tiebreak.backends.backend import CPU, EMULATION, Backend
from tiebreak.cases.gpt2.fixture import Way
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.external import external_kernel
from tiebreak.kernels.external.kernels import users_kernel
from tiebreak.kernels.external.loading import EXPECTED
from tiebreak.kernels.external.options import LoadError, declared_options
from tiebreak.kernels.formats import BF16
from tiebreak.kernels.kernel import Declaration, Kernel, composed
from tiebreak.matrix.identification.asking import ProbedKernel
from tiebreak.matrix.identification.identity import identify
from tiebreak.matrix.identification.settling import UnidentifiedError
from tiebreak.matrix.pairs import Side
from tiebreak.matrix.pairs.judgement import CASES, KNOWN, QUESTIONS, Tell, apply_limits, judge_pair
from tiebreak.matrix.pairs.through_model import SuiteModel, own_model, through_model
from tiebreak.matrix.selection import Selection, matching_backends
from tiebreak.matrix.trial import raised
from tiebreak.matrix.workbench import Settings
from tiebreak.programs.files.backend import CallFolder
from tiebreak.programs.files.pairing import cases_of, folder_of, probed, settings_of, side_of
from tiebreak.programs.identify import FORMATS
from tiebreak.reports import terminal
from tiebreak.reports.cli import FAILED, PASSED, Parser, count, positive
from tiebreak.reports.errors import UsageError
from tiebreak.reports.names import first_few, pick
from tiebreak.reports.page.svg import as_file, draw
from tiebreak.reports.pairs.log_probabilities import MEASURES, figures
from tiebreak.reports.pairs.verdict import PairVerdict
from tiebreak.reports.records.store import as_text
from tiebreak.reports.tables import grids
from tiebreak.reports.tables.run import counted
from tiebreak.reports.tables.texts import percent

_GPT2, _NONE = "gpt2", "none"  # instead of a user's model
_HEADS = 64  # of a case at first
_NAMED = 3  # inputs that a plan does not explain
Target = str | Callable[..., Any]


def main(arguments: Sequence[str]) -> int:
    """Run the verb `pair`; see `tiebreak.reports.cli.main`."""
    options = vars(_parser().parse_args(arguments))
    files = {flag: options.pop(flag) for flag in ("json", "markdown", "figure")}
    terminal.check_folders(**files)
    if files["figure"] is not None and options["model"] == _NONE:
        raise UsageError("--figure: it is of the model's log-probabilities, and --model none leaves them out")
    verdict = pair(**options, tell=lambda line: terminal.say(f"pair: {line}"))
    verdict = replace(verdict, command=shlex.join(["tiebreak", "pair", *arguments]))
    if files["json"] != terminal.STDOUT:
        grids.show(verdict.parts())
    drawn = as_file(*map(draw, figures(verdict.model))) if verdict.model else ""
    texts = as_text(verdict), f"{grids.text(verdict.parts(), 'github')}\n", drawn
    for file, text in zip(files.values(), texts, strict=True):
        terminal.write(text, file)
    return PASSED if verdict.ok else FAILED


class PairOptions(TypedDict, total=False):
    """The options of `tiebreak pair`; its --help says what each does."""

    backend: str | None
    card: str | None  # --as
    declare: Sequence[str]
    cases: str | None
    dtype: Literal["bf16", "fp16"] | None
    heads: int
    seed: int
    model: str | None
    limits: Mapping[str, float]


def pair(a: Target, b: Target, *, tell: Tell = lambda line: None, **options: Unpack[PairOptions]) -> PairVerdict:
    """Compare two attention kernels, as `tiebreak pair` does, in this process.

    Args:
        a, b: functions, or targets as of `tiebreak check`, plans as of `--plan`, or kernels of a backend by name.
        tell: is told how far it is.
        options: those of the command: backend, card (`--as`), declare, cases, dtype, heads, seed, model, limits (a
            mapping).

    Returns:
        What there is to say of them: ok, headline, severity, calls... Printed, it is what the command prints first.

    Raises:
        tiebreak.reports.errors.UsageError: an option that there is not, or of no such value; a side that can't be
            found or asked.
    """
    chosen = _parser().parse_args(["a", "b"])
    if unknown := options.keys() - vars(chosen).keys():
        raise UsageError(f"tiebreak.pair has no {', '.join(sorted(unknown))}; it has {', '.join(vars(chosen))}")
    vars(chosen).update(options)
    limits, fmt = dict(chosen.limits), FORMATS.get(chosen.dtype or BF16.name)
    if fmt is None:
        raise UsageError(f"--dtype {chosen.dtype}: expected {' or '.join(FORMATS)}")
    if wrong := [name for name in limits if name not in MEASURES or chosen.model == _NONE]:
        raise UsageError(f"--limit {wrong[0]}: expected {', '.join(MEASURES)}, of log-probabilities through a model")
    folders = [folder_of(target) for target in (a, b)]
    plans = [None if folder else plan_of(target) for target, folder in zip((a, b), folders, strict=True)]
    names = (chosen.backend or ",".join((CPU if plan is None else EMULATION).name for plan in plans)).split(",")
    cards = [chosen.card] if chosen.card is None else chosen.card.split(",")
    found = [matching_backends(Selection(backends=",".join(names), card=card)) for card in cards]
    by_name = [{backend.name: backend for backend in each} for each in (found[0], found[-1])]
    for flag, given, several in (("backend", chosen.backend, names), ("as", chosen.card, cards)):
        if len(several) > len(plans) or not by_name[0].keys() >= set(names):
            raise UsageError(f"--{flag} {given}: expected one name for both, or one each")
    backends = by_name[0][names[0]], by_name[1][names[-1]]
    slow = any(backend.slower > 1 for backend in backends)
    kernels = [
        probed(folder, Path(str(target)).name, chosen.declare)
        if folder
        else ProbedKernel(backend, kernel_of(target, plan, backend, chosen.declare), fmt)
        for target, plan, backend, folder in zip((a, b), plans, backends, folders, strict=True)
    ]
    if any(folders):
        return _answered((a, b), kernels, folders, chosen.cases, tell)
    cases, executed = _cases(chosen.cases, slow), any(backend.pace == "executed" for backend in backends)
    ways = (Way.PREFILL,) if executed else tuple(Way)  # token by token it takes many calls
    model = SuiteModel(ways) if chosen.model in (None, _GPT2, _NONE) else own_model(chosen.model)
    formats = tuple(FORMATS.values()) if chosen.dtype is None else (fmt,)
    through = partial(through_model, formats=formats, model=model, tell=tell)
    first = _side(_name(a), kernels[0], chosen.seed, tell)
    same = (a, names[0], cards[0]) == (b, names[-1], cards[-1])  # one kernel is asked once
    sides = first, first if same else _side(_name(b), kernels[1], chosen.seed, tell)
    no_model = chosen.model == _NONE or (slow and chosen.model is None)
    verdict = judge_pair(sides, fmt, cases, Settings(chosen.seed, chosen.heads), tell, None if no_model else through)
    unasked = (
        ("invariance", chosen.cases, "--cases names"),
        ("log-probabilities", chosen.model, f"--model {_GPT2} asks"),
    )
    slowly = [
        f"{what}, which takes minutes on {names[0]}: {how} for it" for what, given, how in unasked if given is None
    ]
    slowly += ["the model's tokens in chunks or one by one, which takes an hour"] * (executed and not no_model)
    return apply_limits(replace(verdict, left_out=tuple(slowly) if slow else ()), limits)


def _answered(
    targets: tuple[Target, Target],
    kernels: Sequence[ProbedKernel],
    folders: Sequence[CallFolder | None],
    names: str | None,
    tell: Tell,
) -> PairVerdict:
    """Compare sides of which one or both are folders of answers, on the calls in these alone."""
    own, settings = cases_of(folders), settings_of(folders)
    chosen = [*own] if names is None else pick("case", names, own, "both folders have others", "--cases")
    formats = {each.fmt for each, folder in zip(kernels, folders, strict=True) if folder}
    if len(formats) > 1:
        raise UsageError(f"{targets[0]} is in {kernels[0].fmt.name}, {targets[1]} in {kernels[1].fmt.name}")
    fmt, made = formats.pop(), list[Side]()
    for at, (target, kernel, folder) in enumerate(zip(targets, kernels, folders, strict=True)):
        cases = [own[name][at] for name in chosen]
        side = side_of(_name(target), kernel, cases, settings) if folder else None
        made.append(side or _side(_name(target), with_fields(kernel, fmt=fmt), settings.seed, tell))
    left = "invariance, log-probabilities: outputs that are here are of these calls alone"
    return replace(judge_pair((made[0], made[1]), fmt, chosen, settings, tell, None, own), left_out=(left,))


def _cases(names: str | None, slow: bool) -> Sequence[str]:
    """Return the cases and questions of these names; by default the usual ones, without questions if calls are slow."""
    if names is None:
        return [name for name in CASES if not (slow and name in QUESTIONS)]
    return pick("case", names, KNOWN, "`tiebreak list cases` names", "--cases")


def _name(target: Target) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", type(target).__name__)


def plan_of(target: Target) -> Declaration | None:
    """Return the plan that a text names; None: it names another thing."""
    try:
        return parse_declaration(target) if isinstance(target, str) else None
    except ValueError as error:
        if "@" in str(target) and ".py" not in str(target):
            raise UsageError(f"{target}: {error}") from error
        return None


def kernel_of(target: Target, plan: Declaration | None, backend: Backend, declare: Sequence[str]) -> Kernel:
    """Return a plan, a backend's own kernel, a user's function or an adapter; bad usage if it can't run there."""
    vendors = {kernel.name: kernel for kernel in backend.vendor_kernels()}
    elsewhere = "a kernel of yours runs on a device" if plan is None and backend.predicts else None
    elsewhere = f"a plan runs on {EMULATION.name}, {CPU.name}" if plan and not backend.composed else elsewhere
    if (why := elsewhere or backend.unavailable()) is not None:
        raise UsageError(f"--backend {backend.name}: {why}")
    backend.set_up()
    if plan is not None:
        return composed(plan.label, plan)
    try:
        if not isinstance(target, str):
            return users_kernel(_name(target), target, declared_options(target, declare))
        return vendors[target] if target in vendors else external_kernel(target, flags=declare)
    except LoadError as error:
        raise UsageError(str(error).removeprefix("--kernel ")) from error


def _side(name: str, probed: ProbedKernel, seed: int, tell: Callable[[str], None]) -> Side:
    """Return a side with the plan that its kernel declares, or that the search of `tiebreak identify` finds."""
    backend, kernel = probed.backend, probed.kernel
    if kernel.declaration is not None:
        return Side(name, backend, kernel, kernel.declaration, known=True)
    try:
        identity = identify(probed, seed, tell)
    except UnidentifiedError as error:
        return Side(name, backend, kernel, None, known=False, rests_on=str(error))
    except Exception as error:  # whatever the kernel raises
        raise UsageError(f"{name}: it raised {raised(error, kernel)}") from error
    followed, inputs = identity.plan is not None, counted(len(identity.held_out), "input")
    nearest = "" if followed else "nearest, none is known: "
    rests_on = f"{nearest}{percent(identity.share)} of {identity.evidence} on {inputs}"
    if missed := [] if followed else list(identity.explanation.worst):
        rests_on += f", not all of {first_few(missed, _NAMED)}"
    return Side(name, backend, kernel, parse_declaration(identity.nearest), followed, rests_on)


def _limit(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    try:
        return name, float(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: expected NAME=NUMBER") from None


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tiebreak pair",
        description="Two attention kernels on the same inputs: equal bits, the signed difference, which is nearer to"
        " the exact answer, what separates their rounding plans, log-probabilities through a small language model;"
        " and a verdict: bitwise equal, two roundings of one thing, or apart.",
        epilog="exit codes: 0 bitwise equal or two roundings of one thing, 1 apart, undecided or beyond a limit,"
        " 2 bad usage",
    )
    what = (
        f"{EXPECTED.removeprefix('expected ')}; a plan as --plan takes it; a backend's kernel by name; or a folder of"
    )
    what += " tiebreak export with answers in it"
    for name in ("a", "b"):
        parser.add_argument(name, metavar=name.upper(), help=what)
    add = parser.add_argument
    add("--backend", metavar="NAME[,NAME]", help="of both, or of each (default: cpu; of a plan: emulation)")
    add("--as", dest="card", metavar="CARD[,CARD]", help="of --backend interpreter, ptx: compute as this card, or each")
    add("--declare", action="append", default=[], metavar="WORD=VALUE", help="as of tiebreak check")
    add("--cases", metavar="NAMES", help="inputs, and questions of invariance (default: two dozen)")
    add("--dtype", choices=FORMATS, help="of q, k and v (default: bf16; through the model fp16 too)")
    add("--heads", type=positive, default=_HEADS, metavar="N", help="at first; up to 8 times as many (default: 64)")
    add("--seed", type=count, default=1, metavar="N", help="of all inputs (default: 1)")
    add(
        "--model",
        metavar="TARGET",
        help=f"a function that returns your own (module, tokens), or {_NONE} (default, where calls are fast: {_GPT2})",
    )
    add("--limit", dest="limits", type=_limit, action="append", default=[], metavar="NAME=NUMBER",
        help=f"fail beyond it: {', '.join(MEASURES)} of the model's log-probabilities")  # fmt: skip
    add("--json", metavar="FILE", help="write all as JSON too; -: to the terminal, and nothing else")
    add("--markdown", metavar="FILE", help="write it as Markdown too, for a pull request")
    add("--figure", metavar="FILE.svg", help="draw log-probabilities by position")
    return parser
