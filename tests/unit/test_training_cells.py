"""Short training runs as cells: which are chosen, and what their records say."""

from dataclasses import replace
from pathlib import Path

import pytest

from tiebreak.backends.backend import CPU, EMULATION, Backend
from tiebreak.cases.gpt2.snippets import DRIFT, SNIPPETS, SnippetClaim
from tiebreak.cases.gpt2.variants import VARIANTS
from tiebreak.kernels.external import external_kernel
from tiebreak.kernels.formats import BF16
from tiebreak.kernels.kernel import Kernel
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.experiments.training import KIND, TrainingRun, trained_kernel
from tiebreak.matrix.run import run_cell
from tiebreak.matrix.selection import Selection, cells
from tiebreak.matrix.workbench import Settings, Workbench
from tiebreak.reports.errors import UsageError
from tiebreak.reports.records.record import CLAIM, FAILED, MEASURED, PASSED, SKIPPED, Record, SeriesRecord, Shown

FLASH, FAIR = (trained_kernel(VARIANTS[f"{name}@train_l_rounded"]) for name in ("flash", "fair"))
SHORT = replace(DRIFT, steps=4)
USER = """
import torch

def mine(q, k, v, *, causal=False, scale=None):
    s = q.float() @ k.float().mT * scale
    s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return (s.softmax(-1) @ v.float()).to(q.dtype)

class Flash(torch.autograd.Function):
    '''The same forward; backward delta is rowsum(dO * O), and sees how O was rounded.'''

    @staticmethod
    def forward(ctx, q, k, v, causal, scale):
        o = mine(q, k, v, scale=scale)
        ctx.save_for_backward(q, k, v, o)
        ctx.scale = scale
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, do = (x.float() for x in (*ctx.saved_tensors, do))
        s = q @ k.mT * ctx.scale
        p = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
        ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True)) * ctx.scale
        return *((x).bfloat16() for x in (ds @ k, ds.mT @ q, p.mT @ do)), None, None

def flash(q, k, v, *, causal=False, scale=None):
    return Flash.apply(q, k, v, causal, scale)

@torch.no_grad()
def forward_only(q, k, v, *, causal=False, scale=None):
    return mine(q, k, v, scale=scale)

def nan_backward(q, k, v, *, causal=False, scale=None):
    o = mine(q, k, v, scale=scale)
    if o.requires_grad:
        o.register_hook(lambda do: do * torch.nan)
    return o

def not_causal(q, k, v, *, scale=None):
    return mine(q, k, v, scale=scale)
"""


def chosen(selection: Selection) -> dict[str, list[str]]:
    """Kernels by backend and snippet, of the training cells."""
    found: dict[str, list[str]] = {}
    for cell in cells(selection)[0]:
        if cell.experiment.kind == TrainingRun.kind:
            found.setdefault(f"{cell.backend.name} {cell.experiment.name}", []).append(cell.kernel.name)
    return found


def train(kernel: Kernel, snippet: str | None = None, backend: Backend = EMULATION, **settings: int) -> Record:
    case = SNIPPETS[snippet] if snippet else SHORT
    return run(Cell(backend, kernel, TrainingRun(case), BF16), **settings)


def run(cell: Cell, **settings: int) -> Record:
    return run_cell(cell, Workbench(Settings(**settings)))  # type: ignore[arg-type]


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(USER)
    return f"{tmp_path / 'mine.py'}:mine"


def test_a_default_run_trains_the_roster_and_the_devices_own_kernels() -> None:
    selected = chosen(Selection())
    own = [kernel.name for kernel in CPU.vendor_kernels()]
    for name, snippet in SNIPPETS.items():
        assert selected[f"emulation {name}"] == list(snippet.roster)
        # No device computes in the format that the amplified snippet asks for.
        assert selected.get(f"cpu {name}") == (None if snippet.is_amplified else [*snippet.on_devices, *own])
        assert set(snippet.on_devices) <= set(snippet.roster)


def test_names_choose() -> None:
    assert chosen(Selection("cpu", "fair,flash@paper")) == {}
    assert chosen(Selection("cpu", "fair", "train_drift")) == {"cpu train_drift": ["fair"]}
    both = ["pv_fp32@train", "pv_fp32@train_l_rounded"]
    assert chosen(Selection("emulation", "pv_fp32@*", "train_drift")) == {"emulation train_drift": both}


def test_a_users_kernel_trains_in_what_is_neither_amplified_nor_a_study_and_no_other_cell_is_refused(mine: str) -> None:
    trained = [name for name, snippet in SNIPPETS.items() if not (snippet.is_amplified or snippet.study)]
    assert chosen(Selection(kernel=(mine,))) == {f"cpu {name}": ["mine"] for name in trained}
    assert chosen(Selection(kernel=(mine,), cases="train_lm")) == {"cpu train_lm": ["mine"]}
    for none in (Selection(kernels="fair@train", cases="random"), Selection(cases="train_drift", formats="fp16")):
        with pytest.raises(UsageError, match=r"^no cell is left: .*kernels called \.\.\.@train"):
            cells(none)


