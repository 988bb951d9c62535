"""How a kernel rounds, by its assembly.

A cast into a matrix product differs from one of an output by its place in the *source*: the compiler's line information
names the line of every instruction, through all calls. An output is cast below the last product, an operand
above it or on its line. The order of the text would not do: schedulers move instructions across one another.

Instructions: PTX ISA, chapters "Floating Point Instructions", "Data Movement and Conversion Instructions" (cvt), "Warp
Level Matrix Multiply-Accumulate Instructions", "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions",
"TensorCore 5th Generation Family Instructions" (instruction descriptor); AMD Instinct MI300 (CDNA3) and CDNA4
instruction set architecture, "Vector ALU Operations", "Matrix Arithmetic Instructions" and "Mode register".
"""

import re
from collections.abc import Iterable, Iterator

from tiebreak.laboratory.audit.assembly import FUSED, Code, CompiledInstruction
from tiebreak.laboratory.audit.records import Audit

_EXPONENTIAL = re.compile(r"^(?:ex2\.|v_exp_f)")
_LOGARITHM = re.compile(r"^(?:lg2\.|v_log_f)")
_PTX_DIVISION = re.compile(r"^(?:div|rcp)\..*f32$")
_AMD_RECIPROCAL = re.compile(r"^v_rcp_(?:iflag_)?f32$")
_AMD_PRODUCT = re.compile(r"^v_s?mfma_\w*?([fi]32)_\d+x\d+x(\d+)_?([a-z]\w*?)(?:_1k)?$")
_MULTIPLY = re.compile(r"^(?:mul(?:\.\w+)?\.f32(?:x2)?|v_(?:pk_)?mul_f32)$")
_ADD = re.compile(r"^(?:(?:add|sub)(?:\.\w+)?\.f32(?:x2)?|v_(?:pk_)?(?:add|sub|subrev)_f32)$")
_UNMARKED = re.compile(r"^(?:mul|add|sub)\.f32(?:x2)?$")  # without .rn: the PTX ISA lets ptxas contract these
_FLUSHING = re.compile(r"^v_(?:exp|log)_f32$")  # "denormals are flushed", whatever the mode
_MODE = re.compile(r"^(?:s_setreg|s_round_mode)")

_DIRECTED = frozenset({"rz", "rm", "rp"})
_ROUND_MODES = ("RNE", "up", "down", "RTZ")  # of MODE.FP_ROUND
_DENORMALS_KEPT = 3  # of MODE.FP_DENORM
_DEPTHS = {"f16": 16, "tf32": 8, "f8f6f4": 32}  # K of tcgen05.mma by kind
_FORMATS = {"f16": ("f16", "bf16"), "tf32": ("?", "?", "tf32"), "f8f6f4": ("e4m3", "e5m2")}  # by code in the descriptor
_RESULTS = ("f16", "f32", "s32", "?")

# Casts to a narrower format are instructions, or sequences of integers: to even (bits + half - 1 + the last bit kept,
# upper part), truncating (upper part alone), stochastic (bits + random ones, upper part).
_NARROW = r"(?:bf16|bf16x2|f16|f16x2|tf32|e4m3x2|e5m2x2|e4m3x4|e5m2x4)"
_CAST = re.compile(
    rf"^(?:cvt\.(?:rn|rz|rm|rp|rna|rs)(?:\.\w+)*?\.{_NARROW}\.(?:f32|f16x2|bf16x2)"
    r"|v_cvt_(?:scalef32_)?(?:sr_)?(?:pk_|pkrtz_|pknorm_)?(?:bf16|f16|fp8|bf8)_f32)$"
)
_INTEGER_ADD = re.compile(r"^(?:add\.[su](?:32|64)|v_add_u32|v_add_co_u32|v_add3_u32|v_xad_u32|v_add_lshl_u32)$")
_MASK = re.compile(r"^(?:and\.b32|v_and_b32|v_and_or_b32)$")
_BELOW_HALF = (0x7FFF, 0xFFF, 0x7FFFF, 0xFFFFF)  # half - 1 of the last bit kept: bf16, fp16, e4m3, e5m2
_UPPER_HALF = 0xFFFF0000
# Masks of fp32's bits.
_CUTS = {_UPPER_HALF: "bf16", 0xFFFFE000: "fp16", 0xFFF00000: "fp8_e4m3", 0xFFE00000: "fp8_e5m2"}
# Instructions that take upper halves, with the operand that does so: the bytes of two numbers, or a shift.
_TAKES_UPPER = {"v_perm_b32": 0x07060302, "prmt.b32": 0x7632, "v_lshrrev_b32": 16, "shr.u32": 16}


