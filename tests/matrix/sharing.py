"""What plans make of some inputs; what they would each compute is computed once, the same to the bit."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial

import torch
from torch import Tensor

from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.kernels.formats import FP32
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import Declaration, run_forward
from tiebreak.kernels.plans import Accumulator, Cast, Exponential

_FP32 = Cast(FP32)
_LARGEST = 2**20  # elements of a result that is kept: a larger one costs as much to find memory for as to compute
_WIDENED = 2**18  # elements of what is kept in fp64 too: 2 MB
_KEPT = 2**24  # elements of all of them, at most: they are forgotten beyond


class SharedEmulation(EmulatedArithmetic):
    """The emulation's arithmetic for some inputs.

    What is computed of inputs and of earlier results, such as Q K^T, is known by where they lie; an exponential's
    argument, which every kernel makes anew, by its values.
    """

    def __init__(self, inputs: AttentionInputs) -> None:
        """For inputs that outlive it."""
        self._inputs = (inputs.q, inputs.k, inputs.v, inputs.do)
        self._forget()

    def _forget(self) -> None:
        self._known = {_storage(tensor) for tensor in self._inputs}
        self._results: dict[Hashable, tuple[Tensor, int]] = {}
        self._of_values: dict[Hashable, list[tuple[Tensor, Tensor, int]]] = {}
        self._size = 0

    def cast(self, x: Tensor, cast: Cast, random: Tensor | None = None) -> Tensor:
        if random is not None or not cast.narrows:
            return super().cast(x, cast, random)
        return self._once((x,), cast, partial(super().cast, x, cast))

    def matmul(self, a: Tensor, b: Tensor, cast: Cast, accumulator: Accumulator) -> Tensor:
        """The cast comes after the product, unless its sum is cast on the way: plans of several casts share one."""
        if cast.every:
            return self._once((a, b), (cast, accumulator), partial(super().matmul, a, b, cast, accumulator))
        anew = super().matmul

        def product() -> Tensor:
            operands = (self._widened(a), self._widened(b)) if accumulator is Accumulator.EXACT else (a, b)
            return anew(*operands, _FP32, accumulator)

        return self.cast(self._once((a, b), accumulator, product), cast)

    def _widened(self, x: Tensor) -> Tensor:
        """In fp64, in which an exact sum is computed; what is large is widened piece by piece, where it is summed."""
        return x if x.numel() > _WIDENED else self._once((x,), torch.float64, x.double)

    def exp(self, x: Tensor, exponential: Exponential) -> Tensor:
        return self._like(x, exponential, partial(super().exp, x, exponential))

    def row_sum(self, x: Tensor, accumulator: Accumulator) -> Tensor:
        return self._once((x,), accumulator, partial(super().row_sum, x, accumulator))

    def _once(self, operands: tuple[Tensor, ...], how: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """A result of operands, if they are known.

        What is known is kept alive: where a tensor has been given up, another may lie.
        """
        if not self._knows(operands):
            return make()
        key = how, *map(_place, operands)
        if key in self._results:
            result, version = self._results[key]
            return result if result._version == version else make()
        result = make()
        if result.numel() <= _LARGEST:
            self._make_room(result.numel())
            if self._knows(operands):  # all may have been forgotten meanwhile
                self._known.add(_storage(result))
                self._results[key] = result, result._version
        return result

    def _knows(self, operands: tuple[Tensor, ...]) -> bool:
        return all(_storage(operand) in self._known for operand in operands)

    def _like(self, x: Tensor, how: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """The result of an operand with the same values."""
        key = how, x.shape, x.sum().item()  # a few of many plans' arguments have that sum
        for earlier, result, versions in self._of_values.get(key, ()):
            if versions == earlier._version + result._version and torch.equal(earlier, x):
                return result
        result = make()
        if x.numel() > _LARGEST:
            return result
        self._make_room(x.numel() + result.numel())
        self._known |= {_storage(x), _storage(result)}
        self._of_values.setdefault(key, []).append((x, result, x._version + result._version))
        return result

    def _make_room(self, elements: int) -> None:
        """Forget everything, if there would be too much with some elements more."""
        if self._size + elements > _KEPT:
            self._forget()
        self._size += elements


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _place(x: Tensor) -> tuple[Hashable, ...]:
    """What tells a part of a tensor from any other, and from itself once someone has written to it."""
    return x.data_ptr(), x.shape, x.stride(), x._version


@dataclass(frozen=True, eq=False)
class Emulated:
    """Inputs, and what plans make of them."""

    inputs: AttentionInputs

    @cached_property
    def arithmetic(self) -> SharedEmulation:
        return SharedEmulation(self.inputs)

    def clipped(self, declaration: Declaration) -> Declaration:
        """The declaration in tiles no larger than the inputs: beyond their size they change nothing."""
        return _clipped(declaration, self.inputs.q.shape[-2], self.inputs.k.shape[-2])

    def output(self, declaration: Declaration) -> AttentionOutput:
        return run_forward(self.clipped(declaration), self.inputs, self.arithmetic)

    def predicted(self, declaration: Declaration) -> Tensor:
        """O, which is kept."""
        key = self.clipped(declaration)
        if key not in self._predicted:
            self._predicted[key] = self.output(key).o
        return self._predicted[key]

    @cached_property
    def _predicted(self) -> dict[Declaration, Tensor]:
        return {}


@lru_cache(maxsize=1024)
def _clipped(declaration: Declaration, queries: int, keys: int) -> Declaration:
    block = declaration.block
    return replace(declaration, block=replace(block, queries=min(block.queries, queries), keys=min(block.keys, keys)))
