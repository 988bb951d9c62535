"""Section 3.2 of the paper as one table: which single change stops the drift and the run-away."""

from collections.abc import Iterator
from dataclasses import dataclass

from tiebreak.cases.gpt2.snippets import DRIFT, RUNAWAY, Snippet, run_snippet
from tiebreak.cases.gpt2.variants import isolation
from tiebreak.kernels.arithmetic import Arithmetic

STOPPED_DRIFT = 2e-4  # |mean sum of delta's error a step| below this: a tenth of plain flash attention's
STOPPED_GROWTH = 1.6  # growth of W_Q's norm below this: the claim of the run-away snippet

# Whether the paper (arXiv 2510.04212, section 3.2) says that the change makes training stable.
PAPER: dict[str, bool | None] = {
    "flash in tiles": None,
    "tiling off": False,
    "flash in layer 2 only": False,
    "standard in layer 2 only": True,
    "delta from rowsum(dP*P)": True,
    "O recomputed in fp32": True,
    "O in fp32": True,
    "P̄V in fp32": True,
    "O in fp32 for the worst head": True,
}


@dataclass(frozen=True)
class IsolationRow:
    """One change to plain flash attention."""

    change: str  # what differs
    drift: float  # snippet A: mean sum of delta's error a step
    one_signedness: float  # snippet A: sum(s) / sum|s| of those sums
    growth: float  # snippet Q: growth of W_Q's norm
    paper: bool | None  # whether the paper says that it stops the failure; None: the failing baseline itself

    @property
    def stops_drift(self) -> bool:
        """Whether delta's error is a tenth of plain flash attention's or less."""
        return abs(self.drift) < STOPPED_DRIFT

    @property
    def stops_runaway(self) -> bool:
        """Whether W_Q keeps its norm."""
        return self.growth < STOPPED_GROWTH


def isolation_rows(
    arithmetic: Arithmetic,
    seed: int,
    *,
    row_sum_from_rounded: bool,
    drift: Snippet = DRIFT,
    runaway: Snippet = RUNAWAY,
) -> Iterator[IsolationRow]:
    """Train every change of section 3.2, one after the other.

    Args:
        arithmetic: what attention runs on.
        seed: of weights and noise.
        row_sum_from_rounded: whether l sums P-bar after its cast.
        drift: snippet A, or a shorter one.
        runaway: snippet Q, or a shorter one.

    Yields:
        A row a change, plain flash attention first.
    """
    for name, variant in isolation(row_sum_from_rounded=row_sum_from_rounded).items():
        a = run_snippet(drift, variant, arithmetic, seed).measures
        q = run_snippet(runaway, variant, arithmetic, seed).measures
        yield IsolationRow(name, a["delta_error_mean"], a["delta_error_drift"], q["wq_norm_growth"], PAPER[name])
