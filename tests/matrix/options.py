"""The options of the matrix: how they are parsed and refused, kept, and given again by the command of one cell."""

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiebreak.backends.registry import BACKENDS, resolved, target_of
from tiebreak.cases.case import JOINED
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.experiments import kinds
from tiebreak.matrix.workbench import Settings
from tiebreak.plugins import registered
from tiebreak.reports.errors import UsageError
from tiebreak.reports.names import split
from tiebreak.reports.records.record import Narrowing

Values = Callable[[str], Any]  # what a command line gave an option, by its `dest`
NO_BUDGET = "none"  # of --budget: all cells, however long they take


@dataclass(frozen=True)
class Option:
    """One option, of `pytest` and of `tiebreak check`."""

    name: str  # on the command line, without its dashes
    metavar: str | None  # what its value is called; None, and no choices: it takes no value
    help: str  # one sentence
    choices: tuple[str, ...] | None = None  # the values that it may have; None: it says itself what it takes
    default: str | None = None  # its value where it is not given
    repeats: bool = False  # whether it may be given several times, each adding to the others
    needs: str | None = None  # the option without which it means nothing
    narrows: tuple[str, ...] = ()  # fields of a record by which it leaves cells out of a run
    form: tuple[str, str] = ("(?s).*", "")  # what its value matches, and that in words
    look: str | None = None  # the plug-in of `tiebreak.checks` that does it: without it there is no such option

    @property
    def flag(self) -> str:
        """The flag, with dashes."""
        return f"--{self.name}"

    @property
    def dest(self) -> str:
        """The name of its value in a namespace."""
        return self.name.replace("-", "_")

    @property
    def once(self) -> bool:
        """True if a second one would silently replace the first."""
        return not self.repeats and (self.metavar is not None or self.choices is not None)

    @property
    def parsing(self) -> dict[str, Any]:
        """The keyword arguments for `add_argument` of argparse and `addoption` of pytest."""
        if self.metavar is None and self.choices is None:
            return {"action": "store_true", "help": self.help}
        how: dict[str, Any] = {"default": self.default, "help": self.help}
        how |= {"metavar": self.metavar} if self.metavar else {"choices": self.choices}
        return how | {"action": "append", "default": []} if self.repeats else how

    def words(self, value: object) -> list[str]:
        """Return the words that give it a value; none for a value that changes nothing."""
        if value is True:
            return [self.flag]
        values = value if isinstance(value, list) else [value] if value else []
        pairs = ((f"{self.flag}={each}",) if str(each).startswith("-") else (self.flag, str(each)) for each in values)
        return [word for pair in pairs for word in pair]


