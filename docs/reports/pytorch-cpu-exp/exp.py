"""The exponential of PyTorch's CPU flash attention is 1 - 5.35e-5 at 0, and ties of O break away from zero.

Needs torch alone. On a CPU without AVX2 the exponential is exact, and the script ends with 0:
`ATEN_CPU_CAPABILITY=default` shows it.
"""

import math
import sys

import torch

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
zeros = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16)  # 64 equal scores of 0: l is 64 times exp(0)
_, lse = flash(zeros, zeros, zeros)
at_zero = math.exp(lse.double().mean().item() - math.log(64))
print(f"exp(0) = 1 {at_zero - 1:+.2e}")

draw = torch.Generator().manual_seed(1)
q, k = torch.zeros(1, 64, 64, 64), torch.zeros(1, 64, 64, 64)
q[..., 0], k[:, :, 2:, 0] = 8, -60  # scores: two maxima of 0, all others -60
v = -2 - torch.randint(0, 64, (1, 64, 64, 64), generator=draw) / 64  # of one binade: half of all sums of two are ties
q, k, v = (x.bfloat16() for x in (q, k, v))
exact = torch.softmax(q.double() @ k.double().mT / 8, -1) @ v.double()
bias = ((flash(q, k, v)[0].double() - exact) * exact.sign() / 2.0 ** (exact.abs().log2().floor() - 7)).mean().item()
print(f"mean error of O: {bias:+.3f} ulp, + is away from zero (exact ties, rounded to even: within 0.05)")
sys.exit(abs(at_zero - 1) > 1e-6)
