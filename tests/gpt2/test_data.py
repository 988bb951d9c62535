"""Tokens and batches: replayed to the byte, and errors of token files in one line."""

from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch

from tiebreak.cases.gpt2.data import Batches, DataError, corpus, read_bin

# Of the first 50 batches that every snippet trains on. Another digest is another experiment.
DIGEST = "68dedc1f4c57799267a4269b5f46146e424ce763bdab0236e536f67abaf41ad2"


def _write(folder: Path, tokens: list[int]) -> Path:
    np.array(tokens, dtype="<u2").tofile(folder / "train.bin")
    return folder


def test_the_corpus_is_the_text_that_ships() -> None:
    shipped = corpus()
    text = files("tiebreak.cases.gpt2").joinpath("corpus.txt").read_bytes()
    assert "".join(shipped.vocabulary[token] for token in shipped.tokens).encode("ascii") == text
    assert len(text) <= 200_000
    assert "".join(sorted(set(shipped.vocabulary))) == shipped.vocabulary


def test_the_corpus_comes_with_its_licence() -> None:
    licence = files("tiebreak.cases.gpt2").joinpath("LICENSE-corpus.txt").read_text(encoding="utf-8")
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in licence
    assert "pydoc_data.topics" in licence


def test_batches_replay_to_the_byte() -> None:
    assert Batches(corpus().tokens, 8, 64, 7).digest(50) == DIGEST


def test_the_parts_of_a_batch_make_it_up() -> None:
    batches = Batches(corpus().tokens, 6, 8, 0)
    whole = batches.batch(3)
    for parts in (1, 2, 3):
        pieces = [batches.batch(3, part, parts) for part in range(parts)]
        for side in (0, 1):
            assert torch.equal(torch.cat([piece[side] for piece in pieces]), whole[side])


def test_targets_are_the_tokens_that_follow() -> None:
    batches = Batches(np.arange(100, dtype=np.uint16), 3, 10, 0)
    tokens, targets = batches.batch(0)
    assert tokens.shape == targets.shape == (3, 10)
    assert bool((targets == tokens + 1).all())
    assert tokens[:, 0].tolist() == batches.starts(0)


def test_every_window_of_the_text_can_come_and_seeds_give_other_batches() -> None:
    batches = Batches(np.arange(6, dtype=np.uint16), 1, 4, 0)
    assert {batches.starts(step)[0] for step in range(50)} == {0, 1}
    digests = {Batches(corpus().tokens, 2, 8, seed).digest(2) for seed in range(4)}
    assert len(digests) == 4


def test_a_token_file_is_read(tmp_path: Path) -> None:
    assert read_bin(_write(tmp_path, [3, 1, 4, 1, 5]), vocabulary=6, context=4).tolist() == [3, 1, 4, 1, 5]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "0 tokens, at least 5 are needed for a context of 4"),
        ([1, 2, 3, 4], "4 tokens, at least 5 are needed for a context of 4"),
        ([1, 2, 3, 6, 0], "token 6 at position 3 is not below the vocabulary of 6"),
    ],
)
def test_a_bad_token_file_is_one_clear_line(tmp_path: Path, tokens: list[int], message: str) -> None:
    with pytest.raises(DataError) as raised:
        read_bin(_write(tmp_path, tokens), vocabulary=6, context=4)
    assert str(raised.value) == f"{tmp_path / 'train.bin'}: {message}"


def test_a_file_cut_in_a_token_none_at_all_and_a_text_too_short_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train\.bin: no such file; nanoGPT's .* writes it"):
        read_bin(tmp_path, vocabulary=6, context=4)
    (tmp_path / "train.bin").write_bytes(b"\0" * 21)
    with pytest.raises(DataError, match="21 bytes are no whole number of uint16 tokens"):
        read_bin(tmp_path, vocabulary=6, context=4)
    with pytest.raises(DataError, match="4 tokens, at least 5 are needed"):
        Batches(np.zeros(4, dtype=np.uint16), 1, 4, 0)
