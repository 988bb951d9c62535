"""What runs say, in sentences: what fell, what differs between platforms, which kernels are biased, broken or fair."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tiebreak.reports.records.order import case_places, grouped
from tiebreak.reports.records.record import (
    BIASED,
    CRASHED,
    FELL,
    FOLLOWS,
    HELD,
    INCONCLUSIVE,
    MEASURED,
    NONFINITE,
    PREDICTION,
    SHRUNK,
    SKIPPED,
    TIMED_OUT,
    UNBIASED,
    Record,
    Run,
)
from tiebreak.reports.tables.comparison import Agreement, Row, compare
from tiebreak.reports.tables.plans import explanation_text
from tiebreak.reports.tables.run import counted

_NAMED = 3  # names of a list that are said; the map has them all
_ALONE = 3  # biased kernels that have a sentence of their own


def findings(runs: Sequence[Run], labels: Sequence[str]) -> tuple[str, ...]:
    """The findings of runs, the most urgent first, a dozen sentences at most; names stand between backticks.

    In order: runs that were interrupted; what fell, if anything did; biased kernels, those in the most
    failure inputs first; NaN and outputs that shrink; kernels without a bias; that nothing fell; what differs
    between the platforms; what did not run where it was to.
    Where no file says which inputs are known to fail (older schemas), all inputs count.
    """
    standings = _standings(runs)
    noun = "failure input" if _failures(runs) else "input"
    answer = [*_biased(standings, noun), *_broken(standings), *_fair(standings, noun)]
    ended = _ended(runs)
    urgent = [*_interrupted(runs, labels), *_fallen(ended)]
    return (*urgent, *answer, *_passed(runs, ended), *_different(runs, labels), *_absent(runs))


def _interrupted(runs: Sequence[Run], labels: Sequence[str]) -> Iterator[str]:
    for run, label in zip(runs, labels, strict=True):
        if not run.complete:
            left = len(run.not_run) + len(run.running)
            more = f": {counted(left, 'cell')} did not finish" if left else ""
            yield f"The run on {_name(label)} was interrupted{more}."


def _ended(runs: Sequence[Run]) -> list[Record]:
    """All records but the skipped, in the order of the cases."""
    order = case_places(runs)
    records = sorted((record for run in runs for record in run.records), key=lambda record: order[record.case])
    return [record for record in records if record.outcome != SKIPPED]


def _fallen(ended: Sequence[Record]) -> Iterator[str]:
    verbs = {FELL: "fell", CRASHED: "crashed", TIMED_OUT: "timed out", INCONCLUSIVE: "drew too few heads to tell"}
    for outcome, words in verbs.items():
        those = [record for record in ended if record.outcome == outcome and record.excused is None]
        if those:
            yield f"{len(those):,} of {counted(len(ended), 'cell')} {words}: {_where(those)}."


def _passed(runs: Sequence[Run], ended: Sequence[Record]) -> Iterator[str]:
    outcomes = Counter(record.outcome for record in ended)
    if not ended:
        yield f"No cell ran: {counted(sum(len(run.records) for run in runs), 'cell')} skipped."
    elif not any(record.fails for record in ended):
        yield f"No cell fell: {outcomes[HELD]:,} held, {outcomes[MEASURED]:,} measured without a claim."
    if excused := sum(record.excused is not None for record in ended):
        yield f"{counted(excused, 'cell')} fell and {'is' if excused == 1 else 'are'} excused."


def _different(runs: Sequence[Run], labels: Sequence[str]) -> Iterator[str]:
    if len(runs) < 2:
        return
    rows = [row for row in compare(runs, labels).rows if _ran(row) > 1]
    shared = [row for row in rows if row.agreement is not Agreement.NOT_COMPARABLE]
    differing = [row.record for row in shared if row.agreement is Agreement.DISAGREE]
    same = sum(row.letters.count("a") == _ran(row) for row in shared)
    bits = f"{same:,} agree{'s' if same == 1 else ''} to the bit"
    who = "both platforms" if len(runs) == 2 else f"at least two of the {len(runs)} platforms"
    if not shared:
        yield f"No cell can be compared: {who} ran none with the same inputs."
    elif differing:
        yield (
            f"{len(differing):,} of the {counted(len(shared), 'cell')} that {who} ran"
            f" {'differs' if len(differing) == 1 else 'differ'} in verdict or outcome, {bits}: {_where(differing)}."
        )
    else:
        yield f"None of the {counted(len(shared), 'cell')} that {who} ran differs in verdict or outcome; {bits}."
    if others := len(rows) - len(shared):
        yield f"{counted(others, 'cell')} can't be compared: the platforms drew other inputs."


def _ran(row: Row) -> int:
    return sum(record is not None and record.outcome != SKIPPED for record in row.records)


@dataclass
class _Standing:
    """One kernel on one backend, over all platforms."""

    kernel: str
    backend: str
    biased: list[int] = field(default_factory=list)  # inputs, one number a platform
    asked: list[int] = field(default_factory=list)  # inputs with a verdict, one number a platform
    platforms: list[int] = field(default_factory=list)  # that ran it, by their numbers, from 1
    up: bool = False  # whether some bias is away from zero
    down: bool = False  # whether some is toward zero
    fair: bool = True  # whether every input is unbiased on every platform
    broken: dict[str, list[str]] = field(default_factory=dict)  # NONFINITE or SHRUNK: cases, failure inputs or not
    sizes: list[float] = field(default_factory=list)  # shares of its size that a shrunk output keeps
    follows: str = ""  # the plan

    def add(self, number: int, run: Run, records: Sequence[Record], failures: frozenset[str]) -> None:
        """Take in what a platform says: its number, its run, and the records of the kernel."""
        states = [(record, _state(record)) for record in records if record.outcome != SKIPPED]
        judged = [(record, state) for record, state in states if state is not None]
        known = [(record, state) for record, state in judged if not failures or record.case in failures]
        means = [run.headline(record) or 0.0 for record, state in known if state == BIASED]
        self.biased.append(len(means))
        self.asked.append(len(known))
        self.platforms.append(number)
        self.up, self.down = self.up or any(x > 0 for x in means), self.down or any(x < 0 for x in means)
        # Also what crashed is no sign of health.
        due = {state for record, state in (states if failures else known) if not failures or record.case in failures}
        self.fair = self.fair and bool(known) and due == {UNBIASED}
        for record, state in judged:
            if state in (NONFINITE, SHRUNK) and record.case not in self.broken.setdefault(state, []):
                self.broken[state].append(record.case)
            if state == SHRUNK and record.shown is not None and record.shown.number is not None:
                self.sizes.append(record.shown.number)

    @property
    def share(self) -> str:
        """In how many inputs it is biased: 14 of 24; where platforms differ `14 of 24 (1, 3), 2 of 13 (2)`."""
        shares = [f"{biased} of {asked}" for biased, asked in zip(self.biased, self.asked, strict=True)]
        platforms = grouped(zip(shares, self.platforms, strict=True), lambda pair: pair[0])
        if len(platforms) == 1:
            return shares[0]
        return ", ".join(f"{share} ({', '.join(str(at) for _, at in those)})" for share, those in platforms.items())


def _standings(runs: Sequence[Run]) -> list[_Standing]:
    failures = _failures(runs)
    standings: dict[tuple[str, str], _Standing] = {}
    order = case_places(runs)
    for number, run in enumerate(runs, 1):
        ordered = sorted(run.records, key=lambda record: order[record.case])
        own = grouped(ordered, lambda record: (record.kernel, record.backend))
        for names in dict.fromkeys((record.kernel, record.backend) for record in run.records):
            records, standing = own[names], standings.setdefault(names, _Standing(*names))
            standing.add(number, run, records, failures)
            standing.follows = standing.follows or _follows(run, records)
    return list(standings.values())


def _state(record: Record) -> str | None:
    return SHRUNK if record.verdict is not None and record.shrank else record.verdict


def _failures(runs: Sequence[Run]) -> frozenset[str]:
    return frozenset(name for run in runs for name, about in run.cases.items() if about.failure)


def _follows(run: Run, records: Sequence[Record]) -> str:
    """What is known of a kernel's plan beyond its name: the one its bits follow, or the one it declares."""
    first = records[0]
    if plan := run.explanations.get(f"{first.backend}-{first.kernel}"):
        return f"; {'it' if plan.state == FOLLOWS else 'its plan:'} {explanation_text(plan)}"
    predicted = [record for record in records if PREDICTION in record.answers]
    if first.plan is None or first.plan == first.kernel or not predicted:
        return ""
    met = sum(record.met(PREDICTION) is True for record in predicted)
    cells = "every cell" if met == len(predicted) else f"{met} of {counted(len(predicted), 'cell')}"
    return f"; its declared plan {_name(first.plan)} predicts {cells}"


