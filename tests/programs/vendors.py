"""`tiebreak list vendors`: plans of kernels that vendors ship, with their sources."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from tiebreak.programs.listing import lines_of, matching, parser_of
from tiebreak.reports.cli import PASSED


@dataclass(frozen=True)
class VendorPlan:
    """The rounding of a vendor's kernel in bf16, as `--plan` takes it."""

    name: str
    kernel: str  # what it is called where it is used, and when
    plan: str  # as `tiebreak.kernels.declarations.parse_declaration` takes it
    source: str  # repository, path and lines
    version: str  # commit or release, and date
    rests_on: str = "source lines; no device that it is for was asked"  # the plan, in words
    note: str = ""  # what the source does not say, or a plan cannot


_TABLES = tomllib.loads((files("tiebreak.kernels") / "vendor_plans.toml").read_text("utf-8"))
VENDOR_PLANS: Mapping[str, VendorPlan] = {name: VendorPlan(name, **table) for name, table in _TABLES.items()}


def main(arguments: Sequence[str]) -> int:
    """Run the verb `list vendors`; see `tiebreak.reports.cli.main`."""
    about = "What vendors' kernels round, by their sources, as --plan takes it."
    names, lines = parser_of("vendor", about).parse_args(arguments).names, []
    for plan in (VENDOR_PLANS[name] for name in matching("vendor", names, VENDOR_PLANS) or VENDOR_PLANS):
        rows = [("plan", plan.plan), ("source", f"{plan.source} ({plan.version})")]
        rows += [("rests on", plan.rests_on), ("note", plan.note)]
        lines.append("\n".join(lines_of(f"{plan.name}: {plan.kernel}", rows)))
    print("\n\n".join(lines))
    return PASSED
