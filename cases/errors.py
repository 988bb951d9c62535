"""Errors of a kernel's output against the fp64 reference: signed errors in ulps, never absolute tolerances."""

import math
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tiebreak.cases.verdicts import ROUNDED_ONCE, Interval, interval
from tiebreak.kernels.formats import Format, ulp
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.reference import Reference


def signed_error_ulps(out: Tensor, ref: Tensor, fmt: Format) -> Tensor:
    """Return sign(ref) * (out - ref) / ulp(ref) in fp64: positive is away from zero.

    Args:
        out: a kernel's output.
        ref: the reference, fp64, same shape.
        fmt: the output's format, whose ulp at `ref` is the unit; NaN where `ref` is 0 or either is not finite.
    """
    return in_units(out.double() - ref, units_of(ref, fmt))


def units_of(ref: Tensor, fmt: Format) -> Tensor:
    """Return the exact factor from errors to ulps: the reference's sign over its ulp; NaN where it has none."""
    return torch.where(ref == 0, torch.nan, torch.sign(ref) / ulp(ref, fmt))


def in_units(difference: Tensor, units: Tensor) -> Tensor:
    """Return differences from the reference in its units (`units_of`), NaN where one is not finite."""
    errors = difference * units
    if math.isfinite(errors.sum().item()):  # as almost always, and cheap to ask
        return errors
    return errors.nan_to_num_(nan=torch.nan, posinf=torch.nan, neginf=torch.nan)


_LARGEST = frozenset({"max_ulps", "error_over_bound", "outside_values"})  # of `Errors`: others are sums, or of heads


@dataclass(frozen=True)
class Errors:
    """The error measures of one or more batches of heads. The samples are means over rows that share K and V."""

    head_bias: Tensor  # mean signed error in ulps, (batch * key heads,)
    head_square: Tensor  # mean squared error in ulps^2, (batch * key heads,)
    head_size_square: Tensor  # the same in ulps of the mean of |V|, so that no element counts by how much it cancelled
    head_rounded_once: Tensor  # what head_size_square is of an O that is rounded to nearest once, (batch * key heads,)
    head_coherence: Tensor  # row coherence less what independent errors give, in ulps, (batch * key heads,)
    head_delta: Tensor  # mean of delta_lp - delta_hp, (batch * key heads,)
    head_delta_size: Tensor  # mean |delta_hp|, (batch * key heads,)
    max_ulps: float  # largest |error| in ulps; 0 where nothing could be compared
    error_over_bound: float  # largest |error| as a share of the plan's rounding-error bound; NaN: O has no number
    output_size: float  # sum of |out| where both are finite
    reference_size: float  # sum of |ref| likewise
    left_out: int  # elements with ref == 0
    nonfinite: int  # elements that are NaN or Inf where the reference is finite
    missed: int  # elements that are finite where the reference is not
    elements: int  # all elements
    outside_values: float = 0.0  # largest distance of O from the range of V, likewise of what rounding allows
    #: head_size_square of each row, (batch * heads * rows,), of a case that has all its heads in; else of none.
    row_size_square: Tensor = field(default_factory=lambda: torch.empty(0))

    @cached_property
    def bias(self) -> Interval:
        """The mean signed error in ulps."""
        return interval(_finite(self.head_bias))

    @cached_property
    def coherence_excess(self) -> Interval:
        """Row coherence minus its value if the errors of a row, at the same size, were independent."""
        return interval(_finite(self.head_coherence))

    @property
    def rms_ulps(self) -> float:
        """The root mean square error in ulps."""
        return _finite(self.head_square).mean().sqrt().item()

    @cached_property
    def delta_bias(self) -> Interval:
        """The mean of delta_lp - delta_hp, relative to mean |delta_hp|."""
        finite = torch.isfinite(self.head_delta)
        raw, size = interval(self.head_delta[finite]), self.head_delta_size[finite].mean().item()
        return Interval(raw.mean / size, raw.half_width / size) if size else Interval(torch.nan, torch.inf)

    @property
    def gain(self) -> float:
        """The ratio sum |out| / sum |ref|: below 1 the output shrinks."""
        return self.output_size / self.reference_size if self.reference_size else torch.nan


def _finite(x: Tensor) -> Tensor:
    return x[torch.isfinite(x)]


def coherence(error: Tensor) -> Tensor:
    """Return the absolute mean signed error of every row: (..., d) -> (...); NaN is left out."""
    return _means(error).abs()


def independent_coherence(error: Tensor) -> Tensor:
    """Return the mean coherence if the errors of a row, at the same size, were independent.

    The mean of n independent errors is about normal, of standard deviation rms / sqrt(n), and the mean of the absolute
    value of a normal number is sqrt(2/pi) of its standard deviation.
    """
    return _independent(_means(error.square()), (~error.isnan()).sum(-1))


