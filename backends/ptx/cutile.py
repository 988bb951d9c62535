"""Kernels in cuTile, launched as their users do: cuda.tile compiles them for a card, and loads a driver that is here.

Its binary, an ELF, has the kernel's PTX as lines of one section, and in another, an ELF too, host code that makes the
tensor maps that the kernel has beside its arguments.
"""

import ctypes
import mmap
import platform
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from tiebreak.backends.ptx.driver import NUMBER, POINTER, Compiled, Driver, put
from tiebreak.kernels.kernel import CannotRunError

_FIND = "cuGetProcAddress_v2"
_LOADER = "cuda.tile._load_libcuda"  # what it takes the driver from
_MAKES = b"__CUDA_TILEIR_FUNC_ON_ARGUMENTS_CHANGE_0"
_VERSION, _DEVICES, _ON_GPU = 13050, 256, 2  # of the driver; how many; a device's type in DLPack
_MAJOR, _MINOR = 75, 76  # attributes of a device, of its compute capability
_PARAMETERS = b"\4\12\10\0"  # before a number, and the address and size of the parameters: EIATTR_PARAM_CBANK


class _CuTileDriver(Driver):
    """The driver, as cuda.tile calls it. A card is the device, and the context, of its number: sm_90 is 90."""

    def __init__(self) -> None:
        """Have no card."""
        super().__init__(
            {
                "cuDriverGetVersion": lambda at, *_: put(at, _VERSION),
                "cuDeviceGetCount": lambda at, *_: put(at, _DEVICES),
                "cuDeviceGet": lambda at, number, *_: put(at, number or 0),
                "cuDeviceGetAttribute": lambda at, which, device, _: put(at, _attribute(which, device or 0)),
                "cuCtxGetDevice": lambda at, *_: put(at, self.card),
                "cuCtxGetCurrent": lambda at, *_: put(at, self.card, POINTER),
                "cuStreamGetCtx": lambda _, at, *__: put(at, self.card, POINTER),
                "cuLibraryLoadData": self._load,
                "cuLibraryGetKernel": self._kernel,
                "cuLaunchKernelEx": lambda at, *kernel: self.launch(f"sm_{self.card}", at, *kernel[:2]),
                _FIND: lambda name, at, *_: put(at, self.answer(ctypes.string_at(name).decode()), POINTER),
            }
        )
        self.card = 0  # the present one; 0: none
        self._images: list[bytes] = []  # by their handle - 1
        self._at = POINTER(self.answer(_FIND))
        self.module: Any = SimpleNamespace(cuGetProcAddress_v2_ptrptr=ctypes.addressof(self._at))
        self._plain = torch._C._to_dlpack

    def tensor(self, x: torch.Tensor, *args: Any, **words: Any) -> Any:
        """Return a tensor of the CPU for DLPack, which says that it is on a GPU."""
        capsule = self._plain(x, *args, **words)
        if self.card:
            self.tensors.append(x)
            pointer = ctypes.pythonapi.PyCapsule_GetPointer
            pointer.restype, pointer.argtypes = POINTER, [ctypes.py_object, ctypes.c_char_p]
            put(pointer(capsule, b"dltensor") + 8, _ON_GPU)
        return capsule

    def _load(self, at: int, image: int, *_: object) -> int:
        header = ctypes.string_at(image, 64)  # headers of sections stand last
        (start,), (size, count) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
        self._images.append(ctypes.string_at(image, start + size * count))
        return put(at, len(self._images), POINTER)

    def _kernel(self, at: int, library: int, name: int, _: object) -> int:
        return self.keep(at, kernel_of(ctypes.string_at(name).decode(), self._images[library - 1]))


_driver = cache(_CuTileDriver)  # cuda.tile keeps it for good


def _attribute(which: int, device: int) -> int:
    return {_MAJOR: device // 10, _MINOR: device % 10}.get(which, 227 << 10)  # else bytes of shared memory


def kernel_of(name: str, image: bytes) -> Compiled:
    """Return a kernel of a binary of tileiras; without text if that has no PTX."""
    text, info = section(image, b".nv_debug_ptx_txt"), section(image, b".nv.info." + name.encode())
    (first,) = struct.unpack_from("<H", info.partition(_PARAMETERS)[2] or bytes(6), 4)
    # It sets sums behind the fence (PTX ISA, wgmma.fence, forbids that); in the binary one is before each product.
    lines = text.replace(b"\0", b"\n").replace(b"wgmma.mma_async", b"wgmma.fence.sync.aligned;\nwgmma.mma_async")
    return Compiled(name, lines.decode(), first, partial(_with_maps, section(image, b".nv.host")))


def section(image: bytes, name: bytes) -> bytes:
    """Return a section of an ELF of 64 bits; no bytes if it has none of that name."""
    (start,), (size, count, names) = struct.unpack_from("<Q", image, 40), struct.unpack_from("<HHH", image, 58)
    headers = [struct.unpack_from("<IIQQQQ", image, start + size * number) for number in range(count)]
    for first, _, _, _, offset, length in headers:
        if image[headers[names][4] + first :].startswith(name + b"\0"):
            return image[offset : offset + length]
    return b""


def _with_maps(host: bytes, held: bytes) -> bytes:
    """Return the bytes of a kernel's parameters with its tensor maps, which its host code makes, if it has any."""
    names, symbols = section(host, b".strtab"), section(host, b".symtab")
    entries = [struct.unpack_from("<IBBHQQ", symbols, at) for at in range(0, len(symbols), 24)]
    found = [entry for entry in entries if names[entry[0] :].startswith(_MAKES + b"\0")]
    if not found:
        return held
    if platform.machine() != "x86_64":
        raise CannotRunError("the host code in cuTile's binary is for x86-64")
    (_, _, _, where, value, size), (start,) = found[0], struct.unpack_from("<Q", host, 40)
    (offset,) = struct.unpack_from("<Q", host, start + 64 * where + 24)
    code = mmap.mmap(-1, size, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(host[offset + value : offset + value + size])  # it needs no relocation
    whole = ctypes.create_string_buffer(held, len(held))
    ctypes.CFUNCTYPE(NUMBER, *[POINTER] * 4)(ctypes.addressof(ctypes.c_char.from_buffer(code)))(
        None, None, None, ctypes.addressof(whole)
    )
    return whole.raw


@contextmanager
def launching(card: str) -> Iterator[None]:
    """Let cuTile's kernels be compiled for a card meanwhile, and launched here with the CPU's tensors."""
    import cuda.tile

    driver, plain = _driver(), cuda.tile.launch
    if sys.modules.setdefault(_LOADER, driver.module) is not driver.module:
        raise CannotRunError("cuda.tile uses a GPU in this process, and no other driver")

    def launched(*args: Any, **words: Any) -> None:
        with driver.launching():
            try:
                plain(*args, **words)
            except cuda.tile.TileCompilerExecutionError as error:
                raise CannotRunError(f"cuTile is not compiled for {card}: {str(error).splitlines()[1]}") from error

    with (
        patch.object(driver, "card", int(card.removeprefix("sm_"))),
        patch.object(torch._C, "_to_dlpack", driver.tensor),
        patch.object(torch.cuda, "current_stream", lambda *_: 0),
        patch.object(cuda.tile, "launch", launched),
    ):
        yield
