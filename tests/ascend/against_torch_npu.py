"""What the backend finds in the real torch-npu, as one JSON object on the last line of its output.

Run by `test_contract.py` in a process of its own, with torch-npu on the path and stand-ins for CANN's libraries.
"""

import contextlib
import ctypes
import itertools
import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tiebreak.kernels  # noqa: F401  # before torch: keeps it from loading torch_npu on its own

# isort: split
import torch
from torch import Tensor

from tiebreak.backends.ascend import ascend
from tiebreak.backends.backend import CPU, to_device
from tiebreak.backends.torch_arithmetic import TorchArithmetic
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.kernels.formats import BF16, FP16, Formats
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import CannotRunError
from tiebreak.kernels.npu import every_fusion_attention, npu_kernels
from tiebreak.kernels.plans import PRESETS
from tiebreak.kernels.roster import DEFAULT_ROSTER, composed_kernel
from tiebreak.kernels.sdpa import Operators
from tiebreak.kernels.shift_rules import SHIFT_RULES

OPERATORS = (
    "npu_fusion_attention",
    "npu_fusion_attention_grad",
    "npu_prompt_flash_attention",
    "npu_fused_infer_attention_score",
)
CPU_ALONE = "aten::_scaled_dot_product_flash_attention_for_cpu"


def libraries() -> list[Path]:
    """The package's shared objects that importing it loads: those for ATB and for graphs wait until they are asked."""
    spec = find_spec("torch_npu")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    return sorted(path for path in (*package.glob("_C*.so"), *package.glob("lib/*.so")) if "atb" not in path.name)


def unresolved() -> list[str]:
    """Symbols that the package needs and neither it, torch, Python nor the system has."""
    needed, defined = set[str](), set[str]()
    for library in libraries():
        lines = subprocess.run(["nm", "-D", str(library)], capture_output=True, text=True, check=True).stdout
        for kind, name in (line.split()[-2:] for line in lines.splitlines()):
            (needed if kind == "U" else defined).add(name)
    folder = Path(torch.__file__).parent / "lib"
    others = [ctypes.CDLL(str(folder / f"lib{name}.so")) for name in ("c10", "torch_cpu", "torch", "torch_python")]
    others.append(ctypes.CDLL(None))
    # A version after @ is of a library of the system.
    left = {name for name in needed - defined if "@" not in name}
    return sorted(name for name in left if not any(hasattr(library, name) for library in others))


class Calls(Operators):  # type: ignore[no-untyped-call]
    """Notes the operators that are called, the layouts they are called with, and those that return float64."""

    def __init__(self) -> None:
        super().__init__()
        self.layouts, self.double = set[tuple[str, str]](), set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        if func.namespace == "npu":
            names = (argument.name for argument in func._schema.arguments)
            arguments = dict(zip(names, args, strict=False)) | (kwargs or {})
            self.layouts.add((func._schema.name.split("::")[1], arguments["input_layout"]))
        returned = func(*args, **(kwargs or {}))
        if isinstance(returned, Tensor) and returned.dtype is torch.float64:
            self.double.add(str(func))
        return returned


def vendor_calls(calls: Calls) -> dict[str, Any]:
    """What every vendor kernel returns by the package's meta registrations, with every kind of mask.

    Sizes all differ, so that no two dimensions can be mistaken for each other.
    """
    q, kv, padding = torch.ones(3, 4, 5, 16), torch.ones(3, 2, 7, 16), torch.ones(3, 7, dtype=torch.bool)
    plain = AttentionInputs(q, kv, kv, q, Formats.of(BF16))
    kinds = {
        "plain": plain,
        "causal": replace(plain, causal=True),
        "padded": replace(plain, key_padding=padding),
        "causal and padded": replace(plain, causal=True, key_padding=padding),
    }
    kernels = {kernel.name: kernel for kernel in (*npu_kernels(), *every_fusion_attention())}
    outputs: dict[str, Any] = {}
    for (name, kernel), (kind, inputs) in itertools.product(kernels.items(), kinds.items()):
        with calls:
            output = kernel.compute(to_device(inputs, "meta"), TorchArithmetic(), kernel.has_backward)
        parts: dict[str, Tensor | None] = {"o": output.o, "lse": output.lse}
        if output.gradients is not None:
            parts |= {part: getattr(output.gradients, part) for part in ("dq", "dk", "dv")}
        described = {part: [list(x.shape), str(x.dtype)] for part, x in parts.items() if x is not None}
        outputs[f"{name}, {kind}"] = described
    return outputs


def composed_calls() -> Calls:
    """torch's operators that the composed kernels call, whatever rule and plan."""
    case = next(case for case in SCRIPTED if case.name == "padded")
    names = {*DEFAULT_ROSTER, *(f"{rule}@paper" for rule in SHIFT_RULES if rule != "safe")}
    names |= {f"flash@{plan.name}" for plan in PRESETS if plan.name != "standard"}
    both, calls = [case.make(1, 0, 16, fmt) for fmt in (BF16, FP16)], Calls()
    for name, drawn in itertools.product(sorted(names), both):
        kernel = composed_kernel(name)
        # As on an NPU: a contracted plan, which asks for float64, says there that it can't run.
        with calls, contextlib.suppress(CannotRunError):
            kernel.compute(drawn, TorchArithmetic(has_fp64=False), True)
    return calls


def unregistered(names: set[str]) -> list[str]:
    """Those that have neither a kernel of the NPU nor a composition of others, and one that can have none."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    keys = ("PrivateUse1", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
    full = {CPU_ALONE} | {
        "aten::" + name.removeprefix("aten.").removesuffix(".default") for name in names if name.startswith("aten.")
    }
    return sorted(name for name in full if not any(has(name, key) for key in keys))


def main() -> None:
    """Print the answers on a subject: `symbols` and `missing` need no stand-ins, `all` does."""
    subject, root = sys.argv[1], Path(sys.argv[2])
    answers: dict[str, Any] = {"missing": ascend(root).unavailable()}
    if subject == "symbols":
        answers["symbols"] = unresolved()
    case = next(case for case in SCRIPTED if case.name == "tied_maxima[k=2]")
    made = case.make(1, 0, 16, BF16)
    answers["others"] = CPU.run(CPU.kernel("flash@paper"), made, gradients=False).o.flatten()[:64].tolist()
    if subject == "all":
        from torch_npu.op_plugin.meta import _meta_registrations  # type: ignore[import-not-found]

        # It asks a device for its model, to warn of one, before it tells shapes.
        _meta_registrations._npu_fusion_attention_warning_printed = True
        calls = Calls()
        answers["vendor"] = vendor_calls(calls)
        answers["layouts"] = sorted(calls.layouts)
        answers["documents"] = {name: getattr(torch.ops.npu, name).__doc__ for name in OPERATORS}
        answers["schemas"] = {name: str(getattr(torch.ops.npu, name).default._schema) for name in OPERATORS}
        composed = composed_calls()
        answers["operations"], answers["float64"] = sorted(composed.names), sorted(composed.double)
        answers["unregistered"] = unregistered(composed.names)
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
