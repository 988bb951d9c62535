"""A kernel's PTX or AMDGCN text as instructions, and questions about them: what computed this, is it past the products.

An operand's value comes from the last instruction above that wrote its register. PTX writes a register once, but for
loops; AMDGCN's registers are reused, and there this holds within a block, where every cast and its argument sit.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Place = tuple[tuple[int, int], ...]  # line and column, from the kernel's own inwards through the calls

FUSED = re.compile(r"^(?:fma\.\w+\.f32(?:x2)?|v_(?:pk_)?(?:fma|fmac|fmamk|fmaak)_f32)$")
_MATRIX = re.compile(r"^(?:mma|wgmma\.mma_async|tcgen05\.mma|v_s?mfmac?_)")
_LIBRARY = re.compile(r"^(?:fma\.rn\.ftz\.f32|lg2\.|v_div_|v_log_f32)")  # parts of a division or a logarithm
_FLOAT = re.compile(r"^(?:(?:mul|add|sub|fma|div|ex2|max|rcp)\..*f32(?:x2)?|v_\w+_f32)$")
_TRANSPARENT = re.compile(
    r"^(?:mov\.|selp\.|or\.b32|v_mov_b32|v_pk_mov_b32|v_cndmask_b32|v_or_b32|v_accvgpr_|v_permlane)"
)
_CONDITION = re.compile(r"^(?:setp\.|v_cmp_|s_)")
_LOAD = re.compile(r"^(?:s_movk?_[ib]32|v_mov_b32|mov\.b32)$")
_LITERAL = re.compile(r"^-?(?:0[xX][0-9a-fA-F]+|\d+)U?$")
_COMMENT = {"ptx": re.compile(r"//.*"), "amdgcn": re.compile(r"(?://|;).*")}
_LOCATION = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:.*\binlined_at\s+(\d+)\s+(\d+)\s+(\d+))?")
_CHAIN = re.compile(r":(\d+):(\d+)")
_GUARD = re.compile(r"^@!?%?\w+\s+")
_ENCODING = re.compile(r"_(?:e32|e64|sdwa|dpp|e64_dpp)$")
_PTX_REGISTER = re.compile(r"%[a-z]+\d+")
_AMD_REGISTER = re.compile(r"(?<![\w.])([vsa])(?:(\d+)|\[(\d+):(\d+)\])(?!\w)|(?<!\w)(vcc)(?!\w)")
_WRITES_NONE = re.compile(
    r"^(?:st|red|bra|bar|ret|cp|fence|mbarrier|tcgen05\.(?:st|mma|wait|commit|cp)"
    r"|(?:global|buffer|flat|scratch)_store.*|ds_write.*|s_(?:waitcnt|barrier|branch|cbranch|nop|setreg).*)\b"
)


@dataclass(frozen=True)
class CompiledInstruction:
    """One instruction of a kernel."""

    opcode: str  # without the suffix that names an AMDGCN encoding
    operands: tuple[str, ...]  # as written, the destination first
    sources: tuple[int, ...]  # numbers of the instructions that wrote what it reads
    place: Place  # where the source asks for it; empty where the compiler does not say

    @property
    def is_float(self) -> bool:
        """True if it is an operation on fp32 numbers."""
        return _FLOAT.match(self.opcode) is not None

    @property
    def loaded(self) -> set[int]:
        """The number that it loads into a register, if it loads one."""
        return _literal(self.operands[1]) if _LOAD.match(self.opcode) and len(self.operands) == 2 else set()


class Code:
    """The instructions of one kernel, in the order of its text; the dialect is `ptx` or `amdgcn`."""

    def __init__(self, text: str, dialect: str) -> None:
        self.text, self.dialect = text, dialect
        self.instructions: list[CompiledInstruction] = []
        written: dict[str, int] = {}
        for line, place in _placed(text, dialect):
            opcode, _, rest = line.partition(" ")
            opcode = _ENCODING.sub("", opcode)
            operands = tuple(_split(rest.strip()))
            outputs = 0 if _WRITES_NONE.match(opcode) else 1
            reads = [name for operand in operands[outputs:] for name in _registers(operand, dialect)]
            sources = tuple(dict.fromkeys(written[name] for name in reads if name in written))
            for operand in operands[:outputs]:
                written.update(dict.fromkeys(_registers(operand, dialect), len(self.instructions)))
            self.instructions.append(CompiledInstruction(opcode, operands, sources, place))
        self.matrix = list(self.matching(_MATRIX.match))
        self.library = {at.place for at in self.matching(_LIBRARY.match)}
        self._last: Place = max((at.place for at in self.matrix), default=())
        self._constants: dict[str, set[int]] = {}
        for at in self.matching(_LOAD.match):
            self._constants.setdefault(at.operands[0], set()).update(at.loaded)

    def matching(self, matches: Callable[[str], object]) -> Iterator[CompiledInstruction]:
        """Yield the instructions whose opcode matches."""
        return (at for at in self.instructions if matches(at.opcode))

    def after_products(self, at: CompiledInstruction) -> bool:
        """Return whether the source asks for it below its last product; so it does where there is none."""
        for (line, column), (last_line, last_column) in zip(at.place, self._last, strict=False):
            if (line, column) != (last_line, last_column):
                return line > last_line  # two calls on one line: the cast is of what the product takes
        return not self.matrix  # or else it is a product itself

    def roots(self, at: CompiledInstruction) -> list[CompiledInstruction]:
        """Return the instructions that computed an operand, seen through moves, selections and the sign's return."""
        origins, queue, seen = [], list(at.sources), set(at.sources)
        while queue:
            source = self.instructions[queue.pop()]
            if _TRANSPARENT.match(source.opcode):
                queue += [number for number in source.sources if number not in seen]
                seen.update(source.sources)
            elif not _CONDITION.match(source.opcode):
                origins.append(source)
        return origins

    def literals(self, at: CompiledInstruction) -> set[int]:
        """Return the numbers among an instruction's operands, also those that a register holds."""
        sources = [self.instructions[number] for number in at.sources]
        nearest = {source.operands[0]: source.loaded for source in sources if _LOAD.match(source.opcode)}
        numbers: set[int] = set()
        for operand in at.operands[1:]:
            # Compilers load a scalar far from its use, in any block: then all that the register ever holds counts.
            ever = self.constants(operand) if operand.startswith("s") else set()
            numbers |= _literal(operand) or nearest.get(operand, ever)
        return numbers

    def constants(self, register: str) -> set[int]:
        """Return the numbers that a register is ever loaded with."""
        return self._constants.get(register, set())


