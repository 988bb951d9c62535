#!/usr/bin/env bash
# torch 2.13.0: float8_e8m0fnu, the format of microscaling's scales, makes 1 of -1 and 2^-127 of 0; ml_dtypes 0.6.0 makes NaN of both.
# A guess was NaN for what the format does not hold: it has one, and no sign and no zero.
# Seen: -1.0 -> torch 1.0, ml_dtypes nan; 0.0 -> torch 5.877471754111438e-39, ml_dtypes nan; both round 3.0 to 4.0
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


def both(x):
    """Return x as a scale by torch and by ml_dtypes."""
    by_torch = torch.tensor(x).to(torch.float8_e8m0fnu).float().item()
    return by_torch, float(np.float32(x).astype(ml_dtypes.float8_e8m0fnu))


for x in (-1.0, 0.0, 3.0):
    print(f"{x}: torch {both(x)[0]}, ml_dtypes {both(x)[1]}")
assert both(-1.0)[0] == 1.0 and math.isnan(both(-1.0)[1])
assert both(0.0)[0] == 2.0**-127 and math.isnan(both(0.0)[1])
assert both(3.0) == (4.0, 4.0)
PYTHON
