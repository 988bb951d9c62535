"""How a kernel that someone else wrote is called: what its signature shows, and what its options say."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
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

ALWAYS = "always"  # of a causal mask: in every call
_CAUSAL = ("causal", "is_causal")
_OUT = ("out",)  # where it has no default: O is written into it
_SPLITS = ("num_splits", "num_kv_splits")
_MASK = ("attn_mask",)  # PyTorch's: bool, True where a key takes part
_UPPER_LEFT = ("is_causal",)  # PyTorch's flag aligns its mask at the upper left: row i sees keys 0 .. i

# Functions of PyTorch that are written in C, whose signature Python can't read.
_BUILTIN: Mapping[object, tuple[str, ...]] = {
    torch.nn.functional.scaled_dot_product_attention: ("attn_mask", "is_causal", "scale", "enable_gqa")
}


@dataclass(frozen=True)
class _Signature:
    """What a function takes after q, k and v."""

    names: tuple[str, ...]
    required: tuple[str, ...] = ()  # those without a default
    anything: bool = False  # whether any keyword goes
    positions: Mapping[str, Any] = field(default_factory=dict)  # their defaults, where nothing goes by keyword


@dataclass(frozen=True)
class Convention:
    """How to call a kernel, and what it takes."""

    options: KernelOptions
    causal: str | None  # keyword of the causal mask, or ALWAYS; None: it has none
    out: str | None  # keyword of the tensor that O is written into; None: it is returned
    mask: str | None  # keyword of a mask of the scores
    splits: str | None  # keyword of the number of splits that a row's keys are computed in
    #: Its keywords of features that go by a value, such as the scores' scale: the feature, and its common keyword
    values: Mapping[str, tuple[Feature, str]]
    required: frozenset[str]  # keywords without a default
    positions: Mapping[str, Any]  # parameters after v that go by position alone, with their defaults

    @property
    def takes(self) -> frozenset[Feature]:
        """What inputs may ask of it."""
        return frozenset(self.options.features | self.conveyed) - self.options.refused

    @property
    def conveyed(self) -> set[Feature]:
        """What its parameters can tell it."""
        features = {feature for feature, _ in self.values.values()}
        if self.causal is not None:
            features |= {CAUSAL, OBLONG_CAUSAL}
        if self.mask is not None:
            features |= MASKS
        elif self.causal is not None and not self.causal_where_square:
            features.add(BLIND_ROWS)
        return features

    @property
    def tried(self) -> frozenset[Feature]:
        """What inputs may ask of it though nothing says that it takes that: its signature need not show it."""
        return frozenset({GROUPED, VALUE_DIM}) - self.takes - self.options.refused

    @property
    def causal_where_square(self) -> bool:
        """Whether its causal mask is this suite's only where queries and keys are as many."""
        return self.causal in (*_UPPER_LEFT, ALWAYS)

    def arguments(self, keywords: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """What follows q, k and v in a call: by position, and by keyword.

        Args:
            given: values by keyword.
        """
        keywords = {**self.options.options, **keywords}
        names = list(self.positions)
        last = max((names.index(name) for name in keywords if name in names), default=-1)
        by_position = [keywords.pop(name, self.positions[name]) for name in names[: last + 1]]
        return by_position, keywords


def convention(function: Callable[..., Any], options: KernelOptions) -> Convention:
    """How to call a function, from its signature and its options.

    Args:
        function: its first three parameters are q, k and v, whatever they are called.
        options: of its author; they take precedence over the signature.

    Raises:
        LoadError: the signature has a parameter that no option explains, or an option names one that it lacks.
    """
    signature = _signature(function)
    names, anything = signature.names, signature.anything
    out = _named(options.out, _OUT, signature.required, anything=False)
    if out is not None and options.backward == AUTOGRAD:
        options = replace(options, backward=NO_BACKWARD)  # autograd does not see what is written into a tensor
    called = Convention(
        options,
        causal=_named(options.causal, _CAUSAL, names, anything),
        out=out,
        mask=_named(options.mask, _MASK, names, anything=False),
        splits=_named(options.splits, _SPLITS, names, anything=False),
        values={keyword: (feature, common) for feature, keyword, common in _values(options, names, anything)},
        required=frozenset(signature.required),
        positions=signature.positions,
    )
    for feature in options.features - called.conveyed - {GROUPED}:  # shapes show groups, whatever a keyword says
        if feature.keywords:
            raise LoadError(f"takes {feature.taken!r}: it has no parameter {' or '.join(feature.keywords)}")
    understood = {called.causal, called.out, called.mask, *called.values, *options.options}
    unexplained = [name for name in signature.required if name not in understood]
    if unexplained:
        word = unexplained[0]
        raise LoadError(
            f"its parameter {word!r} has no default, and nothing says what it means: give options.{word}=VALUE,"
            " causal=NAME, scale=NAME or mask=NAME, or write a function around it"
        )
    if not anything:
        for word in (options.causal, options.scale, options.out, options.mask, options.splits, *options.options):
            if word and word != ALWAYS and word not in names:
                raise LoadError(f"it has no parameter {word!r}; after q, k and v it has {', '.join(names) or 'none'}")
    return called


def _values(options: KernelOptions, names: tuple[str, ...], anything: bool) -> Iterator[tuple[Feature, str, str]]:
    """The features that go by a value, by which keyword, and which common one that is.

    A function that takes any keyword is given the scale alone.
    """
    scale = _named(options.scale, OWN_SCALE.keywords, names, anything)
    if scale is not None:
        yield OWN_SCALE, scale, OWN_SCALE.keywords[0]
    for feature in FEATURES:
        if feature is not OWN_SCALE:
            yield from ((feature, keyword, keyword) for keyword in feature.keywords if keyword in names)


def _named(option: str, common: tuple[str, ...], names: tuple[str, ...], anything: bool) -> str | None:
    """The keyword that an option names, else the signature; of a function that takes any, the first common one."""
    if option:
        return option
    return next((name for name in common if name in names), common[0] if anything else None)


def _signature(function: Callable[..., Any]) -> _Signature:
    """What Python knows of a function.

    Raises:
        LoadError: no signature, or fewer than three parameters that go by position.
    """
    if function in _BUILTIN:
        return _Signature(_BUILTIN[function])
    applied = _applied(function)
    try:
        parameters = list(inspect.signature(applied.forward if applied else function).parameters.values())
    except (TypeError, ValueError) as error:
        raise LoadError("it has no signature that Python can read: write a function around it") from error
    if applied and applied.setup_context is torch.autograd.Function.setup_context:
        parameters = parameters[1:]  # ctx
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    spread = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters)
    first = [parameter for parameter in parameters[:3] if parameter.kind in by_place]
    if len(first) < 3 and not spread:
        raise LoadError(f"expected a function of (q, k, v, ...), this one has {len(first)} parameters by position")
    named = (*by_place, inspect.Parameter.KEYWORD_ONLY)
    rest = {parameter.name: parameter.default for parameter in parameters[3:] if parameter.kind in named}
    return _Signature(
        tuple(rest),
        required=tuple(name for name, default in rest.items() if default is inspect.Parameter.empty),
        anything=any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters),
        positions={
            parameter.name: parameter.default
            for parameter in parameters[3:]
            if parameter.name in rest and (applied or parameter.kind is inspect.Parameter.POSITIONAL_ONLY)
        },
    )


def _applied(function: Callable[..., Any]) -> type[torch.autograd.Function] | None:
    """The class whose `apply` a function is: it takes nothing by keyword, and its signature is that of `forward`."""
    owner = getattr(function, "__self__", None)
    return owner if isinstance(owner, type) and issubclass(owner, torch.autograd.Function) else None
