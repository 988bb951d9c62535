"""PyTorch's CPU flash kernel does what its declaration says: its bits are predicted.

The kernel's code depends on the instruction set that ATen picks at start-up (ATEN_CPU_CAPABILITY). Its AVX2 and AVX-512
builds have a fast exponential that misses 1 at 0 by 5e-5, which breaks every tie by far more than fp32 rounds. The
default build's exponential is exact. What breaks its ties is the tail, down to 1e-7 of the row, and where the tail is
that faint, the order in which fp32 adds up decides. The declaration has no such order, so misses are held to the
elements that it can decide.
"""

import math
import warnings
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tiebreak.backends import cuda
from tiebreak.backends.backend import CPU, EMULATION
from tiebreak.cases.bounds import ErrorBounds
from tiebreak.cases.gpt2.attention import HeadKernel, LayerCall, attend
from tiebreak.kernels import sdpa
from tiebreak.kernels.features import VALUE_DIM, WINDOW
from tiebreak.kernels.formats import BF16, FP16, FP32, Format, Formats, ulp
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionInputs
from tiebreak.kernels.kernel import Declaration, Kernel, composed, run_declared
from tiebreak.kernels.plans import FUSED, Cast, RoundingPlan
from tiebreak.kernels.reference import reference
from tiebreak.kernels.sdpa import Implementation, measure_exp_at_zero
from tiebreak.studies.cells import CASES

pytestmark = pytest.mark.processor
HEADS = 64
FEW = 0.001  # of the bits
TIES = [
    "tied_maxima[k=2]", "tied_maxima[k=8]", "tied_maxima_positive_v", "sink_tie", "single_maximum_sink",
    "repeated_tiny", "repeated_negative", "near_tie_inside", "repeated_large[r=30]", "repeated_large[r=90]",
    "ties_across_blocks", "overshooting_shift", "tied_p_bar",
]  # fmt: skip
FAINT = ["no_tail", "faint_tail"]  # where exp(0) is 1, nothing but the order of sums breaks these ties
RANDOM = ["random", "random_causal", "random_grouped", "random_odd", "padded", "wholly_masked"]

each_format = pytest.mark.parametrize("fmt", [BF16, FP16], ids=lambda fmt: fmt.name)


def _declaration() -> Declaration:
    declaration = CPU.kernel("sdpa_flash").declaration
    assert declaration is not None
    return declaration


EXPONENTIAL = _declaration().plan.exponential
FAST = bool(EXPONENTIAL.correction)
fast_builds = pytest.mark.skipif(not FAST, reason="this build of SDPA flash has an exact exponential")


@cache
def _inputs(name: str, fmt: Format = BF16) -> AttentionInputs:
    return CASES[name].make(0, 0, HEADS, fmt)


@cache
def _returned(name: str, fmt: Format = BF16) -> Tensor:
    return CPU.run(CPU.kernel("sdpa_flash"), _inputs(name, fmt), gradients=False).o.float()


def _predicted(name: str, fmt: Format = BF16, plan: RoundingPlan | None = None) -> Tensor:
    declaration = replace(_declaration(), plan=plan or _declaration().plan)
    return EMULATION.run(composed("prediction", declaration), _inputs(name, fmt), gradients=False).o


def _equal_bits(name: str, fmt: Format = BF16, plan: RoundingPlan | None = None) -> float:
    return (_returned(name, fmt) == _predicted(name, fmt, plan)).double().mean().item()


@fast_builds
@each_format
def test_the_declared_exponential_is_the_kernels_at_every_argument(fmt: Format) -> None:
    x = torch.linspace(-1.5, 0.0, 301).to(TORCH_DTYPES[fmt])
    keys = torch.zeros(x.numel(), 1, EXPONENTIAL.lanes, 16, dtype=x.dtype)
    keys[:, 0, 1:, 0] = x[:, None]  # and one key whose score is 0, so that this is the shift
    query = torch.zeros(x.numel(), 1, 1, 16, dtype=x.dtype)
    query[..., 0] = 4.0  # 1/alpha
    _, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, keys, keys)
    scores = keys[:, :, None, :, 0].float()
    measured = lse.double().exp().flatten()
    declared = EMULATION.arithmetic.exp(scores, EXPONENTIAL).double().sum(-1).flatten()
    # Log-sum-exp is below 4: fp32 spaces it by 2^-22, and the kernel's sum of 16 or fewer terms errs by less than that.
    assert (measured / declared - 1.0).abs().max() <= 2.0 * 2.0**-22
    assert (measured / scores.double().exp().sum(-1).flatten() - 1.0).abs().max() > 5e-5


