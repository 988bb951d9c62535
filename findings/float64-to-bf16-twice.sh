#!/usr/bin/env bash
# torch 2.13.0 and ml_dtypes 0.6.0: a cast from float64 to bf16 rounds twice, to float32 in between; torch's to float16 does too.
# So a reference in float64 that is cast is off by an ulp where float32 rounds onto a tie; numpy's cast to float16 rounds once.
# A guess was that a cast is rounded correctly: IEEE 754 asks it of every conversion between its formats.
# Seen: 1 + 2^-8 + 2^-40 in bf16: 1.0 by torch and ml_dtypes, where 1.0078125 is nearest; 1 + 2^-11 + 2^-40 in fp16: torch 1.0, numpy 1.0009765625
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile --only-binary :all: torch==2.13.0 ml-dtypes==0.6.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import ml_dtypes
import numpy as np
import torch

x, y = np.float64(1 + 2**-8 + 2**-40), np.float64(1 + 2**-11 + 2**-40)
by_torch = float(torch.tensor(x).to(torch.bfloat16)), float(torch.tensor(y).to(torch.float16))
by_numpy = float(x.astype(ml_dtypes.bfloat16)), float(y.astype(np.float16))
print(f"bf16: torch {by_torch[0]}, ml_dtypes {by_numpy[0]}, nearest {1 + 2**-7}")
print(f"fp16: torch {by_torch[1]}, numpy {by_numpy[1]}, nearest {1 + 2**-10}")
assert by_torch == (1.0, 1.0)
assert by_numpy == (1.0, 1 + 2**-10)
PYTHON
