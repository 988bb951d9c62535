"""The script that `tiebreak shrink` writes: torch alone, the tensors' bits in it, and the user's kernel by its path."""

import json
import textwrap

import torch
from torch import Tensor

from tiebreak.kernels.external.script_call import ScriptCall
from tiebreak.kernels.features import BLIND_ROWS, CAUSAL, GROUPED, MIXED_FORMATS, OBLONG_CAUSAL, OWN_SCALE
from tiebreak.kernels.inputs import TORCH_DTYPES
from tiebreak.programs.shrink_search import BOUND, FINITE, Finding, Seen

_LINE = 120
#: What inputs may ask for that a script can write.
WRITTEN = frozenset({CAUSAL, GROUPED, OBLONG_CAUSAL, BLIND_ROWS, OWN_SCALE, MIXED_FORMATS})


def script(seen: Seen, finding: Finding, sign: float, call: ScriptCall, device: str, origin: str) -> str:
    """The text of a script that prints O, the fp64 reference and the signed error, and ends with 1 if it is wrong.

    Args:
        seen: the part of the case that is left.
        finding: what holds on it.
        sign: of the bias, if it is one.
        call: how the script imports and calls the kernel.
        device: torch's name of it.
        origin: the whole case, and what is wrong on it, in words.
    """
    inputs, fmt = seen.inputs, seen.inputs.formats.inputs
    dtype = TORCH_DTYPES[fmt]
    wrong, message = _verdict(seen, finding, sign)
    grouped = "" if inputs.groups == 1 else f".repeat_interleave({inputs.groups}, 1)"
    k, v = (f"{x}.cpu().double(){grouped}" for x in "kv")
    queries, keys = inputs.q.shape[2], inputs.k.shape[2]
    mask = f" + torch.full(({queries}, {keys}), -torch.inf).triu({keys - queries + 1})" if inputs.causal else ""
    about = f"{call.function}: {finding.about}. By tiebreak shrink from {origin}. Ends with 1 if it is wrong."
    lines = [
        *textwrap.wrap(f'"""{about}"""', _LINE, break_long_words=False),
        "import importlib, sys, torch",
        f"sys.path.insert(0, {json.dumps(call.folder)})",
        f"kernel = importlib.import_module({json.dumps(call.module)})",
        "def bits(shape, text):",
        f'    return torch.frombuffer(bytearray.fromhex(text), dtype={dtype}).reshape(shape).to("{device}")',
        *(f"{name} = {_bits(getattr(inputs, name), dtype)}" for name in "qkv"),
        f"o = {call.call(inputs)}.cpu()",
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
