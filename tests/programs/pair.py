"""`tiebreak pair A B`: two kernels, or one in two places, on the same inputs; and `tiebreak.pair(a, b)`."""

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace as with_fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace

from tiebreak.backends.backend import CPU, EMULATION, Backend
from tiebreak.cases.captured import captured_cases
from tiebreak.cases.case import Case
from tiebreak.cases.feature_cases import EVERY
from tiebreak.cases.gpt2.fixture import Way
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.external import external_kernel
from tiebreak.kernels.external.kernels import users_kernel
from tiebreak.kernels.external.loading import EXPECTED
from tiebreak.kernels.external.options import LoadError, declared_options
from tiebreak.kernels.formats import BF16, Formats
from tiebreak.kernels.kernel import Kernel, composed
from tiebreak.matrix.identification.asking import ProbedKernel
from tiebreak.matrix.identification.candidates import accepted, on_device
from tiebreak.matrix.identification.identity import identify
from tiebreak.matrix.identification.settling import UnidentifiedError
from tiebreak.matrix.pairs import Side, bits_of
from tiebreak.matrix.pairs.judgement import CASES, KNOWN, QUESTIONS, Tell, apply_limits, judge_pair
from tiebreak.matrix.pairs.through_model import SuiteModel, own_model, through_model
from tiebreak.matrix.selection import Selection, matching_backends
from tiebreak.matrix.trial import raised
from tiebreak.matrix.workbench import CaseBench, Settings
from tiebreak.programs.files import backend as files
from tiebreak.programs.files import judge
from tiebreak.programs.files.backend import CallFolder
from tiebreak.programs.identify import FORMATS
from tiebreak.reports import terminal
from tiebreak.reports.calls import MANIFEST
from tiebreak.reports.cli import FAILED, PASSED, Parser, count, positive
from tiebreak.reports.errors import UsageError
from tiebreak.reports.names import first_few, pick, split
from tiebreak.reports.page.svg import as_file, draw
from tiebreak.reports.pairs.log_probabilities import MEASURES, SIDES, figures
from tiebreak.reports.pairs.verdict import PairVerdict
from tiebreak.reports.records.record import FOLLOWED
from tiebreak.reports.records.store import as_text
from tiebreak.reports.tables import grids

_GPT2, _NONE = "gpt2", "none"  # instead of a user's model
_HEADS = 64  # of a case at first
_NAMED = 3  # inputs that a plan does not explain
_FITTED = 3  # cases by which the plan of answers is told: of the calls that are compared, as no others were asked
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


