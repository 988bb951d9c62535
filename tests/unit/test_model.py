"""`tiebreak model`: a model's attention through kernels, on a model of two heads of which one has a sink."""

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


def attention(q, k, v, *, causal=False, scale=None):
    raise ValueError("my kernel says no")
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
    first, calls, rows, most, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith(f"FAIL: {file}:make: flash@paper is biased in 1 head of 2; ")
    assert "1 layer of 2 heads on 2, 16 sequences, 24 queries, 24 keys, d 16; " in calls
    assert "a P above 0.9 in 50.00 %" in rows
    assert "layer 0, head 1 (attend): " in most
    assert "a P above 0.9 in 100.00 %" in most
    assert model.main(words[:-1]) == 0
    assert capsys.readouterr().out.startswith("PASS: ")


def test_few_sequences_tell_nothing_and_what_is_not_told_is_not_fair(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert model.main([f"{file}:few", "flash@fused", "--fair"]) == 1
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("UNDECIDED: ")
    assert "  intervals   none: 16 sequences of tokens at least, 3 were given" in lines


def test_a_kernel_that_raises_is_named_beside_one_that_does_not(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert model.main([f"{file}:make", "flash@fused", f"{file}:attention", "--fair"]) == 1
    assert "ValueError: my kernel says no" in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"no kernel could be asked: ValueError: my kernel says no"):
        model.main([f"{file}:make", f"{file}:attention"])


def test_calls_that_no_kernel_takes_are_a_line(file: str) -> None:
    with pytest.raises(UsageError, match=r"no call of attention could be asked: calls with dropout$"):
        model.main([f"{file}:dropping", "flash@fused"])
