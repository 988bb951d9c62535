#!/usr/bin/env bash
# mlx 0.32.4, CPU: mx.softmax of a bf16 or fp16 array adds up in that format, so 4,096 equal scores give weights that sum to 16 or 2.
# mx.sum, mx.logsumexp and mx.fast.scaled_dot_product_attention of the same numbers are right, and so is precise=True.
# A guess was that precise= is about the last bit: a softmax of 16-bit numbers sums in fp32 everywhere else.
# Seen: weights of 128, 512, 4096 equal scores sum to 1.0, 2.0, 16.0 in bfloat16, to 1.0, 1.0, 2.0 in float16
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile --only-binary :all: 'mlx[cpu]==0.32.4' numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import mlx.core as mx

seen = {}
for name, dtype in (("bfloat16", mx.bfloat16), ("float16", mx.float16)):
    sums = [mx.softmax(mx.zeros((n,), dtype)).astype(mx.float32).sum().item() for n in (128, 512, 4096)]
    seen[name] = sums
    print(f"{name}: weights of 128, 512, 4096 equal scores sum to", *sums)
    assert mx.softmax(mx.zeros((4096,), dtype), precise=True).astype(mx.float32).sum().item() == 1.0
    assert mx.ones((4096,), dtype).sum().item() == 4096
assert seen == {"bfloat16": [1.0, 2.0, 16.0], "float16": [1.0, 1.0, 2.0]}
PYTHON
