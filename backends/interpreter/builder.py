"""The operations of Triton's language on numpy arrays, each rounded as the language defines it.

Only what upstream's builder does otherwise is here: it holds bf16 and the formats of 8 bits as integers, so that their
casts, products, sums, comparisons and negations are those of integers; its exponentials are as exact as numpy's fp32.

The first dimension of all data is that of the programs that run together, 1 long where all have the same. A number has
no other.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial, partialmethod
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import interpreter as native
from triton._C.libtriton import ir
from triton.runtime import interpreter as upstream
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tiebreak.backends.interpreter.assumptions import Assumptions
from tiebreak.backends.interpreter.memory import Boxes, KernelMemory, Shape, spread
from tiebreak.backends.interpreter.numbers import Array, alike, bits, converted, fused, is_rounded, numpy_type
from tiebreak.backends.interpreter.products import product, scaled_operand
from tiebreak.backends.interpreter.programs import ApartError, Together
from tiebreak.kernels.kernel import CannotRunError

Handle = Any  # triton's TensorHandle: an array, the type of its elements, and attributes

_LOG2_E = np.float32(1.4426950408889634)


class _Pointers(TensorHandle):
    """The addresses of a tile, added up only where someone reads them: most tiles are boxes of a tensor."""

    def __init__(self, terms: Iterable[Array], shape: Shape, like: Any) -> None:
        """Add up terms, int64, that broadcast to a tile of this shape, for each program."""
        totals: dict[Shape, Array] = {}
        for term in terms:
            total = totals.get(term.shape)
            totals[term.shape] = term if total is None else total + term
        self.terms = tuple(totals.values())  # no two of one shape
        self.dtype, self.attr = like.dtype, dict[str, Any]()
        self.shape = (max(map(len, self.terms)), *shape)

    @property
    def data(self) -> Array:
        """The addresses, uint64; they are large, and not kept."""
        return np.broadcast_to(sum(self.terms, np.int64(0)), self.shape).view(np.uint64)


class FaithfulBuilder(InterpreterBuilder):
    """Upstream's builder with correct arithmetic, under the assumptions about a card."""

    def __init__(self, assumed: Assumptions) -> None:
        super().__init__()
        self.assumed = assumed
        # Without debug=True a compiled kernel checks no integer for overflow either.
        self.options: Any = replace(
            self.options,
            sanitize_overflow=False,
            default_dot_input_precision="ieee" if assumed.backend == "hip" else "tf32",
            max_num_imprecise_acc_default=2**30 if assumed.name == "sm_90" else 0,
        )
        self.begin(KernelMemory("", ()), np.zeros((1, 3), np.int32), contracts=False, warps=4, rows=0)

    def begin(self, memory: KernelMemory, places: Array, *, contracts: bool, warps: int, rows: int) -> None:
        """Start a launch with its memory; `places` are the programs' ids, `contracts` whether products contract.

        Tiles that lack rows that nobody needs have so many `rows` on a card.
        """
        self.memory, self._places, self._threads, self._rows = memory, places, warps * self.assumed.warp, rows
        self.contracts = contracts
        self.take(np.arange(1))

    def take(self, group: Array, together: Together | None = None) -> None:
        """Select the programs to run next, by their places in the launch; one if `together` is None."""
        self._group, self.together = group, together
        self.grid_idx = tuple(self._places[group[0]].tolist())  # for what is printed
        self._multiplied, self._each = False, 1  # elements that a lane loads at once
        self._decisions = 0

    def apart(self) -> Any:
        """Raise that programs must run in their order."""
        if self.together is not None:
            raise ApartError

    def agreed(self, number: Handle) -> Any:
        """Return the value that the programs share; those with another one leave the group."""
        values = number.data.reshape(len(number.data))
        return (values[0] if len(values) == 1 or self.together is None else self.together.agreed(values)).item()

    def decided(self, number: Handle) -> Any:
        """Return the value as `agreed`, of a number that decides where code goes on: compilers contract up to there."""
        self._decisions += 1
        return self.agreed(number)

    def _factors(self, term: Handle) -> tuple[Array, Array] | None:
        """Return the factors of a product that may be contracted."""
        x, y, decisions = term.attr.get("product", (None, None, -1))
        return (x, y) if decisions == self._decisions else None

    def in_pairs(self, rows: int, columns: int, size: int) -> tuple[tuple[int, ...], int, int]:
        """Return the assumed order of a row of a product's sums, of a size, in tiles after a program's first product.

        It is that of each of so many equal parts of a row, whose eights of columns so many warps have in turn. Before,
        the order is empty, and a lane has so many columns.
        """
        rows = max(rows, self._rows)
        if not self._multiplied:
            return (), min(self._each, max(1, rows * columns // self._threads)), 1
        if self.assumed.whole_rows and rows >= 64 and self._threads >= 128:  # tcgen05 takes four warps
            return (3, 0, 1, 2), max(1, self._threads // rows), 1
        # Warps have 16 rows each, or, where a tile has fewer rows than columns, its eights of columns in turn.
        warps = self._threads // self.assumed.warp if rows < columns else 1
        return self.assumed.order(size), 1, max(1, min(warps, columns // 8))

    def create_get_program_id(self, axis: int) -> Handle:
        return TensorHandle(self._places[self._group, axis], tl.int32)

    def create_print(self, prefix: str, hex: bool, values: Iterable[Handle], *rest: object) -> None:
        self.apart()
        values = [TensorHandle(plain(value), value.dtype) for value in values]
        super().create_print(prefix, hex, values, *rest)

    # Triton before 3.9 lacks these.

    def get_bf16(self, value: float) -> Handle:
        return self.create_fp_trunc(self.get_fp32(value), tl.bfloat16)

    def get_fp8e4b8_ty(self) -> tl.dtype:
        return tl.float8e4b8

    def get_fp8e5b16_ty(self) -> tl.dtype:
        return tl.float8e5b16

    # Casts.

    def cast_impl(self, src: Handle, dst_type: tl.dtype) -> Handle:
        numbers = converted(_compact(src.data), numpy_type(dst_type))
        return TensorHandle(spread(numbers, src.data.shape), dst_type.scalar)

    def create_fp_to_fp(self, src: Handle, dst_type: tl.dtype, rounding_mode: object) -> Handle:
        """Cast by the rounding mode: upstream rounds half up instead of to even, and truncates elsewhere."""
        toward_zero = rounding_mode == ir.ROUNDING_MODE.RTZ
        return TensorHandle(converted(src.data, numpy_type(dst_type), toward_zero=toward_zero), dst_type.scalar)

    def create_bitcast(self, src: Handle, dst_type: tl.dtype) -> Handle:
        data = np.ascontiguousarray(src.data) if src.data.ndim else src.data
        return TensorHandle(data.view(numpy_type(dst_type)), dst_type.scalar)

    def create_ptr_to_int(self, src: Handle, dst_type: tl.dtype) -> Handle:
        return self.create_bitcast(TensorHandle(self.memory.true(src.data), src.dtype), dst_type)

    create_int_to_ptr = create_bitcast

    # Memory.

    def create_load(self, ptr: Handle, *rest: Any) -> Handle:
        return self.create_masked_load(ptr, None, None, *rest)

    def create_store(self, ptr: Handle, val: Handle, *rest: Any) -> None:
        self.create_masked_store(ptr, val, None, *rest)

    def create_masked_load(
        self, ptrs: Handle, mask: Handle, other: Handle, *rest: Any, is_volatile: bool = False, **_: object
    ) -> Handle:
        """Load, with zeros where the mask hides an element and no other value is given: a card leaves that open.

        The parameters about caches that follow these vary with Triton's version, here as in other operations.
        """
        if is_volatile or True in rest:
            self.apart()  # it may wait for another program
        element, shape = ptrs.get_element_ty(), _shape(ptrs)
        dtype = numpy_type(element)
        if len(shape) > 2:
            self._each = 16 // dtype.itemsize
        fill = bits(np.zeros((1,) * len(shape), dtype) if other is None else other.data)
        if (access := self._access(ptrs, mask, dtype.itemsize, len(fill))) is None:
            return TensorHandle(spread(fill, (len(fill), *shape[1:])).view(dtype), element)
        boxes, whole, index = access
        shape = len(whole), *shape[1:]
        if self.together is not None:
            self.together.tile(shape)
        picked = boxes.read(boxes.holder.elements(dtype.itemsize))
        if self.together is None or boxes.holder.memory in self.together.followed:
            picked = picked.copy()  # else nothing is written there while programs run
        if picked.size == math.prod(shape):
            return TensorHandle(picked.reshape(shape).view(dtype), element)
        tile = np.array(np.broadcast_to(fill, shape))
        tile[index] = picked
        return TensorHandle(tile.view(dtype), element)

    def create_masked_store(self, ptrs: Handle, value: Handle, mask: Handle, *_: object, **__: object) -> None:
        data = bits(value.data)
        if (access := self._access(ptrs, mask, data.itemsize, len(data), writes=True)) is not None:
            boxes, whole, index = access
            data = spread(data, (len(whole), *_shape(ptrs)[1:]))[index]
            if self.together is None or boxes.holder.memory in self.together.followed:
                boxes.write(boxes.holder.elements(boxes.size), data)
            else:
                self.together.stores.append((boxes, data))

    def _access(
        self, ptrs: Handle, mask: Any, size: int, programs: int, *, writes: bool = False, atomic: bool = False
    ) -> tuple[Boxes, Array, tuple[Any, ...]] | None:
        """Return the visible part of a tile as boxes, which are visible, and its index in the tile; None: no part is.

        Boxes are tiles, or their rows, or elements. The access by these programs is recorded.
        """
        asked = size, programs, writes, atomic
        mask_before, asked_before, access = ptrs.attr.get("access", (None, None, None))
        if mask_before is not mask or asked_before != asked:  # else a tape has kept the pointers and the mask
            access = self._boxes(ptrs, mask, *asked)
            ptrs.attr["access"] = mask, asked, access
        if access is None:
            return None
        boxes, whole, index = access
        same = (each for each in self.memory.arguments if each.start == boxes.holder.start)
        boxes = replace(boxes, holder=next(same, boxes.holder))  # whose memory may be elsewhere now
        if self.together is not None:
            first, last = self._group[:1], self._group[-1:]
            if len(whole) == len(self._group):
                each = self._group.reshape(-1, *(1,) * (whole.ndim - 1))
                first = last = spread(each, whole.shape)[whole]
            self.together.touch(boxes, (first, last), writes=writes, atomic=atomic)
        return boxes, whole, index

    def _boxes(self, ptrs: Handle, mask: Any, size: int, programs: int, writes: bool, atomic: bool) -> Any:
        """Return what `_access` does, which follows from the addresses and the mask."""
        shape = _shape(ptrs)
        shown = np.ones((1,) * len(shape), bool)
        if mask is not None:
            shown = _compact(mask if isinstance(mask, np.ndarray) else mask.data)  # before Triton 3.9, of a descriptor
        if not shown.any():
            return None
        terms = [*ptrs.terms] if isinstance(ptrs, _Pointers) else [_compact(ptrs.data).view(np.int64)]
        terms.append(np.zeros((programs, *(1,) * (len(shape) - 1)), np.int64))
        rows = max(1, len(shape) - 1)
        for axis in (len(shape),) if atomic else dict.fromkeys((1, rows, len(shape))):
            access = self.memory.boxes(terms, shown, shape, axis, size)
            if access is not None and not (writes and access[0].overlap):
                return access
        self.memory.check(ptrs.data, shown, size, "writes" if writes else "reads")
        raise CannotRunError(f"{self.memory.kernel} touches {size} bytes that are not at a multiple of {size}")

    def create_addptr(self, ptr: Handle, offset: Handle) -> Handle:
        """Add an offset to a pointer; the sum is formed later."""
        terms = ptr.terms if isinstance(ptr, _Pointers) else (_compact(ptr.data).view(np.int64),)
        size = max(1, ptr.get_element_ty().primitive_bitwidth // 8)  # a bool takes a byte
        return _Pointers((*terms, _compact(offset.data).astype(np.int64) * size), _shape(ptr)[1:], ptr)

    def create_atomic_rmw(
        self, rmwOp: object, ptr: Handle, val: Handle, mask: Handle, sem: object, scope: object
    ) -> Handle:
        """Update one element after the other, each rounded: upstream has no bf16. Every program does it."""
        programs = np.zeros((len(self._group), *(1,) * (val.data.ndim - 1)), bool)
        addresses, terms, shown, _ = np.broadcast_arrays(self.memory.true(ptr.data), val.data, mask.data, programs)
        dtype = terms.dtype
        self._access(ptr, mask, dtype.itemsize, len(self._group), writes=True, atomic=True)
        if dtype.isbuiltin == 1:
            handles = zip((addresses, terms, shown), (ptr, val, mask), strict=True)
            return super().create_atomic_rmw(
                rmwOp, *(TensorHandle(np.ascontiguousarray(data), of.dtype) for data, of in handles), sem, scope
            )
        if rmwOp != ir.ATOMIC_OP.FADD:
            raise CannotRunError(f"the atomic operation {rmwOp} on {val.dtype.scalar} is not interpreted")
        before, one = np.zeros(addresses.shape, dtype), np.ones(1, bool)
        for place in map(tuple, np.argwhere(shown)):
            address, nothing = addresses[place].reshape(1), bits(np.zeros(1, dtype))
            before[place] = native.load(address, one, nothing, nothing.dtype).view(dtype)[0]
            native.store(address, bits(np.array([before[place] + terms[place]], dtype)), one)
        return TensorHandle(before, val.dtype.scalar)

    def create_descriptor_load(self, desc: Any, indices: Sequence[Handle], *_: object) -> Handle:
        ptrs, mask = desc.materialize_pointers(indices)
        element = ptrs.get_element_ty()
        padding = np.nan if desc.padding == ir.PADDING_OPTION.PAD_NAN else 0
        fill = np.full((1,) * len(ptrs.shape), padding).astype(numpy_type(element))
        loaded = self.create_masked_load(ptrs, mask, TensorHandle(fill, element))
        if getattr(desc, "round_f32_to_tf32", False) and element == tl.float32:
            loaded = TensorHandle(upstream._round_f32_to_tf32(loaded.data), element)
        return loaded

    def create_descriptor_gather(self, desc: Any, x_offsets: Handle, y_offset: Handle, type: object) -> Handle:
        """Load rows of a descriptor, each at its own offset."""
        return self.create_descriptor_load(desc, [x_offsets, y_offset])

    def create_descriptor_scatter(self, desc: Any, value: Handle, x_offsets: Handle, y_offset: Handle) -> None:
        """Store rows to a descriptor, one after the other."""
        self.create_descriptor_store(desc, value, [x_offsets, y_offset])

    def create_advance(self, ptr: Any, offsets: Sequence[Handle]) -> Any:
        """Return another block pointer, in a Triton that has them."""
        moved = [self.binary_op(old, new, np.add) for old, new in zip(ptr.offsets, offsets, strict=True)]
        return type(ptr)(ptr.base, ptr.shape, ptr.strides, moved, ptr.block_shape, ptr.order)

    # Shapes.

    def create_make_range(self, ret_ty: object, start: int, stop: int) -> Handle:
        return TensorHandle(np.arange(start, stop, dtype=np.int32)[None], tl.int32)

    def create_splat(self, ret_ty: tl.dtype, arg: Handle) -> Handle:
        """Repeat a number as a broadcast, without a copy for every element."""
        return _shaped(arg, ret_ty.shape, lambda x: x.reshape(-1, *(1,) * len(ret_ty.shape)))

    def create_broadcast(self, arg: Handle, shape: Sequence[int]) -> Handle:
        return _shaped(arg, shape, lambda x: x)

    def create_expand_dims(self, arg: Handle, axis: int) -> Handle:
        shape = list(_shape(arg)[1:])
        return _shaped(arg, [*shape[:axis], 1, *shape[axis:]], lambda x: np.expand_dims(x, axis + 1))

    def create_unsplat(self, arg: Handle) -> Handle:
        return TensorHandle(arg.data.reshape(-1), arg.dtype.scalar)

    def create_reshape(self, arg: Handle, shape: Sequence[int], allow_reorder: bool) -> Handle:
        return TensorHandle(arg.data.reshape(-1, *shape), arg.dtype.scalar)

    def create_trans(self, arg: Handle, perm: Sequence[int]) -> Handle:
        return TensorHandle(arg.data.transpose(0, *(axis + 1 for axis in perm)), arg.dtype.scalar)

    def create_cat(self, lhs: Handle, rhs: Handle) -> Handle:
        return TensorHandle(np.concatenate(alike(lhs.data, rhs.data), 1), lhs.dtype.scalar)

    def create_join(self, lhs: Handle, rhs: Handle) -> Handle:
        return TensorHandle(np.stack(alike(lhs.data, rhs.data), -1), lhs.dtype.scalar)

    def create_gather(self, src: Handle, indices: Handle, axis: int) -> Handle:
        data, places = alike(src.data, indices.data)
        return TensorHandle(np.take_along_axis(data, places, axis + 1), src.dtype.scalar)

    def create_histogram(self, data: Handle, bins: int, mask: Handle) -> Handle:
        found = (data.data[:, None] == np.arange(bins)[:, None]) & (True if mask is None else mask.data[:, None])
        return TensorHandle(found.sum(-1, dtype=np.int32), tl.int32)

    def create_atomic_cas(self, ptr: Handle, *args: Any) -> Handle:
        """Compare and swap in the programs' order: a program may wait for another one."""
        self.apart()
        return super().create_atomic_cas(TensorHandle(self.memory.true(ptr.data), ptr.dtype), *args)

    def create_atomic_poll(self, *args: Any) -> Handle:
        """Poll in the programs' order, as `create_atomic_cas`."""
        self.apart()
        return super().create_atomic_poll(*args)

    # Sums and products, which a card may contract.

    def create_fmul(self, lhs: Handle, rhs: Handle) -> Handle:
        """Multiply and round, and remember the factors: a sum may take the product unrounded."""
        rounded = self.binary_op(lhs, rhs, np.multiply)
        if self.contracts and is_rounded(rounded.data.dtype):
            rounded.attr["product"] = (lhs.data, rhs.data, self._decisions)
        return rounded

    def create_fadd(self, lhs: Handle, rhs: Handle) -> Handle:
        """Add; of two products the left one is contracted, as LLVM does."""
        for term, other in ((lhs, rhs), (rhs, lhs)):
            if "dot" in term.attr:
                a, b, *how = term.attr["dot"]
                return TensorHandle(product(a, b, other.data, self.assumed, *how), other.dtype.scalar)
        for term, other in ((lhs, rhs), (rhs, lhs)):
            if factors := self._factors(term):
                return _fused(factors, other.data, other)
        return self.binary_op(lhs, rhs, np.add)

    def create_fsub(self, lhs: Handle, rhs: Handle) -> Handle:
        if factors := self._factors(lhs):
            return _fused(factors, np.negative(rhs.data), rhs)
        if factors := self._factors(rhs):
            return _fused((np.negative(factors[0]), factors[1]), lhs.data, lhs)
        return self.binary_op(lhs, rhs, np.subtract)

    def create_fneg(self, input: Handle) -> Handle:
        """Negate; a product stays a product."""
        negative = self.unary_op(input, np.negative)
        if "product" in input.attr:
            x, y, decisions = input.attr["product"]
            negative.attr["product"] = (np.negative(x), y, decisions)
        return negative

    def create_fma(self, x: Handle, y: Handle, z: Handle) -> Handle:
        """Multiply and add, rounded once, in narrow formats too."""
        if z.data.dtype == np.float64:
            return super().create_fma(x, y, z)
        return _fused((x.data, y.data), z.data, z)

    def create_fdiv(self, lhs: Handle, rhs: Handle) -> Handle:
        """Divide as the card does; `div_rn` is another operation."""
        if self.assumed.reciprocal and lhs.data.dtype == np.float32:
            return self.binary_op(lhs, rhs, lambda x, y: x * (np.float32(1) / y))
        return self.binary_op(lhs, rhs, np.divide)

    def create_dot(
        self, a: Handle, b: Handle, d: Handle, input_precision: object, max_num_imprecise_acc: int
    ) -> Handle:
        """Multiply tiles: upstream multiplies the bits of bf16, and rounds 8-bit products by way of fp16."""
        how = input_precision, max_num_imprecise_acc
        self._multiplied = True
        left, right, addend = alike(a.data, b.data, d.data) if len(d.data) > 1 else (a.data, b.data, d.data)
        if self.together is not None:
            self.together.tile((max(len(left), len(right)), *addend.shape[1:]))
        result = TensorHandle(product(left, right, addend, self.assumed, *how), d.dtype.scalar)
        if not self.assumed.exact and self.agreed(TensorHandle(~d.data.any(tuple(range(1, d.data.ndim))), tl.int1)):
            result.attr["dot"] = (a.data, b.data, *how)  # Triton adds a sum that it goes into on the tensor cores
        return result

    def create_dot_scaled(
        self,
        lhs: Handle,
        lhs_scale: Handle,
        lhs_format: object,
        rhs: Handle,
        rhs_scale: Handle,
        rhs_format: object,
        *rest: Any,
    ) -> Handle:
        """Multiply blocks that each have a scale: exact products, summed in fp32."""
        _, lhs_k_pack, rhs_k_pack, acc = rest  # fast_math is the first
        a = scaled_operand(lhs.data, lhs_scale, lhs_format, packed_last=lhs_k_pack, right=False)
        b = scaled_operand(rhs.data, rhs_scale, rhs_format, packed_last=not rhs_k_pack, right=True)
        return TensorHandle(product(a, b, acc.data, self.assumed), tl.float32)

    # Functions.

    def create_exp(self, arg: Handle) -> Handle:
        if not self.assumed.exact and arg.data.dtype == np.float32:
            return self.create_exp2(TensorHandle(arg.data * _LOG2_E, arg.dtype))
        return self.unary_op(arg, partial(_in_fp64, np.exp))

    def create_exp2(self, arg: Handle) -> Handle:
        value = _in_fp64(np.exp2, arg.data)
        if not self.assumed.exact and value.dtype == np.float32:
            value = np.where(value < np.finfo(np.float32).smallest_normal, np.float32(0), value)
        return TensorHandle(value, arg.dtype.scalar)

    def create_extern_elementwise(
        self, lib_name: str, lib_path: str, symbol: str, args: object, ret_type: object, is_pure: bool
    ) -> Handle:
        raise CannotRunError(f"the function {symbol} of the library {lib_name or lib_path} can't be interpreted")

    def create_inline_asm(self, asm: str, *rest: object) -> Handle:
        first = next((line.strip() for line in asm.splitlines() if line.strip(" {}\t")), asm)
        raise CannotRunError(f"inline assembly can't be interpreted: {first}")


def _compact(x: Array) -> Array:
    """Return an array without what broadcasting repeated: those dimensions have length 1."""
    return x[(..., *(slice(None if stride else 1) for stride in x.strides))]


def _in_fp64(function: Callable[[Array], Array], x: Array) -> Array:
    """Return a function of `x`, computed in fp64 and rounded once."""
    return converted(function(x.astype(np.float64)), x.dtype)


def _fused(factors: tuple[Array, Array], z: Array, like: Handle) -> Handle:
    """Return a product plus z, rounded once."""
    return TensorHandle(fused(*factors, z), like.dtype.scalar)


def _shaped(arg: Handle, shape: Sequence[int], change: Callable[[Array], Array]) -> Handle:
    """Return `arg` in another shape, still with its factors if it is a product."""
    if isinstance(arg, _Pointers):
        return _Pointers(map(change, arg.terms), tuple(shape), arg)
    data = change(arg.data)
    data = spread(data, (len(data), *shape))
    shaped = TensorHandle(data, arg.dtype.scalar)
    if "product" in arg.attr and data.size == arg.data.size:
        *factors, decisions = arg.attr["product"]
        shaped.attr["product"] = (*(x.reshape(data.shape) for x in np.broadcast_arrays(*factors)), decisions)
    return shaped


def _shape(arg: Handle) -> Shape:
    return tuple((arg if isinstance(arg, _Pointers) else arg.data).shape)


def plain(value: Handle) -> Array:
    """Return the data of the only program, as a kernel's author sees it: an array of one for a number."""
    data: Array = value.data
    return data[0] if data.ndim > 1 else data


def addresses(handle: Any, offsets: Sequence[Handle], checked: Iterable[int]) -> tuple[Handle, Handle]:
    """Return the addresses of a tile, and which of them are in its tensor.

    Args:
        handle: of a descriptor or a block pointer, upstream's.
        offsets: of the tile; along an axis of which each row has one, those.
        checked: the axes of which the tensor's end is known.
    """
    axes, size = range(len(offsets)), handle.base.get_element_ty().primitive_bitwidth // 8
    like, shown = (slice(None), *(None,) * len(axes)), np.ones((1,) * (len(axes) + 1), bool)
    base = handle.base.terms if isinstance(handle.base, _Pointers) else [handle.base.data.view(np.int64)]
    terms, shape = [term[like] for term in base], []
    for axis, offset, length in zip(axes, offsets, handle.block_shape, strict=True):
        at = offset.data.astype(np.int64)
        at = at[:, None] + np.arange(length) if at.ndim == 1 else at
        shape.append(at.shape[1])
        at = np.expand_dims(at, tuple(1 + other for other in axes if other != axis))
        terms.append(at * handle.strides[axis].data[like] * size)
        if axis in checked:
            shown = shown & (at >= 0) & (at < handle.shape[axis].data[like])
    shown = spread(shown, (len(shown), *shape))
    return _Pointers(map(_compact, terms), tuple(shape), handle.base), TensorHandle(shown, tl.int1)


_FUNCTIONS: Mapping[str, Callable[[Array], Array]] = {
    "log": np.log,
    "log2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "erf": lambda x: torch.erf(torch.from_numpy(x)).numpy(),
}
for _name, _function in _FUNCTIONS.items():
    setattr(
        FaithfulBuilder, f"create_{_name}", partialmethod(FaithfulBuilder.unary_op, op=partial(_in_fp64, _function))
    )
