"""Names on a command line: comma lists and globs, and the message for one that matches nothing."""

import difflib
import fnmatch
from collections.abc import Collection, Iterable, Sequence

from tiebreak.reports.errors import UsageError

_FEW = 8  # names that a message can list
_MEANT = 3  # names that it asks about, at most


def first_few(names: Sequence[str], most: int) -> str:
    """Return the first names of a list, and how many more there are."""
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def split(names: str) -> list[str]:
    """Return the names of a comma list."""
    return [name.strip() for name in names.split(",") if name.strip()]


def matching(name: str, known: Iterable[str]) -> list[str]:
    """Return names that equal `name` or match it as a glob; brackets are part of a name, as in tied_maxima[k=2]."""
    pattern = name.replace("[", "[[]")
    return [candidate for candidate in known if candidate == name or fnmatch.fnmatchcase(candidate, pattern)]


def unknown(kind: str, name: str, known: Collection[str], listed: str) -> str:
    """Return one line about a name that matches nothing, with those that may be meant, or else the known ones.

    `listed` says what lists the names if they are many, as in "`tiebreak list cases` names".
    """
    meant = _meant(name, known)
    hint = f"did you mean {' or '.join(meant)}?" if meant else _all_of(known, listed)
    return f"unknown {kind} {name!r}: {hint}"


def none_named(kind: str, known: Collection[str], listed: str) -> str:
    """Return the message for a list without a name; see `unknown`."""
    return f"no {kind} named: {_all_of(known, listed)}"


def pick(kind: str, names: str, known: Collection[str], listed: str, flag: str = "") -> list[str]:
    """Return the known names that a list's globs match, each once; UsageError if one has none. `flag`: the option."""
    picked, where = dict[str, None](), f"{flag}: " if flag else ""
    for name in split(names):
        if not (fitting := matching(name, known)):
            raise UsageError(f"{where}{unknown(kind, name, known, listed)}")
        picked |= dict.fromkeys(fitting)
    if not picked:
        raise UsageError(f"{where}{none_named(kind, known, listed)}")
    return list(picked)


def _meant(name: str, known: Collection[str]) -> list[str]:
    """Return names that are spelled alike, or that begin alike, or else those that contain this one."""
    bare = name.strip("*?")
    if not bare:
        return []
    begin = {word: word[: len(bare)] for word in known}
    alike = difflib.get_close_matches(bare, known, _MEANT) or difflib.get_close_matches(bare, set(begin.values()))
    meant = [each for each in known if each in alike or begin[each] in alike]
    return (meant or [each for each in known if bare.lower() in each.lower()])[:_MEANT]


def _all_of(known: Collection[str], listed: str) -> str:
    return f"known are {', '.join(known)}" if len(known) <= _FEW else f"{listed} them"
