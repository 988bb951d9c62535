"""jax.nn.dot_product_attention on a CPU rounds P to bf16 or not, by how many heads are in the call. Needs jax."""

import sys

import jax
import jax.numpy as jnp

attention = jax.jit(jax.nn.dot_product_attention)
q, k, v = jax.random.normal(jax.random.key(1), (3, 1, 64, 1, 64)).astype(jnp.bfloat16)  # (batch, tokens, heads, d)
alone = attention(q, k, v)[:, :, 0]
worst = 1.0
for heads in (1, 4, 16, 64):
    among = attention(*(jnp.repeat(x, heads, 2) for x in (q, k, v)))[:, :, 0]  # the same head, so many times
    share = float((alone == among).mean())
    worst = min(worst, share)
    print(f"one head among {heads:2} alike has {100 * share:5.1f} % of the bits that it has alone")
sys.exit(worst < 1)
