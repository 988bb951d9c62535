"""A short training run: one of the snippets of a small GPT-2."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from tiebreak.backends.backend import Backend
from tiebreak.cases.gpt2.snippets import GROUP, SNIPPETS, Snippet, SnippetClaim, run_snippet
from tiebreak.cases.gpt2.variants import VARIANTS, Variant, variant_names
from tiebreak.kernels.features import CAUSAL
from tiebreak.kernels.formats import BF16, Format, Formats
from tiebreak.kernels.kernel import Kernel, composed
from tiebreak.matrix.experiment import Cell, Experiment, Kind, Pair, SelectionContext
from tiebreak.matrix.result import Claimed, Result
from tiebreak.matrix.workbench import Settings, Workbench
from tiebreak.reports.records import record as records
from tiebreak.reports.records.record import MeasureRecord

EMULATED_BACKWARD = "+emulated_backward"  # what the name of a kernel that trains with the suite's backward ends with
_DIGITS = 6  # significant ones of a series: it is there to be drawn
_FIGURES = {  # by the measure whose readings they show
    "delta_error_mean": records.SeriesFigure(
        "delta_error",
        "Training: delta's error summed up",
        "delta as the kernel has it less delta in fp64, summed over the rows of the scripted head and over the steps. A"
        " straight line is a bias: the query weights are pushed one way in every step. The kernels that err most and"
        " least.",
        "sum of delta's error",
        summed=True,
    ),
    "wq_norm_growth": records.SeriesFigure(
        "wq_norm",
        "Training: W_Q's norm",
        "Spectral norm of the scripted head's query weights while they alone train. The most growth and the least.",
        "spectral norm",
    ),
}
_SAID = {True: "stable", False: "fails"}  # what the paper says of training with a kernel


def trained_kernel(variant: Variant) -> Kernel:
    """Return a variant as the matrix lists it: by the declaration of its scripted layer."""
    assert not isinstance(variant.scripted, Kernel), "the variants of the suite are declarations"
    return composed(variant.name, variant.scripted)


#: The numbers of a result; all but `steps`, that the recipe asks for, are those of a snippet.
MEASURED: Mapping[str, MeasureRecord] = {
    "delta_error_mean": MeasureRecord("mean over the steps of s, the sum of delta_lp - delta_hp over the rows of one"),
    "delta_error_drift": MeasureRecord("sum(s) / sum |s| over the steps: 1 or -1 where s keeps one sign"),
    "delta_error_share": MeasureRecord("size of the mean of s over that of delta_hp's sum: 1 of a delta of 0"),
    "output_delta_error_mean": MeasureRecord("mean of s, had delta been computed from O: of rowsum(dO * error of O)"),
    "direction_cosine": MeasureRecord("cosine of the error of dW_Q to R (paper, equation 3)"),
    "repeated_rows": MeasureRecord("share of rows with a repeated maximum"),
    "wq_norm_growth": MeasureRecord("spectral norm of W_Q, last over first"),
    "row_max_first": MeasureRecord("mean largest logit of a row, at the start", "logits"),
    "row_max_rise": MeasureRecord("mean largest logit of a row, last less first", "logits"),
    "loss_first": MeasureRecord("loss of the first step", "nats"),
    "loss_last": MeasureRecord("loss of the last step", "nats"),
    "loss_rise": MeasureRecord("largest loss less the first", "nats"),
    "finite_steps": MeasureRecord("steps with a loss that is a number; the first one without ends the run", "steps"),
    "steps": MeasureRecord("steps that the run was to take", "steps"),
}


@dataclass(frozen=True)
class TrainingRun(Experiment):
    """The experiment of one short training run."""

    kind: ClassVar[str] = "training"
    time_limit: ClassVar[float] = 600.0
    tags = frozenset({"training"})
    case: Snippet

    def described(self) -> records.CaseRecord:
        snippet = self.case
        return records.CaseRecord(
            snippet.about,
            snippet.source,
            snippet.label,
            snippet.headline,
            snippet.unclaimed,
            group=GROUP,
            figure=_FIGURES.get(snippet.headline),
        )

    def told(self) -> Sequence[tuple[str, str]]:
        claims = ((", ".join(sorted(claim.variants)), claim) for claim in self.case.claims)
        rows = [("claim", f"{variants}: {claim.text} ({claim.source})") for variants, claim in claims]
        return [("steps", str(self.case.steps)), *rows]

    def formats(self) -> Sequence[Format]:
        return (BF16,)

    def input_kind(self, fmt: Format) -> str | None:
        """Return None where S is in a format that no device has."""
        return None if self.case.is_amplified else "training runs"

    def pairs(self, context: SelectionContext) -> Sequence[Pair]:
        """Return its roster, or the named part of it; any kernel where the snippet is named too."""
        if context.fmt != BF16:
            return []
        roster = [(backend, kernel) for backend in context.backends for kernel in self._roster(backend)]
        if not context.kernels_named:
            return roster
        default = {(backend.name, kernel.name) for backend, kernel in roster}
        return [
            (backend, _trained_by_suite(kernel) if kernel.external and context.emulated_backward else kernel)
            for backend, kernel in context.pairs
            if context.cases_named
            or (backend.name, kernel.name) in default
            or (kernel.external and not self.case.is_amplified and not self.case.study)
        ]

    def _roster(self, backend: Backend) -> list[Kernel]:
        """Return the kernels of a default run: a device trains with its own and the snippet's.

        Empty where a device lacks the snippet's format. The interpreter takes minutes for a run, so its kernels train
        only where they are named.
        """
        if not backend.composed or (self.case.is_amplified and not backend.predicts):
            return []
        names = self.case.roster if backend.predicts else self.case.on_devices
        formats = Formats.of(BF16)
        vendors = [each for each in backend.vendor_kernels() if each.has_backward and each.unsuited(formats) is None]
        return [*(trained_kernel(VARIANTS[name]) for name in names), *vendors]

    def refusal(self, cell: Cell, bench: Workbench) -> str | None:
        kernel = cell.kernel
        if kernel.external and CAUSAL not in kernel.takes:
            return f"{kernel.name} takes no {CAUSAL.words}, and training asks for one"
        if kernel.external and not kernel.has_backward and not kernel.name.endswith(EMULATED_BACKWARD):
            return f"{kernel.name} has no backward pass: --backward emulated trains it with the suite's"
        if self.case.is_amplified and not cell.backend.predicts:
            return f"the device computes in no {self.case.scores.name}"
        if self.case.is_amplified and not kernel.composed:
            return f"the kernel can't be told to keep S in {self.case.scores.name}"
        return None

    def run(self, cell: Cell, bench: Workbench) -> Result:
        snippet, settings = self.case, bench.settings
        variant = _variant(cell.kernel, settings)
        with cell.backend.in_use():
            outcome = run_snippet(snippet, variant, cell.backend.arithmetic, settings.seed, cell.backend.device)
        series = {
            name: tuple(records.finite(float(f"{value:.{_DIGITS}g}")) for value in values)
            for name, values in outcome.series.items()
        }
        evidence: dict[str, Any] = {"series": records.SeriesRecord(outcome.steps, series)}
        if outcome.variant.stable is not None:
            evidence["paper"] = _SAID[outcome.variant.stable]
        return replace(
            training_result(snippet, cell.kernel, settings, {**outcome.measures, "steps": float(snippet.steps)}),
            digest=hashlib.sha256(repr(outcome.losses).encode()).hexdigest()[:16],
            evidence=evidence,
        )


def _variant(kernel: Kernel, settings: Settings) -> Variant:
    """Return the variant that a kernel trains as: itself in every head, or the one that it represents."""
    if kernel.name in VARIANTS:
        return VARIANTS[kernel.name]
    implementation = kernel.declaration if kernel.composed and kernel.declaration else kernel
    trains_itself = kernel.external and kernel.has_backward
    held_to = variant_names("fair", rounded=True)[0] if trains_itself and settings.fair else None
    return Variant(kernel.name, implementation, held_to=held_to)


def _trained_by_suite(kernel: Kernel) -> Kernel:
    """Return a user's kernel with the suite's backward pass, under a name that tells; no claim is about it."""
    origin = (*kernel.origin, "--backward", "emulated")
    return replace(kernel, name=kernel.name + EMULATED_BACKWARD, has_backward=False, origin=origin)


def training_result(snippet: Snippet, kernel: Kernel, settings: Settings, measures: Mapping[str, float]) -> Result:
    """Return the result of a training run's measures: all of `MEASURED`, NaN where there is no number."""
    drifts = snippet.drifts(measures)
    return Result(
        measures=measures,
        in_training=None if drifts is None else drifts.value,
        shown=records.Shown.of(snippet.headline, measures[snippet.headline], spec=snippet.spec),
        claims=tuple(_claimed(claim, measures) for claim in snippet.claims_about(_variant(kernel, settings))),
        external=kernel.external,
    )


def _claimed(claim: SnippetClaim, measures: Mapping[str, float]) -> Claimed:
    measured = f"{claim.measure} = {measures[claim.measure]:.3g}"
    return Claimed(claim.text, claim.source, claim.passes(measures), measured, claim.waives)


class _TrainingRuns(Kind):
    def kernels(self, backend: Backend) -> Mapping[str, Kernel]:
        return {name: trained_kernel(variant) for name, variant in VARIANTS.items()} if backend.composed else {}


KIND = _TrainingRuns(
    TrainingRun.kind,
    records.ExperimentRecord(
        "a short training run of a small GPT-2",
        "A short GPT-2 run for every cell, its first head scripted into the paper's failure state; what differs is"
        " the kernel.\n...@train sums l from P̄ before its cast, ...@train_l_rounded after.",
        pooled=True,
    ),
    experiments=tuple(map(TrainingRun, SNIPPETS.values())),
    measured=MEASURED,
    advice="kernels called ...@train run in the cases called train_... alone, and those in bf16 alone",
)
