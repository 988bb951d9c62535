"""Data in files: classes whose fields are checked as JSON is decoded."""

import json
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

SCHEMA = 7  # of every file that this suite writes; a file of another one is made anew

_LARGEST_INTEGER = 2**63 - 1
Integer = Annotated[int, Meta(ge=-_LARGEST_INTEGER, le=_LARGEST_INTEGER)]
Count = Annotated[int, Meta(ge=0, le=_LARGEST_INTEGER)]
Size = Annotated[float, Meta(ge=0)]
Schema = Annotated[int, Meta(extra_json_schema={"const": SCHEMA})]

_T = TypeVar("_T")


class Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An object in a file; fields at their defaults are left out."""


class FileData(Data, frozen=True, omit_defaults=False):
    """The object in a file at the top level; its class has a field `schema`."""

    def check(self) -> None:
        """Raise FieldError if fields contradict each other."""


class FieldError(ValueError):
    """An error in a field, or in the whole where there is no path."""

    def __init__(self, problem: str, path: str = "") -> None:
        super().__init__(f"{path.removeprefix('.')}: {problem}" if path else problem)


def one_of(names: tuple[str, ...]) -> Meta:
    """Return a constraint that limits a string to some names."""
    return Meta(pattern=rf"^({'|'.join(names)})(?!\n)$", extra_json_schema={"enum": list(names)})


def decode(content: bytes | str, kind: type[_T]) -> _T:
    """Return the object that JSON represents; FieldError if it is none, or a field is missing, unknown or wrong."""
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        raise _field_error(error) from None
    except (UnicodeError, msgspec.DecodeError) as error:
        raise FieldError(f"not JSON ({error})" if content.strip() else "empty") from None
    except RecursionError:
        raise FieldError("nested too deeply") from None


def convert(plain: Any, kind: Any, path: str = "") -> Any:
    """Return the object that plain values at a path represent; FieldError if a field is missing, unknown or wrong."""
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        raise _field_error(error, path) from None


def encode(data: Any, indent: int | None = None) -> str:
    """Return data as JSON, in one line unless it is indented; ValueError if a number is NaN or infinite."""
    return json.dumps(msgspec.to_builtins(data), indent=indent, allow_nan=False)


def _field_error(error: msgspec.ValidationError, path: str = "") -> FieldError:
    """Return the error with the path that msgspec puts behind it; a key of a mapping is [...] there."""
    problem, behind, inner = str(error).rpartition(" - at `$")
    return FieldError(problem, path + inner.removesuffix("`")) if behind else FieldError(inner, path)
