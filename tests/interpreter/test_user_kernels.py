"""Triton kernels that a user brings: cells of the matrix, on a CPU."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tiebreak.backends.backend import CPU, Backend
from tiebreak.backends.interpreter import INTERPRETER
from tiebreak.backends.ptx import PTX
from tiebreak.kernels.external import external_kernel
from tiebreak.kernels.formats import BF16
from tiebreak.matrix.experiment import SelectionContext
from tiebreak.matrix.experiments import contract
from tiebreak.matrix.experiments.contract import Contract
from tiebreak.matrix.workbench import Settings, Workbench
from tiebreak.reports.records.record import CRASHED, PASSED, SKIPPED, UNBIASED, Record, Run
from tiebreak.reports.verdict import verdicts
from tiebreak.studies.cells import CASES, judged

BENCH = Workbench(Settings(heads=16))
File = Callable[..., str]


def _cell(target: str, case: str, backend: Backend = INTERPRETER) -> Record:
    return judged(external_kernel(target), case, backend=backend, bench=BENCH)


def test_a_users_triton_kernel_is_judged_on_a_cpu(file: File) -> None:
    """The repeated maximum of zero, which a bf16 that truncates would show as a bias."""
    record = _cell(file(), "tied_maxima[k=2]")
    assert record.outcome == PASSED
    assert record.verdict == UNBIASED


def test_the_record_says_whether_products_were_contracted_and_the_verdict_repeats_it(
    file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    record, exact = (_cell(file(), "no_tail", INTERPRETER.assuming(card)) for card in ("sm_90", "exact"))
    assert record.evidence["assumed"] == "contraction off, TRITON_DEFAULT_FP_FUSION"
    assert "assumed" not in exact.evidence
    (verdict,) = verdicts(Run({}, {}, (record,)))
    assert "assumed     contraction off, TRITON_DEFAULT_FP_FUSION" in str(verdict)


def test_without_the_interpreter_it_is_skipped_with_where_it_runs(file: File) -> None:
    record = _cell(file(), "tied_maxima[k=2]", CPU)
    assert record.outcome == SKIPPED
    assert "--backend interpreter" in str(record.skipped)


@pytest.mark.parametrize("backend", [INTERPRETER, PTX], ids=lambda backend: backend.name)
def test_a_function_that_launches_nothing_is_skipped_not_passed(backend: Backend, tmp_path: Path) -> None:
    """As one that takes PyTorch's attention for tensors of a CPU."""
    body = "return torch.nn.functional.scaled_dot_product_attention(q, k, v)"
    (mine := tmp_path / "mine.py").write_text(f"import torch\n\n\ndef attention(q, k, v):\n    {body}\n")
    assert _cell(f"{mine}:attention", "no_tail", CPU).outcome == PASSED
    record = _cell(f"{mine}:attention", "no_tail", backend)
    assert record.outcome == SKIPPED
    assert "launched no kernel" in str(record.skipped)


def test_assembly_is_a_skip_that_names_it(file: File) -> None:
    asm = 'tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [s - new[:, None]], tl.float32, True, 1)'
    record = _cell(file(asm), "no_tail")
    assert record.outcome == SKIPPED
    assert record.skipped == "inline assembly can't be interpreted: ex2.approx.ftz.f32 $0, $1;"


def test_an_access_out_of_bounds_is_a_crash_that_names_the_argument(file: File) -> None:
    record = _cell(
        file("tl.math.exp2(s - new[:, None]) + tl.load(V + 64 * 128 * 32 + tl.arange(0, 1)[:, None])"), "no_tail"
    )
    assert record.outcome == CRASHED
    assert "forward reads outside of its argument V" in record.answers["runs"].why


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("assert torch.cuda.is_available()", r"cannot import .*mine.py: AssertionError.*"),
        (
            'raise RuntimeError("No CUDA GPUs are available")',
            r"No CUDA GPUs are available \(mine.py, line \d+\); it asks",
        ),
    ],
)
def test_a_file_that_needs_a_gpu_to_be_imported_says_what_stopped_it(names: str, message: str, file: File) -> None:
    with pytest.raises(ValueError, match=message):
        external_kernel(file(names=names))


def test_a_triton_kernel_itself_is_no_function_of_q_k_and_v(file: File) -> None:
    with pytest.raises(ValueError, match=r"mine\.py:forward is a Triton kernel; name the Python function of"):
        external_kernel(file().replace(":attention", ":forward"))


def test_a_users_kernel_is_run_twice_and_the_suites_own_need_not_be(file: File) -> None:
    """One of a user's may draw numbers of its own; for the suite's this shows once that the bits repeat."""
    twice, own = Contract(contract.CASES[0]), INTERPRETER.kernel("triton_fair")
    users = external_kernel(file())
    assert judged(users, twice, backend=INTERPRETER, bench=BENCH).passed("repeatable")
    pairs = [(INTERPRETER, own), (INTERPRETER, users)]
    assert twice.pairs(SelectionContext(pairs, [INTERPRETER], BF16)) == pairs[1:]
    inputs = CASES["random"].make(3, 0, 8, BF16)
    first, second = (INTERPRETER.run(INTERPRETER.kernel("triton_fair"), inputs, gradients=True) for _ in range(2))
    assert torch.equal(first.o, second.o)
    assert first.gradients is not None
    assert second.gradients is not None
    assert all(map(torch.equal, *((x.dq, x.dk, x.dv) for x in (first.gradients, second.gradients))))
