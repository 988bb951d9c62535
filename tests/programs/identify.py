"""`tiebreak identify TARGET...`: the rounding plan of a user's kernel, from its outputs alone."""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from tiebreak.backends.backend import Backend
from tiebreak.kernels.external.kernels import UserKernel, external_kernel
from tiebreak.kernels.external.loading import EXPECTED
from tiebreak.kernels.external.options import LoadError
from tiebreak.kernels.formats import BF16, FP16
from tiebreak.matrix.identification.asking import ProbedKernel
from tiebreak.matrix.identification.identity import Identity, identify
from tiebreak.matrix.identification.settling import UnidentifiedError
from tiebreak.matrix.selection import Selection, matching_backends
from tiebreak.matrix.trial import raised
from tiebreak.reports import terminal
from tiebreak.reports.cli import FAILED, PASSED, USAGE, Parser, count
from tiebreak.reports.errors import UsageError
from tiebreak.reports.records.decode import SCHEMA

FORMATS = {fmt.name: fmt for fmt in (BF16, FP16)}


def main(arguments: Sequence[str]) -> int:
    """Run the verb `identify`; see `tiebreak.reports.cli.main`."""
    options = _parser().parse_args(arguments)
    terminal.check_folders(json=options.json)
    identities, failures = list[Identity](), dict[str, str]()
    backends = devices(options.backend, options.targets, options.card)
    kernels = loaded(options.targets, options.declare)
    for backend in backends:
        for kernel in kernels:
            tell = lambda line, name=kernel.name: terminal.say(f"{name}: {line}")  # noqa: E731
            try:
                identity = identify(ProbedKernel(backend, kernel, FORMATS[options.dtype]), options.seed, tell)
            except Exception as error:  # whatever the kernel raises
                is_unidentified = isinstance(error, UnidentifiedError)
                failures[kernel.name] = str(error) if is_unidentified else f"it raised {raised(error, kernel)}"
            else:
                identities.append(identity)
                if options.json != terminal.STDOUT:
                    terminal.show("\n".join(identity.lines()))
    for name, why in failures.items():
        print(f"tiebreak identify: {name}: {why}", file=sys.stderr)
    parts = {"schema": SCHEMA, "identities": [asdict(each) for each in identities], "failures": failures}
    terminal.write(json.dumps(parts, indent=2, allow_nan=False) + "\n", options.json)
    if failures:
        return USAGE
    return FAILED if any(identity.plan is None for identity in identities) else PASSED


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tiebreak identify",
        description="Find the rounding plan that a kernel follows, from its outputs on designed inputs: its algorithm"
        " and tiles, the format and mode of each rounding point, what stays open, and what such a plan does where"
        " rounding is known to fail.",
        epilog="exit codes: 0 a plan is known, 1 none is, 2 bad usage, or a kernel that can't be asked",
    )
    parser.add_argument("targets", nargs="+", metavar="TARGET", help=EXPECTED.removeprefix("expected "))
    parser.add_argument("--backend", default="cpu", metavar="NAME", help="where they run (default: cpu)")
    parser.add_argument("--as", dest="card", metavar="CARD", help="of --backend interpreter, ptx: compute as this card")
    parser.add_argument("--declare", action="append", default=[], metavar="WORD=VALUE", help="as of tiebreak check")
    parser.add_argument("--dtype", choices=FORMATS, default="bf16", help="format of q, k and v (default: bf16)")
    parser.add_argument("--seed", type=count, default=1, metavar="N", help="of inputs that choose no plan (default: 1)")
    parser.add_argument("--json", metavar="FILE", help="write it as JSON too; -: to the terminal, and nothing else")
    return parser


def loaded(targets: Iterable[str], declare: Sequence[str] = ()) -> list[UserKernel]:
    """Return users' kernels, which this verb names without --kernel; it is bad usage if one is none."""
    try:
        return [external_kernel(target, flags=declare) for target in targets]
    except LoadError as error:
        raise UsageError(str(error).removeprefix("--kernel ")) from error


def devices(names: str, targets: Sequence[str], card: str | None = None) -> list[Backend]:
    """Return the backends of these names, set up for users' kernels; it is bad usage if one can't run them here."""
    backends = matching_backends(Selection(backends=names, kernel=tuple(targets), card=card))
    for backend in backends:
        why = "a kernel of yours runs on a device" if backend.predicts else backend.unavailable()
        if why is not None:
            raise UsageError(f"--backend {backend.name}: {why}")
        backend.set_up()
    return backends
