"""A stretch of time in which Triton's functions are interpreted; before and after it Triton is as it was."""

import functools
import inspect
import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partialmethod
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as upstream
from triton.runtime.jit import JITFunction

from tiebreak.backends.absent import absent, count_launch
from tiebreak.backends.interpreter.assumptions import Assumptions
from tiebreak.backends.interpreter.builder import FaithfulBuilder, addresses, plain
from tiebreak.backends.interpreter.memory import KernelMemory, arguments_of, seen_apart
from tiebreak.backends.interpreter.numbers import Array, numpy_type
from tiebreak.backends.interpreter.programs import Together
from tiebreak.backends.interpreter.reductions import reducing, scan
from tiebreak.backends.interpreter.tape import BuilderRecorder, Tape, leaves
from tiebreak.kernels.kernel import CannotRunError
from tiebreak.kernels.triton.loading import SWITCH

_EXTRA = "triton.language.extra"  # where vendors' libraries are
# Every implementation of these gives the same bits.
_EXACT = {"rint": "rint", "nearbyint": "rint", "trunc": "trunc", "floor": "floor", "ceil": "ceil", "abs": "abs"}
_WAYS = 8  # of a kernel that are written down
_NAMED = ("interpreter_semantic", "_InterpreterComparison")
Function = Any  # one that triton.jit made, to be compiled or to be interpreted


@contextmanager
def interpreting(assumed: Assumptions) -> Iterator[set[str]]:
    """Interpret every Triton function that is launched meanwhile, whether made for the compiler or the interpreter.

    It yields the assumptions of all launches so far.
    """
    with ExitStack() as stack:
        session = _Session(assumed, stack)
        for kind in (JITFunction, upstream.InterpretedFunction):
            # Functions, which become methods of what they are put into.
            session.put(kind, "run", lambda function, *args, **kwargs: session.launch(function, args, **kwargs))
            session.put(
                kind, "__call__", lambda function, *args, **kwargs: session.rewritten(function)(*args, **kwargs)
            )
        stack.enter_context(absent(assumed.target))
        stack.enter_context(patch.dict(os.environ, {SWITCH: "1"}))  # parts of Triton ask for it as they run
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)  # a program's tiles are small
        stack.enter_context(np.errstate(all="ignore"))  # masks bring about -Inf and NaN, as they should
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", RuntimeWarning)
        yield session.told


