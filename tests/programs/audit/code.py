"""One kernel's instructions, and questions about them: what computed this, is it above the products."""

import re
from collections.abc import Callable, Iterator

from tiebreak.programs.audit.assembly import Instruction, Place, parse

FUSED = re.compile(r"^(?:fma\.\w+\.f32(?:x2)?|v_(?:pk_)?(?:fma|fmac|fmamk|fmaak)_f32)$")
MATRIX = re.compile(r"^(?:mma|wgmma\.mma_async|tcgen05\.mma|v_s?mfmac?_)")
_LIBRARY = re.compile(r"^(?:fma\.rn\.ftz\.f32|lg2\.|v_div_|v_log_f32)")  # parts of a division or a logarithm
_FLOAT = re.compile(r"^(?:(?:mul|add|sub|fma|div|ex2|max|rcp)\..*f32(?:x2)?|v_\w+_f32)$")
_TRANSPARENT = re.compile(
    r"^(?:mov\.|selp\.|or\.b32|v_mov_b32|v_pk_mov_b32|v_cndmask_b32|v_or_b32|v_accvgpr_|v_permlane)"
)
_CONDITION = re.compile(r"^(?:setp\.|v_cmp_|s_)")
_LOAD = re.compile(r"^(?:s_movk?_[ib]32|v_mov_b32|mov\.b32)$")
_LITERAL = re.compile(r"^-?(?:0[xX][0-9a-fA-F]+|\d+)U?$")


class Code:
    """The instructions of one kernel."""

    def __init__(self, text: str, dialect: str) -> None:
        self.text, self.dialect = text, dialect
        self.instructions = parse(text, dialect)
        self.matrix = list(self.matching(MATRIX.match))
        self.library = {at.place for at in self.matching(_LIBRARY.match)}
        self._last: Place = max((at.place for at in self.matrix), default=())
        self._constants: dict[str, set[int]] = {}
        for at in self.matching(_LOAD.match):
            self._constants.setdefault(at.operands[0], set()).update(_loaded(at))

    def matching(self, matches: Callable[[str], object]) -> Iterator[Instruction]:
        """Instructions whose opcode matches."""
        return (at for at in self.instructions if matches(at.opcode))

    def after_products(self, at: Instruction) -> bool:
        """Whether the source asks for it below its last product; so it does where there is none."""
        for (line, column), (last_line, last_column) in zip(at.place, self._last, strict=False):
            if (line, column) != (last_line, last_column):
                return line > last_line  # two calls on one line: the cast is of what the product takes
        return not self.matrix  # or else it is a product itself

    def roots(self, at: Instruction) -> list[Instruction]:
        """What computed an instruction's operands, seen through moves, selections and the sign's return."""
        origins, queue, seen = [], list(at.sources), set(at.sources)
        while queue:
            source = self.instructions[queue.pop()]
            if _TRANSPARENT.match(source.opcode):
                queue += [number for number in source.sources if number not in seen]
                seen.update(source.sources)
            elif not _CONDITION.match(source.opcode):
                origins.append(source)
        return origins

    def literals(self, at: Instruction) -> set[int]:
        """Numbers among an instruction's operands, also through a register that holds one."""
        sources = [self.instructions[number] for number in at.sources]
        nearest = {source.operands[0]: _loaded(source) for source in sources if _LOAD.match(source.opcode)}
        numbers: set[int] = set()
        for operand in at.operands[1:]:
            value = literal(operand)
            # Compilers load a scalar far from its use, in any block: then all that the register ever holds counts.
            ever = self._constants.get(operand, set()) if operand.startswith("s") else set()
            numbers |= nearest.get(operand, ever) if value is None else {value}
        return numbers

    def constant(self, operand: str) -> int | None:
        """The one number that a register is ever loaded with; None where there is none, or more than one."""
        values = self._constants.get(operand, set())
        return next(iter(values)) if len(values) == 1 else None


def literal(operand: str) -> int | None:
    """An operand's number, as 32 bits; None if it is none."""
    return int(operand.rstrip("U"), 0) & 0xFFFFFFFF if _LITERAL.match(operand) else None


def is_float(at: Instruction) -> bool:
    """Whether it is an operation on fp32 numbers."""
    return _FLOAT.match(at.opcode) is not None


def _loaded(at: Instruction) -> set[int]:
    value = literal(at.operands[1]) if len(at.operands) == 2 else None
    return set() if value is None else {value}
