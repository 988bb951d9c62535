"""`tiebreak audit`: what the Triton kernels round on GPUs that need not be there, and whether that is as expected."""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tiebreak.kernels.triton.roster import Compilation
from tiebreak.programs.audit.compiling import NotCompiledError, compile_for, compiler, unavailable
from tiebreak.programs.audit.reading import read
from tiebreak.programs.audit.sources import sources
from tiebreak.programs.audit.targets import TARGETS, Target
from tiebreak.reports.audit import record as records
from tiebreak.reports.audit import tables as audit_tables
from tiebreak.reports.audit.record import Audit, Audits
from tiebreak.reports.cli import FELL, HELD, Parser
from tiebreak.reports.errors import UsageError
from tiebreak.reports.names import matching, split
from tiebreak.reports.records import store
from tiebreak.reports.records.decode import SCHEMA
from tiebreak.reports.records.selection import pick
from tiebreak.reports.tables import grids
from tiebreak.reports.tables.run import counted


def audited(targets: Iterable[Target], kernels: Sequence[Compilation]) -> Iterator[Audit]:
    """Compile and read.

    Args:
        targets: the GPUs.
        kernels: what to compile for each of them.

    Returns:
        One audit a target and kernel, skipped with the reason where Triton does not compile it.
    """
    for target in targets:
        for kernel in kernels:
            try:
                text = compile_for(target, kernel)
            except NotCompiledError as error:
                yield Audit.skip(target.name, kernel.name, str(error))
            else:
                yield read(target.name, kernel.name, text, target.assembly)


def main(arguments: Sequence[str]) -> int:
    """The verb `audit`; see `tiebreak.reports.cli.main`."""
    options = _parser().parse_args(arguments)
    if options.update and options.expect is None:
        raise UsageError("--update: name the file to write with --expect FILE")
    reason = unavailable()
    if reason is not None:
        raise UsageError(f"nothing can be compiled here: {reason}")
    kernels = {kernel.name: kernel for kernel in sources()}
    targets = [TARGETS[name] for name in _picked("targets", options.targets, list(TARGETS))]
    chosen = [kernels[name] for name in _picked("kernels", options.kernels, list(kernels))]
    expected = _expected(options, targets, chosen)
    cards = {target.name: target.cards for target in targets}
    audits = Audits(SCHEMA, compiler(), cards, tuple(_with_progress(targets, chosen)))
    grids.show(audit_tables.audit_tables(audits), options.format)
    if options.update:
        store.write(audits, options.expect)
        print(f"expectation written: {options.expect}")
    if expected is None:
        return HELD
    return HELD if _judge(expected, audits, options) else FELL


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tiebreak audit",
        description="Compile the Triton kernels for GPUs that need not be here; read what rounds in their assembly.",
    )
    parser.add_argument("--targets", metavar="NAMES", help=f"GPUs (comma list, globs): {', '.join(TARGETS)}")
    parser.add_argument("--kernels", metavar="NAMES", help="kernels (comma list, globs); all by default")
    parser.add_argument("--format", choices=("simple", "github", "latex"), default="simple", help="default: simple")
    parser.add_argument("--expect", type=Path, metavar="FILE", help="fail if a rounding instruction is not as in FILE")
    parser.add_argument("--update", action="store_true", help="judge nothing, write or replace the file of --expect")
    return parser


def _expected(options: argparse.Namespace, targets: Sequence[Target], kernels: Sequence[Compilation]) -> Audits | None:
    """What to judge by. A file that can't be read, or written, is refused here: compiling takes minutes."""
    if options.expect is None:
        return None
    if options.update:
        records.check_update(options.expect, {(target.name, kernel.name) for target in targets for kernel in kernels})
        return None
    return store.load(options.expect, Audits)


def _picked(flag: str, names: str | None, available: Sequence[str]) -> list[str]:
    if names is None:
        return list(available)
    picked = pick(flag, flag.removesuffix("s"), names, available, "`tiebreak show reports/baselines/audit.json` has")
    return [name for name in available if name in picked]


def _selected(names: str | None, name: str) -> bool:
    return names is None or any(matching(pattern, [name]) for pattern in split(names))


def _with_progress(targets: Sequence[Target], kernels: Sequence[Compilation]) -> Iterator[Audit]:
    total = len(targets) * len(kernels)
    for number, audit in enumerate(audited(targets, kernels), 1):
        state = "read" if audit.skipped is None else f"skipped: {audit.skipped}"
        print(f"{number}/{total} {audit.id}: {state}", file=sys.stderr)
        yield audit


def _judge(expected: Audits, audits: Audits, options: argparse.Namespace) -> bool:
    """Print what differs; True where nothing does."""
    path = options.expect
    inside = [
        audit
        for audit in expected.audits
        if _selected(options.targets, audit.target) and _selected(options.kernels, audit.kernel)
    ]
    lines = records.differences(inside, audits.audits)
    skips = sum(1 for audit in audits.audits if audit.skipped is not None)
    print(
        f"audit {'FELL' if lines else 'held'}: {counted(len(audits.audits) - skips, 'kernel')} compared with {path},"
        f" {skips} skipped, {len(lines)} differences"
    )
    for line in lines:
        print(f"changed {line}")
    if expected.triton != audits.triton:
        print(f"note    {path} is of triton {expected.triton}, this is {audits.triton}")
    if len(inside) < len(expected.audits):
        print(f"note    {len(expected.audits) - len(inside)} kernels of {path} were not selected")
    return not lines
