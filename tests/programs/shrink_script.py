"""The script that `tiebreak shrink` writes: torch alone, the tensors' bits in it, and the user's kernel by its path."""

import json
from dataclasses import dataclass

import torch
from torch import Tensor

from tiebreak.kernels.inputs import TORCH_DTYPES
from tiebreak.programs.shrinking import BOUND, FINITE, Finding, Seen, over_bound

_LINE = 120


@dataclass(frozen=True)
class Origin:
    """Where what the script shows comes from."""

    kernel: str  # FILE:FUNCTION or MODULE:FUNCTION, as given
    device: str  # torch's name of it
    case: str
    seed: int
    found: str  # on the whole case, one line


def script(seen: Seen, finding: Finding, sign: float, origin: Origin) -> str:
    """The text of a script that prints O, the fp64 reference and the signed error, and ends with 1 if it is wrong.

    Args:
        seen: the part of the case that is left.
        finding: what holds on it.
        sign: of the bias, if it is one.
        origin: what the script is about.
    """
    inputs = seen.inputs
    fmt, dtype = inputs.formats.inputs, str(TORCH_DTYPES[inputs.formats.inputs])
    wrong, said = _verdict(seen, finding, sign)
    function = origin.kernel.rpartition(":")[2]
    k, v = ("k", "v") if inputs.groups == 1 else (f"{x}.repeat_interleave({inputs.groups}, 1)" for x in "kv")
    lines = [
        f'"""{function}: {finding.about}.',
        "",
        f'By tiebreak shrink from {origin.case}, seed {origin.seed}: {origin.found}. Ends with 1 if it is wrong."""',
        "",
        "import importlib.util, sys",
        "import torch",
        *_imported(origin.kernel),
        "def bits(shape, text):",
        f'    return torch.frombuffer(bytearray.fromhex(text), dtype={dtype}).reshape(shape).to("{origin.device}")',
        "",
        *(f"{name} = {_bits(getattr(inputs, name), TORCH_DTYPES[fmt])}" for name in "qkv"),
        f"o = kernel.{function}(q, k, v, causal={inputs.causal}, scale={inputs.scale!r}).cpu()",
        "q, k, v = (x.cpu().double() for x in (q, k, v))",
        f"s = q @ {k}.mT * {inputs.scale!r}",
        *_masked(inputs.causal),
        f"reference = s.softmax(-1) @ {v}",
        "exponent = torch.frexp(reference).exponent - 1",
        f"ulp = torch.ldexp(torch.ones_like(reference), exponent.clamp_min({fmt.min_exponent}) - {fmt.mantissa_bits})",
        "error = reference.sign() * (o.double() - reference) / ulp",
        'print("O            ", o.tolist())',
        'print("reference    ", reference.tolist())',
        'print("error in ulps", error.tolist(), "(+ is away from zero)")',
        f"wrong = {wrong}",
        f'print({said} if wrong else "nothing is wrong")',
        "sys.exit(int(wrong))",
    ]
    return "\n".join(lines) + "\n"


def _imported(kernel: str) -> list[str]:
    target, _, _ = kernel.rpartition(":")
    if not target.endswith(".py"):
        return [f"kernel = importlib.import_module({target!r})"]
    return [
        f'spec = importlib.util.spec_from_file_location("kernel", {json.dumps(target)})',
        'kernel = sys.modules["kernel"] = importlib.util.module_from_spec(spec)',
        "spec.loader.exec_module(kernel)",
    ]


def _masked(causal: bool) -> list[str]:
    if not causal:
        return []
    return [
        "later = torch.ones(s.shape[-2:], dtype=torch.bool).triu(s.shape[-1] - s.shape[-2] + 1)",
        's = s.masked_fill(later, float("-inf"))',
    ]


def _bits(tensor: Tensor, dtype: torch.dtype) -> str:
    text = tensor.to(dtype).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex(" ", dtype.itemsize)
    shape = tuple(tensor.shape)
    if len(text) + 40 <= _LINE:
        return f'bits({shape}, "{text}")'
    rows = "\n".join(text[start : start + 115] for start in range(0, len(text), 115))  # 23 numbers a line
    return f'bits({shape}, """\n{rows}""")'


def _verdict(seen: Seen, finding: Finding, sign: float) -> tuple[str, str]:
    """Two expressions: whether it is wrong, and one line of what."""
    if finding.name == FINITE.name:
        bad = "(~o.isfinite() & reference.isfinite())"
        return (
            f"bool({bad}.any())",
            f'f"{{int({bad}.sum())}} elements of O are NaN or Inf where the reference is finite"',
        )
    if finding.name == BOUND.name:
        share = over_bound(seen).flatten()
        at = int(share.argmax())
        limit = ((seen.o.double() - seen.ref.o).abs().flatten()[at] / share[at]).item()
        off = f"(o.double() - reference).abs().flatten()[{at}]"
        told = f"element {at} of O is off by {{{off}:.3g}}; the loosest rounding plan allows {limit:.3g}"
        return f"not bool({off} <= {limit!r})", f'f"{told}"'
    if finding.name == "mean":
        return f"bool({sign:g} * error.nanmean() > 0.05)", 'f"the mean error of O is {error.nanmean():+.3f} ulp"'
    at = int((sign * seen.error).nan_to_num(nan=0.0).flatten().argmax())
    off = f"error.flatten()[{at}]"
    told = f"O is {{o.flatten()[{at}]}}, not the nearest to {{reference.flatten()[{at}]}}: off by {{{off}:+.3f}} ulp"
    return f"bool({sign:g} * {off} > 0.5)", f'f"{told}"'
