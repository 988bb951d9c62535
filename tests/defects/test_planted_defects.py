"""Kernels with a planted defect: each must fall, in the cases that show the defect, and a sound twin must hold."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from tiebreak.backends.backend import CPU, Backend
from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.features import COMMON
from tiebreak.kernels.formats import BF16, Rounding
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import Declaration, Kernel, run_declared
from tiebreak.kernels.plans import Accumulator, Cast, Exponential
from tiebreak.kernels.roster import composed_kernel
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.experiments.call import Call
from tiebreak.matrix.run import run_cell
from tiebreak.matrix.settings import Settings
from tiebreak.matrix.workbench import Workbench
from tiebreak.reports.records import FELL, HELD, PREDICTION, Record

CASES = {case.name: case for case in SCRIPTED}
SETTINGS = Settings(seed=1, heads=256)


class CastingIn(EmulatedArithmetic):
    """A device whose casts round in another mode than the plan says."""

    def __init__(self, rounding: Rounding) -> None:
        self.rounding = rounding

    def cast(self, x: Tensor, cast: Cast, random: Tensor | None = None) -> Tensor:
        return super().cast(x, replace(cast, rounding=self.rounding), random)


class WithoutRescale(EmulatedArithmetic):
    """A device that forgets to rescale the accumulators when a later block raises the row's shift."""

    def exp(self, x: Tensor, exponential: Exponential) -> Tensor:
        if x.shape[-1] > 1:
            return super().exp(x, exponential)
        return torch.where(x == -torch.inf, torch.zeros_like(x), torch.ones_like(x))


class NarrowAccumulator(EmulatedArithmetic):
    """A device that keeps the running sums of its matrix products in bf16."""

    def matmul(self, a: Tensor, b: Tensor, cast: Cast, accumulator: Accumulator) -> Tensor:
        total = torch.zeros(*a.shape[:-1], b.shape[-1])
        for index in range(a.shape[-1]):
            product = a[..., :, index, None] * b[..., None, index, :]
            total = super().cast(total + product, Cast(BF16))
        return super().cast(total, cast)


def _unscaled(declaration: Declaration, inputs: AttentionInputs, arithmetic: Arithmetic, _: bool) -> AttentionOutput:
    """Forgets alpha."""
    return run_declared(declaration, replace(inputs, q=inputs.q / inputs.scale), arithmetic, False)


def _leaking(declaration: Declaration, inputs: AttentionInputs, arithmetic: Arithmetic, _: bool) -> AttentionOutput:
    """Ignores the causal mask."""
    return run_declared(declaration, replace(inputs, causal=False), arithmetic, False)


def _as(declaration: Declaration, *_: object) -> Callable[..., AttentionOutput]:
    return partial(run_declared, declaration)


@dataclass(frozen=True)
class Defect:
    """A kernel that declares one thing and does another."""

    declared: str  # what it says it is
    compute: Callable[[Declaration], Callable[..., AttentionOutput]]  # what it does
    arithmetic: Arithmetic  # where
    falls_in: tuple[str, ...]  # the cases that must show it


def _doing(name: str, **changes: object) -> Callable[[Declaration], Callable[..., AttentionOutput]]:
    """Does what the composed kernel `name` does, with changes to its plan."""
    declaration = composed_kernel(name).declaration
    assert declaration is not None
    plan = replace(declaration.plan, **changes)  # type: ignore[arg-type]
    return partial(_as, replace(declaration, plan=plan))


def _honest(declaration: Declaration) -> Callable[..., AttentionOutput]:
    return partial(run_declared, declaration)


EXACT = EmulatedArithmetic()

