"""Probes of what an NPU may do differently. They run on any arithmetic; CPU and emulation answer too."""

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from tiebreak.backends.emulation.rounding import round_to
from tiebreak.backends.probes import dot, masks
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.formats import BF16, FP32, Formats, ulp
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.plans import Accumulator, Cast, Exponential
from tiebreak.kernels.probe_inputs import tied_p_bar
from tiebreak.kernels.reference import reference

_SIZE = 64  # of the products that are probed
_TERMS = 32  # of the sum whose order is probed
_P_HEADS = 16  # of either parity, with ties of P-bar
_WIDEST = 60  # bits looked for in an accumulator: more than fp64 has


def arithmetic_probes(arithmetic: Arithmetic, device: str) -> Mapping[str, str | float]:
    """What an arithmetic does where Ascend may differ.

    Args:
        arithmetic: of the device.
        device: torch's name of it.

    Returns:
        `fp32_matmul_keeps`: fraction bits of fp32 operands that a product keeps (23; HF32 keeps 11, TF32 10);
        `matmul_accumulator_keeps`: bits below a running sum's leading one that the bf16 product keeps in every order of
        the terms (23: fp32); `matmul_order`: see `order_name`; `cast_subnormals`, `exp_subnormals`: kept or flushed;
        `exp_max_ulps`: largest error of the exponential on [-20, 0] in ulps of fp32.
    """
    quarter = torch.full((1,), BF16.smallest_normal / 4, device=device)
    tiny = arithmetic.exp(torch.full((1,), -90.0, device=device), Exponential())
    return {
        "fp32_matmul_keeps": float(_operand_bits(arithmetic, device)),
        "matmul_accumulator_keeps": float(_accumulator_bits(arithmetic, device)),
        "matmul_order": order_name(subtree_sizes(arithmetic, device)),
        "cast_subnormals": _kept(arithmetic.cast(quarter, Cast(BF16))),
        "exp_subnormals": _kept(tiny),
        "exp_max_ulps": round(_exp_error(arithmetic, device), 2),
    }


def _kept(value: Tensor) -> str:
    return "kept" if value.item() != 0.0 else "flushed"


def _longest(answers: Iterable[bool]) -> int:
    """How many leading answers are yes."""
    count = 0
    for answer in answers:
        if not answer:
            break
        count += 1
    return count


def _operand_bits(arithmetic: Arithmetic, device: str) -> int:
    """Of 1 + 2^-b times 1, from either side."""
    ones = torch.zeros(_SIZE, _SIZE).fill_diagonal_(1.0)

    def keeps(bits: int) -> bool:
        value = 1.0 + 2.0**-bits
        pairs = ((value * ones, ones), (ones, value * ones))
        products = [arithmetic.matmul(a.to(device), b.to(device), Cast(FP32), Accumulator.EXACT) for a, b in pairs]
        return all(product[0, 0].item() == value for product in products)

    return _longest(keeps(bits) for bits in range(1, FP32.mantissa_bits + 1))


def _accumulator_bits(arithmetic: Arithmetic, device: str) -> int:
    """Of 1, 2^-b and -1 in any order."""

    def keeps(bits: int) -> bool:
        small = 2.0**-bits
        rows = torch.tensor([[1.0, small, -1.0], [1.0, -1.0, small], [small, 1.0, -1.0]])
        return bool((dot(arithmetic, rows, device, BF16) == small).all())

    return _longest(keeps(bits) for bits in range(1, _WIDEST + 1))


def subtree_sizes(arithmetic: Arithmetic, device: str) -> tuple[int, ...]:
    """In which order the bf16 product adds up 32 terms.

    Returns:
        For j = 1 to 31: terms of the smallest partial sum that holds terms 0 and j; 2 for all in an exact sum.
    """
    left = dot(arithmetic, masks(_TERMS), device, BF16)
    return tuple(_TERMS - round(number) for number in left.tolist())


def order_name(sizes: tuple[int, ...]) -> str:
    """`exact`, `sequential`, `pairwise` (a balanced tree), or the sizes themselves."""
    places = range(1, len(sizes) + 1)
    orders = {
        "exact": tuple(2 for _ in places),
        "sequential": tuple(place + 1 for place in places),
        "pairwise": tuple(2 ** place.bit_length() for place in places),
    }
    names = [name for name, order in orders.items() if sizes == order]
    return names[0] if names else "partial sums of " + " ".join(map(str, sizes))


def _exp_error(arithmetic: Arithmetic, device: str) -> float:
    x = torch.linspace(-20.0, 0.0, 4096)
    exact = torch.exp(x.double())
    computed = arithmetic.exp(x.to(device), Exponential()).cpu().double()
    return ((computed - exact).abs() / ulp(exact, FP32)).max().item()


def p_cast(run: Callable[[AttentionInputs], Tensor]) -> str:
    """How a kernel casts P-bar to bf16 where it lies halfway between two neighbours.

    On random scores that happens once in 2^16, and no bias of O shows it. Here every P-bar but the maximum's
    is a tie, in half of the heads above a neighbour with an even last bit, in the other half above an odd one.

    Args:
        run: the kernel, from inputs on the host to O on the host.

    Returns:
        `even`, `away` or `zero`; `not seen` where its exponential misses the ties; `none known` else.
    """
    odd = torch.tensor([[False], [True]]).expand(2, _P_HEADS)
    inputs = tied_p_bar(np.random.Generator(np.random.Philox(1)), odd)
    error = (run(inputs).double() - reference(inputs).o) / ulp(reference(inputs).o, BF16)
    signs = _sign(error[0].mean().item()), _sign(error[1].mean().item())
    names = {(-1, 1): "even", (1, 1): "away", (-1, -1): "zero", (0, 0): "not seen"}
    return names.get(signs, "none known")


def _sign(bias: float) -> int:
    """Of a mean error beyond what chance makes of 1,024 of them: 0.29 / 32 ulp, five times over."""
    return 0 if abs(bias) < 0.05 else int(math.copysign(1, bias))


def softmax_errors(run: Callable[[AttentionInputs], tuple[Tensor, Tensor]]) -> Mapping[str, float]:
    """How far the row statistics that a kernel returns are from the reference, on random scores.

    Args:
        run: the kernel, from inputs on the host to row maxima and row sums there, (batch, heads, N, copies).

    Returns:
        `softmax_max_error`: largest |error| of the maximum of the scores; `softmax_sum_error`: largest relative error
        of the row sum of exp(S - maximum).
    """
    rng = np.random.Generator(np.random.Philox(2))
    q, k, v = (round_to(torch.from_numpy(rng.standard_normal((1, 4, 48, 64), np.float32)), BF16) for _ in "qkv")
    inputs = AttentionInputs(q, k, v, torch.ones_like(q), Formats.of(BF16))
    s = reference(inputs).s
    row_max = s.amax(-1, keepdim=True)
    row_sum = torch.exp(s - row_max).sum(-1, keepdim=True)
    kernel_max, kernel_sum = run(inputs)
    return {
        "softmax_max_error": (kernel_max.double() - row_max).abs().max().item(),
        "softmax_sum_error": ((kernel_sum.double() - row_sum).abs() / row_sum).max().item(),
    }
