"""`tiebreak model`: a model's attention through kernels, on a model of two heads of which one has a sink."""

import json
import re
from pathlib import Path

import pytest

from tiebreak.programs import model
from tiebreak.reports.errors import UsageError

FILE = """
import torch
from torch import nn


class Attention(nn.Module):
    def forward(self, x, **more):
        q, k, v = x.unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        # In head 1 all values are 1, and the first key leaves 0.0035 of a row to the others: O-bar's cast loses it.
        here, first = torch.tensor([False, True])[:, None, None], torch.arange(x.shape[1])[:, None] == 0
        one = torch.ones(())
        q, k = torch.where(here, one, q), torch.where(here, 2.2 * first, k)
        return nn.functional.scaled_dot_product_attention(q, k, torch.where(here, one, v), **more)


class Model(nn.Module):
    def __init__(self, **more):
        super().__init__()
        self.embedded, self.attend, self.more = nn.Embedding(97, 96), Attention(), more

    def forward(self, tokens):
        return self.attend(self.embedded(tokens), **self.more)


def make(sequences=16, **more):
    torch.manual_seed(1)
    return Model(**more), torch.randint(97, (sequences, 24))


def few():
    return make(3)


def dropping():
    return make(dropout_p=0.5)


class Twice(Model):
    def forward(self, tokens):
        return super().forward(tokens) + self.attend(self.embedded(tokens), dropout_p=0.5)


def partly():
    torch.manual_seed(1)
    return Twice(), torch.randint(97, (160, 24))


def leaving():
    raise SystemExit(0)


def twice():
    module, tokens = make(1)
    return module, tokens.repeat(16, 1)


def attention(q, k, v, *, causal=False, scale=None):
    raise ValueError("my kernel says no")


def nan(q, k, v, *, causal=False, scale=None):
    o = other(q, k, v, scale=scale)
    o[0, 0, 3, 5] = torch.nan
    return o


def other(q, k, v, *, causal=False, scale=None):
    return nn.functional.scaled_dot_product_attention(q, k, v, scale=3 * scale)
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return str(path)


def test_the_head_that_has_a_sink_is_named_for_the_kernel_that_it_biases(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"{file}:make", "flash@paper", "flash@fused", "--fair"]
    assert model.main(words) == 1
    first, calls, rows, most, bias = capsys.readouterr().out.splitlines()
    assert first.startswith(f"FAIL: {file}:make: flash@paper is biased in 1 head of 2; ")
    assert "1 layer of 2 heads on 2, 16 sequences, 24 queries, 24 keys, d 16; " in calls
    assert "a P above 0.9 in 50.00 %" in rows
    assert "layer 0, head 1 (attend): " in most
    assert "a P above 0.9 in 100.00 %" in most
    # O errs by 2^-8: half an ulp of 1, or one of what lies just below it, as the exact O comes out in fp64.
    biased = re.match(r"  bias there  flash@paper (-\S+) \+- 0\.0000, flash@fused ", bias)
    assert biased is not None
    assert biased[1] in ("-0.5000", "-1.0000")
    assert model.main(words[:-1]) == 0
    assert capsys.readouterr().out.startswith("PASS: ")


def test_a_table_and_json_have_each_kernel_and_head(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # a narrower table is split
    words = [f"{file}:make", "flash@paper", "flash@fused", "--json"]
    assert model.main([*words, str(tmp_path / "model.json"), "-v"]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()[6:] if "@" in line}
    assert rows["flash@paper"][1:5] == ["1", "0", "0,", "1"]
    assert rows["flash@fused"][1:3] == ["0", "0"]
    assert model.main([*words, "-"]) == 0
    text = capsys.readouterr().out
    assert text == (tmp_path / "model.json").read_text(encoding="utf-8")
    data = json.loads(text)
    assert [head["verdict"]["flash@paper"] for head in data["heads"]] == ["unbiased", "biased"]
    assert data["heads"][1]["rows"]["a P above 0.9"] == 1.0
    assert data["heads"][1]["bias"]["flash@paper"]["mean"] in (pytest.approx(-0.5), pytest.approx(-1.0))


def test_few_sequences_tell_nothing_and_what_is_not_told_is_not_fair(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert model.main([f"{file}:few", "flash@fused", "--fair"]) == 1
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("UNDECIDED: ")
    assert "  intervals   none: 16 sequences of tokens at least, 3 were given" in lines


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        ("attention", "raised ValueError: my kernel says no"),
        ("nan", "has NaN or Inf in layer 0"),
        ("other", "is another function: O is off by "),
    ],
)
def test_a_kernel_that_raises_gives_nan_or_another_function_fails_without_fair_too(
    file: str, kernel: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert model.main([f"{file}:make", "flash@fused", f"{file}:{kernel}"]) == 1
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"FAIL: {file}:make: {file}:{kernel} {why}")
    assert any(line.startswith("  bias there  flash@fused ") for line in lines)
    assert model.main([f"{file}:make", "--fair", f"{file}:{kernel}"]) == 1


def test_calls_that_can_not_be_asked_leave_fairness_untold(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert model.main([f"{file}:partly", "fair", "--fair"]) == 1
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("UNDECIDED: ")
    assert first.endswith(" is biased in no head")
    assert "  not asked   1 call with dropout" in lines


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("dropping", r"no call of attention could be asked: calls with dropout$"),
        ("leaving", r"mine\.py:leaving: SystemExit: 0 \(mine\.py, line \d+\)$"),
        ("twice", r"tokens has a sequence twice"),
    ],
)
def test_models_that_can_not_be_asked_are_a_line(file: str, function: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        model.main([f"{file}:{function}", "flash@fused"])
