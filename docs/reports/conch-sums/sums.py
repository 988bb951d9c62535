"""Conch's attention adds up O and its row sum in 16 bits, block of keys by block.

Needs torch, triton and Conch (`pip install --no-deps conch-triton-kernels==1.3`).
Without a GPU Triton interprets the kernel. The inputs are fp16: Triton's interpreter truncates to bf16.
"""

import os
import sys
from types import SimpleNamespace

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
    sys.modules["conch.platforms"] = SimpleNamespace(current_platform=SimpleNamespace(get_device_name=str))
from conch.kernels.attention.varlen_attention import varlen_attention_launcher

PAGE, PAGES, D = 16, 64, 64
tokens = PAGE * PAGES
draw = torch.Generator().manual_seed(1)
q, k, v = (
    (torch.randint(-2048, 2049, (n, 1, D), generator=draw) / 1024).half().to(DEVICE) for n in (64, tokens, tokens)
)
o, ends = torch.empty_like(q), torch.tensor([0, 64], device=DEVICE)
table, length = torch.arange(PAGES, device=DEVICE).view(1, -1), torch.tensor([tokens], device=DEVICE)
pages = [x.view(PAGES, PAGE, 1, D) for x in (k, v)]
varlen_attention_launcher(o, q, *pages, ends, 64, length, tokens, table, scale=D**-0.5)

exact = torch.softmax(q[:, 0].double() @ k[:, 0].double().T * D**-0.5, -1) @ v[:, 0].double()
rms = (o[:, 0].double() - exact).square().mean().sqrt()
once = (exact.half().double() - exact).square().mean().sqrt()
print(f"root mean square error of O: {rms / once:.1f} times that of rounding once (sums in fp32: below 2)")
sys.exit(int(rms > 3 * once))
