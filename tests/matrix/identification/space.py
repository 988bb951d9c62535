"""The space of plans: what one change makes of a declaration, from what declarations as text may say."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import permutations
from typing import Any

from tiebreak.kernels.algorithms import FLASH_ATTENTION, SPLIT_ATTENTION, STANDARD_ATTENTION, TILED, Algorithm
from tiebreak.kernels.declarations import (
    FORWARD,
    INPUT,
    changed,
    parse_declaration,
    renamed,
    values_apart,
    values_of,
)
from tiebreak.kernels.flash import BLOCK, ONE_TILE, Block, TileOrder
from tiebreak.kernels.formats import FP16, FP32, TF32, Format, Rounding
from tiebreak.kernels.kernel import Declaration, nameless
from tiebreak.kernels.operands import folds_scale
from tiebreak.kernels.plans import (
    FUSED,
    ISOLATION,
    OUTPUT,
    PLANS,
    STANDARD,
    Cast,
    Exponential,
    Follows,
    RoundingPlan,
    Steps,
    SumOf,
)
from tiebreak.kernels.shift_rules import SHIFT_RULES, with_number

# Changes that are no field of a plan.
TILE, SPLITS, ORDER, RULE, ALGORITHM, FAST = "tile", "splits", "order", "rule", "algorithm", "exponential"
SINK = "sink"  # of inputs with a learned sink alone
SLOW = "accumulator"  # tried last, and on few inputs: emulated, it takes ten times as long
KEYS = (ALGORITHM, TILE, SPLITS, ORDER, RULE, *FORWARD, FAST)
BETWEEN_TILES = frozenset({ALGORITHM, TILE, SPLITS, ORDER, RULE, "l", "o_bar"})  # long rows have more of them
QUICK = frozenset(KEYS) - {SLOW}
#: Keys of a tile; that of queries changes no row.
TILES = (16, 32, 48, 64, 80, 96, 112, 128, 256, 512)
_OF_BLOCKS = {
    TILE: (*map(str, TILES), "one"),
    SPLITS: ("0", "2", "4", "8"),
    ORDER: tuple(order.value for order in TileOrder),
}
_ALGORITHMS: tuple[Algorithm, ...] = (STANDARD_ATTENTION, *TILED.values())
_FORWARD = frozenset(FORWARD.values())
_IN_A_ROW = (("qk", "s"), ("exp", "p_bar"), ("pv", "o_bar"))  # keys of casts that follow one another on one value
_8_BITS = frozenset({"q8", "k8", "v8", "p8", "smooth_k"})
_POSITIVE = ("scale", "divisor", "exp", "p_bar", "row_sum")
_FP32, _INPUT = Cast(FP32), FUSED.p_bar
_MODES = tuple(mode for mode in Rounding if mode is not Rounding.STOCHASTIC)
_SAFE = SHIFT_RULES["safe"]
#: Those with a name, and some at other numbers.
RULES = (
    *SHIFT_RULES.values(),
    *(with_number(_SAFE, "shift", number) for number in ("-2", "-1", "-0.5", "0.5", "ln1.5", "2")),
    *(with_number(SHIFT_RULES["lazy"], "lag", number) for number in ("1", "2", "ln2", "4", "8")),
)
_parsed = cache(parse_declaration)


@dataclass(frozen=True)
class PlanChange:
    """One point of a plan, and the value that it is given."""

    key: str  # as --plan has it, or what it is that no field of a plan says
    value: str  # the same; behind a comma, another point and what it is there


@cache
def forward_alone(declaration: Declaration, inputs: Format) -> Declaration:
    """Return a declaration reduced to its forward pass in a format, the rest as in `fused`: equal ones do the same."""
    algorithm, plan = declaration.algorithm, declaration.plan
    dead = {field.name for field in fields(plan)} - _FORWARD - {"name"} | algorithm.unused | {SINK}
    if folds_scale(plan):
        dead |= {"scale", "divisor"}
    elif plan.divisor.narrows:
        dead |= {"scale"}
    if plan.p8 is None and not plan.p_bar.saturates:
        same = plan.row_sum_of is SumOf.CLAMPED or _keeps_values(plan.exp, plan.p_bar, inputs)
        dead |= {"row_sum_of"} if same else set()  # l sums the same from before and after P's cast
        wide = _fmt(plan.p_bar, inputs).exponent_bits >= FP32.exponent_bits
        dead |= {"offset"} if wide else set()  # a power of two is divided out
    dead |= set() if plan.exponential.base_two else {"log2_e"}
    if plan.scale.narrows and plan.log2_e.narrows:
        plan = replace(plan, log2_e=_INPUT)  # of one rounded number the format is the scale's
    plan = replace(plan, **{field: getattr(FUSED, field) for field in dead})
    block, split = _effective_block(declaration), algorithm is SPLIT_ATTENTION
    for field in ("o_bar", "row_sum"):
        once = split and (field == "o_bar" or not block.splits)
        if _is_one_tile(block) or not algorithm.tiled or once:
            plan = replace(plan, **{field: replace(getattr(plan, field), steps=Steps.EVERY)})
    for field in _POSITIVE:
        if (cast := getattr(plan, field)).rounding is Rounding.DOWN:
            plan = replace(plan, **{field: replace(cast, rounding=Rounding.RTZ)})
    plan = _cast_once(declaration, plan, inputs)
    rule = declaration.shift_rule if algorithm is FLASH_ATTENTION else _SAFE
    if rule.lag and _is_one_tile(block):
        rule = _SAFE  # it lags behind an earlier tile, and there is none
    return nameless(Declaration(algorithm, plan, rule, block, tile_named=algorithm.tiled))


def _effective_block(declaration: Declaration) -> Block:
    """Return a declaration's block without what its algorithm, or a row of one tile, ignores."""
    algorithm, block = declaration.algorithm, declaration.block
    if not algorithm.tiled:
        return BLOCK
    split, order, one_tile = algorithm is SPLIT_ATTENTION, block.order, block.keys == ONE_TILE.keys
    dealt, backwards = order in (TileOrder.TILES, TileOrder.TURNS), order is TileOrder.BACKWARDS and one_tile
    kept = dealt and block.splits if split else not (dealt or backwards)
    return Block(block.keys, block.keys, block.splits if split else 0, order if kept else TileOrder.FORWARDS)


