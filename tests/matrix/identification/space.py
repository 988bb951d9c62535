"""The space of plans: what one change makes of a declaration, from what declarations as text may say."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import chain, permutations
from typing import Any

from tiebreak.kernels.algorithms import FLASH_ATTENTION, SPLIT_ATTENTION, STANDARD_ATTENTION, TILED, Algorithm
from tiebreak.kernels.declarations import FORWARD, INPUT, changed, parse_declaration, shortest, values_apart, values_of
from tiebreak.kernels.flash import BLOCK, ONE_TILE, Block
from tiebreak.kernels.formats import FP16, FP32, TF32, Format, Rounding
from tiebreak.kernels.kernel import Declaration
from tiebreak.kernels.operands import folds_scale
from tiebreak.kernels.plans import FUSED, OUTPUT, PLANS, Cast, Exponential, Follows, RoundingPlan, SumOf
from tiebreak.kernels.shift_rules import SHIFT_RULES, ShiftRule
from tiebreak.matrix.candidates import nameless

TILE, RULE, ALGORITHM, FAST = "tile", "rule", "algorithm", "exponential"  # changes that are no field of a plan
SINK = "sink"  # of inputs with a learned sink alone
SLOW = "accumulator"  # tried last, and on few inputs: emulated, it takes ten times as long
#: Keys of a tile; that of queries changes no row.
TILES = (16, 32, 64, 128, 256, 512)
_BLOCKS = (*(Block(size, size) for size in TILES), ONE_TILE)
_ALGORITHMS: tuple[Algorithm, ...] = (STANDARD_ATTENTION, *TILED.values())
_FORWARD = frozenset(FORWARD.values())
_IN_A_ROW = (("qk", "s"), ("exp", "p_bar"), ("pv", "o_bar"))  # keys of casts that follow one another on one value
_8_BITS = frozenset({"q8", "k8", "v8", "p8", "smooth_k"})
_POSITIVE = ("scale", "divisor", "exp", "p_bar", "row_sum")
_FP32 = Cast(FP32)
_MODES = tuple(mode for mode in Rounding if mode is not Rounding.STOCHASTIC)
_SAFE = SHIFT_RULES["safe"]


@dataclass(frozen=True)
class Change:
    """One point of a plan, and what it is there."""

    key: str  # as --plan has it, or what it is that no field of a plan says
    value: str  # the same; behind a comma, another point and what it is there

    def __str__(self) -> str:
        """As --plan has it, where it does."""
        return f"{self.key}={self.value}"


@cache
def forward_alone(declaration: Declaration, inputs: Format) -> Declaration:
    """What a declaration does forward: two that do the same are equal.

    What the algorithm makes nothing of is `fused`'s, and so is the backward pass.

    Args:
        declaration: of any name.
        inputs: format of the call.
    """
    algorithm, plan = declaration.algorithm, declaration.plan
    dead = {field.name for field in fields(plan)} - _FORWARD - {"name"} | algorithm.unused | {SINK}
    if folds_scale(plan):
        dead |= {"scale", "divisor"}
    elif plan.divisor.narrows:
        dead |= {"scale"}
    if not _clamps(plan):
        same = plan.row_sum_of is SumOf.CLAMPED or _fits(plan.exp, plan.p_bar, inputs)
        dead |= {"row_sum_of"} if same else set()  # l sums the same from before and after P's cast
        dead |= {"offset"} if _range(plan, inputs) >= FP32.exponent_bits else set()  # a power of two is divided out
    plan = replace(plan, **{field: getattr(FUSED, field) for field in dead})
    sided: dict[str, Any] = {field: _sided(getattr(plan, field)) for field in _POSITIVE}
    plan = _cast_once(declaration, replace(plan, **sided), inputs)
    rule = declaration.shift_rule if algorithm is FLASH_ATTENTION else _SAFE
    if rule.lag and declaration.block.keys == ONE_TILE.keys:
        rule = _SAFE  # it lags behind an earlier tile, and there is none
    block = Block(declaration.block.keys, declaration.block.keys) if algorithm.tiled else BLOCK
    return nameless(Declaration(algorithm, plan, rule, block, tile_named=algorithm.tiled))


def _cast_once(declaration: Declaration, plan: RoundingPlan, inputs: Format) -> RoundingPlan:
    """A plan that casts O once where no step lies between O-bar's cast and O's: what they cast is normalised."""
    one_tile = declaration.block.keys == ONE_TILE.keys
    weighed = not one_tile or plan.exponential.correction  # a fast exponential's weight of one split is not 1
    normalised = "row_sum_of" in declaration.algorithm.unused
    if not normalised and (declaration.algorithm is not SPLIT_ATTENTION or weighed):
        return plan
    if not all(_fits(plan.o_bar, o, inputs) for o in (plan.o, FUSED.o)):
        return plan
    once = one_tile or not declaration.algorithm.tiled
    if once and plan.o_bar.follows is not None and not plan.o_bar.every:
        return replace(plan, o_bar=_FP32, o=replace(plan.o_bar, follows=Follows.OUTPUT))
    return replace(plan, o=FUSED.o)


def _clamps(plan: RoundingPlan) -> bool:
    return plan.p8 is not None or plan.p_bar.saturates


def _range(plan: RoundingPlan, inputs: Format) -> int:
    """Bits of the exponent that P-bar has."""
    return _fmt(plan.p_bar, inputs).exponent_bits


def _fmt(cast: Cast, inputs: Format) -> Format:
    return inputs if cast.follows is not None else cast.fmt


def _fits(first: Cast, then: Cast, inputs: Format) -> bool:
    """Whether a second cast leaves what the first has cast as it is."""
    before, after = _fmt(first, inputs), _fmt(then, inputs)
    return before.exponent_bits <= after.exponent_bits and before.mantissa_bits <= after.mantissa_bits


def _sided(cast: Cast) -> Cast:
    """Of what is never negative: down is toward zero."""
    return replace(cast, rounding=Rounding.TOWARD_ZERO) if cast.rounding is Rounding.DOWN else cast


def text(declaration: Declaration) -> str:
    """As --plan takes it."""
    return named(declaration).label


def named(declaration: Declaration) -> Declaration:
    """With the shortest name, and the shift rule that it had before it lost its own."""
    rule = next(rule for rule in SHIFT_RULES.values() if _same_rule(declaration, rule))
    return shortest(replace(declaration, shift_rule=rule))


def points_apart(one: Declaration, other: Declaration) -> set[str]:
    """The keys of what two declarations differ in, as changes have them."""
    apart = {key for key, field in FORWARD.items() if getattr(one.plan, field) != getattr(other.plan, field)}
    if one.plan.exponential.correction != other.plan.exponential.correction:
        apart.add(FAST)
    pairs = {
        ALGORITHM: (one.algorithm.name, other.algorithm.name),
        RULE: (one.shift_rule, other.shift_rule),
        TILE: (one.block.keys, other.block.keys),
    }
    return apart | {key for key, (ours, theirs) in pairs.items() if ours != theirs}


def plainness(declaration: Declaration) -> tuple[int, bool, bool, int]:
    """Of two that nothing tells apart, the plainer one has the smaller."""
    label, usual = text(declaration), (FLASH_ATTENTION, STANDARD_ATTENTION)
    fixed = declaration.shift_rule != nameless(replace(declaration, shift_rule=_SAFE)).shift_rule
    return label.count(",") + label.count(":"), fixed, declaration.algorithm not in usual, len(label)


def _same_rule(declaration: Declaration, rule: ShiftRule) -> bool:
    return nameless(replace(declaration, shift_rule=rule)).shift_rule == nameless(declaration).shift_rule


def changes(declaration: Declaration, inputs: Format) -> Iterator[tuple[Change, Declaration]]:
    """Every declaration that differs in one point, each once.

    Args:
        declaration: as `forward_alone` gives it.
        inputs: format of the call.
    """
    seen = {forward_alone(declaration, inputs)}
    for change, other in _all_changes(declaration, inputs):
        plain = forward_alone(other, inputs)
        if plain not in seen and (not plain.plan.exponential.correction or _has_text(plain)):
            seen.add(plain)
            yield change, plain


@cache
def _has_text(declaration: Declaration) -> bool:
    """Whether --plan can say it: a fast exponential goes by the names of plans that have one."""
    try:
        text(declaration)
    except ValueError:
        return False
    return True


def moves(declaration: Declaration, inputs: Format) -> Iterator[tuple[Change, Declaration]]:
    """As `changes`, two at once, where one alone leads nowhere, or may look like the other.

    One cast at another point; one at the point before, and another in its place; of P, before or after l sums it; of O,
    before or after it is returned; base two, contracted; a narrower range of P-bar, an offset.
    """
    for other in _moves(declaration, inputs):
        points = values_apart(declaration.plan, other.plan).items()
        if len(points) < 2:  # what is put in its place does the same
            continue
        first, *others = points
        yield Change(first[0], ",".join([first[1], *(f"{key}={value}" for key, value in others)])), other


def _moves(declaration: Declaration, inputs: Format) -> Iterator[Declaration]:
    if not declaration.plan.contracted and not declaration.plan.exponential.base_two:
        with suppress(ValueError):  # two points exclude one another
            yield forward_alone(changed(changed(declaration, "base", "2"), "contract", "yes"), inputs)
    plan, rounded = declaration.plan, SumOf.ROUNDED
    if "row_sum_of" not in declaration.algorithm.unused:
        for mode in _MODES if plan.exp.narrows else ():
            cast = replace(plan.exp, rounding=mode)
            yield from _recast(declaration, inputs, {"exp": _FP32, "p_bar": cast, "row_sum_of": rounded})
        if plan.p_bar.narrows and plan.row_sum_of is rounded:
            casts = {"exp": plan.p_bar, "p_bar": _FP32, "row_sum_of": SumOf.UNROUNDED}
            yield from _recast(declaration, inputs, casts)
    if plan.o.rounding in _MODES and plan.o.rounding is not OUTPUT.rounding:
        product = replace(plan.o, follows=Follows.OPERANDS)
        yield from _recast(declaration, inputs, {"o_bar": product, "o": OUTPUT})
    if plan.o_bar.follows is not None and not plan.o_bar.every:
        yield from _recast(declaration, inputs, {"o_bar": _FP32, "o": replace(plan.o_bar, follows=Follows.OUTPUT)})
    yield from _ranged(declaration, inputs)
    keys = [key for key, field in FORWARD.items() if isinstance(getattr(plan, field), Cast) and key != "o"]
    for key, other in permutations(keys, 2):
        cast = getattr(declaration.plan, FORWARD[key])
        if cast.narrows and FORWARD[other] not in declaration.algorithm.unused:
            yield from _recast(declaration, inputs, {FORWARD[key]: _FP32, FORWARD[other]: cast})
    for first, second in _IN_A_ROW:
        cast = getattr(declaration.plan, FORWARD[second])
        if cast.narrows and FORWARD[first] not in declaration.algorithm.unused:
            for value in values_of(second, inputs):
                with suppress(ValueError):
                    yield from _recast(changed(declaration, second, value), inputs, {FORWARD[first]: cast})


def _ranged(declaration: Declaration, inputs: Format) -> Iterator[Declaration]:
    """P-bar in fp16 in place of tf32: it has as many bits, and where there is an offset the range too."""
    cast = declaration.plan.p_bar
    for offset in values_of("offset", inputs) if cast.fmt == TF32 else ():
        with suppress(ValueError):  # two points exclude one another
            yield from _recast(changed(declaration, "offset", offset), inputs, {"p_bar": replace(cast, fmt=FP16)})


def hiding(inputs: Format) -> Iterator[Declaration]:
    """Every algorithm and shift rule, every cast of S, q scaled or not: where one is wrong, nothing else shows."""
    starts = [parse_declaration(f"flash@fused{q}") for q in ("", ",q=input,base=2", ",q=fp16,base=2")]
    return _cast_at("s", (other for start in starts for _, other in ruled(start, inputs)), inputs)


def hidden_by(
    declaration: Declaration, inputs: Format, known: Iterable[Declaration]
) -> Iterator[Iterator[Declaration]]:
    """Group after group of what may be wrong at once so that nothing else shows.

    Casts of q and of S; of S and of S - m, with every algorithm and shift rule; known plans with each of these.

    Args:
        declaration: that shows nothing of a kernel's.
        inputs: format of the call.
        known: plans.
    """
    yield _cast_at("s", _cast_at("q", [declaration], inputs), inputs)
    flash = replace(declaration, algorithm=FLASH_ATTENTION)  # which alone has every shift rule
    yield _cast_at("shifted", _cast_at("s", (other for _, other in ruled(flash, inputs)), inputs), inputs)
    yield (forward_alone(other, inputs) for plan in known for _, other in ruled(plan, inputs))


def scaled(declaration: Declaration, inputs: Format) -> Iterator[Declaration]:
    """Every cast of q or S, and of the scale or the divisor: only where the scale is inexact do they show, together."""
    for key in ("scale", "divisor"):
        for value in values_of(key, inputs):
            with suppress(ValueError):  # two points exclude one another
                plain = declaration if key == "divisor" else changed(declaration, "divisor", FP32.name)
                other = changed(plain, key, value)
                yield from (each for change, each in changes(other, inputs) if change.key in ("q", "s"))


def added_up(declaration: Declaration, inputs: Format) -> Iterator[Declaration]:
    """Every algorithm and tile, and every cast of P V or O-bar: which sums are cast depends on the tiles."""
    plain = replace(declaration, plan=replace(declaration.plan, pv=_FP32, o_bar=_FP32))
    algorithms = (other for change, other in changes(plain, inputs) if change.key == ALGORITHM)
    for algorithm in chain([plain], algorithms):
        tiles = (other for change, other in changes(algorithm, inputs) if change.key == TILE)
        for other in chain([algorithm], tiles):
            yield from (each for change, each in changes(other, inputs) if change.key in ("pv", "o_bar"))


def _cast_at(key: str, declarations: Iterable[Declaration], inputs: Format) -> Iterator[Declaration]:
    """Each with every cast to the inputs' format at a point, and none."""
    casts = [value for value in values_of(key, inputs) if value.partition(":")[0] in (INPUT, FP32.name)]
    for declaration in declarations:
        for value in casts:
            with suppress(ValueError):  # two points exclude one another
                yield forward_alone(changed(declaration, key, value), inputs)


