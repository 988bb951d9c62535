"""How a kernel that someone else wrote is called: what its author says of it, and what its signature shows.

Its author's options are given by a decorator or by flags, with the same words.
"""

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ParamSpec, TypeVar

import torch

from tiebreak.kernels.features import (
    BLIND_ROWS,
    CAUSAL,
    FEATURES,
    GROUPED,
    KEY_PADDING,
    MASKS,
    OBLONG_CAUSAL,
    OWN_ENDS,
    OWN_SCALE,
    VALUE_DIM,
    Feature,
)

_ATTRIBUTE, _NEEDS = "__tiebreak__", "__tiebreak_needs__"
_F = TypeVar("_F", bound=Callable[..., Any])
_P = ParamSpec("_P")
_T = TypeVar("_T")
_CAUSAL = ("causal", "is_causal")
_UPPER_LEFT = "is_causal"  # PyTorch's flag aligns its mask at the upper left: row i sees keys 0 .. i
_OUT = "out"  # where it has no default: O is written into it
_SPLITS = ("num_splits", "num_kv_splits")
_MASK = "attn_mask"  # PyTorch's: bool, True where a key takes part
_NONE = inspect.Parameter.empty  # instead of a default
# Functions of PyTorch that are written in C, whose signature Python can't read.
_BUILTIN: Mapping[object, tuple[str, ...]] = {
    torch.nn.functional.scaled_dot_product_attention: (_MASK, "is_causal", "scale", "enable_gqa")
}

#: The features that `takes` may list, by the words that people use.
TAKEN: Mapping[str, Feature] = {feature.taken: feature for feature in FEATURES if feature.taken}
#: The changes that `invariant` may list: they leave the bits of an answer alone.
INVARIANT = ("batch", "split", "padding", "memory", "decode", "chunks", "repeat")
#: Who computes dQ, dK and dV, where it is no function.
AUTOGRAD, NO_BACKWARD = "autograd", "none"
#: Bases of a log-sum-exp.
NATURAL, BINARY = "e", "2"


class LoadError(ValueError):
    """The kernel can't be found, imported or called as it is; one line."""


@dataclass(frozen=True, kw_only=True)
class KernelOptions:
    """The way in which a kernel is called, and what it takes. Defaults follow from the function's signature."""

    #: Order of the dimensions of q, k, v and O: b batch, h heads, n tokens, d head dimension. Without b (and h) the
    #: kernel is called once for every sequence (and head).
    layout: str = "bhnd"
    takes: str = ""  # the features that it takes, other than those that its keywords show: words of `TAKEN`
    refuses: str = ""  # what inputs may not ask of it, though its keywords suggest that they may: words of `TAKEN`
    invariant: str = ""  # under what changes of a call it has the same bits: words of `INVARIANT`
    contiguous: bool = False  # whether it takes contiguous tensors alone
    lse: str = ""  # base of the log-sum-exp that it returns next to O, "e" or "2"; "": either, if it returns one
    square: bool = False  # whether it needs as many queries as keys
    multiple_of: int = 1  # what the number of queries and of keys must be a multiple of
    head_dims: Sequence[int] = ()  # head dimensions that it has; none: all
    options: Mapping[str, Any] = field(default_factory=dict)  # further keywords, passed as they are
    own_defaults: str = ""  # parameters that every call is given and whose defaults mean another thing on purpose
    config: str = ""  # KERNEL.NAME=VALUE+NAME=VALUE, of an autotuned kernel that it launches; "": the first of each
    plan: str = ""  # the rounding plan that it declares, such as "flash@fused,base=2"
    backward: str | Callable[..., Any] = AUTOGRAD  # or "none", or (dO, q, k, v, O, **keywords) -> (dQ, dK, dV)
    name: str = ""  # how tables call it; "": as the function

    def __post_init__(self) -> None:
        if sorted(self.layout) not in (sorted("bhnd"), sorted("hnd"), sorted("nd")):
            raise LoadError(f"layout {self.layout!r}: expected the letters b, h, n and d, as in bnhd, hnd or nd")
        for option, allowed in (("takes", TAKEN), ("refuses", TAKEN), ("invariant", INVARIANT)):
            unknown = [word for word in split_words(getattr(self, option)) if word not in allowed]
            if unknown:
                raise LoadError(f"{option} {unknown[0]!r}: known are {', '.join(allowed)}")
        if not _is_count(self.multiple_of):
            raise LoadError(f"multiple_of {self.multiple_of!r}: expected a positive integer")
        if self.head_dims == [] or not all(_is_count(d) and d <= 1024 for d in self.head_dims):
            raise LoadError(f"head_dims {self.head_dims!r}: expected integers from 1 to 1024, at least one")
        if self.lse not in ("", NATURAL, BINARY):
            raise LoadError(f"lse {self.lse!r}: expected {NATURAL} or {BINARY}")
        if not callable(self.backward) and self.backward not in (AUTOGRAD, NO_BACKWARD):
            raise LoadError(f"backward {self.backward!r}: expected {AUTOGRAD}, {NO_BACKWARD} or a function")

    def features_in(self, option: str) -> frozenset[Feature]:
        """Return the features that `takes` or `refuses` lists."""
        return frozenset(TAKEN[word] for word in split_words(getattr(self, option)))


