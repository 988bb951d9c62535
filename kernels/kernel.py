"""Kernels under test: an implementation, and the declaration of how it rounds."""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial

from tiebreak.kernels.algorithms import Algorithm
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.features import Feature
from tiebreak.kernels.flash import ALL, BLOCK, DELTA_ALONE, ONE_TILE, Block, TileOrder, Wanted, backward
from tiebreak.kernels.formats import Formats, hashed_once
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput, Gradients
from tiebreak.kernels.plans import RoundingPlan
from tiebreak.kernels.shift_rules import ShiftRule


@hashed_once
@dataclass(frozen=True)
class Declaration:
    """A kernel's declaration: enough for the emulation to predict its output."""

    algorithm: Algorithm  # how it goes over a row, and where it normalises
    plan: RoundingPlan  # where it rounds
    shift_rule: ShiftRule  # how it chooses a row's shift
    block: Block = BLOCK  # its tile sizes
    tile_named: bool = field(default=False, compare=False)  # whether its label names them: where they were chosen

    @property
    def label(self) -> str:
        """The text that `parse_declaration` reads: `standard` or `rule@plan`, `safe` as its algorithm; then changes."""
        if not self.algorithm.tiled:
            return ",".join([self.algorithm.name, *self.plan.name.split(",")[1:]])
        name, *numbers = self.shift_rule.name.split(",")
        block, order = self.block, self.block.order is not TileOrder.FORWARDS and self.block.order.value
        changes = {"tile": self.tile_named and block, "splits": block.splits, "order": order}
        head = f"{self.algorithm.name if name == 'safe' else name}@{self.plan.name}"
        return ",".join([head, *numbers, *(f"{key}={value}" for key, value in changes.items() if value)])

    @property
    def claimed_as(self) -> str:
        """The name that claims use: the shift rule, unless all kernels of its algorithm have one name."""
        return self.algorithm.claimed_as or self.shift_rule.name


LATER_TILES = (ONE_TILE, Block(64, 64), Block(32, 32))  # that are tried after the declared ones


@cache
def nameless(declaration: Declaration) -> Declaration:
    """Return a declaration without its name: two that do the same are equal."""
    rule = replace(declaration.shift_rule, name="", source="", accepted=True)
    return replace(declaration, plan=replace(declaration.plan, name=""), shift_rule=rule)


def tilings(declaration: Declaration) -> tuple[Declaration, ...]:
    """Return the tiles that a user's kernel may work in, smallest last; if O-bar is rounded they change its bias."""
    if declaration.tile_named or not declaration.algorithm.tiled:
        return (declaration,)
    return tuple(replace(declaration, block=block) for block in (declaration.block, *LATER_TILES))


def is_random(declaration: Declaration) -> bool:
    """Return whether random bits enter O."""
    return declaration.plan.is_stochastic or declaration.shift_rule.dithered


# (inputs on the backend's device, its arithmetic, whether to compute gradients) -> output
Compute = Callable[[AttentionInputs, Arithmetic, bool], AttentionOutput]
# inputs on their device -> None, or in one line what is to be said against running them
Objection = Callable[[AttentionInputs], str | None]


class Blame(enum.Enum):
    """The party that is to blame for a call without an answer."""

    CALL = "call"  # it is none for this kernel, or not here: its cell is skipped
    KERNEL = "kernel"  # the kernel breaks its contract: its cell fails


class CannotRunError(Exception):
    """A call without an answer: the reason, in one line, and who is to blame."""

    def __init__(self, reason: str, blame: Blame = Blame.CALL) -> None:
        super().__init__(reason)
        self.blame = blame


class NotAskedError(CannotRunError):
    """A call that nobody has made: of kernels that run elsewhere some calls alone have been."""


class OutOfBoundsError(IndexError):
    """An access outside the kernel's arguments; one line with the kernel and the argument."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().splitlines() or ["no message"])[0]


def in_one_line(error: BaseException) -> str:
    """Return an error's class and message, all of it in one line."""
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
        """Return None, or why it can't run some inputs on their device, in one line.

        The reason is a feature that it does not take, else the inputs' formats, else something that it lacks.
        """
        untaken = [feature.words for feature in inputs.required_features() if feature not in self.takes]
        if untaken:
            return f"{self.name} takes no {' and no '.join(untaken)}"
        return self.unsuited(inputs.formats) or self.missing_requirement(inputs)


def run_forward(declaration: Declaration, inputs: AttentionInputs, arithmetic: Arithmetic) -> AttentionOutput:
    """Run only the forward pass of `run_declared`: return O and the log-sum-exp."""
    plan = declaration.plan.in_formats(inputs.formats)
    return declaration.algorithm.forward(inputs, plan, declaration.shift_rule, arithmetic, declaration.block)


def run_backward(
    declaration: Declaration,
    inputs: AttentionInputs,
    output: AttentionOutput,
    arithmetic: Arithmetic,
    wanted: Wanted = ALL,
) -> Gradients:
    """Run only the backward pass of `run_declared`, from what the forward pass returned."""
    return backward(inputs, output, declaration.plan.in_formats(inputs.formats), arithmetic, declaration.block, wanted)


def run_declared(
    declaration: Declaration, inputs: AttentionInputs, arithmetic: Arithmetic, gradients: bool, wanted: Wanted = ALL
) -> AttentionOutput:
    """Compute attention exactly as declared, the plan in the inputs' formats: O, the log-sum-exp, gradients.

    The inputs are on the arithmetic's device. The backward pass runs if `gradients` are asked for, and computes delta
    and those that are `wanted`.
    """
    output = run_forward(declaration, inputs, arithmetic)
    backward = run_backward(declaration, inputs, output, arithmetic, wanted) if gradients else None
    return replace(output, gradients=backward, tiles=None)


def delta_alone(kernel: Kernel) -> Kernel:
    """Return a composed kernel whose backward pass ends with delta, its gradients NaN; any other kernel unchanged."""
    if kernel.declaration is None or not kernel.composed:
        return kernel
    return composed(kernel.name, kernel.declaration, DELTA_ALONE)


def composed(name: str, declaration: Declaration, wanted: Wanted = ALL) -> Kernel:
    """Return a kernel that is its declaration, run on whatever arithmetic a backend brings, with these gradients."""
    compute = partial(run_declared, declaration, wanted=wanted)
    return Kernel(name, compute, declaration, takes=declaration.algorithm.takes, composed=True)
