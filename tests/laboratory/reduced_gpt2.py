"""The suite's GPT-2 with fewer bits: its linear layers masked, its attention kernel alike or in a format of its own."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.cases.gpt2.attention import HeadKernel
from tiebreak.cases.gpt2.model import GPT2
from tiebreak.kernels.formats import FP32, Formats, Rounding
from tiebreak.kernels.kernel import Declaration
from tiebreak.kernels.plans import Cast, RoundingPlan
from tiebreak.laboratory.reduced import Otherwise, Reduction, parse_reduction, reduce_precision, reduction_at

SAME = "same"  # of attention: in the products' format
_UNMASKED = Reduction(FP32)


def add_attention(group: argparse._ActionsContainer) -> None:
    """The option that says what attention rounds to."""
    group.add_argument(
        "--attention",
        default="E8M7",
        metavar="FORMAT",
        help="what attention rounds to, or same: as the products; default: E8M7, bf16, as in arXiv 2405.18710",
    )


def parse_attention(text: str) -> Reduction | None:
    """The mask of attention alone, with the range of its format; None: as the products.

    Raises:
        ValueError: no such format, or a range that no plan has; one line.
    """
    reduction = None if text == SAME else parse_reduction(text)
    if reduction is not None:
        _refuse_range(reduction)
    return reduction


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
        otherwise: as `reduce_precision` takes it, such as `{"head": None, "blocks.[01]": Reduction(TF32)}`. A block's
            attention goes by what is said of the block.
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
    _refuse_range(reduction)
    plan = _rounding(declared.plan, reduction.mode).in_formats(Formats.of(reduction.fmt))
    return HeadKernel(replace(declared, plan=plan), Cast(reduction.fmt, reduction.mode))


def _refuse_range(reduction: Reduction) -> None:
    if reduction.clamps:
        raise ValueError(f"{reduction.name}: attention has no range of its own; name a format of fewer exponent bits")


def _rounding(plan: RoundingPlan, mode: Rounding) -> RoundingPlan:
    """The plan with what it rounds to even to the call's formats rounded in this mode."""
    changed = {
        name: replace(cast, rounding=mode)
        for name, cast in plan.casts()
        if cast.follows is not None and cast.rounding is Rounding.TO_EVEN
    }
    return replace(plan, **changed)  # type: ignore[arg-type]
