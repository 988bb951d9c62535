"""Kernels in PTX, and kernels in Triton that are compiled to it, executed."""

import re
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tiebreak.kernels.triton.compiling import not_interpreting

if (reason := not_interpreting()) is not None:
    pytest.skip(reason, allow_module_level=True)

import torch

from tiebreak.backends.interpreter.memory import KernelMemory, arguments_of
from tiebreak.backends.ptx import session
from tiebreak.backends.ptx.execution import Program
from tiebreak.backends.ptx.memory import SharedMemoryError
from tiebreak.backends.ptx.threads import Launch

KERNEL = """
.visible .entry kernel(.param .u64 kernel_param_0, .param .u64 kernel_param_1)
{{
    .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<29>; .reg .b64 %rd<9>;
    ld.param.b64 %rd0, [kernel_param_0];
    ld.param.b64 %rd1, [kernel_param_1];
    mov.u32 %r0, %tid.x;
    shl.b32 %r1, %r0, 2;
    cvt.u64.u32 %rd2, %r1;
    add.s64 %rd0, %rd0, %rd2;
    add.s64 %rd1, %rd1, %rd2;
    {body}
    st.global.b32 [%rd1], %r2;
    ret;
}}
"""
Executed = Callable[..., Any]


@pytest.fixture(scope="session")
def module_at() -> Callable[[Path], ModuleType]:
    """Return what executes a file as a module of its own."""

    def loaded(path: Path) -> ModuleType:
        spec = spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return loaded


@pytest.fixture
def executed() -> Executed:
    """What a kernel's %r2 is at its end, of every thread: one of whose threads is number %r0, its input at [%rd0]."""

    def execute(
        body: str,
        inputs: torch.Tensor | None = None,
        threads: int = 64,
        card: str = "sm_80",
        *,
        outputs: int = 1,  # of a thread: further ones are the body's to write
        shared: int = 1024,
        blocks: int = 1,
    ) -> torch.Tensor:
        given = torch.arange(threads, dtype=torch.int32) if inputs is None else inputs
        output = torch.zeros(outputs * threads, dtype=torch.int32)
        memory = KernelMemory("kernel", tuple(arguments_of({"X": given, "Y": output})))
        program = Program(KERNEL.format(body=body), card)
        program.run(Launch((blocks, 1, 1), threads, shared, (given.data_ptr(), output.data_ptr()), memory))
        return output

    return execute


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The PTX of what Triton compiles meanwhile."""
    texts: list[str] = []

    def kept(text: str, card: str) -> Program:
        texts.append(text)
        return Program(text, card)

    monkeypatch.setattr(session, "_program", kept)
    return texts


@pytest.fixture
def left_out(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, bool]]]:
    """Return what leaves instructions out of a launch one by one, and says their names and whether each is missed."""

    def each(launch: Callable[[], object], card: str, names: str, *, since: str = "", every: bool) -> Any:
        launch()
        tried: list[tuple[str, bool]] = []
        text = compiled[0]
        for match in re.compile(rf"(?:@%\w+\s+)?({names})[^;]*;").finditer(text, text.index(since)):
            if (match[1], True) in tried and not every:
                continue
            # What a wait says is true: who leaves it out goes on.
            instead = f"mov.pred {match[0].split()[1]} -1;" if "try_wait" in match[1] else ""
            program = Program(text[: match.start()] + instead + text[match.end() :], card)
            monkeypatch.setattr(session, "_program", lambda text, card, program=program: program)
            try:
                launch()
                tried.append((match[1], False))
            except SharedMemoryError:
                tried.append((match[1], True))
        return tried

    return each
