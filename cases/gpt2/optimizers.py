"""The optimiser of a real run."""

from inspect import unwrap

import torch
from torch.optim import AdamW

CLIP = 1.0  # of the gradient's norm (arXiv 2510.04212, section 3.1)
EPSILON = 1e-8  # AdamW's usual


class _AdamW(AdamW):
    """PyTorch's, without wrappers that import torch.compile: a second and a half in every process that trains."""

    add_param_group, zero_grad = unwrap(AdamW.add_param_group), unwrap(AdamW.zero_grad)
    step = torch.no_grad()(unwrap(AdamW.step))


def adamw(weights: list[torch.nn.Parameter], rate: float = 1e-3, epsilon: float = EPSILON) -> AdamW:
    """Return the paper's AdamW: betas 0.9 and 0.95, no decay (arXiv 2510.04212, section 3.1)."""
    return _AdamW(weights, rate, betas=(0.9, 0.95), eps=epsilon, weight_decay=0.0)
