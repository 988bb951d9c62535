#!/usr/bin/env bash
# jax 0.10.2, jitted, CPU: dot_product_attention in bf16 rounds P or not by the shape of the call; mended in 0.11.2 (Python 3.12).
# XLA takes the cast out where it fuses it with the product; XLA_FLAGS=--xla_allow_excess_precision=false leaves it in.
# A guess was that a head has the same bits alone and among 64, as it has without jit, and in 0.12.0.1.
# Seen: one head among 1, 4, 16, 64 alike has 100, 100, 100, 58 % of the bits that it has alone
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile --only-binary :all: jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp

attention = jax.jit(jax.nn.dot_product_attention)
q, k, v = jax.random.normal(jax.random.key(1), (3, 1, 64, 1, 64)).astype(jnp.bfloat16)  # (batch, tokens, heads, d)
alone = attention(q, k, v)[:, :, 0]
shares = []
for heads in (1, 4, 16, 64):
    among = attention(*(jnp.repeat(x, heads, 2) for x in (q, k, v)))[:, :, 0]  # the same head, so many times
    shares.append(float((alone == among).mean()))
    print(f"one head among {heads:2} alike has {100 * shares[-1]:5.1f} % of the bits that it has alone")
assert shares[:3] == [1.0, 1.0, 1.0] and 0.5 < shares[3] < 0.7
PYTHON
