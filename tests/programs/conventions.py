"""`tiebreak conventions NAME...`: what a kernel's masks, sinks and biases mean, as it is called, in a table.

All scores are equal, and each key has a column of V to itself: a row of O shows which keys it has seen, and how it
weighs them. The kernel's own causal flag is set, however a call of this suite would be arranged around it.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tiebreak.backends.backend import Backend
from tiebreak.kernels.external.kernels import UserKernel
from tiebreak.kernels.external.loading import EXPECTED
from tiebreak.kernels.features import BIAS, KEY_PADDING, SINK, SOFTCAP
from tiebreak.kernels.formats import Format, Formats
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import CannotRunError, first_line
from tiebreak.programs.identify import FORMATS, devices, loaded
from tiebreak.reports import terminal
from tiebreak.reports.cli import PASSED, Parser
from tiebreak.reports.errors import UsageError
from tiebreak.reports.tables import grids
from tiebreak.reports.tables.grids import Grid

_D, _FEW, _MANY = 64, 3, 7  # head dimension, and numbers of rows and keys
_NEAR = 0.02  # of a weight: far more than rounding, far less than a key's share


def main(arguments: Sequence[str]) -> int:
    """Run the verb `conventions`; see `tiebreak.reports.cli.main`."""
    options = _parser().parse_args(arguments)
    terminal.check_folders(json=options.json)
    (backend,) = devices(options.backend, options.targets)
    kernels = loaded(options.targets, options.declare)
    told = {kernel.name: dict(conventions(kernel, backend, FORMATS[options.dtype])) for kernel in kernels}
    if options.json != terminal.STDOUT:
        names = list(dict.fromkeys(name for each in told.values() for name in each))
        grids.show([Grid(["convention", *told], [[name, *(told[each].get(name) for each in told)] for name in names])])
    terminal.write(json.dumps(told, indent=2) + "\n", options.json)
    return PASSED


def _parser() -> Parser:
    parser = Parser(prog="tiebreak conventions", description="Tell what masks, sinks and biases mean to a kernel.")
    parser.add_argument("targets", nargs="+", metavar="TARGET", help=EXPECTED.removeprefix("expected "))
    parser.add_argument("--backend", default="cpu", metavar="NAME", help="where they run (default: cpu)")
    parser.add_argument("--declare", action="append", default=[], metavar="WORD=VALUE", help="as of tiebreak check")
    parser.add_argument("--dtype", choices=FORMATS, default="bf16", help="format of q, k and v (default: bf16)")
    parser.add_argument("--json", metavar="FILE", help="write it as JSON too; -: to the terminal, and nothing else")
    return parser


def conventions(kernel: UserKernel, backend: Backend, fmt: Format) -> Iterator[tuple[str, str]]:
    """Yield what each convention is called, and what the kernel makes of it, in words."""

    def asked(name: str, words: Callable[[Tensor], str], inputs: AttentionInputs, **flags: Any) -> tuple[str, str]:
        try:
            return name, words(backend.run(_flagged(kernel, flags), inputs, gradients=False).o[0, 0])
        except CannotRunError as error:
            return name, f"refused: {first_line(error)}"
        except Exception as error:  # whatever the kernel raises
            return name, f"raised {type(error).__name__}"

    if reason := kernel.refusal(_inputs(_FEW, _FEW, fmt)):
        raise UsageError(f"{kernel.name}: {reason}")
    if (word := kernel.caller.convention.causal) is not None:
        for rows, keys in ((_FEW, _MANY), (_MANY, _FEW)):
            yield asked(f"causal, {rows} rows, {keys} keys", _aligned, _inputs(rows, keys, fmt), **{word: True})
    inputs = _inputs(_FEW, _MANY, fmt)
    if KEY_PADDING in kernel.takes:
        hidden = replace(inputs, key_padding=torch.zeros(1, _MANY, dtype=torch.bool))
        yield asked("a row without keys, by a mask", lambda o: _blind(o[0]), hidden)
    if SINK in kernel.takes:
        yield asked("a sink as high as all scores", _of_sink, replace(inputs, sink=torch.zeros(1)))
    if {BIAS, SOFTCAP} <= kernel.takes:
        bias = torch.zeros(1, 1, _FEW, _MANY)
        bias[..., 0] = 8.0
        yield asked("a bias and a soft cap", _of_cap, replace(inputs, bias=bias, softcap=1.0))


def _inputs(rows: int, keys: int, fmt: Format) -> AttentionInputs:
    q, k, v = (torch.zeros(1, 1, length, _D) for length in (rows, keys, keys))
    v[:, :, range(keys), range(keys)] = 1.0
    return AttentionInputs(q, k, v, q, Formats.of(fmt))


def _flagged(kernel: UserKernel, flags: dict[str, Any]) -> UserKernel:
    """Return the kernel with some keywords of its own set, whatever it is given for them."""
    function = kernel.caller.function
    caller = replace(kernel.caller, function=lambda *args, **given: function(*args, **{**given, **flags}))
    return replace(kernel, compute=caller.compute, caller=caller)


def _aligned(o: Tensor) -> str:
    """Return where a causal mask is aligned, and what a row is that then sees no key."""
    rows = len(o)
    keys = _MANY + _FEW - rows
    for name, offset in (("upper left", 0), ("lower right", keys - rows)):
        seen = torch.ones(rows, keys).tril(offset)
        weights, sees = seen / seen.sum(-1, keepdim=True), seen.any(-1)
        if ((o[sees, :keys] - weights[sees]).abs() < _NEAR).all():
            return name if sees.all() else f"{name}; a row without keys is {_blind(o[0])}"
    counts = ", ".join(str(int((row > _NEAR).sum())) for row in o[:, :keys])
    return f"neither upper left nor lower right: rows see {counts} keys"


def _blind(row: Tensor) -> str:
    """Return what a row of O is that sees no key."""
    weights = row[:_MANY]
    if row.isnan().all():
        return "NaN"
    if not row.any():
        return "0"
    seen = weights[weights > _NEAR]
    return (
        "the mean of V"
        if (seen - 1.0 / len(seen)).abs().max() < _NEAR
        else f"of weights that sum to {weights.sum():.2g}"
    )


def _of_sink(o: Tensor) -> str:
    total = o[0].sum().item()
    usual = abs(total - _MANY / (_MANY + 1)) < _NEAR
    return "one more score, without a V" if usual else f"the weights of the keys sum to {total:.2g}"


def _of_cap(o: Tensor) -> str:
    """Return whether a bias of 8 on one key of equal scores is added before or after a cap of 1."""
    times = math.log((o[0, 0] / o[0, 1].clamp(min=1e-30)).item())
    return "the bias is added before the cap" if times < 2.0 else "the bias is added after the cap"
