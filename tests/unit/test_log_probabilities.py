"""A pair through a model: figures derived by hand, who is read beside whom, and the cells that keep it in records."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from tiebreak.backends.backend import CPU, EMULATION, Backend
from tiebreak.cases.gpt2 import fixture
from tiebreak.cases.gpt2.attention import HeadKernel
from tiebreak.cases.gpt2.fixture import Fixture, Read, Way
from tiebreak.kernels.formats import BF16, FP16
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import CannotRunError, Kernel
from tiebreak.matrix.experiments.log_probabilities import KIND
from tiebreak.matrix.pairs import Side
from tiebreak.matrix.pairs.through_model import OwnModel, SuiteModel, difference, own_model, through_model
from tiebreak.matrix.selection import Selection, cells
from tiebreak.matrix.workbench import Settings, Workbench
from tiebreak.reports.errors import UsageError
from tiebreak.reports.pairs.log_probabilities import EXACT, FLOOR, MEASURES, PAIR, WAYS, figures, number, parts
from tiebreak.reports.records.decode import encode
from tiebreak.reports.records.record import FAILED, MEASURED, Estimate, NumbersRecord
from tiebreak.reports.tables import grids
from tiebreak.studies.cells import judged

VOCABULARY = 5


TOKENS = torch.arange(2 * 9).view(2, 9) % VOCABULARY


class Bare(nn.Module):
    """Logits that are attention's O."""

    def __init__(self, dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(VOCABULARY, VOCABULARY, dtype=dtype), dropout

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)[:, None]
        return scaled_dot_product_attention(x, x, x, is_causal=True, dropout_p=self.dropout)[:, 0]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite's model as its seed has it, and a few tokens: training it takes too long for a test."""
    weights = {name: 4 * weight.detach().double() for name, weight in _untrained().named_parameters()}
    tokens = torch.arange(16 * 24).view(16, 24) * 7 % fixture.CONFIGURATION.vocabulary
    monkeypatch.setattr(fixture, "fixture", lambda: Fixture(weights, tokens, "made up"))
    monkeypatch.setattr(fixture, "exact", cache(fixture.exact.__wrapped__))
    for name, size in (("SEQUENCES", 16), ("CONTEXT", 24), ("CHUNK", 8)):
        monkeypatch.setattr(fixture, name, size)


def _untrained() -> nn.Module:
    return fixture.model_with(fixture.EXACT, fixture.NO_ARITHMETIC)


def side(name: str, backend: Backend = CPU) -> Side:
    kernel = backend.kernel(name)
    return Side(name, backend, kernel, kernel.declaration, known=True)


def broken(compute: Callable[[AttentionInputs], AttentionOutput]) -> Side:
    """A kernel of nobody's, which says that it takes what its inputs ask for."""
    takes = CPU.kernel("flash@fused").takes
    return Side(
        "broken", CPU, Kernel("broken", lambda inputs, *_: compute(inputs), None, takes=takes), None, known=False
    )


def reads(*rows: tuple[float, ...]) -> tuple[Read, Read]:
    """One of zeros, and one that has so much more."""
    more = torch.tensor(rows, dtype=torch.float64)
    return Read(torch.zeros_like(more), ()), Read(more, ())


def test_a_difference_has_the_figures_that_its_definitions_give() -> None:
    found = difference(*reads((0.1,) * 16, (0.3,) * 16))
    assert {name: number(found, name) for name in MEASURES} == pytest.approx(
        {
            "mean": 0.2,
            "rms": math.sqrt((0.01 + 0.09) / 2),
            "largest": 0.3,
            "k1": -0.2,
            "k3": (math.exp(0.1) - 1.1 + math.exp(0.3) - 1.3) / 2,
            "beyond_1_percent": 1.0,
            "beyond_20_percent": 0.5,
        }
    )
    assert (found.tokens, found.equal, len(found.by_position)) == (32, 0.0, 8)
    # The samples are sequences, and not tokens: two of them tell little.
    assert found.mean.half_width is not None
    assert found.mean.half_width > 1.0


