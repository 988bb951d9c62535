"""`tiebreak tolerance`: atol and rtol that follow from the rounding plan of a kernel, and what they let pass."""

import argparse
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from decimal import ROUND_CEILING, Context
from itertools import product

import msgspec
import torch
from numpy.random import Generator, Philox
from torch import Tensor

from tiebreak.cases.bounds import UNDECLARED
from tiebreak.cases.case import Draw, Shape, normal_numbers
from tiebreak.cases.gradients import row_units
from tiebreak.cases.slips import gradient_slips, slips
from tiebreak.kernels.declarations import changed
from tiebreak.kernels.external.loading import EXPECTED
from tiebreak.kernels.formats import BF16, Format, Formats, Rounding, ulp
from tiebreak.kernels.inputs import GRADIENT_NAMES, TORCH_DTYPES, AttentionInputs
from tiebreak.kernels.kernel import CannotRunError, Declaration, nameless
from tiebreak.kernels.plans import BACKWARD_POINTS
from tiebreak.kernels.reference import reference
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.experiments.call import OneCall
from tiebreak.matrix.identification.candidates import on_device
from tiebreak.matrix.identification.settling import NORMAL
from tiebreak.matrix.resolver import plan_of as settled_plan_of
from tiebreak.matrix.trial import raised, refusal
from tiebreak.matrix.workbench import Settings, SharedBatch, Workbench
from tiebreak.programs.identify import FORMATS
from tiebreak.programs.pair import kernel_of
from tiebreak.reports import terminal
from tiebreak.reports.cli import FAILED, PASSED, Parser, count, positive
from tiebreak.reports.errors import UsageError
from tiebreak.reports.names import pick
from tiebreak.reports.records.decode import SCHEMA
from tiebreak.reports.tables import grids

_OUTPUTS = ("O", "dQ", "dK", "dV")
_NAMES = {"O": "out", "dQ": "dq", "dK": "dk", "dV": "dv"}  # in the lines to paste
_SCORES, _MOST_HEADS, _MOST_KEYS = 2**21, 16, 8192  # of a call: what bounds are made of fits into memory
#: Rounding points of the forward pass that planted kernels get wrong, as changes of a plan.
_ROUNDED_WRONG = {
    "O is truncated, not rounded": ("o", "input:rtz"),
    "P is truncated, not rounded": ("p_bar", "input:rtz"),
    "P is in e4m3": ("p_bar", "fp8_e4m3:sat"),
    "S is in 16 bits": ("s", "input"),
    "O is summed in 16 bits": ("o_bar", "input"),
    "the row sum is in 16 bits": ("l", "input"),
}
_BIAS, _GAIN = 0.25, 0.01  # ulp away from zero, about what ties cost that always go one way; and a share of everything
_SOURCE = (
    "Largest rounding error to first order (Higham, Accuracy and Stability of Numerical Algorithms, 3.1): of O from"
    " these points (cases/bounds.py), of gradients with all intermediates in {format} too (cases/gradients.py)."
)
_SEES_NO_BIAS = (
    "A tolerance limits the size of an error and does not see its sign: a bias passes it. tiebreak check and"
    " tiebreak.assert_fair look for one."
)


@dataclass(frozen=True)
class Size:
    """The sizes of one call."""

    d: int  # of q, k and v
    keys: int  # and queries
    causal: bool = False

    def __str__(self) -> str:
        return f"{self.d},{self.keys}{',causal' if self.causal else ''}"


_SIZES = (Size(64, 128), Size(128, 1024), Size(128, 1024, causal=True))


@dataclass(frozen=True)
class Share:
    """The largest error as a share of what is allowed: more than 1 fails."""

    elements: float  # by atol and rtol
    norm: float | None = None  # by the norm of all errors, where there is a limit on it

    def __str__(self) -> str:
        return f"{self.elements:.2g}" + ("" if self.norm is None else f" / {self.norm:.2g}")

    @property
    def passes(self) -> bool:
        """True if atol and rtol let it pass."""
        return self.elements <= 1.0

    @property
    def worst(self) -> float:
        """The larger of both."""
        return max(self.elements, self.norm or 0.0)


@dataclass(frozen=True)
class Tolerance:
    """A limit on the errors of one output, and what it tells apart."""

    output: str  # O, dQ, dK or dV
    atol: float
    rtol: float
    max_ulp: float  # the largest bound of an element, in ulps of the largest element of its row
    norm: float | None  # the largest norm of all errors, as a share of the output's norm; None: no bound is known
    reference_fp32: float = math.nan  # largest error of attention in fp32
    reference_eager: float = math.nan  # largest error of attention written out in PyTorch, in the kernel's format
    kernel: Share = Share(math.nan)  # its own error on these inputs
    mistakes: Mapping[str, Share] = field(default_factory=dict)  # that this output may have, by what is wrong

    def share(self, out: Tensor, exact: Tensor) -> Share:
        """Return how much of this tolerance an output uses up; Inf where it has NaN or Inf."""
        error = (out.double() - exact).abs()
        shares = [(error / (self.atol + self.rtol * exact.abs())).max()]
        shares += [] if self.norm is None else [error.norm() / (self.norm * exact.norm())]
        return Share(*(share.nan_to_num(nan=torch.inf).item() for share in shares))


