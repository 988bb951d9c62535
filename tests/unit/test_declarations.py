"""Declarations as text: what --plan takes is what tables print, and a slip is told in one line."""

import random
from contextlib import suppress
from dataclasses import fields, replace

import pytest

from tiebreak.backends.backend import CPU
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.formats import BF16, Rounding
from tiebreak.kernels.kernel import Declaration
from tiebreak.kernels.plans import (
    ALL_BF16,
    BACKWARD_POINTS,
    FUSED,
    FUSED_CONTRACTED,
    PAPER,
    PLANS,
    STANDARD,
    Cast,
    Exponential,
    Follows,
    RoundingPlan,
    SumOf,
)
from tiebreak.kernels.roster import DEFAULT_ROSTER, composed_kernel, rule_names

pytestmark = pytest.mark.quick

LOW = PAPER.p_bar
FORWARD = ("scale", "divisor", "log2_e", "q", "k", "qk", "s", "shifted", "exp", "p_bar", "pv", "o_bar", "l", "o")
POINTS = (*FORWARD, *BACKWARD_POINTS)
FORMATS = ("input", "fp32", "bf16", "fp16", "tf32", "fp8_e5m2", "E5M7")
# Changes of which a text has one or none.
ONE_OF = (
    ("l_from=rounded", "l_from=clamped", "l_from=unrounded"),
    ("base=2", "base=e"),
    ("offset=8", "p8=fp8_e5m2/micro32", "v8=fp8_e4m3/tensor", "smooth_k=yes"),
    ("k8=int8/block64:rtna", "q8=int8/block128:rtna+scale", "q8=none"),
    ("contract=yes", "contract=no"),
    ("accumulator=bfmmla", "accumulator=exact"),
    ("tile=one", "tile=7", "tile=64x32", "tile=128"),
    ("splits=2", "order=backwards", "order=prefix", "order=turns"),
    ("shift=-1", "shift=ln1.5", "lag=2"),
)
MODES = ("", ":rtna", ":rtz", ":up", ":down", ":sat", ":rtna:sat")


def changed(plan: RoundingPlan, **changes: object) -> RoundingPlan:
    return replace(plan, name="", **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("flash@fused,s=input", changed(FUSED, s=LOW)),
        ("standard,qk=input,s=input", changed(STANDARD, qk=LOW, s=LOW)),
        ("fused,base=2,contract=yes", changed(FUSED_CONTRACTED)),
        ("fused_contracted,contract=no", changed(FUSED, exponential=Exponential(base_two=True))),
        ("all_bf16,shifted=input,l_from=rounded", changed(ALL_BF16, shifted=LOW, row_sum_of=SumOf.ROUNDED)),
        ("fused,o=input:rtna", changed(FUSED, o=replace(FUSED.o, rounding=Rounding.RTNA))),
        ("standard,o_bar=input/512", changed(STANDARD, o_bar=replace(LOW, every=512))),
        ("paper,accumulator=bfmmla", changed(PLANS["paper_bfmmla"])),
        ("fused,o=input:stochastic", changed(FUSED, o=Cast(BF16, Rounding.STOCHASTIC, Follows.OUTPUT))),
    ],
)
def test_a_change_is_made_where_its_key_says(text: str, plan: RoundingPlan) -> None:
    assert changed(parse_declaration(text).plan) == plan


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("fair", "dithered@fused_stochastic"),
        ("fused,tile=64x32", "flash@fused,tile=64x32"),  # queries by keys
        ("fused,tile=one", "flash@fused,tile=one"),
        ("fused,order=prefix,tile=64,shift=ln1.5", "flash@fused,shift=ln1.5,tile=64,order=prefix"),
        ("split@fused,order=turns,splits=4", "split@fused,splits=4,order=turns"),
        ("lazy@paper,lag=2,o_bar=input:kept,l=bf16:once", "lazy@paper,o_bar=input:kept,l=bf16:once,lag=2"),
        (" flash@fused , tile = 64 , base=2,s=input ", "flash@fused,s=input,base=2,tile=64"),
        ("fused,s=fp32,l_from=unrounded,base=e,o=input:rne", "flash@fused"),  # which it is already
    ],
)
def test_there_is_one_text_for_each(text: str, label: str) -> None:
    assert parse_declaration(text).label == label


def _random_text(draw: random.Random) -> str:
    plans = [plan for plan in PLANS if plan != STANDARD.name]
    head = draw.choice([f"{rule}@{plan}" for rule in rule_names() for plan in plans] + ["standard"] * len(plans))
    changes = [f"{point}={draw.choice(FORMATS)}" for point in draw.sample(POINTS, 3)]
    changes = [text if text.endswith("fp32") else text + draw.choice(MODES) for text in changes]
    for group in ONE_OF:
        changes += draw.sample(group, draw.randint(0, 1))
    draw.shuffle(changes)
    return ",".join([head, *changes])


