"""Operands in 8 bits with scale factors: which numbers share one, and how a tensor is taken apart into both."""

import enum
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from tiebreak.kernels.formats import INT8, Format, Rounding, hashed_once, parse_format

_MODES = {rounding.value: rounding for rounding in Rounding if rounding is not Rounding.STOCHASTIC}
_TAKES_SCALE = "+scale"
_LARGEST_INT8, _TOP_INT8 = 127.0 / 64.0, 0  # -128 is left out, as by SageAttention; 127/64 lies in 1's binade
_E8M0 = (-127.0, 127.0)  # exponents of the powers of two that microscaling has for scales


class Scaling(enum.Enum):
    """The numbers of q, K, V or P-bar that share a scale factor."""

    TENSOR = "tensor"  # all
    HEAD = "head"  # those of one batch and head
    BLOCK = "block"  # those of so many rows (queries or keys) of a head
    MICRO = "micro"  # so many along the product's inner dimension; the scale is a power of two (OCP MX 1.0, 6.3)


SIZED = (Scaling.BLOCK, Scaling.MICRO)  # what takes a size


@hashed_once
@dataclass(frozen=True)
class Quantization:
    """An operand as numbers of a narrow format times scale factors. The largest number of a scale fills the format.

    Raises ValueError: a size where there can be none, or none where there must be one.
    """

    fmt: Format  # what the numbers are held in; what lies beyond it becomes its largest value
    scaling: Scaling  # which numbers share a scale
    size: int = 0  # of a block, in rows, or of a microscaled group, in numbers
    rounding: Rounding = Rounding.RNE  # of the numbers
    takes_scale: bool = False  # q alone: whether it is multiplied by alpha first, in base two by log2 e too

    def __post_init__(self) -> None:
        if (self.scaling in SIZED) != (self.size > 0):
            raise ValueError(f"scales a {self.scaling.value} {'need' if self.scaling in SIZED else 'take no'} size")

    def __str__(self) -> str:
        """Return the quantization as declarations have it: `fp8_e4m3/head`, `int8/block128:rtna+scale`."""
        mode = "" if self.rounding is Rounding.RNE else f":{self.rounding.value}"
        size, scaled = self.size or "", _TAKES_SCALE if self.takes_scale else ""
        return f"{self.fmt.name}/{self.scaling.value}{size}{mode}{scaled}"

    @property
    def largest(self) -> float:
        """Largest magnitude of a number before its scale."""
        return _LARGEST_INT8 if self.fmt == INT8 else self.fmt.largest

    @property
    def top_exponent(self) -> int:
        """Exponent of that magnitude, from which a power-of-two scale follows."""
        return _TOP_INT8 if self.fmt == INT8 else self.fmt.max_exponent

    @property
    def relative_error(self) -> float:
        """Largest relative error of a number that is no subnormal of the format."""
        # A power of two for a scale leaves numbers of up to twice the top binade: what is beyond the largest is cut.
        beyond = 1.0 - self.largest / 2.0 ** (self.top_exponent + 1) if self.scaling is Scaling.MICRO else 0.0
        return max(self.fmt.unit_roundoff, beyond)

    def scales(self, x: Tensor, inner: int) -> Tensor:
        """Return the scale of every number of x, fp32, broadcastable; `inner`: the dimension that products sum over."""
        match self.scaling:
            case Scaling.TENSOR:
                most = x.abs().amax().expand(1, 1, 1, 1)
            case Scaling.HEAD:
                most = x.abs().amax((-2, -1), keepdim=True)
            case Scaling.BLOCK:
                most = _shared(x.abs().amax(-1, keepdim=True), self.size, -2)
            case Scaling.MICRO:
                most = _shared(x.abs(), self.size, inner)
        if self.scaling is Scaling.MICRO:
            exponent = torch.frexp(most).exponent - 1 - self.top_exponent
            scale = torch.exp2(exponent.clamp(*_E8M0).float())
        else:
            scale = most / self.largest
        return torch.where(most > 0, scale, torch.ones_like(scale))


def _shared(x: Tensor, size: int, dim: int) -> Tensor:
    """Return the largest of every `size` numbers along a dimension, repeated for each of them."""
    parts = [part.amax(dim, keepdim=True).expand_as(part) for part in torch.split(x, size, dim)]
    return torch.cat(parts, dim)


_TEXT = re.compile(
    rf"(?P<fmt>\w+)/(?P<scaling>{'|'.join(scaling.value for scaling in Scaling)})(?P<size>\d*)"
    rf"(:(?P<mode>{'|'.join(_MODES)}))?(?P<scaled>\+scale)?"
)


def parse_quantization(text: str) -> Quantization:
    """Return the quantization that a text names, as `str` gives it; ValueError, one line: it names none."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r}: expected FORMAT/SCALES such as fp8_e4m3/head, int8/block64:rtna or fp8_e4m3/micro32;"
            f" scales go by {', '.join(scaling.value for scaling in Scaling)}"
        )
    fmt = INT8 if match["fmt"] == INT8.name else parse_format(match["fmt"])
    rounding, scaled = _MODES[match["mode"] or Rounding.RNE.value], match["scaled"] is not None
    return Quantization(fmt, Scaling(match["scaling"]), int(match["size"] or 0), rounding, takes_scale=scaled)
