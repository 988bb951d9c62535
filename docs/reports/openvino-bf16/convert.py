"""OpenVINO rounds fp32 to bf16 toward zero where the last bit that stays is 0. Needs openvino and numpy.

It does so on CPUs without AVX512; for others oneDNN's switch, which OpenVINO heeds, takes such a CPU's path.
"""

import os
import sys

os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"
import numpy as np
import openvino
from openvino import opset8

x = opset8.parameter([65536], np.float32)
model = openvino.Model([opset8.convert(x, "bf16")], [x])
compiled = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
values = np.random.default_rng(1).standard_normal(65536).astype(np.float32)
theirs = compiled(values)[0].view(np.uint16)

bits = values.view(np.uint32)
nearest = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)
error = (theirs.astype(np.int64) << 16) - bits  # the sign is a bit of its own: minus is toward zero
print(f"{100 * (theirs == nearest).mean():.1f} % are the nearest bf16, to even in ties")
print(f"mean error {error.mean() / 65536:+.3f} ulp (to nearest: within 0.01)")
sys.exit(not (theirs == nearest).all())
