#!/usr/bin/env bash
# OpenVINO 2026.4.1, CPU with bf16 instructions and none of fp16: a float16 model is computed in bf16, also where fp16 is asked for.
# A guess was fp32 inside where a CPU lacks fp16: bf16 has 3 bits fewer than the model's own numbers, and nothing warns.
# Seen: INFERENCE_PRECISION_HINT unset or f16 reports bfloat16, and all elements of O are bf16 numbers; with f32 12 % are
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile --only-binary :all: openvino==2026.4.1 numpy==2.4.6 ml-dtypes==0.6.0
"$folder/venv/bin/python" - <<'PYTHON'
import ml_dtypes
import numpy as np
import openvino
import openvino.opset13 as operators

core, shape = openvino.Core(), [1, 4, 32, 64]
able = core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
assert "BF16" in able and "FP16" not in able, f"another CPU is needed: this one has {able}"
random = np.random.default_rng(1)
q, k, v = (random.standard_normal(shape).astype(np.float16) for _ in range(3))
seen = {}
for hint in (None, openvino.Type.f16, openvino.Type.f32):
    inputs = [operators.parameter(shape, openvino.Type.f16) for _ in "qkv"]
    model = openvino.Model([operators.scaled_dot_product_attention(*inputs)], inputs, "attention")
    compiled = core.compile_model(model, "CPU", {} if hint is None else {"INFERENCE_PRECISION_HINT": hint})
    o = compiled([q, k, v])[0].astype(np.float32)
    share = float((o == o.astype(ml_dtypes.bfloat16).astype(np.float32)).mean())
    reported = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    name = "unset" if hint is None else hint.get_type_name()
    seen[name] = reported, share
    print(f"hint {name}: reports {reported}, {100 * share:.0f} % of O are bf16 numbers")
assert seen["unset"] == seen["f16"] == ("bf16", 1.0)
assert seen["f32"][0] == "f32" and seen["f32"][1] < 0.2
PYTHON
