#!/usr/bin/env bash
# torch 2.13.0, CPU: index_add_ and an embedding's gradient add up in bf16 one after another and stop at 256; scatter_add_ does not.
# So a token that occurs 4,096 times in a batch gets a gradient as if it occurred 256 times, in bf16; 2,048 in fp16.
# A guess was fp32 inside for all: torch.sum, cumsum, scatter_add_, embedding_bag and matmul of the same numbers are right.
# Seen: 4096 ones in bf16: index_add_ 256.0, embedding's gradient 256.0, segment_reduce 256.0; scatter_add_ 4096.0, sum 4096.0
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile --only-binary :all: torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import torch

seen = {}
for dtype in (torch.bfloat16, torch.float16):
    ones, place, zero = torch.ones(4096, dtype=dtype), torch.zeros(4096, dtype=torch.long), torch.zeros(1, dtype=dtype)
    table = torch.ones(1, 8, dtype=dtype, requires_grad=True)
    torch.nn.functional.embedding(place, table).sum().backward()
    seen[dtype] = {
        "index_add_": zero.clone().index_add_(0, place, ones).item(),
        "embedding's gradient": table.grad[0, 0].item(),
        "segment_reduce": torch.segment_reduce(ones, "sum", lengths=torch.tensor([4096])).item(),
        "scatter_add_": zero.clone().scatter_add_(0, place, ones).item(),
        "sum": ones.sum().item(),
    }
    print(dtype, seen[dtype])
for dtype, stop in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
    assert list(seen[dtype].values()) == [stop, stop, stop, 4096.0, 4096.0]
PYTHON