def test_the_declaration_is_fused_but_for_the_measured_exponential() -> None:
    plan, lanes = _declaration().plan, EXPONENTIAL.lanes
    assert replace(plan, name="fused", exponential=FUSED.exponential) == FUSED
    assert plan.name == ("fused_fast_exp" if FAST else "fused")
    for keys in (7, 20, 31, 33, 64, 100):  # those that fill no lanes have an exact exponential
        left_over = keys % lanes
        mean = (left_over + (keys - left_over) * EXPONENTIAL.at_zero) / keys
        assert measure_exp_at_zero(keys) == pytest.approx(mean, abs=1e-6)
    if FAST:  # it stays under the error that the bound grants it
        x = torch.linspace(-87.0, 0.0, 2**20)
        error = EMULATION.arithmetic.exp(x, EXPONENTIAL).double() / x.double().exp() - 1.0
        assert 1.0e-4 < error.abs().max().item() < 2.0**-13


def _distance_to_a_tie(name: str, fmt: Format) -> Tensor:
    """How far O lies from the nearest midpoint of two numbers of the format before its cast, relative to O."""
    wide = _predicted(name, fmt, replace(_declaration().plan, o=Cast(FP32))).double()
    spacing = ulp(wide, fmt)
    return ((wide.abs() / spacing).remainder(1.0) - 0.5).abs() * spacing / wide.abs()


@each_format
@pytest.mark.parametrize("name", [*TIES, *(FAINT if FAST else ())])
def test_the_bits_are_predicted(name: str, fmt: Format) -> None:
    missed = _returned(name, fmt) != _predicted(name, fmt)
    # O-bar and l are sums of n terms of one sign: n u each in whatever order they are added up (Higham, 4.2). Taken as
    # random, the roundings come to about sqrt(n) u: misses are fewer than the elements so near a tie.
    keys, distance = _inputs(name, fmt).k.shape[2], _distance_to_a_tie(name, fmt)
    assert (distance[missed] <= 2 * keys * FP32.unit_roundoff).all()
    allowed = max(FEW, (distance <= math.sqrt(keys) * FP32.unit_roundoff).double().mean().item())
    assert allowed < 0.1
    assert missed.double().mean().item() <= allowed


@each_format
@pytest.mark.parametrize("name", RANDOM)
def test_the_bits_of_random_input_are_predicted(name: str, fmt: Format) -> None:
    # A score rounds as its product was added up, and takes P-bar to its other neighbour where it lies near a tie.
    assert _equal_bits(name, fmt) >= 1.0 - 2 * FEW


@fast_builds
def test_without_the_fast_exponential_the_prediction_is_clearly_worse() -> None:
    # Half of the elements are ties, and half of those go to the other neighbour: a quarter of the bits.
    assert _equal_bits("repeated_zero") - _equal_bits("repeated_zero", plan=FUSED) > 0.2
    for fmt in (BF16, FP16):
        assert _equal_bits("random", fmt) - _equal_bits("random", fmt, FUSED) > 4 * FEW


@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_math"])
def test_a_model_runs_each_forward_pass_once_and_takes_the_gradients_of_that_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, kernel, ran = CASES["random_causal"].make(1, 0, 2, BF16), CPU.kernel(name), list[Tensor]()
    inputs = replace(inputs, q=inputs.k.flip(2))
    inputs = replace(inputs, do=inputs.v.roll(1, 2))
    expected, forward = CPU.run(kernel, inputs, gradients=True), Implementation._o

    def counted(self: Implementation, call: AttentionInputs, *qkv: Tensor) -> Tensor:
        ran.append(qkv[0])
        return forward(self, call, *qkv)

    monkeypatch.setattr(Implementation, "_o", counted)
    leaves = [tensor.clone().requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v)]
    call = LayerCall(CPU.arithmetic, 0, 1, (), torch.zeros(()))
    q, k, v = leaves
    o, _ = (attend(factor * q, k, v, (HeadKernel(kernel),) * 2, call) for factor in (1.0, 2.0))
    gradients = torch.autograd.grad(o, leaves, inputs.do)
    assert len(ran) == 2
    assert expected.gradients is not None
    assert torch.equal(o, expected.o.float())
    for ours, theirs in zip(
        gradients, (expected.gradients.dq, expected.gradients.dk, expected.gradients.dv), strict=True
    ):
        assert torch.equal(ours, theirs.float())