def _is_one_tile(block: Block) -> bool:
    """Return whether a row is one tile."""
    return block.keys == ONE_TILE.keys and not block.splits and block.order is not TileOrder.PREFIX


def _cast_once(declaration: Declaration, plan: RoundingPlan, inputs: Format) -> RoundingPlan:
    """Return a plan that casts O once where no step separates O-bar's cast from O's, and O-bar is normalised."""
    one_tile = _is_one_tile(_effective_block(declaration))
    weighed = not one_tile or plan.exponential.correction  # a fast exponential's weight of one split is not 1
    normalised = "row_sum_of" in declaration.algorithm.unused
    if not normalised and (declaration.algorithm is not SPLIT_ATTENTION or weighed):
        return plan
    if not all(_keeps_values(plan.o_bar, o, inputs) for o in (plan.o, FUSED.o)):
        return plan
    once = one_tile or not declaration.algorithm.tiled
    if once and plan.o_bar.follows is not None and not plan.o_bar.every:
        return replace(plan, o_bar=_FP32, o=replace(plan.o_bar, follows=Follows.OUTPUT))
    return replace(plan, o=FUSED.o)


def _fmt(cast: Cast, inputs: Format) -> Format:
    return inputs if cast.follows is not None else cast.fmt


def _keeps_values(first: Cast, then: Cast, inputs: Format) -> bool:
    """Return whether a second cast leaves what the first has cast as it is."""
    before, after = _fmt(first, inputs), _fmt(then, inputs)
    return before.exponent_bits <= after.exponent_bits and before.mantissa_bits <= after.mantissa_bits


def text(declaration: Declaration) -> str:
    """Return a declaration as --plan takes it."""
    return named(declaration).label


def named(declaration: Declaration) -> Declaration:
    """Return a declaration with its shortest name, and the shift rule that it had before it was made nameless."""
    candidates = (replace(declaration, shift_rule=rule) for rule in RULES)
    return _shortest(next(each for each in candidates if nameless(each).shift_rule == nameless(declaration).shift_rule))


def _shortest(declaration: Declaration) -> Declaration:
    """Return the declaration with the same forward pass and the shortest text; its backward pass is the named plan's.

    ValueError: no text names it.
    """
    rule, algorithm = declaration.shift_rule.name.partition(",")[0], declaration.algorithm
    name = algorithm.name if rule == "safe" or algorithm is not FLASH_ATTENTION else rule
    named = [replace(declaration, plan=renamed(plan, head)) for head in _heads(name if algorithm.tiled else None)
             if (plan := _as_changes_of(head, declaration.plan)) is not None]  # fmt: skip
    if not named:
        raise ValueError("no text names this plan")
    single_changes = {plan.name for plan in ISOLATION}  # of the paper's plan: named for one point, and whole plans else
    return min(named, key=lambda each: (each.plan.name.count(","), each.plan.name.split(",")[0] in single_changes))


