"""Tokens and batches: the same sequence to the byte for every variant, on every platform."""

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from numpy.random import Philox, SeedSequence
from numpy.typing import NDArray
from torch import Tensor

Tokens = NDArray[np.uint16]

TRAINING_FILE = "train.bin"  # as nanoGPT's prepare.py names it
_CHUNK = 1 << 24  # tokens looked at together: a file may be larger than memory


class DataError(ValueError):
    """Token data that can't be trained on; the message names the file and what to do, in one line."""


@dataclass(frozen=True)
class Corpus:
    """A text with one token a character."""

    tokens: Tokens  # (characters,), indices into the vocabulary
    vocabulary: str  # every character that occurs, sorted


@cache
def corpus() -> Corpus:
    """Return the text that ships with the suite: sections of the Python language reference (LICENSE-corpus.txt)."""
    text = files("tiebreak.cases.gpt2").joinpath("corpus.txt").read_bytes()
    characters, tokens = np.unique(np.frombuffer(text, dtype=np.uint8), return_inverse=True)
    shared = tokens.astype(np.uint16)
    shared.flags.writeable = False
    return Corpus(shared, characters.tobytes().decode("ascii"))


def read_bin(folder: Path, vocabulary: int, context: int) -> Tokens:
    """Map nanoGPT's token file `train.bin` in a folder, uint16, little-endian, without loading it.

    Raises DataError: no file, half a token, no more tokens than `context`, or a token that is not below `vocabulary`.
    """
    path = folder / TRAINING_FILE
    if not path.is_file():
        raise DataError(f"{path}: no such file; nanoGPT's data/*/prepare.py writes it")
    size = path.stat().st_size
    if size % 2:
        raise DataError(f"{path}: {size} bytes are no whole number of uint16 tokens; the file is cut short")
    if size // 2 <= context:
        raise DataError(f"{path}: {size // 2} tokens, at least {context + 1} are needed for a context of {context}")
    tokens: Tokens = np.memmap(path, dtype="<u2", mode="r")
    for start in range(0, len(tokens), _CHUNK):
        beyond = np.flatnonzero(tokens[start : start + _CHUNK] >= vocabulary)
        if len(beyond):
            at = start + int(beyond[0])
            raise DataError(f"{path}: token {tokens[at]} at position {at} is not below the vocabulary of {vocabulary}")
    return tokens


@dataclass(frozen=True)
class Batches:
    """A sequence of batches: replayed for every variant, resumed at any step."""

    tokens: Tokens  # the text
    sequences: int  # of a batch
    context: int  # tokens of a sequence
    seed: int  # of the sequence of batches

    def __post_init__(self) -> None:
        if len(self.tokens) <= self.context:
            raise DataError(f"{len(self.tokens)} tokens, at least {self.context + 1} are needed")

    def starts(self, step: int) -> list[int]:
        """Return where the sequences of a step's batch begin in the text."""
        # Raw bits: NumPy promises that they never change, which it does not of its distributions.
        raw = Philox(SeedSequence([self.seed, step])).random_raw(self.sequences)
        return [int(bits) % (len(self.tokens) - self.context) for bits in raw]

    def batch(self, step: int, part: int = 0, parts: int = 1) -> tuple[Tensor, Tensor]:
        """Return tokens and those that follow each, int64 (sequences, context), of one of several parts of a batch."""
        size = self.sequences // parts
        starts = self.starts(step)[part * size : (part + 1) * size]
        both = torch.from_numpy(np.stack([self.tokens[at : at + self.context + 1] for at in starts]).astype(np.int64))
        return both[:, :-1], both[:, 1:]

    def digest(self, steps: int) -> str:
        """Return the SHA-256 of the first batches: equal digests mean equal training data."""
        sha256 = hashlib.sha256()
        for step in range(steps):
            for part in self.batch(step):
                sha256.update(part.numpy().astype("<i8").tobytes())
        return sha256.hexdigest()


def batches_of(folder: Path | None, vocabulary: int, context: int, sequences: int, seed: int) -> Batches:
    """Return the batches of a run, from token data in a folder (see `read_bin`) or, at None, of the text that ships."""
    tokens = corpus().tokens if folder is None else read_bin(folder, vocabulary, context)
    return Batches(tokens, sequences, context, seed)
