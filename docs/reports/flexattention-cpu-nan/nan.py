"""Compiled FlexAttention on a CPU gives zeros for a row whose scores are NaN. Needs torch and a C++ compiler."""

import sys
import warnings

import torch
from torch.nn.attention.flex_attention import flex_attention

q, k, v = torch.ones(3, 1, 1, 64, 64).unbind()
q[0, 0, 5] = float("nan")
with torch.no_grad(), warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the uncompiled call, which is the reference here
    compiled, eager = (f(q, k, v)[0, 0, 5] for f in (torch.compile(flex_attention), flex_attention))
print(f"O of a NaN query is {eager[:3].tolist()} uncompiled, {compiled[:3].tolist()} compiled")
sys.exit(not compiled.isnan().all())
