"""How many heads a cell looks at where it is short of time."""

import itertools
from dataclasses import replace

import pytest
import torch

from tiebreak.backends.backend import CPU
from tiebreak.backends.interpreter import INTERPRETER
from tiebreak.kernels.features import COMMON
from tiebreak.kernels.formats import BF16
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import Kernel
from tiebreak.kernels.reference import reference
from tiebreak.matrix.experiment import Cell, time_limit
from tiebreak.matrix.experiments import call
from tiebreak.matrix.experiments.call import OneCall
from tiebreak.matrix.run import run_cell
from tiebreak.matrix.workbench import Settings, Settled, Workbench
from tiebreak.reports.records.record import UNDECIDED
from tiebreak.studies.cells import CASES


def _theirs(inputs: AttentionInputs, arithmetic: object, gradients: bool) -> AttentionOutput:
    """In every other head one element of ten is an ulp too large: a mean bias of 0.05 ulp, on the edge of none."""
    del arithmetic, gradients
    o = reference(inputs).o.bfloat16()
    bits = o.view(torch.int16)
    bits[:, ::2, :, ::10] += 1
    return AttentionOutput(bits.view(torch.bfloat16).float())


KERNEL = Kernel("theirs", _theirs, None, has_backward=False, takes=COMMON, external=True)
SETTLED = dict[tuple[str, str, str], Settled]()  # its plan is looked for once
CELL = Cell(CPU, KERNEL, OneCall(CASES["random"]), BF16)


@pytest.mark.parametrize(("seconds", "looked_at"), [(25.0, 16), (None, 64), (1000.0, 128)])
def test_a_look_is_left_out_for_which_the_time_is_too_short(
    seconds: float | None, looked_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look takes ten seconds by this clock; three times the time so far is what the next one may come to."""
    clock = itertools.count(0.0, 10.0)
    monkeypatch.setattr(call, "process_time", lambda: next(clock))
    record = run_cell(CELL, Workbench(Settings(heads=16, cell_timeout=seconds), settled=SETTLED))
    assert record.heads == looked_at
    assert record.verdict == UNDECIDED


def test_a_call_may_take_longer_where_it_is_dearer() -> None:
    assert time_limit(CELL, None) == 60.0
    assert time_limit(replace(CELL, backend=INTERPRETER), None) == 900.0
    assert time_limit(replace(CELL, backend=INTERPRETER), 5.0) == 5.0
    assert time_limit(replace(CELL, kernel=replace(KERNEL, external=False)), None) is None