def _literal(operand: str) -> set[int]:
    """Return an operand's number, as 32 bits, if it is one."""
    return {int(operand.rstrip("U"), 0) & 0xFFFFFFFF} if _LITERAL.match(operand) else set()


def _placed(text: str, dialect: str) -> Iterator[tuple[str, Place]]:
    """Yield instructions, without comments and guards, and their places."""
    places: dict[tuple[str, ...], Place] = {}
    place: Place = ()
    for line in text.splitlines():
        if match := _LOCATION.match(line.strip()):
            # AMDGCN's comment has the whole chain, from within outwards: `file:line:column @[ file:line:column ]`.
            chain = tuple((int(row), int(column)) for row, column in _CHAIN.findall(line.partition(";")[2]))
            named = chain[::-1] if dialect == "amdgcn" else _ptx_place(match, places)
            # Line 0 is what the compiler added by itself: it belongs to what it was added to.
            place = place if any(row == 0 for row, _ in named) else named
            continue
        for part in _COMMENT[dialect].sub("", line).split(";"):
            bare = _GUARD.sub("", part.strip().removeprefix("{").strip())
            if bare and bare[0].isalpha() and not bare.endswith(":"):
                yield " ".join(bare.split()), place


def _ptx_place(match: re.Match[str], places: dict[tuple[str, ...], Place]) -> Place:
    """Return the place that a `.loc` names; an inlined one follows the `.loc` of the line that it is inlined in."""
    location, outer = match.groups()[:3], match.groups()[3:]
    around: Place = () if outer[0] is None else places.get(outer, ((int(outer[1]), int(outer[2])),))
    places[location] = (*around, (int(location[1]), int(location[2])))
    return places[location]


def _split(operands: str) -> list[str]:
    """Return operands, split at the commas outside brackets."""
    parts: list[str] = []
    for part in operands.split(","):
        if parts and sum(map(parts[-1].count, "{[(")) > sum(map(parts[-1].count, "}])")):
            parts[-1] += f",{part}"
        else:
            parts.append(part.strip())
    return [part for part in parts if part]


def _registers(operand: str, dialect: str) -> Iterator[str]:
    if dialect == "ptx":
        yield from _PTX_REGISTER.findall(operand)
        return
    for kind, single, first, last, vcc in _AMD_REGISTER.findall(operand):
        if vcc:
            yield vcc
        else:
            yield from (f"{kind}{number}" for number in range(int(single or first), int(single or last) + 1))
