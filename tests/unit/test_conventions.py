"""`tiebreak conventions`: kernels whose masks, sinks and biases are known."""

import json
from pathlib import Path

import pytest

from tiebreak.programs import conventions
from tiebreak.reports.errors import UsageError

FILE = """
import torch

import tiebreak


def weighed(q, k, v, hidden, fill):
    p = (q.float() @ k.float().mT).masked_fill(hidden, -torch.inf).softmax(-1)
    p = p if fill is None else torch.where(hidden.all(-1, keepdim=True), fill, p)
    return (p @ v.float()).to(q.dtype)


def corner(q, k, at, causal):
    return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1 + at) & causal


@tiebreak.kernel(backward="none")
def right(q, k, v, *, causal=False):
    return weighed(q, k, v, corner(q, k, k.shape[2] - q.shape[2], causal), None)


@tiebreak.kernel(backward="none")
def left(q, k, v, *, is_causal=False, attn_mask=None):
    hidden = corner(q, k, 0, is_causal)
    return weighed(q, k, v, hidden if attn_mask is None else hidden | ~attn_mask[0, 0], 1.0 / k.shape[2])


@tiebreak.kernel(backward="none")
def odd(q, k, v, *, causal=False):
    return weighed(q, k, v, corner(q, k, 1, causal), 0.0)


@tiebreak.kernel(backward="none")
def with_sink(q, k, v, *, sink=None):
    s = torch.cat([q.float() @ k.float().mT, sink.view(1, -1, 1, 1).expand(*q.shape[:3], 1).float()], -1)
    return (s.softmax(-1)[..., :-1] @ v.float()).to(q.dtype)


@tiebreak.kernel(backward="none")
def capped(q, k, v, *, bias=0.0, softcap=0.0):
    s = softcap * torch.tanh(q.float() @ k.float().mT / (softcap or 1.0)) + bias
    return (s.softmax(-1) @ v.float()).to(q.dtype)


def refusing(q, k, v, *, causal=False):
    raise ValueError("no")
"""
OBLONG = "causal, 3 rows, 7 keys", "causal, 7 rows, 3 keys"


def test_masks_sinks_and_biases_are_told_from_what_rows_of_o_weigh(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    names = ("right", "left", "odd", "with_sink", "capped", "refusing")
    targets = [f"{tmp_path}/mine.py:{name}" for name in names]
    assert conventions.main([*targets, "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [told["right"][name] for name in OBLONG] == ["lower right", "lower right; a row without keys is NaN"]
    assert [told["left"][name] for name in OBLONG] == ["upper left", "upper left"]
    assert told["left"]["a row without keys, by a mask"] == "the mean of V"
    assert told["odd"][OBLONG[0]] == "neither upper left nor lower right: rows see 2, 3, 4 keys"
    assert told["with_sink"] == {"a sink as high as all scores": "one more score, without a V"}
    assert told["capped"] == {"a bias and a soft cap": "the bias is added after the cap"}
    assert set(told["refusing"].values()) == {"raised ValueError"}
    assert conventions.main(targets[:1]) == 0
    assert "lower right; a row without keys is NaN" in " ".join(capsys.readouterr().out.split())


def test_what_is_not_installed_is_a_line() -> None:
    with pytest.raises(UsageError, match=r"^flash_attn: flash-attn is not installed"):
        conventions.main(["flash_attn"])
