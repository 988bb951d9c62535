"""Answers that should agree, part by part, and what must not: how a question's calls are held to each other."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.matrix.bits import equal_bits
from tiebreak.matrix.questions.answers import WHOLE, Answers, Cut, O
from tiebreak.matrix.result import Result


@dataclass(kw_only=True)
class Comparison(ABC):
    """What came of a cell's calls; a rule says what may differ."""

    asked: dict[str, str] = field(default_factory=dict)  # what must be so, and what is so instead, empty if it is
    controls: dict[str, float] = field(default_factory=dict)  # what must change O, and the share of it that it did
    measures: dict[str, float] = field(default_factory=dict)  # that a question takes itself, in place of the rule's
    unit: str = ""  # behind the first of them in tables

    def compare(
        self,
        words: str,
        plain: Answers,
        other: Answers,
        inputs: AttentionInputs,
        cut: Cut = WHOLE,
        again: Answers | None = None,
    ) -> None:
        """Take down what two answers differ in, in the parts that both have.

        Args:
            words: what must be so, or what was changed, and what was put in.
            plain: of the call that must be agreed with.
            other: of the call in question.
            inputs: of the plain call.
            cut: the part of all that is compared.
            again: of one more plain call: if O has its bits, it must have them in `other` too. Gradients need not:
                where they are added up by atomics, two calls agree by chance.
        """
        repeats = again is not None and torch.equal(again[O], plain[O])
        plain, other = cut(plain), cut(other)
        for part in (part for part in plain if part in other):
            self.asked[words] = ""
            self.take(words, part, plain[part], other[part], inputs, cut, repeats and part == O)

    def control(self, words: str, before: Tensor, after: Tensor) -> None:
        """Take down whether what must change an answer has; the first batch tells."""
        self.controls.setdefault(words, 1.0 - equal_bits(before, after))

    @property
    def nothing(self) -> bool:
        """Whether no answers have been compared."""
        return not (self.asked or self.measures)

    @abstractmethod
    def take(
        self, words: str, part: str, plain: Tensor, other: Tensor, inputs: AttentionInputs, cut: Cut, to_the_bit: bool
    ) -> None:
        """Take down what one part differs in.

        Args:
            words: as of `compare`.
            part: O, dQ ...
            plain: that part of the plain answer, cut.
            other: of the other one.
            inputs: of the plain call.
            cut: for what is exact.
            to_the_bit: whether its bits must be the same.
        """

    @property
    @abstractmethod
    def settled(self) -> bool:
        """Whether more heads would tell nothing more."""

    @property
    @abstractmethod
    def result(self) -> Result:
        """What the cell measures, and whether all is as it must be, if anything must."""
