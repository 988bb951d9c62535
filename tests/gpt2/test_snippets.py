"""The snippets' claims at one seed, what they rest on, and that they repeat to the bit."""

import math
from dataclasses import replace

import pytest
import torch

from tiebreak.backends.backend import CPU, EMULATION
from tiebreak.cases.gpt2 import scripting
from tiebreak.cases.gpt2.attention import HeadKernel
from tiebreak.cases.gpt2.data import corpus
from tiebreak.cases.gpt2.model import GPT2, PRESETS, everywhere
from tiebreak.cases.gpt2.scripting import DEAD_TOKENS, HEAD, LAYER, Script
from tiebreak.cases.gpt2.snippets import DRIFT, RUNAWAY, SNIPPETS, Snippet, SnippetClaim, SnippetResult, run_snippet
from tiebreak.cases.gpt2.variants import Variant, isolation, variants
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.formats import BF16

ROUNDED, UNROUNDED = variants(row_sum_from_rounded=True), variants(row_sum_from_rounded=False)
CLAIMED = ("flash", "stabilized", "o_fp32", "standard", "fair")


def _run(
    snippet: Snippet, variant: Variant, *, arithmetic: Arithmetic = EMULATION.arithmetic, seed: int = 0
) -> SnippetResult:
    return run_snippet(snippet, variant, arithmetic, seed)


@pytest.mark.parametrize("variant", CLAIMED)
@pytest.mark.parametrize("snippet", ["A", "Q", "LM"])
def test_the_claims_hold(snippet: str, variant: str) -> None:
    result = _run(SNIPPETS[snippet], ROUNDED[variant])
    assert result.verdicts, "nothing is claimed"
    assert result.fell == ()


def test_every_snippet_claims_something_of_flash_and_of_every_fix() -> None:
    for snippet in SNIPPETS.values():
        named = {name for claim in snippet.claims for name in claim.variants}
        assert named <= set(ROUNDED)
        assert {"flash", "stabilized", "o_fp32", "standard"} <= named


def test_with_l_from_unrounded_p_bar_the_published_fix_is_as_bad_as_none() -> None:
    """A limit of the fix: one r_m makes one common error of P-bar, and it has the other sign; `fair` has none."""
    for name in ("stabilized", "fair"):
        result = _run(DRIFT, UNROUNDED[name])
        assert result.verdicts, "nothing is claimed"
        assert result.fell == ()


def test_at_a_gap_of_11_it_is_worse_than_none() -> None:
    short = replace(DRIFT, steps=12, script=Script(gap=11.0))
    flash, fixed = (_run(short, UNROUNDED[name]).measures["delta_error_mean"] for name in ("flash", "stabilized"))
    assert fixed < -flash < 0


def test_in_a_fused_kernel_with_l_from_rounded_p_bar_dither_alone_is_undone() -> None:
    result = _run(DRIFT, ROUNDED["dithered_fused"])
    assert result.verdicts
    assert result.fell == ()


SHORT = replace(DRIFT, steps=12)


def test_the_drift_has_the_sign_of_w_o() -> None:
    """It is also smaller by two orders: with W_O flipped the head makes the dead tokens improbable, and dO small."""
    measures = _run(replace(SHORT, script=Script(output_sign=-1.0)), ROUNDED["flash"]).measures
    assert measures["delta_error_drift"] < -0.9
    assert measures["direction_cosine"] < -0.9


def test_values_of_both_signs_do_not_drift() -> None:
    result = _run(replace(SHORT, script=Script(sink_value=0.0, value=0.0)), ROUNDED["flash"])
    assert abs(result.measures["delta_error_mean"]) < 1e-4


def test_the_native_arithmetic_of_this_cpu_drifts_too() -> None:
    result = _run(SHORT, ROUNDED["flash"], arithmetic=CPU.arithmetic)
    assert result.fell == ()


def test_a_seed_gives_the_same_run_to_the_bit() -> None:
    short = replace(RUNAWAY, steps=5, every=2)
    once, again, other = (_run(short, ROUNDED["fair"], seed=seed) for seed in (0, 0, 1))
    assert once.losses == again.losses
    assert once.measures == again.measures
    assert once.losses != other.losses


