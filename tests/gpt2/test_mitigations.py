"""QK-clip against weights computed by hand; QK-norm in the scripted failure state; which parameters they add."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tiebreak.backends.backend import EMULATION
from tiebreak.cases.gpt2 import scripting
from tiebreak.cases.gpt2.attention import HeadKernel
from tiebreak.cases.gpt2.mitigations import GATED, NO_MITIGATION, QK_CLIP, QK_NORM, Mitigation, QKClip, clip
from tiebreak.cases.gpt2.model import GPT2, Configuration, everywhere
from tiebreak.cases.gpt2.monitors import MEASURES, MeasureRecorder
from tiebreak.cases.gpt2.scripting import HEAD, LAYER, Script
from tiebreak.cases.gpt2.snippets import DRIFT, RUNAWAY, SnippetResult, run_snippet
from tiebreak.cases.gpt2.variants import Variant, variants
from tiebreak.kernels.algorithms import FLASH_ATTENTION, STANDARD_ATTENTION
from tiebreak.kernels.kernel import Declaration
from tiebreak.kernels.plans import FUSED
from tiebreak.kernels.shift_rules import SHIFT_RULES

SMALL = Configuration(layers=2, heads=2, width=16, context=8, vocabulary=13)
WIDE = Configuration(layers=2, heads=4, width=64, context=64, vocabulary=72)
FLASH = HeadKernel(Declaration(FLASH_ATTENTION, FUSED, SHIFT_RULES["safe"]))
SCRIPTS = (DRIFT.script, RUNAWAY.script)


def _model(configuration: Configuration) -> GPT2:
    return GPT2(configuration, everywhere(FLASH, configuration), EMULATION.arithmetic, 0)


def _scripted(mitigation: Mitigation, script: Script = SCRIPTS[0]) -> GPT2:
    model = _model(mitigation.configured(WIDE))
    scripting.apply(script, model, 0)
    mitigation.adapt(model, script)
    return model


def _tokens(configuration: Configuration) -> Tensor:
    shape = (2, configuration.context)
    return torch.randint(configuration.vocabulary, shape, generator=torch.Generator().manual_seed(1))


def _scores(model: GPT2) -> Tensor:
    """Of layer LAYER, (batch, heads, tokens, tokens), in fp32 and not yet rounded."""
    block, tokens = model.block(LAYER), _tokens(WIDE)
    x = block.norm_1(model.tokens(tokens) + model.positions.weight)
    q, k = (layer(x).view(*tokens.shape, 4, 16).transpose(1, 2) for layer in (block.wq, block.wk))
    if block.q_norm is not None and block.k_norm is not None:
        q, k = block.q_norm(q), block.k_norm(k)
    scores: Tensor = q @ k.mT / 4
    return scores.detach()


def test_clip_by_hand() -> None:
    """Logits of 400 and 50 under a bound of 100: the first head's weights halve, each its square root, twice."""
    block = _model(SMALL).block(0)
    before = {name: weight.detach().clone() for name, weight in block.named_parameters()}
    clip(block, torch.tensor([400.0, 50.0]), tau=100.0)
    for name, weight in block.named_parameters():
        expected = before[name].clone()
        if name in ("wq.weight", "wk.weight"):
            expected[:8] *= 0.5
        assert torch.equal(weight, expected), name


def test_clipping_after_a_step_brings_the_largest_logit_to_tau() -> None:
    """The bound lies between the heads' largest logits, so that some are clipped and one is not."""
    model, tau = _model(SMALL), 0.012
    for layer in range(SMALL.layers):
        model.block(layer).wo.weight.data.zero_()  # or the clip of one layer would change the next one's input
    before = _largest(model)
    clipper = QKClip(tau)
    model.observers = [clipper]
    _backward(model)
    clipper.after_step(model)
    assert (before > 1.2 * tau).any()
    assert (before < tau).any()
    # q and k are rounded to bf16 anew after the clip.
    torch.testing.assert_close(_largest(model), before.clamp(max=tau), rtol=0.02, atol=0.0)
    clipped = model.block(0).wq.weight.detach().clone()
    clipper.after_step(model)  # it has forgotten the step before
    assert torch.equal(model.block(0).wq.weight, clipped)


