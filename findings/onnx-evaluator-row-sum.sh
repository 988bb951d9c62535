#!/usr/bin/env bash
# onnx 1.23.2, ReferenceEvaluator: Attention (opset 24) in bf16 adds the row sum up in bf16, one after another: it stops at 256.
# So the standard's own reference gives 3.9 times the mean of V for 1,000 equal scores, and 16 times for 4,096; fp16 is right.
# A guess was that a reference, the format's own, sums in fp32 or better.
# Seen: bfloat16, 1000 keys: 3.90625; 4096 keys: 16.0; float16: 1.0 and 1.0; with softmax_precision=1: 1.0
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile --only-binary :all: onnx==1.23.2 numpy==2.4.6 ml-dtypes==0.6.0
"$folder/venv/bin/python" - <<'PYTHON'
import ml_dtypes
import numpy as np
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator


def mean_of_v(element, dtype, keys, **attributes):
    """Return O where all scores are 0 and all V are 1."""
    tensors = {name: helper.make_tensor_value_info(name, element, None) for name in ("q", "k", "v", "o")}
    o = tensors.pop("o")
    node = helper.make_node("Attention", list(tensors), ["o"], **attributes)
    graph = helper.make_graph([node], "attention", list(tensors.values()), [o])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    shape = (1, 1, keys, 8)
    inputs = {"q": np.zeros((1, 1, 1, 8), dtype), "k": np.zeros(shape, dtype), "v": np.ones(shape, dtype)}
    return float(ReferenceEvaluator(model).run(None, inputs)[0].flat[0])


bf16, fp16 = (TensorProto.BFLOAT16, ml_dtypes.bfloat16), (TensorProto.FLOAT16, np.float16)
seen = {keys: (mean_of_v(*bf16, keys), mean_of_v(*fp16, keys)) for keys in (1000, 4096)}
for keys, (in_bf16, in_fp16) in seen.items():
    print(f"{keys} keys: bfloat16 {in_bf16}, float16 {in_fp16}")
assert seen == {1000: (3.90625, 1.0), 4096: (16.0, 1.0)}
assert mean_of_v(*bf16, 4096, softmax_precision=TensorProto.FLOAT) == 1.0
PYTHON
