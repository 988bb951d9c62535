"""SGLang's attention without a cache rounds ties of O away from zero.

Needs torch, triton and SGLang's files (`pip install --no-deps sglang==0.5.23`).
Without a GPU Triton interprets the kernel. The inputs are fp16: Triton's interpreter truncates to bf16.
"""

import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
# The file asks the server's package only which maker's GPU there is.
sys.modules["sglang.srt.utils"] = SimpleNamespace(is_cuda=torch.cuda.is_available, is_hip=lambda: False)
path = Path(importlib.util.find_spec("sglang").origin).parent / "kernels/ops/attention/prefill_attention.py"
spec = importlib.util.spec_from_file_location("prefill_attention", path)
sglang = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sglang)

TOKENS, HEADS, D = 64, 64, 64
draw = torch.Generator().manual_seed(1)
q, k = torch.zeros(TOKENS, HEADS, D), torch.zeros(TOKENS, HEADS, D)
q[:, :, 0], k[2:18, :, 0], k[18:, :, 0] = 1, -13, -60  # scores: two maxima of 0, a tail of 16 keys, the rest
v = -2 - torch.randint(0, 512, (TOKENS, HEADS, D), generator=draw) / 512  # of one binade: half of all sums are ties
q, k, v = (x.half().to(DEVICE) for x in (q, k, v))
o = torch.empty_like(q)
start, length = torch.tensor([0], device=DEVICE), torch.tensor([TOKENS], device=DEVICE)
sglang.context_attention_fwd(q, k, v, o, start, length, TOKENS, is_causal=False, sm_scale=1.0)

p = torch.softmax(torch.einsum("qhd,khd->hqk", q.double(), k.double()), -1)
exact = torch.einsum("hqk,khd->qhd", p, v.double())
ulp = 2.0 ** (exact.abs().log2().floor() - 10)
bias = ((o.double() - exact) * exact.sign() / ulp).mean().item()
print(f"mean error of O: {bias:+.3f} ulp, + is away from zero (a sound kernel: within 0.05)")
sys.exit(abs(bias) > 0.05)
