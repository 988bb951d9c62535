"""Reductions and scans of tiles.

Upstream's call the combining function once for every element, and sum in the order of numpy.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import standard
from triton.runtime import interpreter as upstream

from tiebreak.backends.interpreter.assumptions import Assumptions
from tiebreak.backends.interpreter.numbers import Array, alike, converted, is_rounded, numpy_type

Tensor = Any  # triton's
Combine = Callable[..., Any]  # a function of as many tensors as two elements have, to those of one

# They drop NaN, as on a card.
_EXTREMES = ((standard._elementwise_max, np.fmax), (standard._elementwise_min, np.fmin))


def tensor_of(data: Array, dtype: tl.dtype) -> Tensor:
    """Return an array, programs first, as Triton's tensor."""
    data = np.asarray(data).astype(numpy_type(dtype.scalar), copy=False)
    kind = tl.block_type(dtype.scalar, list(data.shape[1:])) if data.ndim > 1 else dtype.scalar
    return tl.core.tensor(upstream.TensorHandle(data, dtype.scalar), kind)


def reducing(
    assumed: Assumptions, in_pairs: Callable[[int, int, int], tuple[tuple[int, ...], int, int]]
) -> Callable[..., Any]:
    """Return `tl.reduce` as a card is assumed to sum.

    Args:
        assumed: what is assumed.
        in_pairs: from the numbers of rows, columns and bytes of each the order of a row, as `Assumptions.order` has it,
            the parts that have it, and the warps that have eights of columns in turn; or an empty one and the columns
            of a lane.
    """

    def reduce(input: Any, axis: Any, combine_fn: Combine, keep_dims: Any = False, **_: object) -> Any:
        inputs, axis = input if isinstance(input, tuple) else (input,), _plain(axis)
        arrays = alike(*(tensor.handle.data for tensor in inputs))
        dimensions = arrays[0].ndim
        at = 1 if axis is None else axis + 1 if axis >= 0 else axis + dimensions
        arrays = [array.reshape(len(array), -1) if axis is None else array for array in arrays]
        if combine_fn is standard._sum_combine and at == arrays[0].ndim - 1 and at > 1:
            size = arrays[0].dtype.itemsize
            order, parts, warps = in_pairs(arrays[0].shape[-2], arrays[0].shape[-1], size)
            if not order and len(assumed.pairs) > 2:
                arrays = [_in_lanes(array, parts, packed=assumed.order(size)[-1] == 0) for array in arrays]
            elif order and arrays[0].shape[-1] % (8 * parts * warps) == 0:
                arrays = [_in_pairs(_in_warps(array, warps), order, parts * warps) for array in arrays]
        results = _reduced(arrays, inputs, at, combine_fn, assumed)
        if _plain(keep_dims):
            results = [
                np.expand_dims(result, tuple(range(1, dimensions)) if axis is None else at) for result in results
            ]
        tensors = tuple(tensor_of(data, tensor.dtype) for data, tensor in zip(results, inputs, strict=True))
        return tensors if isinstance(input, tuple) else tensors[0]

    return reduce


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, tl.constexpr) else value


def _reduced(
    arrays: list[Array], inputs: tuple[Tensor, ...], axis: int, combine: Combine, assumed: Assumptions
) -> list[Array]:
    for combiner, extreme in _EXTREMES:
        if combine is combiner:
            return [extreme.reduce(arrays[0], axis=axis)]
    if combine is standard._sum_combine:
        return [_total(arrays[0], axis, assumed)]
    arrays = [np.moveaxis(array, axis, 1) for array in arrays]
    while (length := arrays[0].shape[1]) > 1:
        # Neighbours: a function need not be commutative.
        pairs = [array[:, at : length - length % 2 : 2] for at in (0, 1) for array in arrays]
        met = _combined(combine, pairs, inputs)
        arrays = [np.concatenate([new, old[:, length - length % 2 :]], 1) for new, old in zip(met, arrays, strict=True)]
    return [array[:, 0] for array in arrays]


def _combined(combine: Combine, arrays: list[Array], inputs: tuple[Tensor, ...]) -> list[Array]:
    types = [tensor.dtype for tensor in inputs]
    results = combine(*(tensor_of(data, dtype) for data, dtype in zip(arrays, types * 2, strict=True)))
    results = results if isinstance(results, tuple) else (results,)
    # A function may give back a number.
    data = (upstream.interpreter_semantic.to_tensor(result).handle.data for result in results)
    shape = np.broadcast_shapes(*(array.shape for array in arrays))
    return [np.broadcast_to(part.reshape(*part.shape, *(1,) * (len(shape) - part.ndim)), shape) for part in data]


