"""The backend `cuda` without a GPU: stand-ins in torch.cuda's place, and the host in the device's."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from tiebreak.backends import cuda
from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.backends.torch_arithmetic import TorchArithmetic
from tiebreak.cases.bounds import ErrorBounds
from tiebreak.kernels import flex, varlen, vendor
from tiebreak.kernels.formats import BF16, Formats
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import Kernel, run_declared
from tiebreak.kernels.plans import Accumulator, Cast, SinkEntry
from tiebreak.kernels.reference import reference, reference_gradients, sink_gradient
from tiebreak.kernels.triton.loading import installed
from tiebreak.reports.records.record import CRASHED, PASSED, SKIPPED, UNDECIDED, Record
from tiebreak.studies.cells import CASES, judged

ARITHMETIC = cuda.CudaArithmetic()
GIB = 2**30


@dataclass(frozen=True)
class Card:
    name: str = "NVIDIA H200"
    capability: tuple[int, int] = (9, 0)
    free: int = 140 * GIB


EXACT = EmulatedArithmetic()

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Puts cards into torch.cuda, and the build of torch that they need."""

    def put(*cards: Card, hip: str | None = None) -> None:
        monkeypatch.setattr(torch.version, "cuda", None if hip else "12.8")
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(cards))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: cards[device].name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: cards[device].capability)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (cards[device].free, 0))

    return put


def made(name: str, queries: int | None = None) -> AttentionInputs:
    """Inputs of a scripted case; with `queries`, of its first queries alone, so that they see keys ahead of them."""
    inputs = CASES[name].make(1, 0, 16, BF16)
    if queries is None:
        return inputs
    return replace(inputs, q=inputs.q[:, :, :queries], do=inputs.do[:, :, :queries])


def packed_sequences() -> AttentionInputs:
    inputs = made("random_causal").part(slice(1))
    queries, keys = inputs.q.shape[2], inputs.k.shape[2]
    return replace(inputs, causal=False, lengths=((0, 5, queries), (0, 12, keys)))


def hold_to_bound(kernel: Kernel, inputs: AttentionInputs, o: Tensor) -> None:
    assert kernel.declaration is not None
    ref = reference(inputs)
    assert o.shape == ref.o.shape
    assert ((o.double() - ref.o).abs() <= ErrorBounds(inputs, ref).of(kernel.declaration)).all()


class TestUnavailable:
    def test_a_build_without_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "cuda", None)
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("CUDA was asked"))
        reason = cuda.unavailable()
        assert reason == f"PyTorch {torch.__version__} is built without CUDA and ROCm: install a build for your GPU"

    @pytest.mark.parametrize(
        ("error", "reason"),
        [
            ("Found no NVIDIA driver on your system. Please check that\nyou have one",
             "PyTorch finds no GPU: Found no NVIDIA driver on your system. Please check that"),
            (None, "PyTorch finds no GPU; CUDA_VISIBLE_DEVICES is ''"),
        ],
        ids=["no driver", "no device"],
    )  # fmt: skip
    def test_no_gpu(self, machine: Machine, monkeypatch: pytest.MonkeyPatch, error: str | None, reason: str) -> None:
        def init() -> None:
            if error:
                raise RuntimeError(error)

        machine()
        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert cuda.unavailable() == reason

    @pytest.mark.parametrize(
        ("cards", "hip", "reason"),
        [
            ([Card("Tesla T4", (7, 5))], None, "Tesla T4 (sm_75) has no bf16, which needs sm_80"),
            ([Card(), Card("Tesla T4", (7, 5))], None,
             "Tesla T4 (sm_75) has no bf16, which needs sm_80; leave it out with CUDA_VISIBLE_DEVICES"),
            ([Card("NVIDIA A100", (8, 0))], None, None),
            # Capabilities are gfx numbers there: gfx908 is (9, 0), and every card since has bf16.
            ([Card("AMD Radeon VII", (7, 0))], "6.4", None),
        ],
    )  # fmt: skip
    def test_cards_need_bf16(self, machine: Machine, cards: list[Card], hip: str | None, reason: str | None) -> None:
        machine(*cards, hip=hip)
        assert cuda.unavailable() == reason


@pytest.mark.parametrize(
    ("used", "errors", "poisoned"),
    [
        (True, ["an illegal memory access was encountered"] * 2, True),
        (True, ["invalid configuration argument", None], False),  # one that was still to be told
        (True, [None], False),
        (False, [], False),
    ],
)
def test_an_error_that_stays_poisons_a_device(
    monkeypatch: pytest.MonkeyPatch, used: bool, errors: list[str | None], poisoned: bool
) -> None:
    pending = iter(errors)

    def synchronize() -> None:
        if (error := next(pending)) is not None:
            raise RuntimeError(error)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert cuda.CUDA.poisoned() is poisoned


