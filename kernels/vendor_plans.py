"""The rounding plans of kernels that vendors ship, by their sources: the table next to this file."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files


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


_TABLES = tomllib.loads((files(__package__) / "vendor_plans.toml").read_text("utf-8"))
VENDOR_PLANS: Mapping[str, VendorPlan] = {name: VendorPlan(name, **table) for name, table in _TABLES.items()}
