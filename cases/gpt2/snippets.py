"""Short training runs that show the paper's causal chain, each with what is claimed about it.

Every snippet trains the same small GPT-2 on the same batches with a head scripted into the failure state
(`tiebreak.cases.gpt2.scripting`); what differs between two runs of a snippet is the attention kernel alone.

No bound is written by hand. `claims.csv` has those that follow from many seeds, by one rule; the study that runs them
writes it (`tests/studies/bounds.py` has the rule and what is said of whom). Their table is in docs/training.md.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from tiebreak.cases.gpt2 import scripting
from tiebreak.cases.gpt2.attention import HeadKernel, Heads, Kernels
from tiebreak.cases.gpt2.data import Batches, corpus
from tiebreak.cases.gpt2.mitigations import QKClip
from tiebreak.cases.gpt2.model import CLIP, EPSILON, GPT2, PRESETS, Configuration, adamw
from tiebreak.cases.gpt2.monitors import MEASURES, MeasureRecorder, direction_cosine, drift, spectral_norms
from tiebreak.cases.gpt2.scripting import HEAD, LAYER, Script
from tiebreak.cases.gpt2.variants import Variant, variant_names
from tiebreak.cases.verdicts import BiasVerdict
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.formats import BF16, Format, parse_format
from tiebreak.kernels.inputs import TORCH_DTYPES
from tiebreak.kernels.kernel import Declaration, Kernel
from tiebreak.kernels.plans import Cast

CLAIMS_FILE = Path(__file__).with_name("claims.csv")
# The monitors of results, other than the direction; no other monitor is paid for.
_READ = ("delta_error", "delta", "output_delta_error", "repeated_rows", "row_max")
_PAPER = "arXiv 2510.04212, section 3; margins of this suite"
_SUITE = "this suite"


@dataclass(frozen=True)
class SnippetClaim:
    """Bounds of one measure, for some variants."""

    variants: frozenset[str]  # by full name; none: whatever trains
    measure: str  # a name of SnippetResult.measures
    source: str  # who claims it
    low: float = -math.inf  # the measure must be above
    high: float = math.inf  # the measure must be below
    waives: frozenset[str] = frozenset()  # names of checks that need not pass: that they fail is what is claimed

    def passes(self, measures: Mapping[str, float]) -> bool:
        """Return whether the measure is within the bounds; NaN is not."""
        return self.low < measures[self.measure] < self.high

    @property
    def text(self) -> str:
        """The claim in words, as reports print it."""
        low = "" if self.low == -math.inf else f"{self.low:g} < "
        high = "" if self.high == math.inf else f" < {self.high:g}"
        return f"{low}{self.measure}{high}"


Claims = Mapping[tuple[str, int], tuple[SnippetClaim, ...]]  # by a snippet's name and the version of its recipe


def read_claims(path: Path = CLAIMS_FILE) -> Claims:
    """Return the claims of a data file."""
    claims: dict[tuple[str, int], tuple[SnippetClaim, ...]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        next(file)  # where the spreads were measured
        for row in csv.DictReader(file):
            of, variants = (row["snippet"], int(row["version"])), frozenset(row["variants"].split())
            bounds = float(row["low"]), float(row["high"])
            claims[of] = (*claims.get(of, ()), SnippetClaim(variants, row["measure"], row["source"], *bounds))
    return claims


FROZEN = read_claims()


@dataclass(frozen=True)
class Snippet:
    """The recipe of one short training run."""

    name: str  # how tables and --cases call it
    label: str  # a letter or two for headings
    about: str  # one line
    headline: str  # the measure that tables show
    spec: str  # how they format it
    roster: tuple[str, ...]  # variants of a default run, by full name
    on_devices: tuple[str, ...]  # those of them that a device runs by default, in addition to its own kernels
    own_claims: tuple[SnippetClaim, ...] = ()  # of measures without a spread that bounds could come from
    version: int = 1  # raised when the recipe changes: records of other versions are not comparable
    steps: int = 20  # of the optimiser
    every: int = 1  # steps between two readings of the monitors
    rate: float = 1e-5  # learning rate of AdamW
    epsilon: float = EPSILON  # AdamW's
    script: Script = field(default_factory=Script)  # of the failing head
    trained: tuple[str, ...] = ()  # parameters that train, without those that a mitigation adds; empty: all
    silent_before: bool = False  # whether the layer before the scripted one, which writes nothing, is left out
    layers: int = 2  # of the model; the scripted one is the second
    study: bool = False  # whether it tells fixes apart: kernels of users run in it by name alone
    scores: Format = BF16  # that S is kept in
    source: str = _PAPER  # where the run or its claims come from
    unclaimed: str | None = None  # why nothing is claimed of the kernels that no claim speaks of

    @property
    def claims(self) -> tuple[SnippetClaim, ...]:
        """The claims, by variant."""
        return (*self.own_claims, *FROZEN.get((self.name, self.version), ()))

    @property
    def is_amplified(self) -> bool:
        """True if it takes a narrower format than anyone trains with to show the effect."""
        return self.scores not in TORCH_DTYPES

    def drifts(self, measures: Mapping[str, float]) -> BiasVerdict | None:
        """Return a run's verdict by comparison with kernels whose bias training feels, and with sound ones.

        Biased: it drifts as the former; unbiased: as the latter; undecided: as neither. None: unknown.
        """
        claims = [claim for claim in self.claims if claim.measure == self.headline]
        drifting, sound = (
            [claim.passes(measures) for claim in claims if claim.variants & ours and not claim.variants & others]
            for ours, others in ((_DRIFTING, _SOUND), (_SOUND, _DRIFTING))
        )
        if not (drifting and sound):
            return None
        if any(drifting):
            return BiasVerdict.BIASED
        return BiasVerdict.UNBIASED if all(sound) else BiasVerdict.UNDECIDED

    def claims_about(self, variant: Variant) -> tuple[SnippetClaim, ...]:
        """Return the claims about a variant."""
        name = variant.held_to or variant.name
        return tuple(claim for claim in self.claims if name in claim.variants or not claim.variants)


@dataclass(frozen=True)
class SnippetResult:
    """The measures of one run of a snippet."""

    variant: Variant  # what it trained with
    measures: Mapping[str, float]  # by name
    losses: tuple[float, ...]  # in nats, one a step; cut short by the first that is not finite
    steps: tuple[int, ...]  # at which monitors were read
    series: Mapping[str, tuple[float, ...]]  # of the scripted head at those steps: delta_error, row_max, wq_norm


_QUERIES = (f"blocks.{LAYER}.wq.weight",)
_SECOND_LAYER = (
    *_QUERIES,
    *(f"blocks.{LAYER}.{name}.weight" for name in ("wv", "wo", "norm_2", "up", "down")),
    "head.weight",
)
_SHORT_ROSTER, _SHORT_UNROUNDED = (variant_names("flash stabilized fair", rounded=rounded) for rounded in (True, False))
_FLASH, _, _FAIR = _SHORT_ROSTER
_FUSED, _BASE_2, _CONTRACTED = variant_names("flash_fused flash_base_2 flash_contracted", rounded=False)
# The runs that a kernel's run is compared with, to tell whether training feels its bias.
_SOUND = frozenset({*variant_names("fair"), _BASE_2})
_DRIFTING = frozenset({*variant_names("flash flash_fused"), _CONTRACTED})
# Logits of 25 and 37 to begin with, and values so far apart that a small change of P shows in O.
_RUNAWAY = Script(key=32.0, query=100 / 32, sink_query=16.0, value=-12.0)

DRIFT = Snippet(
    "train_drift",
    "A",
    "delta errs to one side in every step and pushes W_Q along one direction",
    headline="delta_error_mean",
    spec="+.1e",
    version=2,
    roster=(
        *_SHORT_ROSTER,
        *variant_names("o_fp32", rounded=True),
        *variant_names("standard flash flash_fused stabilized dithered_fused fair", rounded=False),
    ),
    on_devices=(*_SHORT_ROSTER, *_SHORT_UNROUNDED),
)
RUNAWAY = Snippet(
    "train_runaway",
    "Q",
    "only W_Q trains, and grows",
    headline="wq_norm_growth",
    spec=".2f",
    version=2,
    steps=101,
    every=10,
    rate=0.1,
    epsilon=0.1,
    script=_RUNAWAY,
    trained=_QUERIES,
    silent_before=True,
    roster=(*_SHORT_ROSTER, *variant_names("standard"), _FUSED),
    on_devices=(_FLASH, _FAIR),
)
LANGUAGE_MODEL = replace(
    RUNAWAY,
    name="train_lm",
    label="LM",
    about="the second layer and the head learn: flash keeps up logits that fall with a fix",
    headline="row_max_rise",
    spec="+.0f",
    rate=3e-3,
    epsilon=EPSILON,
    trained=_SECOND_LAYER,
    study=True,
    roster=_SHORT_ROSTER,
    on_devices=_SHORT_ROSTER[:1],
)
AMPLIFIED = replace(
    RUNAWAY,
    name="train_amplified",
    label="X",
    about="amplified, S in E8M5: the loss goes up",
    headline="loss_rise",
    spec="+.2f",
    steps=221,
    script=replace(_RUNAWAY, value=-24.0, dead_weight=3.0),
    roster=_SHORT_ROSTER,
    on_devices=(),  # none has the format
    scores=parse_format("E8M5"),
)
# Limits of the published fix.
GAP_11 = replace(
    DRIFT,
    name="train_gap_11",
    label="A11",
    about="as A, the sinks 11 above the rest: the fix errs more than plain flash",
    study=True,
    script=Script(gap=11.0),
    roster=_SHORT_UNROUNDED,
    on_devices=_SHORT_UNROUNDED,
)
ONE_SINK = replace(
    DRIFT,
    name="train_one_sink",
    label="A1",
    about="as A with one sink: nothing repeats, flash drifts a little, and with the fix as much",
    study=True,
    script=Script(sinks=1),
    roster=_SHORT_ROSTER,
    on_devices=_SHORT_ROSTER,
)
# The other tokens' P-bar is e^-30, nothing to fp32: without contraction ties are exact, and go to even.
NO_TAIL = replace(
    DRIFT,
    name="train_no_tail",
    label="AC",
    about="as A, the sinks 30 above the rest: contraction alone breaks the ties, and delta errs to one side",
    version=1,
    study=True,
    script=Script(gap=30.0),
    roster=(_BASE_2, _CONTRACTED, *variant_names("flash_contracted", rounded=True)),
    on_devices=(_BASE_2, _CONTRACTED),
)
_LONG = 40  # steps: with the fix the loss breaks down within 20
# With l from unrounded P-bar 9 of 64 runs get through: those are claimed nothing of.
_BROKEN = frozenset(variant_names("stabilized stabilized_fused", rounded=True))
_WHOLE = frozenset(variant_names("flash flash_fused o_fp32 standard dithered dithered_fused stochastic_fused fair"))
LARGE_LOGITS = replace(
    RUNAWAY,
    name="train_large_logits",
    label="N",
    about=f"as Q, logits of 94 and more: the fix's P̄ underflows, and the loss is NaN before step {_LONG}",
    headline="finite_steps",
    spec=".0f",
    version=1,
    steps=_LONG,
    script=replace(_RUNAWAY, key=120.0),
    # Halfway between the steps that a run can have: all of them, or fewer. There is no spread to derive a bound from.
    own_claims=(
        # The claim is that it breaks down, so the check of the loss is waived.
        SnippetClaim(_BROKEN, "finite_steps", _SUITE, high=_LONG - 0.5, waives=frozenset({"loss"})),
        SnippetClaim(_WHOLE, "finite_steps", _SUITE, low=_LONG - 0.5),
    ),
    roster=_SHORT_ROSTER,
    on_devices=_SHORT_ROSTER,
)
TWO_LAYERS = replace(
    DRIFT,
    name="train_two_layers",
    label="B",
    about="as A with a layer behind, whose forward and backward pass lie between those of the scripted one",
    headline="delta_error_share",
    spec=".1e",
    version=1,
    steps=3,
    silent_before=True,
    layers=3,
    # Sound kernels come to thousandths. Nearer to none than to the true one is what was computed from another call.
    own_claims=(SnippetClaim(frozenset(), "delta_error_share", _SUITE, high=0.5),),
    roster=(_SHORT_UNROUNDED[0],),
    on_devices=(_SHORT_UNROUNDED[0],),
)

GROUP = "short training runs of a small GPT-2"  # what they are, among the groups of cases
SNIPPETS: Mapping[str, Snippet] = {
    snippet.name: snippet
    for snippet in (DRIFT, RUNAWAY, LANGUAGE_MODEL, AMPLIFIED, GAP_11, ONE_SINK, NO_TAIL, LARGE_LOGITS, TWO_LAYERS)
}


def run_snippet(
    snippet: Snippet, variant: Variant, arithmetic: Arithmetic, seed: int, device: str = "cpu"
) -> SnippetResult:
    """Train for a moment and measure the scripted head.

    Attention runs on `arithmetic`, everything else in fp32, all on the torch device `device`. The seed is that of
    weights and noise; the batches are always the same.
    """
    model = _model(snippet, variant, arithmetic, seed, device)
    monitors = {**{name: MEASURES[name] for name in _READ}, "direction_cosine": direction_cosine()}
    recorder = MeasureRecorder(monitors, [LAYER], HEAD)
    losses, steps, norms = _train(snippet, model, recorder, variant.mitigation.clipper())
    read = {name: recorder.series(name, LAYER, HEAD) for name in monitors}
    series = {"delta_error": read["delta_error"], "row_max": read["row_max"], "wq_norm": tuple(norms)}
    return SnippetResult(variant, _measures(read, losses, norms), tuple(losses), tuple(steps), series)


def _kernels(snippet: Snippet, variant: Variant, configuration: Configuration) -> Kernels:
    """Return the variant's kernels, with S in the snippet's format where they name the format of S."""

    def head(implementation: Declaration | Kernel) -> HeadKernel:
        if isinstance(implementation, Kernel) or not snippet.is_amplified:
            return HeadKernel(implementation)
        return HeadKernel(replace(implementation, plan=replace(implementation.plan, s=Cast(snippet.scores))))

    behind = (head(variant.scripted),) * configuration.heads
    before: Heads = () if snippet.silent_before else (head(variant.before or variant.scripted),) * configuration.heads
    kernels = [before] * LAYER + [behind] * (configuration.layers - LAYER)
    if variant.head is not None:
        kernels[LAYER] = (*behind[:HEAD], head(variant.head), *behind[HEAD + 1 :])
    return tuple(kernels)


def _model(snippet: Snippet, variant: Variant, arithmetic: Arithmetic, seed: int, device: str) -> GPT2:
    """Return the snippet's model with the variant's kernels, in the scripted failure state."""
    vocabulary = len(corpus().vocabulary) + scripting.DEAD_TOKENS
    sizes = replace(PRESETS["tiny"], layers=snippet.layers, vocabulary=vocabulary)
    configuration = variant.mitigation.configured(sizes)
    model = GPT2(configuration, _kernels(snippet, variant, configuration), arithmetic, seed)
    scripting.apply(snippet.script, model, seed)
    variant.mitigation.adapt(model, snippet.script)
    model.to(device)
    if snippet.trained:
        trained, scripted = (*snippet.trained, *variant.mitigation.trained), scripting.frozen(model)
        for name, weight in model.named_parameters():
            weight.requires_grad_(name in trained)
            if name in trained and name in scripted:  # the failing state is to last
                hide = partial(torch.masked_fill, mask=scripted[name], value=0.0)
                weight.register_hook(hide)  # type: ignore[no-untyped-call]
    return model


def _train(
    snippet: Snippet, model: GPT2, recorder: MeasureRecorder, clipper: QKClip | None
) -> tuple[list[float], list[int], list[float]]:
    """Train and return losses, one a step; the steps of the readings, and the scripted head's norm of W_Q at each."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = adamw(weights, snippet.rate, snippet.epsilon)
    losses, steps, norms = list[float](), list[int](), list[float]()
    for step in range(snippet.steps):
        reading = step % snippet.every == 0 or step == snippet.steps - 1
        model.observers = [look for look in (recorder if reading else None, clipper) if look is not None]
        tokens, targets = (part.to(weights[0].device) for part in _batch(model.configuration.context, step))
        loss = model.loss(tokens, targets, step)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(weights, CLIP)
        optimizer.step()
        losses.append(loss.item())
        if clipper is not None:
            clipper.after_step(model)
        if reading:
            steps.append(step)
            norms.append(spectral_norms(model.block(LAYER))[HEAD].item())
        if not math.isfinite(losses[-1]):
            break
    return losses, steps, norms


@cache
def _batch(context: int, step: int) -> tuple[Tensor, Tensor]:
    """Return one step's tokens and targets: the same for every variant and seed, so a process makes them once."""
    return Batches(corpus().tokens, sequences=8, context=context, seed=7).batch(step)


def _measures(read: Mapping[str, Sequence[float]], losses: list[float], norms: list[float]) -> dict[str, float]:
    """Return the measures of a run from its readings, losses and norms of W_Q."""
    mean = {name: sum(values) / len(values) for name, values in read.items()}
    finite, top = [loss for loss in losses if math.isfinite(loss)], read["row_max"]
    return {
        "delta_error_mean": mean["delta_error"],
        "delta_error_drift": drift(read["delta_error"]),
        "delta_error_share": abs(mean["delta_error"] / mean["delta"]) if mean["delta"] else math.nan,
        "output_delta_error_mean": mean["output_delta_error"],
        "direction_cosine": mean["direction_cosine"],
        "repeated_rows": mean["repeated_rows"],
        "wq_norm_growth": norms[-1] / norms[0],
        "row_max_first": top[0],
        "row_max_rise": top[-1] - top[0],
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "loss_rise": max(finite, default=math.nan) - losses[0],
        "finite_steps": float(len(finite)),
    }
