"""What is assumed of a card that is not here."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver

from tiebreak.backends.emulation.accumulators import MATMULS
from tiebreak.backends.emulation.tensor_cores import TARGETS, core_of, tensor_core_matmul
from tiebreak.backends.interpreter import INTERPRETER
from tiebreak.backends.interpreter.assumptions import CARDS, EXACT
from tiebreak.backends.interpreter.session import interpreting
from tiebreak.backends.registry import BACKENDS
from tiebreak.kernels.kernel import CannotRunError
from tiebreak.kernels.plans import Accumulator
from tiebreak.matrix.selection import Selection, cells
from tiebreak.reports.errors import UsageError
from tiebreak.reports.records.record import Run

Launch = Callable[..., None]
N = 64
KNOB, OVERRIDE = "TRITON_DEFAULT_FP_FUSION", "TRITON_FORCE_DISABLE_FP_FUSION"
DEFAULT = f"Triton {triton.__version__}'s default"


def _random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _accumulated(A: Any, B: Any, C: Any, D: Any, N: tl.constexpr) -> None:
    index = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    a, b, c = tl.load(A + index), tl.load(B + index), tl.load(C + index)
    tl.store(D + index, tl.dot(a, b, c))
    tl.store(D + N * N + index, c + tl.dot(a, b))


@pytest.mark.parametrize(
    ("card", "dtype", "name"),
    [
        ("sm_80", torch.bfloat16, "bf16"),
        ("sm_90", torch.bfloat16, "bf16"),
        ("sm_90", torch.float8_e4m3fn, "fp8_e4m3"),
        ("sm_75", torch.float16, "fp16"),
        ("gfx942", torch.bfloat16, "bf16"),
        ("gfx942", torch.float8_e4m3fn, "fp16"),
    ],
)
def test_products_add_up_as_on_the_cards_tensor_cores_from_what_is_there(
    card: str, dtype: torch.dtype, name: str, launch: Launch
) -> None:
    """A sum written behind the product is added on the tensor cores too: Triton makes one of both."""
    a, b, c = _random(N, N).to(dtype), _random(N, N, seed=2).to(dtype), _random(N, N, seed=3)
    sums = torch.zeros(2, N, N)
    launch(_accumulated, a, b, c, sums, N=N, card=CARDS[card])
    expected = tensor_core_matmul(a.float(), b.float(), c, core_of(card, name))
    assert torch.equal(sums[0], expected)
    assert torch.equal(sums[1], expected)
    assert not torch.equal(sums[0], (a.double() @ b.double()).float() + c)


def test_fp8_goes_to_fp32_as_often_as_the_kernel_asks(launch: Launch) -> None:
    def promoted(A: Any, B: Any, C: Any, N: tl.constexpr, MOST: tl.constexpr) -> None:
        index = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
        c = tl.zeros([N, N], tl.float32)
        tl.store(C + index, tl.dot(tl.load(A + index), tl.load(B + index), c, max_num_imprecise_acc=MOST))

    a, b = (_random(N, N, seed=seed).to(torch.float8_e4m3fn) for seed in (4, 5))
    often, seldom = torch.zeros(2, N, N)
    launch(promoted, a, b, often, N=N, MOST=32, card=CARDS["sm_90"])
    launch(promoted, a, b, seldom, N=N, MOST=64, card=CARDS["sm_90"])
    exact = a.double() @ b.double()
    assert (often - exact).abs().mean() < 0.7 * (seldom - exact).abs().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lanes_add_their_columns_up_in_turn_where_triton_does(dtype: torch.dtype, launch: Launch) -> None:
    def summed(A: Any, B: Any, C: Any, N: tl.constexpr) -> None:
        index = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
        product = tl.dot(tl.load(A + index), tl.load(A + index))
        tl.store(C + tl.arange(0, N), tl.sum(tl.load(B + index) + (product * 0).to(B.dtype.element_ty), 1))

    a, b, sums = _random(N, N).bfloat16(), _random(N, N).to(dtype), torch.zeros(N)
    launch(summed, a, b, sums, N=N, card=replace(CARDS["sm_80"], pairs=(2, 1)))
    lanes = []
    for lane in range(4):
        first, *others = (b[:, at] for at in range(N) if at % 8 // 2 == lane)
        lanes.append(functools.reduce(torch.add, others, first))
    assert torch.equal(sums, ((lanes[0] + lanes[2]) + (lanes[1] + lanes[3])).float())


def test_a_product_that_the_card_lacks_is_refused_by_its_name(launch: Launch) -> None:
    a = _random(N, N).to(torch.float8_e4m3fn)
    with pytest.raises(CannotRunError, match="sm_80 doesn't multiply fp8_e4m3 by fp8_e4m3"):
        launch(_accumulated, a, a, torch.zeros(N, N), torch.zeros(2, N, N), N=N, card=CARDS["sm_80"])


def test_fp32_is_multiplied_one_by_one_and_as_tf32_on_the_cores(launch: Launch) -> None:
    def multiplied(A: Any, B: Any, C: Any, N: tl.constexpr, HOW: tl.constexpr) -> None:
        index = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
        tl.store(C + index, tl.dot(tl.load(A + index), tl.load(B + index), input_precision=HOW))

    a, b = _random(N, N, seed=6), _random(N, N, seed=7)
    plain, cut = torch.zeros(2, N, N)
    launch(multiplied, a, b, plain, N=N, HOW="ieee", card=CARDS["sm_80"])
    launch(multiplied, a, b, cut, N=N, HOW="tf32", card=CARDS["sm_80"])
    assert torch.equal(plain, MATMULS[Accumulator.SEQUENTIAL](a, b))
    assert torch.equal(cut, tensor_core_matmul(a, b, torch.zeros(()), core_of("sm_80", "tf32")))


def _functions(X: Any, Y: Any, Z: Any, N: tl.constexpr) -> None:
    row = tl.arange(0, N)
    x, y = tl.load(X + row), tl.load(Y + row)
    tl.store(Z + row, tl.exp(x))
    tl.store(Z + N + row, tl.exp2(x))
    tl.store(Z + 2 * N + row, x / y)
    tl.store(Z + 3 * N + row, tl.div_rn(x, y))


@pytest.mark.parametrize("card", ["exact", "sm_90", "gfx942"])
def test_the_exponential_and_the_division_are_the_cards(card: str, launch: Launch) -> None:
    x, y = _random(N, seed=8) * 40, _random(N, seed=9)
    x[:2] = torch.tensor([-126.5, -95.0])
    results = torch.zeros(4, N)
    launch(_functions, x, y, results, N=N, card=CARDS[card])
    exponentials = torch.stack([x.double().exp(), x.double().exp2()]).float()
    if card != "exact":
        exponentials[0] = (x * 1.4426950408889634).double().exp2().float()
        exponentials[exponentials < 2.0**-126] = 0.0
    assert torch.equal(results[:2], exponentials)
    assert torch.equal(results[2], x * (1 / y) if card == "sm_90" else x / y)
    assert torch.equal(results[3], x / y)


def _shifted(S: Any, M: Any, Y: Any, c: Any, N: tl.constexpr) -> None:
    row = tl.arange(0, N)
    tl.store(Y + row, tl.load(S + row) * c - tl.load(M + row))


def _contracts(card: str, **options: object) -> tuple[bool, set[str]]:
    """Whether an interpreted launch takes a product unrounded into a sum, and what is said of it."""
    s, m, y = _random(N, seed=10) * 60, _random(N, seed=11), torch.zeros(N)
    with interpreting(CARDS[card]) as told:
        triton.jit(_shifted)[(1,)](s, m, y, 0.18033688, N=N, **options)
    factor = torch.tensor(0.18033688)
    contracted, plain = (s.double() * factor.double() - m.double()).float(), s * factor - m
    assert not torch.equal(contracted, plain)
    assert torch.equal(y, contracted) != torch.equal(y, plain)
    return torch.equal(y, contracted), told


@pytest.mark.parametrize("card", ["exact", "sm_80", "sm_100", "gfx942"])
def test_contraction_is_as_the_audit_finds_it(card: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KNOB, "1")
    on, told = _contracts(card)
    assert on == (card in ("sm_80", "sm_100"))
    assert told == ({f"contraction on, {KNOB}"} if on else set())


@pytest.mark.parametrize(
    ("default", "environment", "asked", "said"),
    [
        (True, {}, None, f"on, {DEFAULT}"),
        (False, {}, None, f"off, {DEFAULT}"),  # as Triton is from 3.10 on
        (True, {KNOB: "0"}, None, f"off, {KNOB}"),
        (False, {KNOB: "1"}, None, f"on, {KNOB}"),
        (False, {}, True, "on, asked by the launch"),
        (True, {KNOB: "1"}, False, "off, asked by the launch"),
        pytest.param(
            True, {OVERRIDE: "1"}, True, f"off, {OVERRIDE}",
            marks=pytest.mark.skipif(
                not hasattr(knobs.language, "force_disable_fp_fusion"), reason="Triton before 3.9 has no such switch"
            ),
        ),
    ],
)  # fmt: skip
def test_triton_the_environment_and_the_launch_decide_whether_products_are_contracted(
    default: bool, environment: dict[str, str], asked: bool | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (KNOB, OVERRIDE):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(vars(type(knobs.language))["default_fp_fusion"], "default", default)
    options = {} if asked is None else {"enable_fp_fusion": asked}
    assert _contracts("sm_80", **options) == (said.startswith("on"), {f"contraction {said}"})
    if asked is None:
        card = INTERPRETER.assuming("sm_80")
        assert card.describe()["contraction"] == said
        assert f"contraction {said}" in str(card.notice())


def test_every_known_core_but_voltas_is_a_card_that_a_kernel_sees() -> None:
    assert set(CARDS) == {*TARGETS, "exact"} - {"sm_70"}
    for name, (backend, architecture) in {"sm_90": ("cuda", 90), "gfx942": ("hip", "gfx942")}.items():
        with interpreting(CARDS[name]):
            target = driver.active.get_current_target()
        assert (target.backend, target.arch) == (backend, architecture)


def test_the_command_line_names_a_card_and_the_record_says_what_was_assumed() -> None:
    selected, _ = cells(Selection("interpreter", "triton_flash", "no_tail", card="sm_90"))
    (backend,) = {cell.backend for cell in selected}
    assert backend == replace(INTERPRETER, assumed=CARDS["sm_90"])
    assert backend.options == ("--as", "sm_90")
    described = backend.describe()
    assert described["as"] == "sm_90"
    assert "nothing ran on a GPU" in str(backend.notice())
    text = Run(described, {}, records=()).backend_text("interpreter")
    assert text == "interpreter as sm_90 (assumed; nothing ran on a GPU)"
    assert Run(INTERPRETER.describe(), {}, records=()).backend_text("interpreter") == "interpreter"
    assert "nothing contracted" in EXACT.about


def test_a_plan_rests_on_bits_of_what_computed_and_on_an_assumption_where_that_is_one() -> None:
    assert INTERPRETER.assuming("sm_90").evidence == "bits in the interpreter, as sm_90 is assumed to round"
    assert [BACKENDS[name].evidence for name in ("cpu", "interpreter", "cuda")] == [
        "bits on this machine", "bits in the interpreter", "bits on this GPU",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "card", "message"),
    [
        ("interpreter", "sm_42", r"^--as sm_42: unknown; the cards are exact, sm_75, "),
        ("cpu", "sm_90", r"^--as sm_90: only --backend interpreter and ptx compute as a card that is not here"),
    ],
)
def test_an_unknown_card_and_one_without_the_interpreter_are_refused(backend: str, card: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cells(Selection(backend, card=card))
