"""The order of cases and kernels in tables, as the files of records describe them: groups of cases stay together."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from tiebreak.reports.records.record import CaseRecord, Run

_Key = TypeVar("_Key", bound=Hashable)
_Item = TypeVar("_Item")


def grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """Group items by their key, keys in the order of their first items."""
    groups: dict[_Key, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def cases_of(runs: Iterable[Run]) -> dict[str, CaseRecord]:
    """Return the cases of several runs in display order: group after group, cases of no group last.

    The run that names most groups decides, and each case is as in the first run that names its group.
    """
    cases: dict[str, CaseRecord] = {}
    for run in sorted(runs, key=lambda run: -sum(bool(about.group) for about in run.cases.values())):
        for name, about in run.cases.items():
            if not cases.setdefault(name, about).group:
                cases[name] = about if about.group else cases[name]
    groups = [*dict.fromkeys(about.group for about in cases.values() if about.group), ""]
    return dict(sorted(cases.items(), key=lambda pair: groups.index(pair[1].group)))


def kernel_places(runs: Sequence[Run]) -> dict[str, int]:
    """Return the position of each kernel in tables, from 0.

    Users' kernels come first, then names such as `sdpa_flash`, then composed ones, `rule@plan`, in the suite's order.
    """
    users = {target.rpartition(":")[2] for run in runs for target in (run.options.get("kernel") or "").split()}
    plans = dict.fromkeys(plan for run in runs for plan in run.plans)
    composed = {plan: place for place, plan in enumerate(plans)}
    names = {record.kernel for run in runs for record in run.records}

    def place(name: str) -> tuple[bool, bool, int, str]:
        return name not in users, "@" in name, composed.get(name, len(composed)), name

    return {name: at for at, name in enumerate(sorted(names, key=place))}
