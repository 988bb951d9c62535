"""The script that `tiebreak shrink` writes: torch alone, the tensors' bits in it, and the user's kernel by its path."""

import json
import textwrap
from dataclasses import dataclass

import torch
from torch import Tensor

from tiebreak.kernels.external.script_call import ScriptCall
from tiebreak.kernels.features import BLIND_ROWS, CAUSAL, GROUPED, MIXED_FORMATS, OBLONG_CAUSAL, OWN_SCALE
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionInputs
from tiebreak.programs.shrink_search import BOUND, FINITE, Finding, Seen, over_bound

_LINE = 120
#: What inputs may ask for that a script can write.
WRITTEN = frozenset({CAUSAL, GROUPED, OBLONG_CAUSAL, BLIND_ROWS, OWN_SCALE, MIXED_FORMATS})


@dataclass(frozen=True)
class Origin:
    """Where what the script shows comes from."""

    kernel: ScriptCall  # how the script imports and calls it
    device: str  # torch's name of it
    case: str
    seed: int
    wrong: str  # on the whole case, one line


def script(seen: Seen, finding: Finding, sign: float, origin: Origin) -> str:
    """The text of a script that prints O, the fp64 reference and the signed error, and ends with 1 if it is wrong.

    Args:
        seen: the part of the case that is left.
        finding: what holds on it.
        sign: of the bias, if it is one.
        origin: what the script is about.
    """
    inputs, script_call = seen.inputs, origin.kernel
    fmt, dtype = inputs.formats.inputs, str(TORCH_DTYPES[inputs.formats.inputs])
    wrong, message = _verdict(seen, finding, sign)
    grouped = "" if inputs.groups == 1 else f".repeat_interleave({inputs.groups}, 1)"
    k, v = (f"{x}.cpu().double(){grouped}" for x in "kv")
    whole = "" if origin.wrong == finding.about else f": {origin.wrong}"
    about = (
        f"{script_call.function}: {finding.about}. By tiebreak shrink from {origin.case}, seed {origin.seed}{whole}."
    )
    lines = [
        *textwrap.wrap(f'"""{about} Ends with 1 if it is wrong."""', _LINE, break_long_words=False),
        "import importlib, sys, torch",
        f"sys.path.insert(0, {json.dumps(script_call.folder)})",
        f"kernel = importlib.import_module({json.dumps(script_call.module)})",
        "def bits(shape, text):",
        f'    return torch.frombuffer(bytearray.fromhex(text), dtype={dtype}).reshape(shape).to("{origin.device}")',
        *(f"{name} = {_bits(getattr(inputs, name), TORCH_DTYPES[fmt])}" for name in "qkv"),
        f"o = {script_call.call(inputs)}.cpu()",
        f"s = q.cpu().double() @ {k}.mT * {inputs.scale!r}{_mask(inputs)}",
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


def _mask(inputs: AttentionInputs) -> str:
    if not inputs.causal:
        return ""
    queries, keys = inputs.q.shape[2], inputs.k.shape[2]
    return f" + torch.full(({queries}, {keys}), -torch.inf).triu({keys - queries + 1})"


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
        message = f"element {at} of O is off by {{{off}:.3g}}; the loosest rounding plan allows {limit:.3g}"
        return f"not bool({off} <= {limit!r})", f'f"{message}"'
    if finding.name == "mean":
        return f"bool({sign:g} * error.nanmean() > 0.05)", 'f"the mean error of O is {error.nanmean():+.3f} ulp"'
    at = int((sign * seen.error).nan_to_num(nan=0.0).flatten().argmax())
    off = f"error.flatten()[{at}]"
    message = f"O is {{o.flatten()[{at}]}}, not the nearest to {{reference.flatten()[{at}]}}: off by {{{off}:+.3f}} ulp"
    return f"bool({sign:g} * {off} > 0.5)", f'f"{message}"'
