"""The language model of `tiebreak.cases.gpt2.fixture`: how it was trained, and how it writes text."""

from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.random import Philox, SeedSequence
from torch import Tensor, nn
from torch.nn.functional import log_softmax, softmax

from tiebreak.cases.gpt2.data import Batches, corpus
from tiebreak.cases.gpt2.fixture import (
    CONTEXT,
    EXACT,
    NO_ARITHMETIC,
    SEQUENCES,
    TOKENS,
    Fixture,
    fixture_of,
    model_with,
)
from tiebreak.cases.gpt2.model import CLIP, GPT2, KeyValueCache, adamw
from tiebreak.laboratory.training import Schedule

_DATA_SEED, _SAMPLE_SEED = 11, 12
_STEPS, _BATCH = 200, 8
_RATE = Schedule(_STEPS, 5e-3, 20)


def trained(steps: int = _STEPS) -> Fixture:
    """Train the model, or take its first steps alone, and sample: a quarter of a minute."""
    model = model_with(EXACT, NO_ARITHMETIC).double()
    optimizer, batches = adamw(list(model.parameters())), Batches(corpus().tokens, _BATCH, CONTEXT, _DATA_SEED)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = _RATE.at(step)
        optimizer.zero_grad()
        tokens, targets = batches.batch(step)
        loss = nn.functional.cross_entropy(model(tokens, step).flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return sampled_by({name: weight.detach().bfloat16().double() for name, weight in model.named_parameters()})


def sampled_by(weights: Mapping[str, Tensor]) -> Fixture:
    """Return weights, each a bf16 number in fp64, with the tokens that the model samples with them."""
    model = model_with(EXACT, NO_ARITHMETIC).double()
    model.load_state_dict(dict(weights))
    first = Batches(corpus().tokens, SEQUENCES, CONTEXT, _SAMPLE_SEED).batch(0)[0][:, :1]
    tokens, _ = sampled(model, first, draws((_SAMPLE_SEED,), CONTEXT))
    return fixture_of(weights, tokens)


def keep(made: Fixture, file: BinaryIO) -> None:
    """Write what `fixture` reads: weights as the bits of bf16, and tokens."""
    parts: dict[str, Any] = {name: weight.bfloat16().view(torch.int16) for name, weight in made.weights.items()}
    parts[TOKENS] = made.tokens.short()
    np.savez_compressed(file, **parts)


def draws(seed: tuple[int, ...], tokens: int) -> Tensor:
    """Return random numbers in [0, 1) for drawing tokens, the same everywhere: (tokens, SEQUENCES), fp64."""
    raw = Philox(SeedSequence(seed)).random_raw(SEQUENCES * tokens).reshape(tokens, SEQUENCES)
    return torch.from_numpy((raw >> np.uint64(11)).astype(np.float64) * 2.0**-53)


@torch.no_grad()
def sampled(model: GPT2, first: Tensor, uniform: Tensor, step: int = 0) -> tuple[Tensor, Tensor]:
    """Draw tokens from a model on the host by decode with a cache; return them and their log-probabilities.

    `first` holds the first token of each sequence, (SEQUENCES, 1); `uniform` the random numbers, from `draws`; the step
    seeds the noise. The tokens are (SEQUENCES, tokens); the log-probabilities have one fewer, nats, fp64.
    """
    tokens, memory, chosen = first, KeyValueCache(), list[Tensor]()
    for each in uniform[1:]:
        logits = model(tokens[:, -1:], step, memory)[:, -1].double()
        below = softmax(logits, -1).cumsum(-1)
        below /= below[:, -1:].clone()  # which rounding may leave below the largest draw
        token_ids = torch.searchsorted(below, each[:, None], right=True)
        chosen.append(log_softmax(logits, -1).gather(-1, token_ids))
        tokens = torch.cat([tokens, token_ids], 1)
    return tokens, torch.cat(chosen, 1)
