"""Products with fewer bits, forward and backward, in any torch model and the suite's GPT-2: masks and clamps.

A masked product takes masked inputs and gives a masked output. So do the products of its backward pass. All else,
weights' master copies and the optimiser's states included, stays as it is (Lee et al., To FP8 and Back Again, arXiv
2405.18710, figures 3 and 12). They mask by truncation, `Rounding.RTZ`. To even, a product in E8M7 is a bf16
product that adds up in fp32, to the bit.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from tiebreak.backends.backend import EMULATION
from tiebreak.backends.emulation.rounding import round_to
from tiebreak.cases.gpt2.attention import HeadKernel
from tiebreak.cases.gpt2.model import GPT2, Configuration, everywhere
from tiebreak.kernels.formats import FP32, Format, Formats, Rounding, parse_format
from tiebreak.kernels.kernel import Declaration
from tiebreak.kernels.plans import Cast

SAME = "same"  # of attention: in the products' format
NO_RANGE = "{}: attention has no range of its own; name a format of fewer exponent bits"
_MODES = {"rne": Rounding.RNE, "rtz": Rounding.RTZ}
_RANGE = re.compile(r"(inner|outer)=(-?[0-9]{1,3})")


@dataclass(frozen=True)
class Reduction:
    """How the numbers that enter and leave a product are masked; ValueError: a range that the format does not have."""

    fmt: Format  # what they are rounded to: its fraction bits, and its range with subnormals and Inf
    mode: Rounding = Rounding.RNE  # or RTZ, which cuts bits off
    inner: int | None = None  # least exponent: what is smaller, but 0, becomes 2^inner; None: as the format has it
    outer: int | None = None  # highest exponent: finite numbers beyond it become its largest; None: the format's own

    def __post_init__(self) -> None:
        lowest, highest = self.fmt.min_exponent, self.fmt.max_exponent
        for name, exponent in (("inner", self.inner), ("outer", self.outer)):
            if exponent is not None and not lowest <= exponent <= highest:
                raise ValueError(f"{self.fmt.name}: {name} is an exponent from {lowest} to {highest}, not {exponent}")
        if self.inner is not None and self.outer is not None and self.inner > self.outer:
            raise ValueError(f"{self.fmt.name}: from inner {self.inner} to outer {self.outer} the range is empty")

    @property
    def name(self) -> str:
        """Return the text that `parse_reduction` takes."""
        mode = "" if self.mode is Rounding.RNE else ":rtz"
        inner = "" if self.inner is None else f":inner={self.inner}"
        return self.fmt.name + mode + inner + ("" if self.outer is None else f":outer={self.outer}")

    @property
    def clamps(self) -> bool:
        """Return whether the range of exponents is narrower than the format's."""
        return self.inner is not None or self.outer is not None

    def mask(self, x: Tensor) -> Tensor:
        """Return fp32 or fp64 numbers rounded, then clamped to the range; the sign of zero, Inf and NaN are kept."""
        masked = round_to(x, self.fmt, self.mode)
        if self.inner is not None:
            least = torch.full_like(masked, 2.0**self.inner).copysign(x)
            masked = torch.where((x != 0) & (masked.abs() < 2.0**self.inner), least, masked)
        if self.outer is not None:
            largest = 2.0**self.outer * (2.0 - 2.0**-self.fmt.mantissa_bits)
            masked = torch.where(masked.isinf(), masked, masked.clamp(-largest, largest))
        return masked


def parse_reduction(text: str) -> Reduction:
    """Return the reduction of a text, such as `E8M5:rtz` or `E8M7:inner=-20:outer=15`; ValueError: there is none."""
    fmt, *changes = text.split(":")
    mode, ends = Rounding.RNE, dict[str, int]()
    for change in changes:
        match = _RANGE.fullmatch(change)
        if match is not None:
            ends[match[1]] = int(match[2])
        elif change in _MODES:
            mode = _MODES[change]
        else:
            raise ValueError(
                f"{text}: after the format come rne, rtz, inner=EXPONENT or outer=EXPONENT, not {change!r}"
            )
    return Reduction(parse_format(fmt), mode, **ends)


