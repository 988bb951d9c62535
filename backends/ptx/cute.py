"""Kernels in CuTe DSL, launched by their own host code: it is compiled for this CPU, and asks a driver that is here.

What it asks the driver for, it gets: a kernel by its name, and a launch, which executes the kernel's PTX.
"""

import ctypes
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.dlpack import from_dlpack

from tiebreak.backends.interpreter.memory import KernelMemory, arguments_of
from tiebreak.backends.ptx.execution import Program
from tiebreak.backends.ptx.memory import SharedMemoryError
from tiebreak.backends.ptx.threads import Launch, TensorMap
from tiebreak.kernels.kernel import CannotRunError, OutOfBoundsError

_MULTIPROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148}  # a persistent kernel's grid goes by them
_SUFFIX = {"sm_90": "a", "sm_100": "a", "sm_120": "a"}  # of the target that has a card's own instructions
_CLUSTER = 4  # the number of cudaLaunchAttributeClusterDimension
_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.[a-z]+(\d+)\s+[\w$]+(?:\[(\d+)\])?")
_DECLARED = re.compile(r"llvm\.func @(\w+)\(([^)]*)\) -> i32(?: attributes \{[^}]*\})?(?=\n)")
# Of a tensor map: bytes of a type's number, and bits of its first word that are known: version, axes - 1, type,
# swizzle; and two that are set for any tensor, or for rows of 256 bytes.
_SIZES, _KNOWN, _SET = (1, 2, 4, 4, 8, 8, 2, 4, 0, 8, 2), 0x2467F2, 0x40002
_program = lru_cache(maxsize=16)(Program)


