"""A small language model that every machine makes alike, and what attention makes of its log-probabilities.

It trains in fp64, where machines differ by far less than bf16 shows, and its weights are then rounded to bf16: they
have the same bits wherever they were made, and their digest says so; a file keeps them. Its tokens are its own samples,
as those of a serving engine are; what is compared is the log-probability of each of them, in nats.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib.resources import files
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from tiebreak.cases.gpt2.attention import FP32_ATTENTION, HeadKernel
from tiebreak.cases.gpt2.data import corpus
from tiebreak.cases.gpt2.model import GPT2, Configuration, KeyValueCache, everywhere
from tiebreak.kernels.arithmetic import Arithmetic

VERSION = 1  # raised when the recipe changes: log-probabilities of other versions are not comparable
SEQUENCES, CONTEXT = 32, 128  # of the evaluation: 4,064 tokens have a log-probability, all but the first of a sequence
CHUNK = 32  # tokens of a prefill in chunks
CONFIGURATION = Configuration(3, 2, 64, CONTEXT, len(corpus().vocabulary))
DIGEST = "d33b5915c0a09f71"  # of weights and tokens
_FILE, TOKENS = "fixture.npz", "tokens"  # and its part that is no weight
_SEED = 1
EXACT = HeadKernel(FP32_ATTENTION)  # instead of a kernel: in fp64 attention is PyTorch's
NO_ARITHMETIC = cast(Arithmetic, None)  # likewise


class Way(Enum):
    """A way of passing the tokens of a sequence through the model."""

    PREFILL = "one prefill"
    CHUNKS = f"prefill in chunks of {CHUNK}"
    DECODE = "decode with a cache"
    ALONE = "one sequence at a time"

    @property
    def tokens(self) -> int:
        """The number of tokens that one call takes."""
        return {Way.CHUNKS: CHUNK, Way.DECODE: 1}.get(self, CONTEXT)

    @property
    def sequences(self) -> int:
        """The number of sequences that one call takes."""
        return 1 if self is Way.ALONE else SEQUENCES


@dataclass(frozen=True)
class Fixture:
    """The model and the tokens."""

    weights: Mapping[str, Tensor]  # by parameter, fp64, each a bf16 number
    tokens: Tensor  # (SEQUENCES, CONTEXT), int64, sampled by the model with exact attention
    digest: str  # of both


@dataclass(frozen=True)
class Read:
    """The log-probabilities that a model computes of the tokens."""

    log_probabilities: Tensor  # (SEQUENCES, CONTEXT - 1), nats, fp64: of every token but the first
    streams: tuple[Tensor, ...]  # after each layer, (SEQUENCES, CONTEXT, width), fp64


@cache
def fixture() -> Fixture:
    """Return the model and its tokens from the file that tests/studies/language_model.py makes; ValueError: changed."""
    with files("tiebreak.cases.gpt2").joinpath(_FILE).open("rb") as file, np.load(file, allow_pickle=False) as kept:
        parts = {name: torch.from_numpy(kept[name]) for name in kept.files}
    tokens = parts.pop(TOKENS).long()
    made = fixture_of({name: bits.view(torch.bfloat16).double() for name, bits in parts.items()}, tokens)
    if made.digest != DIGEST:
        raise ValueError(f"{_FILE} was changed: its digest is {made.digest}, not {DIGEST}; install tiebreak again")
    return made


def fixture_of(weights: Mapping[str, Tensor], tokens: Tensor) -> Fixture:
    """Return weights and tokens with their digest."""
    digest = hashlib.sha256(b"".join(part.numpy().tobytes() for part in (*weights.values(), tokens))).hexdigest()[:16]
    return Fixture(weights, tokens, digest)


@cache
def exact() -> Read:
    """Return the log-probabilities with attention in fp64, from which errors are measured."""
    model = model_with(EXACT, NO_ARITHMETIC).double()
    model.load_state_dict(dict(fixture().weights))
    return _read(model, Way.PREFILL, 0)


def read(head: HeadKernel, arithmetic: Arithmetic, device: str, way: Way = Way.PREFILL, draw: int = 0) -> Read:
    """Return the log-probabilities with a kernel in every head, all else in fp32; `draw` numbers its random bits."""
    model = model_with(head, arithmetic)
    model.load_state_dict({name: weight.float() for name, weight in fixture().weights.items()})
    return _read(model.to(device), way, draw)


def model_with(head: HeadKernel, arithmetic: Arithmetic) -> GPT2:
    """Return a model of the fixture's sizes with a kernel in every head, untrained."""
    return GPT2(CONFIGURATION, everywhere(head, CONFIGURATION), arithmetic, _SEED)


@torch.no_grad()
def _read(model: GPT2, way: Way, draw: int) -> Read:
    tokens = fixture().tokens.to(next(model.parameters()).device)
    logits, streams = list[Tensor](), list[list[Tensor]]()
    for first in range(0, SEQUENCES, way.sequences):
        memory, ours = KeyValueCache(), tokens[first : first + way.sequences]
        parts, after = list[Tensor](), list[list[Tensor]]()
        for start in range(0, CONTEXT, way.tokens):
            parts.append(model(ours[:, start : start + way.tokens], draw, memory))
            after.append(memory.streams)
        logits.append(torch.cat(parts, 1))
        streams.append([torch.cat(layer, 1) for layer in zip(*after, strict=True)])
    whole = tuple(torch.cat(layer).cpu().double() for layer in zip(*streams, strict=True))
    return Read(log_probabilities_of(torch.cat(logits), fixture().tokens), whole)


def log_probabilities_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability of every token but the first, (batch, tokens - 1); logits (batch, tokens, words)."""
    whole = log_softmax(logits[:, :-1].cpu().double(), -1)
    return whole.gather(-1, tokens[:, 1:, None].long().cpu())[..., 0]
