"""What is interpreted, what is refused by its name, and that Triton is as it was before."""

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import load as fetch
from triton.language.extra import libdevice
from triton.runtime import interpreter as upstream
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver

from tiebreak.backends.interpreter.assumptions import EXACT
from tiebreak.backends.interpreter.session import interpreting
from tiebreak.kernels.kernel import CannotRunError

Launch = Callable[..., None]
N = 16
HERE = globals()


def _doubled(X: Any, Y: Any, N: tl.constexpr) -> None:
    row = tl.arange(0, N)
    tl.store(Y + row, tl.load(X + row) * 2.0)


def _state() -> list[object]:
    """Whatever a session changes."""
    kinds: list[Any] = [tl.tensor, tl.block_type, triton.JITFunction, upstream.InterpretedFunction, Autotuner, tl.dtype]
    modules: list[ModuleType] = [tl, tl.core, tl.math, upstream, libdevice]
    names = [
        sorted(
            (name, id(value)) for name, value in vars(module).items() if name != "__annotations__"
        )  # made when asked for
        for module in (*kinds, *modules)
    ]
    mine = sorted(name for name in HERE if not name.startswith("@"))
    return [names, mine, id(upstream.interpreter_semantic.builder), dict(os.environ), torch.get_num_threads()]


def _failing(X: Any, N: tl.constexpr) -> None:
    tl.load(X + tl.arange(0, N))
    raise RuntimeError("in the middle")


def test_triton_is_as_it_was_before_also_after_an_error() -> None:
    x, y = torch.ones(N), torch.zeros(N)
    before, active = _state(), driver._active
    with interpreting(EXACT):
        triton.jit(_doubled)[(1,)](x, y, N=N)
    assert _state() == before
    with pytest.raises(RuntimeError, match="in the middle"), interpreting(EXACT):
        triton.jit(_failing)[(1,)](x, N=N)
    assert _state() == before
    assert driver._active is active
    assert np.geterr()["invalid"] == "warn"


def test_what_a_type_says_is_worked_out_once_and_is_what_upstream_says(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = (tl.float32, tl.float16, tl.pointer_type(tl.float32), tl.pointer_type(tl.float32, const=True))
    shapes = ([4], [4, 2], [tl.constexpr(4), 2])
    made: list[object] = []
    init = tl.block_type.__init__

    def counting(self: object, *args: object) -> None:
        made.append(args)
        init(self, *args)

    monkeypatch.setattr(tl.block_type, "__init__", counting)
    upstreams = [vars(tl.tensor(None, tl.block_type(kind, shape))) for kind in kinds for shape in shapes]
    made.clear()
    with interpreting(EXACT):
        for time in range(2):
            handles = [object() for _ in upstreams]
            types = [tl.block_type(kind, shape) for kind in kinds for shape in shapes]
            values = [vars(tl.tensor(handle, kind)) for handle, kind in zip(handles, types, strict=True)]
            assert len(made) == len(types), time
            for value, theirs, handle in zip(values, upstreams, handles, strict=True):
                assert value["handle"] is handle
                same = ("shape", "numel", "dtype", "type")
                assert [str(value[name]) for name in same] == [str(theirs[name]) for name in same]
                assert value.keys() == theirs.keys()
                assert vars(value["type"]) == vars(theirs["type"])


@pytest.mark.parametrize("switch", ["0", "1"])
def test_functions_made_to_be_compiled_or_interpreted_both_are(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", switch)
    function = triton.jit(_doubled)
    x, y = torch.ones(N).bfloat16(), torch.zeros(N).bfloat16()
    with interpreting(EXACT):
        function[(1,)](x, y, N=N)
    assert isinstance(function, triton.JITFunction) == (switch == "0")
    assert torch.equal(y, 2 * x)


def _assembly(X: Any, Y: Any, N: tl.constexpr) -> None:
    row = tl.arange(0, N)
    x = tl.load(X + row)
    y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(Y + row, y)


def _library(X: Any, Y: Any, N: tl.constexpr) -> None:
    row = tl.arange(0, N)
    tl.store(Y + row, libdevice.tanh(tl.load(X + row)))


def _odd_type(X: Any, Y: Any, N: tl.constexpr) -> None:
    row = tl.arange(0, N)
    tl.store(Y + row, tl.load(X + row).to(tl.float8e4b15).to(tl.float32))


def _gluon(X: Any, Y: Any, N: gl.constexpr) -> None:
    row = gl.arange(0, N, layout=gl.BlockedLayout([1], [32], [1], [0]))
    gl.store(Y + row, gl.load(X + row) * 2.0)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (gluon.jit(_gluon), "_gluon is a Gluon kernel: it says what each thread of a GPU holds"),
        (_assembly, r"inline assembly can't be interpreted: ex2\.approx\.ftz\.f32"),
        (_library, "the library function tanh can't be interpreted"),
        (_odd_type, "the type fp8e4b15 is not interpreted"),
    ],
)
def test_what_is_a_cards_own_is_refused_by_its_name(function: Any, message: str, launch: Launch) -> None:
    with pytest.raises(CannotRunError, match=message):
        launch(function, torch.ones(N), torch.zeros(N), N=N)


def test_names_imported_from_the_language_work_and_what_a_library_can_only_do_exactly(launch: Launch) -> None:
    def nearest(X: Any, Y: Any, N: tl.constexpr) -> None:
        row = tl.arange(0, N)
        tl.store(Y + row, libdevice.rint(fetch(X + row)))

    x, y = torch.linspace(-3, 3, N), torch.zeros(N)
    launch(nearest, x, y, N=N)
    assert torch.equal(y, x.round())


def test_an_autotuned_kernel_runs_its_first_configuration_and_stays_untuned() -> None:
    def written(Y: Any, SIZE: tl.constexpr) -> None:
        tl.store(Y + tl.arange(0, 1), float(SIZE))

    configurations = [triton.Config({"SIZE": size}) for size in (4, 8)]
    tuned = triton.autotune(configurations, key=[])(triton.jit(written))
    y = torch.zeros(1)
    with interpreting(EXACT):
        tuned[(1,)](y)
    assert y.item() == 4
    assert tuned.cache == {}


def test_a_grid_may_be_a_function_of_the_arguments(launch: Launch) -> None:
    def numbered(Y: Any, n: Any, SIZE: tl.constexpr) -> None:
        tl.store(Y + tl.program_id(0), tl.num_programs(0) + n)

    y = torch.zeros(3, dtype=torch.int32)
    with interpreting(EXACT):
        triton.jit(numbered)[lambda meta: (triton.cdiv(5, meta["SIZE"]),)](y, 4, SIZE=2)
    assert y.tolist() == [7, 7, 7]
