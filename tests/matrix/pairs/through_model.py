"""A pair of kernels through a model: what becomes of the log-probabilities of its tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from tiebreak.cases.gpt2.fixture import Read
from tiebreak.kernels.formats import BF16, FP16, Format
from tiebreak.matrix.pairs.side import Side
from tiebreak.reports.pairs.log_probabilities import Difference, ModelRecord


@dataclass(frozen=True)
class OwnModel:
    """A user's model and its tokens."""

    name: str  # as it was asked for
    module: (
        nn.Module
    )  # called with the tokens it returns logits (batch, tokens, vocabulary), or what has them as .logits
    tokens: Tensor  # (batch, tokens), whole numbers: those whose log-probabilities are compared


def own_model(target: str) -> OwnModel:
    """The model that `--model FILE.py:FUNCTION` names: the function takes nothing and returns (module, tokens).

    Raises:
        UsageError: it can't be found, called or used; one line that names the flag.
    """
    raise NotImplementedError


def through_model(
    a: Side,
    b: Side,
    formats: Sequence[Format] = (BF16, FP16),
    model: OwnModel | None = None,
    told: Callable[[str], None] = lambda _: None,
) -> ModelRecord:
    """Each of two kernels in the place of all attention of a model; without one, of the suite's (`gpt2.fixture`).

    `told` hears what is being read. A user's model that is in one of the formats is read in that alone.

    Raises:
        UsageError: no call of attention of a user's model can be seen, or its logits don't go with its tokens.
    """
    raise NotImplementedError


def difference(first: Read, second: Read, layers: Sequence[str] = ()) -> Difference:
    """What the second reading has more than the first."""
    raise NotImplementedError