@cache
def _heads(name: str | None) -> tuple[RoundingPlan, ...]:
    """Return the plans that a rule, or an algorithm, supports; without a name, standard attention's."""
    plans = []
    for text in (STANDARD.name,) if name is None else (f"{name}@{plan}" for plan in PLANS):
        with suppress(ValueError):
            plans.append(parse_declaration(text).plan)
    return tuple(plans)


def _as_changes_of(named: RoundingPlan, plan: RoundingPlan) -> RoundingPlan | None:
    """Return a plan's forward pass with the backward pass of a named one; None where changes can't express it."""
    theirs, ours = named.exponential, plan.exponential
    if (theirs.correction, theirs.lanes) != (ours.correction, ours.lanes):
        return None
    return replace(named, **{field: getattr(plan, field) for field in FORWARD.values()})


def plainness(declaration: Declaration) -> tuple[int, bool, bool, int]:
    """Return a key by which the plainer of two declarations sorts first."""
    label, usual = text(declaration), (FLASH_ATTENTION, STANDARD_ATTENTION)
    fixed = declaration.shift_rule != nameless(replace(declaration, shift_rule=_SAFE)).shift_rule
    return label.count(",") + label.count(":"), fixed, declaration.algorithm not in usual, len(label)


def changes(
    declaration: Declaration, inputs: Format, keys: Collection[str] = KEYS
) -> Iterator[tuple[PlanChange, Declaration]]:
    """Yield every declaration that differs from a `forward_alone` one in one point of these keys, each once."""
    seen = {forward_alone(declaration, inputs)}
    for key in KEYS:
        for value, other in _alternatives(key, declaration, inputs) if key in keys else ():
            plain = forward_alone(other, inputs)
            if plain not in seen and (not plain.plan.exponential.correction or _has_text(plain)):
                seen.add(plain)
                yield PlanChange(key, value), plain


@cache
def _has_text(declaration: Declaration) -> bool:
    """Return whether --plan can express a declaration: a fast exponential needs a plan that has a name."""
    try:
        text(declaration)
    except ValueError:
        return False
    return True


def _alternatives(key: str, declaration: Declaration, inputs: Format) -> Iterator[tuple[str, Declaration]]:
    """Yield the declaration with every value at one point."""
    plan, algorithm = declaration.plan, declaration.algorithm
    if key == ALGORITHM:
        yield from _other_algorithms(declaration)
    elif key in _OF_BLOCKS:
        for value in _OF_BLOCKS[key]:
            with suppress(ValueError):  # its algorithm makes nothing of it
                yield value, changed(declaration, key, value)
    elif key == RULE:
        yield from ((rule.name, replace(declaration, shift_rule=rule)) for rule in RULES)
    elif key == FAST and not plan.contracted:
        # The fast one that is known, as it is on this machine.
        fast, exact = _parsed("flash@fused_fast_exp").plan.exponential, Exponential()
        name, exponential = ("exact", exact) if plan.exponential.correction else ("fast", fast)
        yield name, replace(declaration, plan=replace(plan, exponential=exponential))
    elif key in FORWARD:
        field = FORWARD[key]
        if field in algorithm.unused | {SINK} or (field in _8_BITS and not plan.quantizes):
            return
        for value in values_of(key, inputs):
            with suppress(ValueError):  # two points exclude one another
                yield value, changed(declaration, key, value)


def _other_algorithms(declaration: Declaration) -> Iterator[tuple[str, Declaration]]:
    """Yield every algorithm, in every tile where there was none; a rule that lags only together with its algorithm."""
    others = [(each.name, each, declaration.shift_rule) for each in _ALGORITHMS]
    if declaration.algorithm is not FLASH_ATTENTION:
        others += [(rule.name, FLASH_ATTENTION, rule) for rule in SHIFT_RULES.values() if rule.lag]
    for name, algorithm, rule in others:
        tiles_appear = algorithm.tiled and not declaration.algorithm.tiled
        other = replace(declaration, algorithm=algorithm, shift_rule=rule)
        for tile in _OF_BLOCKS[TILE] if tiles_appear else (None,):
            yield (name, other) if tile is None else (f"{name},{TILE}={tile}", changed(other, TILE, tile))