def read(target: str, kernel: str, text: str, dialect: str) -> Audit:
    """Return the roundings in a kernel's assembly, `ptx` or `amdgcn`; ValueError: AMDGCN without its mode."""
    code = Code(text, dialect)
    casts = [(code.after_products(at), how) for at, how in _casts(code)]
    exponentials = list(code.matching(_EXPONENTIAL.match))
    fused, unmarked = _softmax(code, FUSED), _softmax(code, _UNMARKED)
    return Audit(
        target=target,
        kernel=kernel,
        skipped=None,
        products=_kinds(_product(code, at) for at in code.matrix),
        operand_casts=_kinds(how for after, how in casts if not after),
        output_casts=_kinds(how for after, how in casts if after),
        exponential=_kinds(at.opcode for at in exponentials),
        exponent=_kinds(_operation(root.opcode) for at in exponentials for root in code.roots(at)),
        logarithm=_kinds(at.opcode for at in code.matching(_LOGARITHM.match)),
        division=_kinds(_divisions(code)),
        contraction=_kinds([*(["fma"] if fused else []), *(["left to ptxas"] if unmarked else [])]),
        flushes=_kinds(_flushes(code)),
        mode=_mode(code),
        fused=len(fused),
        separate=len(_softmax(code, _MULTIPLY)) + len(_softmax(code, _ADD)),
    )


def _kinds(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(texts)))


def _operation(opcode: str) -> str:
    names = {"fma": FUSED, "mul": _MULTIPLY, "add": _ADD}
    return next((name for name, pattern in names.items() if pattern.match(opcode)), opcode)


def _product(code: Code, at: CompiledInstruction) -> str:
    """Return K and the types of a matrix product."""
    if at.opcode.startswith("tcgen05"):
        return _tcgen05(code, at)
    if match := _AMD_PRODUCT.match(at.opcode):
        result, depth, types = match.groups()
        a, _, b = types.partition("_")
        return f"mfma k{depth} {a}*{b or a} -> {result}"
    if code.dialect == "amdgcn":
        return at.opcode
    parts = at.opcode.split(".")
    shape = next(part for part in parts if re.fullmatch(r"m\d+n\d+k\d+", part))
    result, a, b, *_ = (part for part in parts[parts.index(shape) + 1 :] if part not in ("row", "col"))
    name = "mma.sync" if parts[0] == "mma" else parts[0]
    return f"{name} k{shape.rpartition('k')[2]} {a}*{b} -> {result}"


def _tcgen05(code: Code, at: CompiledInstruction) -> str:
    """Return the product that the descriptor, a number, names: the type of D at bit 4, of A at 7, of B at 10."""
    kind = at.opcode.rpartition("kind::")[2].split(".")[0]
    descriptors = code.constants(at.operands[3])  # after D, A and B
    if len(descriptors) != 1:
        return f"tcgen05.mma kind::{kind}"
    (descriptor,) = descriptors
    formats = _FORMATS.get(kind, ())
    a, b = (formats[index] if (index := descriptor >> bit & 7) < len(formats) else "?" for bit in (7, 10))
    return f"tcgen05.mma k{_DEPTHS.get(kind, '?')} {a}*{b} -> {_RESULTS[descriptor >> 4 & 3]}"


def _divisions(code: Code) -> Iterator[str]:
    """Yield divisions and reciprocals. AMDGCN's correctly rounded division is a sequence with one reciprocal."""
    yield from (at.opcode for at in code.matching(_PTX_DIVISION.match))
    sequences = sum(1 for _ in code.matching("v_div_fixup_f32".__eq__))
    if sequences:
        yield "v_div_scale/fmas/fixup_f32"
    if sum(1 for _ in code.matching(_AMD_RECIPROCAL.match)) > sequences:
        yield "v_rcp_f32"