@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_math"])
def test_the_backward_pass_leaves_the_inputs_out_of_its_graph(name: str) -> None:
    """In fp32 a cast makes no copy, and the inputs are shared by every other cell."""
    inputs = CASES["random"].make(1, 0, 16, FP32)
    CPU.run(CPU.kernel(name), inputs, gradients=True)
    assert not any(tensor.requires_grad for tensor in (inputs.q, inputs.k, inputs.v, inputs.do))


# What the flash implementation of a GPU gets, run by the CPU's.
ON_CPU = replace(sdpa.CUDA_FLASH, operator=sdpa.CPU_FLASH.operator)


@pytest.mark.parametrize(
    ("forced", "instead", "ran"),
    [
        (sdpa.CPU_FLASH, SDPBackend.MATH, "FLASH_ATTENTION was forced, but PyTorch ran the composed implementation"),
        (sdpa.MATH, SDPBackend.FLASH_ATTENTION, f"MATH was forced, but PyTorch ran {sdpa.CPU_FLASH.operator}"),
        # That of another device is not the one forced.
        (sdpa.CUDA_FLASH, SDPBackend.FLASH_ATTENTION, f"PyTorch ran {sdpa.CPU_FLASH.operator}"),
    ],
    ids=["flash", "math", "another device's"],
)
def test_a_silent_fail_back_is_an_error(
    forced: Implementation, instead: SDPBackend, ran: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "sdpa_kernel", lambda backends: sdpa_kernel([instead]))
    with pytest.raises(RuntimeError, match=ran):
        forced(_inputs("random"), CPU.arithmetic, False)


class _AskedError(Exception):
    """Carries the request to PyTorch."""


def _rows(name: str, queries: int) -> AttentionInputs:
    """A case's first queries alone: under a causal mask they see the keys ahead of them."""
    inputs = _inputs(name)
    return replace(inputs, q=inputs.q[:, :, :queries], do=inputs.do[:, :, :queries])


@pytest.mark.parametrize(
    ("inputs", "mask", "flag"),
    [
        (_inputs("random"), False, False),
        (_inputs("random_causal"), False, True),
        (_rows("random_causal", 30), True, False),
        (replace(_inputs("padded"), q=_inputs("padded").k, do=_inputs("padded").k, causal=True), True, False),
        (replace(_inputs("random_causal"), window=(9, None)), True, False),
    ],
    ids=["full", "square", "not square", "padded", "windowed"],
)
def test_only_a_square_causal_mask_goes_by_the_flag(
    inputs: AttentionInputs, mask: bool, flag: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*args: Tensor, **options: object) -> None:
        raise _AskedError(options["attn_mask"] is not None, options["is_causal"])

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", ask)
    with pytest.raises(_AskedError) as request:
        ON_CPU(inputs, CPU.arithmetic, False)
    assert request.value.args == (mask, flag)


@pytest.mark.parametrize("queries", [48, 30], ids=["square", "not square"])
def test_a_causal_mask_is_the_inputs_however_it_is_told(queries: int) -> None:
    inputs = _rows("random_causal", queries)
    ref = reference(inputs)
    o = ON_CPU(inputs, CPU.arithmetic, False).o.double()
    assert ((o - ref.o).abs() <= ErrorBounds(inputs, ref).of(_declaration())).all()