def test_only_what_the_snippet_trains_changes_and_the_script_stays() -> None:
    """One LM step: the scripted elements keep their values, the rest of the second layer learns."""
    models: list[GPT2] = []

    class Keeping(GPT2):
        def loss(self, tokens: torch.Tensor, targets: torch.Tensor, step: int) -> torch.Tensor:
            models.append(self)
            return super().loss(tokens, targets, step)

    snippet = replace(SNIPPETS["LM"], steps=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiebreak.cases.gpt2.snippets.GPT2", Keeping)
        _run(snippet, ROUNDED["o_fp32"])
    trained = models[0]
    fresh = _fresh(snippet.script)
    changed = {
        name: before != after
        for (name, before), (_, after) in zip(fresh.named_parameters(), trained.named_parameters(), strict=True)
    }
    assert {name for name, where in changed.items() if bool(where.any())} == set(snippet.trained)
    d, layer = trained.configuration.d, f"blocks.{LAYER}"
    scripted = (
        changed[f"{layer}.wv.weight"][HEAD * d : (HEAD + 1) * d],
        changed[f"{layer}.wo.weight"][:, HEAD * d : (HEAD + 1) * d],
        changed[f"{layer}.wo.weight"][-1],
        changed[f"{layer}.down.weight"][-1],
        changed["head.weight"][:, -1],
        changed["head.weight"][-DEAD_TOKENS:],
    )
    assert not any(bool(part.any()) for part in scripted)


def _fresh(script: Script) -> GPT2:
    configuration = replace(PRESETS["tiny"], vocabulary=len(corpus().vocabulary) + DEAD_TOKENS)
    kernels = everywhere(HeadKernel(ROUNDED["flash"].scripted), configuration)
    model = GPT2(configuration, kernels, EMULATION.arithmetic, 0)
    scripting.apply(script, model, 0)
    return model


def test_the_script_puts_two_sinks_a_gap_above_the_rest() -> None:
    script = Script(gap=12.0)
    model = _fresh(script)
    block, d = model.block(LAYER), model.configuration.d
    x = block.norm_1(model.tokens(torch.arange(64)) + model.positions.weight)
    q, k, v = ((x @ weight.weight.T)[:, HEAD * d : (HEAD + 1) * d] for weight in (block.wq, block.wk, block.wv))
    scores = (q @ k.T / math.sqrt(d))[2:]  # of the ordinary queries
    sinks, others = scores[:, :2], scores[:, 2:]
    assert torch.equal(sinks[:, 0], sinks[:, 1])
    assert (sinks.mean() - others.mean()).item() == pytest.approx(12.0, abs=1.0)
    assert others.mean().item() == pytest.approx(script.key * script.query / math.sqrt(d), abs=0.5)
    assert v.mean().item() == pytest.approx(-2.9, abs=0.3)


def test_a_claim_speaks_of_its_variants_and_its_way_of_summing_l() -> None:
    claim = SnippetClaim(frozenset({"flash"}), "x", "a test", row_sum_from_rounded=True)
    assert claim.concerns(ROUNDED["flash"])
    assert not claim.concerns(UNROUNDED["flash"])
    assert not claim.concerns(ROUNDED["fair"])


def test_a_claim_is_not_met_by_nan() -> None:
    claim = SnippetClaim(frozenset({"flash"}), "x", "a test", low=0.0)
    assert claim.held({"x": 1.0})
    assert not claim.held({"x": math.nan})


def test_a_claim_that_falls_is_told_in_one_line() -> None:
    claim = SnippetClaim(frozenset({"o_fp32"}), "delta_error_mean", "a test", low=1.0)
    result = _run(replace(SHORT, steps=1, claims=(claim,)), ROUNDED["o_fp32"])
    assert len(result.fell) == 1
    assert result.fell[0].startswith("A, o_fp32, seed 0: claim fell: 1 < delta_error_mean; delta_error_mean = ")


@pytest.mark.parametrize(
    ("name", "rule", "unfused", "stochastic"),
    [
        ("flash", "safe", True, False),
        ("flash_fused", "safe", False, False),
        ("stabilized", "stabilized", True, False),
        ("stabilized_fused", "stabilized", False, False),
        ("dithered", "dithered", True, False),
        ("dithered_fused", "dithered", False, False),
        ("o_fp32", "safe", False, False),
        ("stochastic_fused", "safe", False, True),
        ("fair", "dithered", False, True),
        ("standard", "safe", False, False),
    ],
)
def test_variants_are_what_their_names_say(name: str, rule: str, unfused: bool, stochastic: bool) -> None:
    for table, rounded in ((ROUNDED, True), (UNROUNDED, False)):
        declared = table[name].scripted
        plan = declared.plan
        assert declared.algorithm == ("standard" if name == "standard" else "flash")
        assert declared.shift_rule.name == rule
        assert (plan.unfused, plan.stochastic, plan.row_sum_from_rounded) == (unfused, stochastic, rounded)
        assert plan.s.narrows
        assert plan.p_bar.narrows
        assert plan.o.narrows == (name != "o_fp32")


def test_the_amplified_snippet_keeps_s_in_a_narrower_format() -> None:
    short = replace(SNIPPETS["X"], steps=2)
    narrow, bf16 = (_run(each, ROUNDED["flash"]).losses for each in (short, replace(short, scores=BF16)))
    assert narrow != bf16


@pytest.mark.parametrize("name", isolation(row_sum_from_rounded=True))
def test_every_isolated_change_is_a_change(name: str) -> None:
    flash = isolation(row_sum_from_rounded=True)["tiling off"]
    variant = isolation(row_sum_from_rounded=True)[name]
    assert variant.name == name
    assert (variant == flash) == (name == "tiling off")
