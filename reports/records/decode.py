"""From plain JSON values to data classes, by their annotations; the first value of the wrong kind is named."""

import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

_Decoder = Callable[[Any], Any]

_LARGEST_INTEGER = 2**63 - 1
_LARGEST = sys.float_info.max
_NUMBERS = (int, float)
_SHOWN = 40  # characters of a wrong value that a message quotes


class FieldError(ValueError):
    """A field that is missing, unknown or of the wrong kind."""

    def __init__(self, problem: str, path: str = "") -> None:
        super().__init__(f"{path.removeprefix('.') or 'the whole'}: {problem}")
        self.problem, self.path = problem, path

    def within(self, step: str) -> "FieldError":
        """The same, seen from one level further out."""
        return FieldError(self.problem, step + self.path)


def _wrong(expected: str, value: object) -> FieldError:
    text = "null" if value is None else repr(value)
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return FieldError(f"expected {expected}, found {shown}")


@dataclass(frozen=True, eq=False)
class ByName:
    """Annotates a Mapping[str, Any]: what the values of some names are."""

    kinds: Mapping[str, Any]


@cache
def decoder(kind: Any) -> _Decoder:
    """The function that takes a JSON value to `kind`.

    Args:
        kind: str, bool, int, float (finite), Any (JSON without NaN), an Annotated[str, frozenset of allowed values],
            Annotated[int or float, least value], Annotated[Mapping, ByName], X | None, a data class | float | None,
            tuple[X, ...], Mapping[str, X], or a data class with such fields; those that have a default may be missing.

    Returns:
        A function of the value that raises `FieldError`, with the path of the field, if it is not of that kind.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in _LEAVES:
        return _LEAVES[kind]
    if is_dataclass(kind):
        return _of_dataclass(kind)
    if origin is Annotated:
        return _limited(*arguments)
    if origin in (Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not types.NoneType]
        return _or_null(decoder(inner[0])) if len(inner) == 1 else _object_or_number(decoder(inner[0]))
    if origin is tuple:
        return _of_list(decoder(arguments[0]))
    if origin is Mapping:
        return _of_object(decoder(arguments[1]))
    raise TypeError(f"no JSON value stands for {kind}")


def _limited(kind: Any, limit: Any) -> _Decoder:
    if isinstance(limit, ByName):
        return _of_object(_anything, {name: decoder(of_name) for name, of_name in limit.kinds.items()})
    return _one_of(limit) if kind is str else _at_least(decoder(kind), limit)


def _leaf(expected: str, fits: Callable[[Any], bool]) -> _Decoder:
    def decode(value: Any) -> Any:
        if not fits(value):
            raise _wrong(expected, value)
        return value

    return decode


def _finite(value: Any) -> bool:
    """Neither NaN nor 1e999, which Python's reader takes for infinity."""
    return type(value) in _NUMBERS and -_LARGEST <= value <= _LARGEST


_number = _leaf("a finite number", _finite)
_number_or_null = _leaf("a finite number or null", lambda value: value is None or _finite(value))


def _anything(value: Any) -> Any:
    if type(value) is dict:
        return _of_object(_anything)(value)
    if type(value) is list:
        return list(_of_list(_anything)(value))
    if type(value) in _NUMBERS:
        return _number(value)
    return value


_LEAVES: dict[Any, _Decoder] = {
    str: _leaf("a string", lambda value: type(value) is str),
    bool: _leaf("true or false", lambda value: type(value) is bool),
    int: _leaf("an integer of 64 bits", lambda value: type(value) is int and abs(value) <= _LARGEST_INTEGER),
    float: _number,
    float | None: _number_or_null,
    Any: _anything,
}


def _one_of(allowed: frozenset[str]) -> _Decoder:
    return _leaf(f"one of {', '.join(sorted(allowed))}", lambda value: type(value) is str and value in allowed)


def _at_least(inner: _Decoder, least: int) -> _Decoder:
    def decode(value: Any) -> Any:
        number = inner(value)
        if number < least:
            raise _wrong(f"at least {least}", value)
        return number

    return decode


def _or_null(inner: _Decoder) -> _Decoder:
    def decode(value: Any) -> Any:
        return None if value is None else inner(value)

    return decode


def _object_or_number(of_object: _Decoder) -> _Decoder:
    def decode(value: Any) -> Any:
        return of_object(value) if type(value) is dict else _number_or_null(value)

    return decode


def _of_list(inner: _Decoder) -> _Decoder:
    def decode(value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise _wrong("a list", value)
        items: list[Any] = []
        try:
            for item in value:
                items.append(inner(item))
        except FieldError as error:
            raise error.within(f"[{len(items)}]") from None
        return tuple(items)

    return decode


def _of_object(inner: _Decoder, known: Mapping[str, _Decoder] = MappingProxyType({})) -> _Decoder:
    def decode(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise _wrong("an object", value)
        values = {}
        for name, item in value.items():
            try:
                values[name] = known.get(name, inner)(item)
            except FieldError as error:
                raise error.within(f".{name}") from None
        return values

    return decode


def _of_dataclass(kind: Any) -> _Decoder:
    hints = get_type_hints(kind, include_extras=True)
    parts = {field.name: decoder(hints[field.name]) for field in fields(kind)}
    required = [field.name for field in fields(kind) if field.default is field.default_factory is MISSING]
    constants = {field.name: field.default for field in fields(kind) if field.default is not MISSING}
    made_anew = {field.name: field.default_factory for field in fields(kind) if field.default_factory is not MISSING}

    def decode(value: Any) -> Any:
        if type(value) is not dict:
            raise _wrong("an object", value)
        for name in required:
            if name not in value:
                raise FieldError("missing", f".{name}")
        made: Any = object.__new__(kind)  # the constructor of a frozen class takes as long as all the checks
        values = vars(made)
        values.update(constants)
        for name, item in value.items():
            if name not in parts:
                raise FieldError("unknown field", f".{name}")
            try:
                values[name] = parts[name](item)
            except FieldError as error:
                raise error.within(f".{name}") from None
        for name, make in made_anew.items():
            if name not in values:
                values[name] = make()
        return made

    return decode
