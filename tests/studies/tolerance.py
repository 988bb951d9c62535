"""`make studies STUDY=tolerance`: which planted defects keep within the tolerances of their sound twin's plan."""

import sys
from collections.abc import Iterator, Sequence

from tiebreak.defects.planted import DEFECTS, Defect, on
from tiebreak.kernels.kernel import CannotRunError
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.experiments.call import OneCall
from tiebreak.matrix.identification.asking import threads
from tiebreak.matrix.identification.settling import NORMAL
from tiebreak.matrix.workbench import Settings, Settled, Workbench
from tiebreak.programs.tolerance import Size, tolerances
from tiebreak.reports.cli import PASSED, Parser

SIZES = (Size(64, 128), Size(64, 128, causal=True))
PLAN = "flash@fused"  # that all twins are held to


def shares(defect: Defect) -> Iterator[tuple[Size, float]]:
    """Yield the worst of O, dQ, dK and dV as a share of what is allowed, at each size that the kernel takes."""
    for size in SIZES:
        backend, kernel, bench = on(defect.arithmetic), defect.kernel, Workbench(Settings())
        bench.settled[backend.name, kernel.name, defect.fmt.name] = Settled("its twin", PLAN)
        try:
            found = tolerances(Cell(backend, kernel, OneCall(NORMAL[0]), defect.fmt), bench, size)
        except CannotRunError:
            continue
        yield size, max(one.kernel.worst for one in found.outputs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each defect and size, and how many pass at all sizes that they take."""
    Parser(prog="python -m tiebreak.studies.tolerance", description=__doc__).parse_args(arguments)
    passing, asked = 0, 0
    with threads(1):
        for name, defect in DEFECTS.items():
            found = list(shares(defect))
            for size, share in found:
                print(f"{name} {size}: {share:.3g}", flush=True)
            asked += bool(found)
            passing += bool(found) and all(share <= 1.0 for _, share in found)
    sizes = " and ".join(map(str, SIZES))
    print(f"{passing} of {asked} planted defects keep within the tolerances of {PLAN} at {sizes}")
    return PASSED


if __name__ == "__main__":
    sys.exit(main())
