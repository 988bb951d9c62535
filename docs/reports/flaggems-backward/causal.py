"""FlagGems' attention goes backward as if it were causal, asked for or not.

Needs torch, triton and FlagGems' files (`pip install --no-deps flag-gems==5.0.2`).
Without a GPU Triton interprets the kernel, and stand-ins take the place of FlagGems' runtime, which wants a device.
"""

import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

if torch.cuda.is_available():
    from flag_gems.ops.attention import scaled_dot_product_attention
else:
    os.environ["TRITON_INTERPRET"] = "1"
    import triton

    forward = {"BLOCK_M": 128, "BLOCK_N": 32, "PRE_LOAD_V": True}
    backward = {"BLOCK_M1": 32, "BLOCK_N1": 128, "BLOCK_M2": 128, "BLOCK_N2": 32}
    tuned = {"attention": [SimpleNamespace(kwargs=forward)], "attention_bwd": [SimpleNamespace(kwargs=backward)]}

    def first(configs, **_):
        return triton.heuristics({name: lambda _, value=value: value for name, value in configs[0].kwargs.items()})

    utils = SimpleNamespace(libentry=lambda: lambda function: function, libtuner=first)
    device = SimpleNamespace(device=lambda _: torch.device("cpu"))
    runtime = SimpleNamespace(get_tuned_config=tuned.get, torch_device_fn=device)
    flash = SimpleNamespace(mha_fwd=None, mha_varlan_fwd=None, mha_varlan_fwd_opt=None, keep=lambda *_, **__: True)
    parts = {
        "": SimpleNamespace(runtime=runtime),
        ".config": SimpleNamespace(use_c_extension=False),
        ".runtime": runtime,
    }
    parts |= {".ops.flash_api": flash, ".ops.flash_kernel": flash, ".utils": utils}
    path = Path(importlib.util.find_spec("flag_gems").origin).parent / "ops/attention.py"
    sys.modules |= {f"flag_gems{name}": part for name, part in parts.items()}
    spec = importlib.util.spec_from_file_location("flag_gems_attention", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    scaled_dot_product_attention = module.scaled_dot_product_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
draw = torch.Generator().manual_seed(1)
q, k, v, do = (torch.randint(-2048, 2049, (1, 1, 128, 64), generator=draw) / 1024 for _ in range(4))
q, k, v, do = (x.half().to(DEVICE) for x in (q, k, v, do))


def gradients(attention, *, is_causal):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(attention(*leaves, is_causal=is_causal), leaves, do)


worst = 0.0
for is_causal in (True, False):
    exact = gradients(torch.nn.functional.scaled_dot_product_attention, is_causal=is_causal)
    theirs = gradients(scaled_dot_product_attention, is_causal=is_causal)
    off = [((x - y).abs().max() / y.abs().max()).item() for x, y in zip(theirs, exact, strict=True)]
    worst = max(worst, *off)
    print(f"is_causal={is_causal}: dQ, dK, dV are off by {', '.join(f'{100 * x:.1f} %' for x in off)} of the largest")
sys.exit(worst > 0.01)