def pair(
    a: Target,
    b: Target,
    *,
    backend: str | None = None,
    card: str | None = None,
    declare: Sequence[str] = (),
    cases: str | None = None,
    dtype: Literal["bf16", "fp16"] | None = None,
    heads: int = _HEADS,
    seed: int = 1,
    model: str | None = None,
    limits: Mapping[str, float] | Sequence[tuple[str, float]] = (),
    tell: Tell = lambda line: None,
) -> PairVerdict:
    """Compare two attention kernels, as `tiebreak pair` does, in this process.

    Args:
        a, b: functions, or targets as of `tiebreak check`, plans as of `--plan`, or kernels of a backend by name.
        backend, declare, cases, dtype, heads, seed, model, limits: as the command's options; card: as its `--as`.
        tell: is told how far it is.

    Returns:
        What there is to say of them: ok, headline, severity, calls... Printed, it is what the command prints first.

    Raises:
        tiebreak.reports.errors.UsageError: an option of no such value; a side that can't be found or asked.
    """
    allowed, fmt = dict(limits), FORMATS.get(dtype or BF16.name)
    if fmt is None:
        raise UsageError(f"--dtype {dtype}: expected {' or '.join(FORMATS)}")
    if wrong := [name for name in allowed if name not in MEASURES or model == _NONE]:
        raise UsageError(f"--limit {wrong[0]}: expected {', '.join(MEASURES)}, of log-probabilities through a model")
    folders, names, cards = [*map(_folder_of, (a, b))], _of_each("backend", backend), _of_each("as", card)
    kernels = [
        _answering(folder, Path(str(target)).name, declare)
        if folder
        else ProbedKernel(*kernel_of(target, name, card, declare, beside), fmt)
        for target, name, beside, card, folder in zip((a, b), names, names[::-1], cards, folders, strict=True)
    ]
    if any(folders):
        return _answered((a, b), kernels, folders, cases, tell)
    backends = [kernel.backend for kernel in kernels]
    slow, executed = any(x.slower > 1 for x in backends), any(x.pace == "executed" for x in backends)
    asked = [name for name in CASES if not (slow and name in QUESTIONS)]  # of slow calls no questions
    if cases is not None:
        asked = pick("case", cases, KNOWN, "`tiebreak list cases` names", "--cases")
    ways = (Way.PREFILL,) if executed else tuple(Way)  # token by token it takes many calls
    reads = SuiteModel(ways) if model in (None, _GPT2, _NONE) else own_model(model)
    formats = tuple(FORMATS.values()) if dtype is None else (fmt,)
    through = partial(through_model, formats=formats, model=reads, tell=tell)
    first = _side(_name(a), kernels[0], seed, tell)
    same = (a, names[0], cards[0]) == (b, names[1], cards[1])  # one kernel is asked once
    sides = first, first if same else _side(_name(b), kernels[1], seed, tell)
    no_model = model == _NONE or (slow and model is None)
    verdict = judge_pair(sides, fmt, asked, Settings(seed, heads), tell, None if no_model else through)
    ways_to_ask = {"invariance": (cases, "--cases names"), "log-probabilities": (model, f"--model {_GPT2} asks")}
    minutes = f"which takes minutes on {backends[0].name}"
    slowly = [f"{what}, {minutes}: {how} for it" for what, (given, how) in ways_to_ask.items() if given is None]
    slowly += ["the model's tokens in chunks or one by one, which takes an hour"] * (executed and not no_model)
    return apply_limits(replace(verdict, left_out=tuple(slowly) if slow else ()), allowed)


def _answered(
    targets: tuple[Target, Target],
    kernels: Sequence[ProbedKernel],
    folders: Sequence[CallFolder | None],
    names: str | None,
    tell: Tell,
) -> PairVerdict:
    """Compare sides of which one or both are folders of answers, on the calls in these alone."""
    own, settings = _cases_of([folder for folder in folders if folder])
    chosen = [*own] if names is None else pick("case", names, own, "both folders have others", "--cases")
    formats = {each.fmt for each, folder in zip(kernels, folders, strict=True) if folder}
    if len(formats) > 1:
        raise UsageError(f"{targets[0]} is in {kernels[0].fmt.name}, {targets[1]} in {kernels[1].fmt.name}")
    fmt, made = formats.pop(), list[Side]()
    for at, (target, kernel, folder) in enumerate(zip(targets, kernels, folders, strict=True)):
        cases = [own[name][at] for name in chosen]
        side = _side_of_answers(_name(target), kernel, cases, settings) if folder else None
        made.append(side or _side(_name(target), with_fields(kernel, fmt=fmt), settings.seed, tell))
    left = "invariance, log-probabilities: outputs that are here are of these calls alone"
    return replace(judge_pair((made[0], made[1]), fmt, chosen, settings, tell, None, own), left_out=(left,))


def _folder_of(target: object) -> CallFolder | None:
    """Return a folder of calls that all have an answer; None: the target is none. UsageError: an answer is wrong."""
    if not isinstance(target, str) or not (Path(target) / MANIFEST).is_file():
        return None
    files.opened.cache_clear()
    folder = files.opened(target)
    if fault := next(folder.faults(), None):
        raise UsageError(fault)
    return folder


def _answering(folder: CallFolder, name: str, declare: Sequence[str]) -> ProbedKernel:
    """Return the kernel whose answers a folder has."""
    dtype = folder.manifest.options["dtype"]
    if dtype not in FORMATS:
        raise UsageError(f"{folder.path}: its calls are in {dtype}: export them in one of them")
    flags = [f"{word}={value}" for word, value in judge.declared_of(folder, name).items()]
    asked = kernel_of(files.TARGET, files.FILES.name, str(folder.path), [*flags, *declare])
    return ProbedKernel(*asked, FORMATS[dtype])