def _biased(standings: Sequence[_Standing], noun: str) -> Iterator[str]:
    """The worst in sentences of their own, the others in one.

    A kernel that is named for its rounding plan is there to be compared with: kernels of other names come first.
    """
    worst = sorted(standings, key=lambda standing: (-max(standing.biased), standing.kernel))
    groups = grouped((standing for standing in worst if any(standing.biased)), lambda standing: standing.kernel)
    ordered = sorted(groups.items(), key=lambda pair: "@" in pair[0])
    for kernel, those in ordered[:_ALONE]:
        counts = [
            f"{standing.share}{'' if at else f' {noun}s'} on {standing.backend}" for at, standing in enumerate(those)
        ]
        follows = "".join(dict.fromkeys(standing.follows for standing in those))
        yield f"{_name(kernel)} is biased {_way(those)} in {_and(dict.fromkeys(counts))}{follows}."
    if rest := [
        f"{_name(kernel)} ({_and(dict.fromkeys(standing.share for standing in those))})"
        for kernel, those in ordered[_ALONE:]
    ]:
        yield f"Biased in some {noun}s: {_list(rest, 'kernel')}."


def _way(standings: Sequence[_Standing]) -> str:
    """Which way biases go."""
    up, down = any(standing.up for standing in standings), any(standing.down for standing in standings)
    return "both ways" if up and down else "away from zero" if up else "toward zero"


