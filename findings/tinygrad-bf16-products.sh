#!/usr/bin/env bash
# tinygrad 0.14.0, DEV=CPU: a matmul in bf16 rounds each product to bf16 before the fp32 sum; in fp16 it does not.
# A guess was that products of 16-bit numbers are exact in fp32, as they are in every other library here.
# Seen: bf16: 0.0 where the exact dot product is 6.103515625e-05; float16: 9.5367431640625e-07, which is exact
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile --only-binary :all: tinygrad==0.14.0 ziglang==0.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import os
import shlex
import sys
from pathlib import Path

compiler = Path(sys.prefix, "bin", "clang-of-zig")
compiler.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m ziglang clang "$@"\n')
compiler.chmod(0o755)
os.environ |= {"DEV": "CPU", "CC": str(compiler)}

from tinygrad import Tensor, dtypes

seen = {}
for name, dtype, bits in (("bf16", dtypes.bfloat16, 7), ("float16", dtypes.half, 10)):
    x = 1 + 2.0**-bits  # x * x is 1 + 2 * 2**-bits + 2**-2bits, of which the last term needs more bits
    q = Tensor([[x, x * x - 4.0**-bits]], dtype=dtype).realize()
    k = Tensor([[x, -1.0]], dtype=dtype).realize()
    seen[name] = float((q @ k.T).float().numpy()[0, 0])
    print(f"{name}: {seen[name]}, exact {4.0**-bits}")
assert seen == {"bf16": 0.0, "float16": 4.0**-10}
PYTHON