DEFECTS = {
    "as_printed_v1": Defect("stabilized@paper", _doing("as_printed_v1@paper"), EXACT, ("tied_maxima[k=2]",)),
    "as_printed_v2": Defect("stabilized@paper", _doing("as_printed_v2@paper"), EXACT, ("repeated_negative",)),
    "truncating_cast": Defect(
        "flash@fused", _honest, CastingIn(Rounding.TOWARD_ZERO), ("tied_maxima[k=2]", "random", "no_tail")
    ),
    "ties_away_cast": Defect("flash@fused", _honest, CastingIn(Rounding.TIES_AWAY), ("no_tail",)),
    "dropped_rescale": Defect("flash@fused", _honest, WithoutRescale(), ("overshooting_shift",)),
    "narrow_accumulator": Defect("flash@fused", _honest, NarrowAccumulator(), ("random",)),
    "dropped_scale": Defect("flash@fused", lambda declared: partial(_unscaled, declared), EXACT, ("random",)),
    "leaking_mask": Defect("flash@fused", lambda declared: partial(_leaking, declared), EXACT, ("random_causal",)),
    "row_sum_of_rounded": Defect(
        "dithered@fused", _doing("dithered@fused", row_sum_from_rounded=True), EXACT, ("sink_tie",)
    ),
    "dither_without_noise": Defect("fair", _doing("flash@fused"), EXACT, ("sink_tie", "single_maximum_sink")),
    # Unbiased over heads, and so predicted: a row's own bias gives it away.
    "contracted": Defect(
        "flash@fused",
        _doing("flash@fused_contracted"),
        EXACT,
        ("inexact_ties[r=6]", "inexact_ties[r=60]", "inexact_ties[r=600]"),
    ),
    "not_contracted": Defect("flash@fused_contracted", _doing("flash@fused"), EXACT, ("inexact_ties[r=6]",)),
    "rounded_o_bar": Defect("flash@fused", _doing("flash@paper"), EXACT, ("tied_maxima[k=2]",)),
}
TWINS = sorted({defect.declared for defect in DEFECTS.values()})


def _run(kernel: Kernel, arithmetic: Arithmetic, case: str) -> Record:
    backend: Backend = replace(CPU, name="planted", arithmetic=arithmetic)
    return run_cell(Cell(backend, kernel, Call(CASES[case]), BF16), Workbench(SETTINGS))


def _declared(name: str) -> Declaration:
    declaration = composed_kernel(name).declaration
    assert declaration is not None
    return declaration


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name, defect in DEFECTS.items() for case in defect.falls_in]
)
def test_defect_falls(name: str, case: str) -> None:
    defect = DEFECTS[name]
    declaration = _declared(defect.declared)
    kernel = Kernel(name, defect.compute(declaration), declaration, has_backward=False, takes=COMMON)
    record = _run(kernel, defect.arithmetic, case)
    assert record.outcome == FELL, record
    assert record.reasons


@pytest.mark.parametrize("case", sorted({case for defect in DEFECTS.values() for case in defect.falls_in}))
@pytest.mark.parametrize("name", TWINS)
def test_its_sound_twin_holds(name: str, case: str) -> None:
    declaration = _declared(name)
    kernel = Kernel(name, partial(run_declared, declaration), declaration, takes=COMMON)
    record = _run(kernel, EXACT, case)
    assert record.outcome == HELD, record.reasons


def test_v2_as_printed_is_right_but_for_the_negative_branch() -> None:
    defect = DEFECTS["as_printed_v2"]
    declaration = _declared(defect.declared)
    kernel = Kernel("as_printed_v2", defect.compute(declaration), declaration, has_backward=False, takes=COMMON)
    assert _run(kernel, EXACT, "tied_maxima[k=2]").outcome == HELD


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.chaotic or case.cancels])
def test_a_case_that_cannot_be_predicted_records_no_prediction(case: str) -> None:
    """Else an exemption would read as a prediction that was met."""
    declaration = _declared("flash@fused")
    record = _run(Kernel("sound", partial(run_declared, declaration), declaration, takes=COMMON), EXACT, case)
    assert PREDICTION not in record.answers
    assert "predicted_bias" not in record.measures
