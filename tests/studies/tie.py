"""Draws tie.svg, the picture at the top of README.md: python -m tiebreak.studies.tie > docs/figures/tie.svg.

Its histograms are of the records in tie.json, which are from

    pytest tests/matrix --backend emulation --kernels flash@paper,stabilized@paper --cases 'tied_maxima[k=2]' --save tie
"""

from pathlib import Path

from tiebreak.reports.page import mechanism
from tiebreak.reports.page.mechanism import HistogramSide
from tiebreak.reports.records import store

NAMES = {"flash@paper": "plain flash", "stabilized@paper": "the published fix"}


def sides() -> dict[str, HistogramSide]:
    """The histograms of the picture, by kernel."""
    kept = store.read(Path(__file__).parents[2] / "docs" / "figures" / "tie.json")
    records = {record.kernel: record for record in kept.records}
    return {
        kernel: HistogramSide(name, records[kernel].evidence["histogram"], records[kernel].number("bias") or 0.0)
        for kernel, name in NAMES.items()
    }


if __name__ == "__main__":
    print(mechanism.drawing(*sides().values()), end="")
