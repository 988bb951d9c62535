"""What inputs ask of a kernel, in features and in formats, and what a kernel takes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tiebreak.backends.backend import CPU
from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.backends.interpreter import INTERPRETER
from tiebreak.backends.registry import BACKENDS
from tiebreak.cases.captured import TRAINED_SINK
from tiebreak.cases.feature_cases import EVERY
from tiebreak.cases.scripted import EIGHT_BITS
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.external import external_kernel
from tiebreak.kernels.features import (
    BLIND_ROWS,
    CAUSAL,
    GROUPED,
    KEY_PADDING,
    MIXED_FORMATS,
    OBLONG_CAUSAL,
    OWN_SCALE,
    Feature,
)
from tiebreak.kernels.formats import BF16, FP8_E4M3, FP16, FP32, Format, Formats
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import Kernel, run_declared
from tiebreak.kernels.plans import Cast
from tiebreak.kernels.roster import composed_kernel
from tiebreak.kernels.triton.roster import DECLARATIONS, triton_kernels
from tiebreak.matrix.experiments.call import OneCall
from tiebreak.matrix.selection import Selection, cells

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
ARITHMETIC = EmulatedArithmetic()
CASES = {case.name: case for case in EVERY}
WINDOW = Feature("window", "window of keys")  # stands for a feature that is added one day


class Windowed(AttentionInputs):
    """Inputs that ask for what no kernel has heard of."""

    def required_features(self) -> tuple[Feature, ...]:
        """A window too."""
        return (*super().required_features(), WINDOW)


def _inputs(case: str) -> AttentionInputs:
    return CASES[case].make(1, 0, 16, BF16)


def _queries(inputs: AttentionInputs, queries: int) -> AttentionInputs:
    return replace(inputs, q=inputs.q[:, :, :queries], do=inputs.do[:, :, :queries])


def _attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    raise AssertionError("a kernel is asked first")


def _kernels() -> list[Kernel]:
    own = external_kernel(f"{Path(__file__)}:_attention")
    return [own, *(kernel for backend in BACKENDS.values() for kernel in backend.kernels())]


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (_inputs("random"), ()),
        (_inputs("random_grouped"), (GROUPED,)),
        (_inputs("random_scaled"), (OWN_SCALE,)),
        (_inputs("random_causal"), (CAUSAL,)),
        (_queries(_inputs("random_causal"), 30), (CAUSAL, OBLONG_CAUSAL)),
        (
            replace(_inputs("random"), q=torch.ones(1, 16, 200, 64), do=torch.ones(1, 16, 200, 64), causal=True),
            (CAUSAL, OBLONG_CAUSAL, BLIND_ROWS),
        ),
        (_inputs("padded"), (KEY_PADDING,)),
        (_inputs("wholly_masked"), (KEY_PADDING, BLIND_ROWS)),
    ],
    ids=["plain", "grouped", "scaled", "causal", "oblong", "more queries than keys", "padded", "blind"],
)
def test_inputs_say_what_they_ask_for(inputs: AttentionInputs, words: tuple[Feature, ...]) -> None:
    assert inputs.required_features() == words


def test_a_feature_that_no_kernel_has_heard_of_is_refused_by_every_kernel() -> None:
    plain = _inputs("random")
    inputs = Windowed(plain.q, plain.k, plain.v, plain.do, plain.formats)
    reasons = {kernel.name: kernel.refusal(inputs) for kernel in _kernels()}
    assert reasons == {name: f"{name} takes no window of keys" for name in reasons}


def test_what_a_kernel_takes_is_asked_before_what_it_lacks() -> None:
    def compute(inputs: AttentionInputs, arithmetic: Arithmetic, gradients: bool) -> AttentionOutput:
        raise AssertionError("a kernel is asked first")

    inputs = _inputs("wholly_masked")
    reason = Kernel("mine", compute, None).refusal(inputs)
    assert reason == "mine takes no " + " and no ".join(feature.words for feature in inputs.required_features())
    kernel = Kernel("mine", compute, None, takes=frozenset({CAUSAL}), missing_requirement=lambda inputs: "no such card")
    assert kernel.refusal(_inputs("padded")) == "mine takes no key padding mask"
    assert kernel.refusal(_inputs("random_causal")) == "no such card"
    assert replace(kernel, missing_requirement=lambda inputs: None).refusal(_inputs("random_causal")) is None


# One hides scores, one has an arithmetic of its own, and one is added to scores.
@pytest.mark.parametrize("word", ["block_mask", "descale", "alibi"])
def test_a_feature_costs_five_files(word: str) -> None:
    rooms = ("kernels", "backends", "cases", "reports", "tests/matrix", "tests/programs")
    files = [path for room in rooms for path in (ROOT / room).rglob("*.py") if word in path.read_text("utf-8").lower()]
    files = [path for path in files if path.name != "slips.py"]  # mistakes about features, which none needs to have
    assert 0 < len(files) <= 5, files


def _triton(name: str) -> Kernel:
    return next(kernel for kernel in triton_kernels(interpreted=True) if kernel.name == name)


@pytest.mark.parametrize("name", ["flash@fused", "standard", "fair"])
@pytest.mark.parametrize(("own", "cast"), [({"output": FP32}, "o"), ({"operands": FP16}, "p_bar")])
def test_a_format_of_its_own_moves_its_casts_alone(name: str, own: dict[str, Format], cast: str) -> None:
    inputs, declaration = _inputs("random"), parse_declaration(name)
    (fmt,) = own.values()
    moved = replace(declaration, plan=replace(declaration.plan, **{cast: Cast(fmt)}))  # type: ignore[arg-type]
    o = run_declared(declaration, replace(inputs, formats=Formats.of(BF16, **own)), ARITHMETIC, False).o
    assert torch.equal(o, run_declared(moved, inputs, ARITHMETIC, False).o)
    assert torch.equal(o, o.bfloat16().float()) is (cast == "p_bar")


@pytest.mark.parametrize("own", [{"output": FP32}, {"operands": FP16}], ids=["output", "operands"])
def test_formats_of_its_own_are_asked_for(own: dict[str, object]) -> None:
    inputs = replace(_inputs("random"), formats=Formats.of(BF16, **own))  # type: ignore[arg-type]
    assert composed_kernel("flash@fused").refusal(inputs) is None
    assert CPU.kernel("sdpa_flash").refusal(inputs) == f"sdpa_flash takes no {MIXED_FORMATS.words}"
    assert _triton("triton_flash").refusal(inputs) == f"triton_flash takes no {MIXED_FORMATS.words}"


def test_a_v_of_8_bits_is_widened_where_the_plan_does_not_multiply_it() -> None:
    inputs = _inputs("fp8_ties")
    assert inputs.formats == Formats.of(BF16, v=FP8_E4M3)
    assert not inputs.required_features()
    for kernel in (composed_kernel("flash@fused"), CPU.kernel("sdpa_flash"), _triton("triton_flash")):
        assert kernel.refusal(inputs) is None


def test_a_kernel_that_multiplies_a_v_of_8_bits_is_not_for_another() -> None:
    kernel, message = _triton("triton_fp8"), "plan fused_fp8 multiplies a V in fp8_e4m3, not in bf16: round it first"
    assert kernel.refusal(_inputs("fp8_ties")) is None
    assert kernel.refusal(_inputs("tied_maxima[k=2]")) == message
    with pytest.raises(ValueError, match=message):
        kernel.compute(_inputs("tied_maxima[k=2]"), ARITHMETIC, False)
    unsuited = {name: _triton(name).unsuited(Formats.of(BF16)) for name in DECLARATIONS}
    assert {name for name, reason in unsuited.items() if reason} == {"triton_fp8", "triton_fp8_offset"}


def test_a_kernel_is_left_out_of_the_cells_whose_formats_it_is_not_for() -> None:
    if INTERPRETER.unavailable() is not None:
        pytest.skip("no interpreter")
    selected, _ = cells(Selection("interpreter", "triton_fp8,triton_flash"))
    calls = [(cell.kernel.name, cell.experiment.name) for cell in selected if isinstance(cell.experiment, OneCall)]
    default = {name for name, case in CASES.items() if not (case.on_request or case.needs)}
    assert {case for kernel, case in calls if kernel == "triton_fp8"} == set(EIGHT_BITS)
    assert {case for kernel, case in calls if kernel == "triton_flash"} == default | {TRAINED_SINK.name}
