#!/usr/bin/env bash
# ptxas 12.9.86: a packed product and the packed sum after it (mul.rn.f32x2, add.rn.f32x2) become one fused operation; 13.5.37 keeps both.
# The manual's .rn asks for a rounding after each, and scalar code gets it from both: one PTX of Blackwell has other bits by the toolkit.
# A guess was that an explicit .rn is never contracted, packed or not, whichever assembler is installed.
# Seen: f32x2 of sm_100a: FFMA2 by 12.9.86, FMUL2 and FADD2 by 13.5.37; of sm_120a two FFMA, then two FMUL and two FADD; f32: FMUL, FADD
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile --only-binary :all: nvidia-cuda-nvcc-cu12==12.9.86 nvidia-cuda-nvcc==13.5.37 nvidia-cuda-nvdisasm==13.5.37
"$folder/venv/bin/python" - <<'PYTHON'
import re
import subprocess
import sysconfig
from pathlib import Path

nvidia = Path(sysconfig.get_path("purelib")) / "nvidia"
ASSEMBLERS = {"12.9.86": nvidia / "cuda_nvcc/bin/ptxas", "13.5.37": nvidia / "cu13/bin/ptxas"}
source = Path(sysconfig.get_path("data")) / "k.ptx"


def operations(assembler, card, kind, bits):
    """Return the arithmetic of x[0] = x[0] * x[1] + x[2] in machine code, each step rounded to nearest."""
    source.write_text(f"""
        .version 8.8
        .target {card}
        .address_size 64
        .visible .entry k(.param .u64 p) {{
            .reg .b64 %at;
            .reg .b{bits} %x<5>;
            ld.param.u64 %at, [p];
            ld.global.b{bits} %x0, [%at];
            ld.global.b{bits} %x1, [%at+{bits // 8}];
            ld.global.b{bits} %x2, [%at+{bits // 4}];
            mul.rn.{kind} %x3, %x0, %x1;
            add.rn.{kind} %x4, %x3, %x2;
            st.global.b{bits} [%at], %x4;
            ret;
        }}
    """)
    made = source.with_suffix(".cubin")
    subprocess.run([assembler, f"-arch={card}", source, "-o", made], check=True)
    listed = subprocess.run([nvidia / "cu13/bin/nvdisasm", made], check=True, capture_output=True, text=True).stdout
    return re.findall(r"\b(?:FFMA|FMUL|FADD)2?\b", listed)


for card, packed in (("sm_100a", (["FFMA2"], ["FMUL2", "FADD2"])), ("sm_120a", (["FFMA"] * 2, ["FMUL"] * 2 + ["FADD"] * 2))):
    for (version, assembler), expected in zip(ASSEMBLERS.items(), packed):
        seen = {kind: operations(assembler, card, kind, bits) for kind, bits in (("f32", 32), ("f32x2", 64))}
        print(f"ptxas {version}, {card}: f32 {' '.join(seen['f32'])}; f32x2 {' '.join(seen['f32x2'])}")
        assert seen == {"f32": ["FMUL", "FADD"], "f32x2": expected}
PYTHON
