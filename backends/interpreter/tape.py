"""Tapes: a program's calls of the builder, recorded, and played for others that go the same way without their source.

To run the source costs more than to compute what it says, and a kernel is launched again and again.
"""

import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import triton.language as tl
from triton.runtime.interpreter import TensorHandle

_LONGEST = 5_000  # steps
_SMALL = 2**12  # elements of what a tape holds on to
_LAUNCHES = 4  # of which a tape keeps what follows from their numbers alone
_NOTED = re.compile("create_.*|get_.*(?<!_ty)")  # builder's calls that make handles
_MEMORY = re.compile("^$|load|store|atomic|scatter|gather|dot|print|ptr_to_int")  # in names of calls that do more


class _Place(int):
    """A placeholder for a handle: its number among all of a program's."""


class UnrecordableError(Exception):
    """A program does something that a tape cannot record."""


# What is called; arguments, those by name, result: with places in them; whether it follows from the given.
Step = tuple[Callable[..., Any], Any, Any, Any, bool]


class Tape:
    """The recorded steps of a program."""

    def __init__(self, steps: list[Step], handles: int) -> None:
        """Keep the steps of a program, and the number of its handles."""
        later: set[_Place] = set()
        self._handles, self._steps = handles, []
        self._kept: dict[Any, dict[int, Any]] = {}  # by what is given, and the number of the step
        for call, args, named, result, follows in reversed(steps):
            last = {*_places((args, named, result))} - later
            later |= last
            changing = [at for at, part in enumerate(args) if any(True for _ in _places(part))]
            self._steps.append((call, args, changing, named, any(True for _ in _places(named)), result, last, follows))
        self._steps.reverse()

    def play(self, given: Iterable[Any], known: Hashable) -> bool:
        """Repeat the steps with other handles; return False where a branch differs, before anything is written.

        Steps that follow from the given handles alone are not repeated where these are `known`.
        """
        handles = [*given, *[None] * self._handles]
        kept = self._kept[known] = self._kept.pop(known, {})  # as the newest
        if len(self._kept) > _LAUNCHES:
            del self._kept[next(iter(self._kept))]

        def handle_of(leaf: Any) -> Any:
            return handles[leaf] if leaf.__class__ is _Place else leaf

        for number, (call, args, changing, named, renamed, result, last, follows) in enumerate(self._steps):
            if (now := kept.get(number)) is None:
                positional = [*args]
                for at in changing:
                    arg = args[at]
                    positional[at] = handles[arg] if arg.__class__ is _Place else _mapped(arg, handle_of)
                now = call(*positional, **(_mapped(named, handle_of) if renamed else named))
                if follows and _is_small(now):
                    kept[number] = now
            if result.__class__ is _Place:
                handles[result] = now
            elif result is not None or now is not None:
                for place, leaf in zip(leaves(result), leaves(now), strict=True):
                    if place.__class__ is _Place:
                        handles[place] = leaf
                    elif place != leaf:
                        return False
            for place in last:
                handles[place] = None  # arrays may be large
        return True


def _places(x: Any) -> Iterator[_Place]:
    """Yield the placeholders in a result or an argument."""
    return (leaf for leaf in leaves(x) if leaf.__class__ is _Place)


class BuilderRecorder:
    """A wrapper of the builder for upstream's language that records its calls."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self.spoil()

    def spoil(self) -> None:
        """Stop recording the program, or do not start."""
        self._steps: list[Step] | None = None

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._builder, name)
        return self.noted(member, name) if self._steps is not None and _NOTED.fullmatch(name) else member

    def noted(self, function: Callable[..., Any], name: str = "") -> Callable[..., Any]:
        """Return a function whose calls are recorded, without the calls that it makes itself."""

        def call(*args: Any, **named: Any) -> Any:
            steps, self._steps = self._steps, None
            result = function(*args, **named)
            if steps is not None and len(steps) < _LONGEST:
                self._note(steps, function, args, named, result, name)
            return result

        return call

    def record(self, program: Callable[[], None], given: Iterable[Any]) -> list[Tape]:
        """Run a program on these handles; return its tape, or None if it can't be played."""
        self._steps, self._handles, self._written, self._mark = [], 0, False, object()
        self._known = {self._named(handle) for handle in given}
        try:
            program()
            return [] if self._steps is None else [Tape(self._steps, self._handles)]
        finally:
            self.spoil()

    def _note(
        self, steps: list[Step], function: Callable[..., Any], args: Any, named: Any, result: Any, name: str
    ) -> None:
        """Add a call to the steps of a program; stop recording if it can't be replayed."""
        self._follows = not _MEMORY.search(name)
        try:
            arguments = _mapped(args, self._standing), _mapped(named, self._standing)
            places = _mapped(result, self._named)
        except UnrecordableError:
            return
        steps.append((function, *arguments, places, self._follows))
        self._known.update(_places(places) if self._follows else ())
        self._written |= any(word in name for word in ("store", "atomic", "scatter"))
        self._steps = steps

    def _standing(self, leaf: Any) -> Any:
        mark, place = getattr(leaf, "place", (None, None))
        if mark is self._mark:
            self._follows &= place in self._known
            return place
        if hasattr(leaf, "block_shape") or isinstance(leaf, TensorHandle):
            raise UnrecordableError  # a descriptor; what nobody has noted
        return leaf

    def _named(self, leaf: Any) -> Any:
        if not isinstance(leaf, TensorHandle):
            if hasattr(leaf, "block_shape") or (leaf is not None and self._written):
                raise UnrecordableError  # a descriptor; a decision after something was written
            return leaf
        place = _Place(self._handles)
        self._handles += 1
        leaf.place = self._mark, place
        return place


def _is_small(x: Any) -> bool:
    """Return whether it is a handle that a tape may keep, whatever broadcasting makes of it."""
    arrays: Any = x.terms if hasattr(x, "terms") else [x.data] if isinstance(x, TensorHandle) else []
    axes = [zip(array.shape, array.strides, strict=True) for array in arrays]
    return bool(0 < sum(math.prod(length for length, stride in each if stride) for each in axes) <= _SMALL)


def _mapped(x: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to handles and placeholders, wherever they are in `x`."""
    if isinstance(x, tl.core.tensor):
        return tl.core.tensor(change(x.handle), x.type)
    if isinstance(x, tuple | list):
        return type(x)(_mapped(part, change) for part in x)
    return {name: _mapped(part, change) for name, part in x.items()} if isinstance(x, dict) else change(x)


def leaves(x: Any) -> Iterator[Any]:
    """Yield every value in a result or an argument."""
    if isinstance(x, tl.core.tensor):
        yield x.handle
    elif isinstance(x, tuple | list | dict):
        for part in x.values() if isinstance(x, dict) else x:
            yield from leaves(part)
    else:
        yield x
