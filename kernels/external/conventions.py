"""How a kernel that someone else wrote is called: what its signature shows, and what its options say."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from tiebreak.kernels.external.errors import LoadError
from tiebreak.kernels.external.options import AUTOGRAD, NO_BACKWARD, KernelOptions
from tiebreak.kernels.features import (
    BLIND_ROWS,
    CAUSAL,
    FEATURES,
    GROUPED,
    MASKS,
    OBLONG_CAUSAL,
    OWN_SCALE,
    VALUE_DIM,
    Feature,
)

_CAUSAL = ("causal", "is_causal")
_UPPER_LEFT = "is_causal"  # PyTorch's flag aligns its mask at the upper left: row i sees keys 0 .. i
_OUT = "out"  # where it has no default: O is written into it
_SPLITS = ("num_splits", "num_kv_splits")
_MASK = "attn_mask"  # PyTorch's: bool, True where a key takes part
_NONE = inspect.Parameter.empty  # in the place of a default

# Functions of PyTorch that are written in C, whose signature Python can't read.
_BUILTIN: Mapping[object, tuple[str, ...]] = {
    torch.nn.functional.scaled_dot_product_attention: (_MASK, "is_causal", "scale", "enable_gqa")
}


@dataclass(frozen=True)
class Convention:
    """How to call a kernel, and what it takes."""

    options: KernelOptions
    parameters: Mapping[str, Any]  # after q, k and v: their defaults
    anything: bool = False  # whether it takes any keyword: it is then given a causal flag and the scale
    positional: tuple[str, ...] = ()  # parameters that go by position alone

    @cached_property
    def required(self) -> frozenset[str]:
        """Keywords without a default."""
        return frozenset(name for name, default in self.parameters.items() if default is _NONE)

    @property
    def causal(self) -> str | None:
        """Keyword of the causal mask; None: it has none."""
        return self._first(*_CAUSAL) or (_CAUSAL[0] if self.anything else None)

    @property
    def out(self) -> str | None:
        """Keyword of the tensor that O is written into; None: it is returned."""
        return _OUT if _OUT in self.required else None

    @property
    def mask(self) -> str | None:
        """Keyword of a mask of the scores."""
        return self._first(_MASK)

    @property
    def splits(self) -> str | None:
        """Keyword of the number of splits that a row's keys are computed in."""
        return self._first(*_SPLITS)

    def _first(self, *names: str) -> str | None:
        return next((name for name in names if name in self.parameters), None)

    @cached_property
    def values(self) -> Mapping[str, Feature]:
        """Its keywords of features that go by a value, such as the scores' scale, and the features."""
        scale = self._first(*OWN_SCALE.keywords) or (OWN_SCALE.keywords[0] if self.anything else None)
        others = (feature for feature in FEATURES if feature is not OWN_SCALE)
        named = {word: feature for feature in others for word in feature.keywords if word in self.parameters}
        return named if scale is None else {scale: OWN_SCALE, **named}

    @cached_property
    def takes(self) -> frozenset[Feature]:
        """What inputs may ask of it."""
        return (self.options.features | self.conveyed) - self.options.refused

    @property
    def conveyed(self) -> frozenset[Feature]:
        """What its parameters can tell it."""
        features = set(self.values.values())
        if self.causal is not None:
            features |= {CAUSAL, OBLONG_CAUSAL}
        if self.mask is not None:
            features |= MASKS
        elif self.causal is not None and not self.causal_where_square:
            features.add(BLIND_ROWS)
        return frozenset(features)

    @property
    def tried(self) -> frozenset[Feature]:
        """What inputs may ask of it though nothing says that it takes that: its signature need not show it."""
        return frozenset({GROUPED, VALUE_DIM}) - self.takes - self.options.refused

    @property
    def causal_where_square(self) -> bool:
        """Whether its causal mask is this suite's only where queries and keys are as many."""
        return self.causal == _UPPER_LEFT

    def arguments(self, keywords: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """What follows q, k and v in a call: by position, and by keyword."""
        keywords, names = {**self.options.options, **keywords}, self.positional
        last = max((names.index(name) for name in keywords if name in names), default=-1)
        by_position = [keywords.pop(name, self.parameters[name]) for name in names[: last + 1]]
        return by_position, keywords


def convention(function: Callable[..., Any], options: KernelOptions) -> Convention:
    """How to call a function, from its signature and its options.

    Args:
        function: its first three parameters are q, k and v, whatever they are called.
        options: of its author; they take precedence over the signature.

    Raises:
        LoadError: no signature of (q, k, v, ...), a parameter that nothing explains, or an option that it lacks.
    """
    called = _read(function, options)
    if called.out is not None and options.backward == AUTOGRAD:  # which does not see what is written into a tensor
        called = replace(called, options=replace(options, backward=NO_BACKWARD))
    for feature in options.features - called.conveyed - {GROUPED}:  # shapes show groups, whatever a keyword says
        if feature.keywords:
            raise LoadError(f"takes {feature.taken!r}: it has no parameter {' or '.join(feature.keywords)}")
    understood = {called.causal, called.out, called.mask, *called.values, *options.options}
    for word in called.parameters:
        if word in called.required and word not in understood:
            raise LoadError(
                f"its parameter {word!r} has no default, and nothing says what it means: give options.{word}=VALUE, or"
                " write a function around it: def attention(q, k, v, causal, scale): return yours(q, k, v, ...)"
            )
    for word in options.options:
        if word not in called.parameters and not called.anything:
            known = ", ".join(called.parameters) or "none"
            raise LoadError(f"it has no parameter {word!r}; after q, k and v it has {known}")
    return called


def _read(function: Callable[..., Any], options: KernelOptions) -> Convention:
    """What Python knows of a function."""
    if function in _BUILTIN:
        return Convention(options, dict.fromkeys(_BUILTIN[function]))
    # A class whose `apply` the function is: it takes nothing by keyword, and its signature is that of `forward`.
    owner = getattr(function, "__self__", None)
    applied = owner if isinstance(owner, type) and issubclass(owner, torch.autograd.Function) else None
    try:
        parameters = list(inspect.signature(applied.forward if applied else function).parameters.values())
    except (TypeError, ValueError) as error:
        raise LoadError("it has no signature that Python can read: write a function around it") from error
    if applied and applied.setup_context is torch.autograd.Function.setup_context:
        parameters = parameters[1:]  # ctx
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    kinds = [parameter.kind for parameter in parameters]
    first = sum(kind in by_place for kind in kinds[:3])
    if first < 3 and inspect.Parameter.VAR_POSITIONAL not in kinds:
        raise LoadError(f"expected a function of (q, k, v, ...), this one has {first} parameters by position")
    rest = [each for each in parameters[3:] if each.kind in (*by_place, inspect.Parameter.KEYWORD_ONLY)]
    return Convention(
        options,
        {each.name: each.default for each in rest},
        anything=inspect.Parameter.VAR_KEYWORD in kinds,
        positional=tuple(each.name for each in rest if applied or each.kind is inspect.Parameter.POSITIONAL_ONLY),
    )