class _Session:
    """Patches of Triton's language, undone by the stack that holds them."""

    def __init__(self, assumed: Assumptions, stack: ExitStack) -> None:
        self._stack = stack
        self._seen: set[int] = set()  # namespaces that were looked through
        self._assumed, (self._builder, self._recorder) = assumed, _builder_of(assumed)
        self.told: set[str] = set()
        # Upstream's semantic object stays: functions that were rewritten before hold on to it.
        semantic = upstream.interpreter_semantic
        self.put(semantic, "builder", self._recorder)
        self.put(upstream, "interpreter_builder", self._recorder)
        self.put(upstream, "_get_np_dtype", numpy_type)
        self.put(upstream.TensorDescHandle, "validate", _validate)
        self.put(upstream.TensorDescHandle, "materialize_pointers", _of_descriptor)
        if blocks := getattr(upstream, "BlockPointerHandle", None):  # up to Triton 3.8
            self.put(blocks, "materialize_pointers", lambda of, checked: addresses(of, of.offsets, checked))
        methods = set(vars(tl.tensor))
        scope = upstream._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        stack.callback(_drop_all_but, tl.tensor, methods)  # upstream leaves what had been inherited
        stack.callback(scope.restore)
        to_ir = tl.dtype.to_ir
        # Triton before 3.9 knows none of AMD's own types.
        fnuz = (tl.float8e4b8, tl.float8e5b16)
        self.put(tl.dtype, "to_ir", lambda dtype, builder: dtype if dtype in fnuz else to_ir(dtype, builder))
        self.put(tl.block_type, "__init__", _blocks(tl.block_type.__init__))
        self.put(tl, "static_assert", _required)
        self.put(tl, "static_print", lambda *args, **kwargs: self._alone() or print(*args, **kwargs))
        decided = self._recorder.noted(self._builder.decided)
        self.put(tl.tensor, "__bool__", partialmethod(_decision, decided))
        self.put(tl.tensor, "__index__", lambda tensor: int(decided(tensor.handle)))
        for name in ("__str__", "__repr__"):
            self.put(tl.tensor, name, lambda tensor: self._alone() or str(plain(tensor.handle)))
        self.put(tl.tensor, "T", property(tl.trans))
        self.put(tl, "dot_scaled", _with_constants(tl.dot_scaled))
        for name, member in list(vars(tl.tensor).items()):
            if isinstance(member, JITFunction):  # such as `x.sum(0)`; a compiler binds them itself
                self.put(tl.tensor, name, partialmethod(member))
        for module in (tl, tl.core):
            self.put(module, "reduce", self._recorder.noted(reducing(assumed, self._builder.in_pairs)))
            self.put(module, "associative_scan", self._recorder.noted(scan))

    def put(self, owner: object, name: str, replacement: object) -> None:
        """Replace a part of Triton until the session ends."""
        self._stack.enter_context(patch.object(owner, name, replacement))

    def launch(
        self, function: Function, args: tuple[object, ...], *, grid: Any, warmup: bool = False, **kwargs: Any
    ) -> None:
        """Run every program of a grid, with the result of running them in order; replaces a function's `run`."""
        if warmup:
            return
        if getattr(function, "is_gluon", bool)():
            why = "it says what each thread of a GPU holds, and Triton interprets none"
            raise CannotRunError(f"{function.fn.__name__} is a Gluon kernel: {why}; --backend cuda runs it")
        count_launch()
        names = function.arg_names
        options = {name: value for name, value in kwargs.items() if name not in names}
        bound = inspect.getcallargs(function.fn, *args, **{n: v for n, v in kwargs.items() if n in names})
        constants = set(upstream.GridExecutor(function.fn, names, grid).constexprs)
        arguments = {name: value for name, value in bound.items() if name not in constants}
        contracts, how = self._assumed.contraction(options.get("enable_fp_fusion"))
        if self._assumed.contracts:
            self.told.add(f"contraction {how}")
        memory = KernelMemory(function.fn.__name__, tuple(seen_apart(arguments_of(arguments))))
        converted = bound | {name: _argument(name, value, memory) for name, value in arguments.items()}
        for hook in function.pre_run_hooks:
            hook(*args, **kwargs)
        rewritten = self.rewritten(function)
        sizes = tuple(int(size) for size in (grid(bound) if callable(grid) else grid))
        sizes += (1,) * (3 - len(sizes))
        self._builder.set_grid_dim(*sizes)
        places = np.indices(sizes, np.int32).reshape(3, -1).T
        warps, rows = options.get("num_warps") or 4, options.get("rows", 0)  # Triton's default; the suite's kernels
        self._builder.begin(memory, places, contracts=contracts, warps=warps, rows=rows)

        given = [leaf for leaf in leaves(converted) if isinstance(leaf, upstream.TensorHandle)]
        try:
            tapes, launches = _tapes_of((self._assumed, contracts, function.fn, *map(_kind, converted.values())))
        except TypeError:  # a constant that can't be looked up
            tapes, launches = [], itertools.count()
        first = next(launches) == 0  # to write down costs more than to run once
        known = sizes, *((each.start, each.end) for each in memory.arguments), *(each.data.tobytes() for each in given)

        def run(group: Array, together: Together | None = None) -> None:
            for tape in tapes:
                self._builder.take(group, together)
                if tape.play(given, (known, group.tobytes())):
                    return
            self._builder.take(group, together)
            if first or len(tapes) >= _WAYS:
                rewritten(**converted)
            else:
                tapes.extend(self._recorder.record(lambda: rewritten(**converted), given))

        if len(places) == 1 or not Together().run(run, len(places)):
            for place in range(len(places)):
                run(np.array([place]))

    def _alone(self) -> Any:
        self._recorder.spoil()
        return self._builder.apart()

    def rewritten(self, function: Function) -> Callable[..., Any]:
        """Return a function's source as upstream rewrites it for its interpreter, with all that it names defined."""
        self._look_through(function.fn.__globals__)
        if function.fn not in _REWRITTEN:
            _REWRITTEN[function.fn] = upstream.FunctionRewriter(function.fn).rewrite_ast()
        return _REWRITTEN[function.fn]

    def _look_through(self, names: dict[str, Any]) -> None:
        """Give functions imported from Triton's language by name what upstream gives only to those under `tl.`."""
        if id(names) in self._seen:
            return
        self._seen.add(id(names))
        # Rewritten source needs these names; upstream would leave its whole module in the user's.
        changed = {name: getattr(upstream, name) for name in _NAMED if hasattr(upstream, name)}
        for name, value in names.items():
            if isinstance(value, ModuleType) and value.__name__.startswith(_EXTRA):
                self._look_through(vars(value))
            elif isinstance(value, FunctionType) and value.__module__.startswith("triton.language"):
                changed[name] = _for_interpreter(value)
        self._stack.enter_context(patch.dict(names, changed))


@functools.cache
def _builder_of(assumed: Assumptions) -> tuple[FaithfulBuilder, BuilderRecorder]:
    """Return one builder for all sessions, and its recorder."""
    builder = FaithfulBuilder(assumed)
    return builder, BuilderRecorder(builder)


