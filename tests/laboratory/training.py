"""A real run: optimiser steps over the parts of a batch, reports, checkpoints, and an end when the loss explodes."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from tiebreak.cases.gpt2.attention import Observation, Observer
from tiebreak.cases.gpt2.data import Batches
from tiebreak.cases.gpt2.model import GPT2
from tiebreak.cases.gpt2.optimizers import CLIP, Schedule, optimizers
from tiebreak.laboratory.captures import Captures
from tiebreak.laboratory.checkpoints import Checkpoint, save
from tiebreak.laboratory.divergence import Watch
from tiebreak.laboratory.progress import Log, Progress, Readings
from tiebreak.laboratory.ranks import Ranks

PRECISIONS = ("bf16", "fp32")
_CAPTURED = ("kernel", "preset", "seed")  # what kept attention inputs say of their run


class NotFiniteAtStartError(Exception):
    """The loss is not a number before anything was learnt."""


@dataclass(frozen=True)
class Recipe:
    """How a run takes its steps."""

    schedule: Schedule  # of the learning rate, and the length of the run
    optimizer: str  # a name of `optimizers.OPTIMIZERS`
    precision: str  # of the linear layers: a name of PRECISIONS
    parts: int  # of a batch, equal; one forward and backward pass each, their gradients added up


def _never() -> bool:
    return False


@dataclass(frozen=True)
class StepResult:
    """What a step came to, of all processes together."""

    loss: float  # of the whole batch, in nats
    rate: float  # learning rate
    stop: bool  # whether a process was asked to stop


class Steps:
    """Takes a run's steps: the forward and backward pass of every part of a batch, then the optimisers."""

    def __init__(self, model: GPT2, batches: Batches, recipe: Recipe, ranks: Ranks) -> None:
        """Set up the optimisers.

        Args:
            model: with its kernels and arithmetic, on its device.
            batches: the data, of any step, divisible into the recipe's parts.
            recipe: how steps are taken.
            ranks: the processes that share a batch's parts; their number divides that of the parts.

        Raises:
            ValueError: no such optimiser.
        """
        self.model, self._batches, self.recipe, self.ranks = model, batches, recipe, ranks
        self.weights = list(model.parameters())
        self._device = self.weights[0].device
        self.optimizers = optimizers(recipe.optimizer, model)

    def take(
        self, step: int, observers: Callable[[int], Sequence[Observer]], stop: Callable[[], bool] = _never
    ) -> StepResult:
        """Take one step.

        Args:
            step: of the run, from 0.
            observers: of a part's calls of attention, by the part's number.
            stop: whether this process was asked to stop; asked once.
        """
        rate = self.recipe.schedule.at(step)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = rate
        sums = torch.zeros(2, device=self._device)  # the loss, who was asked to stop
        for part in self.ranks.share(self.recipe.parts):
            sums[0] += self._part(step, part, observers(part))
        sums[1] = float(stop())
        self.ranks.add(sums)
        for weight in self.weights:
            assert weight.grad is not None
            self.ranks.add(weight.grad)
        nn.utils.clip_grad_norm_(self.weights, CLIP)
        for optimizer in self.optimizers:
            optimizer.step()
        return StepResult(sums[0].item(), rate, sums[1].item() > 0)

    def _part(self, step: int, part: int, observers: Sequence[Observer]) -> Tensor:
        """Forward and backward pass of one part; its share of the loss."""
        parts = self.recipe.parts

        def observe(observation: Observation) -> None:
            for observer in observers:
                observer(observation)

        self.model.observer = observe if observers else None
        tokens, targets = (tensor.to(self._device) for tensor in self._batches.batch(step, part, parts))
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self.recipe.precision == "bf16"):
            # Parts are numbered like steps: each has noise of its own.
            loss = self.model.loss(tokens, targets, step * parts + part) / parts
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


class Training:
    """A run that can be stopped at any step and resumed to the bit."""

    def __init__(self, steps: Steps, run: dict[str, str | int | float], folder: Path) -> None:
        """Set up a run at step 0.

        Args:
            steps: how they are taken, of which model.
            run: what the run was told, kept in its checkpoints.
            folder: for the log, checkpoints and, after an explosion, the last steps' attention inputs.
        """
        self._steps, self._run, self._folder, self._log = steps, run, folder, Log(folder)
        self._watch, self._captures = Watch(), Captures()
        self.done = 0  # steps
        self.exploded = self.interrupted = False
        self.captured: list[Path] = []  # attention inputs, after an explosion

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        return sum(weight.numel() for weight in self._steps.weights)

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on where a checkpoint was taken; what the log says of later steps is forgotten."""
        self._steps.model.load_state_dict(checkpoint.model)
        for optimizer, state in zip(self._steps.optimizers, checkpoint.optimizers, strict=True):
            optimizer.load_state_dict(state)
        self._watch, self.done = Watch(*checkpoint.watch), checkpoint.step
        if self._steps.ranks.first:
            self._log.forget_after(checkpoint.step)

    def reports(self, every: int, checkpoint_every: int, stop: Callable[[], bool] = _never) -> Iterator[Progress]:
        """Train to the end or to an explosion, telling of every `every`-th step and of the last.

        Args:
            every: steps between two reports.
            checkpoint_every: steps between two checkpoints; the last step has one too.
            stop: asked in every step; a yes of any process ends the run after it, with a checkpoint.

        Raises:
            NotFiniteAtStartError: the very first loss is NaN or Inf.
            CheckpointError: no checkpoint can be written.
        """
        steps = self._steps.recipe.schedule.steps
        while self.done < steps and not self.exploded and not self.interrupted:
            last = self.done + 1 == steps
            readings = Readings(self._steps.model) if (self.done + 1) % every == 0 or last else None
            result = self._step(readings, stop)
            loss, rate, self.interrupted = result.loss, result.rate, result.stop
            if self.done == 1 and not math.isfinite(loss):
                raise NotFiniteAtStartError(f"the loss of the first step is {loss}: check the kernel and the data")
            self.exploded = self._watch.diverged(loss) is not None
            progress = None if readings is None else readings.report(self.done, loss, rate, self._steps.ranks)
            if self.exploded and progress is None:
                progress = Progress(self.done, loss, rate)
            if self._steps.ranks.first:
                self._keep(progress, checkpoint=self.done % checkpoint_every == 0 or last or self.interrupted)
            if progress is not None:
                yield progress

    def _step(self, readings: Readings | None, stop: Callable[[], bool]) -> StepResult:
        """One step; the captures and the monitors look at it."""
        self._captures.begin(self.done + 1)
        monitors: list[Observer] = [] if readings is None else [readings]
        result = self._steps.take(self.done, lambda part: ([self._captures] if part == 0 else []) + monitors, stop)
        self.done += 1
        return result

    def _keep(self, progress: Progress | None, *, checkpoint: bool) -> None:
        """Write what a step leaves in the folder; the log first, a kill in between leaves it no gap."""
        if progress is not None:
            self._log.add(progress)
        if self.exploded:
            settings = {name: str(self._run[name]) for name in _CAPTURED if name in self._run}
            self.captured = self._captures.write(self._folder, settings)
        elif checkpoint:
            watch = (self._watch.lowest, self._watch.above)
            states = [optimizer.state_dict() for optimizer in self._steps.optimizers]
            save(Checkpoint(self.done, self._run, self._steps.model.state_dict(), states, watch), self._folder)
