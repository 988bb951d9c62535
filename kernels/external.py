"""A user's own kernel, loaded from a file or a package, and the contract it is held to."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tiebreak.kernels.algorithms import FLASH_ATTENTION, STANDARD_ATTENTION
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.features import BLIND_ROWS, CAUSAL, OBLONG_CAUSAL
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionInputs, AttentionOutput
from tiebreak.kernels.isolation import kept_state
from tiebreak.kernels.kernel import Declaration, Kernel
from tiebreak.kernels.plans import STANDARD, RoundingPlan
from tiebreak.kernels.shift_rules import SHIFT_RULES

_BITS = {2: torch.int16, 4: torch.int32}
# What the signature can say: it has neither a padding mask nor a key head for several query heads.
_TAKES = frozenset({CAUSAL, OBLONG_CAUSAL, BLIND_ROWS})
# (q, k, v, *, causal=False, scale=None), all (batch, heads, N, d), to O (batch, heads, N, d)
UserFunction = Callable[..., Tensor]


class ContractError(Exception):
    """The user's kernel broke its contract; the message says which part."""


def load(spec: str) -> UserFunction:
    """The function that `path/to/file.py:function` or `package.module:function` names.

    Raises:
        ValueError: malformed, not found, not importable or not callable; one line.
    """
    target, separator, name = spec.rpartition(":")
    if not separator or not target or not name:
        raise ValueError(f"--kernel {spec}: expected path/to/file.py:function or package.module:function")
    try:
        module = _from_file(Path(target)) if target.endswith(".py") else importlib.import_module(target)
    except (Exception, SystemExit) as error:  # whatever the user's module raises while it is imported
        told = " ".join(f"{type(error).__name__}: {error}".split())  # in one line
        raise ValueError(f"--kernel {spec}: cannot import {target}: {told}") from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = ", ".join(sorted(_functions(module))) or "none"
        raise ValueError(f"--kernel {spec}: {target} has no function {name!r}; its functions are {functions}")
    return function  # type: ignore[no-any-return]


def _functions(module: object) -> list[str]:
    """Names of the public functions that a module defines itself."""
    own = getattr(module, "__name__", None)
    return [
        name
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", None) == own
    ]


def _from_file(path: Path) -> object:
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    name = f"tiebreak_user_kernel_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles in the user's file look their module up
    spec.loader.exec_module(module)
    return module


def external_kernel(spec: str, plan: RoundingPlan | None) -> Kernel:
    """A kernel around the user's function, named for it; with `plan`, it declares plain attention at that plan.

    Raises:
        ValueError: the function can't be loaded.
    """
    function = load(spec)
    algorithm = STANDARD_ATTENTION if plan == STANDARD else FLASH_ATTENTION
    declaration = None if plan is None else Declaration(algorithm, plan, SHIFT_RULES["safe"])
    name = spec.rpartition(":")[2]
    return Kernel(name, partial(_compute, function), declaration, has_backward=False, takes=_TAKES, external=True)


def _compute(
    function: UserFunction, inputs: AttentionInputs, arithmetic: Arithmetic, gradients: bool
) -> AttentionOutput:
    del arithmetic, gradients
    dtype = TORCH_DTYPES[inputs.formats.inputs]
    # Copies, in fp32 too: a kernel that writes into its inputs must not spoil those of the other cells.
    given = tuple(tensor.to(dtype, copy=True) for tensor in (inputs.q, inputs.k, inputs.v))
    kept = tuple(tensor.clone() for tensor in given)
    with kept_state() as changed:
        out = function(*given, causal=inputs.causal, scale=inputs.scale)
    if changed:
        raise ContractError(f"changed {', '.join(changed)}")
    _hold_to_contract(out, given, kept)
    return AttentionOutput(out.detach().float())


def _hold_to_contract(out: object, given: tuple[Tensor, ...], kept: tuple[Tensor, ...]) -> None:
    q = given[0]
    if not isinstance(out, Tensor):
        raise ContractError(f"returned {type(out).__name__}, not a tensor")
    if out.shape != q.shape:
        raise ContractError(f"returned shape {tuple(out.shape)}, expected {tuple(q.shape)}")
    if out.dtype != q.dtype:
        raise ContractError(f"returned {out.dtype}, expected {q.dtype}")
    if out.device != q.device:
        raise ContractError(f"returned a tensor on {out.device}, expected {q.device}")
    for name, now, before in zip("qkv", given, kept, strict=True):
        # Bits, so that NaN inputs compare equal to themselves.
        if not bool((now.view(_BITS[now.element_size()]) == before.view(_BITS[now.element_size()])).all()):
            raise ContractError(f"changed its input {name}")