def ruled(declaration: Declaration, inputs: Format) -> Iterator[tuple[Change, Declaration]]:
    """It with every shift rule and algorithm, its own first."""
    others = (each for each in changes(declaration, inputs) if each[0].key in (RULE, ALGORITHM))
    return chain([(Change(RULE, declaration.shift_rule.name), declaration)], others)


def without_one(declaration: Declaration, inputs: Format) -> Iterator[Declaration]:
    """It in fp32 at one of the points at which it is not, or without a shift rule, contraction or base of its own."""
    plan, plain = declaration.plan, PLANS["fp32_inside"]
    for field in sorted(_FORWARD - {"accumulator"}):
        if getattr(plan, field) != getattr(plain, field):
            yield from _recast(declaration, inputs, {field: getattr(plain, field)})
    yield forward_alone(replace(declaration, shift_rule=_SAFE), inputs)


def _recast(declaration: Declaration, inputs: Format, casts: dict[str, Any]) -> Iterator[Declaration]:
    """With other casts by field, unless two points exclude one another."""
    with suppress(ValueError):
        yield forward_alone(replace(declaration, plan=replace(declaration.plan, **casts)), inputs)


def _all_changes(declaration: Declaration, inputs: Format) -> Iterator[tuple[Change, Declaration]]:
    plan = declaration.plan
    tiled = declaration.algorithm.tiled
    for algorithm in _ALGORITHMS:
        for block in (declaration.block,) if tiled or not algorithm.tiled else _BLOCKS:
            value = algorithm.name if tiled or not algorithm.tiled else f"{algorithm.name},{TILE}={block}"
            yield Change(ALGORITHM, value), replace(declaration, algorithm=algorithm, block=block)
    # Lagging alone is as little to be seen as the algorithm is: both at once.
    for rule in (rule for rule in SHIFT_RULES.values() if rule.lag and declaration.algorithm is not FLASH_ATTENTION):
        for block in (declaration.block,) if tiled else _BLOCKS:
            value = rule.name if tiled else f"{rule.name},{TILE}={block}"
            yield (
                Change(ALGORITHM, value),
                replace(declaration, algorithm=FLASH_ATTENTION, shift_rule=rule, block=block),
            )
    for block in _BLOCKS:
        yield Change(TILE, str(block)), replace(declaration, block=block)
    for rule in SHIFT_RULES.values():
        yield Change(RULE, rule.name), replace(declaration, shift_rule=rule)
    for key, field in FORWARD.items():
        if field in declaration.algorithm.unused | {SINK} or (field in _8_BITS and not plan.quantizes):
            continue
        for value in values_of(key, inputs):
            with suppress(ValueError):
                yield Change(key, value), changed(declaration, key, value)
    if not plan.contracted:
        exponential = Exponential() if plan.exponential.correction else _fast()
        name = "fast" if exponential.correction else "exact"
        yield Change(FAST, name), replace(declaration, plan=replace(plan, exponential=exponential))


@cache
def _fast() -> Exponential:
    """The fast one that is known, as it is on this machine."""
    return parse_declaration("flash@fused_fast_exp").plan.exponential