# The types of the words' values.
_TYPES: Mapping[str, tuple[type, ...]] = {
    **{each.name: (type(each.default),) for each in fields(KernelOptions)},
    "head_dims": (list, tuple),
    "options": (dict,),
}


def split_words(words: str) -> list[str]:
    """Return the words of an option that lists some."""
    return words.replace(",", " ").split()


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _with_words_of(options: Callable[_P, object]) -> Callable[[Callable[..., _T]], Callable[_P, _T]]:
    """Give a function of keywords the types of another's, for editors and type checkers."""
    del options
    return lambda function: function


@_with_words_of(KernelOptions)
def kernel(**options: Any) -> Callable[[_F], _F]:
    """Declare what the signature of an attention function does not show; the function itself stays as it is.

    Args:
        options: any of the fields of `KernelOptions`.

    Raises:
        LoadError: a word that is unknown, or a value that it can't have.
    """
    declared = _with_values(KernelOptions(), options, "@kernel")

    def mark(function: _F) -> _F:
        setattr(function, _ATTRIBUTE, declared)
        return function

    return mark


def needs(*foreign: Any) -> Callable[[_F], _F]:
    """Say which functions of other packages an adapter calls; each has a `missing_requirement`, as a kernel has."""

    def mark(function: _F) -> _F:
        setattr(function, _NEEDS, foreign)
        return function

    return mark


def needs_of(function: object) -> tuple[Any, ...]:
    """Return the functions of other packages that an adapter calls; none for any other function."""
    foreign = getattr(function, _NEEDS, ())
    return foreign if isinstance(foreign, tuple) else ()


def declared_options(function: object, flags: Sequence[str] = ()) -> KernelOptions:
    """Return the options from the decorator and then from flags, WORD=VALUE; `options.NAME=VALUE` is a keyword more.

    LoadError: no WORD=VALUE, a word that is unknown, or a value that it can't have.
    """
    declared = getattr(function, _ATTRIBUTE, None)
    options = declared if isinstance(declared, KernelOptions) else KernelOptions()
    values: dict[str, Any] = {}
    for text in flags:
        word, separator, value = text.partition("=")
        if not separator:
            raise LoadError(f"--declare {text}: expected WORD=VALUE, such as layout=bnhd")
        if word.startswith("options."):
            keyword = word.removeprefix("options.")
            values["options"] = {**options.options, **values.get("options", {}), keyword: _literal(value)}
        else:
            values[word] = value if _TYPES.get(word) == (str,) else _literal(value)
    return _with_values(options, values, "--declare")


def _with_values(base: KernelOptions, values: Mapping[str, Any], where: str) -> KernelOptions:
    """Return the options with other values, by word; LoadError, one line with `where`: they make no sense."""
    for word, value in values.items():
        if word not in _TYPES:
            raise LoadError(f"{where}: unknown word {word!r}; known are {', '.join(_TYPES)}")
        if not isinstance(value, _TYPES[word]) and not (word == "backward" and callable(value)):
            raise LoadError(f"{where}: {word} = {value!r}: expected {_TYPES[word][0].__name__}")
    try:
        return replace(base, **values)
    except LoadError as error:
        raise LoadError(f"{where}: {error}") from error


def _literal(text: str) -> Any:
    """Return a number, a truth value or a list as Python or TOML writes it; anything else is a word."""
    try:
        return ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except (ValueError, SyntaxError):
        return text


