#!/usr/bin/env bash
# flash-attn-4 4.0.0b36: on Blackwell (sm_100) 16 of every 128 keys of a row, always the same, get a cubic polynomial for 2^x.
# Hopper's code of the same call has the card's exponential for all, so a model that one card trains is served with other bits.
# A guess was that one call of one version rounds alike on both cards, but for the order of sums.
# Seen: sm_90: 130 ex2, 0 roundings down of a polynomial; sm_100, two tiles of 128: 225 ex2 and 32, with fma.rn.f32x2 after them
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile --only-binary :all: torch==2.13.0 triton==3.7.1 numpy==2.4.6 quack-kernels==0.6.5 nvidia-cutlass-dsl==4.8.1 nvidia-cutlass-dsl-libs-cu13==4.8.1 flash-attn-4==4.0.0b36
"$folder/venv/bin/python" - <<'PYTHON'
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

# A kernel is compiled as it is called: with tensors that have no numbers, for a card that need not be here.
CALL = """
from types import SimpleNamespace
import cutlass, torch
from flash_attn.cute.interface import flash_attn_func
from torch._subclasses.fake_tensor import FakeTensorMode
cutlass.utils.HardwareInfo = lambda *_: SimpleNamespace(  # a grid's size, which a driver is asked for
    get_device_multiprocessor_count=lambda: 148, get_max_active_clusters=lambda blocks: 148 // blocks
)
with FakeTensorMode():
    flash_attn_func(*(torch.empty(1, 256, 2, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3)))
"""


def operations(card, blocks):
    """Return how often PTX has the card's exponential, and the rounding down with which its polynomial begins."""
    with tempfile.TemporaryDirectory() as folder:
        words = {"FLASH_ATTENTION_ARCH": card, "CUTE_DSL_ARCH": f"{card}a", "FLASH_ATTENTION_NUM_SMS": blocks}
        words |= {"CUTE_DSL_KEEP": "ptx", "CUTE_DSL_DUMP_DIR": folder}
        subprocess.run([sys.executable, "-W", "ignore", "-c", CALL], env={**os.environ, **words}, capture_output=True)
        (made,) = Path(folder).glob("*.ptx")
        text = made.read_text()
    packed, single = len(re.findall(r"add\.rm\S*\.f32x2", text)), len(re.findall(r"add\.rm\S*\.f32\s", text))
    return len(re.findall(r"ex2\.approx", text)), 2 * packed + single


seen = {card: operations(card, blocks) for card, blocks in (("sm_90", "132"), ("sm_100", "148"))}
for card, (hardware, polynomial) in seen.items():
    print(f"{card}: {hardware} exponentials by ex2, {polynomial} by a polynomial")
assert seen == {"sm_90": (130, 0), "sm_100": (225, 32)}
PYTHON