def _softmax(code: Code, pattern: re.Pattern[str]) -> list[CompiledInstruction]:
    """Return arithmetic down to the last product, without divisions and logarithms."""
    operations = (at for at in code.matching(pattern.match) if at.place not in code.library)
    return [at for at in operations if not code.matrix or not code.after_products(at)]


def _flushes(code: Code) -> Iterator[str]:
    """Yield instructions that flush subnormals: PTX marks them, AMDGCN the kernel, except those that always flush."""
    if code.dialect == "ptx":
        yield from (at.opcode.split(".")[0] for at in code.instructions if ".ftz" in at.opcode)
        return
    yield from (at.opcode for at in code.matching(_FLUSHING.match))
    if _setting(code, "float_denorm_mode_32") != _DENORMALS_KEPT:
        yield "fp32"


def _mode(code: Code) -> str:
    """Return the rounding modes: PTX marks all but RNE; AMDGCN has a register, for fp32 and for fp64 and fp16."""
    if code.dialect == "ptx":
        modes = (_DIRECTED.intersection(at.opcode.split(".")) for at in code.instructions if at.is_float)
        return ", ".join(["RNE", *sorted(frozenset().union(*modes))])
    single, other = (_ROUND_MODES[_setting(code, f"float_round_mode_{size}")] for size in ("32", "16_64"))
    text = single if single == other else f"{single}, fp16 {other}"
    changes = _kinds(" ".join(at.operands) for at in code.matching(_MODE.match))
    return "; ".join([text, *changes])


def _setting(code: Code, name: str) -> int:
    match = re.search(rf"\.amdhsa_{name}\s+(\d+)", code.text)
    if match is None:
        raise ValueError(f"the assembly has no .amdhsa_{name}")
    return int(match.group(1))


def _casts(code: Code) -> Iterator[tuple[CompiledInstruction, str]]:
    """Yield every cast of a kernel: its last instruction, and its rounding, shown by the origin of the number."""
    cut: set[int] = set()
    alone: list[tuple[CompiledInstruction, str]] = []
    for at in code.instructions:
        rounding = _rounds(code, at)
        if rounding is not None:
            before = {id(root): how for root in code.roots(at) if (how := _masks(code, root)) is not None}
            cut.update(before)
            yield at, "; ".join([*sorted(set(before.values())), rounding])
        elif (how := _masks(code, at)) is not None and _UPPER_HALF in code.literals(at):
            alone.append((at, how))
        elif at.opcode in _TAKES_UPPER and _TAKES_UPPER[at.opcode] in code.literals(at):
            roots = code.roots(at)
            if roots and all(root.is_float and _rounds(code, root) is None for root in roots):
                yield at, f"{at.opcode} (upper half, truncated)"
    yield from (pair for pair in alone if id(pair[0]) not in cut)


def _rounds(code: Code, at: CompiledInstruction) -> str | None:
    """Return how it rounds to a narrower format, to even or as it is called; None if it does not."""
    if _CAST.match(at.opcode):
        return at.opcode
    added = code.literals(at).intersection(_BELOW_HALF) if at.opcode == "v_add3_u32" else set()
    return f"v_add3_u32 {min(added):#x} + last bit" if added else None


def _masks(code: Code, at: CompiledInstruction) -> str | None:
    """Return how it truncates a number's lower bits; None if it does not, or the number is already rounded."""
    masks = _CUTS.keys() & code.literals(at) if _MASK.match(at.opcode) else set()
    roots = code.roots(at) if masks else []
    if not roots or any(_rounds(code, root) for root in roots):
        return None
    if any(_INTEGER_ADD.match(root.opcode) for root in roots):
        return f"integer add, cut to {_CUTS[min(masks)]}"
    return f"cut to {_CUTS[min(masks)]} (truncated)" if any(root.is_float for root in roots) else None
