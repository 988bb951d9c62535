"""A card that is not here, as Triton and host code ask for it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver

from tiebreak.kernels.kernel import CannotRunError
from tiebreak.kernels.triton.compiling import is_executing
from tiebreak.kernels.triton.loading import Tuning

# It knows by the function itself what a compiler decides, such as tl.static_assert: imported while the language is
# patched for interpreting, it would let every static_assert pass for the rest of the process.
import_module("triton.compiler.code_generator")


@contextmanager
def absent(target: GPUTarget, device: int | str = 0, **parts: object) -> Iterator[None]:
    """Let Triton see one device with one stream and the CPU's tensors; an autotuned kernel takes one configuration."""
    answers = {
        "get_current_target": target,
        "get_active_torch_device": torch.device("cpu"),
        "get_current_device": device,
        "get_current_stream": 0,
    }
    active = {name: partial(lambda answer, *_: answer, answer) for name, answer in answers.items()}
    with ExitStack() as stack:
        stack.enter_context(patch.object(Autotuner, "run", _first_configuration(Autotuner.run)))
        stack.enter_context(patch.object(Autotuner, "_bench", lambda *_, **__: [1.0, 1.0, 1.0]))
        stack.enter_context(patch.object(Tuning, "launches", 0))
        stack.enter_context(patch.object(driver, "_active", SimpleNamespace(**active, **parts)))
        yield


def count_launch() -> None:
    """Count a launch that is executed here because its card is absent."""
    if Tuning.launches is not None:
        Tuning.launches += 1


def _first_configuration(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a launch that takes the first configuration of an autotuned kernel, or the chosen one; none is tuned."""

    def tuned(self: Autotuner, *args: object, **kwargs: object) -> Any:
        prune, name, seen = self.prune_configs, self.base_fn.__name__, {*self.arg_names, "enable_fp_fusion"}

        def one(given: dict[str, Any]) -> list[Any]:
            left, (kernel, _, chosen) = dict[str, Any](), Tuning.chosen.partition(".")
            for each in prune(given):
                # Compiled code sees all of it; interpreted code has neither warps nor stages.
                options = {key: value for key, value in each.all_kwargs().items() if is_executing() or key in seen}
                words = "+".join(f"{key}={value}" for key, value in options.items())
                left.setdefault(words, each)
                Tuning.left.setdefault(name, {}).setdefault(words, set()).add(str(each))
            if kernel == name and chosen not in left:
                raise CannotRunError(f"{Tuning.chosen}: not left by the kernel's pruning here: {', '.join(left)}")
            Tuning.taken |= kernel == name
            return [left[chosen] if kernel == name else next(iter(left.values()))]

        with patch.multiple(self, cache={}, cache_results=False, prune_configs=one):
            return run(self, *args, **kwargs)

    return tuned
