"""What capturing costs a training step of GPT-2 124M: steps without, passed by and looked at, in turns, in one run.

Run with ``make bench``. The ratios to the step without are in the benchmark's extra information, and printed. They are
of CPU time: what else a machine does is not in it. On a CPU without bf16 its products take 7 to 50 times fp32's time,
and a step of minutes would hide what capturing costs: there the model is in fp32.
"""

import statistics
import time
from pathlib import Path

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tiebreak.cases.capture import Capture, capture

WIDTH, HEADS, LAYERS, VOCABULARY, TOKENS = 768, 12, 12, 50257, 256
EVERY = 50
ROUNDS = 5
HAS_BF16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(o.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.second(x))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.blocks(self.tokens(tokens) + self.positions.weight))
        logits = x @ self.tokens.weight.T
        return cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def test_step(benchmark: BenchmarkFixture, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    tokens = torch.randint(0, VOCABULARY, (1, TOKENS))
    seconds: dict[str, list[float]] = {"without": [], "passed by": [], "looked at": []}

    def step(kind: str, captured: Capture | None) -> None:
        started = time.process_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=HAS_BF16):
            loss = model(tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if captured is not None:
            captured.step()
        seconds[kind].append(time.process_time() - started)

    def turns() -> None:
        number = len(seconds["without"]) * EVERY
        step("without", None)
        with capture(model, tmp_path, every=EVERY, start=number, quiet=True) as captured:
            step("looked at", captured)
            step("passed by", captured)

    benchmark.group = f"training step of GPT-2 124M, 1 x 256 tokens, {'bf16 autocast' if HAS_BF16 else 'fp32'}"
    benchmark.pedantic(turns, rounds=ROUNDS, warmup_rounds=1)  # type: ignore[no-untyped-call]
    plain = seconds.pop("without")
    ratios = {
        kind: statistics.median(a / b for a, b in zip(durations, plain, strict=True))
        for kind, durations in seconds.items()
    }
    cost = (ratios["looked at"] - 1) / EVERY + (ratios["passed by"] - 1) * (EVERY - 1) / EVERY
    benchmark.extra_info.update({kind: round(ratio, 4) for kind, ratio in ratios.items()}, cost=round(cost, 5))
    with capsys.disabled():
        text = ", ".join(f"{kind} {ratio:.4f}" for kind, ratio in ratios.items())
        print(
            f"\nstep without: {statistics.median(plain):.2f} s; ratios: {text}; of a step, every {EVERY}: {cost:+.2%};"
            f" rounds: { {kind: [round(x, 2) for x in row] for kind, row in ({'without': plain} | seconds).items()} }"
        )
    assert cost < 0.02
