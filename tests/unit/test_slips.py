"""A usual mistake of a backward pass is named by what it makes of gradients, and no sound kernel is."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import Tensor

from tiebreak.cases.case import JOINED
from tiebreak.cases.feature_cases import with_features
from tiebreak.defects.kernel import SOUND, Request, Switch
from tiebreak.defects.planted import DEFECTS, on, twin, users
from tiebreak.kernels.formats import BF16, Formats
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import Kernel
from tiebreak.kernels.reference import reference
from tiebreak.matrix.identification.attribution import slip_bits
from tiebreak.matrix.workbench import Settings, SharedBatch, Workbench
from tiebreak.reports.records.record import Record
from tiebreak.studies.cells import CASES, judged

Factor = Callable[[Request], float]


def times(dq: Factor | None = None, dk: Factor | None = None) -> Switch:
    """dQ and dK times a factor, in the place of the step that makes them all."""

    def gradients(sound: Switch, request: Request, do: Tensor, o: Tensor) -> list[Tensor]:
        factors = (dq, dk, None)
        made = zip(sound(request, do, o), factors, strict=True)
        return [(x.float() * factor(request)).to(x.dtype) if factor else x for x, factor in made]

    return gradients


def without_the_window(sound: Switch, request: Request, keys: slice) -> Tensor:
    ahead = torch.ones(request.queries, request.keys, dtype=torch.bool).triu(request.keys - request.queries + 1)
    scores: Tensor = sound(replace(request, hidden=ahead[None, None]), keys)
    return scores


def unmasked(sound: Switch, request: Request, keys: slice) -> Tensor:
    scores: Tensor = sound(replace(request, hidden=None), keys)
    return scores


#: By what the verdict says: the case, and the step that is replaced.
PLANTED: Mapping[str, tuple[str, Mapping[str, Switch]]] = {
    "the scale is missing in dQ": ("random_odd", {"gradients": times(dq=lambda request: 1 / request.factor)}),
    "the scale is missing in dQ, dK": ("random", {"gradients": times(*[lambda request: 1 / request.factor] * 2)}),
    "the scale is applied twice in dK": ("random_scaled", {"gradients": times(dk=lambda request: request.factor)}),
    "1 / scale is taken for the scale in dQ": ("random_wide", {"gradients": times(dq=lambda r: r.factor**-2)}),
    "the scale that is given is not taken in dQ, dK": (
        "random_scaled", {"gradients": times(*[lambda request: request.q.shape[-1] ** -0.5 / request.factor] * 2)}),
    "a factor ln 2 is left in dK": ("random", {"gradients": times(dk=lambda _: 0.6931)}),
    "everything is counted twice in dQ": ("random_grouped", {"gradients": times(dq=lambda _: 2.0)}),
    "the sign is wrong in dK": ("random_causal", {"gradients": times(dk=lambda _: -1.0)}),
    "the mean of a group of heads is taken for their sum in dK": (
        "random_grouped", {"gradients": times(dk=lambda request: 1 / request.groups)}),
    "delta is missing in dQ, dK": ("random", {"delta": lambda sound, do, o: torch.zeros_like(sound(do, o))}),
    "delta is added in dQ, dK": ("random_causal", {"delta": lambda sound, do, o: -sound(do, o)}),
    "the mask is not applied in dQ, dK, dV": ("random_causal", {"recomputed": unmasked}),
    "the window is not applied in dQ, dK, dV": ("random_causal+window=9", {"recomputed": without_the_window}),
}  # fmt: skip

BY_CASE: list[str] = sorted(PLANTED, key=lambda named: PLANTED[named][0])
ALIKE = {"the mask is not applied in dQ, dK, dV": ["the causal mask is not applied in dQ, dK, dV"]}


@cache
def _bench(heads: int) -> Workbench:
    return Workbench(Settings(seed=1, heads=heads))


def run(kernel: Kernel, case: str, heads: int = 16) -> Record:
    name, *words = case.split(JOINED)
    asked = with_features(CASES[name], words) if words else CASES[name]
    return judged(kernel, asked, backend=on(), bench=_bench(heads))


@pytest.mark.parametrize("named", BY_CASE)
def test_a_mistake_of_the_backward_pass_is_named_and_its_sound_twin_is_not(named: str) -> None:
    case, switches = PLANTED[named]
    wrong, sound = run(users(partial(SOUND["tiled"], **switches), "wrong"), case), run(twin("tiled"), case)
    assert wrong.passed("gradients") is False
    assert list(wrong.evidence["slips"]) == [named, *ALIKE.get(named, ())]
    assert min(wrong.evidence["slips"].values()) > 0.99
    assert sound.passed("gradients")
    assert not {"slips", "off"} & sound.evidence.keys()


def test_a_mistake_that_is_no_usual_one_has_no_name() -> None:
    record = run(users(partial(SOUND["tiled"], gradients=times(dq=lambda _: 1.3)), "wrong"), "random")
    assert record.passed("gradients") is False
    assert "slips" not in record.evidence


def test_which_key_head_is_read_is_told_by_all_heads_of_an_entry() -> None:
    """Of 64 heads, the first of each entry alone have another number of key heads."""
    defect = DEFECTS["heads_tiled"]
    assert defect.slip in run(defect.kernel, defect.case, heads=64).evidence["slips"]


@pytest.mark.parametrize("capped", [False, True])
def test_a_bias_on_the_other_side_of_the_soft_cap_is_named(capped: bool) -> None:
    """ONNX's order is before it, where calls add the bias to capped scores unless a kernel takes capped_bias."""

    def in_onnx_order(sound: Switch, request: Request, keys: slice) -> Tensor:
        s: Tensor = sound(replace(request, softcap=0.0), keys)
        return request.softcap * torch.tanh(s / request.softcap) if request.softcap else s

    rng = torch.Generator().manual_seed(0)
    q, k, v, do, bias = (2 * torch.randn(1, 4, 64, 64, generator=rng).bfloat16().float() for _ in range(5))
    inputs = AttentionInputs(q, k, v, do, Formats.of(BF16), softcap=2.0, bias=bias, capped_bias=capped)
    batch, told = SharedBatch(inputs, reference(inputs)), {}
    for name, switches in {"before": {"scores": in_onnx_order}, "after": {}}.items():
        o = on().run(users(partial(SOUND["tiled"], **switches), name), inputs, gradients=False).o
        told[name] = list(slip_bits(o, batch, on()))
    wrong, sound = ("after", "before") if capped else ("before", "after")
    assert told == {wrong: [f"the bias is added {wrong} the soft cap"], sound: []}
