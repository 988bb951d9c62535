"""Optimisers of a real run, and their learning rate."""

import math
from dataclasses import dataclass
from inspect import unwrap

import torch
from torch.optim import AdamW, Optimizer

from tiebreak.cases.gpt2.model import GPT2

OPTIMIZERS = ("adamw", "muon")
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


def optimizers(name: str, model: GPT2) -> list[Optimizer]:
    """The optimisers of a model's weights; their rate is set step by step.

    `adamw` is the paper's. `muon` is Muon with the root mean square of its updates matched to AdamW's (arXiv
    2502.16982, section 2.2) and decay 0.01 on the blocks' matrices, and AdamW on embeddings, head and vectors.
    ValueError: no such optimiser, or a torch without Muon.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {name!r}: known are {', '.join(OPTIMIZERS)}")
    if name == "adamw":
        return [adamw(list(model.parameters()))]
    if not hasattr(torch.optim, "Muon"):
        raise ValueError(f"torch {torch.__version__} has no Muon: 2.9 and newer do; or train with adamw")
    matrices = [weight for weight in model.blocks.parameters() if weight.dim() == 2]
    chosen = set(map(id, matrices))
    rest = [weight for weight in model.parameters() if id(weight) not in chosen]
    return [torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"), adamw(rest)]


class _AdamW(AdamW):
    """PyTorch's, without wrappers that import torch.compile: a second and a half in every process that trains."""

    add_param_group, zero_grad = unwrap(AdamW.add_param_group), unwrap(AdamW.zero_grad)
    step = torch.no_grad()(unwrap(AdamW.step))


def adamw(weights: list[torch.nn.Parameter], rate: float = 1e-3, epsilon: float = EPSILON) -> AdamW:
    """The paper's AdamW: betas 0.9 and 0.95, no decay (arXiv 2510.04212, section 3.1)."""
    return _AdamW(weights, rate, betas=(0.9, 0.95), eps=epsilon, weight_decay=0.0)
