"""Draws tie.svg, the picture at the top of README.md: python docs/figures/tie.py > docs/figures/tie.svg.

Its histograms are of the records in tie.json, which are from

    pytest tests/matrix --backend emulation --kernels flash@paper,stabilized@paper --cases 'tied_maxima[k=2]' --save tie
"""

from pathlib import Path

from tiebreak.reports import mechanism, store
from tiebreak.reports.mechanism import Side

NAMES = {"flash@paper": "plain flash", "stabilized@paper": "the published fix"}


def sides() -> dict[str, Side]:
    """The histograms of the picture, by kernel."""
    records = {one.kernel: one for one in store.read(Path(__file__).with_name("tie.json")).records}
    return {
        kernel: Side(name, records[kernel].evidence["histogram"], records[kernel].number("bias") or 0.0)
        for kernel, name in NAMES.items()
    }


if __name__ == "__main__":
    print(mechanism.drawing(*sides().values()), end="")
