"""Features added to cases by a product, and as kernels in service have them: what each adds, and who is asked."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from numpy.random import Generator, Philox
from torch import Tensor

from tiebreak.backends.backend import CPU, EMULATION
from tiebreak.cases.case import Case, Draw, Shape, normal_numbers
from tiebreak.cases.errors import measure
from tiebreak.cases.feature_cases import EVERY, VARIED, added_features, with_features
from tiebreak.kernels.external.kernels import users_kernel
from tiebreak.kernels.external.options import KernelOptions
from tiebreak.kernels.features import (
    ALIBI,
    CAUSAL,
    DESCALE,
    HIDDEN_NAN,
    KEY_PADDING,
    LENGTHS,
    OBLONG_CAUSAL,
    WINDOW,
    Feature,
)
from tiebreak.kernels.formats import BF16, Formats
from tiebreak.kernels.reference import products, reference
from tiebreak.kernels.roster import composed_kernel
from tiebreak.matrix.experiment import SelectionContext
from tiebreak.matrix.experiments.call import OneCall
from tiebreak.matrix.options import command
from tiebreak.matrix.questions.usage import UNSAID
from tiebreak.matrix.selection import Selection, cells, check_usable
from tiebreak.matrix.workbench import Settings, SharedBatch, Workbench
from tiebreak.reports.errors import UsageError

CASES = {case.name: case for case in EVERY}
TIED = CASES["tied_maxima[k=2]"]
WORDS = [
    "value_dim",
    "padding",
    "lengths",
    "window",
    "block_mask",
    "bias",
    "alibi",
    "softcap",
    "sink",
    "descale",
    "pages",
]


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("name", ["tied_maxima[k=2]", "random_grouped", "random_causal", "padded", "wholly_masked"])
def test_a_feature_comes_into_any_case(name: str, word: str) -> None:
    (feature,) = added_features([word])
    before, inputs = CASES[name].make(1, 0, 32, BF16), with_features(CASES[name], [word]).make(1, 0, 32, BF16)
    assert {*before.required_features(), feature} == set(inputs.required_features())
    if feature not in (LENGTHS, DESCALE):
        assert torch.equal(inputs.q, before.q), "drawn from the same stream"


@pytest.mark.parametrize("words", [*([word] for word in WORDS), ["window", "sink"], ["softcap", "pages"]], ids="+".join)
def test_a_claim_that_stays_holds(words: list[str]) -> None:
    case = with_features(TIED, words)
    if {KEY_PADDING, LENGTHS, DESCALE, ALIBI} & set(added_features(words)):
        assert case.claims == ()
        return
    inputs = case.make(1, 0, 256, BF16)
    batch = SharedBatch(inputs, reference(inputs))
    for kernel in map(composed_kernel, ("flash@paper", "flash@fused", "standard")):
        assert kernel.declaration is not None
        claim, before = case.claim_about(kernel.declaration), TIED.claim_about(kernel.declaration)
        assert claim is not None
        assert before is not None
        assert claim == replace(before, rules=claim.rules)
        o = EMULATION.run(kernel, inputs, gradients=False).o
        assert claim.expectation.passed(measure(o, None, inputs, batch.ref, torch.ones(())))


def test_a_window_hides_the_weakest_keys_and_none_of_the_maxima() -> None:
    inputs = with_features(TIED, ["window"]).make(1, 0, 32, BF16)
    hidden = inputs.hidden()
    assert hidden is not None
    s = products(inputs)
    top = s == s.amax(-1, keepdim=True)
    assert bool((top.sum(-1) == 2).all())
    assert not bool((top & hidden).any())
    assert 29 / 128 <= hidden.double().mean() <= 32 / 128


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ("wind", "--features: unknown feature 'wind': known are value_dim, padding, lengths"),
        ("window,sinc*", "--features: unknown feature 'sinc*'"),
        (",", "--features: nothing to add"),
        ("bias=3", "--features: bias=3: bias takes no value"),
        ("sink=low", "--features: sink=low: expected sink=NUMBER, how far below the row's maximum"),
        ("window=-3", "--features: no_tail+window=-3: window (-3, None): its sides are 0 or more keys"),
        ("pages=0", "--features: no_tail+pages=0: page size 0: expected 1 key or more"),
        ("softcap=-1", "--features: no_tail+softcap=-1: softcap -1.0: expected a positive number"),
    ],
)
def test_what_makes_no_sense_is_one_line(features: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        check_usable(cells(Selection("emulation", "standard", "no_tail", features=features))[0])


def test_a_feature_that_the_kernel_does_not_take_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def mine(q, k, v, *, window_size=(-1, -1)):\n    return q\n")
    target = (f"{tmp_path / 'mine.py'}:mine",)
    with pytest.raises(UsageError, match=r"--features window\+sink: mine takes no learned sink"):
        cells(Selection(kernel=target, cases="no_tail", features="window,window+sink"))
    (chosen,) = cells(Selection(kernel=target, cases="no_tail", features="window=9+value_dim"))[0]
    assert "--cases no_tail --features window=9+value_dim " in command(chosen, Settings())


def test_each_case_is_run_with_each_feature_and_a_skip_says_why() -> None:
    names = "tied_maxima[k=2],window_cuts_tie"
    chosen, _ = cells(Selection("cpu", "sdpa_flash,flash@fused", names, features="window,window+sink,s*"))
    bench = Workbench(Settings(heads=16))
    reasons = {f"{cell.kernel.name} {cell.experiment.name}": cell.experiment.refusal(cell, bench) for cell in chosen}
    no_sink, no_cap, present = (
        "sdpa_flash takes no learned sink",
        "sdpa_flash takes no soft cap of the scores",
        "window_cuts_tie has window already",
    )
    assert {name: reason for name, reason in reasons.items() if reason is not None} == {
        **{f"sdpa_flash {case}+{added}": no_sink for case in names.split(",") for added in ("window+sink", "sink")},
        **{f"sdpa_flash {case}+softcap": no_cap for case in names.split(",")},
        **{f"{kernel} window_cuts_tie+window": present for kernel in ("sdpa_flash", "flash@fused")},
    }
    assert len(reasons) == 2 * 2 * 4


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    raise NotImplementedError


def masked(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    raise NotImplementedError


def windowed(q: Tensor, k: Tensor, v: Tensor, window_size: object = (-1, -1), sinks: Tensor | None = None) -> Tensor:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("function", "asked"),
    [
        (plain, set()),
        (masked, set()),  # one mask hides scores, whatever they are hidden for
        (windowed, {"window", "sink", "window.sink", "window.gqa", "sink.gqa"}),
    ],
)
def test_a_users_kernel_is_asked_for_the_features_that_it_has_a_parameter_for(
    function: Callable[..., Tensor], asked: set[str]
) -> None:
    pairs = [(CPU, users_kernel("mine", function, KernelOptions())), (CPU, CPU.kernel("flash@fused"))]
    context = SelectionContext(pairs, [CPU], BF16, kernels_named=True)
    chosen = [
        call.name
        for call in map(OneCall, (case for case in EVERY if case.name.startswith("served[")))
        for _ in call.pairs(context)
    ]
    assert {name[len("served[") : -1] for name in chosen} == asked
    assert len(chosen) == len(asked)


@pytest.mark.parametrize("feature", [each for each in VARIED if each not in UNSAID], ids=lambda feature: feature.taken)
def test_no_two_calls_after_each_other_have_the_same_parameter(feature: Feature) -> None:
    draws = [Draw(Generator(Philox(index)), Formats.of(BF16), 16, index) for index in range(3)]
    plain = normal_numbers(draws[2], Shape(128, 128))
    asked = [repr(vars(VARIED[feature](plain, draw)) | dict.fromkeys(("q", "k", "v", "do"))) for draw in draws[:2]]
    assert asked[0] != asked[1]


@pytest.mark.parametrize("case", [case for case in CASES.values() if case.needs], ids=lambda case: case.name)
def test_features_in_service_have_parameters_of_every_head_and_sequence(case: Case) -> None:
    inputs = case.make(1, 0, 64, BF16)
    unsaid = {HIDDEN_NAN, CAUSAL, OBLONG_CAUSAL}
    assert set(inputs.required_features()) | unsaid == case.needs | unsaid
    batch, heads = inputs.q.shape[:2]
    if inputs.sink is not None:
        assert len(set(inputs.sink.tolist())) > heads // 2
    if inputs.bias is not None:
        assert len({tuple(row) for row in inputs.bias.flatten(0, 2).tolist()}) == batch * heads * inputs.q.shape[2]
    if inputs.block_table is not None:
        assert len({tuple(row) for row in inputs.block_table.tolist()}) == batch
    for factors in (inputs.k_descale, inputs.v_descale):
        assert factors is None or len(set(factors.flatten().tolist())) == factors.numel()
    if inputs.key_padding is not None:
        assert len(set(inputs.key_padding.sum(1).tolist())) == batch
    if inputs.lengths is not None:
        begins = torch.tensor(inputs.lengths[1])
        assert len(set(begins.diff().tolist())) == len(begins) - 1
    if inputs.window != (None, None) and inputs.q.shape[2] == inputs.k.shape[2]:
        hidden = inputs.masks()[WINDOW][0, 0]
        edges = hidden[:, 1:] != hidden[:, :-1]
        assert all(bool(edges[:, at : at + 64].any()) for at in range(0, edges.shape[1], 64))
        assert inputs.causal or bool(hidden.triu(1).any())
