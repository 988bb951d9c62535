"""Plans of vendors' kernels: the emulation takes them, `tiebreak list vendors` says them."""

import pytest

from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.formats import Rounding
from tiebreak.programs.listing import VENDOR_PLANS
from tiebreak.reports import cli


def test_casts_are_those_that_the_sources_name() -> None:
    casts = {
        name: (parsed.plan.p_bar.rounding, parsed.plan.o.rounding)
        for name, known in VENDOR_PLANS.items()
        if (parsed := parse_declaration(known.plan)).plan.p_bar.narrows
    }
    away, even, zero = Rounding.RTNA, Rounding.RNE, Rounding.RTZ
    others = {
        "ascend_training": (away, away),
        "ascend_decode": (away, even),
        "aiter_gfx942": (away, away),
        "aiter_gfx942_zero": (zero, zero),
    }
    assert casts == dict.fromkeys(VENDOR_PLANS, (even, even)) | others


def test_they_are_listed_with_their_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "vendors"]) == 0
    printed = capsys.readouterr().out
    for known in VENDOR_PLANS.values():
        assert all(text in printed for text in (known.name, known.kernel, known.plan, known.source, known.note))
    assert cli.main(["list", "vendors", "flash_attention_*"]) == 0
    assert capsys.readouterr().out.count("Dao-AILab/flash-attention") == 3
    assert cli.main(["list", "vendors", "flash_atention_2"]) == 2
    assert "unknown vendor 'flash_atention_2': did you mean flash_attention_2" in capsys.readouterr().err
