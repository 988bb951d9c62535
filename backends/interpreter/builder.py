"""The operations of Triton's language on numpy arrays, each rounded as the language defines it.

Only what upstream's builder does otherwise is here: it holds bf16 and the formats of 8 bits as integers, so that their
casts, products, sums, comparisons and negations are those of integers; its exponentials are as exact as numpy's fp32.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial, partialmethod
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import interpreter as native
from triton._C.libtriton import ir
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tiebreak.backends.interpreter.assumptions import Assumptions
from tiebreak.backends.interpreter.memory import ANYWHERE, Memory
from tiebreak.backends.interpreter.numbers import Array, bits, converted, fused, numpy_type
from tiebreak.backends.interpreter.products import product, scaled_operand
from tiebreak.kernels.kernel import CannotRunError

Handle = Any  # triton's TensorHandle: an array, the type of its elements, and attributes

_LOG2_E = np.float32(1.4426950408889634)


class _Pointers(TensorHandle):
    """Addresses of a tile, which are added up where someone asks for them: most tiles are a box of a tensor."""

    def __init__(self, terms: tuple[Array, ...], like: Any) -> None:
        """Of terms, int64, of which the first has the tile's shape and all broadcast to it."""
        self.terms, self.dtype, self.attr = terms, like.dtype, dict(like.attr)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tile."""
        return self.terms[0].shape

    @cached_property
    def data(self) -> Array:
        """The addresses, uint64."""
        total: Array = np.sum(np.broadcast_arrays(*self.terms), axis=0)
        return total.view(np.uint64)


class FaithfulBuilder(InterpreterBuilder):
    """Upstream's builder with right numbers, under what is assumed of a card."""

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
        self.begin(Memory("", ()), contracts=False)

    def begin(self, memory: Memory, *, contracts: bool) -> None:
        """Take up a launch that may touch this memory, and is compiled with contraction or not."""
        self.memory = memory
        self.contracts = contracts
        self._multiplied = False

    def in_pairs(self) -> tuple[int, ...]:
        """The assumed order of a row where tiles lie as a product's sums do: from a launch's first product on."""
        return self.assumed.pairs if self._multiplied else ()

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
        return TensorHandle(np.broadcast_to(numbers, src.data.shape), dst_type.scalar)

    def create_fp_to_fp(self, src: Handle, dst_type: tl.dtype, rounding_mode: object) -> Handle:
        """Upstream rounds half up where the kernel rounds to even, and by cutting off elsewhere."""
        toward_zero = rounding_mode == ir.ROUNDING_MODE.RTZ
        return TensorHandle(converted(src.data, numpy_type(dst_type), toward_zero=toward_zero), dst_type.scalar)

    def create_bitcast(self, src: Handle, dst_type: tl.dtype) -> Handle:
        data = np.ascontiguousarray(src.data) if src.data.ndim else src.data
        return TensorHandle(data.view(numpy_type(dst_type)), dst_type.scalar)

    create_ptr_to_int = create_bitcast

    def create_int_to_ptr(self, src: Handle, dst_type: tl.dtype) -> Handle:
        """A pointer that was read from memory, or computed: nobody knows what it may point to."""
        pointer = self.create_bitcast(src, dst_type)
        pointer.attr["argument"] = ANYWHERE
        return pointer

    # Memory.

    def create_masked_load(self, ptrs: Handle, mask: Handle, other: Handle, *_: object, **__: object) -> Handle:
        """Zeros where the mask hides an element and the load names no other value: a card leaves that open.

        The parameters about caches behind these differ by Triton's version, here as in other operations.
        """
        element, shown = ptrs.get_element_ty(), _mask(mask)
        dtype = numpy_type(element)
        if (found := self._box(ptrs, shown, dtype)) is not None:
            region, box = found
            if box.shape == ptrs.shape:
                return TensorHandle(box.copy(), element)
            tile = np.zeros(ptrs.shape, dtype) if other is None else np.array(np.broadcast_to(other.data, ptrs.shape))
            tile[region] = box
            return TensorHandle(tile, element)
        self.memory.check(ptrs.data, shown, dtype.itemsize, ptrs.attr.get("argument"), "reads")
        fill = bits(np.zeros(ptrs.data.shape, dtype) if other is None else np.ascontiguousarray(other.data))
        return TensorHandle(native.load(ptrs.data, shown, fill, fill.dtype).view(dtype), element)

    def create_masked_store(self, ptrs: Handle, value: Handle, mask: Handle, *_: object, **__: object) -> object:
        shown = _mask(mask)
        if (found := self._box(ptrs, shown, value.data.dtype)) is not None and 0 not in found[1].strides:
            region, box = found
            box[...] = np.broadcast_to(value.data, ptrs.shape)[region]
            return None
        self.memory.check(ptrs.data, shown, value.data.itemsize, ptrs.attr.get("argument"), "writes")
        return native.store(ptrs.data, bits(np.ascontiguousarray(value.data)), shown)

    def _box(self, ptrs: Handle, shown: Array, dtype: np.dtype[Any]) -> tuple[tuple[slice, ...], Any] | None:
        """The memory that shown pointers point to, and which they are, where both are boxes, that of one argument."""
        if not isinstance(ptrs, _Pointers) or (region := _region(_compact(shown), ptrs.shape)) is None:
            return None
        terms = (_cut(_compact(term), region) for term in ptrs.terms)
        shape = tuple(part.stop - part.start for part in region)
        box = self.memory.box(terms, shape, dtype, ptrs.attr.get("argument"))
        return None if box is None else (region, box)

    def create_addptr(self, ptr: Handle, offset: Handle) -> Handle:
        """Nothing is added up yet."""
        terms = ptr.terms if isinstance(ptr, _Pointers) else (ptr.data.view(np.int64),)
        size = max(1, ptr.get_element_ty().primitive_bitwidth // 8)  # a bool takes a byte
        return _Pointers((*terms, _compact(offset.data).astype(np.int64) * size), ptr)

    def create_splat(self, ret_ty: tl.dtype, arg: Handle) -> Handle:
        """Without a copy for every element."""
        number = arg.data.reshape((1,) * len(ret_ty.shape))
        return TensorHandle(np.broadcast_to(number, ret_ty.shape), arg.dtype.scalar)

    def create_atomic_rmw(
        self, rmwOp: object, ptr: Handle, val: Handle, mask: Handle, sem: object, scope: object
    ) -> Handle:
        """One element after the other, each rounded: upstream has none of bf16."""
        self.memory.check(ptr.data, mask.data, val.data.itemsize, ptr.attr.get("argument"), "writes")
        dtype = val.data.dtype
        if bits(val.data).dtype == dtype:
            return super().create_atomic_rmw(rmwOp, ptr, val, mask, sem, scope)
        if rmwOp != ir.ATOMIC_OP.FADD:
            raise CannotRunError(f"the atomic operation {rmwOp} on {val.dtype.scalar} is not interpreted")
        before, one = np.zeros(ptr.data.shape, dtype), np.ones(1, bool)
        terms = np.broadcast_to(val.data, ptr.data.shape)
        for place in map(tuple, np.argwhere(np.broadcast_to(mask.data, ptr.data.shape))):
            address, nothing = ptr.data[place].reshape(1), bits(np.zeros(1, dtype))
            before[place] = native.load(address, one, nothing, nothing.dtype).view(dtype)[0]
            native.store(address, bits(np.array([before[place] + terms[place]], dtype)), one)
        return TensorHandle(before, val.dtype.scalar)

    # Sums and products, which a card may contract.

    def create_fmul(self, lhs: Handle, rhs: Handle) -> Handle:
        """A rounded product, and of what: a sum that it goes into may take it unrounded."""
        rounded = self.binary_op(lhs, rhs, np.multiply)
        if self.contracts and rounded.data.dtype == np.float32:
            rounded.attr["product"] = (lhs.data, rhs.data)
        return rounded

    def create_fadd(self, lhs: Handle, rhs: Handle) -> Handle:
        """A sum; of two products the left one is contracted, as LLVM does."""
        for term, other in ((lhs, rhs), (rhs, lhs)):
            if "dot" in term.attr:
                a, b, *how = term.attr["dot"]
                return TensorHandle(product(a, b, other.data, self.assumed, *how), other.dtype.scalar)
        for term, other in ((lhs, rhs), (rhs, lhs)):
            if "product" in term.attr:
                return _fused(term.attr["product"], other.data, other)
        return self.binary_op(lhs, rhs, np.add)

    def create_fsub(self, lhs: Handle, rhs: Handle) -> Handle:
        if "product" in lhs.attr:
            return _fused(lhs.attr["product"], np.negative(rhs.data), rhs)
        if "product" in rhs.attr:
            x, y = rhs.attr["product"]
            return _fused((np.negative(x), y), lhs.data, lhs)
        return self.binary_op(lhs, rhs, np.subtract)

    def create_fneg(self, input: Handle) -> Handle:
        """A negation, which leaves a product one."""
        negative = self.unary_op(input, np.negative)
        if "product" in input.attr:
            x, y = input.attr["product"]
            negative.attr["product"] = (np.negative(x), y)
        return negative

    def create_fma(self, x: Handle, y: Handle, z: Handle) -> Handle:
        """Rounded once. Of narrow formats too: in fp64 their products are exact, and sums wide enough."""
        if z.data.dtype == np.float64:
            return super().create_fma(x, y, z)
        if z.data.dtype == np.float32:
            return _fused((x.data, y.data), z.data, z)
        wide = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return TensorHandle(converted(wide, z.data.dtype), z.dtype.scalar)

    def create_fdiv(self, lhs: Handle, rhs: Handle) -> Handle:
        """As the card divides; `div_rn` is another operation."""
        if self.assumed.reciprocal and lhs.data.dtype == np.float32:
            return self.binary_op(lhs, rhs, lambda x, y: x * (np.float32(1) / y))
        return self.binary_op(lhs, rhs, np.divide)

    def create_dot(
        self, a: Handle, b: Handle, d: Handle, input_precision: object, max_num_imprecise_acc: int
    ) -> Handle:
        """Upstream multiplies the bits of bf16, and rounds products of 8 bits by way of fp16."""
        how = input_precision, max_num_imprecise_acc
        self._multiplied = True
        result = TensorHandle(product(a.data, b.data, d.data, self.assumed, *how), d.dtype.scalar)
        if not self.assumed.exact and not d.data.any():
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
        """A product of blocks with a scale of their own each: exact, and added up in fp32."""
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
    """An array without what broadcasting has repeated: those dimensions are 1 long."""
    return x[(..., *(slice(None if stride else 1) for stride in x.strides))]


def _cut(x: Array, region: tuple[slice, ...]) -> Array:
    """A region of a compact array."""
    return x[tuple(part if length > 1 else slice(None) for part, length in zip(region, x.shape, strict=True))]


def _region(shown: Array, shape: tuple[int, ...]) -> tuple[slice, ...] | None:
    """The box that a compact mask shows of a tile of this shape; None where it shows nothing, or no box."""
    region = []
    for axis, length in enumerate(shape):
        places = np.flatnonzero(shown.any(tuple(other for other in range(shown.ndim) if other != axis)))
        if not len(places):
            return None
        region.append(slice(0, length) if shown.shape[axis] == 1 else slice(int(places[0]), int(places[-1]) + 1))
    return tuple(region) if _cut(shown, tuple(region)).all() else None


def _mask(mask: Handle) -> Array:
    """Which elements are shown; before Triton 3.9 those of a descriptor come as a bare array."""
    shown: Array = mask if isinstance(mask, np.ndarray) else mask.data
    return shown


def _in_fp64(function: Callable[[Array], Array], x: Array) -> Array:
    """A function, computed in fp64 and rounded once."""
    return converted(function(x.astype(np.float64)), x.dtype)


def _fused(factors: tuple[Array, Array], z: Array, like: Handle) -> Handle:
    """A product, and z added to it, rounded once."""
    return TensorHandle(fused(*factors, z), like.dtype.scalar)


def _remembering(create: Callable[..., Handle]) -> Callable[..., Handle]:
    """An operation on shapes, after which it is still known what argument a pointer is of, and of what a product is."""

    def call(*args: Any) -> Handle:
        arg = next(arg for arg in args if isinstance(arg, TensorHandle))
        if isinstance(arg, _Pointers):
            terms = (create(*(TensorHandle(term, tl.int64) if x is arg else x for x in args)) for term in arg.terms)
            return _Pointers(tuple(term.data for term in terms), arg)
        shaped = create(*args)
        if "argument" in arg.attr:
            shaped.attr["argument"] = arg.attr["argument"]
        if "product" in arg.attr and shaped.data.size == arg.data.size:
            factors = np.broadcast_arrays(*arg.attr["product"])
            shaped.attr["product"] = tuple(x.reshape(shaped.data.shape) for x in factors)
        return shaped

    return call


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
for _name in ("create_splat", "create_expand_dims", "create_broadcast"):
    setattr(FaithfulBuilder, _name, _remembering(getattr(FaithfulBuilder, _name)))
