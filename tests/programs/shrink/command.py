"""`tiebreak shrink`: the smallest input on which a kernel still goes wrong, as a script for a bug report.

The script needs torch alone: the tensors' bits are in it, and the user's kernel by its path.
"""

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tiebreak.backends.backend import to_device
from tiebreak.cases.captured import CapturedError, captured_cases
from tiebreak.cases.feature_cases import EVERY
from tiebreak.kernels.external import UserKernel
from tiebreak.kernels.external.call import FULL
from tiebreak.kernels.external.caller import Caller
from tiebreak.kernels.external.loading import EXPECTED, is_adapter, package_of
from tiebreak.kernels.features import SCRIPTABLE
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionInputs
from tiebreak.programs.identify import FORMATS, devices, loaded
from tiebreak.programs.processes import finished
from tiebreak.programs.shrink.search import BOUND, FINITE, Seen, Shrinker, Symptom
from tiebreak.reports.cli import FAILED, INTERRUPTED, PASSED, Parser, count, positive
from tiebreak.reports.errors import UsageError
from tiebreak.reports.names import unknown
from tiebreak.reports.records import store

_ANYWHERE = {"finite": FINITE, "bound": BOUND}  # checks that one element can fail
_SECONDS = 600  # that the written script may take
_LINE = 120  # of the script


def main(arguments: Sequence[str]) -> int:
    """Run the verb `shrink`; see `tiebreak.reports.cli.main`. 130 after Ctrl-C, with the best so far written."""
    options = _parser().parse_args(arguments)
    if options.output.exists():
        raise UsageError(f"-o {options.output}: there is such a file; remove it or name another")
    store.check_writable(options.output.parent)
    (backend,) = devices(options.backend, [options.target])
    kernel = _kernel(options.target)
    inputs = _inputs(options)
    if (refusal := kernel.refusal(to_device(inputs, backend.device))) is not None:
        raise UsageError(f"{options.target}: {refusal}, which {options.case} asks for")
    shrinker = Shrinker(backend, kernel, inputs, lambda line: print(f"shrink: {line}", file=sys.stderr, flush=True))
    try:
        whole = shrinker.seen(shrinker.part)
    except Exception as error:
        failure = store.one_line(f"{type(error).__name__}: {error}")
        raise UsageError(f"{options.target}: fails on the whole case: {failure}") from error
    check, sign, wrong = _chosen(options, whole)
    print(f"{options.case}, {shrinker.part.size}: {wrong}", flush=True)
    interrupted = False
    try:
        if check == "bias":
            shrinker.bias(sign)
        else:
            shrinker.shrink(_ANYWHERE[check])
    except KeyboardInterrupt:
        interrupted = True
        print("shrink: interrupted; the best so far is kept", file=sys.stderr, flush=True)
    left, finding = shrinker.seen(shrinker.part), shrinker.finding
    origin = f"{options.case}, seed {options.seed}" + ("" if wrong == finding.about else f": {wrong}")
    store.write_text(script(left, finding, sign, kernel, backend.device, origin), options.output)
    print(f"left after {shrinker.trials} trials: {shrinker.part.size}; written: {options.output}; it says:", flush=True)
    shown = _rechecked(options.output)
    return INTERRUPTED if interrupted else (PASSED if shown else FAILED)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tiebreak shrink",
        description="Find the fewest heads, rows, keys and columns of d on which a kernel still goes wrong, and write a"
        " script that shows it with torch alone.",
        epilog="exit codes: 0 the script is written and shows it, 1 it is written but does not show it when it is run,"
        " 2 bad usage, or nothing is wrong on this case, 130 interrupted: the best so far is written",
    )
    parser.add_argument("target", metavar="TARGET", help=EXPECTED.removeprefix("expected "))
    parser.add_argument("--case", required=True, metavar="NAME", help="a scripted case, or a captured one")
    parser.add_argument("--captured", type=Path, metavar="DIR", help="folder of captured tensors that NAME is in")
    parser.add_argument("--check", choices=(*_ANYWHERE, "bias"), help="what to keep (default: the first that holds)")
    parser.add_argument("--backend", default="cpu", metavar="NAME", help="where the kernel runs (default: cpu)")
    parser.add_argument("--dtype", choices=FORMATS, default="bf16", help="format of q, k and v (default: bf16)")
    parser.add_argument("--seed", type=count, default=1, metavar="N", help="of a scripted case (default: 1)")
    parser.add_argument("--heads", type=positive, default=256, metavar="N", help="to start from (default: 256)")
    parser.add_argument("-o", "--output", type=Path, default=Path("shrunk.py"), metavar="FILE", help="the script")
    return parser