NVIDIA_DRIVER = """\
NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22)
GCC version:  gcc version 13.3.0
"""


def test_what_is_recorded_of_gpus(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = iter(["gfx942:sramecc+:xnack-", "gfx950"])
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=next(names)))
    for name, text in (("proc/driver/nvidia/version", NVIDIA_DRIVER), ("sys/module/amdgpu/version", "6.12.12\n")):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    machine(Card(), Card())
    assert cuda.describe_gpu(tmp_path) == {
        "gpu": "NVIDIA H200",
        "gpu_arch": "sm_90",
        "gpu_driver": "580.65.06",
        "cuda": "12.8",
        "hip": None,
        "cudnn": "91002",
        "triton": installed(),
    }
    (tmp_path / "proc/driver/nvidia/version").unlink()
    machine(Card(), Card(), hip="6.4.43482")
    gpu = cuda.describe_gpu(tmp_path)
    assert (gpu["gpu_arch"], gpu["gpu_driver"], gpu["hip"]) == ("gfx942, gfx950", "6.12.12", "6.4.43482")
    monkeypatch.setattr(cuda, "installed", lambda: None)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)
    machine(Card())
    gpu = cuda.describe_gpu(tmp_path / "nothing")
    assert (gpu["gpu_driver"], gpu["cudnn"], gpu["triton"]) == (None, None, None)


class TestExactProducts:
    @pytest.fixture(autouse=True)
    def loose(self) -> Iterator[None]:
        """A process whose user lets products be narrow."""
        before = switches()
        switch(LOOSE)
        yield
        switch(before)

    def test_the_arithmetic_switches_all_off_and_puts_them_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        states: list[dict[str, object]] = []

        def matmul(*args: object) -> Tensor:
            states.append(switches())
            raise RuntimeError("in the middle")

        monkeypatch.setattr(TorchArithmetic, "matmul", matmul)
        with pytest.raises(RuntimeError, match="in the middle"):
            ARITHMETIC.matmul(torch.ones(1, 1), torch.ones(1, 1), Cast(BF16), Accumulator.EXACT)
        assert states == [{name: "ieee" if name == "fp32_precision" else False for name in LOOSE}]
        assert switches() == LOOSE

    def test_kernels_of_others_run_under_them(self) -> None:
        states: list[dict[str, object]] = []

        def call(inputs: AttentionInputs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            states.append(switches() | {"math": reduced_math()})
            return q + k.sum() + v.sum()

        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
        try:
            vendor.through_autograd(call, made("random"), ARITHMETIC, True)
            assert reduced_math()
        finally:
            torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)
        assert states == [{name: "ieee" if name == "fp32_precision" else False for name in (*LOOSE, "math")}]


TF32 = "fp32_precision" if hasattr(torch.backends.cuda.matmul, "fp32_precision") else "allow_tf32"
LOOSE: dict[str, object] = {
    TF32: "tf32" if TF32 == "fp32_precision" else True,
    "allow_bf16_reduced_precision_reduction": True,
    "allow_fp16_reduced_precision_reduction": True,
    "allow_fp16_accumulation": True,
}


def switch(values: dict[str, object]) -> None:
    for name, value in values.items():
        setattr(torch.backends.cuda.matmul, name, value)


def reduced_math() -> bool:
    return bool(torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed())  # type: ignore[no-untyped-call]


def switches() -> dict[str, object]:
    return {name: getattr(torch.backends.cuda.matmul, name) for name in LOOSE}


def test_the_kernels_and_what_they_declare() -> None:
    kernels = {kernel.name: kernel for kernel in cuda.cuda_kernels()}
    names = {"triton_flash", "triton_fair", "flex", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math"}
    assert names | {"flash_attn"} <= set(kernels)
    for name in names - {"triton_fair", "sdpa_math"} | {"flash_attn"}:
        declaration = kernels[name].declaration
        assert declaration is not None
        # FlashAttention-2's source contracts, PyTorch's build of it is told not to.
        plan = "flash@fused_contracted,tile=128" if name == "flash_attn" else "flash@fused"
        assert (declaration.label, declaration.plan.exponential.base_two) == (plan, True), name


class TestCells:
    """Cells of the backend as the matrix runs them, the host in the GPU's place."""

    @staticmethod
    def run(name: str) -> Record:
        backend = replace(cuda.CUDA, device="cpu", unavailable=lambda: None)
        return judged(backend.kernel(name), "tied_maxima[k=2]", backend=backend)

    def test_eager_torch(self) -> None:
        assert self.run("flash@paper").outcome in (PASSED, UNDECIDED)

    def test_a_kernel_that_is_missing_says_so(self) -> None:
        record = self.run("flash_attn")
        assert record.outcome == SKIPPED
        assert "flash-attn is not installed" in record.reasons[0]
        assert not cuda.CUDA.kernel("flash_attn").has_backward, "no training run has it either"

    def test_a_kernel_that_runs_another_has_crashed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *args, **options: SDPBackend.FLASH_ATTENTION.value)
        record = self.run("sdpa_flash")
        assert record.outcome == CRASHED
        assert "RuntimeError: FLASH_ATTENTION was forced, but PyTorch ran aten::" in record.reasons[0]


