"""The Triton kernels' source where triton is and where it is not; a launch reaches the compiler."""

import importlib.metadata
import importlib.util
import subprocess
import sys
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from tiebreak.backends.interpreter import INTERPRETER
from tiebreak.kernels.flash import Block
from tiebreak.kernels.formats import BF16, FP16, Format, Formats
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.plans import FUSED, RoundingPlan
from tiebreak.kernels.triton import compiling, launch, loading
from tiebreak.kernels.triton.roster import DECLARATIONS

triton = pytest.importorskip("triton")


def test_listing_imports_no_triton_and_what_is_loaded_can_be_compiled_whatever_the_users_switch_says() -> None:
    code = (
        "import os, sys, tiebreak.kernels.triton.launch; from tiebreak.backends.interpreter import INTERPRETER\n"
        "INTERPRETER.kernels(), INTERPRETER.unavailable(); print('triton' in sys.modules)\n"
        "os.environ['TRITON_INTERPRET'] = '1'\nfrom tiebreak.kernels.triton.compiling import source\n"
        "forward = source('forward').forward\nimport triton\nprint(os.environ['TRITON_INTERPRET'])\n"
        "print(type(forward) is triton.JITFunction, type(triton.language.sum) is triton.JITFunction)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False", "1", "True", "True"], done.stderr


def test_without_triton_a_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    compiling.source.cache_clear()
    assert INTERPRETER.unavailable() == "triton is not installed: pip install 'tiebreak[triton]'"
    with pytest.raises(ValueError, match="triton is not installed"):
        compiling.source("forward")


@pytest.mark.parametrize(
    ("release", "numpy", "reason"),
    [
        ({"triton": "3.5.1"}, "2.3.5", "triton 3.5.1 is too old: the kernels need 3.6 or newer"),
        ({"triton": "3.6.0"}, "2.3.5", None),
        ({"triton": "3.6.0"}, "2.4.0", "the interpreter of triton 3.6.0 does not work with numpy 2.4.0: pip install"),
        ({"triton": "3.7.1"}, "2.5.2", None),
        ({"pytorch-triton-rocm": "3.6.0+git2f1a9c"}, "2.3.5", None),  # a package of another name
    ],
)
def test_versions_that_do_not_go_together_are_told(
    release: dict[str, str], numpy: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in release | {"numpy": numpy}:
            raise importlib.metadata.PackageNotFoundError(name)
        return (release | {"numpy": numpy})[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert loading.installed() == next(iter(release.values()))
    assert (INTERPRETER.unavailable() or "").startswith(reason or "")
    assert (INTERPRETER.unavailable() is None) == (reason is None)


class _Card:
    """A Hopper that compiles and never runs."""

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


def test_a_launch_reaches_the_compiler_and_compiles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.runtime.jit.driver", SimpleNamespace(active=_Card()))
    x, padding = torch.zeros(2, 4, 1, 64), torch.ones(2, 1, dtype=torch.bool)
    monkeypatch.setattr(launch.TritonCall, "is_interpreted", False)
    inputs = AttentionInputs(x, x, x, x, Formats.of(BF16), causal=True, key_padding=padding, noise_seed=2**32 - 1)
    monkeypatch.setattr(launch, "lacking", lambda *_: None)
    compiled = []

    def compile_only(
        call: launch.TritonCall, part: str, kernel: str, grid: object, *args: object, block: Block
    ) -> None:
        function, options = getattr(compiling.source(part), kernel), launch.options(call.config.d)
        tensors = (call.q, call.k, call.v, call.padding)
        compiled.append(function.warmup(*tensors, *args, C=call.tiled(block), grid=grid, **options))

    monkeypatch.setattr(launch.TritonCall, "launch", compile_only)
    for _ in range(2):
        launch.run(inputs, None, False, declaration=DECLARATIONS["triton_fair"])
    assert compiled[0] is compiled[1]
    assert "wgmma" in compiled[0].asm["ptx"]


FP8 = DECLARATIONS["triton_fp8"].plan


@pytest.mark.parametrize(
    ("card", "fmt", "plan", "missing"),
    [
        ((7, 5), BF16, FUSED, "A card (sm_75) has no bf16"),
        ((7, 5), FP16, FUSED, None),
        ((8, 0), BF16, FUSED, None),
        ((8, 6), BF16, FP8, "A card (sm_86) has no fp8_e4m3"),
        ((8, 9), BF16, FP8, None),
        ("gfx942:sramecc+:xnack-", BF16, FUSED, None),
        ("gfx942:sramecc+:xnack-", BF16, FP8, "A card has no fp8_e4m3"),  # CDNA3's is another
    ],
)
def test_a_card_without_a_format_is_told(
    card: tuple[int, int] | str, fmt: Format, plan: RoundingPlan, missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card)
    monkeypatch.setattr(torch.version, "hip", "7.0" if isinstance(card, str) else None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=card))
    assert launch.lacking(Formats.of(fmt), plan, torch.device("cuda")) == missing


def test_too_little_shared_memory_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(*args: object, **options: object) -> None:
        raise triton.OutOfResources(200_000, 101_376, "shared memory")

    monkeypatch.setattr(launch, "source", lambda part: SimpleNamespace(forward=defaultdict(lambda: launched)))
    monkeypatch.setattr(launch, "is_interpreting", lambda: True)
    x = torch.zeros(1, 1, 4, 64)
    inputs = AttentionInputs(x, x, x, x, Formats.of(BF16))
    with pytest.raises(ValueError, match=r"^forward at head dimension 64: out of resource: .*200000.*101376"):
        launch.run(inputs, None, False, declaration=DECLARATIONS["triton_flash"])


@pytest.mark.parametrize("name", DECLARATIONS)
def test_o_is_the_same_whether_gradients_follow_or_not(name: str) -> None:
    kernel, x = INTERPRETER.kernel(name), torch.arange(2 * 3 * 5 * 16).reshape(2, 3, 5, 16).sin().bfloat16().float()
    inputs = AttentionInputs(x, x.flip(2), x.flip(3), -x, Formats.of(BF16), noise_seed=3)
    if kernel.has_backward:
        first, second = (INTERPRETER.run(kernel, inputs, gradients=gradients).o for gradients in (True, False))
        assert torch.equal(first, second)
