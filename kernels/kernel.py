"""Kernels under test: an implementation, and the declaration of how it rounds."""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial

from tiebreak.kernels.algorithms import Algorithm
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.features import Feature
from tiebreak.kernels.flash import ALL, BLOCK, DELTA_ALONE, ONE_TILE, Block, Order, Wanted, backward
from tiebreak.kernels.formats import Formats, hashed_once
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput, Gradients
from tiebreak.kernels.plans import RoundingPlan
from tiebreak.kernels.shift_rules import ShiftRule


@hashed_once
@dataclass(frozen=True)
class Declaration:
    """What a kernel declares: enough for the emulation to predict its output."""

    algorithm: Algorithm  # how it goes over a row, and where it normalises
    plan: RoundingPlan  # where it rounds
    shift_rule: ShiftRule  # how it chooses a row's shift
    block: Block = BLOCK  # its tile sizes
    tile_named: bool = field(default=False, compare=False)  # whether its label names them: where they were chosen

    @property
    def label(self) -> str:
        """`standard`, or `rule@plan` with the rule `safe` called by the algorithm's name; then what is otherwise.

        `tiebreak.kernels.declarations.parse_declaration` takes it back.
        """
        if not self.algorithm.tiled:
            return ",".join([self.algorithm.name, *self.plan.name.split(",")[1:]])
        name, *numbers = self.shift_rule.name.split(",")
        block, order = self.block, self.block.order is not Order.FORWARDS and self.block.order.value
        changes = {"tile": self.tile_named and block, "splits": block.splits, "order": order}
        head = f"{self.algorithm.name if name == 'safe' else name}@{self.plan.name}"
        return ",".join([head, *numbers, *(f"{key}={value}" for key, value in changes.items() if value)])

    @property
    def claimed_as(self) -> str:
        """What claims call it: its shift rule, unless all kernels of its algorithm go by one name."""
        return self.algorithm.claimed_as or self.shift_rule.name


LATER_TILES = (ONE_TILE, Block(64, 64), Block(32, 32))  # that are tried after the declared ones


@cache
def nameless(declaration: Declaration) -> Declaration:
    """What a declaration does, whatever it is called: two that do the same are equal."""
    rule = replace(declaration.shift_rule, name="", source="", accepted=True)
    return replace(declaration, plan=replace(declaration.plan, name=""), shift_rule=rule)


def tilings(declaration: Declaration) -> tuple[Declaration, ...]:
    """The tiles that a user's kernel may work in, the smallest last; where O-bar is rounded they change its bias."""
    if declaration.tile_named or not declaration.algorithm.tiled:
        return (declaration,)
    return tuple(replace(declaration, block=block) for block in (declaration.block, *LATER_TILES))


def drawn(declaration: Declaration) -> bool:
    """Whether random bits enter O."""
    return declaration.plan.stochastic or declaration.shift_rule.dithered


# (inputs on the backend's device, its arithmetic, whether to compute gradients) -> output
Compute = Callable[[AttentionInputs, Arithmetic, bool], AttentionOutput]
# inputs on their device -> None, or in one line what is to be said against running them
Objection = Callable[[AttentionInputs], str | None]


class Whose(enum.Enum):
    """Whose it is that a call gives no answer."""

    CALL = "call"  # it is none for this kernel, or not here: its cell is skipped
    KERNEL = "kernel"  # the kernel breaks its contract: its cell falls


class CannotRunError(Exception):
    """A call that gives no answer: why, in one line, and whose that is."""

    def __init__(self, reason: str, whose: Whose = Whose.CALL) -> None:
        super().__init__(reason)
        self.whose = whose


class OutOfBoundsError(IndexError):
    """The kernel reads or writes where none of its arguments lies; one line with the kernel and the argument."""


def first_line(error: BaseException) -> str:
    """The first line of what an error says."""
    return (str(error).strip().splitlines() or ["no message"])[0]


def in_one_line(error: BaseException) -> str:
    """Return what was raised, all of it in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _nothing(inputs: object) -> None:
    del inputs


@dataclass(frozen=True)
class Kernel:
    """One implementation of attention under test."""

    name: str  # how tables and --kernels call it
    compute: Compute  # runs it
    declaration: Declaration | None  # what it claims to do; None where nobody knows
    has_backward: bool = True  # whether it can return gradients
    takes: frozenset[Feature] = frozenset()  # what inputs may ask of it: inputs that ask for more are skipped
    missing_requirement: Objection = _nothing  # what it lacks here: a package, a format, PyTorch's consent
    undeclared: Objection = _nothing  # what is tried on a small call first: where that fails, the cell is skipped
    external: bool = False  # a user's own: held to the contract of `tiebreak.kernels.external`
    origin: tuple[str, ...] = ()  # of a user's own: the words of the command line that bring it in
    unsuited: Callable[[Formats], str | None] = _nothing  # why it is not for some formats, and left out of their cells
    composed: bool = False  # whether it is its declaration, run on the arithmetic of any backend

    def refusal(self, inputs: AttentionInputs) -> str | None:
        """None, or why it can't run some inputs on their device, in one line.

        That is what they ask for and it does not take; else what is wrong with their formats; else what it lacks.
        """
        untaken = [feature.words for feature in inputs.asks() if feature not in self.takes]
        if untaken:
            return f"{self.name} takes no {' and no '.join(untaken)}"
        return self.unsuited(inputs.formats) or self.missing_requirement(inputs)


def run_forward(declaration: Declaration, inputs: AttentionInputs, arithmetic: Arithmetic) -> AttentionOutput:
    """The forward pass of `run_declared` alone: O and the log-sum-exp."""
    plan = declaration.plan.in_formats(inputs.formats)
    return declaration.algorithm.forward(inputs, plan, declaration.shift_rule, arithmetic, declaration.block)


def run_backward(
    declaration: Declaration,
    inputs: AttentionInputs,
    output: AttentionOutput,
    arithmetic: Arithmetic,
    wanted: Wanted = ALL,
) -> Gradients:
    """The backward pass of `run_declared` alone, from what the forward pass returned."""
    return backward(inputs, output, declaration.plan.in_formats(inputs.formats), arithmetic, declaration.block, wanted)


def run_declared(
    declaration: Declaration, inputs: AttentionInputs, arithmetic: Arithmetic, gradients: bool, wanted: Wanted = ALL
) -> AttentionOutput:
    """Attention exactly as declared, with the plan in the formats of the inputs: O, the log-sum-exp, the gradients.

    The inputs are on the arithmetic's device. The backward pass runs where `gradients` are asked for, and computes
    those that are `wanted`, beside delta.
    """
    output = run_forward(declaration, inputs, arithmetic)
    backward = run_backward(declaration, inputs, output, arithmetic, wanted) if gradients else None
    return replace(output, gradients=backward, tiles=None)


def delta_alone(kernel: Kernel) -> Kernel:
    """A composed kernel whose backward pass ends with delta, its gradients NaN; any other kernel as it is."""
    if kernel.declaration is None or not kernel.composed:
        return kernel
    return composed(kernel.name, kernel.declaration, DELTA_ALONE)


def composed(name: str, declaration: Declaration, wanted: Wanted = ALL) -> Kernel:
    """A kernel that is its declaration, run on whatever arithmetic a backend brings, with these gradients."""
    compute = partial(run_declared, declaration, wanted=wanted)
    return Kernel(name, compute, declaration, takes=declaration.algorithm.takes, composed=True)
