"""The attention inputs of a run's last steps, kept for the matrix: `pytest --captured DIR` runs them as cases."""

import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tiebreak.cases.gpt2.attention import Observation

KEPT_STEPS = 8  # more than an explosion takes to be one: some of the steps that led to it are among them
# Heads are the samples of what the matrix measures: of a small model more sequences are kept than of a large one.
_KEPT_ELEMENTS = 2**20  # of each tensor, about


@dataclass
class Captures:
    """Keeps q, k, v and dO of the first sequences of the last steps' batches, and writes them when asked."""

    # By step: by layer and name, by heads (those that share a kernel come together), (sequences, heads, tokens, d).
    kept: deque[tuple[int, dict[str, dict[tuple[int, ...], Tensor]]]] = field(
        default_factory=lambda: deque(maxlen=KEPT_STEPS)
    )

    def begin(self, step: int) -> None:
        """Start with a step, from 1; the oldest is forgotten."""
        self.kept.append((step, {}))

    def __call__(self, observation: Observation) -> None:
        """Keep one call of attention; one of a model's observers."""
        tensors, inputs = self.kept[-1][1], observation.inputs
        for name, tensor in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v), ("do", inputs.do)):
            sequences = max(1, _KEPT_ELEMENTS // tensor[0].numel())
            layer = tensors.setdefault(f"layer{observation.layer}.{name}", {})
            layer[observation.heads] = tensor[:sequences].clone()

    def write(self, folder: Path, metadata: Mapping[str, str]) -> list[Path]:
        """Write one file a step, `inputs-STEP.safetensors`, its keys `layer0.q`, `layer0.k`, `layer0.v`, `layer0.do`.

        Tensors are (sequences, heads, tokens, d), in bf16 if that holds all their values, else in fp32. Steps with an
        element that is not finite are left out: after the explosion there is nothing to learn from them. The files say
        `metadata` beside step, layers and causal.
        """
        from safetensors.torch import save_file

        paths: list[Path] = []
        for step, parts in self.kept:
            tensors = {name: _in_order(heads) for name, heads in parts.items()}
            if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
                continue
            path = folder / f"inputs-{step:06d}.safetensors"
            partial = path.with_suffix(".partial")
            labels = {**metadata, "step": str(step), "layers": str(len(tensors) // 4), "causal": "true"}
            save_file({name: _narrowed(tensor) for name, tensor in tensors.items()}, partial, labels)
            os.replace(partial, path)
            paths.append(path)
        return paths


def _in_order(parts: Mapping[tuple[int, ...], Tensor]) -> Tensor:
    """Return all heads of a layer, put together from those of each kernel."""
    order = torch.tensor([head for heads in parts for head in heads]).argsort()
    return torch.cat(list(parts.values()), 1)[:, order]


def _narrowed(tensor: Tensor) -> Tensor:
    narrow = tensor.bfloat16()
    return (narrow if torch.equal(narrow.float(), tensor) else tensor).cpu().contiguous()
