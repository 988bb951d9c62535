"""Casts to a narrower format in a kernel's assembly, whether an instruction makes them or a sequence of integers.

An integer sequence rounds to even (bits + half - 1 + the last bit kept, upper part), truncates (upper part alone) or
rounds stochastically (bits + random ones, upper part). What made the number that is cut tells which.
"""

import re
from collections.abc import Iterable, Iterator

from tiebreak.programs.audit.assembly import Instruction
from tiebreak.programs.audit.code import Code, is_float

_NARROW = r"(?:bf16|bf16x2|f16|f16x2|tf32|e4m3x2|e5m2x2|e4m3x4|e5m2x4)"
_PTX_CAST = re.compile(rf"^cvt\.(?:rn|rz|rm|rp|rna|rs)(?:\.\w+)*?\.{_NARROW}\.(?:f32|f16x2|bf16x2)$")
_AMD_CAST = re.compile(r"^v_cvt_(?:scalef32_)?(?:sr_)?(?:pk_|pkrtz_|pknorm_)?(?:bf16|f16|fp8|bf8)_f32$")
_INTEGER_ADD = re.compile(r"^(?:add\.[su](?:32|64)|v_add_u32|v_add_co_u32|v_add3_u32|v_xad_u32|v_add_lshl_u32)$")
_MASK = re.compile(r"^(?:and\.b32|v_and_b32|v_and_or_b32)$")

_BELOW_HALF = (0x7FFF, 0xFFF, 0x7FFFF, 0xFFFFF)  # half - 1 of the last bit kept: bf16, fp16, e4m3, e5m2
_UPPER_HALF = 0xFFFF0000
_CUTS = {
    _UPPER_HALF: "bf16",
    0xFFFFE000: "fp16",
    0xFFF00000: "fp8_e4m3",
    0xFFE00000: "fp8_e5m2",
}  # masks of fp32's bits
_UPPER_BYTES = {"v_perm_b32": 0x07060302, "prmt.b32": 0x7632}  # of two numbers, into one word
_SHIFTS = ("v_lshrrev_b32", "shr.u32")


def casts(code: Code) -> Iterator[tuple[Instruction, str]]:
    """Every cast of a kernel: its last instruction, and how it rounds."""
    cut: set[int] = set()
    alone: list[tuple[Instruction, str]] = []
    for at in code.instructions:
        rounding = _rounds(code, at)
        if rounding is not None:
            before = {id(root): how for root in code.roots(at) if (how := _masks(code, root)) is not None}
            cut.update(before)
            yield at, "; ".join([*sorted(set(before.values())), rounding])
        elif (how := _masks(code, at)) is not None and _UPPER_HALF in code.literals(at):
            alone.append((at, how))
        elif _takes_upper_half(code, at) and _computed(code, code.roots(at)):
            yield at, f"{at.opcode} (upper half, truncated)"
    yield from (pair for pair in alone if id(pair[0]) not in cut)


def _rounds(code: Code, at: Instruction) -> str | None:
    """How it rounds to a narrower format, to even or as it is called; None if it does not."""
    if _PTX_CAST.match(at.opcode) or _AMD_CAST.match(at.opcode):
        return at.opcode
    added = code.literals(at).intersection(_BELOW_HALF) if at.opcode == "v_add3_u32" else set()
    return f"v_add3_u32 {min(added):#x} + last bit" if added else None


def _masks(code: Code, at: Instruction) -> str | None:
    """How it cuts off a number's lower bits; None if it does not, or they are those of a number already rounded."""
    masks = _CUTS.keys() & code.literals(at) if _MASK.match(at.opcode) else set()
    roots = code.roots(at) if masks else []
    if not roots or any(_rounds(code, root) for root in roots):
        return None
    if any(_INTEGER_ADD.match(root.opcode) for root in roots):
        return f"integer add, cut to {_CUTS[min(masks)]}"
    return f"cut to {_CUTS[min(masks)]} (truncated)" if any(map(is_float, roots)) else None


def _takes_upper_half(code: Code, at: Instruction) -> bool:
    if at.opcode in _SHIFTS:
        return 16 in code.literals(at)
    return at.opcode in _UPPER_BYTES and _UPPER_BYTES[at.opcode] in code.literals(at)


def _computed(code: Code, roots: Iterable[Instruction]) -> bool:
    """Whether floating-point operations made a number, and nothing has rounded it since."""
    operations = list(roots)
    return bool(operations) and all(is_float(root) and _rounds(code, root) is None for root in operations)