def _broken(standings: Sequence[_Standing]) -> Iterator[str]:
    for state, words in ((NONFINITE, "NaN or Inf where the reference is finite"), (SHRUNK, "The output shrinks")):
        breaking = [standing for standing in standings if standing.broken.get(state)]
        inputs = dict.fromkeys(tuple(standing.broken[state]) for standing in breaking)
        groups = {cases: [each for each in breaking if tuple(each.broken[state]) == cases] for cases in inputs}
        breaks = [f"{_kernels(those)} in {_list(map(_name, cases), 'case')}" for cases, those in groups.items()]
        if breaks:
            sizes = [size for standing in breaking for size in standing.sizes]
            least = f", to x{min(sizes):.2g} at the least" if state == SHRUNK else ""
            yield f"{words}{least}: {_list(breaks, 'group of kernels', '; ', 'groups of kernels', longest=2)}."


def _fair(standings: Sequence[_Standing], noun: str) -> Iterator[str]:
    fair = sorted((standing for standing in standings if standing.fair), key=lambda standing: -max(standing.asked))
    groups = grouped(fair, lambda standing: _range(standing.asked))
    if fairly := [
        f"{_kernels(those, 2 * _NAMED)} ({number} {noun}{'' if number == '1' else 's'})"
        for number, those in groups.items()
    ]:
        yield f"Fair, unbiased on every {noun}: {_list(fairly, 'group of kernels', '; ', 'groups of kernels')}."
    elif any(any(standing.asked) for standing in standings):
        yield f"No kernel is unbiased on every {noun}."


def _absent(runs: Sequence[Run]) -> Iterator[str]:
    """What was only assumed, and what was to run and did not."""
    yield from dict.fromkeys(
        f"The backend {_name(name)} computed {assumed}."
        for run in runs
        for name, assumed in run.platform.get("assumed", {}).items()
    )
    yield from dict.fromkeys(
        f"The backend {_name(name)} did not run: {reason}." for run in runs for name, reason in run.unavailable.items()
    )


def _where(records: Sequence[Record]) -> str:
    """Records as few groups: of a kernel on a backend, or of a case."""
    kernels: dict[str, list[str]] = {}
    cases: dict[str, list[str]] = {}
    for record in records:
        kernel = f"{_name(record.kernel)} on {record.backend}"
        kernels.setdefault(kernel, []).append(_name(record.case))
        cases.setdefault(_name(record.case), []).append(kernel)
    by_case = len(cases) < len(kernels)
    groups = cases if by_case else kernels
    groups_named = [
        f"{name} ({_list(dict.fromkeys(those), 'kernel' if by_case else 'case')})" for name, those in groups.items()
    ]
    return _list(groups_named, "case" if by_case else "kernel")


def _kernels(standings: Sequence[_Standing], longest: int = _NAMED) -> str:
    """Kernels with their backends, those of the same backends together."""
    backends = {
        kernel: _and(dict.fromkeys(standing.backend for standing in own))
        for kernel, own in grouped(standings, lambda standing: standing.kernel).items()
    }
    together = grouped(backends, lambda kernel: backends[kernel])
    return ", ".join(
        f"{_list(map(_name, kernels), 'kernel', longest=longest)} on {where}" for where, kernels in together.items()
    )


def _and(names: Mapping[str, None]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _list(names: Iterable[str], noun: str, between: str = ", ", nouns: str = "", *, longest: int = _NAMED) -> str:
    """The first few names, and how many more there are."""
    listed = list(names)
    if len(listed) <= longest + 1:
        return between.join(listed)
    more = len(listed) - longest
    return f"{between.join(listed[:longest])}{between}and {more} more {nouns or noun + 's'}"


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _name(text: str) -> str:
    """Between backticks, which no name may end early."""
    return f"`{text.replace('`', chr(39))}`"
