"""The shapes of calls: the smallest inputs of public reports have their right values, and wrong shapes are named."""

import math
from collections.abc import Mapping
from functools import partial
from itertools import combinations, product
from typing import Any

import pytest
import torch
from numpy.random import Generator, Philox
from torch import Tensor

from tiebreak.backends.backend import EMULATION
from tiebreak.cases.case import Draw
from tiebreak.cases.shapes import ShapedCall, covering, dimensions, reported, separating
from tiebreak.defects.kernel import SOUND
from tiebreak.defects.planted import on, twin, users
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.external.call import CONTIGUOUS, Places
from tiebreak.kernels.external.kernels import UserKernel
from tiebreak.kernels.formats import BF16, Formats
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import composed
from tiebreak.kernels.reference import reference, reference_gradients
from tiebreak.matrix.questions import shapes as questions
from tiebreak.matrix.questions.placements import transposed
from tiebreak.matrix.questions.shapes import QUESTIONS
from tiebreak.reports import cli
from tiebreak.studies.cells import judged
from tiebreak.studies.power import EXPERIMENTS

pytestmark = pytest.mark.quick


def _call(q: Tensor, k: Tensor, v: Tensor, **asked: Any) -> AttentionInputs:
    do = torch.zeros(*q.shape[:3], v.shape[-1])
    do[:] = torch.arange(v.shape[-1])
    return AttentionInputs(q, k, v, do, Formats.of(BF16), **asked)


def _keys(*values: tuple[int, float]) -> Tensor:
    """V of one head and one column, of runs of equal numbers."""
    return torch.cat([torch.full((1, 1, number, 1), value) for number, value in values], 2)


def _zeros(keys: int) -> Tensor:
    return torch.zeros(1, 1, keys, 1)


ONE = torch.ones(1, 1, 1, 1)
PARTS = _call(8 * ONE, 8 * _keys((128, 0.0), (1, 1.0)), _keys((128, -1.0), (1, 1.0)), softmax_scale=0.1)
MASKED = _call(_zeros(1), _zeros(513), _keys((1, 1.0), (511, 0.0), (1, -1.0)),
               key_padding=(torch.arange(513) < 1)[None])  # fmt: skip
PAGED = _call(_zeros(1), _zeros(129), _keys((128, 0.0), (1, 129.0)),
              block_table=torch.tensor([[0]]), page_size=256, pool_pages=1)  # fmt: skip
MANY = torch.zeros(65536, 1, 1, 1)
TWICE, TWO_KEYS = torch.zeros(2, 1, 1, 1), torch.zeros(2, 1, 2, 1)
OF_TWO = _keys((1, 1.0), (1, 3.0)).repeat(2, 1, 1, 1)
#: The smallest inputs that show a report, and O of the last row.
SMALLEST: Mapping[str, tuple[AttentionInputs, float]] = {
    "TensorRT-LLM 19112": (PARTS, 0.6492),
    "tpu-inference 1954": (
        _call(_zeros(1), _zeros(513), _keys((512, 5.0), (1, 3.0)), causal=True, window=(0, 0)), 3.0),
    "vllm-ascend 15503": (MASKED, 1.0),
    "SageAttention 386": (_call(_zeros(1), _zeros(2), _keys((1, 1.0), (1, 3.0))), 2.0),
    "flashinfer 4347": (PAGED, 1.0),
    "larql 237": (_call(8 * ONE, 8 * ONE, ONE, softcap=1.0), 1.0),
    "a bias of one head": (
        _call(TWICE, TWO_KEYS, OF_TWO, bias=torch.tensor([[0.0, 0.0], [0.0, math.log(3)]])[:, None, None]), 2.5),
    "slopes of the second entry": (_call(TWICE, TWO_KEYS, OF_TWO, alibi=torch.tensor([[0.0], [math.log(3)]])), 2.5),
    "a sequence without keys": (_call(_zeros(2), ONE, ONE, lengths=((0, 1, 2), (0, 1, 1))), 0.0),
    "flashinfer 3125": (_call(MANY, MANY, MANY + 1), 1.0),
    "pytorch 196678": (_call(-500 * ONE, torch.ones(1, 1, 192, 1), _keys((1, 1.0), (191, 3.0))), 574 / 192),
    "a causal mask of the longest sequence": (
        _call(_zeros(3), _zeros(4), _keys((3, 1.0), (1, 3.0)), causal=True, lengths=((0, 2, 3), (0, 2, 4))), 2.0),
}  # fmt: skip


@pytest.mark.parametrize("report", SMALLEST)
def test_the_smallest_input_of_a_report_has_its_right_value(report: str) -> None:
    inputs, right = SMALLEST[report]
    last = inputs.part(slice(-1, None))
    emulated = EMULATION.run(composed("tiled", parse_declaration("flash@fused,tile=32")), inputs, gradients=False).o
    for o, within in ((reference(last).o, 1e-3), (emulated, 4e-3)):
        assert o[-1, -1, -1, -1].item() == pytest.approx(right, rel=within)


