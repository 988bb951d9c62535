"""`python -m tiebreak.studies.identification`: Count how often `tiebreak identify` finds a plan that is known.

Every kernel of the suite under a name that says nothing, and plans drawn from the space with a seed: a known plan with
up to four changes.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from numpy.random import Generator, Philox

from tiebreak.backends.backend import EMULATION
from tiebreak.kernels.declarations import FORWARD, parse_declaration
from tiebreak.kernels.formats import BF16, FP32, Format
from tiebreak.kernels.kernel import Declaration, composed
from tiebreak.kernels.plans import Accumulator
from tiebreak.kernels.roster import DEFAULT_ROSTER, eight_bit_kernels
from tiebreak.matrix.identification.asking import DesignedOutput, ProbedKernel
from tiebreak.matrix.identification.candidates import candidates
from tiebreak.matrix.identification.designed import DESIGNED
from tiebreak.matrix.identification.identity import Identity, identify
from tiebreak.matrix.identification.space import (
    ALGORITHM,
    FAST,
    ORDER,
    RULE,
    SLOW,
    SPLITS,
    TILE,
    changes,
    forward_alone,
    moves,
    text,
)
from tiebreak.reports.cli import count
from tiebreak.studies.study import Study

FOUND, ALIKE, NEAR, WRONG, NONE = "found", "told to be alike", "alike, untold", "wrong", "none known"
_MOST = 4  # changes of a known plan
_SEEDS = range(100, 103)  # of inputs that no identification asks: where two plans agree on all of them they are alike
_TENSOR_CORES = tuple(f"flash@fused,accumulator={core.name.lower()}" for core in Accumulator if core.name != "EXACT")


@dataclass(frozen=True)
class Found:
    """What came of one."""

    answer: str  # the plan that was found, or the nearest
    outcome: str
    alike: dict[str, list[str]]  # points that were said not to be told apart
    tried: int  # plans, held against one input each


def drawn(number: int, seed: int, fmt: Format = BF16) -> Declaration:
    """Draw plan `number` of a seed: a known one with up to four changes, in a call's format all the same."""
    rng = Generator(Philox(key=[seed, number]))
    known = list(candidates().values())
    plan = forward_alone(known[int(rng.integers(len(known)))], fmt)
    for _ in range(int(rng.integers(_MOST + 1))):
        others = [other for change, other in changes(plan, fmt) if change.key not in (SLOW, "sink")]
        plan = others[int(rng.integers(len(others)))]
    if plan.plan.o.fmt == FP32 or plan.plan.accumulator.name != "EXACT":
        return drawn(number + 10**6, seed, fmt)
    return plan


def find(plan: str) -> Found:
    """Identify a kernel that follows a plan, and say what is true of the answer."""
    truth = parse_declaration(plan)
    identity = identify(ProbedKernel(EMULATION, composed("kernel", truth), BF16))
    alike = {point: list(values) for point, values in identity.alike.items()}
    return Found(identity.nearest, _outcome(identity, truth), alike, identity.tried)


STUDY = Study("identification", find, seconds=10.0, gib=1.0)


def _outcome(identity: Identity, truth: Declaration) -> str:
    if identity.plan is None:
        return NONE
    answer = forward_alone(parse_declaration(identity.plan), BF16)
    truth = forward_alone(truth, BF16)
    if answer == truth:
        return FOUND
    if _points_apart(answer, truth) <= _told(identity, answer, truth):
        return ALIKE
    return NEAR if all(_agree(answer, truth, seed) for seed in _SEEDS) else WRONG


def _points_apart(one: Declaration, other: Declaration) -> set[str]:
    """The keys of what two declarations differ in, as changes have them."""
    apart = {key for key, field in FORWARD.items() if getattr(one.plan, field) != getattr(other.plan, field)}
    if one.plan.exponential.correction != other.plan.exponential.correction:
        apart.add(FAST)
    pairs = {
        ALGORITHM: (one.algorithm.name, other.algorithm.name),
        RULE: (one.shift_rule, other.shift_rule),
        TILE: (one.block.keys, other.block.keys),
        SPLITS: (one.block.splits, other.block.splits),
        ORDER: (one.block.order, other.block.order),
    }
    return apart | {key for key, (ours, theirs) in pairs.items() if ours != theirs}


def _told(identity: Identity, answer: Declaration, truth: Declaration) -> set[str]:
    """Return the points at which the truth has what was said to be alike there."""
    told: set[str] = set()
    for change, other in chain(changes(answer, BF16), moves(answer, BF16)):
        points = _points_apart(answer, other)
        if change.value in identity.alike.get(change.key, ()) and not points & _points_apart(other, truth):
            told |= points
    return told


def _agree(one: Declaration, other: Declaration, seed: int) -> bool:
    for designed in DESIGNED:
        inputs = designed.make(BF16, seed)
        answer = DesignedOutput(inputs, inputs.q, designed.name)
        if not torch.equal(answer.predicted(one).nan_to_num(), answer.predicted(other).nan_to_num()):
            return False
    return True


def tasks(plans: int, seed: int) -> Iterator[str]:
    """Yield the plans of the suite's own kernels, then plans of the seed."""
    own = [kernel.declaration for kernel in eight_bit_kernels()]
    known = [*map(parse_declaration, (*DEFAULT_ROSTER, *_TENSOR_CORES)), *(plan for plan in own if plan is not None)]
    drawn_plans = (drawn(number, seed) for number in range(plans))
    for declaration in dict.fromkeys([*(forward_alone(each, BF16) for each in known), *drawn_plans]):
        yield text(declaration)


def report(results: Mapping[str, Found]) -> Iterator[str]:
    """Yield how many came out how, and every plan that was neither found nor said to be alike."""
    outcomes = Counter(found.outcome for found in results.values())
    good = outcomes[FOUND] + outcomes[ALIKE]
    counts = ", ".join(f"{outcomes[name]} {name}" for name in (FOUND, ALIKE, NEAR, WRONG, NONE))
    yield f"{good} of {len(results)}: {counts}"
    for plan, found in results.items():
        if found.outcome not in (FOUND, ALIKE):
            yield f"  {found.outcome}: {plan} -> {found.answer}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, 2 for bad usage, 130 after Ctrl-C."""
    parser = STUDY.parser(__doc__)
    parser.add_argument("--plans", type=count, default=100, metavar="N", help="drawn (default: 100)")
    parser.add_argument("--seed", type=count, default=1, metavar="N", help="of the plans that are drawn (default: 1)")
    options = parser.parse_args(arguments)
    print(*report(STUDY.results(tasks(options.plans, options.seed), options)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
