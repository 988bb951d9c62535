"""Names on a command line: comma lists and globs."""

import fnmatch
from collections.abc import Iterable


def split(names: str) -> list[str]:
    """The names of a comma list."""
    return [name.strip() for name in names.split(",") if name.strip()]


def matching(name: str, known: Iterable[str]) -> list[str]:
    """Names that equal `name` or match it as a glob; brackets are part of a name, as in tied_maxima[k=2]."""
    pattern = name.replace("[", "[[]")
    return [candidate for candidate in known if candidate == name or fnmatch.fnmatchcase(candidate, pattern)]
