"""Packed products fused into sums, as ptxas 12.9 and 13.0 fuse them for Blackwell's cards: small kernels show how."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from tiebreak.backends.ptx.operands import names_of
from tiebreak.backends.ptx.parsing import Instruction

_SUMS = {"add": ("fma", "fma"), "sub": ("fms", "fnma")}  # of a product that comes first, or second


def fused(instructions: Sequence[Instruction], targets: Collection[int]) -> list[Instruction]:
    """Return instructions, `targets` being the places of labels, with packed sums of products fused.

    A product goes unrounded into a sum of its basic block if it does so wherever it is used; of two the first.
    """
    uses = Counter(name for at in instructions for operand in at.operands[1:] for name in names_of(operand))
    sums: dict[int, list[tuple[int, Instruction]]] = {}  # by place, the products there and which operands they are
    products: dict[str, Instruction] = {}
    for place, at in enumerate(instructions):
        products = {} if place in targets or at.branches else products
        name, _, kind = at.opcode.partition(".rn.")
        if kind.endswith("f32x2") and name in _SUMS and at.operands[1] != at.operands[2]:
            found = [(number, products[key]) for number in (1, 2) if (key := str(at.operands[number])) in products]
            sums.update({place: found} if found else {})
        for written in names_of(at.operands[0]) if at.operands else ():
            products = {key: made for key, made in products.items() if written not in (key, *made.operands)}
        if name == "mul" and kind.endswith("f32x2"):
            products[str(at.operands[0])] = at
    rounded: set[str] = set()
    while True:
        chosen = {
            place: next((x for x in found if x[1].operands[0] not in rounded), None) for place, found in sums.items()
        }
        taken = Counter(str(made[1].operands[0]) for made in chosen.values() if made is not None)
        if not (others := {name for name, count in taken.items() if count < uses[name]}):
            break
        rounded |= others
    result = list(instructions)
    for place, made in chosen.items():
        if made is not None:
            at, (number, product) = instructions[place], made
            name, _, kind = at.opcode.partition(".")
            operands = (at.operands[0], *product.operands[1:], at.operands[3 - number])
            result[place] = replace(at, opcode=f"{_SUMS[name][number - 1]}.{kind}", operands=operands)
    return result
