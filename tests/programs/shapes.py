"""`tiebreak list shapes`: the sizes and calls by which kernels are asked for paths of their own, with their sources."""

from collections.abc import Sequence

from tiebreak.cases.shapes import dimensions, reported
from tiebreak.programs.listing import lines_of
from tiebreak.reports.cli import PASSED, Parser
from tiebreak.reports.records.order import grouped


def main(arguments: Sequence[str]) -> int:
    """Run the verb `list shapes`: print the sizes that meet in pairs, then the calls of each question."""
    about = "Shapes of calls: every two sizes meet, with each parameter of a kernel; and calls of public reports."
    Parser(prog="tiebreak list shapes", description=about).parse_args(arguments)
    sizes = [(name, ", ".join(str(value or "the first that it takes") for value in sizes))
             for name, sizes in dimensions().items()]  # fmt: skip
    parts = [lines_of("shapes: every two of these meet in a call", sizes)]
    for name, calls in grouped(reported(), lambda call: call.asks).items():
        by_source = grouped(calls, lambda call: call.source).items()
        rows = [row for source, own in by_source
                for row in (("calls", "; ".join(call.words for call in own)), ("source", source))]  # fmt: skip
        parts.append(lines_of(f"{name}: calls by what is not as usual", rows))
    print("\n\n".join("\n".join(part) for part in parts))
    return PASSED