def test_every_label_is_taken_back_and_is_that_of_one_declaration() -> None:
    draw = random.Random(1)
    declared = [kernel.declaration for kernel in (*map(composed_kernel, DEFAULT_ROSTER), *CPU.vendor_kernels())]
    for _ in range(500):
        with suppress(ValueError):
            declared.append(parse_declaration(_random_text(draw)))
    assert len(declared) > 270
    by_label: dict[str, Declaration] = {}
    for declaration in declared:
        assert declaration is not None
        again = parse_declaration(declaration.label)
        assert again == declaration == by_label.setdefault(declaration.label, declaration)
        assert (again.label, again.tile_named) == (declaration.label, declaration.tile_named)


def test_a_key_changes_the_rounding_point_that_it_names() -> None:
    before = parse_declaration("fp32_inside").plan
    for point in POINTS:
        after = parse_declaration(f"fp32_inside,{point}=fp16").plan
        changes = {name for name, cast in after.casts() if cast != getattr(before, name)}
        assert changes == {{"l": "row_sum"}.get(point, point)}


def test_every_field_of_a_plan_has_a_key_or_is_no_matter_of_a_text() -> None:
    untold = {"name", "delta_from", "shift_attached"}  # of which named plans have each that there is
    of_no_plan = {"tile", "splits", "order", "shift", "lag"}
    named = {"l": "row_sum", "l_from": "row_sum_of", "base": "exponential", "contract": "contracted"}
    with pytest.raises(ValueError, match="known are") as error:
        parse_declaration("fused,?=1")
    keys = str(error.value).split("known are ")[1].split(" (")[0].split(", ")
    assert {named.get(key, key) for key in keys} - of_no_plan == {field.name for field in fields(RoundingPlan)} - untold


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fusd", "unknown plan 'fusd': did you mean fused or "),
        ("flash@standard", "unknown plan 'flash@standard'"),
        (
            "fused,row_sum=bf16",
            "unknown rounding point 'row_sum': did you mean group_sums?; known are scale, divisor, log2_e, q, k, ",
        ),
        ("flash@fused,splits=2", "splits: flash attention has none"),
        ("split@fused,splits=two", "splits=two: expected how many"),
        ("split@fused,order=prefix", "order=prefix: expected forwards or tiles or turns"),
        ("fused,order=turns", "order=turns: expected forwards or backwards or prefix"),
        ("fused,shift=ln0", "shift=ln0: expected a number such as 2 or ln1.5"),
        ("fused,lag=-1", "lag=-1: expected a number"),
        ("fused,k=input,k8=int8/head", "K is rounded with q, or "),
        ("fused,s=input:once", "s=input:once: l and o_bar alone are running sums"),
        ("fused,s=input/64", "s=input/64: pv, o_bar, l alone are sums"),
        ("fused,pv=input/no", "pv=input/no: expected a number of terms behind /"),
        ("fused,s", "'s' in 'fused,s': expected KEY=VALUE"),
        ("fused,s=bf16,s=fp16", "s is given twice"),
        ("fused,s=bf17", "s=bf17: unknown format 'bf17'"),
        ("fused,s=bf16:odd", "s=bf16:odd: 'odd' is none of the modes rne, rtna, "),
        ("fused,s=fp32:rtna", "s=fp32:rtna: what is fp32 is not rounded"),
        ("fused,p_bar=input:stochastic", "O's cast alone can be stochastic"),
        ("fused,base=10", "base=10: expected 2 or e"),
        ("fused,shifted=bf16,contract=yes", "S - m is never formed"),
        ("fused_fast_exp,contract=yes", "multiplies by log2 e itself"),
        ("fused,tile=0", "at least 1, not 0 x 0"),
        ("fused,tile=64x32x16", "tile=64x32x16: expected a size"),
        ("fused,offset=65", "offset=65: expected a whole number from 0 to 64"),
        ("fused,q8=int8", "q8=int8: 'int8': expected FORMAT/SCALES such as fp8_e4m3/head"),
        ("fused,k8=int8/head8", "k8=int8/head8: scales a head take no size"),
        ("fused,k8=int8/block", "k8=int8/block: scales a block need size"),
        ("fused,k8=int8/head+scale", "q8 alone takes the scale"),
        ("fused,q=bf16,q8=int8/head", "q is rounded, or put into 8 bits with scales, not both"),
        ("standard,offset=8", "offset: standard attention makes nothing of it"),
        ("standard,tile=64", "tile: standard attention has none"),
    ],
)
def test_a_slip_is_told_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the message is looked at next
        parse_declaration(text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
