#!/usr/bin/env bash
# torch 2.13.0 and ml_dtypes 0.6.0: what is too large for float8_e4m3fn becomes 448 in torch and NaN in ml_dtypes (JAX, TensorFlow, onnx).
# A guess was NaN in both: the format has no Inf, and torch.float8_e5m2 does overflow, to Inf, as ml_dtypes' does.
# Seen: 465.0 -> torch 448.0, ml_dtypes nan; inf -> torch 448.0, ml_dtypes nan; e5m2: 65536.0 -> inf, inf
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile --only-binary :all: torch==2.13.0 ml-dtypes==0.6.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import math

import ml_dtypes
import numpy as np
import torch


def both(x, name):
    """Return x in a format of 8 bits by torch and by ml_dtypes."""
    by_torch = torch.tensor(x, dtype=torch.float32).to(getattr(torch, name)).float().item()
    return by_torch, float(np.float32(x).astype(getattr(ml_dtypes, name)))


for x, name in ((464.0, "float8_e4m3fn"), (465.0, "float8_e4m3fn"), (math.inf, "float8_e4m3fn"), (65536.0, "float8_e5m2")):
    print(f"{x} in {name}: torch {both(x, name)[0]}, ml_dtypes {both(x, name)[1]}")
by_torch, by_ml_dtypes = both(465.0, "float8_e4m3fn")
assert by_torch == 448.0 and math.isnan(by_ml_dtypes)
assert both(464.0, "float8_e4m3fn") == (448.0, 448.0)
assert both(65536.0, "float8_e5m2") == (math.inf, math.inf)
PYTHON
