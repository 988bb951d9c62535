"""gpu-mode (reference-kernels, commit f83cb92): the `check_implementation` of an attention problem's reference.py.

Data are (q, k, v), (batch, heads, N, d). The problem's own check comes first: allclose, of MLA at 0.1, where
5 % of the elements may be off (`problems/amd_202602/utils.py:146`, `mixed-mla/reference.py:372`).
"""

import torch
from utils import make_match_reference

import tiebreak
from tiebreak.reports.errors import UsageError


def generate_input(batch: int, heads: int, tokens: int, seed: int):
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (batch, heads, tokens, 64)
    return tuple(torch.randn(shape, device="cuda", generator=generator).bfloat16() for _ in range(3))


def ref_kernel(data):
    return torch.nn.functional.scaled_dot_product_attention(*data)


match = make_match_reference(ref_kernel, rtol=2e-2, atol=8e-3)


def check_implementation(data, output) -> tuple[bool, str]:
    good, reason = match(data, output)
    if not good:
        return good, reason
    from submission import custom_kernel  # as eval.py imports it

    attention, device = (lambda q, k, v: custom_kernel((q, k, v))), data[0].device
    try:
        verdict = tiebreak.check(attention, device=device, budget="60s", in_process=True)
    except UsageError as error:
        return False, str(error)
    return verdict.ok, str(verdict)
