"""Types and shapes of tiles, each made once: Triton's front end makes them anew for every operation.

To a compiler that is little; of an interpreter it is half the time.
"""

from collections.abc import Callable
from typing import Any

import triton.language as tl

Tensor = Any  # triton's


def sharing_types(original: Callable[..., None]) -> Callable[..., None]:
    """`block_type.__init__`, which gives equal types one shape."""
    known: dict[tuple[int, tuple[int, ...]], dict[str, Any]] = {}

    def begin(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
        key = id(element_ty), sizes
        if not all(type(size) is int for size in sizes) or key not in known:
            original(self, element_ty, shape)
            known[key] = dict(vars(self))  # which keeps the elements' type alive
        self.__dict__.update(known[key])

    return begin


def sharing_shapes(original: Callable[..., None]) -> Callable[..., None]:
    """`tensor.__init__`, which gives tensors of equal types one type, and all that follows from it."""
    known: dict[tuple[int, int], tuple[Any, dict[str, Any]]] = {}

    def begin(self: Tensor, handle: Any, kind: Any) -> None:
        key = id(kind.scalar), id(kind.shape) if kind.is_block() else 0
        if key not in known:
            original(self, handle, kind)
            known[key] = kind, {name: value for name, value in vars(self).items() if name != "handle"}
        self.__dict__.update(known[key][1], handle=handle)

    return begin


def meeting(original: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """`broadcast_impl_value`, which leaves two tensors of one shape, or without any, as they are."""

    def broadcast(self: Any, lhs: Tensor, rhs: Tensor) -> tuple[Tensor, Tensor]:
        if getattr(lhs.type, "shape", None) is getattr(rhs.type, "shape", None):
            return lhs, rhs
        return original(self, lhs, rhs)

    return broadcast
