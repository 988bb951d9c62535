"""Run one training cell: train for a moment, judge, record."""

import hashlib
from dataclasses import replace

from tiebreak.cases.gpt2.snippets import Snippet, SnippetResult, run_snippet
from tiebreak.cases.gpt2.variants import VARIANTS, Variant, variant_names
from tiebreak.kernels.kernel import Kernel, composed
from tiebreak.matrix.cell import Settings, TrainingCell, blank_record
from tiebreak.reports import records

_DIGITS = 6  # significant ones of a series: it is there to be drawn


def trained_kernel(variant: Variant) -> Kernel:
    """A variant as the matrix lists it: by the declaration of its scripted layer."""
    assert not isinstance(variant.scripted, Kernel), "the variants of the suite are declarations"
    return composed(variant.name, variant.scripted)


def run_training(cell: TrainingCell, settings: Settings) -> records.Record:
    """Train as the cell's snippet says, and judge what is claimed about its kernel.

    Args:
        cell: what to run.
        settings: the seed, and whether a user's kernel is held to the claims about `fair`.

    Returns:
        The record; one that is skipped says why.
    """
    refusal = _refuses(cell)
    if refusal is not None:
        return blank_record(cell, settings, records.SKIPPED, (refusal,))
    variant = _variant(cell.kernel, settings)
    result = run_snippet(cell.case, variant, cell.backend.arithmetic, settings.seed, cell.backend.device)
    outcome = records.FELL if result.fell else records.HELD
    return replace(
        blank_record(cell, settings, outcome, result.fell),
        claim=_claim(_claims(result)),
        digest=hashlib.sha256(repr(result.losses).encode()).hexdigest()[:16],
        training=_record(cell.case, result),
    )


def _refuses(cell: TrainingCell) -> str | None:
    if not cell.case.amplified:
        return None
    if not cell.backend.predicts:
        return f"the device computes in no {cell.case.scores.name}"
    return None if cell.kernel.composed else f"the kernel can't be told to keep S in {cell.case.scores.name}"


def _variant(kernel: Kernel, settings: Settings) -> Variant:
    """What a kernel trains as: itself in every head, or the variant that it stands for."""
    if kernel.name in VARIANTS:
        return VARIANTS[kernel.name]
    implementation = kernel.declaration if kernel.composed and kernel.declaration else kernel
    held_to = variant_names("fair", rounded=True)[0] if kernel.external and settings.fair else None
    return Variant(kernel.name, implementation, held_to=held_to)


def _claims(result: SnippetResult) -> tuple[records.ClaimRecord, ...]:
    return tuple(records.ClaimRecord(one.claim.text, one.claim.source, one.held) for one in result.verdicts)


def _claim(claims: tuple[records.ClaimRecord, ...]) -> records.ClaimRecord | None:
    """All of them as one, which gates and comparisons look at."""
    if not claims:
        return None
    sources = "; ".join(dict.fromkeys(claim.source for claim in claims))
    return records.ClaimRecord(", ".join(claim.expectation for claim in claims), sources, all(c.met for c in claims))


def _record(snippet: Snippet, result: SnippetResult) -> records.TrainingRecord:
    return records.TrainingRecord(
        label=snippet.label,
        about=snippet.about,
        amplified=snippet.amplified,
        headline=snippet.headline,
        shown=format(result.measures[snippet.headline], snippet.spec),
        stable=result.variant.stable,
        measures={name: records.finite(value) for name, value in result.measures.items()},
        claims=_claims(result),
        steps=result.steps,
        series={name: tuple(map(_short, values)) for name, values in result.series.items()},
    )


def _short(value: float) -> float | None:
    return records.finite(float(f"{value:.{_DIGITS}g}"))
