"""SageAttention counts keys past the end of a sequence, and changes its caller's k.

Needs torch, triton and SageAttention (`pip install --no-deps sageattention==1.0.6`).
Without a GPU Triton interprets the kernel.
"""

import os
import sys

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    torch.Tensor.is_cuda = True  # sageattn asserts it
from sageattention import sageattn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
draw = torch.Generator().manual_seed(1)
worst = 1.0
for keys in (64, 65, 100, 127, 128, 1000):
    q, k, v = (torch.randint(-2048, 2049, (1, 1, n, 64), generator=draw) / 1024 for n in (128, keys, keys))
    q, k, v = (x.half().to(DEVICE) for x in (q, k, v))
    exact = torch.softmax(q.double() @ k.double().mT / 8, -1) @ v.double()
    before = k.clone()
    o = sageattn(q, k, v).double()
    left = ((o * exact).sum() / exact.square().sum()).item()
    worst = min(worst, left)
    print(f"{keys:4} keys: {100 * left:5.1f} % of O are left; k changed by up to {(k - before).abs().max():.3f}")
sys.exit(worst < 0.99 or not torch.equal(k, before))