class _Mask(torch.autograd.Function):
    """Numbers masked on their way forward, their gradients on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, reduction: Reduction) -> Tensor:
        ctx.reduction = reduction
        return reduction.mask(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _mask(gradients[0], ctx.reduction), None


def _mask(x: Tensor, reduction: Reduction) -> Tensor:
    masked: Tensor = _Mask.apply(x, reduction)  # type: ignore[no-untyped-call]
    return masked


Product = Callable[..., Tensor]


def masked_product(product: Product, reduction: Reduction, *operands: Tensor) -> Tensor:
    """Return the product of masked operands, masked, in the type that they promote to; its gradients masked alike.

    `product` is linear in each of its operands; a term to add is an operand like others. The mask of an operand masks
    the gradient that leaves the product for it, and that of the output the gradient that enters: between them autograd
    multiplies masked numbers, in fp32 where they are narrower.
    """
    promoted = reduce(torch.promote_types, (operand.dtype for operand in operands))
    carrier = torch.promote_types(promoted, torch.float32)
    # Under autocast too, the reduction alone says what is rounded; a context further out must not mask once more.
    with torch.autocast(operands[0].device.type, enabled=False), torch._C.DisableTorchFunction():
        masked = [_mask(operand.to(carrier), reduction) for operand in operands]
        return _mask(product(*masked), reduction).to(promoted)


def masked_attention(
    reduction: Reduction,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `scaled_dot_product_attention` as two masked products; all between them is in fp32."""
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (each.repeat_interleave(groups, dim=-3) for each in (key, value))
    scores = masked_product(torch.matmul, reduction, query, key.mT).to(torch.promote_types(query.dtype, torch.float32))
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        hidden = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if hidden else scores + attn_mask
    p = functional.dropout(torch._safe_softmax(scores, -1), dropout_p)
    return masked_product(torch.matmul, reduction, p, value).to(query.dtype)


_WITH_METHOD = ("matmul", "mm", "bmm", "mv", "dot", "inner", "addmm", "addbmm", "baddbmm", "addmv")
# Linear in each of their tensors.
_PRODUCTS: frozenset[Callable[..., Any]] = frozenset(
    {
        *(getattr(owner, name) for owner in (torch, Tensor) for name in _WITH_METHOD),
        *(functional.linear, torch.linalg.matmul, torch.linalg.vecdot),
        *(torch.einsum, torch.tensordot, torch.outer, torch.vdot),
    }
)
# They multiply within, where no mask reaches.
_REFUSED: frozenset[Callable[..., Any]] = frozenset(
    {
        *(functional.multi_head_attention_forward, functional.bilinear),
        *(torch._native_multi_head_attention, torch._transformer_encoder_layer_fwd),
        *(torch.chain_matmul, torch.linalg.multi_dot),
    }
)


class _Masking(TorchFunctionMode):
    def __init__(self, reduction: Reduction) -> None:
        super().__init__()
        self.reductions: list[Reduction | None] = [reduction]  # the last holds; None: products as they are
        self.otherwise: dict[nn.Module, Reduction | None] = {}  # what holds while a module's forward pass runs

    def enter(self, module: nn.Module, args: Any) -> None:
        del args
        self.reductions.append(self.otherwise[module])

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        del module, args, output
        self.reductions.pop()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        reduction, named = self.reductions[-1], dict(kwargs or {})
        if func is Tensor.__rmatmul__:
            func, args = torch.matmul, args[::-1]
        if reduction is not None:
            if func is functional.scaled_dot_product_attention:
                return masked_attention(reduction, *args, **named)
            if func in _PRODUCTS:
                return _masked_call(func, reduction, args, named)
            if func in _REFUSED:
                raise NotImplementedError(
                    f"{getattr(func, '__name__', func)} multiplies where no mask reaches: write its products out, with"
                    " functional.linear, torch.matmul or scaled_dot_product_attention, or leave its module unmasked"
                )
        with torch._C.DisableTorchFunction():  # a context further out does not hold in here
            return func(*args, **named)


