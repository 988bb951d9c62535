"""When training has diverged: the one definition, of a run that is ended and of a sweep's rates."""

import math
from dataclasses import dataclass

EXPLOSION_NATS = 2.0  # a loss this far above the lowest so far ...
EXPLOSION_STEPS = 5  # ... in this many steps in a row has exploded
# A score S is a product of q and k. In bf16 each has a relative error of up to 2^-9, so S has one of up to |S| 2^-8: at
# 1,024 that is 4, and one rounding can make a weight of the softmax 50 times as large.
LARGEST_LOGIT = 1024.0
NOT_FINITE, EXPLODED, LOGITS = "not finite", "loss", "logits"  # how a run can diverge


@dataclass
class Watch:
    """Notices that a run has diverged.

    Its loss is NaN or Inf; or it is in `EXPLOSION_STEPS` steps in a row `EXPLOSION_NATS` above the lowest so far, a
    perplexity 7 times as large; or the largest logit is beyond a limit. The margin and the span are this suite's own:
    of ten sound runs (2 layers, width 32, learning rates 4e-4 to 0.1, 200 steps) none stayed 0.5 above its lowest for
    as long.
    """

    lowest: float = math.inf  # loss so far, in nats
    above: int = 0  # steps in a row far above it
    limit: float = math.inf  # of the largest logit; infinite: none

    def diverged(self, loss: float, max_logit: float = math.nan) -> str | None:
        """How the run has diverged, given one more step; None: it has not.

        Args:
            loss: of the step, in nats.
            max_logit: of the step, over all layers, heads and sequences; NaN where nobody looked.
        """
        if not math.isfinite(loss):
            return NOT_FINITE
        self.above = self.above + 1 if loss > self.lowest + EXPLOSION_NATS else 0
        self.lowest = min(self.lowest, loss)
        if self.above >= EXPLOSION_STEPS:
            return EXPLODED
        return LOGITS if max_logit > self.limit else None
