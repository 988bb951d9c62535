"""The algorithms that a kernel may declare. One more is one more object here: everything else goes by its fields."""

from dataclasses import dataclass

from tiebreak.kernels.features import FEATURES, HIDDEN_NAN, Feature
from tiebreak.kernels.flash import Forward, flash, flash_1, split, standard
from tiebreak.kernels.formats import hashed_once


@hashed_once
@dataclass(frozen=True)
class Algorithm:
    """A way to compute attention forward; all have one backward pass, which varies with the plan alone."""

    name: str  # how tables call it, and its kernels where the shift rule is `safe`
    forward: Forward  # the algorithm, written once over an arithmetic
    tiled: bool  # whether it shifts a row tile by tile: shift rule and tile sizes then tell its kernels apart
    takes: frozenset[Feature]  # what inputs may ask of it
    claimed_as: str | None = None  # what claims call all its kernels; None: by their shift rules
    unused: frozenset[str] = frozenset()  # fields of a plan that it makes nothing of


_TAKES = frozenset(FEATURES) - {HIDDEN_NAN}  # 0 times NaN is NaN
_OF_FLASH = frozenset({"row_sum_of", "offset", "pv", "v8", "p8"})
FLASH_ATTENTION = Algorithm("flash", flash, tiled=True, takes=_TAKES)
# P is normalised before its cast, so its sum is known before it is rounded.
FLASH_ATTENTION_1 = Algorithm("flash_1", flash_1, tiled=True, takes=_TAKES, claimed_as="flash_1", unused=_OF_FLASH)
SPLIT_ATTENTION = Algorithm("split", split, tiled=True, takes=_TAKES, claimed_as="split", unused=frozenset({"sink"}))
# l sums what `exp` leaves.
STANDARD_ATTENTION = Algorithm(
    "standard", standard, tiled=False, takes=_TAKES, claimed_as="standard", unused=_OF_FLASH | {"sink"}
)
#: Those that can have a plan of flash attention, by the text before its @.
TILED = {algorithm.name: algorithm for algorithm in (FLASH_ATTENTION, FLASH_ATTENTION_1, SPLIT_ATTENTION)}
