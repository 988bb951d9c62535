#!/usr/bin/env bash
# mlx 0.32.4, CPU: scaled_dot_product_attention in bf16 rounds the scale to bf16, and q times the scale again, before the product.
# So a scale of 0.3, which is no bf16 number, is 0.30078125; a power of two, as 1/8, changes nothing.
# A guess was that the scale, a Python float, is applied to scores in fp32, as flash kernels apply it.
# Seen: scores 16 apart before a scale of 0.3 weigh as if it were 0.3008
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile --only-binary :all: 'mlx[cpu]==0.32.4' numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import math

import mlx.core as mx

q, k = mx.zeros((1, 1, 1, 64), mx.bfloat16), mx.zeros((1, 1, 2, 64), mx.bfloat16)
q[..., 0] = 1
k[0, 0, 0, 0] = 16
v = mx.zeros((1, 1, 2, 64), mx.bfloat16)
v[0, 0, 1] = 1  # so O is the weight of key 1
seen = {}
for scale in (0.3, 0.125):
    p = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale)[0, 0, 0, 0].item()
    seen[scale] = math.log((1 - p) / p) / 16
    print(f"scores 16 apart before a scale of {scale} weigh as if it were {seen[scale]:.5f}")
assert abs(seen[0.3] - 0.30078125) < 2e-4 < seen[0.3] - 0.3
assert abs(seen[0.125] - 0.125) < 3e-4
PYTHON