def test_positions_are_the_columns_and_layers_are_told_apart() -> None:
    rising = tuple(0.01 * at for at in range(16))
    first, second = reads(rising, rising)
    assert difference(first, second).by_position == pytest.approx(
        [0.01 * math.sqrt((at**2 + (at + 1) ** 2) / 2) for at in range(0, 16, 2)]
    )
    streams = torch.full((2, 4), 2.0), torch.tensor([[2.0] * 4, [3.0] * 4])
    layered = difference(replace(first, streams=(streams[0],) * 2), replace(second, streams=streams))
    assert layered.equal_by_layer == (1.0, 0.5)
    assert layered.by_layer == pytest.approx((0.0, math.sqrt(0.125)))  # 4 of 8 numbers of 2 are 1 more


def test_what_is_no_number_has_none_and_leaves_every_limit() -> None:
    found = difference(*reads((math.nan, 0.0), (0.0, 0.0)))
    assert (found.rms, found.largest, found.k3, found.mean) == (None, None, None, Estimate(None, None))
    assert (found.beyond_20_percent, found.equal) == (0.25, 0.75)


@pytest.mark.usefixtures("small")
def test_plans_predict_the_difference_and_a_plan_called_in_another_way_has_none() -> None:
    told = list[str]()
    model = through_model(side("flash@paper"), side("flash@fused"), [BF16, FP16], tell=told.append)
    low, high = model.formats
    assert (low.pair.role, low.pair.first, low.pair.second) == (PAIR, "A", "B")
    assert [each.role for each in low.compared] == [PAIR, *[EXACT] * 2, *[WAYS] * 3, *[FLOOR] * 6]
    for each in low.compared[:3]:
        assert each.difference is not None
        assert each.difference.rms == pytest.approx(each.predicted, rel=0.05)
    pair, *_ = [each.difference.rms for each in low.compared if each.difference and each.difference.rms]
    floors = [each.difference.rms for each in low.compared if each.role == FLOOR and each.difference]
    assert max(filter(None, floors)) < pair / 4
    assert model.farthest("rms") == pair > number(high.pair.difference, "rms") * 4  # type: ignore[operator]
    assert told.count("bf16: A") == 1, "what is read stays read"
    text = grids.text(parts(model), "github")
    assert "A \\| B, decode with a cache" in text
    assert "which is nearer" in text
    assert [len(figure.series) for figure in figures(model)] == [3, 3]


@pytest.mark.usefixtures("small")
def test_the_nearer_of_two_is_told_and_the_same_kernel_twice_is_the_same_bits() -> None:
    near, far = side("flash@fused"), broken(lambda inputs: AttentionOutput(inputs.v))
    for a, b, nearer in ((near, far, "A"), (far, near, "B")):
        model = through_model(a, b, [BF16])
        assert model.formats[0].nearer == nearer
        assert f"{nearer} is nearer" in grids.text(parts(model))
    once = through_model(near, near, [BF16], SuiteModel((Way.PREFILL,)))
    assert {each.role for each in once.formats[0].compared} == {PAIR, EXACT}
    same = through_model(side("flash@fused", EMULATION), side("flash@fused", EMULATION), [BF16])
    assert (same.formats[0].nearer, same.formats[0].pair.predicted) == (None, 0.0)
    text = grids.text(parts(same))
    assert "bitwise equal in all 368 log-probabilities" in text
    assert "bf16: bitwise equal to the usual way: A, prefill in chunks" in text
    assert [line for line in text.splitlines() if line.startswith("bf16: A | ") and "chunks" in line] == []


@pytest.mark.usefixtures("small")
def test_random_bits_have_a_floor_of_their_own() -> None:
    (of,) = through_model(side("fair"), side("flash@fused"), [BF16]).formats
    drawn = [each.second for each in of.compared if each.second.endswith("random bits")]
    assert drawn == ["A, other random bits"]


