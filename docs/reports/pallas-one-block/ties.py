"""Pallas' flash attention for TPUs rounds ties of O away from zero where all keys are in one block.

Needs jax. Its interpreter of TPUs runs the kernel on a CPU, whose products of matrices are not those of a TPU.
"""

import sys

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu
from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention

QUERIES, KEYS, HEADS, D = 8, 256, 64, 64
draw = np.random.default_rng(1)
q, k = np.zeros((1, HEADS, QUERIES, D)), np.zeros((1, HEADS, KEYS, D))
q[..., 0], k[:, :, 2:18, 0], k[:, :, 18:, 0] = 1, -10, -60  # scores: two maxima of 0, a tail of 16 keys, the rest
v = -2 - draw.integers(0, 128, (1, HEADS, KEYS, D)) / 64  # of bf16, and of one binade: half of all sums are ties
p = np.exp(q @ k.swapaxes(2, 3))
exact = p / p.sum(-1, keepdims=True) @ v
ulp = 2.0 ** (np.floor(np.log2(-exact)) - 7)

with tpu.force_tpu_interpret_mode():
    for block in (128, KEYS):
        sizes = BlockSizes(block_q=QUERIES, block_k_major=block, block_k=block, block_b=1)
        o = flash_attention(*(jnp.array(x, jnp.bfloat16) for x in (q, k, v)), block_sizes=sizes)
        errors = ((np.asarray(o, np.float64) - exact) / -ulp).mean((0, 2, 3))  # of each head, + is away from zero
        bias, apart = errors.mean(), errors.std(ddof=1) / HEADS**0.5
        print(f"{KEYS} keys in blocks of {block}: mean error of O {bias:+.3f} ± {apart:.3f} ulp, + is away from zero")
sys.exit(int(abs(bias) > 0.05))  # of one block
