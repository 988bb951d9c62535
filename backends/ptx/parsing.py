"""PTX text as instructions (PTX ISA, Syntax): what they are called, what they read and write, where a branch goes."""

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from tiebreak.kernels.kernel import CannotRunError

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENTRY = re.compile(r"\.entry\s+[\w$]+\s*\((.*?)\)(.*?)\{(.*)\}", re.DOTALL)
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.+)", re.DOTALL)
_STATEMENT = re.compile(r"(?:@(!?)(%?[\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
_PARAMETER = re.compile(r"([\w$]+)(\[\d+\])?\s*(?:,|$)")
_SECTION = re.compile(r"\n\s*\.\w*section")
_TABLE = ".branchtargets"
_SHARED = re.compile(r"\.shared[^;\[]*?([\w$]+)\[(\d*)\];")
_ADDRESS = re.compile(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\w+))?\s*\]")


@dataclass(frozen=True)
class Address:
    """An operand in square brackets."""

    base: str  # a register, a parameter, or the name of a variable
    offset: int  # bytes


Operand = str | Address | tuple[str, ...]  # a name or a number; a place in memory; several in braces


@dataclass(frozen=True)
class Instruction:
    """One instruction of a kernel."""

    line: int  # of the kernel's body, from 1
    guard: str  # the predicate it is executed under; empty: always
    negated: bool  # whether it is executed where that is false
    opcode: str  # all of it, such as `add.rn.f32`
    operands: tuple[Operand, ...]  # the destination first
    types: Mapping[str, str]  # of the registers that are declared so far

    @property
    def branches(self) -> bool:
        """True if it jumps to a label; with several labels, its last operand is the number of the one it takes."""
        return self.opcode.startswith(("bra", "brx.idx"))

    def __str__(self) -> str:
        return f"{self.opcode} (line {self.line} of the PTX's body)"

    def refused(self) -> CannotRunError:
        """Return the error that the instruction is not supported: its cell is skipped with the instruction's name."""
        return CannotRunError(f"the PTX instruction {self.opcode} is not executed here")


def parsed(text: str) -> tuple[list[str], list[Instruction], dict[str, int]]:
    """Return names of parameters, instructions, and the place of each label, of the one kernel of a PTX text.

    Raises:
        CannotRunError: it is none, or holds a statement that is not known here.
    """
    text = _SECTION.split(_COMMENT.sub("", text))[0]
    entry = _ENTRY.search(text)
    if entry is None:
        raise CannotRunError("the PTX has no kernel")
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    parameters = _PARAMETER.findall(entry[1])
    # Whose address is taken, a register is for the parser.
    types = dict.fromkeys([*(name for name, several in parameters if several), *_in_shared_memory(text)], "b64")
    scopes: list[str] = [""]  # a label is known within its braces: those of inline assembly are alike
    inside: list[tuple[str, ...]] = []  # by instruction
    label, tables = "", dict[str, list[str]]()  # the last one, and the labels that one stands for
    for line, statement in _statements(entry[3]):
        if statement == "{":
            scopes.append(f"{scopes[-1]}@{line}")
        elif statement == "}":
            scopes.pop()
        elif statement.endswith(":"):
            label = statement[:-1]
            labels[label + scopes[-1]] = len(instructions)
        elif statement.startswith(_TABLE):
            tables[label] = statement.removeprefix(_TABLE).replace(",", " ").split()
        elif declared := _REGISTERS.match(statement):
            types = {**types, **dict.fromkeys(_names(declared[2]), declared[1])}
        elif match := _STATEMENT.fullmatch(statement):
            operands = tuple(map(_operand, _OPERAND.findall(match[4])))
            instructions.append(Instruction(line, match[2] or "", bool(match[1]), match[3], operands, types))
            inside.append(tuple(reversed(scopes)))
        else:
            raise CannotRunError(f"the PTX statement {statement.split()[0]} is not executed here")
    for number, at in enumerate(instructions):
        if at.branches:
            *index, target = map(str, at.operands)
            found = [_seen(name, inside[number], labels) for name in tables.get(target, [target])]
            instructions[number] = replace(at, operands=(*found, *index))
    return [name for name, _ in parameters], instructions, labels


def _in_shared_memory(text: str) -> list[str]:
    """Return the names of what begins at the address 0, which a register has that nobody has written."""
    found = _SHARED.findall(text)
    if len(found) > 1 and any(size for _, size in found):
        raise CannotRunError("several variables in shared memory are not executed here")
    return [name for name, _ in found]


def _seen(name: str, scopes: Iterable[str], labels: Container[str]) -> str:
    """Return the label of a name in the innermost of some scopes."""
    return next(label for scope in scopes if (label := name + scope) in labels)


def _statements(body: str) -> Iterator[tuple[int, str]]:
    """Yield statements, labels, their tables, and braces of scopes, without directives except `.reg`."""
    begun = ""
    for line, text in enumerate(body.split("\n"), 1):
        whole = (begun + text).strip()
        starts = whole and (whole[0] != "." or whole.startswith(_TABLE))
        begun = f"{whole} " if starts and whole[-1] not in ";:{}" else ""
        for part in [] if begun else re.split(r"(?<=:)\s|;", f"{whole} "):
            bare = part.strip()
            if bare.count("{") > bare.count("}"):
                yield line, "{"
                bare = bare.removeprefix("{").strip()
            if bare and (bare[0] != "." or bare.startswith((".reg", _TABLE))):
                yield line, bare


def _names(declared: str) -> Iterator[str]:
    """Yield the registers that a declaration names: `%r<3>` is %r0 to %r2."""
    for name in declared.split(","):
        stem, _, count = name.strip().rstrip(">").partition("<")
        yield from (f"{stem}{number}" for number in range(int(count))) if count else (stem,)


def _operand(text: str) -> Operand:
    text = text.strip()
    if text[0] == "{":
        return tuple(part.strip() for part in text.strip("{}").split(","))
    match = _ADDRESS.fullmatch(text)
    return Address(match[1], int(match[2] or "0", 0)) if match else text
