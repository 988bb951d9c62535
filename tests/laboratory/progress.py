"""How a run is getting on: what its monitors read, its log, and an early warning."""

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tiebreak.cases.gpt2.attention import Observation
from tiebreak.cases.gpt2.model import GPT2
from tiebreak.cases.gpt2.monitors import MEASURES, View, alignment, sign_diversity
from tiebreak.laboratory.ranks import Ranks

LOG = "log.jsonl"
# arXiv 2510.04202 calls the collapse of the sign diversity an early warning. The numbers are this suite's: six sound
# runs of the preset tiny (seeds 0 to 5, 400 steps, reports every 10) were below for 5 reports in a row at most, two at
# learning rates 30 and 300 times too high for 24 and 21.
COLLAPSED_DIVERSITY = 0.02  # 99 of 100 tokens point one way ...
COLLAPSED_REPORTS = 8  # ... in this many reports in a row


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
        """As the log keeps it; JSON has no NaN and no Inf."""
        return {name: value if math.isfinite(value) else None for name, value in asdict(self).items()}

    @property
    def line(self) -> str:
        """As the terminal shows it."""
        return (
            f"step {self.step}  loss {self.loss:.4f}  rate {self.rate:.2e}  max logit {self.max_logit:.1f}"
            f"  drift {self.drift:+.2e}  sign diversity {self.sign_diversity:.2f}"
        )


@dataclass
class EarlyWarning:
    """Notices a collapse of the sign diversity."""

    low: int = 0  # reports in a row below the threshold

    def due(self, progress: Progress) -> bool:
        """Whether to warn now, given one more report: once in each collapse."""
        self.low = self.low + 1 if progress.sign_diversity < COLLAPSED_DIVERSITY else 0
        return self.low == COLLAPSED_REPORTS


@dataclass
class Readings:
    """Reads the monitors of one step, part by part of its batch; a model's observer."""

    model: GPT2
    drift: Tensor = field(init=False)  # by layer and head, fp64
    max_logit: Tensor = field(init=False)  # scalar
    sign_diversity: float = math.inf  # of the first part that this process computes: thousands of tokens say enough

    def __post_init__(self) -> None:
        """Start at nothing."""
        sizes = self.model.configuration
        self.drift = torch.zeros(sizes.layers, sizes.heads, dtype=torch.float64)
        self.max_logit = torch.tensor(-math.inf, dtype=torch.float64)
        self._seen: set[int] = set()

    def __call__(self, observation: Observation) -> None:
        """Read one call of attention."""
        view, layer = View(observation), observation.layer
        self.drift[layer, list(observation.heads)] += MEASURES["delta_error"](view).cpu()
        self.max_logit = torch.maximum(self.max_logit, MEASURES["max_logit"](view).max().cpu())
        if layer not in self._seen:
            self._seen.add(layer)
            self.sign_diversity = min(self.sign_diversity, self._diversity(layer, observation.x))

    def _diversity(self, layer: int, x: Tensor) -> float:
        weight = self.model.block(layer).wq.weight
        return sign_diversity(alignment(weight, x)) if bool(torch.isfinite(weight).all()) else math.nan

    def report(self, step: int, loss: float, rate: float, ranks: Ranks) -> Progress:
        """What the monitors of all processes read together."""
        readings = ranks.gather((self.drift, self.max_logit, self.sign_diversity))
        drift = torch.stack([each[0] for each in readings]).sum(0).flatten()
        largest = drift[drift.abs().argmax()].item()
        return Progress(
            step, loss, rate, torch.stack([each[1] for each in readings]).max().item(), largest, readings[0][2]
        )


@dataclass(frozen=True)
class Log:
    """The reports of a run, one JSON object a line."""

    folder: Path  # of the run

    def add(self, progress: Progress) -> None:
        """Append a report."""
        with (self.folder / LOG).open("a") as log:
            log.write(json.dumps(progress.record) + "\n")

    def forget_after(self, step: int) -> None:
        """Leave out what was reported of later steps, and a line that a kill has cut."""
        path = self.folder / LOG
        if path.is_file():
            partial = self.folder / f"{LOG}.partial"
            lines = [line for line in path.read_text().splitlines() if _step_of(line) <= step]
            partial.write_text("".join(f"{line}\n" for line in lines))
            os.replace(partial, path)


def _step_of(line: str) -> int:
    """The step of a log line; a line cut by a kill counts as later than any."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 1 << 62