@dataclass(frozen=True)
class Tolerances:
    """The tolerances of one kernel in one format at one size."""

    format: str
    size: Size
    plan: str | None  # None: no known plan explains the kernel, and the bound is the loosest one's
    source: str  # what the bound follows from
    outputs: tuple[Tolerance, ...]


def main(arguments: Sequence[str]) -> int:
    """Run the verb `tolerance`; see `tiebreak.reports.cli.main`."""
    options = _parser().parse_args(arguments)
    terminal.check_folders(json=options.json)
    backend, kernel = kernel_of(options.target, options.backend, options.card, options.declare)
    bench, found, left_out = Workbench(Settings(options.seed)), list[Tolerances](), dict[str, str]()
    for fmt, size in product(options.dtype, options.shape or _SIZES):
        terminal.say(f"tolerance: {fmt.name}, {size}")
        try:
            found.append(tolerances(Cell(backend, kernel, OneCall(NORMAL[0]), fmt), bench, size))
        except CannotRunError as error:
            left_out[f"{fmt.name}, {size}"] = str(error)
    terminal.say("")
    if not found:
        raise UsageError(f"{options.target}: {'; '.join(dict.fromkeys(left_out.values()))}")
    headline, code = _headline(f"{kernel.name} on {backend.name}", found)
    parts = {"schema": SCHEMA, "headline": headline, "note": _SEES_NO_BIAS, "tolerances": found, "left_out": left_out}
    terminal.write(msgspec.json.format(msgspec.json.encode(parts)).decode() + "\n", options.json)
    if options.paste and options.json != terminal.STDOUT:
        print("\n".join(["# " + headline, *(line for each in found for line in _paste(each))]))
    elif options.json != terminal.STDOUT:
        grids.show([headline, *_parts(found), *(f"left out: {where}: {why}" for where, why in left_out.items())])
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tiebreak tolerance",
        description="Limits on the errors of a kernel, by format and shape, on normal numbers: atol, rtol, ulps and a"
        " norm that follow from the rounding plan which it declares or has, and the mistakes that they let pass.",
        epilog="exit codes: 0 the kernel is within them, 1 it is not, 2 bad usage, or a kernel that can't be asked",
    )
    add = parser.add_argument
    add("target", metavar="TARGET", help=f"{EXPECTED.removeprefix('expected ')}; or a rounding plan")
    shape = f"d, and the number of queries and of keys (default: {' '.join(map(str, _SIZES))})"
    add("--shape", type=_size, action="append", metavar="D,N[,causal]", help=shape)
    add("--dtype", type=_formats, default=[BF16], metavar="NAMES", help="of q, k and v (default: bf16)")
    add("--backend", metavar="NAME", help="where it runs (default: cpu; of a plan: emulation)")
    add("--as", dest="card", metavar="CARD", help="of --backend interpreter, ptx: compute as this card")
    add("--declare", action="append", default=[], metavar="WORD=VALUE", help="as of tiebreak check")
    add("--seed", type=count, default=1, metavar="N", help="of the numbers (default: 1)")
    add("--paste", action="store_true", help="print lines for a test of yours instead of the table")
    add("--json", metavar="FILE", help="write all as JSON too; -: to the terminal, and nothing else")
    return parser


def _size(text: str) -> Size:
    found = re.fullmatch(r"([0-9]+),([0-9]+)(,causal)?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text}: expected D,N or D,N,causal, such as 64,128")
    size = Size(positive(found[1]), positive(found[2]), bool(found[3]))
    if size.keys > _MOST_KEYS:
        raise argparse.ArgumentTypeError(f"{size.keys} keys: at most {_MOST_KEYS}, bounds are as large as Q K^T")
    return size


def _formats(names: str) -> list[Format]:
    return [FORMATS[name] for name in pick("format", names, FORMATS, "known are")]


