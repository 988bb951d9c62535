"""Token data of one's own, as a real run takes them."""

from pathlib import Path

import numpy as np

from tiebreak.cases.gpt2.data import Batches, DataError, Tokens, corpus

TRAINING_FILE = "train.bin"  # as nanoGPT's prepare.py names it
_CHUNK = 1 << 24  # tokens looked at together: a file may be larger than memory


def read_bin(folder: Path, vocabulary: int, context: int) -> Tokens:
    """nanoGPT's token file `train.bin` in a folder: uint16, little-endian, mapped, not loaded.

    DataError: no file, half a token, no more tokens than `context`, or one that is not below `vocabulary`.
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


def batches_of(folder: Path | None, vocabulary: int, context: int, sequences: int, seed: int) -> Batches:
    """The batches of a run, from token data in a folder (see `read_bin`) or, at None, of the text that ships."""
    tokens = corpus().tokens if folder is None else read_bin(folder, vocabulary, context)
    return Batches(tokens, sequences, context, seed)
