"""A real run: schedule, progress, checkpoints, and an end when the loss explodes."""

import json
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from tiebreak.cases.gpt2.attention import Observation
from tiebreak.cases.gpt2.checkpoints import Checkpoint, save
from tiebreak.cases.gpt2.data import Batches
from tiebreak.cases.gpt2.model import GPT2
from tiebreak.cases.gpt2.monitors import MEASURES, View, alignment, sign_diversity

EXPLOSION_NATS = 2.0  # a loss this far above the lowest so far ...
EXPLOSION_STEPS = 5  # ... in this many steps in a row has exploded
KEPT_STEPS = 4  # whose q, k, v, dO are kept for the matrix when it does
LOG = "log.jsonl"
_BETAS = (0.9, 0.95)
_CLIP = 1.0


@dataclass(frozen=True)
class Schedule:
    """The learning rate: linear warm-up, then a cosine down to a tenth (the paper's, as nanoGPT's)."""

    steps: int  # of the whole run
    rate: float  # the highest
    warm_up: int  # steps

    def at(self, step: int) -> float:
        """The rate of a step, from 0."""
        if step < self.warm_up:
            return self.rate * (step + 1) / self.warm_up
        done = (step - self.warm_up) / max(1, self.steps - self.warm_up)
        return self.rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


class NotFiniteAtStartError(Exception):
    """The loss is not a number before anything was learnt."""


@dataclass
class Watch:
    """Notices an explosion of the loss."""

    lowest: float = math.inf  # loss so far, in nats
    above: int = 0  # steps in a row far above it

    def exploded(self, loss: float) -> bool:
        """Whether the run is over, given the loss of one more step."""
        if not math.isfinite(loss):
            return True
        self.above = self.above + 1 if loss > self.lowest + EXPLOSION_NATS else 0
        self.lowest = min(self.lowest, loss)
        return self.above >= EXPLOSION_STEPS


@dataclass(frozen=True)
class Progress:
    """One report of a run. Monitors are NaN in a report that no step was planned for: that of an explosion."""

    step: int  # steps done
    loss: float  # in nats, of the step's batch
    rate: float  # learning rate
    max_logit: float  # of all layers and heads
    drift: float  # sum of delta_lp - delta_hp over the step's rows, of the head where it is largest in size
    sign_diversity: float  # lowest of all layers, of the input to W_Q: toward 0 is the early warning

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
class _Capture:
    """Keeps the attention inputs of the last steps, first sequence only, and watches the monitors of one."""

    kept: deque[dict[str, Tensor]] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    monitored: bool = False
    max_logit: float = math.nan
    drift: float = math.nan

    def begin(self, *, monitored: bool) -> None:
        self.kept.append({})
        self.monitored = monitored
        self.max_logit, self.drift = (-math.inf, 0.0) if monitored else (math.nan, math.nan)

    def __call__(self, observation: Observation) -> None:
        inputs, layer = observation.inputs, observation.layer
        named = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "do": inputs.do}
        self.kept[-1].update({f"layer{layer}_{name}": tensor[:1].clone() for name, tensor in named.items()})
        if self.monitored:
            view = View(observation)
            errors = MEASURES["delta_error"](view)
            largest = errors[errors.abs().argmax()].item()
            self.drift = largest if abs(largest) > abs(self.drift) else self.drift
            self.max_logit = max(self.max_logit, MEASURES["max_logit"](view).max().item())