_POSITIVE = ("0*[1-9][0-9]{0,17}", "a positive integer")
OPTIONS = {option.name: option for option in (
    Option("backend", "NAMES",
           f"run on {', '.join(BACKENDS)}, torch:DEVICE, FILE.py:NAME (default: all that can; with --kernel: cpu)",
           narrows=("backend",)),
    Option("allow-missing", "NAMES",
           "backends that may be missing although --backend names them; without it the run fails", needs="backend"),
    Option("as", "CARD",
           "with --backend interpreter or ptx, compute as this one would, such as sm_80 or gfx942; nothing runs on it"
           " (docs/triton.md)"),
    Option("kernels", "NAMES",
           "the suite's kernels to run, also any rule@plan such as dithered@all_bf16; with --kernel: in addition to it",
           narrows=("kernel",)),
    Option("kernel", "TARGET",
           "add your own kernel: FILE.py:FUNCTION, package.module:function or an adapter; a"
           " function of (q, k, v, *, causal, scale) in (batch, heads, N, d) that returns O (docs/your-kernel.md says"
           " what else it may be); may be given several times; they run alone unless --kernels names others",
           repeats=True, narrows=("kernel", "backend")),  # alone it leaves out all backends but its default one
    Option("declare", "WORD=VALUE",
           "what the signature of your own kernel does not tell: layout=bnhd, takes=gqa, square=true, multiple_of=64,"
           " head_dims=[64,128], options.NAME=VALUE, backward=none (docs/your-kernel.md)",
           repeats=True, needs="kernel"),
    Option("plan", "NAME",
           "hold your own kernel to what this rounding plan predicts, case by case; `tiebreak list plans` lists",
           needs="kernel"),
    Option("backward", None,
           "what your own kernel trains with in the training runs: its own backward pass (default; one that has none is"
           " skipped, and fails where this is said), or the suite's, behind its forward pass; such runs are labelled so"
           " and nothing is claimed of them", choices=("own", "emulated"), needs="kernel"),
    Option("fair", None,
           "hold your own kernel to no bias on every failure input; no deterministic cast of O can pass where O itself"
           " ties", needs="kernel"),
    Option("no-worse-than", None,
           "hold your own kernel, on every failure input, to no more bias than O has that is rounded once, from fp32",
           choices=("rounded",), needs="kernel"),
    Option("rules", None,
           "say of every call which acceptance rules in public use would pass it; `tiebreak rules` lists them, and"
           " `tiebreak rules FILE` shows what they said", look="rules"),
    Option("captured", "DIR",
           "add the q, k, v, dO in DIR/inputs-STEP.safetensors (docs/your-kernel.md) as cases, in the format that they"
           " are in, fp32 rounded to --dtype; they run alone unless --cases is given", narrows=("case",)),
    Option("cases", "NAMES", "cases to run, such as 'tied_maxima*' (default: all); `tiebreak list cases` lists",
           narrows=("case",)),
    Option("features", "NAMES",
           "run each case with each of these features added, such as window,sink,window+sink; softcap=30, sink=0 (how"
           " far below the maximum), window=100 (keys before a row's own) and pages=16 take a number"
           " (docs/your-kernel.md)", narrows=("case",)),
    Option("experiments", "KINDS",
           f"kinds of experiment to run, of {', '.join(kinds())} (default: all but"
           f" {', '.join(name for name, kind in kinds().items() if kind.on_request)})", narrows=("experiment",)),
    Option("dtype", "NAMES", "formats of q, k, v and O: bf16, fp16 (default: bf16)", default="bf16",
           narrows=("format",)),
    Option("seed", "N", "seed of all inputs (default: 1)", default="1", form=_POSITIVE),
    Option("heads", "N", "heads a cell draws at first; up to 8 times as many (default: 256)", default="256",
           form=_POSITIVE),
    Option("cell-timeout", "S",
           "seconds of CPU time that the kernel of a cell may take before its process is ended, with -n, and ten times"
           " that by the clock (default: 60 for a cell of your own, 600 for a training run of it; 15 times that in the"
           " interpreter); a look at more heads for which the time is too short is left out",
           form=(r"(?=.*[1-9])[0-9]{1,9}(\.[0-9]+)?", "a positive number of seconds")),
    Option("budget", "TIME",
           "time for the whole run, such as 60s or 5m: the cases that tell most come first, and what is left out is"
           f" named and fails nothing; {NO_BUDGET}: all (default: all, on a slow backend what two minutes of CPU time"
           " do)"),
    Option("expected", "FILE",
           "TOML file of excused failures: [[expected]] with cells, check, reason and perhaps expires; one that no"
           " longer fails, or has expired, is an error (default: [tool.tiebreak] in pyproject.toml)"),
    Option("save", "NAME", "keep the records as OUT/NAME.json",
           form=(r"[^./\\][^/\\]*", "a plain name such as main; its folder is --out")),
    Option("out", "DIR", "folder for records (default: out)", default="out"),
    Option("baseline", "FILE", "compare with these records and fail if a cell is worse (docs/ci.md)"),
    Option("fail", "LIMITS", "how much worse which measures may get: NAME:NUMBER, ...; NAME_share: of itself",
           needs="baseline"),
    Option("across", None, "the baseline is another platform's: bits are not compared", needs="baseline"),
    Option("update-baseline", None, "then make this run the baseline", needs="baseline"),
) if option.look is None or option.look in registered("tiebreak.checks")}  # fmt: skip
#: Options that `tiebreak check` takes too, which has its targets for --kernel.
FORWARDED = {option.dest: option for option in OPTIONS.values() if option.name != "kernel"}
_OF_OUTPUT = {"allow-missing", "rules", "expected", "save", "out", "baseline", "fail", "across", "update-baseline"}
#: Options that decide what runs, or what it is compared with: a file of records keeps them.
RECORDED = tuple(name for name in OPTIONS if name not in _OF_OUTPUT)
_SUBJECT = ("backend", "kernel")  # what is under test: of that, a run that they narrow is a whole one
#: The cells that an option brings in, of those whose value lists no names of a record's.
_BRINGS: Mapping[str, Callable[[Cell], bool]] = {
    "kernel": lambda cell: cell.kernel.external,
    "captured": lambda cell: bool(cell.experiment.options),
    "features": lambda cell: JOINED in cell.experiment.name,
}
_PYTEST = {"-k": "keyword", "-m": "markexpr", "--deselect": "deselect"}  # pytest's own options that leave cells out


def refuse_twice(words: Sequence[str]) -> None:
    """Refuse, with a `UsageError`, an option that is given twice: the last would silently win."""
    for option in OPTIONS.values():
        places = [at for at, word in enumerate(words) if word == option.flag or word.startswith(f"{option.flag}=")]
        if option.once and len(places) > 1:
            values = [words[at].partition("=")[2] or words[min(at + 1, len(words) - 1)] for at in places]
            times = f"given {len(places)} times ({'; '.join(values)})"
            raise UsageError(f"{option.flag}: {times}; give it once, lists are comma-separated")


