"""The snippets' claims at one seed, what they rest on, and that they repeat to the bit."""

import math
from dataclasses import replace

import pytest
import torch

from tiebreak.backends.backend import CPU, EMULATION
from tiebreak.cases.gpt2 import scripting, snippets
from tiebreak.cases.gpt2.attention import HeadKernel
from tiebreak.cases.gpt2.data import Batches, corpus
from tiebreak.cases.gpt2.model import GPT2, PRESETS, everywhere
from tiebreak.cases.gpt2.scripting import DEAD_TOKENS, HEAD, LAYER, Script
from tiebreak.cases.gpt2.snippets import (
    AMPLIFIED,
    DRIFT,
    LANGUAGE_MODEL,
    RUNAWAY,
    SNIPPETS,
    Snippet,
    SnippetClaim,
    SnippetResult,
    run_snippet,
)
from tiebreak.cases.gpt2.variants import VARIANTS, Variant, variant_names, variants
from tiebreak.cases.verdicts import BiasVerdict
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.formats import BF16

ROUNDED, UNROUNDED = variants(rounded=True), variants(rounded=False)


def _run(
    snippet: Snippet, variant: Variant, *, arithmetic: Arithmetic = EMULATION.arithmetic, seed: int = 0
) -> SnippetResult:
    return run_snippet(snippet, variant, arithmetic, seed)


def fell(snippet: Snippet, result: SnippetResult) -> list[str]:
    """The claims that a run does not meet."""
    return [claim.text for claim in snippet.claims_about(result.variant) if not claim.passes(result.measures)]


# That the claims hold is what the cells of the matrix test.
def test_every_snippet_of_the_papers_chain_says_something_of_flash_and_of_every_fix() -> None:
    for snippet in (DRIFT, RUNAWAY, LANGUAGE_MODEL, AMPLIFIED):
        named = {name for each in snippet.claims for name in each.variants}
        assert named <= set(VARIANTS)
        for short in ("flash", "stabilized", "o_fp32", "standard", "fair"):
            assert named.issuperset(variant_names(short, rounded=True))
    for snippet in SNIPPETS.values():
        for name in snippet.roster:
            assert snippet.claims_about(VARIANTS[name]), f"nothing is claimed of {name} in {snippet.name}"
    kernels = {(variant.scripted, variant.before, variant.head, variant.mitigation) for variant in ROUNDED.values()}
    assert len(kernels) == len(ROUNDED), "each change of section 3.2 is one"


SHORT = replace(DRIFT, steps=12)


def test_the_drift_has_the_sign_of_w_o_and_that_of_v() -> None:
    """It is also smaller by two orders: with W_O flipped the head makes the dead tokens improbable, and dO small."""
    measures = _run(replace(SHORT, script=Script(output_sign=-1.0)), ROUNDED["flash"]).measures
    assert measures["delta_error_drift"] < -0.9
    assert measures["direction_cosine"] < -0.9
    both_signs = _run(replace(SHORT, script=Script(sink_value=0.0, value=0.0)), ROUNDED["flash"]).measures
    assert abs(both_signs["delta_error_mean"]) < 1e-4
    # The native arithmetic of this CPU drifts too.
    assert fell(SHORT, _run(SHORT, ROUNDED["flash"], arithmetic=CPU.arithmetic)) == []


def test_a_seed_gives_the_same_run_to_the_bit_and_s_is_kept_in_the_snippet_s_format() -> None:
    short = replace(RUNAWAY, steps=5, every=2)
    once, again, other = (_run(short, ROUNDED["fair"], seed=seed) for seed in (0, 0, 1))
    assert once.losses == again.losses
    assert once.measures == again.measures
    assert once.losses != other.losses
    amplified = replace(SNIPPETS["train_amplified"], steps=2)
    narrow, bf16 = (_run(each, ROUNDED["flash"]).losses for each in (amplified, replace(amplified, scores=BF16)))
    assert narrow != bf16
    tokens, _ = snippets._batch(64, 3)
    assert torch.equal(tokens, Batches(corpus().tokens, sequences=8, context=64, seed=7).batch(3)[0])


def test_only_what_the_snippet_trains_changes_and_the_script_stays() -> None:
    """One LM step: the scripted elements keep their values, the rest of the second layer learns."""
    snippet = replace(SNIPPETS["train_lm"], steps=2)
    trained = snippets._model(snippet, ROUNDED["o_fp32"], EMULATION.arithmetic, 0, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snippets, "_model", lambda *_: trained)
        _run(snippet, ROUNDED["o_fp32"])
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


def test_a_loss_that_is_no_number_ends_the_run_and_is_counted() -> None:
    """The claim of the large logits, on a loss that is NaN at once and on one that never is, where it falls by name."""
    claim = SnippetClaim(frozenset({ROUNDED["o_fp32"].name}), "finite_steps", "a test", high=3.5)
    broken = replace(SHORT, name="a test", own_claims=(claim,), script=Script(key=1e30, query=1e30))  # beyond fp32
    result = _run(broken, ROUNDED["o_fp32"])
    assert (len(result.losses), result.measures["finite_steps"], fell(broken, result)) == (1, 0.0, [])
    sound = replace(SHORT, name="a test", own_claims=(claim,), steps=4)
    assert fell(sound, _run(sound, ROUNDED["o_fp32"])) == ["finite_steps < 3.5"]


@pytest.mark.parametrize(
    ("snippet", "value", "verdict"),
    [
        ("train_drift", 2.7e-3, BiasVerdict.BIASED),
        ("train_drift", -1e-7, BiasVerdict.UNBIASED),
        ("train_drift", math.nan, BiasVerdict.UNDECIDED),
        ("train_one_sink", -1.1e-4, BiasVerdict.BIASED),
        ("train_large_logits", 40.0, None),  # sound kernels and others alike get through
    ],
)
def test_a_run_drifts_where_it_goes_as_with_plain_flash(
    snippet: str, value: float, verdict: BiasVerdict | None
) -> None:
    assert SNIPPETS[snippet].drifts({SNIPPETS[snippet].headline: value}) is verdict
