#!/usr/bin/env bash
# mlx 0.32.4, CPU: a row that sees no key is the mean of V, NaN, or 0, by how scaled_dot_product_attention is told so.
# A guess was one answer, NaN as in a softmax of -inf, or 0 as in flash kernels.
# Seen: boolean mask 3.0 (all V are 3), mask of -inf nan, boolean mask and a sink 0.0
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile --only-binary :all: 'mlx[cpu]==0.32.4' numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import math

import mlx.core as mx

q, k = mx.zeros((1, 1, 4, 64), mx.bfloat16), mx.zeros((1, 1, 16, 64), mx.bfloat16)
v = mx.full((1, 1, 16, 64), 3, dtype=mx.bfloat16)
hidden = mx.zeros((4, 16), mx.bool_)
infinite = mx.full((4, 16), -math.inf, dtype=mx.bfloat16)
ways = {
    "boolean mask": {"mask": hidden},
    "mask of -inf": {"mask": infinite},
    "boolean mask and a sink": {"mask": hidden, "sinks": mx.zeros((1,), mx.bfloat16)},
}
seen = {way: mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, **told)[0, 0, 0, 0].item() for way, told in ways.items()}
print(seen)
assert math.isnan(seen.pop("mask of -inf")) and list(seen.values()) == [3.0, 0.0]
PYTHON