class TestWorkers:
    @pytest.mark.parametrize(("free", "expected"), [((140,), 35), ((140, 140), 70), ((140, 9), 4), ((3,), 1)], ids=str)
    def test_memory_bounds_them(self, machine: Machine, free: tuple[int, ...], expected: int) -> None:
        machine(*(Card(free=gib * GIB) for gib in free))
        assert cuda.CUDA.worker_limit() == expected

    @pytest.mark.parametrize(
        ("cards", "hip", "visible", "told"),
        [
            (1, None, None, [{}] * 4),
            (2, None, None, [{"CUDA_VISIBLE_DEVICES": device} for device in "0101"]),
            (2, None, "3,GPU-8f2c", [{"CUDA_VISIBLE_DEVICES": device} for device in ("3", "GPU-8f2c") * 2]),
            (2, "6.4", "5,6", [{"HIP_VISIBLE_DEVICES": device} for device in "0101"]),  # a variable of its own
        ],
    )
    def test_visible_gpus_take_turns(
        self,
        machine: Machine,
        monkeypatch: pytest.MonkeyPatch,
        cards: int,
        hip: str | None,
        visible: str | None,
        told: list[dict[str, str]],
    ) -> None:
        machine(*[Card()] * cards, hip=hip)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert [cuda.CUDA.worker_environment(worker) for worker in (0, 1, 2, 11)] == told


