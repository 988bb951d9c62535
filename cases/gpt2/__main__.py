"""`python -m tiebreak.cases.gpt2 --seeds 0 1`: measures the training tables of docs/science.md, as Markdown.

Here, and in `train`, the cases meet a backend: these modules put the parts together and nothing imports them.
"""

import argparse
import sys
from collections.abc import Sequence

import torch

from tiebreak.backends.backend import BACKENDS
from tiebreak.cases.gpt2 import tables
from tiebreak.cases.gpt2.isolation import isolation_rows
from tiebreak.cases.gpt2.snippets import SNIPPETS

# The measure of each snippet that its claim is about, and how tables print it.
HEADLINES = {
    "A": ("delta_error_mean", "+.1e"),
    "Q": ("wq_norm_growth", ".2f"),
    "LM": ("row_max_rise", "+.0f"),
    "X": ("loss_rise", "+.2f"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print one table a snippet, and section 3.2's; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m tiebreak.cases.gpt2", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="of weights and noise")
    parser.add_argument("--snippets", nargs="*", choices=SNIPPETS, default=list(SNIPPETS), help="their tables")
    parser.add_argument("--isolation", action="store_true", help="section 3.2's table too, at the first seed")
    parser.add_argument("--backend", choices=BACKENDS, default="emulation", help="what attention runs on")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)  # the tensors are small: threads cost more than they bring
    arithmetic = BACKENDS[arguments.backend].arithmetic
    for name in arguments.snippets:
        measure, spec = HEADLINES[name]
        rows = tables.training_rows(SNIPPETS[name], measure, arithmetic, arguments.seeds)
        cells = [row.cells(spec) for row in rows]
        print(f"\n{name}: {SNIPPETS[name].about}; {measure}\n\n{tables.markdown(tables.TRAINING_HEADERS, cells)}")
    for rounded in (False, True) if arguments.isolation else ():
        found = isolation_rows(arithmetic, arguments.seeds[0], row_sum_from_rounded=rounded)
        cells = [tables.isolation_cells(row) for row in found]
        title = f"Section 3.2, l from {'rounded' if rounded else 'unrounded'} P̄"
        print(f"\n{title}\n\n{tables.markdown(tables.ISOLATION_HEADERS, cells)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
