"""A training step with emulated attention beside one with native fp32 attention, at the snippets' size, in one run.

Run with ``make bench``.
"""

from dataclasses import replace

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from tiebreak.backends.backend import CPU, EMULATION
from tiebreak.cases.gpt2.attention import FP32_ATTENTION, HeadKernel
from tiebreak.cases.gpt2.data import Batches, corpus
from tiebreak.cases.gpt2.model import GPT2, PRESETS, everywhere
from tiebreak.cases.gpt2.variants import variants
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.formats import FP32
from tiebreak.kernels.plans import Cast

SEQUENCES = 8
UNROUNDED = variants(rounded=False)

CONTENDERS: dict[str, tuple[Arithmetic, HeadKernel]] = {
    "fp32 attention": (CPU.arithmetic, HeadKernel(FP32_ATTENTION, Cast(FP32))),
    "emulated flash@train": (EMULATION.arithmetic, HeadKernel(UNROUNDED["flash"].scripted)),
    "emulated fair@train": (EMULATION.arithmetic, HeadKernel(UNROUNDED["fair"].scripted)),
}


@pytest.mark.parametrize(("arithmetic", "kernel"), CONTENDERS.values(), ids=CONTENDERS)
def test_step(benchmark: BenchmarkFixture, arithmetic: Arithmetic, kernel: HeadKernel) -> None:
    text = corpus()
    configuration = replace(PRESETS["tiny"], vocabulary=len(text.vocabulary))
    model = GPT2(configuration, everywhere(kernel, configuration), arithmetic, seed=1)
    tokens, targets = Batches(text.tokens, SEQUENCES, configuration.context, seed=1).batch(0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def step() -> float:
        loss = model.loss(tokens, targets, 0)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    benchmark.group = "training step, attention in 2 layers of 4 heads"
    assert benchmark(step) > 0