@pytest.mark.usefixtures("small")
def test_a_way_that_a_kernel_refuses_or_raises_in_is_skipped_with_its_reason() -> None:
    def of_all(inputs: AttentionInputs) -> AttentionOutput:
        if inputs.q.shape[2] < inputs.k.shape[2]:
            raise ValueError("as many queries as keys\nand more")
        return AttentionOutput(inputs.v)

    (of,) = through_model(side("flash@fused"), broken(of_all), [BF16]).formats
    assert of.pair.difference is not None
    assert of.pair.predicted is None
    skipped = {each.second: each.skipped for each in of.compared if each.skipped}
    assert set(skipped) == {f"B, {way.value}" for way in (Way.CHUNKS, Way.DECODE)}
    assert all("ValueError: as many queries as keys" in why and "\n" not in why for why in skipped.values())
    untaking = replace(side("flash@fused"), kernel=replace(CPU.kernel("flash@fused"), takes=frozenset()))
    model = through_model(side("flash@fused"), untaking, [BF16])
    assert model.formats[0].pair.skipped == "flash@fused takes no causal mask"
    assert model.farthest("rms") is None
    assert "skipped: flash@fused takes no causal mask" in grids.text(parts(model))
    own = through_model(side("flash@fused"), untaking, [BF16], OwnModel("mine", Bare(), TOKENS))
    assert own.formats[0].pair.skipped == "flash@fused takes no causal mask"


def test_a_kernel_takes_the_place_of_every_call_of_a_users_model() -> None:
    seen = list[AttentionInputs]()

    def constant(inputs: AttentionInputs) -> AttentionOutput:
        seen.append(inputs)
        return AttentionOutput(torch.ones_like(inputs.q))

    module = Bare()
    before = module(TOKENS)
    (of,) = through_model(broken(constant), side("flash@fp32"), [FP16], OwnModel("mine", module, TOKENS)).formats
    (inputs, *_), found = seen, of.compared[1].difference
    assert (inputs.q.shape, inputs.causal) == ((2, 1, 9, VOCABULARY), True)
    assert torch.equal(inputs.q, module.embedding(TOKENS)[:, None].half().float())
    # Constant logits: every token has 1 / VOCABULARY.
    exact = before.double().log_softmax(-1)[:, :-1].gather(-1, TOKENS[:, 1:, None])
    assert found is not None
    assert found.mean.mean == pytest.approx(-math.log(VOCABULARY) - exact.mean().item(), abs=1e-6)
    assert [each.role for each in of.compared] == [PAIR, EXACT, EXACT]
    assert torch.equal(module(TOKENS), before), "what was put in is taken out"


def test_a_model_in_16_bits_is_read_in_its_own_format() -> None:
    own = OwnModel("mine", Bare(torch.bfloat16), TOKENS, (BF16,))
    model = through_model(side("flash@fused"), side("flash@fp32"), [FP16], own)
    assert [of.format for of in model.formats] == ["bf16"]


