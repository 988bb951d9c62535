"""`python -m tiebreak.studies`: make the tables of docs/ anew, or say which of them are stale."""

import sys
from collections.abc import Sequence

from tiebreak.reports.cli import FAILED, PASSED, Parser
from tiebreak.studies import budget, eight_bits, findings, gallery, models, power, rules, truncation
from tiebreak.studies.pages import PageTable

_MAKERS = (budget, eight_bits, findings, gallery, models, power, rules, truncation)
TABLES: Sequence[PageTable] = [table for maker in _MAKERS for table in maker.TABLES]


def main(arguments: Sequence[str] | None = None) -> int:
    """Renew tables, or name the stale ones; return 1 if there are any, 2 for bad usage."""
    parser = Parser(prog="python -m tiebreak.studies", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a page, or the source of a table (default: all)")
    parser.add_argument("--stale", action="store_true", help="write nothing; name the tables that are not as made")
    options = parser.parse_args(arguments)
    known = {name for table in TABLES for name in (table.page, table.source)}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"unknown table {unknown[0]!r}: known are {', '.join(sorted(known))}")
    stale = 0
    for table in TABLES:
        if not options.names or {table.page, table.source} & set(options.names):
            changes = table.is_stale()
            stale += changes
            if changes and not options.stale:
                table.renew()
            print(f"{'stale' if changes else 'as made'}: {table.page}, {table.source}", flush=True)
    return FAILED if options.stale and stale else PASSED


if __name__ == "__main__":
    sys.exit(main())
