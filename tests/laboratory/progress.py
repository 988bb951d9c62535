"""How a run is getting on: what its monitors read, an early warning, and whether it has diverged."""

import itertools
import math
from dataclasses import asdict, dataclass

import torch

from tiebreak.cases.gpt2.attention import Observation
from tiebreak.cases.gpt2.model import GPT2
from tiebreak.cases.gpt2.monitors import MEASURES, Recorder, sign_diversity
from tiebreak.laboratory.ranks import Ranks

# arXiv 2510.04202 calls the collapse of the sign diversity an early warning. The numbers are this suite's: six sound
# runs of the preset tiny (seeds 0 to 5, 400 steps, reports every 10) were below for 5 reports in a row at most, two at
# learning rates 30 and 300 times too high for 24 and 21.
COLLAPSED_DIVERSITY = 0.02  # 99 of 100 tokens point one way ...
COLLAPSED_REPORTS = 8  # ... in this many reports in a row
EXPLOSION_NATS = 2.0  # a loss this far above the lowest so far ...
EXPLOSION_STEPS = 5  # ... in this many steps in a row has exploded
# A score S is a product of q and k. In bf16 each has a relative error of up to 2^-9, so S has one of up to |S| 2^-8: at
# 1,024 that is 4, and one rounding can make a weight of the softmax 50 times as large.
LARGEST_LOGIT = 1024.0
NOT_FINITE, EXPLODED, LOGITS = "not finite", "loss", "logits"  # how a run can diverge


@dataclass(frozen=True)
class Progress:
    """One report of a run. Monitors are NaN in a report that no step was planned for: that of an explosion."""

    step: int  # steps done
    loss: float  # in nats, of the step's batch
    rate: float  # learning rate
    max_logit: float = math.nan  # of all layers, heads and sequences
    drift: float = math.nan  # sum of delta_lp - delta_hp over all rows of the batch, of the head with the largest size
    sign_diversity: float = math.nan  # lowest of all layers, of the input to W_Q: toward 0 is the early warning

    @property
    def record(self) -> dict[str, float | None]:
        """Return the line of the log; JSON has no NaN and no Inf."""
        return {name: value if math.isfinite(value) else None for name, value in asdict(self).items()}

    @property
    def line(self) -> str:
        """Return the line that the terminal shows."""
        return (
            f"step {self.step}  loss {self.loss:.4f}  rate {self.rate:.2e}  max logit {self.max_logit:.1f}"
            f"  drift {self.drift:+.2e}  sign diversity {self.sign_diversity:.2f}"
        )


@dataclass
class EarlyWarning:
    """Notices a collapse of the sign diversity."""

    low: int = 0  # reports in a row below the threshold

    def due(self, progress: Progress) -> bool:
        """Return whether to warn now, given one more report: once in each collapse."""
        self.low = self.low + 1 if progress.sign_diversity < COLLAPSED_DIVERSITY else 0
        return self.low == COLLAPSED_REPORTS


class Readings:
    """Reads the monitors of one step, part by part of its batch; one of a model's observers."""

    def __init__(self, model: GPT2) -> None:
        sizes, self._model = model.configuration, model
        self._places = list(itertools.product(range(sizes.layers), range(sizes.heads)))
        self._recorder = Recorder({name: MEASURES[name] for name in ("delta_error", "max_logit")}, range(sizes.layers))
        self._diversity: dict[int, float] = {}  # by layer, of the first part: thousands of tokens say enough

    def __call__(self, observation: Observation) -> None:
        """Read one call of attention."""
        self._recorder(observation)
        if (layer := observation.layer) not in self._diversity:
            self._diversity[layer] = sign_diversity(self._model.block(layer).wq.weight, observation.x)

    def report(self, step: int, loss: float, rate: float, ranks: Ranks) -> Progress:
        """Return what the monitors of all processes read together; the drift is that of the head with the largest."""
        series = self._recorder.series
        drift = torch.tensor([sum(series("delta_error", *place)) for place in self._places], dtype=torch.float64)
        logits = torch.tensor([series("max_logit", *place) for place in self._places], dtype=torch.float64)
        readings = ranks.gather((drift, logits.max(), min([math.inf, *self._diversity.values()])))
        drift = torch.stack([each[0] for each in readings]).sum(0)
        largest, logit = drift[drift.abs().argmax()].item(), torch.stack([each[1] for each in readings]).max().item()
        return Progress(step, loss, rate, logit, largest, readings[0][2])


@dataclass
class Divergence:
    """Notices that a run has diverged: the one definition, of a run that is ended and of a sweep's rates.

    Its loss is NaN or Inf; or it is in `EXPLOSION_STEPS` steps in a row `EXPLOSION_NATS` above the lowest so far, a
    perplexity 7 times as large; or the largest logit is beyond a limit. The margin and the span are this suite's own:
    of ten sound runs (2 layers, width 32, learning rates 4e-4 to 0.1, 200 steps) none stayed 0.5 above its lowest for
    as long.
    """

    lowest: float = math.inf  # loss so far, in nats
    above: int = 0  # steps in a row far above it
    limit: float = math.inf  # of the largest logit; infinite: none

    def after(self, loss: float, max_logit: float = math.nan) -> str | None:
        """Return how the run has diverged, given one more step; None: it has not. NaN: nobody looked at the logits."""
        if not math.isfinite(loss):
            return NOT_FINITE
        self.above = self.above + 1 if loss > self.lowest + EXPLOSION_NATS else 0
        self.lowest = min(self.lowest, loss)
        if self.above >= EXPLOSION_STEPS:
            return EXPLODED
        return LOGITS if max_logit > self.limit else None
