"""A head put into the paper's failure state by its weights: sink tokens with equal keys, and V of one sign.

The residual stream gets a meaning: its first features are constant, the next one marks the sinks, the last one is read
by tokens that never occur in the text alone, so that dO has one sign; the rest tells tokens apart. The other layers
write nothing. LAYER and HEAD below is the head that all this is done to.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.random import Generator, Philox
from torch import Tensor
from torch.nn import functional

from tiebreak.cases.gpt2.model import GPT2

LAYER = 1
HEAD = 0
DEAD_TOKENS = 8  # tokens at the end of the vocabulary that never occur: their logits get one-signed gradients
_CONSTANT = 8  # features that are the same for all tokens, half of them +1, half -1
_SINK = _CONSTANT  # the feature that marks the sinks
_SINK_MARK = 2.0
_CONTENT = _CONSTANT + 1  # the features from here to the last but one tell tokens apart
_CONTENT_SIZE = 0.3  # their root mean square
_COLUMN_SPREAD = 0.06  # of V's mean between columns, relative
_OUTPUT_WEIGHT = 0.05  # of O in the feature that the dead tokens read
_CONTENT_GAIN = 5.0  # divides V's spread between tokens: a row of the weight meets several features


@dataclass(frozen=True)
class Script:
    """The failure state: scores, values and the path of the gradient."""

    gap: float = 12.0  # how far the sinks' scores lie above the others'
    sinks: int = 2  # tokens, from the first, with equal keys
    key: float = 4.0  # what all keys have in common, times
    query: float = 4.0  # what all queries have in common: their product over sqrt(d) is the score of the other tokens
    sink_query: float = 4.0  # the component of all queries that the sinks' keys answer to
    sink_value: float = -2.9  # mean of the sinks' V
    value: float = -2.9  # mean of the other tokens' V
    value_std: float = 0.3  # spread of V between tokens
    dead_weight: float = 1.0  # weight of the dead tokens' logits on the last feature
    output_sign: float = 1.0  # -1 flips W_O: dO changes sign


def apply(script: Script, model: GPT2, seed: int) -> None:
    """Set the weights of `model` so that its head HEAD of layer LAYER fails as scripted.

    The model has at least LAYER + 1 layers, and its vocabulary's last DEAD_TOKENS tokens are absent from the data.
    """
    rng = Generator(Philox([seed, 1]))
    with torch.no_grad():
        _embed(script, model, rng)
        for layer in set(range(model.configuration.layers)) - {LAYER}:
            model.block(layer).wo.weight.zero_()
            model.block(layer).down.weight.zero_()
        _set_head(script, model, rng)
        # O is of one sign and pushes the dead tokens' logits up: their gradient, and so dO, is of one sign too.
        columns, last = _rows_of_head(model), model.configuration.width - 1
        wo, head = model.block(LAYER).wo.weight, model.head.weight
        wo[:, columns] = 0.0
        wo[last, columns] = -script.output_sign * _OUTPUT_WEIGHT
        head[:, last] = 0.0
        head[-DEAD_TOKENS:, last] = script.dead_weight


def _normal(rng: Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))


def _signs(width: int) -> Tensor:
    """Return +1 on the first half of the constant features, -1 on the second, 0 elsewhere, (width,)."""
    signs = torch.zeros(width)
    signs[: _CONSTANT // 2], signs[_CONSTANT // 2 : _CONSTANT] = 1.0, -1.0
    return signs


def _rows_of_head(model: GPT2) -> slice:
    return slice(HEAD * model.configuration.d, (HEAD + 1) * model.configuration.d)


def _embed(script: Script, model: GPT2, rng: Generator) -> None:
    width = model.configuration.width
    tokens, positions = model.tokens.weight, model.positions.weight
    content = _normal(rng, model.configuration.vocabulary, width - 1 - _CONTENT)
    content -= content.mean(1, keepdim=True)  # so that the norm layer leaves the constant features alone
    size = _CONTENT_SIZE * math.sqrt(content.shape[1])
    tokens.zero_()
    tokens[:, _CONTENT : width - 1] = content * (size / content.norm(dim=1, keepdim=True))
    positions.copy_(_signs(width).expand_as(positions))
    positions[: script.sinks, _SINK] = _SINK_MARK


def _set_head(script: Script, model: GPT2, rng: Generator) -> None:
    """Put the common score into one dimension of the head, the sinks' gap into the next; V has one sign."""
    context, width, d = model.configuration.context, model.configuration.width, model.configuration.d
    block, rows = model.block(LAYER), _rows_of_head(model)
    # The norm layer's output for the script's features on a typical input.
    typical = model.tokens.weight[:context] + model.positions.weight
    x = functional.layer_norm(typical, (width,), block.norm_1.weight)
    signs = _signs(width)
    constant = signs / (x[script.sinks :] @ signs).mean()  # reads 1 off the constant features of an ordinary token

    wq, wk, wv = (layer.weight[rows] for layer in (block.wq, block.wk, block.wv))
    wq.zero_()
    wk.zero_()
    wq[0], wk[0], wq[1] = script.query * constant, script.key * constant, script.sink_query * constant
    mark = x[: script.sinks, _SINK].mean().item()
    wk[1, _SINK] = script.gap * math.sqrt(d) / script.sink_query / mark

    wv.copy_(script.value * (1 + _COLUMN_SPREAD * _normal(rng, d, 1)) * constant)
    wv[:, _CONTENT : width - 1] = script.value_std / _CONTENT_GAIN * _normal(rng, d, width - 1 - _CONTENT)
    if script.sink_value != script.value:
        # The sinks' mark has to compensate for what the constant features also give them.
        common = (x[: script.sinks, :_CONSTANT] @ wv[:, :_CONSTANT].T).mean(0)
        target = script.sink_value * (1 + _COLUMN_SPREAD * _normal(rng, d))
        wv[:, _SINK] = (target - common) / x[0, _SINK]


def frozen(model: GPT2) -> dict[str, Tensor]:
    """Return the scripted elements of the weights, by parameter: True where training must leave them alone.

    They are, in layer LAYER, the head's W_V, its column of W_O and the weights that write to the last feature; in the
    head of the model, the weights that read that feature, and the dead tokens.
    """
    last, layer = model.configuration.width - 1, f"blocks.{LAYER}"
    names = (f"{layer}.wv.weight", f"{layer}.wo.weight", f"{layer}.down.weight", "head.weight")
    masks = {name: torch.zeros_like(model.get_parameter(name), dtype=torch.bool) for name in names}
    wv, wo, down, head = masks.values()
    wv[_rows_of_head(model)] = True
    wo[last], wo[:, _rows_of_head(model)] = True, True
    down[last] = True
    head[:, last], head[-DEAD_TOKENS:] = True, True
    return masks
