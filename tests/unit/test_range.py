"""O within the range of V: what no kernel that is right leaves, and what zeros and leaks do not keep to."""

import pytest
import torch

from tiebreak.cases.bounds import mean_slack
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.features import FEATURES
from tiebreak.kernels.formats import BF16
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import Declaration, Kernel
from tiebreak.kernels.reference import reference
from tiebreak.matrix import workbench
from tiebreak.matrix.experiments import call
from tiebreak.matrix.workbench import SharedBatch
from tiebreak.reports.records.record import FAILED
from tiebreak.studies.cells import CASES, judged

HEADS = 4  # of a batch: no interval is looked at
# Scores so large that rounding them can move any weight to any key: there the error bound lets zeros pass.
BLIND_TO_THE_BOUND = ("huge_logits", "single_maximum_large", "repeated_large[r=60]", "repeated_large[r=10000]")
# Where zeros are right: no row sees a key; subnormals may be flushed.
ZEROS_ARE_RIGHT = {"wholly_masked", "subnormal_v"}
# 16,384 terms and more, which a sum in bf16 may lose: there the errors of plans tell, which `unattributed` leaves out.
LONG = {"decode_equal_keys", "decode_64k"}


def returning(fill: float) -> Kernel:
    """What fills O with one number: 0, as where a launch did nothing."""

    def compute(inputs: AttentionInputs, arithmetic: object, gradients: bool) -> AttentionOutput:
        del arithmetic, gradients
        return AttentionOutput(torch.full((*inputs.q.shape[:-1], inputs.v.shape[-1]), fill))

    return Kernel("mine", compute, None, has_backward=False, takes=frozenset(FEATURES))


@pytest.fixture(autouse=True)
def unattributed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros follow no plan, and to try them all takes a hundred times the cell."""
    monkeypatch.setattr(workbench.SharedBatch, "fits", lambda *_: {})
    monkeypatch.setattr(call, "plan_of", lambda *_: workbench.Settled("nothing was asked"))


def test_zeros_fail_in_every_case_in_which_they_are_wrong() -> None:
    records = {name: judged(returning(0.0), name, HEADS) for name in CASES}
    assert {name for name, record in records.items() if record.outcome != FAILED} == ZEROS_ARE_RIGHT | LONG
    for name in BLIND_TO_THE_BOUND:  # by their range alone
        assert [check for check, answer in records[name].answers.items() if answer.passed is False] == ["range"], name


def batch_of(case: str) -> tuple[SharedBatch, Declaration]:
    inputs = CASES[case].make(1, 0, HEADS, BF16)
    return SharedBatch(inputs, reference(inputs)), parse_declaration("flash@fused")


def test_it_is_the_distance_as_a_share_of_the_slack() -> None:
    """Which V's own size and the grid of bf16 are the unit of: 0 at the edge, 1 where rounding ends."""
    batch, declaration = batch_of("tied_maxima[k=2]")
    largest, slack = batch.value_range[1].expand_as(batch.ref.o), mean_slack(batch.inputs, declaration)
    assert float(batch.inputs.v.max()) < 0  # the range's other end may be the larger one: the slack is of that
    edge, inside, first, second = (
        batch.outside_values(largest + share * slack * largest.abs(), declaration) for share in (0.0, -0.5, 0.1, 0.2)
    )
    assert (edge, inside) == (0.0, 0.0)
    assert 0.0 < first <= 0.1
    assert second == pytest.approx(2 * first)


def test_a_key_that_the_row_does_not_see_is_outside_and_of_nan_and_inf_it_says_nothing() -> None:
    """As of a kernel that forgets the mask, or reads one row too far. NaN is `finite`'s to say."""
    batch, declaration = batch_of("random_causal")
    assert batch.outside_values(batch.ref.o, declaration) == 0.0
    o = batch.ref.o.clone()
    o[..., 0, :] = batch.inputs.expanded_v().double().amax(-2)
    assert batch.outside_values(o, declaration) > 1.0
    for value in (torch.nan, torch.inf, -torch.inf):
        o = batch.ref.o.clone()
        o[0, 0, 0, 0] = value
        assert batch.outside_values(o, declaration) == 0.0


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_number_over_no_element_is_none_and_meets_nothing(value: float) -> None:
    record = judged(returning(value), "random", HEADS)
    assert [record.passed(check) for check in ("bound", "range", "finite")] == [False] * 3
    assert record.measures["error_over_bound"] is record.measures["outside_values"] is None
