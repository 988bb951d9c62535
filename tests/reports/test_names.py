import pytest

from tiebreak.reports.names import none_named, unknown

pytestmark = pytest.mark.quick

CASES = (
    "tied_maxima[k=2]",
    "tied_maxima[k=3]",
    "sink_tie",
    "no_tail",
    "random",
    "random_odd",
    "huge",
    "flat",
    "one_key",
)
LISTED = "`tiebreak list cases` names"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("randum", "did you mean random or random_odd?"),
        ("tide*", "did you mean tied_maxima[k=2] or tied_maxima[k=3]?"),
        ("tide_maxima", "did you mean tied_maxima[k=2] or tied_maxima[k=3]?"),
        ("*KEY*", "did you mean one_key?"),
        ("qqqq", "`tiebreak list cases` names them"),
        ("*", "`tiebreak list cases` names them"),
        ("", "`tiebreak list cases` names them"),
    ],
)
def test_an_unknown_name_is_told_what_may_be_meant_and_never_all_of_many(name: str, message: str) -> None:
    assert unknown("case", name, CASES, LISTED) == f"unknown case {name!r}: {message}"


def test_few_names_are_listed_where_none_is_alike() -> None:
    assert unknown("backend", "qq", ["cpu", "cuda"], LISTED) == "unknown backend 'qq': known are cpu, cuda"
    assert unknown("backend", "gpu", ["cpu", "cuda"], LISTED) == "unknown backend 'gpu': did you mean cpu?"
    assert none_named("backend", ["cpu", "cuda"], LISTED) == "no backend named: known are cpu, cuda"
    assert none_named("case", CASES, LISTED) == "no case named: `tiebreak list cases` names them"
