"""The backend: cells of the suite's kernels and of users', on request."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tiebreak
from tiebreak.backends.interpreter import INTERPRETER
from tiebreak.backends.ptx import PTX
from tiebreak.backends.ptx.session import executing
from tiebreak.cases.gpt2.fixture import Way
from tiebreak.kernels.external import external_kernel
from tiebreak.kernels.formats import BF16
from tiebreak.kernels.kernel import CannotRunError
from tiebreak.matrix.selection import Selection, cells
from tiebreak.programs import pair as pair_program
from tiebreak.reports.errors import UsageError
from tiebreak.reports.records.record import SKIPPED, UNBIASED, Run
from tiebreak.studies.cells import CASES, judged

FEW_LINES = f"{Path(__file__).parents[1] / 'interpreter' / 'few_lines.py'}:attention"


def test_it_runs_where_it_is_named_alone_and_says_what_it_is() -> None:
    selected, _ = cells(Selection(None, "triton_flash", "no_tail"))
    assert "ptx" not in {cell.backend.name for cell in selected}
    selected, _ = cells(Selection("ptx", "triton_flash", "no_tail", card="sm_89"))
    (backend,) = {cell.backend for cell in selected}
    assert backend.options == ("--as", "sm_89")
    assert "nothing ran on a GPU" in str(backend.notice())
    assert "13.1" not in backend.describe()["assembler"]
    assert "13.1" in INTERPRETER.assuming("sm_120").describe()["assembler"]
    older = backend.assuming("sm_120/13.0")
    assert older.options == ("--as", "sm_120/13.0")
    assert "13.0, packed products fused" in older.describe()["assembler"]
    with pytest.raises(ValueError, match=r"^sm_120/13.0: unknown; .*ptxas 13\.1 or newer.*--backend ptx has others"):
        INTERPRETER.assuming("sm_120/13.0")
    text = Run(backend.describe(), {}, records=()).backend_text("ptx")
    assert text == "ptx as sm_89 (compiled code, emulated processor; nothing ran on a GPU)"
    with pytest.raises(UsageError, match=r"^--as gfx942: unknown to --backend ptx; its cards are sm_75, "):
        cells(Selection("ptx", card="gfx942"))


def test_a_users_triton_kernel_is_judged() -> None:
    assert judged(external_kernel(FEW_LINES), "tied_maxima[k=2]", backend=PTX).verdict == UNBIASED


@pytest.mark.parametrize(
    ("kernel", "card"), [("triton_flash", "sm_80"), ("triton_paper", "sm_80"), ("triton_standard", "sm_100")]
)
def test_the_suites_kernel_has_the_interpreters_bits_forward_and_backward(kernel: str, card: str) -> None:
    """The plan `paper` leaves gradients in fp32, and `standard` sums delta over products: they show its order."""
    inputs = CASES["random"].make(3, 0, 2, BF16)
    ours, theirs = (
        backend.run(backend.kernel(kernel), inputs, gradients=True)
        for backend in (PTX.assuming(card), INTERPRETER.assuming(card))
    )
    assert torch.equal(ours.o, theirs.o)
    assert ours.gradients is not None
    assert theirs.gradients is not None
    assert all(map(torch.equal, *((x.dq, x.dk, x.dv) for x in (ours.gradients, theirs.gradients))))


def test_a_pair_is_of_two_cards() -> None:
    verdict = tiebreak.pair(
        "triton_flash", "triton_flash", backend="interpreter", card="sm_80,sm_90", cases="no_tail", heads=4
    )
    assert [side.backend for side in verdict.sides] == ["interpreter as sm_80", "interpreter as sm_90"]
    assert "interpreter as sm_80 and triton_flash on interpreter as sm_90" in verdict.headline


def test_executed_code_reads_a_model_in_one_prefill_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Any]()

    def judged(*arguments: Any) -> None:
        asked.append(arguments[-1].keywords["model"].ways)
        raise UsageError("this is enough")

    monkeypatch.setattr(pair_program, "judge_pair", judged)
    for backend in ("ptx", "interpreter"):
        with pytest.raises(UsageError, match="enough"):
            tiebreak.pair("triton_flash", "triton_flash", backend=backend, model="gpt2")
    assert asked == [(Way.PREFILL,), tuple(Way)]


def test_what_the_card_lacks_is_a_skip_with_the_compilers_reason() -> None:
    record = judged(PTX.kernel("triton_fp8"), "fp8_ties", 2, backend=PTX)
    assert record.outcome == SKIPPED
    assert "type fp8e4nv not supported in this architecture" in str(record.skipped)


def test_a_function_made_to_be_interpreted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    function = triton.jit(lambda X: None)
    monkeypatch.delenv("TRITON_INTERPRET")
    with executing("sm_80", 1 << 16), pytest.raises(CannotRunError, match="was made under TRITON_INTERPRET=1"):
        function[(1,)](torch.zeros(1))
