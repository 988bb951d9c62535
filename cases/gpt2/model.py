"""GPT-2 without biases, its attention any kernel of the suite, per layer and head; and the optimiser of a real run."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import unwrap

import numpy as np
import torch
from numpy.random import Generator, Philox
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW

from tiebreak.cases.gpt2.attention import HeadKernel, Heads, Kernels, LayerCall, Observer, attend, noise_seed
from tiebreak.kernels.arithmetic import Arithmetic

INITIAL_STD = 0.02  # of GPT-2's matrices
CLIP = 1.0  # of the gradient's norm (arXiv 2510.04212, section 3.1)
EPSILON = 1e-8  # AdamW's usual


@dataclass(frozen=True)
class Configuration:
    """The sizes of a model."""

    layers: int
    heads: int  # per layer
    width: int  # of the residual stream; a multiple of heads
    context: int  # tokens of a sequence, at most
    vocabulary: int  # tokens that exist
    tied: bool = False  # whether the head shares its weight with the token embedding
    qk_norm: bool = False  # whether every head normalises its queries and keys: see `HeadNorm`
    gated: bool = False  # whether a gate multiplies every head's output: see `Gate`

    def __post_init__(self) -> None:
        if min(self.layers, self.heads, self.width, self.context, self.vocabulary) < 1:
            raise ValueError(f"sizes of a model must be at least 1: {self}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is no multiple of {self.heads} heads")

    @property
    def d(self) -> int:
        """The width of a head."""
        return self.width // self.heads


# The paper's two models (section 4, GPT-2 as nanoGPT builds it, its vocabulary padded to 50,304), and a toy.
PRESETS: Mapping[str, Configuration] = {
    "gpt2_small": Configuration(layers=12, heads=12, width=768, context=1024, vocabulary=50304, tied=True),
    "gpt2_medium": Configuration(layers=24, heads=16, width=1024, context=1024, vocabulary=50304, tied=True),
    "tiny": Configuration(layers=2, heads=4, width=64, context=64, vocabulary=128),
}


def everywhere(kernel: HeadKernel, configuration: Configuration) -> Kernels:
    """Return one kernel in every head of every layer."""
    return ((kernel,) * configuration.heads,) * configuration.layers


def _split(x: Tensor, heads: int) -> Tensor:
    """Return (batch, tokens, width) as (batch, heads, tokens, d)."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