def test_a_clip_of_heads_with_several_kernels_meets_each_its_own() -> None:
    """The heads of a layer come in one call a kernel, and their logits with the call."""
    other = HeadKernel(Declaration(STANDARD_ATTENTION, FUSED, SHIFT_RULES["safe"]))
    alike = _model(SMALL)
    mixed = GPT2(SMALL, ((FLASH, other), (FLASH, other)), EMULATION.arithmetic, 0)
    for model in (alike, mixed):
        clipper = QKClip(1e-3)
        model.observers = [clipper]
        _backward(model)
        clipper.after_step(model)
    torch.testing.assert_close(mixed.block(0).wq.weight, alike.block(0).wq.weight)


def _backward(model: GPT2) -> None:
    tokens = _tokens(model.configuration)
    model.loss(tokens, tokens.roll(-1, 1), 0).backward()  # type: ignore[no-untyped-call]


def _largest(model: GPT2) -> Tensor:
    recorder = MeasureRecorder({"max_logit": MEASURES["max_logit"]}, range(SMALL.layers))
    model.observers = [recorder]
    _backward(model)
    return torch.tensor([recorder.series("max_logit", at, head)[0] for at in (0, 1) for head in (0, 1)])


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_scripted_head_keeps_its_scores_and_ties_under_qk_norm(script: Script) -> None:
    """Of all queries but the sinks', which see equal keys alone; in the other heads nearly."""
    model = _scripted(QK_NORM, script)
    plain, normed = (_scores(each)[:, :, script.sinks :] for each in (_scripted(NO_MITIGATION, script), model))
    torch.testing.assert_close(normed[:, HEAD], plain[:, HEAD], rtol=1e-4, atol=1e-4)
    others = [head for head in range(4) if head != HEAD]
    error, size = (normed - plain)[:, others].std(), plain[:, others].std()
    assert error < 0.5 * size
    assert size < 0.05  # little enough not to matter
    recorder = MeasureRecorder({"repeated_rows": MEASURES["repeated_rows"]}, [LAYER])
    model.observers = [recorder]
    _backward(model)
    # After the rounding of q, k and S to bf16, in all rows but the first, which sees one token.
    assert recorder.series("repeated_rows", LAYER, HEAD)[0] == pytest.approx(63 / 64)


@pytest.mark.parametrize("mitigation", [NO_MITIGATION, QK_NORM, QK_CLIP, GATED])
def test_a_mitigation_trains_what_it_adds(mitigation: Mitigation) -> None:
    plain, changed = (dict(_scripted(variant).named_parameters()) for variant in (NO_MITIGATION, mitigation))
    added = {name for name in changed if name not in plain and name.startswith(f"blocks.{LAYER}.")}
    assert added == set(mitigation.trained)
    assert all(torch.equal(changed[name], weight) for name, weight in plain.items())
    assert (mitigation.clipper() is None) == (mitigation.tau is None)


def _run(mitigation: Mitigation) -> SnippetResult:
    """A few steps of the run-away with plain flash attention."""
    snippet = replace(RUNAWAY, steps=4, every=1)
    variant = Variant("a test", variants(rounded=True)["flash"].scripted, mitigation=mitigation)
    return run_snippet(snippet, variant, EMULATION.arithmetic, 0)


def test_a_snippet_trains_with_each_mitigation() -> None:
    plain, clipped, normed, gated = map(_run, (NO_MITIGATION, Mitigation(tau=20.0), QK_NORM, GATED))
    # It clips after every step: the first, before any clip, is that of plain attention.
    assert clipped.series["row_max"][0] == plain.series["row_max"][0] > 25.0
    assert max(clipped.series["row_max"][1:]) < 20.5 < min(plain.series["row_max"])
    # Under QK-norm it starts from the same scores.
    assert normed.series["row_max"][0] == pytest.approx(plain.series["row_max"][0], rel=0.01)
    assert normed.losses[0] == pytest.approx(plain.losses[0], abs=1e-3)
    assert normed.losses[1:] != plain.losses[1:]
    # The scripted head does nothing but harm: as its gate shuts the loss falls, which no W_Q can do.
    assert gated.losses[0] == plain.losses[0]
    assert gated.losses[-1] < plain.losses[-1] - 0.5
