"""The suite's GPT-2 with fewer bits: its linear layers masked, its attention kernel alike or in a format of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from tiebreak.backends.backend import EMULATION
from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.cases.gpt2.attention import HeadKernel
from tiebreak.cases.gpt2.model import GPT2, Configuration, everywhere
from tiebreak.kernels.formats import FP32, Formats, Rounding
from tiebreak.kernels.kernel import Declaration
from tiebreak.kernels.plans import Cast
from tiebreak.laboratory.reduced import Otherwise, Reduction, parse_reduction, reduce_precision, reduction_at

SAME = "same"  # of attention: in the products' format
NO_RANGE = "{}: attention has no range of its own; name a format of fewer exponent bits"
_UNMASKED = Reduction(FP32)


def parse_attention(text: str) -> Reduction | None:
    """The mask of attention alone, with the range of its format; None: as the products.

    Raises:
        ValueError: no such format, or a range that no plan has; one line.
    """
    if text == SAME:
        return None
    reduction = parse_reduction(text)
    if reduction.clamps:
        raise ValueError(NO_RANGE.format(reduction.name))
    return reduction


def emulated_gpt2(kernel: str, sizes: Configuration, seed: int) -> GPT2:
    """Return a model on the emulation's arithmetic, its attention a declared kernel.

    Raises:
        ValueError: no such kernel.
    """
    declared = EMULATION.kernel(kernel).declaration
    assert declared is not None  # as all of the emulation's are
    return GPT2(sizes, everywhere(HeadKernel(declared), sizes), EMULATION.arithmetic, seed)


@contextmanager
def reduced_gpt2(
    model: GPT2, reduction: Reduction, otherwise: Otherwise | None = None, attention: Reduction | None = None
) -> Iterator[GPT2]:
    """Within, the model computes with fewer bits, forward and backward; its weights stay as they are.

    Linear layers go by `reduce_precision`. A head's kernel rounds where its plan says, to the reduction's format in the
    reduction's mode, wherever the plan follows the format of a call; q, k and v are masked as its inputs.

    Args:
        model: on the emulation's arithmetic, its kernels declared.
        reduction: the mask; its range is its format's.
        otherwise: as `reduce_precision` takes it. A block's attention goes by what is said of the block.
        attention: what attention alone rounds to, in every block; None: it goes by the masks of its block. Lee et al.
            (arXiv 2405.18710) leave attention unmasked, in bf16.

    Raises:
        ValueError: another arithmetic, an undeclared kernel, a range that no plan has, or a glob that matches nothing.
    """
    if not isinstance(model.arithmetic, EmulatedArithmetic):
        raise ValueError("attention in few bits runs on the emulation alone: build the model with its arithmetic")
    former, rest = model.kernels, otherwise or {}
    by_layer = [
        attention or reduction_at(f"blocks.{layer}", reduction, rest) or _UNMASKED for layer in range(len(former))
    ]
    model.kernels = tuple(
        tuple(_reduced(head, each) for head in layer) for layer, each in zip(former, by_layer, strict=True)
    )
    try:
        with reduce_precision(reduction, model, rest):
            yield model
    finally:
        model.kernels = former


def _reduced(head: HeadKernel, reduction: Reduction) -> HeadKernel:
    declared = head.implementation
    if not isinstance(declared, Declaration):
        raise ValueError(
            f"{declared.name} rounds as its device does: only a declared kernel can be put in other formats"
        )
    if reduction.clamps:
        raise ValueError(NO_RANGE.format(reduction.name))
    casts = {
        name: replace(cast, rounding=reduction.mode)  # to even alone: a stochastic cast stays one
        for name, cast in declared.plan.casts()
        if cast.follows is not None and cast.rounding is Rounding.TO_EVEN
    }
    plan = replace(declared.plan, **casts).in_formats(Formats.of(reduction.fmt))  # type: ignore[arg-type]
    return HeadKernel(replace(declared, plan=plan), Cast(reduction.fmt, reduction.mode))
