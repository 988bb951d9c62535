"""Hashes that are computed once: declarations, and what they are made of, are keys of all that kernels share."""

from dataclasses import fields
from typing import Any, TypeVar

_T = TypeVar("_T")
_KEPT = "_hash"


def hashed_once(data_class: type[_T]) -> type[_T]:
    """A frozen data class whose objects keep their hash."""
    generated: Any = data_class.__hash__

    def hashed(self: Any) -> int:
        kept = self.__dict__
        if _KEPT not in kept:
            kept[_KEPT] = generated(self)
        return int(kept[_KEPT])

    def fields_alone(self: Any) -> dict[str, Any]:
        # Another process hashes names otherwise.
        return {field.name: getattr(self, field.name) for field in fields(self)}

    data_class.__hash__ = hashed  # type: ignore[method-assign]
    data_class.__getstate__ = fields_alone  # type: ignore[method-assign]
    return data_class
