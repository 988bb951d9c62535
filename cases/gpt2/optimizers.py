"""Optimisers of a real run, and their learning rate."""

import math
from dataclasses import dataclass
from inspect import unwrap

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
        """Return the rate of a step, from 0."""
        if step < self.warm_up:
            return self.rate * (step + 1) / self.warm_up
        done = (step - self.warm_up) / max(1, self.steps - self.warm_up)
        return self.rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


class _AdamW(AdamW):
    """PyTorch's, without wrappers that import torch.compile: a second and a half in every process that trains."""

    add_param_group, zero_grad = unwrap(AdamW.add_param_group), unwrap(AdamW.zero_grad)
    step = torch.no_grad()(unwrap(AdamW.step))


def adamw(weights: list[torch.nn.Parameter], rate: float = 1e-3, epsilon: float = EPSILON) -> AdamW:
    """Return the paper's AdamW: betas 0.9 and 0.95, no decay (arXiv 2510.04212, section 3.1)."""
    return _AdamW(weights, rate, betas=(0.9, 0.95), eps=epsilon, weight_decay=0.0)
