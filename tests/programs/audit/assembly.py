"""PTX and AMDGCN text as instructions: opcode, operands, where their values come from, and their line of the source.

An operand's value comes from the last instruction above that wrote its register. PTX writes a register once, but for
loops; AMDGCN's registers are reused, and there this holds within a block, where every cast and its argument sit.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

Place = tuple[tuple[int, int], ...]  # line and column, from the kernel's own inwards through the calls


@dataclass(frozen=True)
class Instruction:
    """One instruction of a kernel."""

    opcode: str  # without the suffix that names an AMDGCN encoding
    operands: tuple[str, ...]  # as written, the destination first
    sources: tuple[int, ...]  # numbers of the instructions that wrote what it reads
    place: Place  # where the source asks for it; empty where the compiler does not say


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


def parse(text: str, dialect: str) -> list[Instruction]:
    """The instructions of a kernel.

    Args:
        text: assembly of one kernel, as Triton returns it.
        dialect: `ptx` or `amdgcn`.

    Returns:
        The instructions in the order of the text.
    """
    instructions: list[Instruction] = []
    written: dict[str, int] = {}
    for line, place in _placed(text, dialect):
        opcode, _, rest = line.partition(" ")
        opcode = _ENCODING.sub("", opcode)
        operands = tuple(_split(rest.strip()))
        outputs = 0 if _WRITES_NONE.match(opcode) else 1
        reads = [name for operand in operands[outputs:] for name in _registers(operand, dialect)]
        sources = tuple(dict.fromkeys(written[name] for name in reads if name in written))
        for operand in operands[:outputs]:
            written.update(dict.fromkeys(_registers(operand, dialect), len(instructions)))
        instructions.append(Instruction(opcode, operands, sources, place))
    return instructions


def _placed(text: str, dialect: str) -> Iterator[tuple[str, Place]]:
    """Instructions, without comments and guards, and their places."""
    places: dict[tuple[str, ...], Place] = {}
    place: Place = ()
    for line in text.splitlines():
        if match := _LOCATION.match(line.strip()):
            named = _amd_place(line) if dialect == "amdgcn" else _ptx_place(match, places)
            # Line 0 is what the compiler added by itself: it belongs to what it was added to.
            place = place if any(row == 0 for row, _ in named) else named
            continue
        for part in _COMMENT[dialect].sub("", line).split(";"):
            bare = _GUARD.sub("", part.strip().removeprefix("{").strip())
            if bare and bare[0].isalpha() and not bare.endswith(":"):
                yield " ".join(bare.split()), place


def _ptx_place(match: re.Match[str], places: dict[tuple[str, ...], Place]) -> Place:
    """A `.loc` that was inlined names where; that line's own `.loc` came before it."""
    location, outer = match.groups()[:3], match.groups()[3:]
    around: Place = () if outer[0] is None else places.get(outer, ((int(outer[1]), int(outer[2])),))
    places[location] = (*around, (int(location[1]), int(location[2])))
    return places[location]


def _amd_place(line: str) -> Place:
    """The comment has the whole chain: `file:line:column @[ file:line:column ]`, from the innermost outwards."""
    _, _, comment = line.partition(";")
    return tuple((int(row), int(column)) for row, column in reversed(_CHAIN.findall(comment)))


def _split(operands: str) -> list[str]:
    """Operands at the commas outside brackets."""
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