class Training:
    """A run that can be stopped at any step and resumed to the bit."""

    def __init__(
        self, model: GPT2, batches: Batches, schedule: Schedule, run: dict[str, str | int | float], folder: Path
    ) -> None:
        """Set up a run at step 0.

        Args:
            model: with its kernels and arithmetic.
            batches: the data, of any step.
            schedule: of the learning rate, and the length of the run.
            run: what the run was told, kept in its checkpoints.
            folder: for the log, checkpoints and, after an explosion, the last steps' attention inputs.
        """
        self._model, self._batches, self._schedule, self._run, self._folder = model, batches, schedule, run, folder
        self._weights = list(model.parameters())
        self._optimizer = torch.optim.AdamW(self._weights, schedule.rate, betas=_BETAS, weight_decay=0.0)
        self._watch, self._capture, self._done = Watch(), _Capture(), 0
        self.exploded = False

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on where a checkpoint was taken; what the log says of later steps is forgotten."""
        self._model.load_state_dict(checkpoint.model)
        self._optimizer.load_state_dict(checkpoint.optimizer)
        self._watch, self._done = Watch(*checkpoint.watch), checkpoint.step
        log = self._folder / LOG
        if log.is_file():
            lines = [line for line in log.read_text().splitlines() if _step_of(line) <= checkpoint.step]
            log.write_text("".join(f"{line}\n" for line in lines))

    def reports(self, every: int, checkpoint_every: int) -> Iterator[Progress]:
        """Train to the end or to an explosion, telling of every `every`-th step and of the last.

        Raises:
            NotFiniteAtStartError: the very first loss is NaN or Inf.
        """
        while self._done < self._schedule.steps and not self.exploded:
            last = self._done + 1 == self._schedule.steps
            monitored = (self._done + 1) % every == 0 or last
            loss = self._step(monitored=monitored)
            if self._done == 1 and not math.isfinite(loss):
                raise NotFiniteAtStartError(f"the loss of the first step is {loss}: check the kernel and the data")
            self.exploded = self._watch.exploded(loss)
            if self.exploded:
                self._keep_inputs()
            elif self._done % checkpoint_every == 0 or last:
                self._save()
            if monitored or self.exploded:
                yield self._report(loss)

    def _step(self, *, monitored: bool) -> float:
        model, step = self._model, self._done
        self._capture.begin(monitored=monitored)
        model.observer = self._capture
        for group in self._optimizer.param_groups:
            group["lr"] = self._schedule.at(step)
        loss = model.loss(*self._batches.batch(step), step)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._weights, _CLIP)
        self._optimizer.step()
        self._done += 1
        return loss.item()

    def _report(self, loss: float) -> Progress:
        capture, rate = self._capture, self._schedule.at(self._done - 1)
        progress = Progress(self._done, loss, rate, capture.max_logit, capture.drift, self._sign_diversity())
        with (self._folder / LOG).open("a") as log:
            log.write(json.dumps(progress.record) + "\n")
        return progress

    def _sign_diversity(self) -> float:
        """Of the input that W_Q of each layer gets from the next batch."""
        found: list[float] = []

        def look(module: nn.Module, arguments: tuple[Tensor], output: Tensor) -> None:
            del output
            assert isinstance(module, nn.Linear)
            finite = bool(torch.isfinite(module.weight).all())
            found.append(sign_diversity(alignment(module.weight, arguments[0])) if finite else math.nan)

        layers = range(self._model.configuration.layers)
        hooks = [self._model.block(layer).wq.register_forward_hook(look) for layer in layers]
        with torch.no_grad():
            self._model(self._batches.batch(self._done)[0], self._done)
        for hook in hooks:
            hook.remove()
        return min(found)

    def _save(self) -> None:
        watch = (self._watch.lowest, self._watch.above)
        state = Checkpoint(self._done, self._run, self._model.state_dict(), self._optimizer.state_dict(), watch)
        save(state, self._folder)

    def _keep_inputs(self) -> None:
        """One file a step, `inputs-STEP.npz` with `layerN_q` and so on, each (1, heads, tokens, d) in fp32."""
        for back, kept in enumerate(reversed(self._capture.kept)):
            arrays = {name: tensor.cpu().numpy() for name, tensor in kept.items()}
            np.savez(self._folder / f"inputs-{self._done - back:06d}.npz", **arrays)  # type: ignore[arg-type]


def _step_of(line: str) -> int:
    """The step of a log line; a line cut by a kill counts as later than any."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError):
        return 1 << 62
