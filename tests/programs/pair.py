"""`tiebreak pair A B`: two kernels, or one in two places, on the same inputs; and `tiebreak.pair(a, b)`."""

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tiebreak.backends.backend import CPU, EMULATION, Backend
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.external.kernels import external_kernel, users_kernel
from tiebreak.kernels.external.loading import EXPECTED
from tiebreak.kernels.external.options import LoadError, declared_options
from tiebreak.kernels.kernel import Declaration, Kernel, composed
from tiebreak.matrix.identification.asking import Asked
from tiebreak.matrix.identification.identity import identify
from tiebreak.matrix.identification.known import KnownPlans, UnidentifiedError
from tiebreak.matrix.pairs.judgement import CASES, KNOWN, judged
from tiebreak.matrix.pairs.side import Side
from tiebreak.matrix.selection import Selection, matching_backends
from tiebreak.matrix.settings import Settings
from tiebreak.matrix.trial import raised
from tiebreak.programs.identify import FORMATS
from tiebreak.reports.cli import FELL, HELD, Parser, count, positive
from tiebreak.reports.errors import UsageError
from tiebreak.reports.names import pick
from tiebreak.reports.pairs.verdict import PairVerdict
from tiebreak.reports.records.store import as_text, write_text
from tiebreak.reports.tables import grids
from tiebreak.reports.tables.run import counted
from tiebreak.reports.tables.texts import percent

_STDOUT = "-"  # in the place of a file
_HEADS = 64  # of a case at first
_LETTERS = ("a", "b")
Target = str | Callable[..., Any]


def main(arguments: Sequence[str]) -> int:
    """The verb `pair`; see `tiebreak.reports.cli.main`."""
    options = vars(_parser().parse_args(arguments))
    json, markdown = options.pop("json"), options.pop("markdown")
    for flag, file in (("--json", json), ("--markdown", markdown)):
        if file not in (None, _STDOUT) and not Path(file).parent.is_dir():
            raise UsageError(f"{flag} {file}: there is no folder {Path(file).parent}")
    verdict = replace(pair(**options, tell=_progress), command=shlex.join(["tiebreak", "pair", *arguments]))
    if json == _STDOUT:
        sys.stdout.write(as_text(verdict))
    else:
        grids.show(verdict.parts())
    if json not in (None, _STDOUT):
        write_text(as_text(verdict), Path(json))
    if markdown is not None:
        write_text(f"{grids.text(verdict.parts(), 'github')}\n", Path(markdown))
    return HELD if verdict.ok else FELL


def pair(
    a: Target,
    b: Target,
    *,
    backend: str | None = None,
    card: str | None = None,
    declare: Sequence[str] = (),
    cases: str | None = None,
    dtype: str = "bf16",
    heads: int = _HEADS,
    seed: int = 1,
    tell: Callable[[str], None] = lambda line: None,
) -> PairVerdict:
    """Hold two attention kernels against each other, as `tiebreak pair` does, in this process.

    Args:
        a, b: functions, or targets as of `tiebreak check`, plans as of `--plan`, or kernels of a backend by name.
        backend: where they run, one name for both or one each; a plan without one is emulated.
        card, declare, cases, dtype, heads, seed: as of the command, `card` as `--as`.
        tell: is told how far it is.

    Returns:
        What there is to say of them: ok, headline, severity, calls... Printed, it is what the command prints first.

    Raises:
        tiebreak.reports.errors.UsageError: an option has no such value, or a side can't be found or asked.
    """
    names = backend.split(",") if backend else [""]
    if len(names) > len(_LETTERS):
        raise UsageError(f"--backend {backend}: expected one name for both, or one each")
    if dtype not in FORMATS:
        raise UsageError(f"--dtype {dtype}: expected {' or '.join(FORMATS)}")
    try:
        chosen = CASES if cases is None else pick("case", cases, KNOWN, "`tiebreak list cases` names")
    except ValueError as error:
        raise UsageError(f"--cases: {error}") from None
    sought = [(_named(target), target, name.strip()) for target, name in zip((a, b), (*names, names[-1]), strict=False)]
    found = dict[tuple[str, str], Side]()  # one kernel is asked once
    for label, target, name in sought:
        if (label, name) not in found:
            at, kernel = _kernel(target, name, card, declare)
            found[label, name] = _side(label, at, KnownPlans(Asked(at, kernel, FORMATS[dtype]), seed, tell))
    sides = [found[label, name] for label, _, name in sought]
    return judged((sides[0], sides[1]), FORMATS[dtype], chosen, Settings(seed, heads), tell)


