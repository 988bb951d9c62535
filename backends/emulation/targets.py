"""Which tensor core each GPU has for which operands, as MMA-Sim has it (arXiv 2511.10909)."""

from collections.abc import Mapping

from tiebreak.backends.emulation.tensor_cores import Order, TensorCore
from tiebreak.kernels.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, TF32, Format

_E8M13 = Format("E8M13", exponent_bits=8, mantissa_bits=13)

# Exponents of the smallest normal numbers. FNUZ is AMD's fp8 with one more in its bias.
_LEAST_EXPONENTS = {fmt.name: fmt.min_exponent for fmt in (FP16, BF16, TF32, FP8_E4M3, FP8_E5M2)} | {
    "fp8_e4m3fnuz": FP8_E4M3.min_exponent - 1,
    "fp8_e5m2fnuz": FP8_E5M2.min_exponent - 1,
}
OPERANDS = tuple(_LEAST_EXPONENTS)  # names of operand formats that some target multiplies
_FP8 = (FP8_E4M3.name, FP8_E5M2.name)
_FNUZ = ("fp8_e4m3fnuz", "fp8_e5m2fnuz")


def _cores(
    names: tuple[str, ...],
    products: int,
    fraction_bits: int,
    order: Order = Order.TOGETHER,
    result: Format = FP32,
) -> dict[tuple[str, str], TensorCore]:
    """Of these formats, by two of them."""
    return {
        (a, b): TensorCore(
            products,
            fraction_bits,
            (_LEAST_EXPONENTS[a], _LEAST_EXPONENTS[b]),
            order,
            result,
            reads_tf32=a == TF32.name,
        )
        for a in names
        for b in names
    }


def _wide(
    halves: int, tf32: int, fraction_bits: int, order: Order = Order.TOGETHER
) -> dict[tuple[str, str], TensorCore]:
    """Of the formats of 16 bits, each by itself, and of tf32: the products of a step."""
    steps = ((FP16, halves), (BF16, halves), (TF32, tf32))
    return {pair: core for fmt, step in steps for pair, core in _cores((fmt.name,), step, fraction_bits, order).items()}


# A K of 16 in fp16 and bf16, of 8 in tf32 and of 32 in fp8 is two steps on Ampere and Ada, one from Hopper on.
_AMPERE = _wide(8, 4, 24)
_HOPPER = _wide(16, 8, 25)
_BLACKWELL = _HOPPER | _cores(_FP8, 32, 25)

_CORES: Mapping[str, Mapping[tuple[str, str], TensorCore]] = {
    "sm_70": _cores((FP16.name,), 4, 23),  # Volta
    "sm_75": _cores((FP16.name,), 8, 24),  # Turing
    "sm_80": _AMPERE,
    "sm_86": _AMPERE,
    "sm_89": _AMPERE | _cores(_FP8, 16, 13, result=_E8M13),  # Ada
    "sm_90": _HOPPER | _cores(_FP8, 32, 13, result=_E8M13),  # wgmma
    "sm_100": _BLACKWELL,  # tcgen05
    "sm_120": _BLACKWELL,  # mma of the RTX cards
    "gfx942": _wide(8, 4, 24, Order.PRODUCTS_FIRST) | _cores(_FNUZ, 16, 24, Order.EVEN_AND_ODD),  # MFMA of CDNA3
}
TARGETS = tuple(_CORES)  # names of the GPUs whose tensor cores are known


def core_of(target: str, a: str, b: str | None = None) -> TensorCore:
    """Return the tensor core that multiplies two operand formats and adds up in fp32.

    Args:
        target: One of `TARGETS`, as Triton names GPUs.
        a: Name of the first operand's format, one of `OPERANDS`.
        b: The second operand's; the same as the first's, unless both are fp8.

    Returns:
        The core.

    Raises:
        ValueError: The target or a format is unknown, or the target doesn't multiply them.
    """
    formats = (a, a if b is None else b)
    if target not in _CORES:
        raise ValueError(f"no tensor core is known of {target!r}: known are {', '.join(TARGETS)}")
    for name in formats:
        if name not in _LEAST_EXPONENTS:
            raise ValueError(f"no tensor core is known that multiplies {name!r}: known are {', '.join(OPERANDS)}")
    core = _CORES[target].get(formats)
    if core is None:
        pairs = ", ".join(a if a == b else f"{a} x {b}" for a, b in _CORES[target])
        raise ValueError(f"{target} doesn't multiply {' by '.join(formats)}; it does {pairs}")
    return core
