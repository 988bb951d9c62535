#!/usr/bin/env bash
# onnxruntime 1.32.0, CPU: MultiHeadAttention with unidirectional=1 hides keys at the upper left, but not from the last row, which sees all.
# So of fewer rows than keys no alignment is right: neither the upper left (as its Attention has it), nor the lower right.
# A guess was one of the two, as in every other library here; the document of the operator says neither.
# Seen: 3 rows of 7 keys see 1, 2, 7 keys; 3 rows of 3 keys 1, 2, 3; 7 rows of 3 keys 1, 2, 3, 3, 3, 3, 3
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile --only-binary :all: onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import onnxruntime
from onnx import TensorProto, helper

names = ["q", "k", "v", "o"]
tensors = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names}
node = helper.make_node(
    "MultiHeadAttention", names[:3], ["o"], domain="com.microsoft", num_heads=1, unidirectional=1
)
graph = helper.make_graph([node], "attention", [tensors[name] for name in names[:3]], [tensors["o"]])
opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def seen(rows, keys, d=8):
    """Return how many keys each row sees, of equal scores, where each key has a column of V to itself."""
    zeros = {name: np.zeros((1, length, d), np.float32) for name, length in (("q", rows), ("k", keys), ("v", keys))}
    zeros["v"][0, range(keys), range(keys)] = 1
    (o,) = session.run(None, zeros)
    return [int((row > 0.01).sum()) for row in o[0]]


out = {shape: seen(*shape) for shape in ((3, 7), (3, 3), (7, 3))}
for (rows, keys), counts in out.items():
    print(f"{rows} rows of {keys} keys see {', '.join(map(str, counts))} keys")
assert out == {(3, 7): [1, 2, 7], (3, 3): [1, 2, 3], (7, 3): [1, 2, 3, 3, 3, 3, 3]}
PYTHON
