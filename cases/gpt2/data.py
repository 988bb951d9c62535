"""Tokens and batches: the same sequence to the byte for every variant, on every platform."""

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np
import torch
from numpy.random import Philox, SeedSequence
from numpy.typing import NDArray
from torch import Tensor

Tokens = NDArray[np.uint16]


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
