"""Hugging Face's `kernels` (0.17.2; commit 8ac69fc): a benchmark of attention whose verification also asks tiebreak.

Put it into a kernel's `benchmarks/`; `kernels benchmark REPO` runs it. The runner's own check is allclose at 1e-2
(`cli/benchmark.py:528`) with what `verify_...` returns, so NaN is the way to say no.
"""

import sys

import torch
from kernels.benchmark import Benchmark

import tiebreak
from tiebreak.reports.verdict import Verdict


class TiebreakAttentionBenchmark(Benchmark):
    seed = 42
    verdict: Verdict | None = None  # asked for once: the runner verifies ten times to time it

    def setup(self):
        self.q, self.k, self.v = (torch.randn(2, 128, 8, 64, device=self.device).bfloat16() for _ in range(3))

    def benchmark_attention(self):
        returned = self.kernel.flash_attn_func(self.q, self.k, self.v, causal=False)
        self.out = returned[0] if isinstance(returned, tuple) else returned

    def verify_attention(self) -> torch.Tensor:
        if self.verdict is None:
            function, declared = self.kernel.flash_attn_func, ["layout=bnhd", "takes=gqa"]
            self.verdict = tiebreak.check(function, declare=declared, device=self.device, budget="60s", in_process=True)
            print(self.verdict, file=sys.stderr)
        q, k, v = (x.transpose(1, 2) for x in (self.q, self.k, self.v))
        reference = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return reference if self.verdict.ok else torch.full_like(reference, torch.nan)
