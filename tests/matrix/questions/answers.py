"""The answer of a call, O and the gradients that it gave; the exact one, in fp64; and the part that is compared."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tiebreak.cases.gradients import row_units
from tiebreak.kernels.formats import ulp
from tiebreak.kernels.inputs import AttentionInputs, sum_groups
from tiebreak.kernels.reference import reference, reference_gradients

O, DQ, DK, DV = "O", "dQ", "dK", "dV"
PARTS = (O, DQ, DK, DV)
OF_QUERIES = (O, DQ)  # parts that have a row for every query
#: By part, (batch, heads, N, d) in fp32 on the host, as far as a kernel gives them.
Answers = Mapping[str, Tensor]


def joined(answers: Iterable[Answers], dimension: int, parts: Iterable[str] = PARTS) -> Answers:
    """Return the answer of a call that was cut along a dimension, in the parts that its pieces have a share of."""
    pieces = list(answers)
    return {part: torch.cat([each[part] for each in pieces], dimension) for part in parts if part in pieces[0]}


@dataclass(frozen=True)
class Cut:
    """What of an answer is compared; the same cut of an answer that has no more is all of it."""

    batch: slice | None = None  # None: all
    rows: slice | None = None  # of O and dQ
    keys: slice | None = None  # of dK and dV

    def of(self, part: str, x: Tensor) -> Tensor:
        rows, every = self.rows if part in OF_QUERIES else self.keys, slice(None)
        return x[self.batch or every, :, rows or every]

    def pairs(self, plain: Answers, other: Answers) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield each part that two answers have, and what is compared of it."""
        for part in plain:
            if part in other:
                yield part, self.of(part, plain[part]), self.of(part, other[part])


WHOLE = Cut()
_reference = lru_cache(maxsize=2)(reference)  # parts of one answer, one after the other


@lru_cache(maxsize=2)
def _gradients(inputs: AttentionInputs) -> tuple[Tensor, ...]:
    return reference_gradients(inputs, _reference(inputs))


def exact(inputs: AttentionInputs, part: str) -> Tensor:
    """Return the exact O, dQ, dK or dV, fp64; computed once for all comparisons with a call."""
    return _reference(inputs).o if part == O else _gradients(inputs)[PARTS.index(part) - 1]


@lru_cache(maxsize=len(PARTS))
def units(inputs: AttentionInputs, part: str) -> Tensor:
    """Return what an error is to be multiplied by to be in ulps, + away from zero; NaN or 0 where the answer is 0.

    An ulp of O is its own. The elements of a gradient cancel: theirs are of what they are the sum of, added up without
    signs, dP and delta apart, since these cancel too.
    """
    ref, fmt, truth = _reference(inputs), inputs.formats.output, exact(inputs, part)
    if part == O:
        return torch.where(truth == 0, torch.nan, truth.sign() / ulp(truth, fmt))
    do = inputs.do.double()
    if part == DV:
        terms = sum_groups(ref.p.transpose(-1, -2) @ do.abs(), inputs.groups)
    else:
        k, v = inputs.expanded_k().double(), inputs.expanded_v().double()
        ds = inputs.scale * ref.p * ((do @ v.transpose(-1, -2)).abs() + ref.delta.abs())
        of_rows = ds @ k.abs() if part == DQ else ds.transpose(-1, -2) @ inputs.q.double().abs()
        terms = of_rows if part == DQ else sum_groups(of_rows, inputs.groups)
    return truth.sign() / row_units(terms[..., None], fmt)[..., 0]