def _kernel(spec: str) -> UserKernel:
    """Return the kernel; one that a script can't write is refused."""
    (kernel,) = loaded([spec])

    def missing_requirement(inputs: AttentionInputs) -> str | None:
        return kernel.missing_requirement(inputs) or _unwritten(kernel.caller, inputs)

    return replace(kernel, missing_requirement=missing_requirement)


def _unwritten(caller: Caller, inputs: AttentionInputs) -> str | None:
    """Return None, or why a script can't write the call of these inputs, in one line."""
    if caller.arranged(inputs).inputs is not inputs:
        return "the script has no words for dummy rows or keys"
    if len(caller.convention.options.layout) < len(FULL):
        return "the script has no words for a call for each sequence"
    if any(isinstance(value, Tensor) for value in caller.call(inputs).keywords(inputs).values()):
        return "the script has no words for a mask as a tensor"
    return None


def _inputs(options: argparse.Namespace) -> AttentionInputs:
    fmt = FORMATS[options.dtype]
    try:
        captured = () if options.captured is None else captured_cases(options.captured)
        cases = {case.name: case for case in (*captured, *EVERY)}
        if options.case not in cases:
            raise UsageError(f"--case: {unknown('case', options.case, cases, '`tiebreak list cases` names')}")
        case = cases[options.case]
        if case.fixed_heads is not None and fmt not in case.fixed_heads.formats:
            raise UsageError(f"--dtype {options.dtype}: {case.name} is in {case.fixed_heads.formats[0].name}")
        inputs = case.make(options.seed, 0, options.heads, fmt)
    except CapturedError as error:
        raise UsageError(str(error)) from error
    if unwritten := [feature.words for feature in inputs.required_features() if feature not in SCRIPTABLE]:
        raise UsageError(f"--case {case.name}: has a {unwritten[0]}, which the script has no place for")
    return inputs


def _chosen(options: argparse.Namespace, whole: Seen) -> tuple[str, float, str]:
    """Return the check to keep, the sign of the bias, and one line about what was found."""
    mean, biased = whole.mean_error
    bias = f"mean error of O {mean:+.3f} ulp"
    symptoms = {name: finding.about for name, finding in _ANYWHERE.items() if finding.holds(whole)}
    symptoms |= {"bias": f"biased at 99.9 %, {bias}"} if biased else {}
    for name, about in symptoms.items():
        if options.check in (None, name):
            return name, 1.0 if mean > 0 else -1.0, about
    what = "nothing is wrong" if options.check is None else f"--check {options.check}: nothing of that kind"
    measured = f"{bias}; {'biased' if biased else 'unbiased or not settled'}"
    measured += f", finite {'finite' not in symptoms}, within the bound {'bound' not in symptoms}"
    raise UsageError(f"{what} on {options.case} ({measured}); nothing to shrink")


def _rechecked(path: Path) -> bool:
    """Run the script that was written; return whether it reports an error."""
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = finished([sys.executable, str(path)], os.environ | paths, seconds=_SECONDS)
    print(done.stdout.rstrip() or done.stderr.rstrip())
    shown = done.returncode == 1 and bool(done.stdout)
    if not shown:
        print(f"shrink: {path} does not show it when run: is the kernel's result the same twice?", file=sys.stderr)
    return shown


def script(seen: Seen, finding: Symptom, sign: float, kernel: UserKernel, device: str, origin: str) -> str:
    """Return a script that prints O, the fp64 reference and the signed error, and ends with 1 if it is wrong."""
    inputs, fmt = seen.inputs, seen.inputs.formats.inputs
    dtype = TORCH_DTYPES[fmt]
    wrong, message = _verdict(seen, finding, sign)
    folder, module, function = _place(kernel)
    grouped = "" if inputs.groups == 1 else f".repeat_interleave({inputs.groups}, 1)"
    k, v = (f"{x}.cpu().double(){grouped}" for x in "kv")
    queries, keys = inputs.q.shape[2], inputs.k.shape[2]
    mask = f" + torch.full(({queries}, {keys}), -torch.inf).triu({keys - queries + 1})" if inputs.causal else ""
    about = f"{function}: {finding.about}. By tiebreak shrink from {origin}. Ends with 1 if it is wrong."
    lines = [
        *textwrap.wrap(f'"""{about}"""', _LINE, break_long_words=False),
        "import importlib, sys, torch",
        f"sys.path.insert(0, {json.dumps(folder)})",
        f"kernel = importlib.import_module({json.dumps(module)})",
        "def bits(shape, text):",
        f'    return torch.frombuffer(bytearray.fromhex(text), dtype={dtype}).reshape(shape).to("{device}")',
        *(f"{name} = {_bits(getattr(inputs, name), dtype)}" for name in "qkv"),
        f"o = {_call(kernel.caller, f'kernel.{function}', inputs)}.cpu()",
        f"s = q.cpu().double() @ {k}.mT * {inputs.scale!r}{mask}",
        f"reference = s.softmax(-1) @ {v}",
        f"exponent = (torch.frexp(reference).exponent - 1).clamp_min({fmt.min_exponent}) - {fmt.mantissa_bits}",
        "error = reference.sign() * (o.double() - reference) / torch.ldexp(torch.ones_like(reference), exponent)",
        'shown = f"O             {o.tolist()}\\nreference     {reference.tolist()}\\nerror in ulps {error.tolist()}"',
        'print(shown, "(+ is away from zero)")',
        f"wrong = {wrong}",
        f'print({message} if wrong else "nothing is wrong")',
        "sys.exit(int(wrong))",
    ]
    return "\n".join(lines) + "\n"


