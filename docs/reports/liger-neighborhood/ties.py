"""Liger's neighborhood attention rounds ties of O away from zero.

Needs torch, triton and Liger (`pip install --no-deps liger-kernel==0.8.5`).
Without a GPU Triton interprets the kernel. The inputs are fp16: Triton's interpreter truncates to bf16.
"""

import os
import sys

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
from liger_kernel.ops.fused_neighborhood_attention import fused_neighborhood_attention_forward

HEADS, TOKENS, D = 64, 64, 64
draw = torch.Generator().manual_seed(1)
q, k = torch.zeros(1, HEADS, TOKENS, D), torch.zeros(1, HEADS, TOKENS, D)
q[..., 0], k[:, :, 2:18, 0], k[:, :, 18:, 0] = 1, -13, -60  # scores: two maxima of 0, a tail of 16 keys, the rest
v = -2 - torch.randint(0, 512, (1, HEADS, TOKENS, D), generator=draw) / 512  # of one binade: half of all sums are ties
q, k, v = (x.half().to(DEVICE) for x in (q, k, v))
o = fused_neighborhood_attention_forward(q, k, v, kernel_size=2 * TOKENS + 1, scale=1.0)[
    0
]  # the neighborhood is all tokens

exact = torch.softmax(q.double() @ k.double().mT, -1) @ v.double()
ulp = 2.0 ** (exact.abs().log2().floor() - 10)
bias = ((o.double() - exact) * exact.sign() / ulp).mean().item()
print(f"mean error of O: {bias:+.3f} ulp, + is away from zero (a sound kernel: within 0.05)")
sys.exit(abs(bias) > 0.05)
