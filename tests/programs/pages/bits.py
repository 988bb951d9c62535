"""Bias against the number of bits: the scripted cases with P-bar, V and O in fewer and in more bits, emulated.

    python -m tiebreak.programs.pages.bits run  # docs/bits.csv: every format, case, rule and plan
    python -m tiebreak.programs.pages.bits      # from it, the tables of docs/fewer-bits.md and docs/figures/bits.svg

q, k and dO are in fp32, so the scores are those of the case whatever the format. V is drawn in fp32 and rounded to the
format. P-bar, O and, where the plan has it narrow, O-bar are in the format.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tiebreak.backends.backend import EMULATION
from tiebreak.backends.emulation.rounding import round_to
from tiebreak.cases.batch import Batch
from tiebreak.cases.errors import Errors, measure
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.cases.verdicts import judge
from tiebreak.kernels.formats import FP32, Format, Formats, parse_format
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.reference import reference
from tiebreak.kernels.shift_rules import SHIFT_RULES
from tiebreak.matrix.experiments.call import shown
from tiebreak.programs.pages.tables import read_rows, renew, table, write_rows
from tiebreak.reports.page.svg import Figure, Series, as_file, draw
from tiebreak.reports.records.record import NONFINITE
from tiebreak.reports.tables.marks import shown_text

DOCS = Path(__file__).parents[3] / "docs"
TABLE, PAGE, PICTURE = DOCS / "bits.csv", DOCS / "fewer-bits.md", DOCS / "figures" / "bits.svg"
MANTISSAS = tuple(f"E8M{bits}" for bits in range(10, 1, -1))  # E8M7 is bf16, E8M10 tf32
OTHERS = ("fp16", "fp8_e4m3", "fp8_e5m2")
CASES = ("tied_maxima[k=2]", "sink_tie", "no_tail", "single_maximum", "single_maximum_sink", "repeated_zero")
# `lazy_4` lags as `lazy` does, by half as much: nothing lags in these cases.
RULES = tuple("flash" if rule == "safe" else rule for rule in SHIFT_RULES if rule != "lazy_4")
KERNELS = (*(f"{rule}@paper" for rule in RULES), "flash@fused", "stabilized@fused", "fair", "standard")
SHOWN = ("flash@paper", "stabilized@paper", "dithered@paper", "flash@fused", "stabilized@fused", "fair")
DRAWN = ("flash@paper", "stabilized@paper", "flash@fused", "fair")
SEED, HEADS = 1, 256
_DIGITS = 5


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


def main(arguments: Sequence[str]) -> int:
    """Run everything, or renew what is made from the table."""
    if arguments not in ([], ["run"]):
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    if arguments:
        write_rows(TABLE, Row, rows((*MANTISSAS, *OTHERS), CASES))
    kept = read_rows(TABLE, Row)
    renew(PAGE, TABLE.name, tables(kept))
    PICTURE.write_text(picture(kept), encoding="utf-8")
    return 0


def rows(formats: Sequence[str], cases: Sequence[str], kernels: Sequence[str] = KERNELS) -> Iterator[Row]:
    """Measure.

    Args:
        formats: by name.
        cases: by name.
        kernels: composed ones, by name.

    Yields:
        A row for each, in that order.
    """
    for name in formats:
        for case in cases:
            batch = _batch(case, parse_format(name))
            for kernel in kernels:
                yield _row(name, case, kernel, batch)
            print(name, case, file=sys.stderr, flush=True)


def _batch(name: str, fmt: Format) -> Batch:
    """A case's first batch with V, P-bar and O in a format."""
    case = next(case for case in SCRIPTED if case.name == name)
    made = case.make(SEED, 0, HEADS, FP32)
    inputs: AttentionInputs = replace(
        made, v=round_to(made.v, fmt), formats=Formats(inputs=FP32, v=fmt, operands=fmt, output=fmt)
    )
    return Batch(inputs, reference(inputs))


def _row(fmt: str, case: str, kernel: str, batch: Batch) -> Row:
    output = EMULATION.run(EMULATION.kernel(kernel), batch.inputs, gradients=False)
    no_bound = torch.full((), torch.inf, dtype=torch.float64)  # none is asked for here
    errors: Errors = measure(output.o, None, batch.inputs, batch.ref, no_bound, batch.yardstick)
    verdict = NONFINITE if errors.nonfinite else judge(errors.bias).value
    numbers = (
        *(math.nan if errors.nonfinite else errors.bias.mean, errors.bias.half_width),
        *(errors.gain, errors.delta_bias.mean, errors.delta_bias.half_width, errors.coherence_excess.mean),
    )
    bias, half_width, gain, delta, delta_half_width, coherence = (float(f"{number:.{_DIGITS}g}") for number in numbers)
    return Row(fmt, case, kernel, bias, half_width, verdict, gain, delta, delta_half_width, coherence)


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """What the page shows: the first case."""
    shown_in = {(row.format, row.case, row.kernel): _shown(row) for row in rows}
    yield from table(
        (f"`{CASES[0]}`", *(f"`{kernel}`" for kernel in SHOWN)),
        ((fmt, *(shown_in[fmt, CASES[0], kernel] for kernel in SHOWN)) for fmt in (*MANTISSAS, *OTHERS)),
    )


def _shown(row: Row) -> str:
    return shown_text(shown(float(row.verdict == NONFINITE), row.gain, row.bias, row.verdict))


def picture(rows: Sequence[Row]) -> str:
    """Bias against mantissa bits, as an SVG file."""
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