def _place(kernel: UserKernel) -> tuple[str, str, str]:
    """Return the folder that a kernel's module is found in, the module, and its function there, with dots."""
    target, function = kernel.origin[1], kernel.caller.function
    place, _, name = (target, "", "") if target.endswith(".py") else target.rpartition(":")
    if is_adapter(target):
        place, name = function.__module__, function.__name__
    if not place.endswith(".py"):
        return ".", place, name
    root, module = package_of(Path(place).resolve())
    return str(root) if Path(place).is_absolute() else os.path.relpath(root), module, name or function.__name__


def _call(caller: Caller, function: str, inputs: AttentionInputs) -> str:
    """Return an expression of O, (batch, heads, N, d), from q, k and v of that shape."""
    convention, made = caller.convention, caller.call(inputs)
    layout, keywords = convention.options.layout, made.keywords(inputs)
    arguments, restored, q = "q, k, v", "", "q"
    if layout != FULL:
        order = ", ".join(str(FULL.index(letter)) for letter in layout)
        arguments, q = f"*(x.permute({order}).contiguous() for x in (q, k, v))", f"q.permute({order}).contiguous()"
        restored = f".permute({', '.join(str(layout.index(letter)) for letter in FULL)})"
    if convention.out is not None:
        keywords[convention.out] = _Written()
    after, keywords = convention.arguments(keywords)
    words = [arguments, *map(repr, after), *(f"{name}={value!r}" for name, value in keywords.items())]
    call = f"{function}({', '.join(words)})"
    if convention.out is not None:
        return f"(o := torch.full_like({q}, torch.nan), {call})[0]{restored}"
    with torch.no_grad():
        several = isinstance(made.returned(made.placed(gradients=False)), (tuple, list))
    return f"{call}{'[0]' if several else ''}{restored}"


class _Written:
    """The tensor that O is written into, by its name in the script."""

    def __repr__(self) -> str:
        return "o"


def _bits(tensor: Tensor, dtype: torch.dtype) -> str:
    text = tensor.to(dtype).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex(" ", dtype.itemsize)
    shape = tuple(tensor.shape)
    if len(text) + 40 <= _LINE:
        return f'bits({shape}, "{text}")'
    rows = "\n".join(text[start : start + 115] for start in range(0, len(text), 115))  # 23 numbers a line
    return f'bits({shape}, """\n{rows}""")'


def _verdict(seen: Seen, finding: Symptom, sign: float) -> tuple[str, str]:
    """Return two expressions: whether it is wrong, and one line of what."""
    if finding.name == FINITE.name:
        bad = "(~o.isfinite() & reference.isfinite())"
        return (
            f"bool({bad}.any())",
            f'f"{{int({bad}.sum())}} elements of O are NaN or Inf where the reference is finite"',
        )
    if finding.name == BOUND.name:
        share = seen.over_bound.flatten()
        at = int(share.argmax())
        limit = ((seen.o.double() - seen.ref.o).abs().flatten()[at] / share[at]).item()
        off = f"(o.double() - reference).abs().flatten()[{at}]"
        message = f"element {at} of O is off by {{{off}:.3g}}; the loosest rounding plan allows {limit:.3g}"
        return f"not bool({off} <= {limit!r})", f'f"{message}"'
    if finding.name == "mean":
        return f"bool({sign:g} * error.nanmean() > 0.05)", 'f"the mean error of O is {error.nanmean():+.3f} ulp"'
    at = int((sign * seen.error).nan_to_num(nan=0.0).flatten().argmax())
    off = f"error.flatten()[{at}]"
    message = f"O is {{o.flatten()[{at}]}}, not the nearest to {{reference.flatten()[{at}]}}: off by {{{off}:+.3f}} ulp"
    return f"bool({sign:g} * {off} > 0.5)", f'f"{message}"'
