"""The options of the matrix, said once: how they are parsed and refused, kept, forwarded, and given again."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiebreak.backends.registry import BACKENDS, CARDS
from tiebreak.cases.case import JOINED
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.experiments import kinds
from tiebreak.matrix.settings import Settings
from tiebreak.reports.errors import UsageError
from tiebreak.reports.names import split
from tiebreak.reports.records.record import Narrowing

Words = Sequence[str]  # of a command line


@dataclass(frozen=True)
class Option:
    """One option of the matrix. Of `pytest`, of `tiebreak check`, and of commands that rerun a cell."""

    name: str  # on the command line, without its dashes
    help: str  # one sentence
    metavar: str | None = None  # what its value is called; None, and no choices: it takes no value
    choices: Words | None = None  # the values that it may have; None: it says itself what it takes
    default: str | None = None  # its value where it is not given
    repeats: bool = False  # whether it may stand several times, each adding to the others
    needs: str | None = None  # the option that it means nothing without
    excludes: str | None = None  # the option that it makes meaningless
    recorded: bool = False  # whether it decides what runs, or what that is held to: a file of records keeps it
    narrows: Words = ()  # fields of a record by which it leaves cells out of a run
    brings: Callable[[Cell], bool] | None = None  # tells the cells that it brings in; None: its value lists names
    subject: bool = False  # whether it says what is under test: of that, a run that it narrows is a whole one
    forwarded: bool = True  # whether `tiebreak check` takes it too
    rerun: Callable[[Cell, Settings], Words] | None = None  # the words for one cell; None: other options say it all

    @property
    def flag(self) -> str:
        """As it stands on the command line."""
        return f"--{self.name}"

    @property
    def dest(self) -> str:
        """As parsers call its value."""
        return self.name.replace("-", "_")

    @property
    def once(self) -> bool:
        """Whether a second one would silently replace the first."""
        return not self.repeats and (self.metavar is not None or self.choices is not None)

    @property
    def parsing(self) -> dict[str, Any]:
        """What `add_argument` of argparse and `addoption` of pytest are given."""
        if self.metavar is None and self.choices is None:
            return {"action": "store_true", "help": self.help}
        how: dict[str, Any] = {"default": self.default, "help": self.help}
        how |= {"metavar": self.metavar} if self.metavar else {"choices": self.choices}
        return how | {"action": "append", "default": []} if self.repeats else how

    def words(self, value: object) -> list[str]:
        """The words that give it a value; none for a value that says nothing."""
        if value is None or value is False or value == []:
            return []
        if value is True:
            return [self.flag]
        values = map(str, _listed(value))
        pairs = ((f"{self.flag}={each}",) if each.startswith("-") else (self.flag, each) for each in values)
        return [word for pair in pairs for word in pair]


def _listed(value: Any) -> list[Any]:
    """The values of an option, which may take one or several."""
    return value if isinstance(value, list) else [value] if value else []


def _own_kernel(cell: Cell) -> bool:
    return cell.kernel.external


def _features(cell: Cell, _: Settings) -> Words:
    added = cell.experiment.name.split(JOINED)[1:]
    return ("--features", JOINED.join(added)) if added else ()


OPTIONS = (
    Option(
        "backend",
        f"backends to run, of {', '.join(BACKENDS)} (default: all that can; with --kernel: cpu)",
        metavar="NAMES",
        recorded=True,
        narrows=("backend",),
        subject=True,
        rerun=lambda cell, _: ("--backend", cell.backend.name),
    ),
    Option(
        "allow-missing",
        "backends that may be missing although --backend names them; without it the run falls",
        metavar="NAMES",
        needs="backend",
    ),
    Option(
        "as",
        f"with --backend interpreter, compute as one of {', '.join(CARDS)} would; nothing runs on it (docs/triton.md)",
        metavar="CARD",
        recorded=True,
        rerun=lambda cell, _: cell.backend.options,
    ),
    Option(
        "kernels",
        "the suite's kernels to run, also any rule@plan such as dithered@all_bf16; with --kernel: beside it",
        metavar="NAMES",
        recorded=True,
        narrows=("kernel",),
        rerun=lambda cell, _: () if cell.kernel.external else ("--kernels", cell.kernel.name),
    ),
    Option(
        "kernel",
        "add your own kernel: FILE.py:FUNCTION, package.module:function, or a TOML file that declares kernels; a"
        " function of (q, k, v, *, causal, scale) in (batch, heads, N, d) that returns O (docs/your-kernel.md says what"
        " else it may be); may be given several times; they run alone unless --kernels names others",
        metavar="TARGET",
        repeats=True,
        recorded=True,
        # Alone it leaves out the suite's kernels, and every backend but the default one for it.
        narrows=("kernel", "backend"),
        brings=_own_kernel,
        subject=True,
        forwarded=False,  # the targets of `check`
        rerun=lambda cell, _: cell.kernel.origin,  # with --declare, --plan and --backward
    ),
    Option(
        "declare",
        "what the signature of your own kernel does not tell: layout=bnhd, takes=gqa, square=true, multiple_of=64,"
        " head_dims=[64,128], options.NAME=VALUE, backward=none (docs/your-kernel.md)",
        metavar="WORD=VALUE",
        repeats=True,
        recorded=True,
        needs="kernel",
    ),
    Option(
        "plan",
        "hold your own kernel to what this rounding plan predicts, case by case; `tiebreak list plans` lists",
        metavar="NAME",
        recorded=True,
        needs="kernel",
    ),
    Option(
        "backward",
        "what your own kernel trains with in the training runs: its own backward pass (default; one that has none is"
        " skipped, and falls where this is said), or the suite's, behind its forward pass; such runs are labelled so"
        " and nothing is claimed of them",
        choices=("own", "emulated"),
        recorded=True,
        needs="kernel",
    ),
    Option(
        "fair",
        "hold your own kernel to no bias on every failure input; no deterministic cast of O can pass where O itself"
        " ties",
        recorded=True,
        needs="kernel",
        rerun=lambda cell, settings: ("--fair",) if _own_kernel(cell) and settings.fair else (),
    ),
    Option(
        "no-worse-than",
        "hold your own kernel, on every failure input, to no more bias than O has that is rounded once, from fp32",
        choices=("rounded",),
        recorded=True,
        needs="kernel",
        rerun=lambda cell, settings: (
            ("--no-worse-than", "rounded") if _own_kernel(cell) and settings.as_rounded else ()
        ),
    ),
    Option(
        "rules",
        "say of every call which acceptance rules in public use would pass it; `tiebreak rules` lists them, and"
        " `tiebreak rules FILE` shows what they said",
        rerun=lambda _, settings: ("--rules",) if settings.rules else (),
    ),
    Option(
        "captured",
        "add the q, k, v, dO in DIR/inputs-STEP.safetensors (docs/your-kernel.md) as cases, in the format that they"
        " are in, fp32 rounded to --dtype; they run alone unless --cases is given",
        metavar="DIR",
        recorded=True,
        narrows=("case",),
        brings=lambda cell: bool(cell.experiment.options),
        rerun=lambda cell, _: cell.experiment.options,
    ),
    Option(
        "cases",
        "cases to run, such as 'tied_maxima*' (default: all); `tiebreak list cases` lists",
        metavar="NAMES",
        recorded=True,
        narrows=("case",),
        rerun=lambda cell, _: ("--cases", cell.experiment.name.partition(JOINED)[0]),
    ),
    Option(
        "features",
        "run each case with each of these features added, such as window,sink,window+sink; softcap=30, sink=0 (how far"
        " below the maximum), window=100 (keys before a row's own) and pages=16 take a number (docs/your-kernel.md)",
        metavar="NAMES",
        recorded=True,
        narrows=("case",),
        brings=lambda cell: JOINED in cell.experiment.name,
        rerun=_features,
    ),
    Option(
        "experiments",
        f"kinds of experiment to run, of {', '.join(kinds())} (default: all but"
        f" {', '.join(name for name, kind in kinds().items() if kind.on_request)})",
        metavar="KINDS",
        recorded=True,
        narrows=("experiment",),
    ),
    Option(
        "dtype",
        "formats of q, k, v and O: bf16, fp16 (default: bf16)",
        metavar="NAMES",
        default="bf16",
        recorded=True,
        narrows=("format",),
        rerun=lambda cell, _: ("--dtype", cell.fmt.name),
    ),
    Option(
        "seed",
        "seed of all inputs (default: 1)",
        metavar="N",
        default="1",
        recorded=True,
        rerun=lambda _, settings: ("--seed", str(settings.seed)),
    ),
    Option(
        "heads",
        "heads a cell draws at first; up to 8 times as many (default: 256)",
        metavar="N",
        default="256",
        recorded=True,
        rerun=lambda _, settings: ("--heads", str(settings.heads)),
    ),
    Option(
        "cell-timeout",
        "seconds of CPU time that the kernel of a cell may take before its process is ended, with -n, and ten times"
        " that by the clock (default: 60 for a cell of your own,"
        " 600 for a training run of it; 15 times that in the interpreter); a look at more heads for which the time is"
        " too short is left out",
        metavar="S",
        recorded=True,
        # Without a worker nothing could end what hangs.
        rerun=lambda _, settings: (
            () if settings.cell_timeout is None else ("--cell-timeout", f"{settings.cell_timeout:g}", "-n", "1")
        ),
    ),
    Option(
        "budget",
        "time for the whole run, such as 60s or 5m: the cases that tell most come first, and what is left out is named"
        " (docs/your-kernel.md)",
        metavar="TIME",
        recorded=True,
        excludes="baseline",
    ),
    Option(
        "expected",
        "TOML file of excused failures: [[expected]] with cells, check, reason and perhaps expires; one that no"
        " longer fails, or has expired, is an error (default: [tool.tiebreak] in pyproject.toml)",
        metavar="FILE",
    ),
    Option("save", "keep the records as OUT/NAME.json", metavar="NAME"),
    Option("out", "folder for records (default: out)", metavar="DIR", default="out"),
    Option("baseline", "compare with these records and fail if a cell is worse (docs/ci.md)", metavar="FILE"),
    Option(
        "fail",
        "how much worse which measures may get: NAME:NUMBER, ...; NAME_share: of itself",
        metavar="LIMITS",
        needs="baseline",
    ),
    Option("across", "the baseline is another platform's: bits are not compared", needs="baseline"),
    Option("update-baseline", "then make this run the baseline", needs="baseline"),
)  # fmt: skip
_BY_NAME = {option.name: option for option in OPTIONS}

Values = Callable[[str], Any]  # what a command line gave an option, by its `dest`


def refuse_twice(words: Words) -> None:
    """Refuse an option that stands twice on a command line: the last would win, and the first go without a word.

    Raises:
        UsageError: one does; names it and its values.
    """
    for option in OPTIONS:
        places = [at for at, word in enumerate(words) if word == option.flag or word.startswith(f"{option.flag}=")]
        if option.once and len(places) > 1:
            values = [words[at].partition("=")[2] or words[min(at + 1, len(words) - 1)] for at in places]
            times = f"given {len(places)} times ({'; '.join(values)})"
            raise UsageError(f"{option.flag}: {times}; give it once, lists are comma-separated")


def given(value_of: Values) -> list[Option]:
    """The options that say something else than their defaults."""
    return [option for option in OPTIONS if value_of(option.dest) not in (None, False, "", [], option.default)]


def refuse_lonely(value_of: Values) -> None:
    """Refuse an option without the one that it is about.

    Raises:
        UsageError: there is one; names both.
    """
    names = [option.name for option in given(value_of)]
    for option in map(_BY_NAME.__getitem__, names):
        if option.needs is not None and option.needs not in names:
            needed = _BY_NAME[option.needs]
            raise UsageError(f"{option.flag} means nothing alone: it needs {needed.flag} {needed.metavar}")
        if option.excludes in names:
            excluded = _BY_NAME[str(option.excludes)].flag
            raise UsageError(f"{option.flag} leaves out other cells each time, and {excluded} compares all: give one")


def recorded(value_of: Values) -> dict[str, Any]:
    """The options that a file of records keeps, by name; None for one that says nothing."""
    values = {option.name: value_of(option.dest) for option in OPTIONS if option.recorded}
    return {name: " ".join(value) or None if isinstance(value, list) else value for name, value in values.items()}


def is_whole(value_of: Values) -> bool:
    """Whether a run has all cells that there are."""
    return not any(option.narrows for option in given(value_of))


def is_whole_of_subject(value_of: Values) -> bool:
    """Whether a run has all cells of the kernels and backends that it was pointed at."""
    return not any(option.narrows and not option.subject for option in given(value_of))


_PYTEST = {"-k": "keyword", "-m": "markexpr", "--deselect": "deselect"}  # pytest's own options that leave cells out


def narrowing(value_of: Values, cells: Iterable[Cell], collected: Collection[str]) -> tuple[Narrowing, ...]:
    """By which fields of a record the options leave cells out of a run, and which values of them they leave in.

    Args:
        value_of: the options; pytest's own among them.
        cells: that the options of the matrix leave in.
        collected: ids of those that pytest left of them; empty: that is not known yet.
    """
    named = [option for option in OPTIONS if option.words(value_of(option.dest))]
    by_field: dict[str, list[Option]] = {}
    for option in named:
        for field in option.narrows:
            by_field.setdefault(field, []).append(option)
    cells = list(cells)
    ids = tuple(cell.id for cell in cells if cell.id in collected)
    given = [f"{flag} {word}" for flag, name in _PYTEST.items() for word in _listed(value_of(name))]
    by_pytest = [Narrowing(tuple(given) or ("what pytest was given",), "id", ids)] if 0 < len(ids) < len(cells) else []
    return (*by_pytest, *(
        Narrowing(
            given=tuple(" ".join(option.words(value_of(option.dest))) for option in options),
            field=field,
            names=tuple(dict.fromkeys(name for option in options for name in _left_in(option, field, value_of, cells))),
        )
        for field, options in by_field.items()
    ))  # fmt: skip


_FIELDS: Mapping[str, Callable[[Cell], str]] = {
    "backend": lambda cell: cell.backend.name,
    "kernel": lambda cell: cell.kernel.name,
    "case": lambda cell: cell.experiment.name,
}  # of a record that are read off the cells which an option brings in


def _left_in(option: Option, field: str, value_of: Values, cells: Iterable[Cell]) -> list[str]:
    """Names or globs of what an option leaves in a run."""
    if option.brings is None:
        return split(str(value_of(option.dest)))
    return [_FIELDS[field](cell) for cell in cells if option.brings(cell)]


def rerun(cell: Cell, settings: Settings) -> list[str]:
    """The words that give one cell again."""
    return [word for option in OPTIONS if option.rerun is not None for word in option.rerun(cell, settings)]