class HeadNorm(nn.Module):
    """QK-norm: every head's queries or keys normalised, with a learnable gain (arXiv 2010.04245, 2302.05442).

    The norm is the root mean square, as in arXiv 2505.09388. The gains, one a dimension of every head, bound the scores
    however much the weights grow; nothing bounds the gains.
    """

    def __init__(self, configuration: Configuration) -> None:
        super().__init__()
        self._shape = (configuration.heads, 1, configuration.d)
        self.gain = nn.Parameter(torch.ones(configuration.width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised (batch, heads, tokens, d)."""
        return functional.rms_norm(x, self._shape[-1:]) * self.gain.view(self._shape)


class Gate(nn.Module):
    """Gated attention: an elementwise factor on every head's output, from the layer's input (arXiv 2505.06708, G1).

    The weight starts at 0 and the sigmoid is doubled, so that a gate starts as exactly 1 and a model with gates as the
    model without. Doubling only moves a factor of W_O, so nothing that a gate can learn is lost.
    """

    def __init__(self, configuration: Configuration) -> None:
        super().__init__()
        self._heads = configuration.heads
        self.weight = nn.Parameter(torch.zeros(configuration.width, configuration.width))

    def forward(self, o: Tensor, h: Tensor) -> Tensor:
        """Return the gated o, (batch, heads, tokens, d); h is the layer's normalised input, (batch, tokens, width)."""
        return o * _split(2 * torch.sigmoid(functional.linear(h, self.weight)), self._heads)


@dataclass
class KeyValueCache:
    """The keys and values of earlier tokens, and the results for them; it is extended in place.

    Calls on successive parts of a sequence are a prefill in chunks; calls on one token each are a decode.
    """

    keys: dict[int, Tensor] = field(default_factory=dict)  # by layer, (batch, heads, tokens, d)
    values: dict[int, Tensor] = field(default_factory=dict)  # likewise
    streams: list[Tensor] = field(default_factory=list)  # of the last call: the residual stream after each layer

    def grown(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V of a layer after those of earlier tokens."""
        for kept, new in ((self.keys, k), (self.values, v)):
            kept[layer] = torch.cat([kept[layer], new], 2) if layer in kept else new
        return self.keys[layer], self.values[layer]

    @property
    def tokens(self) -> int:
        """The number of tokens that it holds."""
        return max((k.shape[2] for k in self.keys.values()), default=0)


class TransformerBlock(nn.Module):
    """Attention and a two-layer perceptron, each after a normalisation and added to the residual stream."""

    def __init__(self, configuration: Configuration) -> None:
        super().__init__()
        width, self.heads = configuration.width, configuration.heads
        self.norm_1 = nn.LayerNorm(width, bias=False)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.q_norm = HeadNorm(configuration) if configuration.qk_norm else None
        self.k_norm = HeadNorm(configuration) if configuration.qk_norm else None
        self.gate = Gate(configuration) if configuration.gated else None
        self.norm_2 = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(
        self, x: Tensor, kernels: Heads, call: Callable[[Tensor], LayerCall], memory: KeyValueCache | None = None
    ) -> Tensor:
        """Return the residual stream (batch, tokens, width) after the block; `call` makes attention's call from X."""
        h = self.norm_1(x)
        q, k, v = (_split(weight(h), self.heads) for weight in (self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        made = call(h.detach())
        if memory is not None:
            k, v = memory.grown(made.layer, k, v)
        o = attend(q, k, v, kernels, made)
        if self.gate is not None:
            o = self.gate(o, h)
        x = x + self.wo(o.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(functional.gelu(self.up(self.norm_2(x))))
        return out


class GPT2(nn.Module):
    """The model. Weights and everything but attention are in fp32."""

    def __init__(self, configuration: Configuration, kernels: Kernels, arithmetic: Arithmetic, seed: int) -> None:
        """Set GPT-2's initial weights: normal, those that write to the residual stream smaller.

        `kernels` has a kernel for every head of every layer. The seed is that of the weights, which are NumPy's numbers
        and so the same everywhere, and of the kernels' noise.
        """
        super().__init__()
        if len(kernels) != configuration.layers or any(len(layer) not in (0, configuration.heads) for layer in kernels):
            raise ValueError(f"expected {configuration.layers} layers of {configuration.heads} kernels")
        self.configuration, self.kernels, self.arithmetic, self.seed = configuration, kernels, arithmetic, seed
        self.observers: Sequence[Observer] = ()
        self.tokens = nn.Embedding(configuration.vocabulary, configuration.width)
        self.positions = nn.Embedding(configuration.context, configuration.width)
        self.blocks = nn.ModuleList(TransformerBlock(configuration) for _ in range(configuration.layers))
        self.norm = nn.LayerNorm(configuration.width, bias=False)
        self.head = nn.Linear(configuration.width, configuration.vocabulary, bias=False)
        if configuration.tied:
            self.head.weight = self.tokens.weight
        rng, residual = Generator(Philox(seed)), 1.0 / math.sqrt(2 * configuration.layers)
        with torch.no_grad():
            for name, weight in self.named_parameters():
                # Gates start at 0 and draw nothing: a model with them has the other weights of the model without.
                if weight.dim() < 2 or name.endswith("gate.weight"):
                    continue
                std = INITIAL_STD * (residual if name.endswith(("wo.weight", "down.weight")) else 1.0)
                weight.copy_(std * torch.from_numpy(rng.standard_normal(weight.shape, dtype=np.float32)))

    def block(self, layer: int) -> TransformerBlock:
        """Return the block of a layer, from 0."""
        module = self.blocks[layer]
        assert isinstance(module, TransformerBlock)
        return module

    def forward(self, tokens: Tensor, step: int, memory: KeyValueCache | None = None) -> Tensor:
        """Return logits (batch, tokens, vocabulary) of int64 tokens (batch, tokens); `step` seeds the noise.

        With a memory the tokens follow those that it holds.
        """
        before = memory.tokens if memory else 0
        x, streams = self.tokens(tokens) + self.positions.weight[before : before + tokens.shape[1]], list[Tensor]()
        for layer, kernels in enumerate(self.kernels):
            if kernels:
                call = partial(LayerCall, self.arithmetic, layer, noise_seed(self.seed, step, layer), self.observers)
                x = self.block(layer)(x, kernels, call, memory)
            streams.append(x)
        if memory is not None:
            memory.streams = streams
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, tokens: Tensor, targets: Tensor, step: int) -> Tensor:
        """Return the mean cross-entropy in nats of the next tokens, a scalar."""
        return functional.cross_entropy(self(tokens, step).float().flatten(0, 1), targets.flatten())


class _AdamW(AdamW):
    """PyTorch's, without wrappers that import torch.compile: a second and a half in every process that trains."""

    add_param_group, zero_grad = unwrap(AdamW.add_param_group), unwrap(AdamW.zero_grad)
    step = torch.no_grad()(unwrap(AdamW.step))


def adamw(weights: list[torch.nn.Parameter], rate: float = 1e-3, epsilon: float = EPSILON) -> AdamW:
    """Return the paper's AdamW: betas 0.9 and 0.95, no decay (arXiv 2510.04212, section 3.1)."""
    return _AdamW(weights, rate, betas=(0.9, 0.95), eps=epsilon, weight_decay=0.0)
