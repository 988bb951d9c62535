"""The training tables of docs/science.md, measured anew."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tiebreak.cases.gpt2.isolation import IsolationRow
from tiebreak.cases.gpt2.snippets import Snippet, run_snippet
from tiebreak.cases.gpt2.variants import variants
from tiebreak.kernels.arithmetic import Arithmetic


@dataclass(frozen=True)
class Range:
    """What the seeds gave."""

    values: tuple[float, ...]  # one a seed; none: the variant was not run

    def text(self, spec: str) -> str:
        """`lowest to highest`, each as `spec` formats it; one number where they read the same."""
        if not self.values:
            return ""
        low, high = format(min(self.values), spec), format(max(self.values), spec)
        return low if low == high else f"{low} to {high}"


@dataclass(frozen=True)
class TrainingRow:
    """One measure of one snippet for one variant, both ways of summing l."""

    variant: str  # its name
    unrounded: Range  # l sums P-bar before its cast, as FlashAttention-2 does
    rounded: Range  # l sums P-bar after its cast; standard attention, which has no such choice, stands here

    def cells(self, spec: str) -> list[str]:
        """As the table prints it."""
        return [self.variant, self.unrounded.text(spec), self.rounded.text(spec)]


def training_rows(
    snippet: Snippet, measure: str, arithmetic: Arithmetic, seeds: Sequence[int]
) -> Iterator[TrainingRow]:
    """One measure of one snippet for every variant.

    Args:
        snippet: the recipe.
        measure: a name of `SnippetResult.measures`.
        arithmetic: what attention runs on.
        seeds: of weights and noise.

    Yields:
        A row a variant.
    """
    unrounded, rounded = (variants(row_sum_from_rounded=choice) for choice in (False, True))
    for name in rounded:
        both = [
            Range(tuple(run_snippet(snippet, table[name], arithmetic, seed).measures[measure] for seed in seeds))
            if table is rounded or name != "standard"
            else Range(())
            for table in (unrounded, rounded)
        ]
        yield TrainingRow(name, *both)


def isolation_cells(row: IsolationRow) -> list[str]:
    """As the table prints a change of section 3.2."""
    said = "the failing baseline" if row.paper is None else _stops(row.paper)
    return [
        row.change,
        f"{row.drift:+.1e}",
        f"{row.one_signedness:+.2f}",
        _stops(row.stops_drift),
        f"{row.growth:.2f}",
        _stops(row.stops_runaway),
        said,
    ]


def _stops(stopped: bool) -> str:
    return "stops it" if stopped else "does not"


ISOLATION_HEADERS = (
    "change",
    "A: mean error",
    "A: drift",
    "stops the drift",
    "Q: growth",
    "stops the run-away",
    "paper",
)
TRAINING_HEADERS = ("variant", "l from unrounded P̄", "l from rounded P̄")


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
