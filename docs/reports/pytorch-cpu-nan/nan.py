"""PyTorch's CPU flash attention gives zeros for some rows whose scores are NaN or Inf. Needs torch alone."""

import sys

import torch

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
lost = 0
for value in float("nan"), float("inf"):
    for keys in 4, 32:
        q, k, v = (torch.ones(1, 1, n, 16, dtype=torch.bfloat16) for n in (1, keys, keys))
        o = flash(q * value, k, v)[0].flatten()[0].item()
        lost += o == 0
        print(f"{keys:2} scores of {value}: O is {o} (a softmax gives nan)")
sys.exit(lost > 0)
