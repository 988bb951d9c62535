"""`tiebreak audit`: what the Triton kernels round on GPUs that need not be there, and whether that is as expected."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tiebreak.kernels.triton.loading import installed
from tiebreak.laboratory.audit import records
from tiebreak.laboratory.audit.compiling import (
    TARGETS,
    Compilation,
    NotCompiledError,
    Target,
    compile_for,
    sources,
    unavailable,
)
from tiebreak.laboratory.audit.reading import read
from tiebreak.laboratory.audit.records import Audit, Audits, audit_tables
from tiebreak.reports.cli import FAILED, PASSED, Parser
from tiebreak.reports.errors import UsageError
from tiebreak.reports.names import matching, split
from tiebreak.reports.records import store
from tiebreak.reports.records.decode import SCHEMA
from tiebreak.reports.records.selection import pick
from tiebreak.reports.tables import grids
from tiebreak.reports.tables.run import counted


def audited(targets: Sequence[Target], kernels: Sequence[Compilation]) -> Iterator[Audit]:
    """Compile each kernel for each target and yield its audit, or why it is skipped; report progress on stderr."""
    total = len(targets) * len(kernels)
    pairs = ((target, kernel) for target in targets for kernel in kernels)
    for number, (target, kernel) in enumerate(pairs, 1):
        try:
            audit = read(target.name, kernel.name, compile_for(target, kernel), target.assembly)
        except NotCompiledError as error:
            audit = Audit.skip(target.name, kernel.name, str(error))
        state = "read" if audit.skipped is None else f"skipped: {audit.skipped}"
        print(f"{number}/{total} {audit.id}: {state}", file=sys.stderr)
        yield audit


def main(arguments: Sequence[str]) -> int:
    """Run the verb `audit`; see `tiebreak.reports.cli.main`."""
    options = _parser().parse_args(arguments)
    if options.update and options.expect is None:
        raise UsageError("--update: name the file to write with --expect FILE")
    if (reason := unavailable()) is not None:
        raise UsageError(f"nothing can be compiled here: {reason}")
    kernels = {kernel.name: kernel for kernel in sources()}
    targets = [TARGETS[name] for name in _picked("targets", options.targets, list(TARGETS))]
    chosen = [kernels[name] for name in _picked("kernels", options.kernels, list(kernels))]
    # A file that can't be read, or written, is refused here: compiling takes minutes.
    if options.update:
        records.check_update(options.expect, {(target.name, kernel.name) for target in targets for kernel in chosen})
    judging = options.expect is not None and not options.update
    expected = store.load(options.expect, Audits) if judging else None
    cards = {target.name: target.cards for target in targets}
    audits = Audits(SCHEMA, str(installed()), cards, tuple(audited(targets, chosen)))
    grids.show(audit_tables(audits), options.format)
    if options.update:
        store.write(audits, options.expect)
        print(f"expectation written: {options.expect}")
    return PASSED if expected is None or _judge(expected, audits, options) else FAILED


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tiebreak audit",
        description="Compile the Triton kernels for GPUs that need not be here; read what rounds in their assembly.",
    )
    parser.add_argument("--targets", metavar="NAMES", default="*", help=f"comma list, globs: {', '.join(TARGETS)}")
    parser.add_argument("--kernels", metavar="NAMES", default="*", help="kernels (comma list, globs); all by default")
    parser.add_argument("--format", choices=("simple", "github", "latex"), default="simple", help="default: simple")
    parser.add_argument("--expect", type=Path, metavar="FILE", help="fail if a rounding instruction is not as in FILE")
    parser.add_argument("--update", action="store_true", help="judge nothing, write or replace the file of --expect")
    return parser


def _picked(flag: str, names: str, available: Sequence[str]) -> list[str]:
    picked = pick(flag, flag.removesuffix("s"), names, available, "`tiebreak show reports/baselines/audit.json` has")
    return [name for name in available if name in picked]


def _judge(expected: Audits, audits: Audits, options: argparse.Namespace) -> bool:
    """Print the differences; return whether there are none."""
    path, inside = options.expect, list(expected.audits)
    for field, names in (("target", options.targets), ("kernel", options.kernels)):
        inside = [each for each in inside if any(matching(name, [getattr(each, field)]) for name in split(names))]
    lines = records.differences(inside, audits.audits)
    skips = sum(audit.skipped is not None for audit in audits.audits)
    print(
        f"audit {'FAILED' if lines else 'passed'}: {counted(len(audits.audits) - skips, 'kernel')} compared with"
        f" {path}, {skips} skipped, {len(lines)} differences"
    )
    for line in lines:
        print(f"changed {line}")
    if expected.triton != audits.triton:
        print(f"note    {path} is of triton {expected.triton}, this is {audits.triton}")
    if len(inside) < len(expected.audits):
        print(f"note    {len(expected.audits) - len(inside)} kernels of {path} were not selected")
    return not lines
