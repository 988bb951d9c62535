"""A training step with masked products beside the same step without, in one run. Run with ``make bench``.

Of a GPT-2 with torch's own attention, and of the suite's, whose attention is an emulated kernel in either case.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn
from torch.nn import functional

from tiebreak.backends.backend import EMULATION
from tiebreak.cases.gpt2.attention import HeadKernel
from tiebreak.cases.gpt2.data import Batches, corpus
from tiebreak.cases.gpt2.model import GPT2, PRESETS, Configuration, KeyValueCache, TransformerBlock, everywhere
from tiebreak.kernels.roster import composed_kernel
from tiebreak.laboratory.reduced import parse_reduction, reduce_precision, reduced_gpt2

SEQUENCES = 8
TINY = replace(PRESETS["tiny"], vocabulary=len(corpus().vocabulary))
SIZES = {"width 64": TINY, "width 256": replace(TINY, width=256, context=128)}
MASKS = ("unmasked", "E8M5", "E8M5:rtz", "E5M2")


class _Torchs(GPT2):
    """The same model with torch's own attention."""

    def forward(self, tokens: Tensor, step: int, memory: KeyValueCache | None = None) -> Tensor:
        del step, memory
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in range(self.configuration.layers):
            x = self._through(self.block(layer), x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _through(self, block: TransformerBlock, x: Tensor) -> Tensor:
        h = block.norm_1(x)
        q, k, v = (
            layer(h).unflatten(-1, (block.heads, -1)).transpose(1, 2) for layer in (block.wq, block.wk, block.wv)
        )
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + block.wo(o.transpose(1, 2).flatten(2))
        out: Tensor = x + block.down(functional.gelu(block.up(block.norm_2(x))))
        return out


def _masked(model: GPT2, mask: str) -> AbstractContextManager[object]:
    if mask == "unmasked":
        return nullcontext()
    reduction = parse_reduction(mask)
    return reduce_precision(reduction) if isinstance(model, _Torchs) else reduced_gpt2(model, reduction)


def _stepping(model: GPT2, sizes: Configuration, mask: str) -> Callable[[], float]:
    tokens, targets = Batches(corpus().tokens, SEQUENCES, sizes.context, seed=1).batch(0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def step() -> float:
        with _masked(model, mask):
            loss = model.loss(tokens, targets, 0)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("kind", [_Torchs, GPT2], ids=["torch's attention", "emulated flash@fused"])
def test_step(benchmark: BenchmarkFixture, kind: type[GPT2], sizes: Configuration, mask: str) -> None:
    declared = composed_kernel("flash@fused").declaration
    assert declared is not None
    model = kind(sizes, everywhere(HeadKernel(declared), sizes), EMULATION.arithmetic, seed=1)
    benchmark.group = f"training step, {kind.__name__}, {sizes.width} wide"
    assert benchmark(_stepping(model, sizes, mask)) > 0