def normal_inputs(fmt: Format, size: Size, seed: int) -> AttentionInputs:
    """Return q, k, v and dO of normal numbers, as `torch.randn` has them, the same on every machine."""
    heads = max(1, min(_MOST_HEADS, _SCORES // size.keys**2))
    draw = Draw(Generator(Philox(seed)), Formats.of(fmt), heads)
    shape = Shape(size.keys, size.keys, size.d)
    inputs = normal_numbers(draw, shape, causal=size.causal, v_mean=0.0, v_std=1.0)
    return replace(inputs, do=draw.rounded(draw.normal(*inputs.q.shape)))


def tolerances(cell: Cell, bench: Workbench, size: Size) -> Tolerances:
    """Return what the plan of a cell's kernel allows in its format at a size, and what the kernel uses of it.

    CannotRunError: the kernel does not take such a call, or raises, or its plan bounds nothing.
    """
    fmt, known = cell.fmt, settled_plan_of(cell, bench)
    plan = cell.kernel.declaration or on_device(cell.backend).get(known.followed or "")
    inputs = normal_inputs(fmt, size, bench.settings.seed)
    batch = SharedBatch(inputs, reference(inputs))
    declaration = batch.clipped(plan or UNDECLARED)
    made = _run(cell, inputs)
    gradients = batch.gradient_bounds.of(declaration)
    exact = (batch.ref.o, *batch.gradients.gradients)
    references = [_written_out(inputs, dtype) for dtype in (torch.float32, TORCH_DTYPES[fmt])]
    mistakes = list(_mistakes(batch, declaration))
    bounds, norms = (batch.bounds.of(declaration), *gradients.elements), (None, *gradients.norms)
    outputs = list[Tolerance]()
    for at, (name, x) in enumerate(zip(_OUTPUTS, exact, strict=True)):
        if (out := made[at]) is not None:
            fp32, eager = ((each[at].double() - x).abs().max().item() for each in references)
            limit = _limit(name, bounds[at], norms[at], x, fmt)
            wrong = {about: y for about, each in mistakes if (y := each[at]) is not None and not torch.equal(y, x)}
            shares = {about: limit.share(y, x) for about, y in wrong.items()}
            outputs.append(
                replace(limit, reference_fp32=fp32, reference_eager=eager, kernel=limit.share(out, x), mistakes=shares)
            )
    named = f"no known plan ({known.rests_on}), the loosest" if plan is None else f"{known.followed}, {known.rests_on}"
    source = f"{named}: {_points(declaration, inputs)}. {_SOURCE.format(format=fmt.name)}"
    return Tolerances(fmt.name, size, known.followed, source, tuple(outputs))


def _limit(name: str, bound: Tensor, norm: float | None, exact: Tensor, fmt: Format) -> Tolerance:
    rtol = fmt.unit_roundoff  # one rounding to the format; all else that the bound has is in atol
    atol = (bound - rtol * exact.abs()).max().item()
    if not math.isfinite(atol):
        raise CannotRunError("the rounding of its scores can move any weight to any key: there is no bound")
    if not exact.norm():
        raise CannotRunError(f"{name} is 0 there, of which no share tells anything")
    ulps, share = (bound / row_units(exact, fmt)).max().item(), None if norm is None else norm / exact.norm().item()
    return Tolerance(name, _up(atol), rtol, _up(ulps), None if share is None else _up(share))


def _up(x: float) -> float:
    """Return a number with three digits that is no smaller."""
    return float(Context(prec=3, rounding=ROUND_CEILING).create_decimal_from_float(x))


def _points(declaration: Declaration, inputs: AttentionInputs) -> str:
    """Return where the forward pass of a plan rounds, and how."""
    plan = declaration.plan.in_formats(inputs.formats)
    casts = [(name, cast) for name, cast in plan.casts() if cast.narrows and name not in BACKWARD_POINTS]
    modes = ("" if cast.rounding is Rounding.RNE else f" ({cast.rounding.value})" for _, cast in casts)
    return ", ".join(f"{name} to {cast.fmt.name}{mode}" for (name, cast), mode in zip(casts, modes, strict=True))


def _run(cell: Cell, inputs: AttentionInputs) -> tuple[Tensor | None, ...]:
    """Return O, dQ, dK and dV of the kernel; whatever it raises is a CannotRunError in one line."""
    kernel, backend = cell.kernel, cell.backend
    if (why := refusal(backend, kernel, inputs)) is not None:
        raise CannotRunError(why)
    try:
        output = backend.run(kernel, inputs, gradients=kernel.has_backward)
    except Exception as error:  # whatever the kernel raises
        raise CannotRunError(f"it raised {raised(error, kernel)}") from error
    made = output.gradients
    return (output.o, *(None if made is None else getattr(made, name) for name in GRADIENT_NAMES))


def _written_out(inputs: AttentionInputs, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return O, dQ, dK and dV of attention as people write a reference in PyTorch, all of it in one dtype."""
    q, k, v = (x.to(dtype).requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    o = inputs.visible(q @ k.mT * inputs.scale).softmax(-1) @ v
    return (o.detach(), *torch.autograd.grad(o, (q, k, v), inputs.do.to(dtype)))


def _mistakes(batch: SharedBatch, declaration: Declaration) -> Iterator[tuple[str, Sequence[Tensor | None]]]:
    """Return usual mistakes with the O, dQ, dK and dV that a kernel makes by them; None: those that stay right."""
    exact, fmt = (batch.ref.o, *batch.gradients.gradients), batch.inputs.formats.output
    yield f"all of it is {_BIAS} ulp too large", [x + _BIAS * x.sign() * ulp(x, fmt) for x in exact]
    yield f"all of it is {_GAIN:.0%} too large", [x * (1.0 + _GAIN) for x in exact]
    for about, (key, value) in _ROUNDED_WRONG.items():
        with suppress(ValueError):  # an algorithm that makes nothing of this point
            wrong = changed(declaration, key, value)
            if nameless(wrong) != nameless(declaration):
                yield about, (batch.predicted(wrong), None, None, None)
    for slip in slips(batch.inputs):
        yield slip.about, (slip.seen(reference(slip.inputs).o), None, None, None)
    for of_gradients in gradient_slips(batch.inputs, batch.ref):
        yield of_gradients.about, (None, *of_gradients.gradients)


def _headline(name: str, found: Sequence[Tolerances]) -> tuple[str, int]:
    """Return how much of its tolerances the kernel uses up, in one line, and the exit code."""
    each, one = max(((each, one) for each in found for one in each.outputs), key=lambda entry: entry[1].kernel.worst)
    at = f"of {one.output} in {each.format} at {each.size}"
    if one.kernel.worst > 1.0:
        return f"FAIL: {name}: its error is {one.kernel.worst:.3g} times the tolerance {at}", FAILED
    return f"PASS: {name}: its error is at most {one.kernel.worst:.2g} times its tolerance, {at}", PASSED


def _parts(found: Sequence[Tolerances]) -> Iterator[grids.Part]:
    headers = ("format, d, N", "of", "atol", "rtol", "max ulp", "norm", "kernel", "fp32", "eager", "lets pass")
    rows = [
        (f"{each.format} {each.size}", one.output, f"{one.atol:.3g}", f"{one.rtol:.3g}", f"{one.max_ulp:.3g}",
         None if one.norm is None else f"{one.norm:.3g}", one.kernel, f"{one.reference_fp32:.1e}",
         f"{one.reference_eager:.1e}", f"{sum(share.passes for share in one.mistakes.values())} of {len(one.mistakes)}")
        for each in found for one in each.outputs
    ]  # fmt: skip
    yield grids.Grid(headers, rows)
    yield (
        "max ulp: of a row's largest element. norm: of all errors, as a share of the output's. kernel: its own error as"
        " a share of what is allowed, by elements / by the norm. fp32, eager: the largest error of a reference in fp32"
        " (one in fp64 has 2^-29 of it) and of one in the kernel's format, which a comparison with it adds to atol."
        " lets pass: usual mistakes that are within atol and rtol."
    )
    yield from dict.fromkeys(f"{each.format}: {each.source}" for each in found)
    for output in _OUTPUTS:
        if passing := _passing([(each, one) for each in found for one in each.outputs if one.output == output]):
            yield f"{output}, these pass (with the largest share of the tolerance that they use): {passing}"
    yield _SEES_NO_BIAS


def _passing(found: Sequence[tuple[Tolerances, Tolerance]]) -> str:
    """Return the mistakes that pass at some size: what share of a tolerance they use, and if the norm fails them."""
    texts = []
    for about in dict.fromkeys(about for _, one in found for about in one.mistakes):
        made = [(each, one.mistakes[about]) for each, one in found if about in one.mistakes]
        if passing := [(each, share) for each, share in made if share.passes]:
            sizes = ", ".join(f"{each.format} {each.size}" for each, _ in passing)
            norm = ", the norm fails it" if all((share.norm or 0.0) > 1.0 for _, share in passing) else ""
            used = f"{about} ({max(share.elements for _, share in passing):.2g}{norm})"
            texts.append(used if len(passing) == len(made) else f"{used} at {sizes}")
    return "; ".join(texts)


def _paste(each: Tolerances) -> Iterator[str]:
    """Return lines for a test: outputs by their names, the reference's with _ref, in fp32 or fp64."""
    size = f"d = {each.size.d}, N = {each.size.keys}{', causal' if each.size.causal else ''}"
    yield f"# {each.format}, {size}, normal numbers: {each.plan or 'no known plan, the loosest bound'}"
    for one in each.outputs:
        out, ref = (f"{_NAMES[one.output]}{end}.double()" for end in ("", "_ref"))
        yield f"torch.testing.assert_close({out}, {ref}, atol={one.atol!r}, rtol={one.rtol!r})"
        if one.norm is not None:
            yield f"assert ({out} - {ref}).norm() <= {one.norm!r} * {ref}.norm()"