def _masked_call(func: Callable[..., Any], reduction: Reduction, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Call a product with all its tensors masked; one of integers as it is."""
    if named.get("out") is not None:
        raise NotImplementedError("a masked product can't be written to out=: leave it away")
    leaves, structure = pytree.tree_flatten((args, named))
    places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]

    def product(*masked: Tensor) -> Tensor:
        for at, operand in zip(places, masked, strict=True):
            leaves[at] = operand
        own, keywords = pytree.tree_unflatten(leaves, structure)
        output: Tensor = func(*own, **keywords)
        return output

    return masked_product(product, reduction, *(leaves[at] for at in places)) if places else product()


Otherwise = Mapping[str, Reduction | None]  # by glob over modules' names: another mask, or none


def reduction_at(name: str, reduction: Reduction | None, otherwise: Otherwise) -> Reduction | None:
    """Return what holds in a module: what is said of it, else of the module that it is in, and so on, else `reduction`.

    `name` is that within its model, such as `blocks.0.wq`; of several globs that match it the first counts.
    """
    while name:
        for glob, other in otherwise.items():
            if fnmatchcase(name, glob):
                return other
        name = name.rpartition(".")[0]
    return reduction


@contextmanager
def reduce_precision(
    reduction: Reduction, model: nn.Module | None = None, otherwise: Otherwise | None = None
) -> Iterator[None]:
    """Within, the products of linear layers and attention are masked, and so are those of their backward pass.

    Of any torch model: `functional.linear`, `torch.matmul` and its kin, `einsum`, and `scaled_dot_product_attention`,
    which becomes two masked products. A backward pass is masked if its forward pass was, wherever it is called. What is
    not seen: convolutions, compiled code, and what a checkpoint computes anew.

    `otherwise` names modules of the model that go by another mask or, at None, by none, with what is in them, as globs
    over `model.named_modules()`: `{"head": None, "blocks.[01]": Reduction(TF32)}`.

    Raises:
        ValueError: a glob that no module's name matches, or globs without a model.
        NotImplementedError: a product that can't be masked, such as `nn.MultiheadAttention`'s; one line that names it.
    """
    masking = _Masking(reduction)
    names = {name: module for name, module in model.named_modules() if name} if model is not None else {}
    for glob in otherwise or {}:
        if not any(fnmatchcase(name, glob) for name in names):
            raise ValueError(
                f"{glob}: no module of the model has such a name: {', '.join(names) or 'there is no model'}"
            )
    with ExitStack() as hooks, masking:
        for name, module in names.items() if otherwise else ():
            masking.otherwise[module] = reduction_at(name, reduction, otherwise or {})
            hooks.callback(module.register_forward_pre_hook(masking.enter).remove)
            hooks.callback(module.register_forward_hook(masking.leave, always_call=True).remove)
        yield


def parse_attention(text: str) -> Reduction | None:
    """Return the mask of attention alone; None: as the products. ValueError: no such format, or with a range."""
    if text == SAME:
        return None
    reduction = parse_reduction(text)
    if reduction.clamps:
        raise ValueError(NO_RANGE.format(reduction.name))
    return reduction


def emulated_gpt2(kernel: str, sizes: Configuration, seed: int) -> GPT2:
    """Return a model on the emulation's arithmetic, its attention a declared kernel; ValueError: no such kernel."""
    declared = EMULATION.kernel(kernel).declaration
    assert declared is not None  # as all of the emulation's are
    return GPT2(sizes, everywhere(HeadKernel(declared), sizes), EMULATION.arithmetic, seed)


@contextmanager
def reduced_gpt2(
    model: GPT2, reduction: Reduction, otherwise: Otherwise | None = None, attention: Reduction | None = None
) -> Iterator[GPT2]:
    """Within, an emulated GPT-2 computes with fewer bits, forward and backward; its weights stay as they are.

    Linear layers go by `reduce_precision`. A head's kernel rounds where its plan says, to the reduction's format in the
    reduction's mode, wherever the plan follows the format of a call; q, k and v are masked as its inputs. Attention
    goes by what is said of its block, or at `attention` by one format in every block: Lee et al. (arXiv 2405.18710)
    leave it unmasked, in bf16.

    Raises:
        ValueError: an undeclared kernel, a range that no plan has, or a glob that matches nothing.
    """
    former, rest = model.kernels, otherwise or {}
    kernels = []
    for layer, heads in enumerate(former):
        own = attention or reduction_at(f"blocks.{layer}", reduction, rest) or Reduction(FP32)
        kernels.append(tuple(_reduced(head, own) for head in heads))
    model.kernels = tuple(kernels)
    try:
        with reduce_precision(reduction, model, rest):
            yield model
    finally:
        model.kernels = former


def _reduced(head: HeadKernel, reduction: Reduction) -> HeadKernel:
    declared = head.implementation
    if not isinstance(declared, Declaration):
        raise ValueError(
            f"{declared.name} rounds as its device does: only a declared kernel can be put in other formats"
        )
    if reduction.clamps:
        raise ValueError(NO_RANGE.format(reduction.name))
    casts = {
        name: replace(cast, rounding=reduction.mode)  # to even alone: a stochastic cast stays one
        for name, cast in declared.plan.casts()
        if cast.follows is not None and cast.rounding is Rounding.RNE
    }
    plan = replace(declared.plan, **casts).in_formats(Formats.of(reduction.fmt))  # type: ignore[arg-type]
    return HeadKernel(replace(declared, plan=plan), Cast(reduction.fmt, reduction.mode))
