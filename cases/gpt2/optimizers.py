"""Optimisers of a real run, and their learning rate."""

import math
from dataclasses import dataclass

import torch
from torch.optim import AdamW, Optimizer
from torch.optim.adamw import adamw as adamw_update

from tiebreak.cases.gpt2.model import GPT2

OPTIMIZERS = ("adamw", "muon")
CLIP = 1.0  # of the gradient's norm (arXiv 2510.04212, section 3.1)
EPSILON = 1e-8  # AdamW's usual
_BETAS = (0.9, 0.95)
_MUON_DECAY = 0.01
_FLOOR = 0.01  # of the highest rate, at the end


@dataclass(frozen=True)
class Schedule:
    """The learning rate: linear warm-up, then a cosine down to a hundredth (arXiv 2510.04212, section 3.1)."""

    steps: int  # of the whole run
    rate: float  # the highest
    warm_up: int  # steps

    def at(self, step: int) -> float:
        """Return the rate of a step, from 0."""
        if step < self.warm_up:
            return self.rate * (step + 1) / self.warm_up
        done = (step - self.warm_up) / max(1, self.steps - self.warm_up)
        return self.rate * (_FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * done)))


def optimizers(name: str, model: GPT2) -> list[Optimizer]:
    """Return the optimisers of a model's weights; their rate is set step by step.

    `adamw` is the paper's. `muon` is Muon with the root mean square of its updates matched to AdamW's (arXiv
    2502.16982, section 2.2) and decay 0.01 on the blocks' matrices, and AdamW on embeddings, head and vectors.

    Raises:
        ValueError: no such optimiser, or a torch without Muon.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {name!r}: known are {', '.join(OPTIMIZERS)}")
    if name == "adamw":
        return [adamw(list(model.parameters()))]
    if not hasattr(torch.optim, "Muon"):
        raise ValueError(f"torch {torch.__version__} has no Muon: 2.9 and newer do; or train with adamw")
    matrices = [weight for weight in model.blocks.parameters() if weight.dim() == 2]
    chosen = {id(weight) for weight in matrices}
    rest = [weight for weight in model.parameters() if id(weight) not in chosen]
    muon = torch.optim.Muon(matrices, weight_decay=_MUON_DECAY, adjust_lr_fn="match_rms_adamw")
    return [muon, adamw(rest)]


def adamw(weights: list[torch.nn.Parameter], rate: float = 1e-3, epsilon: float = EPSILON) -> AdamW:
    """Return the paper's AdamW: betas 0.9 and 0.95, no decay (arXiv 2510.04212, section 3.1)."""
    return AdamW(weights, rate, betas=_BETAS, eps=epsilon, weight_decay=0.0)


class LightAdamW:
    """`adamw` at one rate, to the bit. To make or step torch's own loads its compiler first: seconds a process."""

    def __init__(self, weights: list[torch.nn.Parameter], rate: float, epsilon: float) -> None:
        """Take the arguments of `adamw`."""
        self._weights, self._rate, self._epsilon = weights, rate, epsilon
        self._first, self._second = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
        self._steps = [torch.zeros(()) for _ in weights]  # on the host, as torch's

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for weight in self._weights:
            weight.grad = None

    def step(self) -> None:
        """Update the weights that have a gradient."""
        moments = zip(self._weights, self._first, self._second, self._steps, strict=True)
        with torch.no_grad():
            for weight, first, second, steps in moments:
                if weight.grad is not None:
                    adamw_update(
                        [weight],
                        [weight.grad],
                        [first],
                        [second],
                        [],
                        [steps],
                        amsgrad=False,
                        beta1=_BETAS[0],
                        beta2=_BETAS[1],
                        lr=self._rate,
                        weight_decay=0.0,
                        eps=self._epsilon,
                        maximize=False,
                    )
