"""Options of a kernel, given by its author: by a decorator or by flags, with the same words."""

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from tiebreak.kernels.external.errors import LoadError
from tiebreak.kernels.features import FEATURES, Feature

_ATTRIBUTE = "__tiebreak__"
_F = TypeVar("_F", bound=Callable[..., Any])

#: What `takes` may list, by the words that people use.
TAKEN: Mapping[str, Feature] = {feature.taken: feature for feature in FEATURES if feature.taken}
#: What `invariant` may list: changes of a call that leave the bits of an answer alone.
INVARIANT = ("batch", "split", "padding", "memory", "decode", "chunks", "repeat")
#: Who computes dQ, dK and dV, where it is no function.
AUTOGRAD, NO_BACKWARD = "autograd", "none"
#: Bases of a log-sum-exp.
NATURAL, BINARY = "e", "2"


@dataclass(frozen=True)
class KernelOptions:
    """How a kernel is called and what it takes. What its author leaves out follows from the function's signature.

    Attributes:
        layout: order of the dimensions of q, k, v and O: b batch, h heads, n tokens, d head dimension. Without b (and
            h) the kernel is called once for every sequence (and head).
        takes: what inputs may ask of it, beside what its keywords show: words of `TAKEN`.
        refuses: what inputs may not ask of it, though its keywords suggest that they may: words of `TAKEN`.
        invariant: under what changes of a call it has the same bits: words of `INVARIANT`.
        contiguous: whether it takes contiguous tensors alone.
        lse: base of the log-sum-exp that it returns beside O, "e" or "2"; "": either, if it returns one.
        square: whether it needs as many queries as keys.
        multiple_of: what the number of queries and of keys must be a multiple of.
        head_dims: head dimensions that it has; none: all.
        options: further keywords, passed as they are.
        plan: the rounding plan that it declares, such as "flash@fused,base=2".
        backward: "autograd", "none", or a function (dO, q, k, v, O, **keywords) -> (dQ, dK, dV).
        name: how tables call it; "": as the function.
    """

    layout: str = "bhnd"
    takes: str = ""
    refuses: str = ""
    invariant: str = ""
    contiguous: bool = False
    lse: str = ""
    square: bool = False
    multiple_of: int = 1
    head_dims: Sequence[int] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    plan: str = ""
    backward: str | Callable[..., Any] = AUTOGRAD
    name: str = ""

    def __post_init__(self) -> None:
        """Refuse values that make no sense, by a LoadError of one line."""
        if sorted(self.layout) not in (sorted("bhnd"), sorted("hnd"), sorted("nd")):
            raise LoadError(f"layout {self.layout!r}: expected the letters b, h, n and d, as in bnhd, hnd or nd")
        for option, known in (("takes", TAKEN), ("refuses", TAKEN), ("invariant", INVARIANT)):
            unknown = [word for word in split_words(getattr(self, option)) if word not in known]
            if unknown:
                raise LoadError(f"{option} {unknown[0]!r}: known are {', '.join(known)}")
        if not _is_count(self.multiple_of):
            raise LoadError(f"multiple_of {self.multiple_of!r}: expected a positive integer")
        if not all(map(_is_count, self.head_dims)):
            raise LoadError(f"head_dims {self.head_dims!r}: expected positive integers")
        if self.lse not in ("", NATURAL, BINARY):
            raise LoadError(f"lse {self.lse!r}: expected {NATURAL} or {BINARY}")
        if not callable(self.backward) and self.backward not in (AUTOGRAD, NO_BACKWARD):
            raise LoadError(f"backward {self.backward!r}: expected {AUTOGRAD}, {NO_BACKWARD} or a function")

    @property
    def features(self) -> frozenset[Feature]:
        """What `takes` lists."""
        return frozenset(TAKEN[word] for word in split_words(self.takes))

    @property
    def refused(self) -> frozenset[Feature]:
        """What `refuses` lists."""
        return frozenset(TAKEN[word] for word in split_words(self.refuses))


# Of every word's value.
_TYPES: Mapping[str, tuple[type, ...]] = {
    **{each.name: (type(each.default),) for each in fields(KernelOptions)},
    "head_dims": (list, tuple),
    "options": (dict,),
}


def split_words(words: str) -> list[str]:
    """The words of an option that lists some."""
    return words.replace(",", " ").split()


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def kernel(**options: Any) -> Callable[[_F], _F]:
    """Declare what the signature of an attention function does not show; the function itself stays as it is.

    Args:
        options: any of the attributes of `KernelOptions`.

    Returns:
        A decorator.

    Raises:
        LoadError: a word that is unknown, or a value that it can't have.
    """
    declared = _with_values(KernelOptions(), options, "@kernel")

    def mark(function: _F) -> _F:
        setattr(function, _ATTRIBUTE, declared)
        return function

    return mark


def declared_options(function: object, flags: Sequence[str] = ()) -> KernelOptions:
    """The options that the decorator and then flags give a function.

    Args:
        function: with or without the decorator.
        flags: WORD=VALUE each; `options.NAME=VALUE` is one more keyword.

    Raises:
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
    """The same options with other values, by word; LoadError, one line with where they stand: they make no sense."""
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
    """A number, a truth value or a list as Python or TOML writes it; anything else is a word."""
    try:
        return ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except (ValueError, SyntaxError):
        return text
