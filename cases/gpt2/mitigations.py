"""Stabilisers that the paper names and does not try: QK-norm, QK-clip and gated attention.

All three act on symptoms, logits or sinks that grow, none on a rounding. A snippet takes each from the same failure
state as plain attention: what a model trained with it from the start would have become is another question.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from tiebreak.cases.gpt2.attention import Observation
from tiebreak.cases.gpt2.model import GPT2, Configuration, TransformerBlock
from tiebreak.cases.gpt2.monitors import MEASURES, View
from tiebreak.cases.gpt2.scripting import LAYER, Script


def clip(block: TransformerBlock, largest: Tensor, tau: float) -> None:
    """Shrink W_Q and W_K of the heads whose largest logits, (heads,), are above `tau`, in place: QK-clip.

    Both are multiplied by sqrt(tau / largest), so that on the same input the largest logit becomes tau (arXiv
    2507.20534, section 2.1).
    """
    factor = (tau / largest.clamp(min=tau)).sqrt()
    with torch.no_grad():
        for layer in (block.wq, block.wk):
            rows = layer.weight.view(block.heads, -1, layer.weight.shape[1])
            rows.mul_(factor.to(rows)[:, None, None])


class QKClip:
    """An observer that notes the largest logits of a step, and clips the weights after it."""

    def __init__(self, tau: float) -> None:
        self._tau = tau
        self._largest: dict[tuple[int, tuple[int, ...]], Tensor] = {}

    def __call__(self, observation: Observation) -> None:
        """Note the largest logits of one call of attention."""
        self._largest[observation.layer, observation.heads] = MEASURES["max_logit"](View(observation))

    def after_step(self, model: GPT2) -> None:
        """Clip weights whose logits were too large in this step of the optimiser; forget the logits."""
        for (layer, heads), logits in self._largest.items():
            block = model.block(layer)
            largest = torch.zeros(block.heads, dtype=logits.dtype)
            largest[list(heads)] = logits.cpu()
            clip(block, largest, self._tau)
        self._largest.clear()


def match_scores(block: TransformerBlock, queries: Tensor, keys: Tensor) -> None:
    """Set the gains of QK-norm so that a block's scores equal those without it.

    A norm removes the length of every query and key, and with it the script's common score and the sinks' gap; the
    gains restore the scores. Equal keys stay equal, since each is normalised separately, so ties remain. The queries'
    gain fits the normalised queries to the former ones, dimension by dimension; the keys' gain then fits the scores,
    which are linear in it. Both are least squares: exact for the scripted head, whose queries have one direction and
    whose keys two, and approximate for others. A dimension that carries nothing keeps its gain. `queries` and `keys`
    are typical normalised inputs of the tokens that ask and that answer, (tokens, width).
    """
    assert block.q_norm is not None
    assert block.k_norm is not None

    def of_heads(layer: nn.Linear, x: Tensor) -> Tensor:  # in fp64, (heads, tokens, d)
        return (x.double() @ layer.weight.double().T).view(len(x), block.heads, -1).transpose(0, 1)

    with torch.no_grad():
        q, k = of_heads(block.wq, queries), of_heads(block.wk, keys)
        unit_q, unit_k = (functional.rms_norm(x, x.shape[-1:]) for x in (q, k))
        size = unit_q.square().sum(1)
        q_gain = torch.where(size > 0, (unit_q * q).sum(1) / size, 1.0)
        unit_q = unit_q * q_gain[:, None]
        normal = (unit_q.mT @ unit_q) * (unit_k.mT @ unit_k)
        target = torch.einsum("hqt,hqk,hkt->ht", unit_q, q @ k.mT, unit_k)
        solved = (torch.linalg.pinv(normal, hermitian=True) @ target[..., None])[..., 0]
        k_gain = torch.where(normal.diagonal(dim1=-2, dim2=-1) > 0, solved, 1.0)
        block.q_norm.gain.copy_(q_gain.flatten())
        block.k_norm.gain.copy_(k_gain.flatten())


@dataclass(frozen=True)
class Mitigation:
    """A change to the model or its training, independent of the kernel that it trains with."""

    qk_norm: bool = False  # queries and keys are normalised
    gated: bool = False  # a gate multiplies every head's output
    tau: float | None = None  # of QK-clip; None: no clip

    @property
    def trained(self) -> tuple[str, ...]:
        """The parameters that it adds to the scripted layer: without training them it could not act."""
        added = {"q_norm.gain": self.qk_norm, "k_norm.gain": self.qk_norm, "gate.weight": self.gated}
        return tuple(f"blocks.{LAYER}.{name}" for name, is_added in added.items() if is_added)

    def configured(self, configuration: Configuration) -> Configuration:
        """Return the configuration of a model with it."""
        return replace(configuration, qk_norm=self.qk_norm, gated=self.gated)

    def adapt(self, model: GPT2, script: Script) -> None:
        """Restore the script's scores in a scripted model; only QK-norm changes them."""
        if self.qk_norm:
            block, context = model.block(LAYER), model.configuration.context
            x = block.norm_1(model.tokens.weight[:context] + model.positions.weight)
            # The sinks, which come first, see nothing but equal keys: what they ask makes no difference.
            match_scores(block, x[script.sinks :], x)

    def clipper(self) -> QKClip | None:
        """Return a new QK-clip for one run; None where it does not clip."""
        return None if self.tau is None else QKClip(self.tau)


NO_MITIGATION = Mitigation()
QK_NORM = Mitigation(qk_norm=True)
QK_CLIP = Mitigation(tau=100.0)  # Kimi K2's
GATED = Mitigation(gated=True)
