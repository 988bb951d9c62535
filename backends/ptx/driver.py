"""A driver whose launches are executed here: compiled host code calls it, and it executes the kernels' PTX."""

import ctypes
import math
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from tiebreak.backends.interpreter.memory import KernelMemory, arguments_of
from tiebreak.backends.ptx.execution import Program
from tiebreak.backends.ptx.threads import Launch, TensorMap
from tiebreak.kernels.kernel import CannotRunError

_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)\{", re.DOTALL)
_PARAMETER = re.compile(
    r"(\.hidden\s+)?\.param(?:\s+\.align\s+(\d+))?\s+\.[a-z]+(\d+)(?:\s+\.(?:ptr|global|align\s+\d+))*\s+[\w$]+(?:\[(\d+)\])?"
)
_CLUSTERS = re.compile(r"\.reqnctapercluster\s+(?!1\b)")
_CLUSTER = 4  # cudaLaunchAttributeClusterDimension
_THREADS, _STATIC = re.compile(r"\.reqntid\s+([\d, ]+)"), re.compile(r"\.shared[^;\[]*\[(\d+)\];")
# Of a tensor map: bytes of a type's number, and bits of its first word that are known: version, axes - 1, type,
# swizzle; and two that are set for any tensor, or for rows of 256 bytes.
_SIZES, _KNOWN, _SET = (1, 2, 4, 4, 8, 8, 2, 4, 0, 8, 2), 0x2467F2, 0x40002
POINTER, NUMBER = ctypes.c_void_p, ctypes.c_int
_program = lru_cache(maxsize=16)(Program)


class Compiled(NamedTuple):
    """A kernel that can be launched."""

    name: str
    text: str  # PTX
    first: int = 0  # the card's address of the parameters, by which they are aligned
    made: Callable[[bytes], bytes] = bytes  # completes the bytes of all parameters with those that a host does not give


class Driver:
    """A driver for compiled host code: it holds kernels, and executes those that are launched."""

    def __init__(self) -> None:
        """Have no kernel."""
        self.error: Exception | None = None  # of the last launch
        self.tensors: list[torch.Tensor] = []  # that a launch may touch
        self._kernels: list[Compiled] = []  # by their handle - 1

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
            entry = next((each for each in _ENTRY.finditer(kernel.text) if each[1] == kernel.name), None)
            if entry is None or _CLUSTERS.search(entry[3]):
                missing = "without its PTX" if entry is None else "in clusters of blocks"
                raise CannotRunError(f"a kernel {missing} is not executed here: {kernel.name}")
            bits, maps = _parameters(kernel, entry[2], parameters)
            threads = _THREADS.search(entry[3])
            count = math.prod(map(int, threads[1].split(",")) if threads else block)
            shared += sum(map(int, _STATIC.findall(kernel.text)))
            memory = KernelMemory(kernel.name, tuple(arguments_of({"an argument": self.tensors})))
            program = _program(kernel.text, card)
            if any(number == _CLUSTER and sizes != [1, 1, 1] for number, _, *sizes in _attributes(config)):
                raise CannotRunError(f"a kernel in clusters of blocks is not executed here: {kernel.name}")
            program.run(Launch((x, y, z), count, shared, bits, memory, maps))
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


def _parameters(kernel: Compiled, declared: str, addresses: int) -> tuple[list[bytes], list[TensorMap]]:
    """Return the bytes of every parameter of an entry, of a tensor map its number, and the maps."""
    held, places, maps, bits = bytearray(), list[tuple[slice, bool]](), list[TensorMap](), list[bytes]()
    for number, (hidden, align, width, count) in enumerate(_PARAMETER.findall(declared)):
        size = int(width) // 8 * int(count or 1)
        held += bytes(-(kernel.first + len(held)) % int(align or size))
        places.append((slice(len(held), len(held) + size), (align, count) == ("64", "128")))
        at = POINTER.from_address(addresses + 8 * number).value if not hidden else None
        held += ctypes.string_at(at, size) if at else bytes(size)
    whole = kernel.made(bytes(held))
    for place, is_map in places:
        bits.append(len(maps).to_bytes(8, "little") if is_map else whole[place])
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
