"""`python -m tiebreak.studies.spread`: Run the training snippets at many seeds, and renew the bounds that rest on them.

A seed is done with all variants of a default run before the next begins, so that at any stop all have been run equally
often; the others follow. `--write` puts n, mean and sd into spread.csv, and the bounds that `tiebreak.studies.bounds`
derives from them into cases/gpt2/claims.csv.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tiebreak.backends.backend import CPU, EMULATION
from tiebreak.backends.provenance import commit
from tiebreak.cases.gpt2.snippets import SNIPPETS, Snippet, run_snippet
from tiebreak.cases.gpt2.variants import VARIANTS
from tiebreak.reports.cli import count
from tiebreak.studies.bounds import RULES, Ran, Spread, claims, read_spreads, spread, write_claims, write_spreads
from tiebreak.studies.study import Study

_BACKENDS = {backend.name: backend for backend in (EMULATION, CPU)}


@dataclass(frozen=True)
class Task:
    """One run."""

    backend: str  # its name
    snippet: str  # its name
    version: int  # of its recipe
    variant: str  # by full name
    seed: int  # of weights and noise

    def __str__(self) -> str:
        return f"{self.backend} {self.snippet} {self.variant} seed {self.seed}"


Runs = Mapping[Task, dict[str, float]]


def run(task: Task) -> dict[str, float]:
    """Run one snippet, to its measures."""
    backend, snippet = _BACKENDS[task.backend], SNIPPETS[task.snippet]
    ran = run_snippet(snippet, VARIANTS[task.variant], backend.arithmetic, task.seed, backend.device)
    return dict(ran.measures)


# Whatever the commit: a recipe that changes gets another version.
STUDY = Study("spread", run, seconds=6.0, gib=1.0, every_commit=True)


def variants_of(snippet: Snippet) -> Sequence[str]:
    """Return the variants of a default run, then all others that a statement is about or must catch."""
    named = (name for each in RULES.get(snippet.name, ()) for name in (*each.variants, each.against))
    own = (name for claim in snippet.own_claims for name in sorted(claim.variants))
    return list(dict.fromkeys([*snippet.roster, *named, *own]))


def tasks(seeds: int) -> Iterator[Task]:
    """Yield all runs in their order, in two rounds over the seeds from 1.

    First what bounds of a default run rest on: its variants on the emulation, and those that a claim about them must
    catch. Then other variants, and the default run on the CPU's own arithmetic.
    """
    for first in (True, False):
        for seed in range(1, seeds + 1):
            for snippet in SNIPPETS.values():
                caught = {
                    each.against for each in RULES.get(snippet.name, ()) if set(each.variants) & set(snippet.roster)
                }
                default = caught | set(snippet.roster)
                named = [name for name in variants_of(snippet) if (name in default) == first]
                for backend, names in (("emulation", named), ("cpu", () if first else snippet.on_devices)):
                    yield from (Task(backend, snippet.name, snippet.version, name, seed) for name in names)


def spreads(runs: Runs) -> dict[Ran, Spread]:
    """Return the distributions that statements ask for, of the recipes as they are now."""
    values: dict[Ran, list[float]] = {}
    for task, each in _current(runs).items():
        snippet = SNIPPETS[task.snippet]
        asked = {claim.measure for claim in snippet.own_claims if task.variant in claim.variants}
        asked |= {
            rule.measure for rule in RULES.get(snippet.name, ()) if task.variant in (*rule.variants, rule.against)
        }
        for measure in asked:
            ran = Ran(task.snippet, task.version, task.backend, task.variant, measure)
            values.setdefault(ran, []).append(each[measure])
    return {ran: spread(ran.measure, each) for ran, each in values.items() if len(each) > 1}


def _current(runs: Runs) -> Runs:
    versions = {name: snippet.version for name, snippet in SNIPPETS.items()}
    return {task: each for task, each in runs.items() if versions.get(task.snippet) == task.version}


def alarms(runs: Runs, spreads: Mapping[Ran, Spread]) -> tuple[int, list[str]]:
    """Return how many runs claims speak of, and those that would have fallen at the bounds that follow."""
    derived = claims(spreads)
    about = {name: (*each.own_claims, *derived.get((name, each.version), ())) for name, each in SNIPPETS.items()}
    asked = {
        task: [claim for claim in about[task.snippet] if task.variant in claim.variants] for task in _current(runs)
    }
    fallen = [
        f"{task}: {claim.text}, {claim.measure} = {runs[task][claim.measure]:.3g}"
        for task, concerned in asked.items()
        for claim in concerned
        if not claim.passes(runs[task])
    ]
    return sum(map(bool, asked.values())), fallen


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, 1 where a run would have fallen, 2 for bad usage, 130 after Ctrl-C."""
    parser = STUDY.parser(__doc__)
    parser.add_argument("--seeds", type=count, default=200, metavar="N", help="from 1; 0: run none (default: 200)")
    parser.add_argument("--write", action="store_true", help="freeze the spreads that bounds rest on")
    options = parser.parse_args(arguments)
    STUDY.results(tasks(options.seeds), options)
    runs = STUDY.kept(options)
    if options.write:
        write_spreads(spreads(runs), commit() or "")
        write_claims(claims(read_spreads()), commit() or "")
    asked, fallen = alarms(runs, read_spreads())
    print("\n".join([f"{asked} runs that claims speak of, {len(fallen)} beyond a bound", *fallen]))
    return int(bool(fallen))


if __name__ == "__main__":
    sys.exit(main())
