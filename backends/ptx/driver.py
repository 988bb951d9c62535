"""A driver whose launches are executed here: compiled host code calls it, and it executes the kernels' PTX."""

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from tiebreak.backends.interpreter.memory import KernelMemory, arguments_of
from tiebreak.backends.ptx.execution import Program
from tiebreak.backends.ptx.parsing import Parameter
from tiebreak.backends.ptx.threads import Launch, TensorMap
from tiebreak.kernels.kernel import CannotRunError

_CLUSTER = 4  # cudaLaunchAttributeClusterDimension
# Of a tensor map: bytes of a type's number, and bits of its first word that are known: version, axes - 1, type,
# swizzle; and two that are set for any tensor, or for rows of 256 bytes.
_SIZES, _KNOWN, _SET = (1, 2, 4, 4, 8, 8, 2, 4, 0, 8, 2), 0x2467F2, 0x40002
POINTER, NUMBER = ctypes.c_void_p, ctypes.c_int
_CALLED = ctypes.CFUNCTYPE(NUMBER, *[POINTER] * 4)  # of functions with more operands the first
_program = lru_cache(maxsize=16)(Program)


class Compiled(NamedTuple):
    """A kernel that can be launched."""

    name: str
    text: str  # PTX
    first: int = 0  # the card's address of the parameters, by which they are aligned
    made: Callable[[bytes], bytes] = bytes  # completes the bytes of all parameters with those that a host does not give


class Driver:
    """A driver for compiled host code: it holds kernels, and executes those that are launched."""

    def __init__(self, answers: Mapping[str, Callable[..., int]]) -> None:
        """Have no kernel, and answer what host code calls by these names."""
        self.error: Exception | None = None  # of the last launch
        self.tensors: list[torch.Tensor] = []  # that a launch may touch
        self._kernels: list[Compiled] = []  # by their handle - 1
        self.answers = {name: _CALLED(answer) for name, answer in answers.items()}
        self._idle = _CALLED(lambda *_: 0)

    def answer(self, name: str) -> int:
        """Return the address of what is called by a name: if it has no answer, of a function that does nothing."""
        return ctypes.cast(self.answers.get(name, self._idle), POINTER).value or 0

    @contextmanager
    def launching(self, *tensors: torch.Tensor) -> Iterator[None]:
        """Let host code launch what may touch some tensors, and raise what was raised there."""
        self.error, self.tensors = None, [*tensors]
        try:
            yield
        except Exception:
            if self.error is not None:
                raise self.error from None
            raise

    def keep(self, at: int, kernel: Compiled) -> int:
        """Write a kernel's handle to an address."""
        self._kernels.append(kernel)
        return put(at, len(self._kernels), POINTER)

    def launch(self, card: str, config: int, handle: int, parameters: int) -> int:
        """Execute a kernel: a cudaLaunchConfig_t or CUlaunchConfig, and addresses of its parameters, are at addresses.

        Returns:
            0, or 1 after an error, which can't go through code that is not Python's.
        """
        try:
            kernel, (x, y, z, *block, shared) = self._kernels[handle - 1], (ctypes.c_uint * 7).from_address(config)
            program = _program(kernel.text, card, kernel.name)
            if any(number == _CLUSTER and sizes != [1, 1, 1] for number, _, *sizes in _attributes(config)):
                raise CannotRunError(f"a kernel in clusters of blocks is not executed here: {kernel.name}")
            bits, maps = _parameters(kernel, program.entry.parameters, parameters)
            memory = KernelMemory(kernel.name, tuple(arguments_of({"an argument": self.tensors})))
            threads = program.entry.threads or math.prod(block)
            program.run(Launch((x, y, z), threads, shared + program.entry.shared, bits, memory, maps))
        except Exception as error:  # whatever a program raises
            self.error = error
            return 1
        return 0


def _attributes(config: int) -> Iterator[list[int]]:
    """Yield the first numbers of a launch's attributes: its own number, one that is none, and what it says."""
    attributes, count = (ctypes.c_uint64 * 2).from_address(config + 40)
    for number in range(count & 0xFFFFFFFF):
        yield list((ctypes.c_uint * 5).from_address(attributes + 72 * number))


def put(at: int, number: int, kind: Any = NUMBER) -> int:
    """Write a number of a type of C to an address, and return 0, as functions of a driver do."""
    kind.from_address(at).value = number
    return 0


def _parameters(
    kernel: Compiled, parameters: Sequence[Parameter], addresses: int
) -> tuple[list[int | bytes], list[TensorMap]]:
    """Return the bytes of every parameter, of a tensor map its number, and the maps."""
    held, places = bytearray(), list[slice]()
    for number, each in enumerate(parameters):
        held += bytes(-(kernel.first + len(held)) % each.align)
        places.append(slice(len(held), len(held) + each.size))
        at = None if each.hidden else POINTER.from_address(addresses + 8 * number).value
        held += ctypes.string_at(at, each.size) if at else bytes(each.size)
    whole, bits, maps = kernel.made(bytes(held)), list[int | bytes](), list[TensorMap]()
    for each, place in zip(parameters, places, strict=True):
        is_map = (each.array, each.align, each.size) == (True, 64, 128)
        bits.append(len(maps) if is_map else whole[place])
        if is_map:
            maps.append(map_of(whole[place]))
    return bits, maps


def map_of(held: bytes) -> TensorMap:
    """Return what the 128 bytes of a tensor map say, as maps of known tensors have shown: nobody documents them."""
    words = [int.from_bytes(held[at : at + 4], "little") for at in range(0, 64, 4)]
    axes, kind = (words[2] >> 4 & 7) + 1, words[2] >> 7 & 15
    if words[2] & ~_KNOWN or words[2] & _SET != _SET or words[7] or kind >= len(_SIZES) or not _SIZES[kind]:
        raise CannotRunError("a tensor map of another kind is not executed here")
    strides = (_SIZES[kind], *(word << 4 for word in words[3 : 2 + axes]))
    lengths, box = (tuple(each + 1 for each in part[:axes]) for part in (words[8:13], held[55:60]))
    return TensorMap(words[0] | words[1] << 32, lengths, strides, box, words[2] >> 13 & 3)
