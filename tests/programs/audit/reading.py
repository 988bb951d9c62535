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

from tiebreak.programs.audit.assembly import Instruction
from tiebreak.programs.audit.casts import casts
from tiebreak.programs.audit.code import FUSED, Code, is_float
from tiebreak.reports.audit.record import Audit

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
_ROUND_MODES = ("to even", "up", "down", "toward zero")  # of MODE.FP_ROUND
_DENORMALS_KEPT = 3  # of MODE.FP_DENORM
_DEPTHS = {"f16": 16, "tf32": 8, "f8f6f4": 32}  # K of tcgen05.mma by kind
_FORMATS = {"f16": ("f16", "bf16"), "tf32": ("?", "?", "tf32"), "f8f6f4": ("e4m3", "e5m2")}  # by code in the descriptor
_RESULTS = ("f16", "f32", "s32", "?")


def read(target: str, kernel: str, text: str, dialect: str) -> Audit:
    """Read one kernel's assembly.

    Args:
        target: name of the architecture.
        kernel: name of the kernel and its settings.
        text: assembly of that kernel.
        dialect: `ptx` or `amdgcn`.

    Returns:
        What rounds there, and how.

    Raises:
        ValueError: AMDGCN without the mode that it runs in.
    """
    code = Code(text, dialect)
    rounding = [(code.after_products(at), how) for at, how in casts(code)]
    exponentials = list(code.matching(_EXPONENTIAL.match))
    return Audit(
        target=target,
        kernel=kernel,
        skipped=None,
        products=_kinds(_products(code)),
        operand_casts=_kinds(how for after, how in rounding if not after),
        output_casts=_kinds(how for after, how in rounding if after),
        exponential=_kinds(at.opcode for at in exponentials),
        exponent=_kinds(_operation(root) for at in exponentials for root in code.roots(at)),
        logarithm=_kinds(at.opcode for at in code.matching(_LOGARITHM.match)),
        division=_kinds(_divisions(code)),
        contraction=_kinds(_contraction(code)),
        flushes=_kinds(_flushes(code)),
        mode=_mode(code),
        fused=len(_softmax(code, FUSED)),
        separate=len(_softmax(code, _MULTIPLY)) + len(_softmax(code, _ADD)),
    )


def _kinds(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(texts)))


def _operation(instruction: Instruction) -> str:
    for pattern, name in ((FUSED, "fma"), (_MULTIPLY, "mul"), (_ADD, "add")):
        if pattern.match(instruction.opcode):
            return name
    return instruction.opcode


def _products(code: Code) -> Iterator[str]:
    for at in code.matrix:
        if at.opcode.startswith("tcgen05"):
            yield _tcgen05(code, at)
        else:
            yield _amd_product(at.opcode) if code.dialect == "amdgcn" else _ptx_product(at.opcode)


def _ptx_product(opcode: str) -> str:
    parts = opcode.split(".")
    shape = next(part for part in parts if re.fullmatch(r"m\d+n\d+k\d+", part))
    result, a, b, *_ = (part for part in parts[parts.index(shape) + 1 :] if part not in ("row", "col"))
    name = "mma.sync" if parts[0] == "mma" else parts[0]
    return f"{name} k{shape.rpartition('k')[2]} {a}*{b} -> {result}"


def _amd_product(opcode: str) -> str:
    match = _AMD_PRODUCT.match(opcode)
    if match is None:
        return opcode
    result, depth, types = match.groups()
    a, _, b = types.partition("_")
    return f"mfma k{depth} {a}*{b or a} -> {result}"


def _tcgen05(code: Code, at: Instruction) -> str:
    """Its types stand in a number, the descriptor: of D at bit 4, of A at bit 7, of B at bit 10."""
    kind = at.opcode.rpartition("kind::")[2].split(".")[0]
    descriptor = code.constant(at.operands[3])  # after D, A and B
    if descriptor is None:
        return f"tcgen05.mma kind::{kind}"
    formats = _FORMATS.get(kind, ())
    a, b = (formats[index] if (index := descriptor >> bit & 7) < len(formats) else "?" for bit in (7, 10))
    return f"tcgen05.mma k{_DEPTHS.get(kind, '?')} {a}*{b} -> {_RESULTS[descriptor >> 4 & 3]}"


def _divisions(code: Code) -> Iterator[str]:
    """Divisions and reciprocals. AMDGCN's correctly rounded division is a sequence with one reciprocal in it."""
    yield from (at.opcode for at in code.matching(_PTX_DIVISION.match))
    sequences = sum(1 for _ in code.matching("v_div_fixup_f32".__eq__))
    if sequences:
        yield "v_div_scale/fmas/fixup_f32"
    if sum(1 for _ in code.matching(_AMD_RECIPROCAL.match)) > sequences:
        yield "v_rcp_f32"


def _softmax(code: Code, pattern: re.Pattern[str]) -> list[Instruction]:
    """Arithmetic down to the last product, without divisions and logarithms."""
    operations = (at for at in code.matching(pattern.match) if at.place not in code.library)
    return [at for at in operations if not code.matrix or not code.after_products(at)]


def _contraction(code: Code) -> Iterator[str]:
    """Whether multiplications and additions are fused, or may yet be."""
    if _softmax(code, FUSED):
        yield "fma"
    if _softmax(code, _UNMARKED):
        yield "left to ptxas"


def _flushes(code: Code) -> Iterator[str]:
    """What takes subnormals for zero: PTX marks instructions, AMDGCN the kernel, but for what always does."""
    if code.dialect == "ptx":
        yield from (at.opcode.split(".")[0] for at in code.instructions if ".ftz" in at.opcode)
        return
    yield from (at.opcode for at in code.matching(_FLUSHING.match))
    if _setting(code, "float_denorm_mode_32") != _DENORMALS_KEPT:
        yield "fp32"


def _mode(code: Code) -> str:
    """How operations round: PTX marks instructions, unmarked ones round to even; AMDGCN has a register, twice:
    for fp32, and for fp64 and casts to fp16.
    """
    if code.dialect == "ptx":
        modes = (_DIRECTED.intersection(at.opcode.split(".")) for at in code.instructions if is_float(at))
        return ", ".join(["to even", *sorted(frozenset().union(*modes))])
    single, other = (_ROUND_MODES[_setting(code, f"float_round_mode_{size}")] for size in ("32", "16_64"))
    text = single if single == other else f"{single}, fp16 {other}"
    changes = _kinds(" ".join(at.operands) for at in code.matching(_MODE.match))
    return "; ".join([text, *changes])


def _setting(code: Code, name: str) -> int:
    match = re.search(rf"\.amdhsa_{name}\s+(\d+)", code.text)
    if match is None:
        raise ValueError(f"the assembly has no .amdhsa_{name}")
    return int(match.group(1))