def _independent(square: Tensor, counted: Tensor) -> Tensor:
    return math.sqrt(2 / math.pi) * (square / counted).sqrt()


def by_key_head(x: Tensor, groups: int) -> Tensor:
    """Return means over all that shares one key head, without NaN: (batch, heads, ...) -> (batch * key heads,)."""
    batch, heads = x.shape[:2]
    return _means(x.reshape(batch * heads // groups, -1))


def _means(rows: Tensor) -> Tensor:
    means = rows.mean(-1)
    return rows.nanmean(-1) if means.isnan().any() else means  # the same to the bit; a mean takes a fifth of the time


def measure(
    output: Tensor,
    delta: Tensor | None,
    inputs: AttentionInputs,
    ref: Reference,
    bound: Tensor,
    units: Tensor | None = None,
    size_units: Tensor | None = None,
) -> Errors:
    """Measure one batch.

    Args:
        output: O as the kernel returned it, on the host, (batch, heads, queries, d).
        delta: the delta that its backward pass used, (batch, heads, queries, 1); None: rowsum(dO * O) of that output.
        inputs, ref: what it was given, and the fp64 reference of it.
        bound: rounding-error bound of every element of O (`tiebreak.cases.bounds`).
        units: of the reference, if at hand (`units_of`).
        size_units: of the mean of |V|, where V has both signs.
    """
    wide = output.double()
    difference = wide - ref.o
    error = in_units(difference, units_of(ref.o, inputs.formats.output) if units is None else units)
    sizes = [wide, ref.o, difference.abs().div_(bound)]
    if output.is_contiguous() and math.isfinite(error.sum().item()):  # nothing is left out, as almost always
        finite = finite_out = torch.ones((), dtype=torch.bool)
        counted = error.new_full(error.shape[:-1], error.shape[-1])  # of every row, as the two sums
    else:
        finite, finite_out = torch.isfinite(ref.o), torch.isfinite(output)
        counted = (~error.isnan()).sum(-1).double()
        error.nan_to_num_(nan=0.0)
        sizes = [size.where(finite & finite_out, 0.0) for size in sizes]
    total, square = error.sum(-1), torch.linalg.vector_norm(error, dim=-1).square()
    excess = (total / counted).abs() - _independent(square / counted, counted)
    if delta is None:
        delta = (wide * inputs.do).sum(-1, keepdim=True)
    elements = by_key_head(counted, inputs.groups)
    head_square = by_key_head(square, inputs.groups) / elements
    over_bound = sizes[2].nan_to_num_(nan=0.0).max().item()
    return Errors(
        head_bias=by_key_head(total, inputs.groups) / elements,
        head_square=head_square,
        head_size_square=head_square
        if size_units is None
        else by_key_head(in_units(difference, size_units).square(), inputs.groups),
        head_rounded_once=ROUNDED_ONCE
        * (
            torch.ones_like(head_square)
            if size_units is None
            else by_key_head(in_units(ulp(ref.o, inputs.formats.output), size_units).square(), inputs.groups)
        ),
        head_coherence=by_key_head(excess, inputs.groups),
        head_delta=by_key_head(delta.double() - ref.delta, inputs.groups),
        head_delta_size=by_key_head(ref.delta.abs(), inputs.groups),
        max_ulps=max(abs(end.item()) for end in error.aminmax()),
        error_over_bound=math.nan if has_no_number(output, ref) else over_bound,
        output_size=sizes[0].abs().sum().item(),
        reference_size=sizes[1].abs().sum().item(),
        left_out=ref.o.numel() - int(ref.o.count_nonzero()),
        nonfinite=int((finite & ~finite_out).count_nonzero()),
        missed=int((~finite & finite_out).count_nonzero()),
        elements=output.numel(),
    )


def has_no_number(output: Tensor, ref: Reference) -> bool:
    """Return whether all of O is NaN or Inf though the reference is not: its largest error is that of no element."""
    some = output[:1, :1]  # mostly a number: to ask it is cheap
    return not (torch.isfinite(some).any() or torch.isfinite(output).any()) and bool(torch.isfinite(ref.o).any())


def _largest(numbers: list[float]) -> float:
    """Return the largest; NaN where one is."""
    return math.nan if any(map(math.isnan, numbers)) else max(numbers)


def merge(batches: list[Errors]) -> Errors:
    """Return the measures of several batches as one."""

    merged: dict[str, Any] = {}
    for each in fields(Errors):
        values = [getattr(batch, each.name) for batch in batches]
        how = torch.cat if each.type is Tensor else _largest if each.name in _LARGEST else sum
        merged[each.name] = how(values)
    return Errors(**merged)


def difference(ours: Errors, theirs: Errors) -> Interval:
    """Return the bias of one output minus that of another on the same heads, paired head by head."""
    return interval(_finite(ours.head_bias - theirs.head_bias))