def _cases_of(folders: Sequence[CallFolder]) -> tuple[dict[str, tuple[Case, Case]], Settings]:
    """Return the cases that one or two folders have in common, of A and of B, and the seed and heads of their calls."""
    each, options = [_cases(folder) for folder in folders], [folder.manifest.options for folder in folders]
    common = {name: (case, each[-1][name]) for name, case in each[0].items() if name in each[-1]}
    if not common or len({given["seed"] for given in options}) > 1:
        raise UsageError(f"{' and '.join(str(folder.path) for folder in folders)}: no case is in both")
    return common, Settings(int(options[0]["seed"]), max(int(given["heads"]) for given in options))


def _cases(folder: CallFolder) -> Mapping[str, Case]:
    options = folder.manifest.options
    if options.get("captured") == ".":
        return {case.name: case for case in captured_cases(folder.path)}
    named = split(options["cases"])
    return {case.name: case for case in EVERY if case.name in named}


def _side_of_answers(name: str, asked: ProbedKernel, cases: Sequence[Case], settings: Settings) -> Side:
    """Return a side with the plan that it declares, or that has most of its bits."""
    side = Side(name, asked.backend, asked.kernel, asked.kernel.declaration, known=True)
    if side.plan is not None:
        return side
    plans, shares = accepted(on_device(asked.backend), Formats.of(asked.fmt)), dict[str, list[float]]()
    for case in cases[:_FITTED]:
        batch = CaseBench(case, asked.fmt, settings).batch(0)
        if (answer := asked.answer(case.name, batch)) is not None:
            for plan, fit in batch.fits(answer.o, plans).items():
                shares.setdefault(plan, []).append(fit.bits)
    if not shares:
        return with_fields(side, known=False, rests_on="; ".join(asked.refused.values()))
    best = max(shares, key=lambda plan: sum(shares[plan]))
    share = sum(shares[best]) / len(shares[best])
    rests_on = bits_of(share, asked.backend.evidence, len(shares[best]), known=share >= FOLLOWED)
    return with_fields(side, plan=plans[best], known=share >= FOLLOWED, rests_on=rests_on)


def _name(target: Target) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", type(target).__name__)


def _of_each(flag: str, text: str | None) -> list[str | None]:
    """Return what A and B are given by a flag of one word for both, or one each."""
    words = [None] if text is None else text.split(",")
    if len(words) > len(SIDES):
        raise UsageError(f"--{flag} {text}: expected one name for both, or one each")
    return [words[0], words[-1]]


def kernel_of(
    target: Target, name: str | None, card: str | None, declare: Sequence[str], beside: str | None = None
) -> tuple[Backend, Kernel]:
    """Return where a target runs (by default a plan on the emulation, else on the CPU), and what it names.

    That is a plan, a kernel of the backend's own, a user's function or an adapter; bad usage if it can't run there. The
    card is the backend's, or that of one beside it.
    """
    plan = None
    try:
        plan = parse_declaration(target) if isinstance(target, str) else None
    except ValueError as error:
        if "@" in str(target) and ".py" not in str(target):
            raise UsageError(f"{target}: {error}") from error
    name = name or (CPU if plan is None else EMULATION).name
    names = list(dict.fromkeys([name, beside or name]))
    backend, *others = matching_backends(Selection(backends=",".join(names), card=card))
    if len(others) >= len(names):
        raise UsageError(f"--backend {name}: name one")
    vendors = {kernel.name: kernel for kernel in backend.vendor_kernels()}
    elsewhere = "a kernel of yours runs on a device" if plan is None and backend.predicts else None
    elsewhere = f"a plan runs on {EMULATION.name}, {CPU.name}" if plan and not backend.composed else elsewhere
    if (why := elsewhere or backend.unavailable()) is not None:
        raise UsageError(f"--backend {backend.name}: {why}")
    backend.set_up()
    if plan is not None:
        return backend, composed(plan.label, plan)
    try:
        if not isinstance(target, str):
            return backend, users_kernel(_name(target), target, declared_options(target, declare))
        return backend, vendors[target] if target in vendors else external_kernel(target, flags=declare)
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
    followed = identity.plan is not None
    rests_on = bits_of(identity.share, identity.evidence, len(identity.held_out), known=followed)
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
