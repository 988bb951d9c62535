"""What inputs ask of a kernel, what a kernel takes, and what follows from the two."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tiebreak.backends.registry import BACKENDS
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.external import external_kernel
from tiebreak.kernels.features import (
    BLIND_ROWS,
    CAUSAL,
    FEATURES,
    GROUPED,
    KEY_PADDING,
    OBLONG_CAUSAL,
    OWN_SCALE,
    Feature,
)
from tiebreak.kernels.formats import BF16
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import Kernel

ROOT = Path(__file__).parents[2]
CASES = {case.name: case for case in SCRIPTED}
WINDOW = Feature("window", "window of keys")  # stands for a feature that is added one day


class Windowed(AttentionInputs):
    """Inputs that ask for what no kernel has heard of."""

    def asks(self) -> tuple[Feature, ...]:
        """A window too."""
        return (*super().asks(), WINDOW)


def _inputs(case: str) -> AttentionInputs:
    return CASES[case].make(1, 0, 16, BF16)


def _queries(inputs: AttentionInputs, queries: int) -> AttentionInputs:
    return replace(inputs, q=inputs.q[:, :, :queries], do=inputs.do[:, :, :queries])


def _attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    raise AssertionError("a kernel is asked first")


def _nothing_taken(inputs: AttentionInputs, arithmetic: Arithmetic, gradients: bool) -> AttentionOutput:
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
    assert inputs.asks() == words


def test_a_feature_that_no_kernel_has_heard_of_is_refused_by_every_kernel() -> None:
    plain = _inputs("random")
    inputs = Windowed(plain.q, plain.k, plain.v, plain.do, plain.formats)
    reasons = {kernel.name: kernel.refusal(inputs) for kernel in _kernels()}
    assert reasons == {name: f"{name} takes no window of keys" for name in reasons}


@pytest.mark.parametrize("case", ["random_grouped", "random_causal", "padded", "wholly_masked"])
def test_a_kernel_that_says_nothing_of_a_feature_is_refused_it(case: str) -> None:
    inputs = _inputs(case)
    reason = Kernel("mine", _nothing_taken, None).refusal(inputs)
    assert reason == "mine takes no " + " and no ".join(feature.words for feature in inputs.asks())


def test_what_a_kernel_takes_is_asked_before_what_it_lacks() -> None:
    kernel = Kernel(
        "mine", _nothing_taken, None, takes=frozenset({CAUSAL}), missing_requirement=lambda inputs: "no such card"
    )
    assert kernel.refusal(_inputs("padded")) == "mine takes no key padding mask"
    assert kernel.refusal(_inputs("random_causal")) == "no such card"
    assert replace(kernel, missing_requirement=lambda inputs: None).refusal(_inputs("random_causal")) is None


def test_every_kernel_that_takes_a_feature_takes_a_known_one() -> None:
    words = set(FEATURES)
    assert len({feature.name for feature in words}) == len({feature.words for feature in words}) == len(words)
    assert all(kernel.takes <= words for kernel in _kernels())


@pytest.mark.parametrize("word", ["block_mask", "descale"])  # one hides scores, the other has an arithmetic of its own
def test_a_feature_costs_five_files(word: str) -> None:
    rooms = ("kernels", "backends", "cases", "reports", "tests/matrix", "tests/programs")
    files = [path for room in rooms for path in (ROOT / room).rglob("*.py") if word in path.read_text("utf-8").lower()]
    files = [path for path in files if path.name != "slips.py"]  # mistakes about features, which none needs to have
    assert 0 < len(files) <= 5, files
