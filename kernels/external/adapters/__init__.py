"""Adapters by name: attention of packages that people use, each a function of a few lines, imported when used."""

import difflib
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from tiebreak.kernels.external.options import LoadError

_BY_MODULE = {
    "devices": "flash_attn flash_attn_cute xformers flashinfer sageattention aiter transformer_engine flag_gems liger"
    " fla npu_fusion_attention",
    "libraries": "hf:eager hf:sdpa x_transformers onnxruntime openvino",
    "jax_functions": "jax pallas_flash pallas_splash",
}
#: Where each lies: its module in this package, and its function.
ADAPTERS: Mapping[str, str] = {
    name: f"{module}:{name.replace(':', '_')}" for module, names in _BY_MODULE.items() for name in names.split()
}
_OWN = "one of your own is path/to/file.py:function or package.module:function"


def is_adapter(target: str) -> bool:
    """Whether a target can only be the name of an adapter, known or not."""
    return target.startswith("hf:") or (target != "" and not set(target) & set(".:/\\"))


def adapter(name: str) -> Callable[..., Any]:
    """The adapter of that name.

    Raises:
        LoadError: there is none; one line with the names that there are.
    """
    if name not in ADAPTERS:
        near = difflib.get_close_matches(name, ADAPTERS, 1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise LoadError(f"no adapter {name!r}: {meant}known are {', '.join(ADAPTERS)}; {_OWN}")
    module, _, function = ADAPTERS[name].partition(":")
    implementation: Callable[..., Any] = getattr(importlib.import_module(f"{__name__}.{module}"), function)
    return implementation
