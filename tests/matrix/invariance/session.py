"""A kernel whose one call is made in two ways: what knobs share."""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from numpy.random import Generator, Philox, SeedSequence
from torch import Tensor

from tiebreak.backends.backend import to_device
from tiebreak.cases.case import HEADS_PER_BATCH, Draw, Shape
from tiebreak.kernels.external.call import CONTIGUOUS, Places
from tiebreak.kernels.external.kernels import UserKernel
from tiebreak.kernels.features import Feature
from tiebreak.kernels.formats import Format, Formats
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import Kernel
from tiebreak.matrix.attribution import drawn, equal_bits
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.invariance.comparison import GRADIENTS, PARTS, Comparison, O
from tiebreak.matrix.invariance.materials import MATERIALS, Material
from tiebreak.matrix.trial import failed_trial

SHARE = 2  # of the heads of a batch, 1 in so many: each is called dozens of times


@lru_cache(maxsize=32)  # what cells of one knob share; as many as a knob draws
def _drawn(entropy: tuple[int, ...], material: Material, shape: Shape, heads: int, fmt: Format) -> AttentionInputs:
    return material(Draw(Generator(Philox(SeedSequence(entropy))), Formats.of(fmt), heads, entropy[-1]), shape)


@dataclass
class Session:
    """One cell: its kernel, and what came of its calls so far."""

    cell: Cell
    seed: int
    heads: int  # of one batch
    index: int = 0  # of the batch
    comparisons: dict[str, Comparison] = field(default_factory=dict)
    controls: dict[str, float] = field(default_factory=dict)
    rows: int = 0  # keys of a row that is long enough to be split; 0: not looked for yet
    refused: dict[str, None] = field(default_factory=dict)  # reasons why changes were left out
    _taken: dict[tuple[object, ...], bool] = field(default_factory=dict)

    @property
    def kernel(self) -> Kernel:
        """As the cell has it."""
        return self.cell.kernel

    @property
    def fmt(self) -> Format:
        """Of q, k, v and O."""
        return self.cell.fmt

    def draw(self, name: str, material: Material, shape: Shape, share: int = SHARE) -> AttentionInputs:
        """A batch of heads, others for every material and every index; two sequences or more.

        Args:
            name: of the material.
            material: it.
            shape: of a head.
            share: of the heads of a run's batches that is enough, 1 in so many: long rows cost more.
        """
        entropy = (self.seed, *map(zlib.crc32, (self.cell.experiment.name.encode(), name.encode())), self.index)
        return _drawn(entropy, material, shape, max(2 * HEADS_PER_BATCH, self.heads // share), self.fmt)

    def materials(self, shape: Shape, share: int = SHARE) -> Iterator[tuple[str, AttentionInputs]]:
        """A batch of every material, by name."""
        for name, material in MATERIALS.items():
            yield name, self.draw(name, material, shape, share)

    def takes(self, *calls: AttentionInputs) -> bool:
        """Whether the kernel can make some calls as they are, without dummies; if not, the reason is kept."""
        return all(map(self._takes, calls))

    def _takes(self, inputs: AttentionInputs) -> bool:
        features = tuple(feature.name for feature in inputs.asks())
        key = (inputs.q.shape, inputs.k.shape, features)
        if key not in self._taken:
            reason = self._refusal(inputs)
            self._taken[key] = reason is None
            if reason is not None:
                self.refused[reason] = None
        return self._taken[key]

    def _refusal(self, inputs: AttentionInputs) -> str | None:
        kernel = self.kernel
        reason = kernel.refusal(to_device(inputs, self.cell.backend.device))
        if (
            reason is None
            and isinstance(kernel, UserKernel)
            and kernel.caller.needs.arrange(inputs).inputs is not inputs
        ):
            reason = "it is given dummy queries or keys"
        return reason or failed_trial(self.cell.backend, self.cell.kernel, inputs)

    def can(self, feature: Feature) -> bool:
        """Whether the kernel says that it takes a feature."""
        return feature in self.kernel.takes

    @property
    def draws(self) -> bool:
        """Whether the kernel says that random bits enter its O."""
        return self.kernel.declaration is not None and drawn(self.kernel.declaration)

    def o(self, inputs: AttentionInputs) -> Tensor:
        """O of a call, in fp32 on the host."""
        return self.answers(inputs, forward_alone=True)[0]

    def answers(
        self, inputs: AttentionInputs, kernel: Kernel | None = None, *, forward_alone: bool = False
    ) -> tuple[Tensor, ...]:
        """O of a call and, if the kernel gives them, dQ, dK and dV, in fp32 on the host.

        Args:
            inputs: of the call.
            kernel: another one than the cell's.
            forward_alone: leave gradients out.
        """
        kernel, run = kernel or self.kernel, self.cell.backend.run
        wanted = kernel.has_backward and not forward_alone
        # With gradients to come others may compute O in another way; a composed kernel's backward pass is apart.
        output = run(kernel, inputs, gradients=wanted and kernel.composed)
        made = run(kernel, inputs, gradients=True) if wanted and not kernel.composed else output
        return tuple(x.detach().float() for x in (output.o, *_gradients(made)))

    def placed(
        self, inputs: AttentionInputs, places: Places = CONTIGUOUS, *, gradients: bool = False
    ) -> tuple[Tensor, ...]:
        """O of a call whose arguments lie elsewhere, and reach the kernel as they lie, or its gradients.

        Raises:
            Exception: whatever the kernel raises.
        """
        backend, kernel = self.cell.backend, self.kernel
        on_device = to_device(inputs, backend.device)
        if isinstance(kernel, UserKernel):
            with backend.in_use(), kernel.caller.calling(gradients=gradients):
                call = kernel.caller.call(on_device)
                placed = call.placed(places, gradients=gradients)
                made: tuple[Tensor, ...] = (call.forward(placed),)
                if gradients:
                    made = (call.backward(placed, made[0]) or ())[: len(GRADIENTS)]
                return tuple(call.restored(x).cpu() for x in made)
        # A composed kernel computes on numbers in fp32, all others take them in their format.
        dtype = torch.float32 if kernel.composed else TORCH_DTYPES[self.fmt]
        moved: dict[str, Any] = {
            each.name: (getattr(places, each.name) or torch.Tensor.clone)(getattr(on_device, each.name).to(dtype))
            for each in fields(places)
        }
        output = backend.run(kernel, replace(on_device, **moved), gradients=gradients)
        return tuple(x.detach().float() for x in (_gradients(output) if gradients else (output.o,)))

    def compare(
        self, change: str, material: str, before: Sequence[Tensor], after: Sequence[Tensor], inputs: AttentionInputs
    ) -> None:
        """Take down what two answers to one question differ in.

        Args:
            change: what was changed.
            material: what was put in.
            before: O of the plain call and, as far as both have them, dQ, dK and dV.
            after: the same rows of those of the changed one.
            inputs: a call whose exact answer is that of both.
        """
        for part, plain, changed in zip(PARTS, before, after, strict=False):
            name = ", ".join([change, material, *([] if part == O else [part])])
            compared = Comparison.of(plain, changed, inputs, part)
            self.comparisons[name] = self.comparisons[name].and_of(compared) if name in self.comparisons else compared

    def control(self, words: str, before: Tensor, after: Tensor) -> None:
        """Take down whether what must change O has; the first batch tells."""
        self.controls.setdefault(words, 1.0 - equal_bits(before, after))

    @cached_property
    def called_by_sequence(self) -> bool:
        """Whether a user's kernel is called once for every sequence, so that it never sees two."""
        kernel = self.kernel
        return isinstance(kernel, UserKernel) and "b" not in kernel.caller.convention.options.layout


def _gradients(output: AttentionOutput) -> tuple[Tensor, ...]:
    given = output.gradients
    return () if given is None else (given.dq, given.dk, given.dv)
