"""The vendor's kernels, called on the stand-in: layouts, masks, statistics, gradients, refusals."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tiebreak.backends.ascend import Ascend
from tiebreak.backends.torch_arithmetic import TorchArithmetic
from tiebreak.cases.bounds import UNDECLARED, ErrorBounds
from tiebreak.kernels.features import LENGTHS
from tiebreak.kernels.formats import BF16, FP16, FP32, Format, Formats
from tiebreak.kernels.inputs import AttentionInputs, Gradients
from tiebreak.kernels.kernel import Kernel
from tiebreak.kernels.npu import (
    LAYOUTS,
    FusionAttention,
    Operator,
    every_fusion_attention,
    masking,
    npu_kernels,
    pack,
    torch_npu_operators,
    unpack,
)
from tiebreak.kernels.reference import Reference, reference, reference_gradients, sink_gradient
from tiebreak.studies.cells import CASES

SHAPES = ["random", "random_causal", "random_grouped", "random_odd", "padded"]
FUSION = [kernel.name for kernel in every_fusion_attention()]
NAMES = list(dict.fromkeys([*FUSION, *(kernel.name for kernel in npu_kernels())]))


def drawn(name: str, fmt: Format = BF16) -> AttentionInputs:
    return CASES[name].make(1, 0, 16, fmt)


def longer(queries: int, keys: int) -> AttentionInputs:
    """Causal inputs of two lengths, two batch entries of four heads that share two key heads."""
    generator = torch.Generator().manual_seed(queries)
    shapes = ((2, 4, queries, 16), (2, 2, keys, 16), (2, 2, keys, 16), (2, 4, queries, 16))
    q, k, v, do = (torch.randn(shape, generator=generator).bfloat16().float() for shape in shapes)
    return AttentionInputs(q, k, v, do, Formats.of(BF16), causal=True)


def test_the_layouts_put_every_element_where_they_say_contiguous_and_back() -> None:
    x = torch.arange(2 * 3 * 5 * 4, dtype=torch.float32).reshape(2, 5, 3, 4).transpose(1, 2)
    places = {"BNSD": (1, 2, 4, 3), "BSND": (1, 4, 2, 3), "SBH": (4, 1, 2 * 4 + 3)}
    assert set(places) == set(LAYOUTS)
    for layout, place in places.items():
        packed = pack(x, layout)
        assert packed[place] == x[1, 2, 4, 3]
        assert packed.is_contiguous()
        assert torch.equal(unpack(packed, layout, x.shape[1]), x)
    sequences = pack(x[1:], "TND")
    assert sequences[4, 2, 3] == x[1, 2, 4, 3]
    assert torch.equal(unpack(sequences, "TND", x.shape[1]), x[1:])


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kernel", NAMES)
def test_every_kernel_computes_attention_its_log_sum_exp_and_gradients(backend: Ascend, kernel: str, name: str) -> None:
    inputs, runs = drawn(name), backend.kernel(kernel)
    ref, hidden = reference(inputs), inputs.hidden()
    output = backend.run(runs, inputs, gradients=runs.has_backward)
    assert output.o.dtype is torch.bfloat16
    assert ((output.o.double() - ref.o).abs() <= ErrorBounds(inputs, ref).of(UNDECLARED)).all()
    assert (output.lse is None) == (kernel == "npu_prompt_flash")
    if output.lse is not None:
        exact = (ref.s if hidden is None else ref.s.masked_fill(hidden, -torch.inf)).logsumexp(-1, keepdim=True)
        assert output.lse.shape == exact.shape
        # Scores of some 10 and a sum of up to 128 terms in fp32.
        assert (output.lse.double() - exact).abs().max() < 1e-4
    assert (output.gradients is None) == (kernel not in FUSION)
    assert_gradients(output.gradients, inputs, ref)


def assert_gradients(gradients: Gradients | None, inputs: AttentionInputs, ref: Reference) -> None:
    if gradients is not None:
        ours = (gradients.dq, gradients.dk, gradients.dv)
        for gradient, expected in zip(ours, reference_gradients(inputs, ref), strict=True):
            assert gradient.shape == expected.shape
            assert (gradient.double() - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("lengths", [(5, 5), (3, 9), (9, 3)])
@pytest.mark.parametrize("kernel", ["npu_fusion_sbh_p0", "npu_prompt_flash", "npu_fused_infer_p0"])
def test_causal_masks_start_at_the_lower_right_corner(backend: Ascend, kernel: str, lengths: tuple[int, int]) -> None:
    inputs = longer(*lengths)
    ref = reference(inputs)
    o = backend.run(backend.kernel(kernel), inputs, gradients=False).o.double()
    sighted = slice(max(0, lengths[0] - lengths[1]), None)  # a row that sees no key has no answer that all agree on
    assert (((o - ref.o).abs() <= ErrorBounds(inputs, ref).of(UNDECLARED))[:, :, sighted]).all()


def test_a_causal_mask_is_compressed_and_a_padding_mask_whole() -> None:
    causal, padded = drawn("random_causal"), drawn("padded")
    assert masking(causal)["sparse_mode"] == 3
    both = replace(causal, key_padding=torch.ones(causal.k.shape[0], causal.k.shape[2], dtype=torch.bool))
    for inputs in (padded, both):
        assert masking(inputs)["sparse_mode"] == 1
    assert masking(drawn("random")) == {}


def _packed_sequences() -> AttentionInputs:
    inputs = longer(9, 14).part(slice(1))
    return replace(inputs, causal=False, lengths=((0, 4, 9), (0, 6, 14)))


ASKED = {
    "window": replace(longer(5, 5), causal=False, window=(2, 1)),
    "causal window": replace(longer(4, 9), window=(3, None)),
    "window and padding": replace(drawn("padded"), window=(20, 30)),
    "block mask": replace(longer(9, 9), block_mask=torch.ones(1, 4, 3, 3, dtype=torch.bool).tril(), block_size=(3, 3)),
    "packed": _packed_sequences(),
    "packed, a window": replace(_packed_sequences(), window=(2, 2)),
    "packed, causal": replace(_packed_sequences(), causal=True),
    "packed, a block mask": replace(
        _packed_sequences(), block_mask=torch.ones(1, 1, 3, 7, dtype=torch.bool), block_size=(3, 2)
    ),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize(
    "kernel", ["npu_fusion_sbh_p0", "npu_fusion_bsnd_p0", "npu_prompt_flash", "npu_fused_infer_p0"]
)
def test_what_a_call_asks_more_an_operator_is_told(backend: Ascend, kernel: str, asked: str) -> None:
    inputs, runs = ASKED[asked], backend.kernel(kernel)
    if "fusion" not in kernel and inputs.lengths is not None:
        assert runs.refusal(inputs) == f"{kernel} takes no {LENGTHS.words}"
        return
    assert runs.refusal(inputs) is None
    ref = reference(inputs)
    output = backend.run(runs, inputs, gradients=runs.has_backward)
    assert ((output.o.double() - ref.o).abs() <= ErrorBounds(inputs, ref).of(UNDECLARED)).all()
    assert output.lse is None or output.lse.shape == ref.delta.shape
    assert_gradients(output.gradients, inputs, ref)


def test_a_sink_goes_to_an_operator_whose_schema_has_one(backend: Ascend) -> None:
    inputs = replace(longer(5, 9), sink=torch.tensor([0.5, -1.0, 2.0, 0.0]))
    kernel, ref = backend.kernel("npu_fusion_bnsd_p0"), reference(inputs)
    assert kernel.refusal(inputs) is None
    output = backend.run(kernel, inputs, gradients=True)
    assert ((output.o.double() - ref.o).abs() <= ErrorBounds(inputs, ref).of(UNDECLARED)).all()
    exact, gradients = sink_gradient(inputs, ref), output.gradients
    assert exact is not None
    assert gradients is not None
    assert gradients.dsink is not None
    assert (gradients.dsink - exact).norm() < 0.02 * exact.norm()
    refusal = backend.kernel("npu_fused_infer_p0").refusal(inputs)
    assert refusal == (
        "npu_fused_infer_attention_score knows no learned sink here: install a newer torch-npu (docs/devices.md)"
    )


@pytest.mark.parametrize("installed", [True, False])
def test_triton_kernels_join_where_there_is_a_triton(
    backend: Ascend, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    monkeypatch.setattr("tiebreak.backends.ascend.missing", lambda: None if installed else "not installed")
    assert ("triton_flash" in {kernel.name for kernel in backend.kernels()}) == installed


class Recorder:
    """Operators that note what they are called with."""

    def __init__(self, operators: Callable[[str], Operator | None]) -> None:
        self.operators, self.calls = operators, list[tuple[str, dict[str, object]]]()

    def __call__(self, name: str) -> Operator | None:
        operator = self.operators(name)
        assert operator is not None

        def noted(*positional: object, **named: object) -> object:
            self.calls.append((name, named))
            return operator(*positional, **named)

        noted.default = operator.default  # type: ignore[attr-defined]  # it has the schema
        return noted


def test_both_operators_are_told_the_precision_the_band_of_a_window_and_where_sequences_end(backend: Ascend) -> None:
    recorder = Recorder(backend.operators)
    for precise, asked in enumerate(("causal window", "packed, a window")):
        FusionAttention("SBH", precise, recorder)(ASKED[asked], backend.arithmetic, True)
    names = ["npu_fusion_attention", "npu_fusion_attention_grad"]
    assert [(name, told["inner_precise"]) for name, told in recorder.calls] == [
        *((name, at) for at in (0, 1) for name in names)
    ]
    band, _, of_sequences, _ = (told for _, told in recorder.calls)
    assert (band["pre_tockens"], band["next_tockens"]) == (3, 0)
    assert (of_sequences["actual_seq_qlen"], of_sequences["actual_seq_kvlen"]) == ([4, 9], [6, 14])
    assert {told["sparse_mode"] for _, told in recorder.calls} == {4}


@pytest.mark.parametrize("kernel", npu_kernels(lambda name: None), ids=lambda kernel: kernel.name)
def test_an_operator_that_a_release_lacks_is_named(kernel: Kernel) -> None:
    reason = str(kernel.refusal(drawn("random")))
    assert reason.startswith("this torch-npu has no npu_")
    assert reason.endswith("install a newer release (docs/devices.md)")
    with pytest.raises(NotImplementedError, match="this torch-npu has no npu_"):
        kernel.compute(drawn("random"), TorchArithmetic(), False)  # in training, where nobody asks
    assert torch_npu_operators("npu_no_such_operator") is None


def test_inference_operators_refuse_fp32_and_training_takes_it(backend: Ascend) -> None:
    refusing = [kernel.name for kernel in npu_kernels(backend.operators) if kernel.refusal(drawn("random", FP32))]
    assert refusing == ["npu_prompt_flash", "npu_fused_infer_p0", "npu_fused_infer_p1"]
    assert refusing == [kernel.name for kernel in npu_kernels() if not kernel.has_backward]


@pytest.mark.parametrize("fmt", [BF16, FP16, FP32], ids=lambda fmt: fmt.name)
def test_the_inputs_are_left_as_they_were(backend: Ascend, fmt: Format) -> None:
    inputs = drawn("random", fmt)
    copies = tuple(tensor.clone() for tensor in (inputs.q, inputs.k, inputs.v, inputs.do))
    output = backend.run(backend.kernel("npu_fusion_bnsd_p0"), inputs, gradients=True)
    assert output.o.dtype is {BF16: torch.bfloat16, FP16: torch.float16, FP32: torch.float32}[fmt]
    for now, before in zip((inputs.q, inputs.k, inputs.v, inputs.do), copies, strict=True):
        assert torch.equal(now, before)
