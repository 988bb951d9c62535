#!/usr/bin/env bash
# numpy 2.4.6: a sum of float16 stops at 2,048 along the first axis and is right along the last; of ml_dtypes' bf16 it stops in both.
# So does mean() of bf16: 1,000 ones have a mean of 0.2559. A matmul of the same numbers is right.
# A guess was that the axis changes nothing, or a last bit: np.mean of float16 is computed in float32 on purpose.
# Seen: 4096 ones in float16: 2048.0 along axis 0, 4096.0 along axis 1; in bfloat16 256.0 and 256.0, mean of 1000 ones 0.255859375
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile --only-binary :all: numpy==2.4.6 ml-dtypes==0.6.0
"$folder/venv/bin/python" - <<'PYTHON'
import ml_dtypes
import numpy as np

seen = {}
for dtype in (np.float16, ml_dtypes.bfloat16):
    ones = np.ones((4096, 4), dtype)
    seen[dtype.__name__] = float(ones.sum(0)[0]), float(ones.T.copy().sum(1)[0])
    print(f"4096 ones in {dtype.__name__}: {seen[dtype.__name__][0]} along axis 0, {seen[dtype.__name__][1]} along axis 1")
assert seen == {"float16": (2048.0, 4096.0), "bfloat16": (256.0, 256.0)}
assert float(np.ones(1000, ml_dtypes.bfloat16).mean()) == 0.255859375
assert float((np.ones((1, 4096), ml_dtypes.bfloat16) @ np.ones(4096, ml_dtypes.bfloat16))[0]) == 4096.0
PYTHON