def test_a_run_that_drifts_as_claimed_holds() -> None:
    record = train(FLASH)
    assert (record.outcome, record.reasons, record.plan) == (PASSED, (), "flash@train_l_rounded")
    assert record.experiment == "training"
    assert record.digest == train(FLASH).digest != train(FLASH, seed=2).digest
    assert record.answers[CLAIM].asked == DRIFT.claims_about(VARIANTS[FLASH.name])[0].text
    assert record.passed(CLAIM)
    assert record.passed("loss")
    described = TrainingRun(SHORT).described()
    assert (described.label, described.headline, record.evidence["paper"]) == ("A", "delta_error_mean", "fails")
    assert set(record.measures) == set(KIND.measured)
    mean = record.number("delta_error_mean")
    assert record.shown == Shown("delta_error_mean", mean, spec="+.1e")
    assert record.number("finite_steps") == record.number("steps") == SHORT.steps
    series = record.evidence["series"]
    assert isinstance(series, SeriesRecord)
    assert series.steps == (0, 1, 2, 3)
    errors = [value for value in series.values["delta_error"] if value is not None]
    assert sum(errors) / 4 == pytest.approx(mean, rel=1e-5)
    assert "--kernels flash@train_l_rounded --cases train_drift" in record.command


def test_a_run_that_breaks_its_claim_fails_with_the_number() -> None:
    claim = SnippetClaim(frozenset({FAIR.name}), "delta_error_mean", "a test", low=1.0)
    snippet = replace(SHORT, name="a test", own_claims=(claim, replace(claim, low=-1.0, high=2.0)))
    record = run(Cell(EMULATION, FAIR, TrainingRun(snippet), BF16))
    assert record.outcome == FAILED
    assert record.passed(CLAIM) is False
    assert len(record.reasons) == 1
    assert "claim failed: 1 < delta_error_mean (a test); delta_error_mean = " in record.reasons[0]


def test_a_device_without_the_snippets_format_and_a_kernel_that_cannot_be_told_are_skipped() -> None:
    record = train(FLASH, "train_amplified", CPU)
    assert (record.outcome, record.reasons) == (SKIPPED, ("the device computes in no E8M5",))
    own = train(CPU.kernel("sdpa_flash"), "train_amplified")
    assert (own.outcome, own.reasons) == (SKIPPED, ("the kernel can't be told to keep S in E8M5",))


def test_a_kernel_without_a_backward_pass_trains_only_with_the_suites_and_is_labelled_so(mine: str) -> None:
    name = mine.replace(":mine", ":forward_only")
    record = train(external_kernel(name), backend=CPU)
    assert record.outcome == SKIPPED
    assert "forward_only has no backward pass that autograd knows" in str(record.skipped)
    assert "--backward emulated" in str(record.skipped)
    declared = external_kernel(name, flags=("backward=none",))
    skip = run(Cell(CPU, declared, TrainingRun(SHORT), BF16))
    assert (skip.outcome, skip.reasons) == (
        SKIPPED,
        ("forward_only has no backward pass: --backward emulated trains it with the suite's",),
    )
    found, _ = cells(Selection(kernel=(name,), cases=SHORT.name, emulated_backward=True))
    (cell,) = found
    assert cell.kernel.name == "forward_only+emulated_backward"
    emulated = run(replace(cell, experiment=TrainingRun(SHORT)), fair=True)
    assert emulated.outcome == MEASURED
    assert CLAIM not in emulated.answers
    assert "--backward emulated" in emulated.command
    assert (emulated.number("delta_error_mean") or 0.0) > 1e-3


def test_a_users_kernel_trains_with_its_own_backward_pass_and_is_held_to_fairness_where_that_is_asked(
    mine: str,
) -> None:
    """Two kernels of one forward pass: what autograd makes of it never sees O, flash attention's backward pass does.

    Its one cast of O to even meets the ties of the script.
    """
    kernel = external_kernel(mine.replace(":mine", ":flash"))
    free, held, autograd = (
        train(each, backend=CPU, fair=fair)
        for each, fair in ((kernel, False), (kernel, True), (external_kernel(mine), False))
    )
    assert abs(autograd.number("delta_error_mean") or 1.0) < 1e-5
    assert (free.number("delta_error_mean") or 0.0) > 1e-3
    assert free.outcome == MEASURED
    assert CLAIM not in free.answers
    assert free.passed("contract")
    assert free.measures == held.measures
    assert held.outcome == FAILED
    assert held.answers[CLAIM].asked == DRIFT.claims_about(VARIANTS[FAIR.name])[0].text


def test_gradients_of_nan_fail_and_a_kernel_without_a_causal_mask_does_not_train(mine: str) -> None:
    nan, not_causal = (
        train(external_kernel(mine.replace(":mine", f":{name}")), backend=CPU)
        for name in ("nan_backward", "not_causal")
    )
    assert (nan.outcome, nan.passed("loss")) == (FAILED, False)
    assert not_causal.outcome == SKIPPED
    assert not_causal.skipped == "not_causal takes no causal mask, and training asks for one"