def _of_a_user(inputs: AttentionInputs, places: Places) -> Tensor:
    kernel = twin("tiled")
    assert isinstance(kernel, UserKernel)
    call = kernel.caller.call(inputs)
    return call.restored(call.forward(call.placed(places, gradients=False)))


def test_views_of_exchanged_heads_and_rows_are_their_numbers() -> None:
    """flash-attention 2667."""
    inputs = _call(*torch.randn(3, 1, 2, 2, 256, generator=torch.Generator().manual_seed(0)).bfloat16().float())
    assert torch.equal(_of_a_user(inputs, Places.all(transposed)), _of_a_user(inputs, CONTIGUOUS))


def test_keys_2_to_the_31_elements_apart_are_read() -> None:
    """SageAttention 386."""

    def apart(x: Tensor) -> Tensor:
        return x.new_empty(2**31 + 1).as_strided((1, 1, 2, 1), (0, 0, 2**31, 1)).copy_(x)

    assert _of_a_user(_call(_zeros(1), _zeros(2), _keys((1, 1.0), (1, 3.0))), Places(v=apart)).item() == 2.0


def test_of_one_key_the_gradient_of_v_is_do_though_v_is_narrower() -> None:
    """flash-attention 2896."""
    inputs = _call(torch.ones(1, 1, 1, 128), torch.ones(1, 1, 1, 128), torch.ones(1, 1, 1, 96))
    _, _, dv = reference_gradients(inputs, reference(inputs))[:3]
    assert torch.equal(dv.float(), inputs.do)


def test_every_two_sizes_meet_in_few_calls() -> None:
    """But for packed sequences, which are a batch of 1 whatever was chosen."""
    values = {**dimensions(), "parameter": ["", "sink", "window", "lengths"]}
    calls = list(covering(values, {(("batch", 3), ("parameter", "lengths"))}))
    for a, b in combinations(values, 2):
        never = {(3, "lengths")} if (a, b) == ("batch", "parameter") else set()
        assert {(call[a], call[b]) for call in calls} == set(product(values[a], values[b])) - never
    assert len(calls) <= 2 * 4 * 4
    made = [questions._shaped(call) for call in calls]
    assert [{name: getattr(call, name) for name in values} for call in made] == calls, "a call is not what was chosen"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda call: call["d"] == 256, "d = 256"),
        (lambda call: call["keys"] > 129, "keys >= 321"),
        (lambda call: call["parameter"] == "sink", "parameter = sink"),
        (lambda call: call["batch"] == 3 and call["keys"] > 129, "batch = 3 and keys >= 321"),
        (lambda _: True, ""),
        (lambda _: False, ""),
        (lambda call: (call["d"] + call["keys"]) % 3 == 0, ""),
    ],
)
def test_the_simplest_condition_that_separates_wrong_calls_is_found(wrong: Any, words: str) -> None:
    calls = list(covering({**dimensions(), "parameter": ["", "sink", "window"]}))
    assert separating([(call, wrong(call)) for call in calls]) == words


def test_every_reported_call_is_asked_and_says_who_reported_it() -> None:
    asked = {"log_sum_exp", *(question.name for question in QUESTIONS)} - {"shapes", "far_apart"}
    assert {call.asks for call in reported()} == asked
    assert all(call.source for call in reported())
    words = [(call.asks, call.words) for call in reported()]
    assert len(set(words)) == len(words)


def test_words_of_a_call_are_the_fields_that_are_not_as_usual() -> None:
    assert ShapedCall("asks", "source", d=96, parameter="sink").words == "d=96, parameter=sink"


def test_shapes_are_listed_with_who_reported_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "shapes"]) == 0
    printed = capsys.readouterr().out
    for call in reported():
        assert call.words in printed
        assert call.source in printed


def _refusing(sound: Any, request: Any) -> Any:
    if request.keys > 1000:
        raise NotImplementedError("too many keys")
    return sound(request)


@pytest.mark.parametrize(
    ("switches", "outcome"),
    [
        ({"prepared": _refusing}, "measured"),
        ({"prepared": _refusing, "dk": lambda sound, request, ds: 0.0 * sound(request, ds)}, "failed"),
    ],
)
def test_a_call_that_is_refused_hides_no_other_and_a_gradient_wrong_everywhere_is_wrong_here(
    switches: Mapping[str, Any], outcome: str
) -> None:
    kernel = users(partial(SOUND["tiled"], **switches), "mine")
    # At this seed dQ of one row nearly cancels in one head: it errs by 9 %, its emulation by chance far less.
    record = judged(kernel, EXPERIMENTS["shapes"], seed=92, backend=on())
    assert record.outcome == outcome, record.reasons


def test_entries_of_a_large_batch_are_not_those_a_power_of_two_before() -> None:
    """They repeat, since a draw of all takes seconds; an index of too few bits comes to an entry so far away."""
    call = next(call for call in reported() if call.batch == 65_536)
    q = call.inputs(Draw(Generator(Philox(1)), Formats.of(BF16), call.heads), 8).q[:, 0, 0]
    assert len(q) == call.batch
    assert all((q[2**bits :] != q[: -(2**bits)]).any(-1).all() for bits in range(16))
