"""Asks if keys of FlashAttention-4's cubic exponential are biased otherwise: python -m tiebreak.studies.polynomial.

On sm_100 its forward pass (4.0.0b36, d = 64, executed as PTX) computes 16 of 128 keys' exponentials so. Their P is seen
with an identity as V; the backward pass has gradients of V.
"""

from typing import Any

import torch
from torch import Tensor

from tiebreak.backends.ptx import CARDS
from tiebreak.backends.ptx.session import executing
from tiebreak.cases.errors import signed_error_ulps
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.cases.verdicts import interval
from tiebreak.kernels.formats import BF16

HEADS, SIZE, CARD = 64, 64, "sm_100"
KEYS = [first + key for first in (44, 60, 76, 92) for key in range(4)]  # of the polynomial
OTHERS = sorted({*range(128)} - {*KEYS})


def made(q: Tensor, k: Tensor, v: Tensor, d_o: Tensor) -> dict[str, Tensor]:
    """Return the kernel's P and dV, (heads, keys, ...)."""
    from flash_attn.cute import flash_attn_func

    def attention(values: Tensor) -> Tensor:
        given = (x.bfloat16().transpose(0, 1)[None].contiguous() for x in (q, k, values))
        made: Any = flash_attn_func(*given, softmax_scale=SIZE**-0.5, deterministic=True)
        o: Tensor = made[0] if isinstance(made, tuple) else made
        return o[0].transpose(0, 1)

    own = v.requires_grad_()
    with executing(CARD, CARDS[CARD]):
        torch.autograd.backward(attention(own), d_o.bfloat16())
        units = torch.eye(128).expand(HEADS, 128, 128).chunk(2, -1)
        p = torch.cat([attention(values) for values in units], -1)
    assert own.grad is not None
    return {"P": p.mT.detach(), "dV": own.grad}


def table() -> str:
    """Return bias in ulps with the polynomial and without it, and equal bits of both, of its keys and of others."""
    from flash_attn.cute import flash_fwd_sm100, interface

    inputs = {case.name: case for case in SCRIPTED}["random"].make(1, 0, HEADS, BF16)
    q, k, v, d_o = (x.flatten(0, 1) for x in (inputs.q, inputs.k, inputs.v, inputs.do))
    with_it = made(q, k, v.clone(), d_o)
    flash_fwd_sm100._TUNING_CONFIG[False, False, SIZE, False] = {"ex2_emu_freq": 0}
    interface._flash_attn_fwd.compile_cache.clear()
    without = made(q, k, v.clone(), d_o)
    p = (q.double() @ k.double().mT * SIZE**-0.5).softmax(-1).mT
    exact = {"P": p, "dV": p @ d_o.double()}
    lines = ["| | its keys | other keys |", "|---|---:|---:|"]
    for name, ref in exact.items():
        for what, of in ((name, with_it), (f"{name} without it", without)):
            errors = signed_error_ulps(of[name], ref, BF16)
            biases = [interval(errors[:, keys].flatten(1).nanmean(1)) for keys in (KEYS, OTHERS)]
            lines.append(f"| {what} | {' | '.join(f'{x.mean:+.4f}±{x.half_width:.4f}' for x in biases)} |")
        same = (with_it[name] == without[name]).double()
        lines.append(f"| {name}, equal bits | {same[:, KEYS].mean():.2%} | {same[:, OTHERS].mean():.2%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