def combined(
    declarations: Iterable[Declaration], inputs: Format, *stages: Collection[str], usual: bool = False
) -> Iterator[Declaration]:
    """Yield plans with up to one change of each stage, whose keys are points that show only together.

    With `usual`, no new cast to a format other than fp32 and the inputs'.
    """
    if not stages:
        yield from (forward_alone(declaration, inputs) for declaration in declarations)
        return
    *earlier, last = stages
    for declaration in combined(declarations, inputs, *earlier, usual=usual):
        yield declaration
        for change, other in changes(declaration, inputs, last):
            if not usual or change.key not in FORWARD or change.value.partition(":")[0] in (INPUT, FP32.name):
                yield other


def without(declaration: Declaration, inputs: Format, *keys: str) -> Declaration:
    """Return a declaration with some points in fp32, or as `fp32_inside` has them."""
    plain = {FORWARD[key]: getattr(PLANS["fp32_inside"], FORWARD[key]) for key in keys}
    return forward_alone(replace(declaration, plan=replace(declaration.plan, **plain)), inputs)


def without_one(declaration: Declaration, inputs: Format) -> Iterator[Declaration]:
    """Yield the declaration with one narrow point in fp32, or without its shift rule, contraction or base."""
    for key in sorted(FORWARD):
        with suppress(ValueError):  # two points exclude one another
            if key != SLOW and (other := without(declaration, inputs, key)) != declaration:
                yield other
    yield forward_alone(replace(declaration, shift_rule=_SAFE), inputs)


def moves(declaration: Declaration, inputs: Format) -> Iterator[tuple[PlanChange, Declaration]]:
    """Yield changes of two points at once, where one alone leads nowhere, or both may look like the plan."""
    for casts in _joint_changes(declaration, inputs):
        if declaration.algorithm.unused & casts.keys():
            continue
        with suppress(ValueError):  # two points exclude one another
            other = forward_alone(replace(declaration, plan=replace(declaration.plan, **casts)), inputs)
            points = values_apart(declaration.plan, other.plan).items()
            if len(points) > 1:  # else what is put in its place does the same
                first, *others = points
                yield PlanChange(first[0], ",".join([first[1], *(f"{key}={value}" for key, value in others)])), other


def _joint_changes(declaration: Declaration, inputs: Format) -> Iterator[dict[str, Any]]:
    """Yield changes that go together, as new values by field."""
    plan, rounded = declaration.plan, SumOf.ROUNDED
    if not plan.exponential.base_two:
        yield {"exponential": replace(plan.exponential, base_two=True), "contracted": True}
    # The cast of P, before or after l sums it.
    for mode in _MODES if plan.exp.narrows else ():
        yield {"exp": _FP32, "p_bar": replace(plan.exp, rounding=mode), "row_sum_of": rounded}
    if plan.p_bar.narrows and plan.row_sum_of is rounded:
        yield {"exp": plan.p_bar, "p_bar": _FP32, "row_sum_of": SumOf.UNROUNDED}
    # Q K^T's own factor, or its root in both.
    yield {"q": FUSED.p_bar, "k": _FP32 if plan.k.narrows else FUSED.p_bar}
    # The cast of O, before or after it is returned.
    if plan.o.rounding in _MODES and plan.o.rounding is not OUTPUT.rounding:
        yield {"o_bar": replace(plan.o, follows=Follows.OPERANDS), "o": OUTPUT}
    if plan.o_bar.follows is not None and not plan.o_bar.every:
        yield {"o_bar": _FP32, "o": replace(plan.o_bar, follows=Follows.OUTPUT)}
    # fp16 has as many bits as tf32, and where there is an offset the range too.
    for offset in values_of("offset", inputs) if plan.p_bar.fmt == TF32 else ():
        yield {"offset": int(offset), "p_bar": replace(plan.p_bar, fmt=FP16)}
    # One cast at another point, or at the point before, and another in its place.
    points = [field for field in FORWARD.values() if isinstance(getattr(plan, field), Cast) and field != "o"]
    for field, other in permutations(points, 2):
        if (cast := getattr(plan, field)).narrows:
            yield {field: _FP32, other: cast}
    for before, field in _IN_A_ROW:
        if (cast := getattr(plan, field)).narrows:
            others = (other.plan for _, other in changes(declaration, inputs, {field}))
            yield from ({before: cast, field: getattr(other, field)} for other in others)
