#!/usr/bin/env bash
# ggml 0.13.1 (the wheel of pywhispercpp 1.5.1): flash attention of fewer than 64 rows adds P V up in fp16, of 64 rows in fp32.
# So prefill and decode differ: over 4,096 keys that all weigh the same, a decoded token gets half of the mean of V.
# A guess was that O is accumulated in fp32 however many rows there are, as the output is fp32.
# Seen: 4096 keys: 0.5 with 1 row, 0.5 with 63, 1.0 with 64; 16384 keys: 0.125, 0.125, 1.0; with V in fp32 always 1.0
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile --only-binary :all: pywhispercpp==1.5.1 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import ctypes
from importlib.util import find_spec
from pathlib import Path

import numpy as np

site = Path(find_spec("numpy").origin).parents[1]
base = ctypes.CDLL(str(site / "libggml-base.so.0"), mode=ctypes.RTLD_GLOBAL)
cpu = ctypes.CDLL(str(site / "libggml-cpu.so.0"))
FP32, FP16 = 0, 1  # as ggml numbers its types


class Parameters(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def function(library, name, result, *arguments):
    found = getattr(library, name)
    found.restype, found.argtypes = result, arguments
    return found


at, number = ctypes.c_void_p, ctypes.c_float
start = function(base, "ggml_init", at, Parameters)
stop = function(base, "ggml_free", None, at)
tensor = function(base, "ggml_new_tensor_4d", at, at, ctypes.c_int, *[ctypes.c_int64] * 4)
data = function(base, "ggml_get_data", at, at)
flash = function(base, "ggml_flash_attn_ext", at, at, at, at, at, at, number, number, number)
graph = function(base, "ggml_new_graph", at, at)
expand = function(base, "ggml_build_forward_expand", None, at, at)
compute = function(cpu, "ggml_graph_compute_with_ctx", ctypes.c_int, at, at, ctypes.c_int)
cpu.ggml_cpu_init()


def mean_of_v(rows, keys, v_type=FP16, d=64):
    """Return O where all scores are 0 and all V are 1."""
    context = start(Parameters(256 << 20, None, False))

    def filled(value, tokens, kind):
        numbers = np.full((tokens, d), value, np.float16 if kind == FP16 else np.float32)
        new = tensor(context, kind, d, tokens, 1, 1)
        ctypes.memmove(data(new), numbers.ctypes.data, numbers.nbytes)
        return new

    o = flash(context, filled(0, rows, FP32), filled(0, keys, FP16), filled(1, keys, v_type), None, 1.0, 0.0, 0.0)
    steps = graph(context)
    expand(steps, o)
    assert compute(context, steps, 1) == 0
    out = ctypes.cast(data(o), ctypes.POINTER(ctypes.c_float))[0]
    stop(context)
    return out


for keys, short in ((4096, 0.5), (16384, 0.125)):
    print(keys, "keys:", *(f"{mean_of_v(rows, keys)} with {rows} rows," for rows in (1, 63, 64)))
    assert [mean_of_v(rows, keys) for rows in (1, 63, 64)] == [short, short, 1.0]
    assert mean_of_v(1, keys, FP32) == 1.0
PYTHON
