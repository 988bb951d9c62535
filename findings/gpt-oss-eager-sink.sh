#!/usr/bin/env bash
# transformers 5.24.0, gpt-oss' eager attention in bf16: scores less the row's maximum are rounded to bf16 before exp, and P after it.
# So a key 8 below the sink is off by 4 ulps of bf16; the same row by Llama's eager attention, the sink given as a key, by 0.2.
# A guess was that a sink joins the softmax in fp32, as all scores do in the eager attention of the models around it.
# Seen: score 0.359375, sink 8: gpt-oss 0.00048828125 (+4.2 ulps), llama 0.00048065185546875 (+0.2), exact 0.000480297
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile --only-binary :all: transformers==5.24.0 torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import math
from types import SimpleNamespace

import torch
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss
from transformers.models.llama.modeling_llama import eager_attention_forward as llama

SINK, D = 8.0, 64


def row(scores, values):
    """Return q, k, v of one row with these scores and values."""
    q, k, v = (torch.zeros(1, 1, tokens, D, dtype=torch.bfloat16) for tokens in (1, len(scores), len(scores)))
    q[..., 0], k[..., 0] = 1, torch.tensor(scores)
    return q, k, v + torch.tensor(values, dtype=torch.bfloat16)[:, None]


def ulps(out, exact):
    return (out - exact) / 2 ** (math.floor(math.log2(exact)) - 7)


score = 0.359375
layer = SimpleNamespace(num_key_value_groups=1, training=False, sinks=torch.tensor([SINK], dtype=torch.bfloat16))
as_sink = gpt_oss(layer, *row([score], [1.0]), None, scaling=1.0)[0][0, 0, 0, 0].item()
as_key = llama(layer, *row([score, SINK], [1.0, 0.0]), None, scaling=1.0)[0][0, 0, 0, 0].item()
exact = 1 / (1 + math.exp(SINK - score))
print(f"gpt-oss {as_sink} ({ulps(as_sink, exact):+.1f} ulps), llama {as_key} ({ulps(as_key, exact):+.1f}), exact {exact:.6g}")
assert ulps(as_sink, exact) > 4
assert abs(ulps(as_key, exact)) < 0.5
PYTHON
