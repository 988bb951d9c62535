"""Kernels in CuTe DSL, launched by their own host code: it is compiled for this CPU, and asks a driver that is here.

What it asks the driver for, it gets: a kernel by its name, and a launch, which executes the kernel's PTX.
"""

import ctypes
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

from tiebreak.backends.ptx.driver import NUMBER, POINTER, Compiled, Driver, put
from tiebreak.backends.ptx.memory import SharedMemoryError
from tiebreak.kernels.kernel import CannotRunError, OutOfBoundsError

_MULTIPROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148}  # a persistent kernel's grid goes by them
_SUFFIX = {"sm_90": "a", "sm_100": "a", "sm_120": "a"}  # of the target that has a card's own instructions
_UNNEEDED = ["_cuKernelGetAttribute", *(f"_cuda{name}" for name in ("LibraryLoadData", "SetDevice", "FuncSetAttribute",
             "KernelSetAttributeForDevice"))]  # fmt: skip
_DECLARED = re.compile(r"llvm\.func @(\w+)\(([^)]*)\) -> i32(?: attributes \{[^}]*\})?(?=\n)")


class _CuteDriver(Driver):
    """The driver, as compiled host code calls it."""

    def __init__(self, card: str) -> None:
        """Have no kernel."""
        super().__init__(
            {
                "cuda_dialect_init_library_once": self._load,
                "_cudaGetDevice": lambda at, *_: put(at, 0),
                "_cudaDeviceGetAttribute": lambda at, *_: put(at, 227 << 10),  # bytes of shared memory
                "_cudaLibraryGetKernel": self._kernel,
                "_cudaLaunchKernelEx": lambda *operands: self.launch(card, *operands[:3]),
                **dict.fromkeys(_UNNEEDED, lambda *_: 0),
            }
        )
        self.text = ""  # the PTX of the function that launches

    def called_by(self, host: str) -> str:
        """Return a function's host code, MLIR, with calls of this driver."""
        return _DECLARED.sub(self._defined, host)

    def _defined(self, declared: re.Match[str]) -> str:
        if declared[1] not in self.answers:
            return declared[0]
        types = [each.split()[0] for each in declared[2].split(",")]
        names = ", ".join(f"%a{number}" for number in range(len(types)))
        named = ", ".join(f"%a{number}: {each}" for number, each in enumerate(types))
        return f"""llvm.func @{declared[1]}({named}) -> i32 {{
            %at = llvm.mlir.constant({self.answer(declared[1])} : i64) : i64
            %f = llvm.inttoptr %at : i64 to !llvm.ptr
            %r = llvm.call %f({names}) : !llvm.ptr, ({", ".join(types)}) -> i32
            llvm.return %r : i32
        }}"""

    @staticmethod
    def _load(library: int, initialise: int, load: int, _error: int) -> int:
        ctypes.CFUNCTYPE(NUMBER, POINTER)(initialise)(library)
        held = (POINTER * 1)(library)
        return int(ctypes.CFUNCTYPE(NUMBER, POINTER, NUMBER)(load)(ctypes.addressof(held), 0))

    def _kernel(self, at: int, _library: int, name: int, _: object) -> int:
        return self.keep(at, Compiled(ctypes.string_at(name).decode(), self.text))


#: Compiled functions, which a package keeps, call it for good.
_driver = lru_cache(_CuteDriver)


@contextmanager
def launching(card: str) -> Iterator[None]:
    """Let functions of CuTe DSL, compiled meanwhile for a card, be launched here with the CPU's tensors."""
    import tvm_ffi
    from cutlass.cutlass_dsl import CuTeDSL, tvm_ffi_provider
    from cutlass.utils.hardware_info import HardwareInfo

    driver, card = _driver(card), card.partition("/")[0]
    count = _MULTIPROCESSORS.get(card, 148)
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


def _created(driver: _CuteDriver, tvm_ffi: Any) -> Callable[[Any], Any]:
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
            driver.text, shown = text, [from_dlpack(x) for x in tensors]
            for tensor in tensors:
                _on_device(tensor)
            with driver.launching(*shown):
                host(*arguments)

        return tvm_ffi.convert(called)

    return created


def _on_device(tensor: Any) -> Any:
    """Return a tensor of tvm_ffi, which says now that it is on a GPU: behind its address is the device's type."""
    words = ctypes.cast(tensor.__chandle__(), ctypes.POINTER(ctypes.c_int64))
    words[next(at for at in range(16) if words[at] == tensor.data_ptr()) + 1] = 2
    return tensor
