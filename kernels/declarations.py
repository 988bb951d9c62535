"""Declarations as text: `flash@fused,s=input,base=2,tile=64`, the way tables print them and --plan takes them."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cache

from tiebreak.kernels.algorithms import FLASH_ATTENTION, SPLIT_ATTENTION, TILED
from tiebreak.kernels.flash import ONE_TILE, TileOrder
from tiebreak.kernels.formats import BF16, FP16, FP32, TF32, Format, Rounding, parse_format
from tiebreak.kernels.kernel import Declaration
from tiebreak.kernels.plans import (
    BACKWARD_POINTS,
    PLANS,
    STANDARD,
    Accumulator,
    Cast,
    Exponential,
    Follows,
    RoundingPlan,
    SinkEntry,
    Steps,
    SumOf,
)
from tiebreak.kernels.quantization import Quantization, parse_quantization
from tiebreak.kernels.roster import composed_kernel, rule_names
from tiebreak.kernels.sdpa import cpu_sdpa_flash, sdpa_math
from tiebreak.kernels.shift_rules import NUMBERS, with_number

INPUT = "input"  # the format of the call, whichever it is; any other name is that very format
_LARGEST_OFFSET = 64  # P-bar up to 2^64 leaves fp32 room for its sum
_TILE, _SPLITS, _ORDER, _NONE, _SATURATES = "tile", "splits", "order", "none", "sat"
_OUTPUTS, _OF_SUMS, _RUNNING = ("o", "gradients"), ("pv", "o_bar", "l"), ("l", "o_bar")
_MODES = {rounding.value: rounding for rounding in Rounding}
_STEPS = (Steps.KEPT.value, Steps.ONCE.value)
_OF_FLASH = (TileOrder.FORWARDS, TileOrder.BACKWARDS, TileOrder.PREFIX)
_OF_SPLIT = (TileOrder.FORWARDS, TileOrder.TILES, TileOrder.TURNS)
# Changes that are of no plan, and whose they are.
_TAKEN_BY = {
    **dict.fromkeys(NUMBERS, (FLASH_ATTENTION,)),
    **dict.fromkeys((_TILE, _ORDER), tuple(TILED.values())),
    _SPLITS: (SPLIT_ATTENTION,),
}

# The casts of a plan that a change may name, in the order in which they come to be rounded, then its other fields.
_CASTS = (
    *("scale", "divisor", "log2_e", "q", "k", "qk", "s", "shifted", "exp", "p_bar", "pv", "o_bar", "row_sum", "o"),
    *BACKWARD_POINTS,
)
_QUANTIZED = ("q8", "k8", "v8", "p8")
_OTHERS = ("row_sum_of", "exponential", "contracted", "offset", *_QUANTIZED, "smooth_k", "sink", "accumulator")
# Fields that have another name in a text.
_KEYS = {"row_sum": "l", "row_sum_of": "l_from", "exponential": "base", "contracted": "contract"}
_FIELDS = {_KEYS.get(field, field): field for field in (*_CASTS, *_OTHERS)}
_KNOWN = f"known are {', '.join((*_FIELDS, *_TAKEN_BY))}"
#: Keys of what the forward pass is made of, and their fields.
FORWARD = {key: field for key, field in _FIELDS.items() if field not in BACKWARD_POINTS}
_YES = {"yes": True, "no": False}
# Fields whose values are words, by their keys.
_WORDS: Mapping[str, Mapping[str, object]] = {
    "l_from": {of.value: of for of in SumOf},
    "contract": _YES,
    "smooth_k": _YES,
    "sink": {entry.value: entry for entry in SinkEntry},
    "accumulator": {accumulator.name.lower(): accumulator for accumulator in Accumulator},
    "base": {"2": True, "e": False},
}


def parse_declaration(text: str) -> Declaration:
    """Return the declaration that a text names: a kernel or a plan, and changes separated by commas.

    The first part is `standard`, `fair`, `RULE@PLAN`, `flash_1@PLAN`, `split@PLAN`, or a plan alone, for plain flash
    attention at it. Each change is `KEY=VALUE`:

    - a rounding point and its format, `input` (that of the call) or a very format, with `:` and a mode if it is not to
      even (`o=bf16:rtna`) or `:sat` if it saturates, `/512` where the sum of a product or l is rounded every 512 terms;
      `l` and `o_bar` are cast at every step of a tile, or `:kept`, all but what the tile adds, or `:once`, their sum
    - `l_from=rounded`, `clamped` or `unrounded`; `base=2` or `e`, of the exponential; `contract=yes` or `no`, of its
      argument; `offset=8`, a power of two that P-bar is multiplied by
    - `q8`, `k8`, `v8` and `p8`, 8 bits with scales (`k8=int8/block64:rtna`, or `none`); `smooth_k=yes`
    - `sink=first`, `maximum`, `last` or `afterwards`, where a learned sink enters a row
    - `accumulator=bfmmla`, how products are added up
    - `shift=-1` or `shift=ln1.5`, added to the shift; `lag=2`, how far a shift may stay behind
    - `tile=64`, `tile=64x32` (queries by keys) or `tile=one`; without it, the kernel's own tiles are unknown
    - `splits=2`, of as many keys with separate tiles, or by `order=tiles` or `turns` of whole tiles
    - `order=backwards`, from the last tile on, or `prefix`, in tiles that begin anew where the queries' own keys do

    Its label names what differs from the first part, in a fixed order. ValueError, one line: a name, key or value
    is unknown, or the algorithm makes nothing of it.
    """
    head, *changes = (part.strip() for part in text.split(","))
    named = declaration = _declaration_of(head)
    values: dict[str, str] = {}
    for change in changes:
        key, equals, value = (part.strip() for part in change.partition("="))
        if not equals:
            raise ValueError(f"{change!r} in {text!r}: expected KEY=VALUE, such as s=input; {_KNOWN}")
        if key in values:
            raise ValueError(f"{key} is given twice in {text!r}")
        values[key] = value
    # Contraction and a rounded S - m exclude one another, and so do two roundings of q: what goes goes first.
    turns = {("contract", "no"): -1, ("q8", _NONE): -1, ("q", FP32.name): -1, ("contract", "yes"): 1}
    for key, value in sorted(values.items(), key=lambda change: turns.get(change, 0)):
        try:
            declaration = changed(declaration, key, value)
        except ValueError as error:
            raise ValueError(f"{error} (in {text!r})") from None
    return replace(declaration, plan=renamed(declaration.plan, named.plan))


@cache
def _declaration_of(head: str) -> Declaration:
    """Return the declaration of a kernel, or of plain flash attention at a plan."""
    name = head if "@" in head or head not in PLANS or head == STANDARD.name else f"{FLASH_ATTENTION.name}@{head}"
    for kernel in (cpu_sdpa_flash(), sdpa_math()):  # which know their own tiles and exponential
        if kernel.declaration is not None and kernel.declaration.label == name:
            return kernel.declaration
    try:
        kernel = composed_kernel(name)
    except ValueError:
        names = (*PLANS, "fair", *(f"{rule}@{plan}" for rule in rule_names() for plan in PLANS))
        otherwise = ": `tiebreak list plans` names them, and the rules that come before @ and a plan"
        raise ValueError(f"unknown plan {head!r}{_nearest(head, names) or otherwise}") from None
    assert kernel.declaration is not None
    return kernel.declaration


@cache
def values_of(key: str, inputs: Format) -> tuple[str, ...]:
    """Return every value that `changed` accepts for a key of `FORWARD`; of a cast, the formats in use and all modes.

    `inputs` is the call's format, which casts name by its role. Values with a size, such as the rows that share a
    scale, are those of plans with a name.
    """
    field = FORWARD[key]
    named = dict.fromkeys(_text(key, getattr(plan, field)) for plan in PLANS.values())
    if key in _WORDS:
        return tuple(_WORDS[key])
    if field not in _CASTS:
        return tuple(named)
    modes = [mode for mode in _MODES if mode != Rounding.STOCHASTIC.value or key == "o"]
    modes = [Rounding.RNE.value] if key in ("k", "log2_e") else modes  # else they are many, and nobody has them
    if key in _OUTPUTS:
        formats = [INPUT]  # which a kernel returns
    else:
        formats = [INPUT, *(fmt.name for fmt in (BF16, FP16) if fmt != inputs)]
        formats += [TF32.name] if key == "p_bar" else []  # which products of fp32 numbers may take
    casts = [fmt if mode == Rounding.RNE.value else f"{fmt}:{mode}" for mode in modes for fmt in formats]
    steps = [f"{fmt}:{each}" for each in _STEPS for fmt in formats if key in _RUNNING]
    return tuple(dict.fromkeys([FP32.name, *casts, *steps, *named]))


def changed(declaration: Declaration, key: str, value: str) -> Declaration:
    """Return a declaration with one change, as written after a comma; its name stays.

    Raises ValueError: the key or the value is unknown, the algorithm ignores it, or it excludes another.
    """
    algorithm = declaration.algorithm
    if key in _TAKEN_BY:
        if algorithm not in _TAKEN_BY[key]:
            raise ValueError(f"{key}: {algorithm.name} attention has none")
        if key in NUMBERS:
            return replace(declaration, shift_rule=with_number(declaration.shift_rule, key, value))
        return _in_blocks(declaration, key, value)
    if key not in _FIELDS:
        raise ValueError(f"unknown rounding point {key!r}{_nearest(key, _FIELDS)}; {_KNOWN}")
    field, plan = _FIELDS[key], declaration.plan
    if field in algorithm.unused:
        raise ValueError(f"{key}: {algorithm.name} attention makes nothing of it")
    value_of_key = _value(key, value)
    if key == "base":
        value_of_key = replace(plan.exponential, base_two=bool(value_of_key))
    return replace(declaration, plan=replace(plan, **{field: value_of_key}))  # type: ignore[arg-type]


def _value(key: str, value: str) -> object:
    """Parse the value of a key; of a base, return whether it is two."""
    if key in _WORDS:
        if value not in _WORDS[key]:
            raise ValueError(f"{key}={value}: expected {' or '.join(_WORDS[key])}")
        return _WORDS[key][value]
    if key in _QUANTIZED:
        return _quantization(key, value)
    if key != "offset":
        return _cast(key, value)
    if not value.isascii() or not value.isdigit() or int(value) > _LARGEST_OFFSET:
        raise ValueError(f"{key}={value}: expected a whole number from 0 to {_LARGEST_OFFSET}, a power of two")
    return int(value)


def _cast(key: str, value: str) -> Cast:
    """Parse a cast: a format, a mode unless it is RNE, and where it is repeated; ValueError: one is wrong."""
    value, slash, every = value.partition("/")
    if slash and key not in _OF_SUMS:
        raise ValueError(f"{key}={value}/{every}: {', '.join(_OF_SUMS)} alone are sums")
    if slash and (not every.isdecimal() or int(every) < 1):
        raise ValueError(f"{key}={value}/{every}: expected a number of terms behind /")
    name, *modifiers = value.split(":")
    steps = next((Steps(word) for word in modifiers if word in _STEPS), Steps.EVERY)
    if steps is not Steps.EVERY and key not in _RUNNING:
        raise ValueError(f"{key}={value}: {' and '.join(_RUNNING)} alone are running sums")
    mode = ":".join(word for word in modifiers if word not in (_SATURATES, *_STEPS)) or Rounding.RNE.value
    if mode not in _MODES:
        raise ValueError(f"{key}={value}: {mode!r} is none of the modes {', '.join(_MODES)}")
    rounding = _MODES[mode]
    if rounding is Rounding.STOCHASTIC and key != "o":
        raise ValueError(f"{key}={value}: O's cast alone can be stochastic")
    follows = None
    if name == INPUT:
        fmt, follows = BF16, Follows.OUTPUT if key in _OUTPUTS else Follows.OPERANDS
    else:
        try:
            fmt = parse_format(name)
        except ValueError as error:
            raise ValueError(f"{key}={value}: {error}; {INPUT} is the call's own") from None
    if fmt == FP32 and rounding is not Rounding.RNE:
        raise ValueError(f"{key}={value}: what is fp32 is not rounded")
    return Cast(fmt, rounding, follows, saturates=_SATURATES in modifiers, every=int(every or 0), steps=steps)


def _quantization(key: str, value: str) -> Quantization | None:
    try:
        quantization = None if value == _NONE else parse_quantization(value)
    except ValueError as error:
        raise ValueError(f"{key}={value}: {error}") from None
    if quantization is not None and quantization.takes_scale and key != "q8":
        raise ValueError(f"{key}={value}: q8 alone takes the scale")
    return quantization


def _in_blocks(declaration: Declaration, key: str, value: str) -> Declaration:
    """Return a declaration with another tile, number of splits or order of tiles; ValueError: no such value."""
    block, split = declaration.block, declaration.algorithm is SPLIT_ATTENTION
    orders = [order.value for order in (_OF_SPLIT if split else _OF_FLASH)]
    sizes = [str(ONE_TILE.keys)] if (key, value) == (_TILE, str(ONE_TILE)) else value.split("x")
    if key == _ORDER and value in orders:
        return replace(declaration, block=replace(block, order=TileOrder(value)))
    if key == _ORDER or len(sizes) > (2 if key == _TILE else 1) or not all(s.isascii() and s.isdigit() for s in sizes):
        sized = f"a size such as 64, queries by keys such as 64x32, or {ONE_TILE}"
        expected = {_TILE: sized, _SPLITS: "how many, 0 for a tile each", _ORDER: " or ".join(orders)}
        raise ValueError(f"{key}={value}: expected {expected[key]}")
    if key == _SPLITS:
        return replace(declaration, block=replace(block, splits=int(value)))
    return replace(declaration, block=replace(block, queries=int(sizes[0]), keys=int(sizes[-1])), tile_named=True)


def renamed(plan: RoundingPlan, named: RoundingPlan) -> RoundingPlan:
    """Return the plan, named after the one that it was made from and after its changes."""
    changes = [f",{key}={value}" for key, value in values_apart(named, plan).items()]
    return replace(plan, name="".join([named.name, *changes]))


def values_apart(one: RoundingPlan, other: RoundingPlan) -> dict[str, str]:
    """Return the values of another plan where it differs from one, as text has them, by key."""
    differ = {key: field for key, field in _FIELDS.items() if getattr(one, field) != getattr(other, field)}
    return {key: _text(key, getattr(other, field)) for key, field in differ.items()}


def _text(key: str, value: object) -> str:
    if key in _WORDS:
        meant = value.base_two if isinstance(value, Exponential) else value
        return next(word for word, each in _WORDS[key].items() if each is meant)
    if not isinstance(value, Cast):
        return _NONE if value is None else str(value)
    fmt = value.fmt.name if value.follows is None else INPUT
    mode = "" if value.rounding is Rounding.RNE else f":{value.rounding.value}"
    steps = "" if value.steps is Steps.EVERY else f":{value.steps.value}"
    return f"{fmt}{mode}{steps}{f':{_SATURATES}' if value.saturates else ''}{f'/{value.every}' if value.every else ''}"


def _nearest(name: str, candidates: Iterable[str]) -> str:
    """Return `: did you mean ...?`, or nothing where no known name is similar."""
    matches = get_close_matches(name, list(candidates), n=3, cutoff=0.6)
    return f": did you mean {' or '.join(matches)}?" if matches else ""