MODELS = """
import torch
from torch import nn

tokens = torch.zeros(2, 4, dtype=torch.int64)

def three():
    return 3

def raising():
    raise RuntimeError("no weights")

def floats():
    return nn.Embedding(5, 5), torch.zeros(2, 4)

def bf16():
    return nn.Embedding(5, 5).bfloat16(), tokens

def bare():
    return nn.Embedding(5, 5), tokens
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("three", "cannot unpack non-iterable int object; it has to return \\(module, tokens\\)$"),
        ("raising", "RuntimeError: no weights \\(models.py, line 11\\)$"),
        ("floats", "tokens are torch.float32 \\(2, 4\\), not whole numbers \\(batch, 2 or more\\); it has to return"),
        ("nothing", "has no function 'nothing'"),
    ],
)
def test_what_is_no_model_is_refused_in_one_line(name: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "models.py"
    file.write_text(MODELS, encoding="utf-8")
    with pytest.raises(UsageError, match=message) as caught:
        own_model(f"{file}:{name}")
    assert str(caught.value).startswith(f"--model {file}:{name}: ")
    assert "\n" not in str(caught.value)


def test_a_model_says_its_format_and_one_whose_attention_is_not_seen_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "models.py"
    file.write_text(MODELS, encoding="utf-8")
    assert own_model(f"{file}:bf16").formats == (BF16,)
    model = own_model(f"{file}:bare")
    assert (model.formats, model.module.training) == ((), False)
    one = side("flash@fused")
    with pytest.raises(UsageError, match="calls neither torch's attention nor Hugging Face's"):
        through_model(one, one, [BF16], model)
    with pytest.raises(UsageError, match="kernels here take no calls with dropout"):
        through_model(one, one, [BF16], OwnModel("m", Bare(dropout=0.1), TOKENS))
    with pytest.raises(UsageError, match=r"^--model m: index out of range in self"):
        through_model(one, one, [BF16], OwnModel("m", Bare(), TOKENS + VOCABULARY))
    logits = nn.Sequential(Bare(), nn.Flatten())
    with pytest.raises(UsageError, match="returns no logits"):
        through_model(one, one, [BF16], OwnModel("m", logits, TOKENS))


def test_cells_of_it_are_run_where_they_are_named() -> None:
    default = Selection(backends="cpu", kernels="fair,flash@fused")
    assert not any(cell.experiment.kind == KIND.name for cell in cells(default)[0])
    named = cells(replace(default, experiments=KIND.name, formats="bf16,fp16"))[0]
    assert {(cell.kernel.name, cell.fmt.name) for cell in named} == {
        (kernel, fmt) for kernel in ("fair", "flash@fused") for fmt in ("bf16", "fp16")
    }
    assert len({cell.experiment.group(cell.fmt) for cell in named}) == 1, "one worker makes the model"


@pytest.mark.usefixtures("small")
def test_a_cell_keeps_what_machines_are_compared_by() -> None:
    (experiment,), bench = KIND.experiments, Workbench(Settings())
    one, other = (judged(CPU.kernel(name), experiment, bench=bench) for name in ("flash@fused", "flash@paper"))
    assert (one.outcome, one.format, one.shown and one.shown.kind) == (MEASURED, "bf16", "nats_rms")
    assert one.digest != other.digest
    kept = one.evidence["numbers"]
    assert isinstance(kept, NumbersRecord)
    assert (kept.inputs, kept.unit, len(kept.values)) == ("made up", "nats", 46)  # of 16 x 23, every eighth
    errors = (
        fixture.read(HeadKernel(CPU.kernel("flash@fused")), CPU.arithmetic, "cpu").log_probabilities
        - fixture.exact().log_probabilities
    )
    assert kept.values == pytest.approx(errors.flatten()[::8].tolist(), abs=1e-9)
    assert one.number("nats_rms") == pytest.approx(errors.square().mean().sqrt().item())
    of_the_whole_model = 32 * 127 // 8 + 1
    assert len(encode(kept.values)) / len(kept.values) * of_the_whole_model < 9_000, "a record stays small"


@pytest.mark.usefixtures("small")
def test_a_cell_fails_where_log_probabilities_are_no_numbers_and_is_skipped_where_it_is_refused() -> None:
    (experiment,), bench = KIND.experiments, Workbench(Settings())

    def lost(inputs: AttentionInputs) -> AttentionOutput:
        return AttentionOutput(torch.full_like(inputs.q, math.nan))

    def refused(_: AttentionInputs) -> AttentionOutput:
        raise CannotRunError("not here")

    record = judged(broken(lost).kernel, experiment, bench=bench)
    assert (record.outcome, record.not_passed) == (FAILED, ["log_probabilities"])
    assert judged(broken(refused).kernel, experiment, bench=bench).skipped == "not here"