class _Driver:
    """The driver, as compiled host code calls it."""

    def __init__(self, card: str) -> None:
        """Have no kernel."""
        self._card = card
        self._kernels: list[tuple[str, str]] = []  # names, and the PTX of each, by their handle - 1
        # The PTX of the function that launches, and its tensors.
        self.text, self.tensors = "", list[torch.Tensor]()
        self.error: Exception | None = None
        answers: dict[str, tuple[int, Any]] = {  # how many operands it has, and what it does
            "cuda_dialect_init_library_once": (4, self._load),
            "_cudaGetDevice": (1, lambda at: self._put(at, 0)),
            "_cudaDeviceGetAttribute": (3, lambda at, *_: self._put(at, 227 << 10)),  # bytes of shared memory
            "_cudaLibraryGetKernel": (3, self._kernel),
            "_cudaLaunchKernelEx": (3, self._launch),
            **{f"_cu{name}": (count, lambda *_: 0) for name, count in (("daLibraryLoadData", 8), ("daSetDevice", 1),
               ("daFuncSetAttribute", 3), ("daKernelSetAttributeForDevice", 4), ("KernelGetAttribute", 4))},
        }  # fmt: skip
        self._answers = {
            name: ctypes.CFUNCTYPE(_NUMBER, *[_POINTER] * count)(call) for name, (count, call) in answers.items()
        }

    def called_by(self, host: str) -> str:
        """Return a function's host code, MLIR, with calls of this driver."""
        return _DECLARED.sub(self._defined, host)

    def _defined(self, declared: re.Match[str]) -> str:
        answer = self._answers.get(declared[1])
        if answer is None:
            return declared[0]
        types = [each.split()[0] for each in declared[2].split(",")]
        names = ", ".join(f"%a{number}" for number in range(len(types)))
        named = ", ".join(f"%a{number}: {each}" for number, each in enumerate(types))
        return f"""llvm.func @{declared[1]}({named}) -> i32 {{
            %at = llvm.mlir.constant({ctypes.cast(answer, _POINTER).value} : i64) : i64
            %f = llvm.inttoptr %at : i64 to !llvm.ptr
            %r = llvm.call %f({names}) : !llvm.ptr, ({", ".join(types)}) -> i32
            llvm.return %r : i32
        }}"""

    @staticmethod
    def _put(at: int, number: int) -> int:
        _NUMBER.from_address(at).value = number
        return 0

    @staticmethod
    def _load(library: int, initialise: int, load: int, _error: int) -> int:
        ctypes.CFUNCTYPE(_NUMBER, _POINTER)(initialise)(library)
        held = (_POINTER * 1)(library)
        return int(ctypes.CFUNCTYPE(_NUMBER, _POINTER, _NUMBER)(load)(ctypes.addressof(held), 0))

    def _kernel(self, at: int, _library: int, name: int) -> int:
        self._kernels.append((ctypes.string_at(name).decode(), self.text))
        return self._put(at, len(self._kernels))

    def _launch(self, config: int, kernel: int, parameters: int) -> int:
        try:  # an error can't go through code that is not Python's
            x, y, z, *block, shared = (ctypes.c_uint * 7).from_address(config)  # a cudaLaunchConfig_t
            (name, text), maps, bits = self._kernels[kernel - 1], list[TensorMap](), list[bytes]()
            program = _program(text, self._card)
            attributes, some = (ctypes.c_uint64 * 2).from_address(config + 40)
            for at in range(attributes, attributes + 72 * (some & 0xFFFFFFFF), 72):
                number, _, *cluster = (ctypes.c_uint * 5).from_address(at)
                if number == _CLUSTER and math.prod(cluster) > 1:
                    raise CannotRunError("clusters of blocks are not executed here")
            signature = next(entry[2] for entry in _ENTRY.finditer(text) if entry[1] == name)
            for number, (align, width, count) in enumerate(_PARAMETER.findall(signature)):
                place = ctypes.c_uint64.from_address(parameters + 8 * number).value
                held = ctypes.string_at(place, int(width) // 8 * int(count or 1))
                if (align, count) == ("64", "128"):
                    maps.append(_map_of(held))
                    held = (len(maps) - 1).to_bytes(8, "little")
                bits.append(held)
            memory = KernelMemory(name, tuple(arguments_of({"an argument": self.tensors})))
            program.run(Launch((x, y, z), math.prod(block), shared, bits, memory, maps))
        except Exception as error:  # whatever a program raises
            self.error = error
            return 1
        return 0


#: Compiled functions, which a package keeps, call it for good.
_driver = lru_cache(_Driver)


def _map_of(held: bytes) -> TensorMap:
    """Return what the 128 bytes of a tensor map say, as maps of known tensors have shown: nobody documents them."""
    words = [int.from_bytes(held[at : at + 4], "little") for at in range(0, 64, 4)]
    axes, kind = (words[2] >> 4 & 7) + 1, words[2] >> 7 & 15
    if words[2] & ~_KNOWN or words[2] & _SET != _SET or words[7] or kind >= len(_SIZES) or not _SIZES[kind]:
        raise CannotRunError("a tensor map of another kind is not executed here")
    strides = (_SIZES[kind], *(word << 4 for word in words[3 : 2 + axes]))
    lengths, box = (tuple(each + 1 for each in part[:axes]) for part in (words[8:13], held[55:60]))
    return TensorMap(words[0] | words[1] << 32, lengths, strides, box, words[2] >> 13 & 3)


@contextmanager
def launching(card: str) -> Iterator[None]:
    """Let functions of CuTe DSL, compiled meanwhile for a card, be launched here with the CPU's tensors."""
    import tvm_ffi
    from cutlass.cutlass_dsl import CuTeDSL, tvm_ffi_provider
    from cutlass.utils.hardware_info import HardwareInfo

    driver, count = _driver(card), _MULTIPROCESSORS.get(card, 148)
    environment, plain = CuTeDSL._get_dsl().envar, tvm_ffi.from_dlpack
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        stack.enter_context(
            patch.multiple(
                environment,
                arch=card + _SUFFIX.get(card, ""),
                keep_ptx=True,
                dump_dir=folder,
                enable_tvm_ffi=True,  # by which alone a tensor can be on another device
            )
        )
        named = {"FLASH_ATTENTION_ARCH": card, "FLASH_ATTENTION_NUM_SMS": str(count)}
        stack.enter_context(patch.dict(os.environ, named))
        asked: dict[str, Any] = {
            "__init__": lambda *_, **__: None,
            "get_max_active_clusters": lambda _, cluster_size, *__: count // cluster_size,
            "get_device_multiprocessor_count": lambda _: count,
        }
        stack.enter_context(patch.multiple(HardwareInfo, **asked))
        stack.enter_context(patch.object(torch.Tensor, "is_cuda", property(lambda _: True)))
        stack.enter_context(patch.object(tvm_ffi, "from_dlpack", lambda x, *a, **k: _on_device(plain(x, *a, **k))))
        function = tvm_ffi_provider.TVMFFIJitCompiledFunctionBase
        stack.enter_context(patch.object(function, "_create_tvm_ffi_function", _created(driver, tvm_ffi)))
        if interface := sys.modules.get("flash_attn.cute.interface"):
            interface._get_device_arch.cache_clear()
        yield


def _created(driver: _Driver, tvm_ffi: Any) -> Callable[[Any], Any]:
    """Return a method that makes a compiled function one which launches by this driver."""
    from cutlass._mlir import ir
    from cutlass._mlir._mlir_libs._cutlass_ir._execution_engine import BinaryExecutionEngine
    from cutlass.base_dsl.env_manager import get_prefix_dsl_libs
    from cutlass.cutlass_dsl.tvm_ffi_provider import _aot_support

    for error in (CannotRunError, OutOfBoundsError, SharedMemoryError):
        tvm_ffi.register_error(error)

    def created(function: Any) -> Any:
        with function.ir_module.context:
            module = ir.Module.parse(driver.called_by(str(function.ir_module)))
        text = function.__ptx__
        code = _aot_support.export_module_to_bytes(module, format="o", opt_level=3, enable_pic=True)
        function.engine = BinaryExecutionEngine(code, get_prefix_dsl_libs("CUTE_DSL").split(os.pathsep), True)
        at = function.engine.lookup(f"__tvm_ffi_{function.function_name}")
        host = tvm_ffi.Function.__from_extern_c__(at, keep_alive_object=function.engine)

        def called(*arguments: Any) -> None:
            # Its views of the CPU's tensors, which other libraries read as such before they are said to be elsewhere.
            tensors = [x for x in arguments if isinstance(x, tvm_ffi.Tensor)]
            driver.error, driver.text, driver.tensors = None, text, [from_dlpack(x) for x in tensors]
            for tensor in tensors:
                _on_device(tensor)
            try:
                host(*arguments)
            except Exception:
                if driver.error is not None:
                    raise driver.error from None
                raise

        return tvm_ffi.convert(called)

    return created


def _on_device(tensor: Any) -> Any:
    """Return a tensor of tvm_ffi, which says now that it is on a GPU: behind its address is the device's type."""
    words = ctypes.cast(tensor.__chandle__(), ctypes.POINTER(ctypes.c_int64))
    words[next(at for at in range(16) if words[at] == tensor.data_ptr()) + 1] = 2
    return tensor
