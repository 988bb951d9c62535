"""`tiebreak list vendors`: plans of kernels that vendors ship, with their sources."""

from collections.abc import Sequence

from tiebreak.kernels.vendor_plans import VENDOR_PLANS
from tiebreak.programs.listing import lines_of, matching
from tiebreak.reports.cli import PASSED


def main(arguments: Sequence[str]) -> int:
    """Run the verb `list vendors`; see `tiebreak.reports.cli.main`."""
    about = "What vendors' kernels round, by their sources, as --plan takes it."
    lines = []
    for plan in (VENDOR_PLANS[name] for name in matching("vendor", about, arguments, VENDOR_PLANS) or VENDOR_PLANS):
        rows = [("plan", plan.plan), ("source", f"{plan.source} ({plan.version})")]
        rows += [("rests on", plan.rests_on), ("note", plan.note)]
        lines.append("\n".join(lines_of(f"{plan.name}: {plan.kernel}", rows)))
    print("\n\n".join(lines))
    return PASSED
