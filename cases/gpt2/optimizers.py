"""Optimisers of a real run, and their learning rate."""

import math
from dataclasses import dataclass

import torch
from torch.optim import AdamW

CLIP = 1.0  # of the gradient's norm (arXiv 2510.04212, section 3.1)
EPSILON = 1e-8  # AdamW's usual


@dataclass(frozen=True)
class Schedule:
    """The learning rate: linear warm-up, then a cosine down to a hundredth (arXiv 2510.04212, section 3.1)."""

    steps: int  # of the whole run
    rate: float  # the highest
    warm_up: int  # steps

    def at(self, step: int) -> float:
        """The rate of a step, from 0."""
        if step < self.warm_up:
            return self.rate * (step + 1) / self.warm_up
        done = (step - self.warm_up) / max(1, self.steps - self.warm_up)
        return self.rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def adamw(weights: list[torch.nn.Parameter], rate: float = 1e-3, epsilon: float = EPSILON) -> AdamW:
    """The paper's AdamW: betas 0.9 and 0.95, no decay (arXiv 2510.04212, section 3.1)."""
    return AdamW(weights, rate, betas=(0.9, 0.95), eps=epsilon, weight_decay=0.0)