@dataclass(frozen=True)
class Convention:
    """The way in which a kernel is called, and the features that it takes."""

    options: KernelOptions
    parameters: Mapping[str, Any]  # after q, k and v: their defaults
    anything: bool = False  # whether it takes any keyword: it is then given a causal flag and the scale
    positional: tuple[str, ...] = ()  # parameters that go by position alone

    @cached_property
    def required(self) -> frozenset[str]:
        """The keywords without a default."""
        return frozenset(name for name, default in self.parameters.items() if default is _NONE)

    @property
    def causal(self) -> str | None:
        """The keyword of the causal mask; None: it has none."""
        return self._first(*_CAUSAL) or (_CAUSAL[0] if self.anything else None)

    @property
    def out(self) -> str | None:
        """The keyword of the tensor that O is written into; None: it is returned."""
        return _OUT if _OUT in self.required else None

    @property
    def mask(self) -> str | None:
        """The keyword of a mask of the scores."""
        return self._first(_MASK)

    @property
    def splits(self) -> str | None:
        """The keyword of the number of splits that a row's keys are computed in."""
        return self._first(*_SPLITS)

    def lengths(self, *, padded: bool, paged: bool) -> str | None:
        """Return the keyword of a call's numbers of keys: paged ones, and padded ones if no mask hides the others."""
        word = self._first(*KEY_PADDING.keywords)
        return word if paged or (padded and self.mask is None) or word in self.required else None

    def _first(self, *names: str) -> str | None:
        return next((name for name in names if name in self.parameters), None)

    @cached_property
    def values(self) -> Mapping[str, Feature]:
        """The keywords of features that have a value, such as the scores' scale, and the features."""
        scale = self._first(*OWN_SCALE.keywords) or (OWN_SCALE.keywords[0] if self.anything else None)
        others = (feature for feature in FEATURES if feature is not OWN_SCALE)
        named = {word: feature for feature in others for word in feature.keywords if word in self.parameters}
        return named if scale is None else {scale: OWN_SCALE, **named}

    @property
    def never_given(self) -> tuple[str, ...]:
        """The optional parameters that no call of the suite gives a value."""
        given = {*self.values, *self.options.options, self.causal, self.mask, self.splits, self.out}
        return tuple(name for name in self.parameters if name not in given | self.required)

    @cached_property
    def takes(self) -> frozenset[Feature]:
        """The features of inputs that it takes."""
        return (self.options.features_in("takes") | self.conveyed) - self.options.features_in("refuses")

    @property
    def native(self) -> frozenset[Feature]:
        """The features that it takes, other than masks that a mask of all scores can express; padding counts."""
        declared = {*self.values.values()} | self.options.features_in("takes") | {KEY_PADDING, CAUSAL, OBLONG_CAUSAL}
        return (self.takes | self.tried) - (frozenset() if self.mask is None else MASKS - declared)

    @property
    def conveyed(self) -> frozenset[Feature]:
        """The features that its parameters can express."""
        features = set(self.values.values())
        if self.causal is not None:
            features |= {CAUSAL, OBLONG_CAUSAL}
        if self.mask is not None:
            features |= MASKS
        elif KEY_PADDING in features or (self.causal is not None and not self.causal_where_square):
            features.add(BLIND_ROWS)
            features |= {OWN_ENDS} if {KEY_PADDING, CAUSAL} <= features and not self.causal_where_square else set()
        return frozenset(features)

    @property
    def tried(self) -> frozenset[Feature]:
        """The features of inputs to try though nothing declares them: its signature need not show them."""
        variants = {each for each in FEATURES if each.variant_of in {feature.taken for feature in self.takes} - {""}}
        return frozenset({GROUPED, VALUE_DIM} | variants) - self.takes - self.options.features_in("refuses")

    @property
    def causal_where_square(self) -> bool:
        """True if its causal mask is this suite's only where queries and keys are as many."""
        return self.causal == _UPPER_LEFT

    def arguments(self, keywords: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments after q, k and v in a call: by position, and by keyword."""
        keywords, names = {**self.options.options, **keywords}, self.positional
        last = max((names.index(name) for name in keywords if name in names), default=-1)
        by_position = [keywords.pop(name, self.parameters[name]) for name in names[: last + 1]]
        return by_position, keywords


def convention(function: Callable[..., Any], options: KernelOptions) -> Convention:
    """Return how to call a function of (q, k, v, ...), from its options and then from its signature.

    LoadError: no signature of (q, k, v, ...), a parameter that nothing explains, or an option that it lacks.
    """
    called = _read(function, options)
    if called.out is not None and options.backward == AUTOGRAD:  # which does not see what is written into a tensor
        called = replace(called, options=replace(options, backward=NO_BACKWARD))
    for feature in options.features_in("takes") - called.conveyed - {GROUPED, KEY_PADDING}:  # these show
        if feature.keywords:
            raise LoadError(f"takes {feature.taken!r}: it has no parameter {' or '.join(feature.keywords)}")
    understood = {called.causal, called.out, called.mask, *called.values, *options.options}
    for word in called.parameters:
        if word in called.required and word not in understood:
            raise LoadError(
                f"its parameter {word!r} has no default, and nothing says what it means: give options.{word}=VALUE, or"
                " write a function around it: def attention(q, k, v, causal, scale): return yours(q, k, v, ...)"
            )
    for word in split_words(options.own_defaults):
        if word not in called.parameters.keys() - called.required:
            raise LoadError(f"own_defaults {word!r}: it has no parameter of that name with a default")
    for word in options.options:
        if word not in called.parameters and not called.anything:
            allowed = ", ".join(called.parameters) or "none"
            raise LoadError(f"it has no parameter {word!r}; after q, k and v it has {allowed}")
    return called


def _read(function: Callable[..., Any], options: KernelOptions) -> Convention:
    """Return how a function's signature says it is called; LoadError: a parameter that nothing explains."""
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
