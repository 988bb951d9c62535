"""Tokens and batches: replayed to the byte, and errors of token files in one line."""

from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch

from tiebreak.cases.gpt2.data import Batches, DataError, corpus
from tiebreak.laboratory.tokens import read_bin

# Of the first 50 batches that every snippet trains on. Another digest is another experiment.
DIGEST = "68dedc1f4c57799267a4269b5f46146e424ce763bdab0236e536f67abaf41ad2"


def test_the_corpus_is_the_text_that_ships() -> None:
    shipped = corpus()
    text = files("tiebreak.cases.gpt2").joinpath("corpus.txt").read_bytes()
    assert "".join(shipped.vocabulary[token] for token in shipped.tokens).encode("ascii") == text
    assert len(text) <= 200_000
    assert "".join(sorted(set(shipped.vocabulary))) == shipped.vocabulary
    licence = files("tiebreak.cases.gpt2").joinpath("LICENSE-corpus.txt").read_text(encoding="utf-8")
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in licence
    assert "pydoc_data.topics" in licence


def test_batches_replay_to_the_byte_and_their_parts_make_them_up() -> None:
    assert Batches(corpus().tokens, 8, 64, 7).digest(50) == DIGEST
    batches = Batches(corpus().tokens, 6, 8, 0)
    whole = batches.batch(3)
    for parts in (1, 2, 3):
        pieces = [batches.batch(3, part, parts) for part in range(parts)]
        for side in (0, 1):
            assert torch.equal(torch.cat([piece[side] for piece in pieces]), whole[side])


def test_every_window_of_the_text_can_come_and_seeds_give_other_batches() -> None:
    batches = Batches(np.arange(6, dtype=np.uint16), 1, 4, 0)
    assert {batches.starts(step)[0] for step in range(50)} == {0, 1}
    digests = {Batches(corpus().tokens, 2, 8, seed).digest(2) for seed in range(4)}
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "0 tokens, at least 5 are needed for a context of 4"),
        ([1, 2, 3, 4], "4 tokens, at least 5 are needed for a context of 4"),
        ([1, 2, 3, 6, 0], "token 6 at position 3 is not below the vocabulary of 6"),
        ([3, 1, 4, 1, 5], None),
        (b"\0" * 21, "21 bytes are no whole number of uint16 tokens; the file is cut short"),
        (None, "no such file; nanoGPT's data/*/prepare.py writes it"),
    ],
)
def test_a_token_file_is_read_or_refused_in_one_clear_line(
    tmp_path: Path, content: list[int] | bytes | None, message: str | None
) -> None:
    path = tmp_path / "train.bin"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else np.array(content, dtype="<u2").tobytes())
    if message is None:
        assert read_bin(tmp_path, vocabulary=6, context=4).tolist() == content
        return
    with pytest.raises(DataError) as raised:
        read_bin(tmp_path, vocabulary=6, context=4)
    assert str(raised.value) == f"{path}: {message}"
    with pytest.raises(DataError, match="4 tokens, at least 5 are needed"):
        Batches(np.zeros(4, dtype=np.uint16), 1, 4, 0)
