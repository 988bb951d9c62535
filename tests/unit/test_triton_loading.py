"""The Triton kernels' source where triton is and where it is not; a launch reaches the compiler."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from tiebreak.backends.interpreter import INTERPRETER
from tiebreak.kernels.formats import BF16, FP8_E4M3, FP16, Formats
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.plans import FUSED
from tiebreak.kernels.triton import launch, loading
from tiebreak.kernels.triton.roster import DECLARATIONS, compilations, triton_kernels

triton = pytest.importorskip("triton")


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_kernels_can_be_compiled_whatever_the_users_switch_says() -> None:
    done = _python(
        "import os; os.environ['TRITON_INTERPRET'] = '1'\nfrom tiebreak.kernels.triton.loading import source\n"
        "forward = source('forward').forward\nimport triton\n"
        "print(type(forward) is triton.JITFunction, type(triton.language.sum) is triton.JITFunction)"
    )
    assert done.stdout.strip() == "True True", done.stderr


@pytest.mark.parametrize("before", ["1", "0", None])
def test_the_users_switch_is_left_as_it_was(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if before is not None:
        monkeypatch.setenv("TRITON_INTERPRET", before)
    loading.source.cache_clear()
    loading.source("rounding")
    assert os.environ.get("TRITON_INTERPRET") == before


def test_listing_the_kernels_imports_no_triton() -> None:
    done = _python(
        "import sys, tiebreak.kernels.triton.launch; from tiebreak.backends.interpreter import INTERPRETER\n"
        "INTERPRETER.kernels(), INTERPRETER.unavailable(); print('triton' in sys.modules)"
    )
    assert done.stdout.strip() == "False", done.stderr


def test_without_triton_a_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    loading.source.cache_clear()
    assert INTERPRETER.unavailable() == "triton is not installed: pip install 'tiebreak[triton]'"
    with pytest.raises(ValueError, match="triton is not installed"):
        loading.source("forward")


def _versions(monkeypatch: pytest.MonkeyPatch, **release: str) -> None:
    """As if these packages, dashes written as underscores, were all that is installed."""

    def version(name: str) -> str:
        if (key := name.replace("-", "_")) not in release:
            raise importlib.metadata.PackageNotFoundError(name)
        return release[key]

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_triton_may_come_in_a_package_of_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    _versions(monkeypatch, pytorch_triton_rocm="3.6.0+git2f1a9c")
    assert loading.installed() == "3.6.0+git2f1a9c"
    assert loading.missing() is None


@pytest.mark.parametrize(
    ("triton", "numpy", "reason"),
    [
        ("3.5.1", "2.3.5", "triton 3.5.1 is too old: the kernels need 3.6 or newer"),
        ("3.6.0", "2.3.5", None),
        ("3.6.0", "2.4.0", "the interpreter of triton 3.6.0 does not work with numpy 2.4.0: pip install 'numpy<2.4'"),
        ("3.7.1", "2.5.2", None),
    ],
)
def test_versions_that_do_not_go_together_are_told(
    triton: str, numpy: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _versions(monkeypatch, triton=triton, numpy=numpy)
    assert INTERPRETER.unavailable() == reason


def test_the_roster_has_the_same_kernels_compiled_and_interpreted() -> None:
    """That they compile is what tests/audit shows."""
    names = [kernel.name for kernel in INTERPRETER.kernels()]
    assert names == [kernel.name for kernel in triton_kernels(interpreted=False)]
    assert set(names) == set(DECLARATIONS) == {listed.name.partition("/")[0] for listed in compilations()}


def test_the_interpreter_runs_its_own_kernels_and_no_other() -> None:
    assert INTERPRETER.kernel("triton_fair").name == "triton_fair"
    with pytest.raises(ValueError, match="unknown kernel 'flash@fused': interpreter has triton_flash, "):
        INTERPRETER.kernel("flash@fused")


def test_the_fingerprint_says_whose_arithmetic_it_is() -> None:
    assert INTERPRETER.fingerprint()["cast"] == "even"
    assert INTERPRETER.describe() == {
        "triton": triton.__version__,
        "as": "exact",
        "sums": "exact",
        "exponential_flushes": False,
        "exponential_in_base_two": False,
        "contraction": False,
        "division_by_reciprocal": False,
    }


class _Card:
    """A Hopper that compiles and never runs."""

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


@pytest.mark.parametrize("padding", [None, torch.ones(2, 1, dtype=torch.bool)], ids=["whole", "padded"])
def test_a_launch_reaches_the_compiler_and_compiles_once(
    padding: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triton.runtime.jit.driver", SimpleNamespace(active=_Card()))
    x = torch.zeros(2, 4, 1, 64)
    monkeypatch.setattr(launch.Call, "interpreted", False)
    inputs = AttentionInputs(x, x, x, x, Formats.of(BF16), causal=True, key_padding=padding, noise_seed=2**32 - 1)
    monkeypatch.setattr(launch, "lacking", lambda *_: None)
    compiled = []

    def compile_only(call: launch.Call, part: str, kernel: str, grid: object, *args: object, **kwargs: object) -> None:
        function, options = getattr(loading.source(part), kernel), launch.options(call.config.d)
        tensors = (call.q, call.k, call.v, call.padding)
        compiled.append(function.warmup(*tensors, *args, C=kwargs["config"], grid=grid, **options))

    monkeypatch.setattr(launch.Call, "launch", compile_only)
    for _ in range(2):
        launch.run(inputs, DECLARATIONS["triton_fair"], gradients=False)
    assert compiled[0] is compiled[1]
    assert "wgmma" in compiled[0].asm["ptx"]


@pytest.mark.parametrize(
    ("capability", "fmt", "plan", "missing"),
    [
        ((7, 5), BF16, FUSED, "A card (sm_75) has no bf16"),
        ((7, 5), FP16, FUSED, None),
        ((8, 0), BF16, FUSED, None),
        ((8, 6), BF16, DECLARATIONS["triton_fp8"].plan, "A card (sm_86) has no fp8_e4m3"),
        ((8, 9), BF16, DECLARATIONS["triton_fp8"].plan, None),
    ],
)
def test_a_card_without_a_format_is_told(
    capability: tuple[int, int], fmt: object, plan: object, missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert launch.lacking(Formats.of(fmt), plan, torch.device("cuda")) == missing  # type: ignore[arg-type]


def test_cdna3_is_told_that_its_fp8_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "An MI300")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    )
    assert launch.lacking(Formats.of(BF16), FUSED, torch.device("cuda")) is None
    fp8 = DECLARATIONS["triton_fp8"].plan
    assert fp8.p_bar.fmt == FP8_E4M3
    assert launch.lacking(Formats.of(BF16), fp8, torch.device("cuda")) == "An MI300 has no fp8_e4m3"


def test_too_little_shared_memory_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Greedy:
        def __getitem__(self, grid: object) -> object:
            def launched(*args: object, **options: object) -> None:
                raise triton.OutOfResources(200_000, 101_376, "shared memory")

            return launched

    class Module:
        forward = Greedy()

    monkeypatch.setattr(launch, "source", lambda part: Module)
    monkeypatch.setattr(launch, "interpreting", lambda: True)
    x = torch.zeros(1, 1, 4, 64)
    with pytest.raises(ValueError, match=r"^forward at head dimension 64: out of resource: .*200000.*101376"):
        launch.run(
            AttentionInputs(x, x, x, x, Formats.of(BF16)),
            DECLARATIONS["triton_flash"],
            gradients=False,
        )


@pytest.mark.parametrize("name", DECLARATIONS)
def test_o_is_the_same_whether_gradients_follow_or_not(name: str) -> None:
    kernel = INTERPRETER.kernel(name)
    assert kernel.o_first
    if kernel.has_backward:
        assert torch.equal(_call(name, gradients=True), _call(name, gradients=False))


def _call(name: str, *, gradients: bool) -> torch.Tensor:
    x = torch.arange(2 * 3 * 5 * 16).reshape(2, 3, 5, 16).sin().bfloat16().float()
    inputs = AttentionInputs(x, x.flip(2), x.flip(3), -x, Formats.of(BF16), noise_seed=3)
    return INTERPRETER.run(INTERPRETER.kernel(name), inputs, gradients=gradients).o
