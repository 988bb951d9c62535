"""A user's file: what the type checker of `make lint` sees of the public names; an error that is missing is one too."""

from typing import assert_type

from torch import Tensor

import tiebreak
from tiebreak.reports.pairs.verdict import PairVerdict
from tiebreak.reports.verdict import Verdict


def calls() -> None:
    """Call what is public, rightly and wrongly; nothing runs this."""
    verdict = tiebreak.check("my.py:attention", cases="tied*", heads=64)
    assert_type(verdict, Verdict)
    assert_type(verdict.failed[0].reasons, tuple[str, ...])
    tiebreak.check("my.py:attention", head=64)  # type: ignore[call-arg]
    tiebreak.check("my.py:attention", no_worse_than="before")  # type: ignore[arg-type]
    assert_type(tiebreak.pair("a.py:f", "b.py:f", dtype="fp16"), PairVerdict)
    tiebreak.pair("a.py:f", "b.py:f", headz=1)  # type: ignore[call-arg]
    call = tiebreak.inputs("sink_tie", heads=64)
    assert_type(call.exact, Tensor)
    tiebreak.inputs("sink_tie", dtype="bf16")  # type: ignore[arg-type]
    tiebreak.assert_fair(call.exact, call.exact)
    tiebreak.assert_fair(call.exact)  # type: ignore[call-arg]
    mark = tiebreak.kernel(layout="bnhd", head_dims=[64], backward="none")
    assert_type(mark(len)("three"), int)
    tiebreak.kernel(layuot="bnhd")  # type: ignore[call-arg]
    tiebreak.kernel(multiple_of="64")  # type: ignore[arg-type]
    print(tiebreak.nothing)  # type: ignore[attr-defined]