def test_an_operator_takes_all_that_masks_or_a_square_causal_mask_alone() -> None:
    kernels = {kernel.name: kernel for kernel in cuda.gpu_sdpa_kernels()}
    with_mask = {name: WINDOW in kernel.takes for name, kernel in kernels.items()}
    bias = {
        name: "attn_bias" in str(getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention").default._schema)
        for name in ("flash", "cudnn", "efficient")
    }
    assert with_mask == {f"sdpa_{name}": has for name, has in bias.items()} | {"sdpa_math": True}
    assert (with_mask["sdpa_flash"], with_mask["sdpa_efficient"]) == (False, True)
    refused = (_inputs("padded"), _rows("random_causal", 30), _windowed())
    assert [kernels["sdpa_flash"].refusal(inputs) for inputs in refused] == [
        "sdpa_flash takes no key padding mask",
        "sdpa_flash takes no causal mask of fewer or more queries than keys",
        "sdpa_flash takes no sliding window",
    ]


def _windowed(queries: int = 48) -> AttentionInputs:
    return replace(_rows("random_causal", queries), window=(9, None))


def _biased(**fields: Any) -> AttentionInputs:
    inputs = _inputs("random_causal")
    bias = (torch.arange(inputs.k.shape[2]) / 16).bfloat16().float().expand(1, inputs.q.shape[1], 1, -1)
    return replace(inputs, bias=bias, **fields)


def _packed() -> AttentionInputs:
    """Three sequences, of which one has no query."""
    inputs = _inputs("random_causal").part(slice(1))
    queries, keys = inputs.q.shape[2], inputs.k.shape[2]
    return replace(inputs, lengths=((0, 5, 5, queries), (0, 12, 13, keys)))


def _narrower_v() -> AttentionInputs:
    inputs = _inputs("random_grouped")
    return replace(inputs, v=inputs.v[..., :32], do=inputs.do[..., :32])


@pytest.mark.parametrize("kernel", ["sdpa_flash", "sdpa_math"])
@pytest.mark.parametrize(
    "inputs",
    [_windowed(), _windowed(1), _narrower_v(), _biased(), _biased(causal=False), _packed()],
    ids=["window", "decode", "v", "bias", "bias alone", "packed"],
)
def test_what_it_takes_of_a_call_s_features_it_does_as_declared(kernel: str, inputs: AttentionInputs) -> None:
    runs = CPU.kernel(kernel)
    reason = runs.refusal(inputs)
    if reason is not None:  # in PyTorch's words
        assert (kernel, VALUE_DIM in inputs.required_features()) == ("sdpa_flash", True)
        assert "to have the same last dimension" in reason
        return
    assert runs.declaration is not None
    predicted = run_declared(runs.declaration, inputs, EMULATION.arithmetic, False).o
    o = runs.compute(inputs, CPU.arithmetic, False).o.float()
    assert (o != predicted).float().mean() < FEW
    ref = reference(inputs)
    assert ((o.double() - ref.o).abs() <= ErrorBounds(inputs, ref).of(runs.declaration)).all()


def test_an_order_in_memory_that_the_flash_kernel_cannot_take_is_refused_in_pytorch_s_words() -> None:
    """Not a crash of its cell; found by the fuzz."""
    inputs = CASES["random"].make(1, 0, 16, BF16)
    kernel = CPU.kernel("sdpa_flash")
    assert kernel.refusal(inputs) is None
    apart = replace(inputs, q=inputs.q.mT.contiguous().mT)
    assert "last dimension of the input to have stride 1" in (kernel.refusal(apart) or "")


def test_what_pytorch_has_no_kernel_for_is_refused_in_its_words() -> None:
    assert ON_CPU.missing_requirement(_inputs("random_grouped")) is None
    nothing = torch.zeros(1, 1, 0, 64)
    reason = ON_CPU.missing_requirement(AttentionInputs(nothing, nothing, nothing, nothing, Formats.of(BF16)))
    assert reason == "nothing to attend to: q (1, 1, 0, 64), k (1, 1, 0, 64)"
    reason = sdpa.CUDA_EFFICIENT.missing_requirement(_inputs("random"))
    assert str(reason).startswith("EFFICIENT_ATTENTION: No viable backend for scaled_dot_product_attention was found.")


def test_of_pytorch_s_warnings_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(*args: Tensor, **options: object) -> int:
        for text in (
            "Memory efficient kernel not used because:",
            "Memory Efficient attention has been runtime disabled.",
            "Flash attention kernel not used because:",
            "Flash attention requires q,k,v to have the same last dimension.",
        ):
            warnings.warn(f"{text} (Triggered internally at sdp_utils.cpp:912.)", stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    reason = sdpa.CUDA_FLASH.missing_requirement(_inputs("random"))
    assert reason == "FLASH_ATTENTION: Flash attention requires q,k,v to have the same last dimension."
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *args, **options: 0)
    reason = sdpa.CUDA_CUDNN.missing_requirement(_inputs("random"))
    assert reason == "CUDNN_ATTENTION can't take these inputs: PyTorch would run MATH"


@pytest.mark.parametrize("kernel", cuda.gpu_sdpa_kernels(), ids=lambda kernel: kernel.name)
def test_each_kernel_of_a_gpu_forces_its_own(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    def noting(backends: list[SDPBackend]) -> None:
        raise _AskedError(*(backend.name for backend in backends))

    monkeypatch.setattr(sdpa, "sdpa_kernel", noting)
    with pytest.raises(_AskedError) as forced:
        kernel.compute(_inputs("random"), CPU.arithmetic, False)
    names = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH"}
    assert forced.value.args == (names[kernel.name.removeprefix("sdpa_")],)