def _in_pairs(x: Array, order: tuple[int, ...], parts: int) -> Array:
    """Return columns, or lanes' sums of them, in the order of a balanced tree; lane t has 2t and 2t + 1 of every eight.

    `mma.sync` leaves its sums in this order, and Triton keeps it in what it computes of them.
    """
    if not is_rounded(x.dtype):
        return x
    rows = x.ndim  # and parts
    lanes = x.reshape(*x.shape[:-1], parts, -1, 2, 2, 2)  # eights, the lane's upper and lower bit, the pair
    lanes = lanes.transpose(*range(rows), *(rows + part for part in dict.fromkeys((*order, 0, 3))))
    if len(order) > 2:
        return lanes.reshape(x.shape)
    first, *others = np.moveaxis(lanes.reshape(*x.shape[:-1], 4, -1), -1, 0)
    return functools.reduce(_sum, others, first)


def _in_warps(x: Array, warps: int) -> Array:
    """Return columns of which each warp has eights in turn, those of a warp together: warps far apart meet first."""
    eights = x.reshape(*x.shape[:-1], -1, warps, 8)[..., _far_first(warps), :]
    return eights.swapaxes(-3, -2).reshape(x.shape)


def _far_first(count: int) -> list[int]:
    """Return the numbers from 0 on as a balanced tree adds those far apart first: with their bits reversed."""
    bits = count.bit_length() - 1
    return [int(f"{number:0{bits}b}"[::-1], 2) for number in range(count)] if bits else [0]


def _in_lanes(x: Array, each: int, *, packed: bool) -> Array:
    """Return columns, of which a lane loads neighbours, in the order of a balanced tree: lanes far apart meet first.

    Where sums are `packed`, two at once, a lane's odd columns come last.
    """
    if not is_rounded(x.dtype) or x.shape[-1] % each:
        return x
    lanes = x.reshape(*x.shape[:-1], -1, each)
    within = [*range(0, each, 2), *range(1, each, 2)] if packed else range(each)
    return lanes[..., _far_first(lanes.shape[-2]), :][..., list(within)].reshape(x.shape)


def _total(x: Array, axis: int, assumed: Assumptions) -> Array:
    """Return the sum in the assumed order; exact for integers and fp64."""
    if not is_rounded(x.dtype):
        return np.asarray(x.sum(axis, dtype=x.dtype))
    rows = np.moveaxis(x, axis, -1)
    if assumed.exact:
        return converted(rows.sum(-1, dtype=np.float64), x.dtype)
    while rows.shape[-1] > 1:  # on any card a balanced tree, each of whose sums is rounded to the type
        rows = _sum(rows[..., ::2], rows[..., 1::2])
    return rows[..., 0]


def _sum(x: Array, y: Array) -> Array:
    return converted(x.astype(np.float32) + y.astype(np.float32), x.dtype)


def scan(input: Any, axis: Any, combine_fn: Combine, reverse: Any = False, **_: object) -> Any:
    """Compute `tl.associative_scan`, one slice after the other."""
    inputs = input if isinstance(input, tuple) else (input,)
    axis, backwards = _plain(axis), bool(_plain(reverse))
    at_first = axis + 1 if axis >= 0 else axis  # behind the programs
    arrays = [np.moveaxis(array, at_first, 0) for array in alike(*(tensor.handle.data for tensor in inputs))]
    arrays = [array[::-1] for array in arrays] if backwards else arrays
    steps = [[array[0] for array in arrays]]
    for at in range(1, len(arrays[0])):
        steps.append(_combined(combine_fn, [*steps[-1], *(array[at] for array in arrays)], inputs))
    results = [np.stack(step) for step in zip(*steps, strict=True)]
    results = [result[::-1] for result in results] if backwards else results
    tensors = tuple(
        tensor_of(np.ascontiguousarray(np.moveaxis(data, 0, at_first)), tensor.dtype)
        for data, tensor in zip(results, inputs, strict=True)
    )
    return tensors if isinstance(input, tuple) else tensors[0]
