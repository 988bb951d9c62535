"""Data in files: classes whose fields are checked as JSON is decoded, and their JSON Schema."""

import json
import re
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
_KEY = "[...]"  # what msgspec says in the place of an object's key


class Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An object in a file; fields at their defaults are left out."""


class FileData(Data, frozen=True, omit_defaults=False):
    """The object that a file is; its class has a field `schema`."""

    def check(self) -> None:
        """Hold the fields to each other.

        Raises:
            FieldError: they contradict.
        """


class FieldError(ValueError):
    """What is wrong with a field, or with the whole where there is no path."""

    def __init__(self, problem: str, path: str = "") -> None:
        super().__init__(f"{path.removeprefix('.')}: {problem}" if path else problem)


def one_of(names: tuple[str, ...]) -> Meta:
    """Return what limits a string to some names."""
    return Meta(pattern=rf"^({'|'.join(names)})(?!\n)$", extra_json_schema={"enum": list(names)})


def decode(content: bytes | str, kind: type[_T]) -> _T:
    """Return the object that JSON stands for.

    Raises:
        FieldError: no JSON, or a field is missing, unknown or of the wrong kind.
    """
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        raise FieldError(*_located(error, content, kind)) from None
    except (UnicodeError, msgspec.DecodeError) as error:
        raise FieldError(f"not JSON ({error})" if content.strip() else "empty") from None
    except RecursionError:
        raise FieldError("nested too deeply") from None


def convert(plain: Any, kind: Any, path: str) -> Any:
    """Return the object that plain values stand for; an object of its kind as it is.

    Raises:
        FieldError: a field is missing, unknown or of the wrong kind; the path is where the values stand.
    """
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        problem, inner = _located(error, msgspec.json.encode(plain), kind)
        raise FieldError(problem, path + inner) from None


def encode(data: Any, indent: int | None = None) -> str:
    """Return data as JSON, in one line unless it is indented.

    Raises:
        ValueError: a number is NaN or infinite.
    """
    return json.dumps(msgspec.to_builtins(data), indent=indent, allow_nan=False)


def _located(error: msgspec.ValidationError, content: bytes | str, kind: Any) -> tuple[str, str]:
    """Return the problem and the path that an error names, with the keys of objects, which msgspec leaves out."""
    problem, separator, path = str(error).rpartition(" - at `$")
    if not separator:
        return path, ""
    path = path.removesuffix("`")

    def raw(text: str) -> msgspec.Raw:
        return msgspec.Raw(text.encode())

    def fails() -> bool:
        try:
            msgspec.json.decode(msgspec.json.encode(whole), type=kind)
        except msgspec.ValidationError as again:
            return str(again) == str(error)
        return False

    try:
        whole = json.loads(content, parse_float=raw, parse_int=raw) if _KEY in path else None
    except (ValueError, RecursionError):  # of what comes after the wrong field
        whole = None
    at: Any = whole
    shown = ""
    while _KEY in path and fails():
        before, _, path = path.partition(_KEY)
        for name, place in re.findall(r"\.([^.\[]+)|\[(\d+)\]", before):
            at = at[name or int(place)]
        items = list(at.items())
        while len(items) > 1:  # the first half has the wrong value, or the other
            half = items[: len(items) // 2]
            at.clear()
            at.update(half)
            items = half if fails() else items[len(half) :]
        at.clear()
        at.update(items)
        key, at = items[0]
        shown += f"{before}.{key}"
    return problem, shown + path