def refuse_wrong(value_of: Values) -> None:
    """Refuse, with a `UsageError`, a value of another form, and options that lack another or exclude it."""
    given = _given(value_of)
    for option in OPTIONS.values():
        text, (pattern, words) = value_of(option.dest), option.form
        if isinstance(text, str) and not re.fullmatch(pattern, text):
            raise UsageError(f"{option.flag} {text}: expected {words}")
    for option in given:
        if option.needs is not None and (needed := OPTIONS[option.needs]) not in given:
            raise UsageError(f"{option.flag} means nothing alone: it needs {needed.flag} {needed.metavar}")
    if value_of("baseline") and value_of("budget") not in (None, NO_BUDGET):
        raise UsageError("--budget leaves out other cells each time, and --baseline compares all: give one")


def recorded(value_of: Values) -> dict[str, Any]:
    """Return the options that a file of records keeps, by name; None for one that changes nothing."""
    values = {name: value_of(OPTIONS[name].dest) for name in RECORDED}
    return {name: " ".join(value) or None if isinstance(value, list) else value for name, value in values.items()}


def stated(kept: Mapping[str, Any]) -> Values:
    """Return the options that a command line gave, as a file of records keeps them: `recorded`, read again."""
    values = {option: kept.get(option.name) for option in OPTIONS.values()}
    return {option.dest: str(value or "").split() if option.repeats else value for option, value in values.items()}.get


def is_whole(value_of: Values, *, of_subject: bool = False) -> bool:
    """Return whether a run has all cells that there are, or all of the kernels and backends it was given."""
    return not any(each.narrows and not (of_subject and each.name in _SUBJECT) for each in _given(value_of))


def is_default(value_of: Values) -> bool:
    """Return whether it is a check of a user's kernel without options: none chooses cells, or all of them."""
    choosing = ("cases", "captured", "features", "experiments", "budget", "baseline", *_PYTEST.values())
    return bool(value_of("kernel")) and not any(value_of(name) for name in choosing)


def _given(value_of: Values) -> list[Option]:
    """Return the options that differ from their defaults."""
    return [each for each in OPTIONS.values() if value_of(each.dest) not in (None, False, "", [], each.default)]


def narrowing(value_of: Values, cells: Iterable[Cell], collected: Collection[str]) -> tuple[Narrowing, ...]:
    """Return by which fields of a record options leave cells out, pytest's own included, and which values stay in.

    `cells` are those that the matrix' options leave, and `collected` those of them that pytest's own leave; empty if
    that is not known yet.
    """
    cells = list(cells)
    left_out = []
    ids = tuple(cell.id for cell in cells if cell.id in collected)
    if 0 < len(ids) < len(cells):
        values = {flag: value_of(name) or [] for flag, name in _PYTEST.items()}
        lists = {flag: value if isinstance(value, list) else [value] for flag, value in values.items()}
        flags = tuple(f"{flag} {word}" for flag, words in lists.items() for word in words)
        left_out = [Narrowing(flags or ("what pytest was given",), "id", ids)]
    fields: dict[str, tuple[list[str], list[str]]] = {}  # by field: the options, and the names that they leave in
    for option in OPTIONS.values():
        value = value_of(option.dest)
        for field in option.narrows if (words := option.words(value)) else ():
            given, names = fields.setdefault(field, ([], []))
            given.append(" ".join(words))
            if option.name not in _BRINGS:
                names += split(resolved(value) if option.name == "backend" else str(value))
                continue
            for cell in filter(_BRINGS[option.name], cells):
                names.append(
                    {"backend": cell.backend.name, "kernel": cell.kernel.name}.get(field, cell.experiment.name)
                )
    by_fields = (Narrowing(tuple(given), each, tuple(dict.fromkeys(names))) for each, (given, names) in fields.items())
    return (*left_out, *by_fields)


def command(cell: Cell, settings: Settings) -> str:
    """Return the command that reruns one cell, as pytest's own name runs it."""
    users = cell.kernel.external
    case, *features = cell.experiment.name.split(JOINED)
    words = ["pytest", *settings.matrix, "--backend", target_of(cell.backend.name), *cell.backend.options]
    words += cell.kernel.origin if users else ("--kernels", cell.kernel.name)  # with --declare, --plan and --backward
    words += ["--fair"] if users and settings.fair else []
    words += ["--no-worse-than", "rounded"] if users and settings.as_rounded else []
    words += ["--rules"] if settings.rules else []
    words += [*cell.experiment.options, "--cases", case]
    words += ["--features", JOINED.join(features)] if features else []
    words += ["--dtype", cell.fmt.name, "--seed", str(settings.seed), "--heads", str(settings.heads)]
    if settings.cell_timeout is not None:
        words += ["--cell-timeout", f"{settings.cell_timeout:g}", "-n", "1"]  # without a worker nothing ends what hangs
    return shlex.join(words)
