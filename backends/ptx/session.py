"""A stretch of time in which what Triton compiles for a card is executed here."""

import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompilationError
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from tiebreak.backends.absent import absent
from tiebreak.backends.interpreter.memory import KernelMemory, arguments_of
from tiebreak.backends.ptx.execution import Program
from tiebreak.backends.ptx.threads import Launch, TensorMap
from tiebreak.kernels.kernel import CannotRunError
from tiebreak.kernels.triton.compiling import compiling_text

_FLOATS = {"fp16": "e", "fp32": "f", "f32": "f", "fp64": "d"}
_program = lru_cache(maxsize=64)(Program)


@contextmanager
def executing(card: str, shared: int) -> Iterator[tuple[str, ...]]:
    """Execute, on CPU tensors, every Triton function that is launched meanwhile, compiled for a card such as sm_80.

    The card's name may have an assembler behind a slash. A block has at most `shared` bytes of shared memory. It yields
    the assumptions about the card.
    """
    with ExitStack() as stack:
        bare = card.partition("/")[0]
        target = GPUTarget("cuda", int(bare.removeprefix("sm_")), 32)
        utils = SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": shared},
            # The text takes the place of the binary, so there is no module to unload.
            load_binary=lambda name, text, *_: (None, _program(text.decode(), card), 0, 0, 1024),
        )
        stack.enter_context(absent(target, bare, utils=utils, launcher_cls=_Launcher))
        stack.enter_context(compiling_text(executed=True))
        stack.enter_context(patch.object(JITFunction, "run", _compiling(JITFunction.run)))
        # cuTile assembles by itself.
        for package, part, name in (("cutlass", "cute", card), ("cuda.tile", "cutile", bare)):
            if package in sys.modules:  # a kernel in it was imported
                launching = import_module(f"tiebreak.backends.ptx.{part}").launching
                stack.enter_context(launching(name))
        stack.enter_context(patch.object(InterpretedFunction, "run", _refused))
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)  # a block's tiles are small
        yield ("ex2.approx and its like correctly rounded",)


def _compiling(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that raises CannotRunError where the compiler fails for this card."""

    def compiling(self: Any, *args: object, **kwargs: object) -> Any:
        try:
            return run(self, *args, **kwargs)
        except (CompilationError, RuntimeError) as error:
            reason = next(filter(None, map(str.strip, reversed(str(error).splitlines()))), "")
            if not isinstance(error, CompilationError) and "PassManager" not in reason:
                raise
            raise CannotRunError(f"Triton does not compile it for this card: {reason}") from error

    return compiling


def _refused(function: Any, *_: object, **__: object) -> None:
    raise CannotRunError(f"{function.fn.__name__} was made under TRITON_INTERPRET=1, which leaves nothing to compile")


class _Launcher:
    """A replacement of the driver's launcher that passes a grid to a program."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self._types: Mapping[str, Any] = source.signature
        self._threads, self._shared = 32 * metadata.num_warps, metadata.shared
        self._name = str(source.fn.__name__)
        self._boxes = getattr(metadata, "tensordesc_meta", None) or ()
        if metadata.num_ctas > 1 or metadata.global_scratch_size:
            raise CannotRunError("clusters of blocks and scratch memory are not executed here")

    def __call__(self, x: int, y: int, z: int, _stream: object, program: Program, *rest: Any) -> None:
        """Run a program; the last arguments are its parameters, those before them the driver's."""
        bound = dict(zip(self._types, rest[-len(self._types) :], strict=True))
        given = {name: value for name, value in bound.items() if self._types[name] != "constexpr"}
        boxes, maps = iter(self._boxes), list[TensorMap]()
        bits = [number for name, value in given.items() for number in _bits(self._types[name], value, boxes, maps)]
        memory = KernelMemory(self._name, tuple(arguments_of(given)))
        program.run(Launch((x, y, z), self._threads, self._shared, bits, memory, maps))


def _bits(kind: Any, value: Any, boxes: Iterator[Any], maps: list[TensorMap]) -> Iterator[int]:
    """Yield an argument as a kernel gets it: a tensor's address, the parts of a tuple without constants.

    Of a descriptor the number of its map among `maps`, which it joins, if the card has these: `boxes` say how.
    """
    if isinstance(kind, tuple):
        for part, element in zip(kind, value, strict=True):
            yield from _bits(part, element, boxes, maps)
    elif kind.startswith("tensordesc"):
        box = next(boxes, None)
        if box is None:
            yield from (value.base.data_ptr(), *value.shape, *value.strides, value.padding == "nan", 0)
        else:
            yield len(maps)
            maps.append(_map_of(value, box))
        yield from (*value.shape, *value.strides)
    elif kind in _FLOATS:
        yield int.from_bytes(struct.pack(f"<{_FLOATS[kind]}", value), "little")
    elif kind != "constexpr":
        yield value.data_ptr() if hasattr(value, "data_ptr") else int(value)


def _map_of(descriptor: Any, box: Mapping[str, Any]) -> TensorMap:
    """Return the map that the driver would make of a descriptor, whose axes are in the other order there."""
    if box["fp4_padded"] or box.get("is_im2col"):
        raise CannotRunError("tensor maps of four bits, or of im2col, are not executed here")
    size, strides = box["elem_size"], list(descriptor.strides)[::-1]
    lengths, within = tuple(descriptor.shape)[::-1], tuple(box["block_size"])[::-1]
    strides_in_bytes = tuple(size * stride for stride in strides)
    return TensorMap(
        descriptor.base.data_ptr(), lengths, strides_in_bytes, within, box["swizzle"], descriptor.padding == "nan"
    )
