"""How a script without this suite imports and calls a kernel that someone else wrote."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tiebreak.kernels.external.adapters import is_adapter
from tiebreak.kernels.external.call import FULL
from tiebreak.kernels.external.caller import Caller
from tiebreak.kernels.external.kernels import UserKernel
from tiebreak.kernels.external.loading import package_of
from tiebreak.kernels.inputs import AttentionInputs


class _Written:
    """The tensor that O is written into, by its name in the script."""

    def __repr__(self) -> str:
        return "o"


@dataclass(frozen=True)
class ScriptCall:
    """The import and the call of a kernel, as a script writes them."""

    folder: str  # what its module is found in
    module: str  # to import
    function: str  # of the module, with dots
    caller: Caller  # how it is called

    @classmethod
    def from_kernel(cls, kernel: UserKernel) -> "ScriptCall":
        """The script's import and call of a kernel."""
        target, function = kernel.origin[1], kernel.caller.function
        place, _, name = (target, "", "") if target.endswith(".py") else target.rpartition(":")
        if is_adapter(target):
            place, name = function.__module__, function.__name__
        folder, module = ".", place
        if place.endswith(".py"):
            root, module = package_of(Path(place).resolve())
            folder = str(root) if Path(place).is_absolute() else os.path.relpath(root)
        return cls(folder, module, name or function.__name__, kernel.caller)

    def refusal(self, inputs: AttentionInputs) -> str | None:
        """None, or why a script can't write the call of these inputs, in one line."""
        if self.caller.arranged(inputs).inputs is not inputs:
            return "the script has no words for dummy rows or keys"
        if len(self.caller.convention.options.layout) < len(FULL):
            return "the script has no words for a call for each sequence"
        if any(isinstance(value, Tensor) for value in self.caller.call(inputs).keywords(inputs).values()):
            return "the script has no words for a mask as a tensor"
        return None

    def call(self, inputs: AttentionInputs) -> str:
        """An expression: O, (batch, heads, N, d), from q, k and v of that shape and a module `kernel`."""
        convention = self.caller.convention
        layout, keywords = convention.options.layout, self.caller.call(inputs).keywords(inputs)
        arguments, restored, q = "q, k, v", "", "q"
        if layout != FULL:
            order = ", ".join(str(FULL.index(letter)) for letter in layout)
            arguments, q = f"*(x.permute({order}).contiguous() for x in (q, k, v))", f"q.permute({order}).contiguous()"
            restored = f".permute({', '.join(str(layout.index(letter)) for letter in FULL)})"
        if convention.out is not None:
            keywords[convention.out] = _Written()
        after, keywords = convention.arguments(keywords)
        words = [arguments, *map(repr, after), *(f"{name}={value!r}" for name, value in keywords.items())]
        call = f"kernel.{self.function}({', '.join(words)})"
        if convention.out is not None:
            return f"({_Written()!r} := torch.full_like({q}, torch.nan), {call})[0]{restored}"
        with torch.no_grad():
            made = self.caller.call(inputs)
            several = isinstance(made.returned(made.placed(gradients=False)), (tuple, list))
        return f"{call}{'[0]' if several else ''}{restored}"
