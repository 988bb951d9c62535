"""PTX text as instructions (PTX ISA, Syntax): what they are called, what they read and write, where a branch goes."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from tiebreak.kernels.kernel import CannotRunError

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)\{", re.DOTALL)
_PARAMETER = re.compile(
    r"(\.hidden\s+)?\.param(?:\s+\.align\s+(\d+))?\s+\.[a-z]+(\d+)(?:\s+\.[a-z]+(?:\s+\d+)?)*\s+([\w$]+)(?:\[(\d+)\])?"
)
_SHARED = re.compile(r"\.shared[^;\[]*?([\w$]+)\[(\d*)\];")
_THREADS, _CLUSTERS = re.compile(r"\.reqntid\s+([\d, ]+)"), re.compile(r"\.reqnctapercluster\s+(?!1\b)")
_STATEMENT = re.compile(
    r"""\s*(?: (?P<opens>\{) | (?P<closes>\}) | (?P<label>[\w$]+):(?!:)
    | \.reg\s+\.(?P<type>\w+)\s+(?P<registers>[^;]+); | \.branchtargets(?P<targets>[^;]+);
    | \.loc[^\n]* | \.[^;]*; | ;  # what is not needed here
    | (?:@(?P<negated>!?)(?P<guard>%?[\w$]+)\s+)? (?P<opcode>[a-z][\w.:]*) (?P<operands>[^;]*); )""",
    re.VERBOSE,
)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
_ADDRESS = re.compile(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\w+))?\s*\]")


@dataclass(frozen=True)
class Address:
    """An operand in square brackets."""

    base: str  # a register, a parameter, or the name of a variable
    offset: int  # bytes


Operand = str | Address | tuple[str, ...]  # a name or a number; a place in memory; several in braces or with | between


@dataclass(frozen=True)
class Instruction:
    """One instruction of a kernel."""

    line: int  # of the kernel's body, from 1
    guard: str  # the predicate it is executed under; empty: always
    negated: bool  # whether it is executed where that is false
    opcode: str  # all of it, such as `add.rn.f32`
    operands: tuple[Operand, ...]  # the destination first; a tensor map in brackets and its coordinates are two
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


class Parameter(NamedTuple):
    """A parameter of a kernel."""

    name: str
    size: int  # bytes
    align: int  # bytes
    array: bool  # whether it is bytes, whose address a kernel takes
    hidden: bool  # whether no caller gives it


@dataclass(frozen=True)
class Entry:
    """A kernel of a PTX text."""

    parameters: tuple[Parameter, ...]
    threads: int  # of a block; 0: whatever a launch says
    shared: int  # bytes of shared memory that it declares, besides those that a launch gives it
    instructions: list[Instruction]
    labels: Mapping[str, int]  # places among the instructions, by names that no two scopes share


def parsed(text: str, name: str = "") -> Entry:
    """Return a kernel of a PTX text, by its name or the first.

    Raises:
        CannotRunError: there is none, or it holds a statement that is not known here.
    """
    text = _COMMENT.sub("", text)
    entry = next((each for each in _ENTRY.finditer(text) if name in ("", each[1])), None)
    if entry is None:
        raise CannotRunError(f"a kernel without its PTX is not executed here: {name}")
    if _CLUSTERS.search(entry[3]):
        raise CannotRunError(f"a kernel in clusters of blocks is not executed here: {entry[1]}")
    threads = _THREADS.search(entry[3])
    parameters = tuple(
        Parameter(each, int(bits) // 8 * int(count or 1), int(align or int(bits) // 8), bool(count), bool(hidden))
        for hidden, align, bits, each, count in _PARAMETER.findall(entry[2])
    )
    shared = _SHARED.findall(text)
    if len(shared) > 1 and any(size for _, size in shared):
        raise CannotRunError("several variables in shared memory are not executed here")
    # Whose address is taken, a register is for the parser: one in shared memory begins at 0, as nobody writes it.
    addresses = [each.name for each in parameters if each.array] + [name for name, _ in shared]
    instructions, labels = _body(text, entry.end(), dict.fromkeys(addresses, "b64"))
    count = math.prod(map(int, threads[1].split(","))) if threads else 0
    return Entry(parameters, count, sum(int(size or 0) for _, size in shared), instructions, labels)


def _body(text: str, at: int, types: Mapping[str, str]) -> tuple[list[Instruction], dict[str, int]]:
    """Return instructions and labels from a place in a text to the brace that ends them; `types` of what is known."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    scopes = [""]  # a label is known within its braces: those of inline assembly are alike
    inside: list[list[str]] = []  # by instruction, the innermost first
    label, tables, line = "", dict[str, list[str]](), 1  # the last label, and the labels that one stands for
    while scopes:
        found = _STATEMENT.match(text, at)
        if found is None:
            statement = text[at:].partition(";")[0].strip()
            raise CannotRunError(f"the PTX statement {statement} is not executed here")
        line, at = line + text.count("\n", at, found.end()), found.end()
        if found["opens"]:
            scopes.append(f"{scopes[-1]}@{at}")
        elif found["closes"]:
            scopes.pop()
        elif found["label"]:
            label = found["label"]
            labels[label + scopes[-1]] = len(instructions)
        elif found["targets"]:
            tables[label] = re.findall(r"[\w$]+", found["targets"])
        elif found["registers"]:
            types = {**types, **dict.fromkeys(_names(found["registers"]), found["type"])}
        elif opcode := found["opcode"]:
            operands = tuple(operand for each in _OPERAND.findall(found["operands"]) for operand in _operands(each))
            guard, negated = found["guard"] or "", bool(found["negated"])
            instructions.append(Instruction(line, guard, negated, opcode, operands, types))
            inside.append(scopes[::-1])
    for number, each in enumerate(instructions):
        if each.branches:
            *index, target = map(str, each.operands)
            names = tables.get(target, [target])
            ways = [next(way for scope in inside[number] if (way := name + scope) in labels) for name in names]
            instructions[number] = replace(each, operands=(*ways, *index))
    return instructions, labels


def _names(declared: str) -> Iterator[str]:
    """Yield the registers that a declaration names: `%r<3>` is %r0 to %r2."""
    for name in declared.split(","):
        stem, _, count = name.strip().rstrip(">").partition("<")
        yield from (f"{stem}{number}" for number in range(int(count))) if count else (stem,)


def _operands(text: str) -> Iterator[Operand]:
    """Yield an operand; of a tensor's box, in brackets too, the map and its coordinates."""
    names = tuple(re.findall(r"[^\s{}\[\],|]+", text))
    if match := _ADDRESS.fullmatch(text.strip()):
        yield Address(match[1], int(match[2] or "0", 0))
    elif text[0] == "[":
        yield from (names[0], names[1:])
    else:
        yield names if text[0] == "{" or "|" in text else text.strip()
