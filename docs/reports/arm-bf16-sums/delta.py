"""What eager attention on Arm makes of delta, the term by which training feels a bias of O. Needs tiebreak."""

import torch
from torch import Tensor

from tiebreak.cases.scripted import SCRIPTED
from tiebreak.cases.verdicts import interval
from tiebreak.kernels.formats import BF16


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As frameworks write it."""
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1, dtype=torch.float32).to(q.dtype) @ v


def errors(name: str) -> None:
    """Print what delta is off by, as a share of its mean size: taken from O, and in dQ (arXiv 2510.04212, eq. 1)."""
    (case,) = (case for case in SCRIPTED if case.name == "ties_across_long_blocks")
    inputs = case.make(1, 0, 32, BF16)
    q, k, v, do = (x.double() for x in (inputs.q, inputs.k, inputs.v, inputs.do))
    p = torch.softmax(q @ k.mT * inputs.scale, -1)
    delta, pk = (do * (p @ v)).sum(-1, keepdim=True), p @ k * inputs.scale
    dq = p * (do @ v.mT - delta) @ k * inputs.scale
    low = [x.bfloat16().requires_grad_() for x in (q, k, v)]
    o = eager(*low)
    o.backward(do.bfloat16())
    assert low[0].grad is not None
    of_o = (do * (o.double() - p @ v)).sum(-1, keepdim=True)
    in_dq = ((dq - low[0].grad.double()) * pk).sum(-1, keepdim=True) / pk.square().sum(-1, keepdim=True)
    for where, error in (("from O", of_o), ("in dQ", in_dq)):
        found = interval((error / delta.abs().mean()).flatten(2).mean(-1).flatten())
        print(f"{name:12} {where:7} {found.mean:+.1e} +- {found.half_width:.1e}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(torch.__version__)
    errors("as it is")
    with torch.backends.mkldnn.flags(enabled=False):
        errors("mkldnn off")
