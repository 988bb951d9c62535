"""`python -m tiebreak.studies.bits`: Measure the bias against the number of bits, emulated.

The scripted cases with P-bar, V and O in fewer and in more bits, into docs/bits.csv and docs/figures/bits.svg. q, k and
dO are in fp32, so the scores are those of the case whatever the format. V is drawn in fp32 and rounded to the format.
P-bar, O and, where the plan has it narrow, O-bar are in the format.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from tiebreak.backends.backend import EMULATION
from tiebreak.backends.emulation.rounding import round_to
from tiebreak.cases.errors import measure
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.cases.verdicts import judge
from tiebreak.kernels.formats import FP32, Format, Formats, parse_format
from tiebreak.kernels.reference import reference
from tiebreak.kernels.shift_rules import SHIFT_RULES
from tiebreak.matrix.workbench import SharedBatch
from tiebreak.reports.page.svg import Figure, Series, as_file, draw
from tiebreak.reports.records.record import NONFINITE
from tiebreak.studies.pages import DOCS, read_rows, write_rows
from tiebreak.studies.study import Study

CSV, PICTURE = DOCS / "bits.csv", DOCS / "figures" / "bits.svg"
MANTISSAS = tuple(f"E8M{bits}" for bits in range(10, 1, -1))  # E8M7 is bf16, E8M10 tf32
FORMATS = (*MANTISSAS, "fp16", "fp8_e4m3", "fp8_e5m2")
CASES = ("tied_maxima[k=2]", "sink_tie", "no_tail", "single_maximum", "single_maximum_sink", "repeated_zero")
# `lazy_4` lags as `lazy` does, by half as much: nothing lags in these cases.
RULES = tuple("flash" if rule == "safe" else rule for rule in SHIFT_RULES if rule != "lazy_4")
KERNELS = (*(f"{rule}@paper" for rule in RULES), "flash@fused", "stabilized@fused", "fair", "standard")
DRAWN = ("flash@paper", "stabilized@paper", "flash@fused", "fair")
SEED, HEADS = 1, 256


@dataclass(frozen=True)
class Row:
    """What one kernel made of one case in one format."""

    format: str  # of V, P-bar and O
    case: str
    kernel: str
    bias: float  # of O, in ulps of the format; NaN where O is not finite
    half_width: float  # of its 99.9 % interval
    verdict: str
    gain: float  # sum |O| / sum |reference|
    delta_bias: float  # relative to mean |delta|
    delta_half_width: float
    coherence_excess: float  # of rows, in ulps, beyond what independent errors give


@dataclass(frozen=True)
class Task:
    """One case in one format, by every kernel."""

    format: str
    case: str


def run(task: Task) -> list[Row]:
    """Measure every kernel."""
    return [*rows(task, KERNELS)]


STUDY = Study("bits", run, seconds=30.0)


def rows(task: Task, kernels: Sequence[str]) -> Iterator[Row]:
    """Yield a row for each kernel."""
    batch = _batch(task.case, parse_format(task.format))
    no_bound = torch.full((), torch.inf, dtype=torch.float64)  # none is asked for here
    for kernel in kernels:
        output = EMULATION.run(EMULATION.kernel(kernel), batch.inputs, gradients=False)
        errors = measure(output.o, None, batch.inputs, batch.ref, no_bound, batch.units)
        verdict = NONFINITE if errors.nonfinite else judge(errors.bias).value
        numbers = (
            *(math.nan if errors.nonfinite else errors.bias.mean, errors.bias.half_width, errors.gain),
            *(errors.delta_bias.mean, errors.delta_bias.half_width, errors.coherence_excess.mean),
        )
        bias, half_width, *others = (float(f"{number:.5g}") for number in numbers)
        yield Row(task.format, task.case, kernel, bias, half_width, verdict, *others)


def _batch(name: str, fmt: Format) -> SharedBatch:
    """Return a case's first batch with V, P-bar and O in a format."""
    made = next(case for case in SCRIPTED if case.name == name).make(SEED, 0, HEADS, FP32)
    formats = Formats(inputs=FP32, v=fmt, operands=fmt, output=fmt)
    inputs = replace(made, v=round_to(made.v, fmt), formats=formats)
    return SharedBatch(inputs, reference(inputs))


def picture(rows: Sequence[Row]) -> str:
    """Return bias against mantissa bits, as an SVG file."""
    series = []
    for kernel in DRAWN:
        points = tuple(
            (float(row.format.removeprefix("E8M")), row.bias)
            for row in rows
            if row.case == CASES[0] and row.kernel == kernel and row.format in MANTISSAS and math.isfinite(row.bias)
        )
        series.append(Series(kernel, points, marked=points))
    figure = Figure(
        title="Bias of O against the bits of the mantissa",
        note="",
        x_label="mantissa bits (7: bf16)",
        y_label="bias of O, ulps of the format",
        series=tuple(series),
        x_ticks=tuple((float(bits), str(bits)) for bits in range(2, 11)),
    )
    return as_file(draw(figure))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all, freeze the rows, draw the figure; return 0, 2 for bad usage, 130 after Ctrl-C."""
    options = STUDY.parser(__doc__).parse_args(arguments)
    results = STUDY.results((Task(*each) for each in product(FORMATS, CASES)), options)
    write_rows(CSV, [row for each in results.values() for row in each])
    PICTURE.write_text(picture(read_rows(CSV, Row)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
