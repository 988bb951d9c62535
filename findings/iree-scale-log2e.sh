#!/usr/bin/env bash
# IREE 3.13.0, llvm-cpu: attention in bf16 multiplies scores by one bf16 number, scale * log2(e) rounded, so all are 0.18 % too large.
# A guess was that the factor between exp and exp2 is applied in fp32, as S itself is.
# Seen: scores 16 apart weigh as if they were 16.028 apart
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile --only-binary :all: iree-base-compiler==3.13.0 iree-base-runtime==3.13.0 numpy==2.4.6 ml-dtypes==0.6.0
"$folder/venv/bin/python" - <<'PYTHON'
import math

import iree.compiler
import iree.runtime
import ml_dtypes
import numpy as np

ROWS, KEYS, D = 4, 64, 64
of = {name: f"tensor<1x{tokens}x{D}xbf16>" for name, tokens in (("q", ROWS), ("k", KEYS), ("v", KEYS), ("o", ROWS))}
maps = ("(b, m, d)", "(b, n, d)", "(b, n, e)", "()", "(b, m, e)")
PROGRAM = f"""
func.func @attention(%q: {of["q"]}, %k: {of["k"]}, %v: {of["v"]}) -> {of["o"]} {{
  %scale = arith.constant 1.0 : bf16
  %empty = tensor.empty() : {of["o"]}
  %o = iree_linalg_ext.attention <{{indexing_maps = [
      {", ".join(f"affine_map<(b, m, e, d, n) -> {each}>" for each in maps)}]}}>
      ins(%q, %k, %v, %scale : {of["q"]}, {of["k"]}, {of["v"]}, bf16) outs(%empty : {of["o"]}) {{
    ^bb0(%score: f32): iree_linalg_ext.yield %score : f32
  }} -> {of["o"]}
  return %o : {of["o"]}
}}"""
options = ["--iree-llvmcpu-target-cpu=generic"]
compiled = iree.compiler.compile_str(PROGRAM, target_backends=["llvm-cpu"], extra_args=options)
context = iree.runtime.SystemContext(config=iree.runtime.Config("local-sync"))
context.add_vm_module(iree.runtime.VmModule.copy_buffer(context.instance, compiled))
attention = context.modules.module.attention

q, k, v = (np.zeros((1, tokens, D), ml_dtypes.bfloat16) for tokens in (ROWS, KEYS, KEYS))
q[..., 0], k[..., 0] = 1, -300
k[0, 0, 0], k[0, 1, 0] = 10, 10 - 16
v[0, 1] = 1  # so O is the weight of key 1
p = float(np.asarray(attention(q, k, v).to_host()).astype(np.float64)[0, 0, 0])
apart = math.log((1 - p) / p)
print(f"scores 16 apart weigh as if they were {apart:.3f} apart")
rounded = float(ml_dtypes.bfloat16(math.log2(math.e))) / math.log2(math.e)
assert abs(apart / 16 / rounded - 1) < 2e-4 and rounded > 1.0018
PYTHON