def _named(target: Target) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", type(target).__name__)


def _kernel(target: Target, name: str, card: str | None, declare: Sequence[str]) -> tuple[Backend, Kernel]:
    """A kernel of a backend, a plan, a user's function or an adapter, and where it runs."""
    plan = _plan(target)
    chosen = matching_backends(Selection(backends=name or (CPU if plan is None else EMULATION).name, card=card))
    if len(chosen) != 1 or (why := chosen[0].unavailable()) is not None:
        raise UsageError(f"--backend {name}: {why if len(chosen) == 1 else 'expected one name a side'}")
    backend = chosen[0]
    backend.set_up()
    own = next((kernel for kernel in backend.vendor_kernels() if kernel.name == target), None)
    if own is not None:
        return backend, own
    if plan is not None and backend.composed:
        return backend, composed(plan.label, plan)
    if backend.predicts or plan is not None:
        raise UsageError(
            f"--backend {backend.name}: {_named(target)} runs elsewhere: functions on a device, plans on cpu"
        )
    try:
        if isinstance(target, str):
            return backend, external_kernel(target, flags=declare)
        return backend, users_kernel(_named(target), target, declared_options(target, declare))
    except LoadError as error:
        raise UsageError(str(error).removeprefix("--kernel ")) from error


def _plan(target: Target) -> Declaration | None:
    """The plan that a text names; None: it names another thing."""
    if not isinstance(target, str):
        return None
    try:
        return parse_declaration(target)
    except ValueError as error:
        if "@" in target and ".py" not in target:
            raise UsageError(f"{target}: {error}") from error
        return None


def _side(label: str, backend: Backend, known: KnownPlans) -> Side:
    """A side with the plan that its kernel declares, or that the whole search of `tiebreak identify` comes to."""
    kernel, tell = known.asked.kernel, known.tell
    if kernel.declaration is not None:
        return Side(label, backend, kernel, kernel.declaration, known=True)
    known.tell = lambda line: tell(f"{label}: {line}")
    try:
        identity = identify(known)
    except UnidentifiedError as error:
        return Side(label, backend, kernel, None, known=False, rests_on=str(error))
    except Exception as error:  # whatever the kernel raises
        raise UsageError(f"{label}: it raised {raised(error, kernel)}") from error
    rests_on = f"{percent(identity.share)} of bits on {counted(len(identity.held_out), 'input')}"
    known_plan = identity.plan is not None
    rests_on = rests_on if known_plan else f"nearest, none is known: {rests_on}"
    return Side(label, backend, kernel, parse_declaration(identity.nearest), known_plan, rests_on)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tiebreak pair",
        description="Two attention kernels on the same inputs: equal bits, the difference with its sign, which of them"
        " is nearer to the exact answer, what separates their rounding plans; and a verdict: the same bits, two"
        " roundings of one thing, or apart.",
        epilog="exit codes: 0 the same bits or two roundings of one thing, 1 apart or not told, 2 bad usage",
    )
    what = f"{EXPECTED.removeprefix('expected ')}; or a plan as --plan takes it, or a backend's kernel by name"
    for name in _LETTERS:
        parser.add_argument(name, metavar=name.upper(), help=what)
    parser.add_argument(
        "--backend", metavar="NAME[,NAME]", help="of both, or of each (default: cpu; a plan: emulation)"
    )
    parser.add_argument("--as", dest="card", metavar="CARD", help="of --backend interpreter: compute as this card")
    parser.add_argument("--declare", action="append", default=[], metavar="WORD=VALUE", help="as of tiebreak check")
    parser.add_argument("--cases", metavar="NAMES", help="inputs and questions to compare on (default: some 20)")
    parser.add_argument("--dtype", choices=FORMATS, default="bf16", help="format of q, k and v (default: bf16)")
    parser.add_argument(
        "--heads",
        type=positive,
        default=_HEADS,
        metavar="N",
        help=f"at first, 8 times as many at most (default: {_HEADS})",
    )
    parser.add_argument("--seed", type=count, default=1, metavar="N", help="of all inputs (default: 1)")
    parser.add_argument(
        "--json", metavar="FILE", help="write all of it as JSON too; -: to the terminal, and nothing else"
    )
    parser.add_argument("--markdown", metavar="FILE", help="write it as Markdown too, for a pull request")
    return parser


def _progress(line: str) -> None:
    """Say on a terminal how far it is, in the place of what was said before."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{line:80.80}\r")
        sys.stderr.flush()
