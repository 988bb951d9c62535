"""An algorithm is one object: everything that runs, names or judges its kernels goes by it."""

from dataclasses import replace

import pytest
import torch

from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.cases.claims import UNBIASED, claim
from tiebreak.cases.gpt2.attention import Call, HeadKernel, attend
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.kernels.algorithms import FLASH_ATTENTION, STANDARD_ATTENTION, Algorithm
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.features import CAUSAL
from tiebreak.kernels.flash import Block
from tiebreak.kernels.formats import BF16
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import Declaration, composed, run_declared
from tiebreak.kernels.plans import FUSED, RoundingPlan
from tiebreak.kernels.shift_rules import SHIFT_RULES, ShiftRule
from tiebreak.kernels.triton.launch import refusal

ARITHMETIC = EmulatedArithmetic()
CASES = {case.name: case for case in SCRIPTED}


def _halved(
    inputs: AttentionInputs, plan: RoundingPlan, shift_rule: ShiftRule, arithmetic: Arithmetic, block: Block
) -> AttentionOutput:
    """Flash attention whose O is half of it, to be told from every other."""
    whole = FLASH_ATTENTION.forward(inputs, plan, shift_rule, arithmetic, block)
    return replace(whole, o=whole.o / 2)


THIRD = Algorithm("third", _halved, tiled=True, takes=frozenset({CAUSAL}), claimed_as="third")


@pytest.mark.parametrize(
    ("algorithm", "rule", "label", "claimed_as"),
    [
        (FLASH_ATTENTION, "safe", "flash@fused", "safe"),
        (FLASH_ATTENTION, "stabilized", "stabilized@fused", "stabilized"),
        (STANDARD_ATTENTION, "safe", "standard", "standard"),
        (THIRD, "safe", "third@fused", "third"),
    ],
    ids=["flash", "stabilized", "standard", "third"],
)
def test_what_tables_and_claims_call_it(algorithm: Algorithm, rule: str, label: str, claimed_as: str) -> None:
    declaration = Declaration(algorithm, FUSED, SHIFT_RULES[rule])
    assert (declaration.label, declaration.claimed_as) == (label, claimed_as)
    assert claim(UNBIASED, "", rules=claimed_as).concerns(declaration, BF16)
    assert claim(UNBIASED, "", rules="safe").concerns(declaration, BF16) == (claimed_as == "safe")


def test_a_third_one_runs_wherever_declared_kernels_run() -> None:
    inputs = CASES["random_causal"].make(1, 0, 16, BF16)
    third, flash = (Declaration(algorithm, FUSED, SHIFT_RULES["safe"]) for algorithm in (THIRD, FLASH_ATTENTION))
    expected = run_declared(flash, inputs, ARITHMETIC, False).o / 2
    assert torch.equal(run_declared(third, inputs, ARITHMETIC, False).o, expected)
    heads = (HeadKernel(third),) * inputs.q.shape[1]
    assert torch.equal(attend(inputs.q, inputs.k, inputs.v, heads, Call(ARITHMETIC, 0, 0, (), inputs.q)), expected)
    # A composed kernel takes what its algorithm takes; the Triton kernels say that they do not have it.
    assert composed("third", third).refusal(inputs) is None
    assert composed("third", third).refusal(CASES["padded"].make(1, 0, 16, BF16)) == "third takes no key padding mask"
    reason = refusal(inputs, third, interpreted=True)
    assert reason == "the Triton kernels have no algorithm third: they have flash, standard"