class TestFlex:
    @pytest.fixture
    def eager(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """FlexAttention's own uncompiled implementation: the same masks, scale and groups."""
        from torch.nn.attention import flex_attention

        monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        monkeypatch.setattr(flex, "_compiled", lambda: flex_attention.flex_attention)

    @pytest.mark.usefixtures("eager")
    @pytest.mark.parametrize(
        ("name", "queries", "asked"),
        [
            ("random_causal", None, "nothing"),
            ("random_causal", 30, "window"),
            ("random_grouped", None, "soft cap and bias"),
            ("padded", None, "block mask"),
            ("random_causal", 30, "block mask"),
            ("random_grouped", None, "lengths and window"),
            ("random_causal", None, "sink"),
        ],
    )
    def test_what_it_is_given_is_the_inputs(self, name: str, queries: int | None, asked: str) -> None:
        inputs = self.asking(made(name, queries), asked)
        assert flex.flex().refusal(inputs) is None
        hold_to_bound(flex.flex(), inputs, flex.flex().compute(inputs, ARITHMETIC, False).o)

    def test_the_second_cast_of_an_output_beside_a_sink_is_declared(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kernel, inputs = flex.flex(), made("random_causal")
        declaration = kernel.declaration
        assert declaration is not None
        alone = run_declared(declaration, inputs, EXACT, False)
        assert alone.lse is not None
        returned = alone.o.bfloat16(), alone.lse[..., 0]
        monkeypatch.setattr(flex, "_compiled", lambda: lambda *args, **options: returned)
        inputs = replace(inputs, sink=torch.arange(inputs.q.shape[1]) / 4)
        o = kernel.compute(inputs, ARITHMETIC, False).o.float()
        once = replace(declaration, plan=replace(declaration.plan, sink=SinkEntry.LAST))
        equal, unequal = (
            (run_declared(each, inputs, EXACT, False).o == o).float().mean() for each in (declaration, once)
        )
        assert equal == 1.0
        assert unequal < 0.95

    def test_the_gradient_of_a_sink_goes_through_the_log_sum_exp(self) -> None:
        """FlexAttention's, which has none on a CPU; torchtitan #4796 lost that of q and K."""

        def call(inputs: AttentionInputs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            assert inputs.sink is not None
            s = inputs.scale * q.float() @ k.float().mT
            return flex._with_sink((s.softmax(-1) @ v.float()).bfloat16(), s.logsumexp(-1), inputs.sink)

        inputs = made("random")
        inputs = replace(inputs, sink=torch.arange(inputs.q.shape[1]) / 4)
        gradients = vendor.through_autograd(call, inputs, ARITHMETIC, True).gradients
        ref = reference(inputs)
        exact = (*reference_gradients(inputs, ref), sink_gradient(inputs, ref))
        assert gradients is not None
        for gradient, true in zip((gradients.dq, gradients.dk, gradients.dv, gradients.dsink), exact, strict=True):
            assert gradient is not None
            assert true is not None
            assert (gradient - true).norm() < 0.02 * true.norm()

    @staticmethod
    def asking(inputs: AttentionInputs, asked: str) -> AttentionInputs:
        if asked == "lengths and window":
            inputs = inputs.part(slice(1))
        heads, queries, keys = inputs.q.shape[1], inputs.q.shape[2], inputs.k.shape[2]
        seen = torch.ones(1, heads, -(-queries // 16), -(-keys // 8), dtype=torch.bool)
        seen[:, ::2, :, ::3] = False
        features: dict[str, dict[str, Any]] = {
            "nothing": {},
            "window": {"window": (9, 2)},
            "soft cap and bias": {"softcap": 2.0, "bias": torch.arange(float(heads))[None, :, None, None] % 3},
            "block mask": {"block_mask": seen, "block_size": (16, 8), "window": (20, None)},
            "sink": {"sink": torch.arange(heads) / 4},
            "lengths and window": {"lengths": ((0, queries // 3, queries), (0, 11, keys)), "window": (5, 3)},
        }
        return replace(inputs, **features[asked])

    def test_torch_compile_that_is_switched_off_would_run_another_implementation(self) -> None:
        import torch._dynamo

        assert flex.flex().refusal(made("random")) is None
        with torch._dynamo.config.patch(disable=True):
            assert "torch.compile is switched off" in str(flex.flex().refusal(made("random")))

    def test_it_refuses_what_it_has_no_kernel_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        narrow = torch.ones(1, 1, 4, 8)
        reason = flex.flex().refusal(AttentionInputs(narrow, narrow, narrow, narrow, Formats.of(BF16)))
        assert reason == "FlexAttention takes head dimensions from 16 on, not 8"
        monkeypatch.setattr(flex, "missing", lambda: "triton is not installed")
        assert flex.flex().refusal(made("random")) == "triton is not installed"


class TestVarlen:
    @pytest.fixture(autouse=True)
    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """PyTorch's own signature, over a loop of sequences, (N, heads, d) each: its kernel is a GPU's alone."""

        def varlen_attn(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            cu_seq_q: Tensor,
            cu_seq_k: Tensor,
            max_q: int,
            max_k: int,
            *,
            scale: float | None = None,
            window_size: tuple[int, int] = (-1, -1),
            enable_gqa: bool = False,
        ) -> Tensor:
            assert enable_gqa == (query.shape[1] != key.shape[1])
            left, right = (None if side < 0 else side for side in window_size)
            outputs = []
            for (row, column), (end, last) in pairwise(zip(cu_seq_q.tolist(), cu_seq_k.tolist(), strict=True)):
                assert end - row <= max_q
                assert last - column <= max_k
                parts = (query[row:end], key[column:last], value[column:last])
                q, k, v = (x.transpose(0, 1)[None].float() for x in parts)
                sequence = AttentionInputs(q, k, v, q, Formats.of(BF16), softmax_scale=scale)
                o = reference(replace(sequence, window=(left, right))).o
                outputs.append(o[0].transpose(0, 1).nan_to_num(0.0))
            return torch.cat(outputs).to(query.dtype)

        monkeypatch.setattr(varlen, "_function", lambda: varlen_attn)

    @pytest.mark.parametrize(
        ("inputs", "window"),
        [
            (made("random"), (None, None)),
            (made("random_grouped"), (3, 1)),
            (made("random_causal", 30), (None, None)),
            (made("random_causal"), (9, None)),
            (packed_sequences(), (None, None)),
            (replace(packed_sequences(), causal=True), (None, None)),
        ],
        ids=["full", "grouped, window", "causal", "causal window", "packed", "packed and causal"],
    )
    def test_a_batch_is_packed_and_a_causal_mask_is_a_window(
        self, inputs: AttentionInputs, window: tuple[int | None, int | None]
    ) -> None:
        kernel, inputs = varlen.varlen(), replace(inputs, window=window)
        assert kernel.refusal(inputs) is None
        hold_to_bound(kernel, inputs, kernel.compute(inputs, ARITHMETIC, True).o)

    def test_what_a_release_has_no_word_for_it_refuses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def varlen_attn(q: Tensor, k: Tensor, v: Tensor, cu_seq_q: Tensor, scale: float, window_size: object) -> None:
            del q, k, v, cu_seq_q, scale, window_size

        monkeypatch.setattr(varlen, "_function", lambda: varlen_attn)
        reason = varlen.varlen().refusal(made("random_grouped"))
        assert reason == "varlen_attn knows no grouped-query heads here: install a newer release"
        assert varlen.varlen().refusal(made("padded")) == "varlen takes no key padding mask"


def test_pytorch_s_own_signature_has_all_that_varlen_takes() -> None:
    assert varlen.varlen().refusal(replace(packed_sequences(), window=(3, 1), softmax_scale=0.1)) is None
