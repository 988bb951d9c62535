"""fp16 has less range than bf16: where the shift rules that scale lose P-bar, and that the cases claim just that.

The derivations are in docs/science.md.
"""

import math
from dataclasses import replace

import pytest
import torch

from tiebreak.backends.backend import EMULATION, Backend
from tiebreak.cases.bounds import ErrorBounds
from tiebreak.cases.case import Case
from tiebreak.cases.claims import INACCURATE_OR_BREAKS_DOWN, Claim, breaks_down_in
from tiebreak.cases.errors import Errors, measure
from tiebreak.cases.feature_cases import EVERY
from tiebreak.kernels.formats import FP16
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import Kernel
from tiebreak.kernels.reference import reference
from tiebreak.kernels.roster import DEFAULT_ROSTER, composed_kernel
from tiebreak.kernels.shift_rules import BETA_V1, repeated
from tiebreak.matrix.workbench import Settings, Workbench
from tiebreak.reports.records.record import CLAIM, FAILED, PASSED, Record
from tiebreak.studies.cells import CASES, judged

HEADS = 1024
LOST = 25 * math.log(2.0)  # exp(-LOST) is half of fp16's smallest number: from here on P-bar is 0
DEVICE = replace(EMULATION, name="device", predicts=False)  # so that kernels run which do not do what they declare
# Beside the roster: the same rules at other plans.
KERNELS = [*DEFAULT_ROSTER, "stabilized_v1@fused", "stabilized@all_bf16"]


def _claim(name: str, case: Case) -> Claim | None:
    return case.claim_about(composed_kernel(name).declaration, FP16)


CLAIMED = {
    case.name: [name for name in KERNELS if (claim := _claim(name, case)) is not None and claim.formats == {"fp16"}]
    for case in EVERY
}


def _record(backend: Backend, kernel: Kernel, case: str, bench: Workbench | None = None) -> Record:
    return judged(kernel, case, 256, fmt=FP16, backend=backend, bench=bench)


def _measured(name: str, inputs: AttentionInputs) -> Errors:
    kernel, ref = composed_kernel(name), reference(inputs)
    assert kernel.declaration is not None
    output = EMULATION.run(kernel, inputs, gradients=False)
    return measure(output.o, None, inputs, ref, ErrorBounds(inputs, ref).of(kernel.declaration))


@pytest.mark.parametrize("case", [case for case, kernels in CLAIMED.items() if kernels])
def test_what_is_claimed_in_fp16_alone_holds(case: str) -> None:
    bench = Workbench(Settings(heads=32))  # of one case, whose inputs and reference its kernels share
    records = [_record(EMULATION, composed_kernel(kernel), case, bench) for kernel in CLAIMED[case]]
    failed = {record.kernel: record.reasons for record in records if record.outcome != PASSED}
    assert failed == {}
    assert all(record.passed(CLAIM) for record in records)


@pytest.mark.parametrize(
    ("declared", "case", "message"),
    [
        ("stabilized@paper", "repeated_large[r=20]", "claim failed: output shrinks to 0 .. 0 "),
        ("stabilized@fused", "repeated_large[r=90]", "claim failed: beyond the plan's error bound, NaN or Inf "),
        (
            "stabilized_authors@all_bf16",
            "repeated_large[r=60]",
            "claim failed: NaN or Inf where the reference is finite",
        ),
        ("stabilized_v1@paper", "tied_maxima[k=2]", "claim failed: output shrinks to 0.18 .. 0.59 "),
    ],
)
def test_a_kernel_that_is_not_as_broken_as_it_declares_fails(declared: str, case: str, message: str) -> None:
    sound, declaration = composed_kernel("flash@fused"), composed_kernel(declared).declaration
    record = _record(DEVICE, replace(sound, declaration=declaration), case)
    assert record.outcome == FAILED
    assert any(message in reason for reason in record.reasons), record.reasons


def test_v1_loses_the_share_of_rows_that_is_derived() -> None:
    steepness, (low, high) = BETA_V1 - 1.0, (1.0, 6.0)
    # A P-bar of x of fp16's smallest numbers rounds to j, and j / x of the row is left: where log x is uniform from
    # log(1/2) on, the integral of j / x - 1 over log x is ln 2 + Euler's constant - 1.
    expected = (LOST - steepness * low + math.log(2.0) + 0.5772156649 - 1.0) / (steepness * (high - low))
    assert expected == pytest.approx(0.387, abs=5e-4)
    measures = _measured("stabilized_v1@fused", CASES["tied_maxima[k=2]"].make(1, 0, HEADS, FP16))
    spread = math.sqrt(expected * (1.0 - expected))  # of a row, kept or lost
    assert measures.gain == pytest.approx(expected, abs=4 * spread / math.sqrt(HEADS * 4))
    claim = _claim("stabilized_v1@fused", CASES["tied_maxima[k=2]"])
    assert claim is not None
    # 99.9 % at the fewest rows whose intervals are right: 16 heads of 4.
    limits = [expected + sign * 3.29 * spread / math.sqrt(16 * 4) for sign in (-1, 1)]
    assert claim.expectation.name == f"output shrinks to {math.floor(100 * limits[0]) / 100} .. {limits[1]:.2f}"


def test_the_published_code_gives_nan_where_the_cast_of_s_ties_two_maxima() -> None:
    inputs = CASES["huge_logits"].make(1, 0, HEADS, FP16)
    s = (inputs.q @ inputs.expanded_k().transpose(-1, -2) * inputs.scale).half().float()
    tied = repeated(s, s.amax(-1, keepdim=True))
    lost = EMULATION.run(composed_kernel("stabilized_authors@all_bf16"), inputs, gradients=False).o.isnan()
    assert torch.equal(lost, tied.expand_as(lost))
    # From 2^14 on fp16 spaces scores by 16, and the largest two of 128 normal ones are 1e4 / 2.8 apart on average: half
    # of 16 / 3500 of the rows.
    assert tied.double().mean().item() == pytest.approx(0.0023, abs=4 * math.sqrt(0.0023 / (HEADS * 4)))


def test_a_share_that_breaks_down_is_open_until_it_is_seen_and_inaccurate_or_broken_is_either() -> None:
    measures = _measured("fair", CASES["random"].make(1, 0, 16, FP16))
    assert measures.elements == 16 * 4 * 64
    broken = {count: replace(measures, nonfinite=count) for count in (0, 1, 204, 205, measures.elements)}
    shares = [breaks_down_in(0.05).passed(each) for each in broken.values()]
    assert shares == [None, True, True, False, False]
    either = (measures, broken[1], replace(measures, error_over_bound=1.1))
    assert [INACCURATE_OR_BREAKS_DOWN.passed(each) for each in either] == [False, True, True]
