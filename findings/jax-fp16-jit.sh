#!/usr/bin/env bash
# jax 0.10.2, CPU: dot_product_attention in fp16 runs without jit, and under jit it is refused; in bf16 it runs both ways.
# So is it in 0.12.0.1: XLA for CPUs has no product of fp16 numbers that is added up in fp32, which the function asks for.
# A guess was that jit changes speed and at most bits, and that fp16 is the better supported of the two.
# Seen: without jit 1.0; jitted: The precision 'F16_F16_F32' is not supported by dot_general on CPU
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile --only-binary :all: jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp

attention = jax.nn.dot_product_attention
x = jnp.ones((1, 8, 2, 16), jnp.float16)
print("without jit", attention(x, x, x)[0, 0, 0, 0])
assert jax.jit(attention)(*[x.astype(jnp.bfloat16)] * 3)[0, 0, 0, 0] == 1
refused = None
try:
    jax.jit(attention)(x, x, x)
except ValueError as error:
    refused = str(error)
    print("jitted:", refused)
assert refused is not None and "F16_F16_F32" in refused
PYTHON