@functools.lru_cache(512)
def _tapes_of(way: tuple[Any, ...]) -> tuple[list[Tape], Iterator[int]]:
    """Return the tapes of programs that differ only in numbers, and count their launches."""
    return [], itertools.count()


def _kind(value: Any) -> Any:
    """Return all that a program may depend on in an argument while it is recorded: its type, or a constant itself."""
    if isinstance(value, tl.core.tensor):
        return str(value.type)
    return tuple(map(_kind, value)) if isinstance(value, tuple) else (type(value), value)


def _decision(tensor: Any, decided: Callable[[Any], Any]) -> bool:
    """Return the truth of a condition; a tile is true."""
    data = tensor.handle.data
    return bool(data.size != len(data) or decided(tensor.handle))


def _validate(descriptor: Any) -> None:
    """Check a descriptor as upstream does, for many programs' bases and strides."""
    size = descriptor.base.get_element_ty().primitive_bitwidth // 8
    *strides, last = (stride.data for stride in descriptor.strides)
    assert not (descriptor.base.data % 16).any(), "base must be 16-byte aligned"
    assert len(descriptor.strides) == len(descriptor.block_shape) == descriptor.ndim
    assert not any((stride * size % 16).any() for stride in strides), "stride must be 16-byte aligned"
    assert (last == 1).all(), "last dim must be contiguous"


def _of_descriptor(descriptor: Any, offsets: Sequence[Any]) -> tuple[Any, Any]:
    size = descriptor.base.get_element_ty().primitive_bitwidth // 8
    assert not (offsets[-1].data * size % 16).any(), "block offset start must be 16-byte aligned"
    return addresses(descriptor, offsets, range(descriptor.ndim))


def _blocks(init: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor of tile types that computes each once: upstream does for every operand, a sixth of all time.

    What is remembered keeps the type of the elements alive, whose id so stays unique.
    """
    made: dict[tuple[Any, ...], dict[str, Any]] = {}

    def construct(self: Any, element: Any, shape: Any) -> None:
        if (key := (id(element), *shape)) not in made:
            init(self, element, shape)
        vars(self).update(made.setdefault(key, vars(self)))

    return construct


def _with_constants(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the language with keywords as constants, which Triton before 3.8 insists on."""

    def call(*args: object, **kwargs: object) -> Any:
        args = tuple(tl.constexpr(argument) if isinstance(argument, str) else argument for argument in args)
        return function(*args, **{k: tl.constexpr(v) if isinstance(v, str) else v for k, v in kwargs.items()})

    return call


def _required(condition: object, message: str = "") -> None:
    """Raise as `tl.static_assert` would when compiling: a tuner leaves such a configuration out."""
    if not condition:
        raise CannotRunError(f"a static_assert refuses it: {message}")


def _drop_all_but(kind: type, names: set[str]) -> None:
    for name in set(vars(kind)) - names:
        delattr(kind, name)


_REWRITTEN: dict[FunctionType, Callable[..., Any]] = {}


def _for_interpreter(function: FunctionType) -> Callable[..., Any]:
    """Return a function of Triton's language for interpreted code; a vendor's library function is exact, or refused."""
    name = function.__name__
    if function.__module__.startswith(_EXTRA):

        def call(*args: Any, **_: object) -> Any:
            if name not in _EXACT:
                raise CannotRunError(f"the library function {name} can't be interpreted: its bits are not known here")
            (x,) = args
            data = getattr(np, _EXACT[name])(x.handle.data)
            return tl.core.tensor(upstream.TensorHandle(data, x.handle.dtype), x.type)

        return cast(Callable[..., Any], upstream.interpreter_builder.noted(call))  # the recorder's
    if not tl.core.is_builtin(function):
        return function
    # By name, since upstream has replaced some.
    replacement: Any = getattr(tl, name, None) or getattr(tl.core, name, function)
    return cast(Callable[..., Any], replacement)


def _argument(name: str, value: Any, memory: KernelMemory) -> Any:
    """Return an argument of a launch in the form that interpreted code takes."""
    if isinstance(value, float):
        # A number of fp32, as a compiled kernel gets it; upstream leaves it in fp64.
        return tl.core.tensor(upstream.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)
    if isinstance(value, tuple):
        parts = [_argument(f"{name}[{number}]", item, memory) for number, item in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        raise ValueError(f"the interpreter takes tensors on the CPU: {name} is on {value.device}")
    converted = upstream._implicit_cvt(value)
    handle = getattr(converted, "handle", None)
    pointer: Any = getattr(handle, "base", handle)  # a descriptor's, or itself
    for argument in memory.arguments:
        if argument.name == name:
            pointer.data = pointer.data + np.uint64(argument.shift)
    return converted
