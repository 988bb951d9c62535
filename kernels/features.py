"""What inputs may ask of a kernel, and what a kernel may say that it takes: the one vocabulary of both."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Feature:
    """One thing beyond attention of as many query as key heads, in which every query sees every key."""

    name: str  # how it is called
    words: str  # after "takes no", in the reason of a skip


GROUPED = Feature("grouped", "grouped-query heads")
CAUSAL = Feature("causal", "causal mask")
OBLONG_CAUSAL = Feature("oblong causal", "causal mask of fewer or more queries than keys")  # aligned at its lower right
KEY_PADDING = Feature("key padding", "key padding mask")
BLIND_ROWS = Feature("blind rows", "row without a visible key")
OWN_SCALE = Feature("own scale", "scale of the scores other than 1/sqrt(d)")
MIXED_FORMATS = Feature("mixed formats", "operands or output in another format than its inputs")

# What kernels take that mask every score on its own. What is added above later does not belong in here: each kernel
# that takes it declares so itself, and the others' cells are skipped.
COMMON = frozenset({GROUPED, CAUSAL, OBLONG_CAUSAL, KEY_PADDING, BLIND_ROWS})
