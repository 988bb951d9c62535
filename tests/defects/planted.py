"""The planted defects: what is wrong, the public bug that each stands for, its sound twin, and what catches it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tiebreak.backends.backend import CPU, Backend
from tiebreak.defects.declared import (
    EXACT,
    CastingIn,
    NarrowAccumulator,
    NoiseOfTheFirst,
    doing,
    honest,
)
from tiebreak.defects.kernel import SOUND, Attention, Request, Sums, Switch, truncated
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.external.kernels import users_kernel
from tiebreak.kernels.external.options import KernelOptions
from tiebreak.kernels.formats import BF16, FP16, Format, Rounding
from tiebreak.kernels.kernel import Kernel
from tiebreak.kernels.operands import LOG2_E
from tiebreak.kernels.plans import FEXP_U20, Cast, SumOf
from tiebreak.matrix.questions.placements import read_as_contiguous

_GITHUB = "https://github.com/"
_VECTOR = 16  # numbers that a vector has
_FAST_AT_0 = 1.0 - 2.0**-14.2  # what PyTorch's fast exponential has at 0


@dataclass(frozen=True)
class Defect:
    """A kernel that is wrong in one step, and what the suite makes of it."""

    name: str  # of the defect
    wrong: str  # one line
    stands_for: str  # where such a bug was reported
    twin: str  # the sound kernel that it is otherwise
    make: Callable[[str], Kernel]  # a fresh kernel of this name: some keep state from call to call
    case: str  # one that shows what is wrong
    checks: str  # those that it does not meet there, with spaces between
    heads: int = 16  # that it needs
    slip: str = ""  # the usual mistake that a verdict names it as, if it is one
    arithmetic: Arithmetic = EXACT  # where it runs
    fmt: Format = BF16  # of q, k, v and O

    @property
    def kernel(self) -> Kernel:
        """The kernel, as new."""
        return self.make(self.name)


def on(arithmetic: Arithmetic = EXACT) -> Backend:
    """The backend that planted kernels run on: this CPU with this arithmetic for those that take one."""
    return replace(CPU, name="planted", arithmetic=arithmetic)


def users(function: Callable[[], Attention], name: str, **options: str) -> Kernel:
    """A user's kernel that declares no plan, called and held to its contract as `--kernel` does.

    Args:
        function: makes it anew.
        name: of the kernel.
        options: other than its author's.
    """
    made = function()
    given: dict[str, Any] = {"takes": "value_dim hidden_nan", "backward": made.backward, **made.options, **options}
    return users_kernel(name, made, KernelOptions(**given))


def twin(name: str) -> Kernel:
    """A sound twin: a user's kernel, or one that does what it declares."""
    return users(SOUND[name], name) if name in SOUND else honest(name)


def _row(
    name: str,
    wrong: str,
    bug: str,
    caught: tuple[str, str],
    twin: str = "tiled",
    fmt: Format = BF16,
    slip: str = "",
    heads: int = 16,
    options: Mapping[str, str] | None = None,
    **switches: Any,
) -> Defect:
    """A defect of a user's kernel: what is put in the place of some steps of its twin, or of its constants."""
    make = partial(users, partial(SOUND[twin], **switches), **(options or {}))
    return Defect(name, wrong, _GITHUB + bug if bug else "this suite", twin, make, *caught, heads, slip, fmt=fmt)


def _plan_row(
    name: str,
    wrong: str,
    bug: str,
    caught: tuple[str, str],
    twin: str = "flash@fused",
    done: str = "",
    arithmetic: Arithmetic = EXACT,
    **changes: Any,
) -> Defect:
    """A defect of a kernel that declares its twin's plan and does another, or the same with changes, or on a device."""
    make = partial(doing, twin, done or twin, **changes)
    return Defect(name, wrong, bug if "://" in bug else _GITHUB + bug, twin, make, *caught, arithmetic=arithmetic)


def _asking(**changes: Any) -> Switch:
    """A call that asks something else: values, or what makes one of the call."""

    def prepared(sound: Switch, request: Request) -> Any:
        new = {name: value(request) if callable(value) else value for name, value in changes.items()}
        return replace(sound(request), **new)

    return prepared


def _blocks_counted(request: Request) -> Tensor | None:
    if request.base_blockmask is None:
        return None
    blocks = request.base_blockmask.clone()
    blocks[..., int(blocks.sum(-1).max()) :] = False
    return blocks


def _wider(request: Request) -> tuple[int, int]:
    left, right = request.window_size
    return (left + 1 if left >= 0 else left), right


def _whole_pages(request: Request) -> Tensor | None:
    page = request.k.shape[2]
    return None if request.cache_seqlens is None else -(-request.cache_seqlens // page) * page


def _query_overwritten(sound: Switch, request: Request) -> Any:
    with torch.no_grad():
        request.q.mul_(request.factor)
    return replace(sound(request), scale=1.0)


def _mask_of_the_shape(request: Request) -> Any:
    mask = request.attn_mask
    return None if mask is None else request.kept.setdefault(mask.shape, mask.clone())


def _first(x: Tensor | None, dimension: int) -> Tensor | None:
    """The first of a dimension in the place of all."""
    return None if x is None else x.narrow(dimension, 0, 1).expand_as(x)


def _negative(x: Tensor | None) -> Tensor | None:
    return None if x is None else -x


def _scaled(x: Tensor | None, factor: float) -> Tensor | None:
    return None if x is None else x * factor


def _of_one(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.dim() < 2 else x[0]


def _signed(sound: Switch, request: Request) -> Tensor:
    rows, keys = (torch.arange(n, dtype=torch.float32) for n in (request.queries, request.keys))
    apart: Tensor = sound(request)
    return apart * torch.where(rows[:, None] + request.keys - request.queries < keys, -1.0, 1.0)


def _from_row_to_row(sound: Switch, request: Request) -> Tensor:
    del sound
    return (torch.arange(request.queries)[:, None] - torch.arange(request.keys)).abs().float()


def _largest(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.max().expand_as(x)


def _whole_tiles(request: Request) -> tuple[int, int]:
    left, right = request.window_size
    return (-(-left // Attention.tile) * Attention.tile if left >= 0 else left), right


def _sink_by_row(sound: Switch, sums: Sums, request: Request) -> Any:
    if request.sinks is None:
        return sound(sums, request)
    at = torch.arange(request.q.shape[1] * request.queries) % request.q.shape[1]
    by_row = request.sinks.float()[at].reshape(request.q.shape[1], request.queries, 1)
    m = torch.maximum(sums.m, by_row)
    rescale = torch.exp(sums.m - m)
    return Sums(m, rescale * sums.l + torch.exp(by_row - m), rescale * sums.o_bar)


def _adjacent(request: Request) -> Tensor | None:
    if request.block_table is None:
        return None
    table = request.block_table.clone()
    pairs = table.shape[1] // 2 * 2
    table[:, 1:pairs:2] = (table[:, 0:pairs:2] + 1) % request.k.shape[0]
    return table


def _transposed(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.mT.reshape(x.shape)


def _long_tiles(tiles: list[slice]) -> list[slice]:
    return [each for each in tiles if each.stop - each.start > 1] or tiles


def _left_over(sound: Switch, request: Request) -> Any:
    sums: Sums = sound(request)
    left = request.kept.setdefault("workspace", sums.l)
    if left.numel() <= sums.l.numel():
        request.kept["workspace"] = sums.l
        return sums
    return replace(sums, l=sums.l + left.flatten()[: sums.l.numel()].reshape(sums.l.shape))


def _of_a_block(sound: Switch, request: Request) -> Tensor | None:
    hidden: Tensor | None = sound(request)
    if hidden is None or not request.causal:
        return hidden
    return hidden & (torch.arange(request.queries) < 128)[:, None]


def _kept(name: str) -> Switch:
    """A parameter that is what it was in the first call of a shape that had one."""

    def prepared(sound: Switch, request: Request) -> Any:
        given = getattr(request, name)
        if given is None or given == (-1, -1):
            return sound(request)
        first = request.kept.setdefault((name, request.q.shape, request.k.shape), given)
        return sound(replace(request, **{name: first}))

    return prepared


def _heads_in_turn(x: Tensor, first: int, second: int) -> Tensor:
    return x.reshape(x.shape[0], first, second, *x.shape[2:]).transpose(1, 2).flatten(1, 2)


def _columns_written_to_the_first_tile(sound: Switch, sums: Sums) -> Tensor:
    o = sound(sums)
    last = (o.shape[-1] - 1) // Attention.tile * Attention.tile
    written = torch.zeros_like(o)
    written[..., : o.shape[-1] - last] = o[..., last:]
    return written


def _filled_up(sound: Switch, before: Tensor, p: Tensor, m: Tensor) -> Any:
    past = -p.shape[-1] % Attention.tile
    return sound(before, p, m) + past * torch.exp(-m) if past else sound(before, p, m)


def _key_after_key(sound: Switch, before: Tensor, p: Tensor, m: Tensor) -> Tensor:
    del sound, m
    total = before.bfloat16()
    for column in p.bfloat16().unbind(-1):
        total = total + column[..., None]
    return total.float()


def _behind(x: Tensor, multiple: int) -> Tensor:
    """What lies behind the last rows of x, up to a multiple of them, as far as its storage goes on."""
    batch, heads, rows, d = x.shape
    last = x.storage_offset() + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    room = (x.untyped_storage().nbytes() // x.element_size() - 1 - last) // max(x.stride(2), 1)
    return x.as_strided((batch, heads, rows + min(-rows % multiple, room), d), x.stride())[:, :, rows:]


def _whole_tile_of_v(sound: Switch, request: Request, sums: Sums, keys: slice) -> Sums:
    past = _behind(request.v, Attention.tile).float().repeat_interleave(request.groups, 1)
    after: Sums = sound(request, sums, keys)
    return replace(after, o_bar=after.o_bar + 0.0 * past.sum(2, keepdim=True))


def _o_between_tiles(stored: Callable[[Tensor], Tensor]) -> Switch:
    def step(sound: Switch, *arguments: Any) -> Sums:
        after: Sums = sound(*arguments)
        return replace(after, o_bar=stored(after.o_bar))

    return step


def _k_of_the_address(sound: Switch, request: Request, keys: slice) -> Any:
    kept: Tensor = request.kept.setdefault((request.k.data_ptr(), request.k.shape), request.k.clone())
    return sound(replace(request, k=kept), keys)


def _remembered(sound: Switch, request: Request) -> Any:
    request.kept["last"] = request
    return sound(request)


def _one_buffer(sound: Switch, o: Tensor, request: Request) -> Tensor:
    o = sound(o, request)
    buffer: Tensor = request.kept.setdefault(o.shape, torch.empty_like(o))
    return buffer.copy_(o)


def _calls(request: Request) -> int:
    """How often this was asked, of this shape."""
    request.kept[request.q.shape] = calls = request.kept.get(request.q.shape, 0) + 1
    return int(calls)


def _twice_at_first(sound: Switch, request: Request, do: Tensor, o: Tensor) -> tuple[Tensor, ...]:
    dq, *others = sound(request, do, o)
    return (dq * 2 if _calls(request) == 1 else dq, *others)


def _left_from_before(sound: Switch, request: Request) -> Sums:
    sums: Sums = sound(request)
    left = request.kept.get(sums.o_bar.shape)
    return sums if left is None else replace(sums, m=torch.zeros_like(sums.m), o_bar=left)


def _left_behind(sound: Switch, request: Request) -> Sums:
    sums: Sums = sound(request)
    request.kept[sums.o_bar.shape] = sums.o_bar * 2.0**-6
    return sums


def _one_lost(sound: Switch, o: Tensor, request: Request) -> Any:
    # Once in every other call, in one element: as rare as a race, but the same in every run of the tests.
    o[0, 0, 0, 0] *= 1.0 - 2.0**-8 * (_calls(request) % 2)
    return sound(o, request)


def _another_order(sound: Switch, dq: Tensor, added: Tensor, request: Request, keys: slice) -> Tensor:
    total: Tensor = sound(dq, added, request, keys)
    return total * (1.0 + 2.0**-9) if _calls(request) % 3 == 0 else total


def _set_for_speed(sound: Switch, request: Request) -> Any:
    torch.set_float32_matmul_precision("medium")
    return sound(request)


def _fast_in_vectors(sound: Switch, s: Tensor, m: Tensor) -> Tensor:
    p: Tensor = sound(s, m)
    if s.shape[-1] > 1:
        p[..., : s.shape[-1] // _VECTOR * _VECTOR] *= _FAST_AT_0
    return p


def _merged_by_another_scale(sound: Switch, parts: list[Sums], request: Request) -> Any:
    factor = 1.0 / (request.factor * math.sqrt(request.q.shape[-1]))
    return sound([replace(part, m=part.m * factor) for part in parts], request)


def _without(gradients: tuple[Tensor, ...], at: int, columns: int) -> tuple[Tensor, ...]:
    return tuple(
        x.clone().index_fill_(-1, torch.arange(x.shape[-1])[columns:], 0.0) if index == at and columns else x
        for index, x in enumerate(gradients)
    )


def _one_tile_late(sound: Switch, request: Request) -> Any:
    first = request.keys - request.queries - request.window_size[0] if request.window_size[0] >= 0 else 0
    tiles = [tile for tile in sound(request) if tile.stop > first]
    return tiles[1:] if len(tiles) < len(sound(request)) and len(tiles) > 1 else sound(request)


def _going_round(sound: Switch, request: Request) -> Tensor | None:
    hidden: Tensor | None = sound(request)
    return None if hidden is None else hidden[..., torch.arange(request.keys) % 512]


def _bias_of_the_first(request: Request) -> Tensor | None:
    bias = request.attn_bias
    return bias if bias is None or bias.shape[1] > 1 else bias[:1]


def _without_empty_rows(sound: Switch, request: Request) -> list[tuple[slice, slice]]:
    pairs: list[tuple[slice, slice]] = sound(request)
    rows = [rows for rows, _ in pairs if rows.stop > rows.start]
    return list(zip(rows, (keys for _, keys in pairs), strict=False))


def _of_small_pages(request: Request) -> Tensor:
    if request.block_table is None or request.v.shape[2] <= 128:
        return request.v
    return request.v.clone().index_fill_(2, torch.arange(128, request.v.shape[2]), 0.0)


def _capped_by_exponentials(s: Tensor, request: Request) -> Tensor:
    if not request.softcap:
        return s
    power = torch.exp(2.0 * s / request.softcap)
    return request.softcap * (power - 1.0) / (power + 1.0)


def _rows_side_by_side(request: Request) -> Tensor:
    return request.v if request.v.shape[-1] == request.k.shape[-1] else read_as_contiguous(request.v)


def _causal_of_all_rows(sound: Switch, request: Request) -> Tensor | None:
    if request.cu_seqlens_q is None or not request.causal:
        hidden: Tensor | None = sound(request)
        return hidden
    every, own = (
        sound(replace(request, **change))
        for change in ({"cu_seqlens_q": None, "cu_seqlens_k": None}, {"causal": False})
    )
    return torch.as_tensor(every) | torch.as_tensor(own)


def _small_tiles(sound: Switch, request: Request) -> list[slice]:
    size = 32 if request.queries < 10 else Attention.tile
    return [slice(at, min(at + size, request.keys)) for at in range(0, request.keys, size)]


# fmt: off
_OF_USERS = (
    # Masks.
    _row("causal_upper_left", "query i sees keys 0 .. i, however many keys there are", "NVIDIA/cutlass/issues/2336",
         ("random_causal_chunk", "accuracy bound gradients"), slip="the causal mask is aligned to the upper left",
         diagonal=lambda _, queries, keys: 0),
    _row("causal_strict", "a query does not see its own key", "pbloem/former/issues/10",
         ("random_causal", "accuracy bound gradients range"), slip="the causal mask hides a row's own key",
         diagonal=lambda sound, queries, keys: sound(queries, keys) - 1),
    _row("causal_skipped", "the causal mask is merged into a given mask, and there is none",
         "facebookresearch/xformers/issues/103", ("random_causal", "accuracy bound gradients range"),
         slip="the mask is not applied",
         hidden=lambda sound, request: None if request.attn_mask is None else sound(request)),
    _row("padding_ignored", "the mask is not passed on", "huggingface/diffusers/issues/8886",
         ("padded", "accuracy bound gradients"), prepared=_asking(attn_mask=None)),
    _row("added_mask", "the mask is added to the scores: what is NaN at a masked key stays NaN",
         "pytorch/pytorch/issues/101967", ("hidden_nan", "usage"),
         guarded=lambda sound, request: replace(sound(request), k=request.k),
         masked=lambda _, s, hidden: s + torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)),
    _row("mask_cached_by_shape", "the first mask of a shape is taken for all others",
         "facebookresearch/xformers/issues/655", ("other_mask", "usage"),
         prepared=_asking(attn_mask=_mask_of_the_shape)),
    _row("blind_rows_nan", "0 / 0 in a row without a visible key", "pytorch/pytorch/issues/103963",
         ("wholly_masked", "bound finite gradients range"), of_blind_rows=math.nan),
    _row("blind_rows_unwritten", "rows without a visible key are skipped, and what the buffer held is returned",
         "vllm-project/vllm/pull/19784", ("wholly_masked", "bound"), of_blind_rows=1.0),
    _row("backward_without_causal", "the mask is not passed on to the backward pass",
         "Dao-AILab/flash-attention/issues/2424", ("random_causal", "gradients"),
         slip="the mask is not applied in dQ, dK, dV",
         recomputed=lambda sound, request, keys: sound(replace(request, hidden=None), keys)),
    # The scale.
    _row("scale_ignored", "1 / sqrt(d), whatever the caller says", "tenstorrent/tt-xla/issues/2342",
         ("random_scaled", "accuracy bound gradients"), slip="the scale that is given is not taken",
         prepared=_asking(scale=None)),
    _row("scaled_twice", "Q is scaled, and the scores once more", "huggingface/transformers/pull/38290",
         ("sink_tie", "accuracy bound gradients"), slip="scores are scaled twice",
         product=lambda sound, request, keys: sound(request, keys) * request.factor),
    _row("unscaled_dk", "dK lacks the scale: there an error, here silent", "Dao-AILab/flash-attention/issues/2651",
         ("sink_tie", "gradients"), dk=lambda sound, request, ds: sound(request, ds) / request.factor),
    # Heads, columns and tiles.
    _row("heads_tiled", "key heads are tiled over the query heads, not repeated", "ekzhang/jax-js/pull/180",
         ("random_grouped", "accuracy bound gradients"),
         slip="query head h reads key head h mod the number of key heads",
         wide=lambda sound, x, request: _heads_in_turn(sound(x, request), -1, request.groups),
         summed=lambda sound, x, request: sound(_heads_in_turn(x, request.groups, -1), request)),
    _row("heads_wrap", "the index of a head, over all batch entries, is kept in 7 bits",
         "pytorch/pytorch/pull/176096", ("many_heads", "usage"),
         stored=lambda sound, o, request: sound(
             o.flatten(0, 1)[torch.arange(o.shape[:2].numel()) % 128].view(o.shape), request)),
    _row("value_tiles_at_zero", "every tile of V's columns writes its O to the first",
         "fla-org/flash-linear-attention/pull/1031", ("value_dim", "accuracy bound gradients range"),
         normalised=_columns_written_to_the_first_tile),
    _row("last_tile_filled_up", "keys past the end are zeros with a score of 0, and are not masked",
         "flashinfer-ai/flashinfer/pull/5090", ("tied_p_bar", "accuracy bound"),
         slip="keys of 0 are counted past the end, up to a multiple of 64", row_sum=_filled_up),
    _row("p_in_e4m3", "P is cast to e4m3, which has no numbers for most of it, of q, K and V in 16 bits",
         "ROCm/aiter/pull/5642", ("random", "accuracy"),
         p_bar=lambda _, p, request: p.to(torch.float8_e4m3fn).float()),
    _row("approximate_exponential", "the exponential is a step of a 512th, and up to 1.4e-3 too small",
         "sonos/tract/pull/2318", ("exact_p_bar", "accuracy"), heads=64,
         exp=lambda sound, s, m: torch.exp2((sound(s, m).log2() * 512).floor() / 512)),
    _row("heads_of_a_group_not_added", "dK and dV of a key head are those of the last of its query heads",
         "marin-community/levanter/pull/449", ("random_grouped", "gradients"), twin="repeated",
         slip="the last head of a group is taken for their sum in dK, dV",
         summed=lambda _, gradient, request: gradient[:, request.groups - 1 :: request.groups]),
    _row("dq_without_the_last_tile", "the last key tile adds nothing to dQ", "flagos-ai/FlagGems/pull/898",
         ("random", "gradients"), twin="any_order",
         dq=lambda sound, dq, added, request, keys:
             dq if keys.start and keys.stop == request.keys else sound(dq, added, request, keys)),
    # The softmax and its parts.
    _row("maximum_from_zero", "the maximum of a row that has seen nothing is 0, and stays there: all scores are lower",
         "Dao-AILab/flash-attention/issues/2082", ("low_logits", "range"), first_maximum=0.0),
    _row("maximum_of_the_tile", "the shift is the maximum of this tile alone: what was summed may overflow as it is"
         " rescaled", "tile-ai/tilelang/pull/1148", ("no_tail", "finite"),
         largest=lambda _, sums, s, *others: s.amax(-1, keepdim=True)),
    _row("maximum_of_the_hidden", "the maximum is taken before the mask: far above the others it makes them underflow",
         "flashinfer-ai/flashinfer/pull/4401", ("hidden_keys", "usage"), guarded=lambda _, request: request,
         largest=lambda sound, sums, s, request, keys: sound(
             sums, request.q.float() @ request.k[:, :, keys].float().repeat_interleave(request.groups, 1).mT
             * request.factor, request, keys)),
    _row("nan_dropped", "NaN among the scores counts as a key that is not seen", "ohdearquant/lattice/issues/740",
         ("nan_in_q", "finite range"),
         scores=lambda sound, *asked: sound(*asked).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)),
    _row("split_unweighted", "the log-sum-exp of a part is not stored, so all parts weigh alike",
         "flashinfer-ai/flashinfer/pull/50", ("single_maximum_sink", "accuracy bound"), twin="split",
         weight=lambda _, lse, largest: torch.ones_like(lse)),
    # Rounding, forward and backward.
    _row("narrow_product", "Q K^T is stored in the format of the call, and scaled afterwards: in fp16 it overflows",
         "ultralytics/ultralytics/pull/24990", ("repeated_large[r=10000]", "bound finite range"), fmt=FP16,
         product=lambda sound, request, keys:
             sound(replace(request, scale=1.0), keys).to(request.q.dtype).float() * request.factor),
    _row("clamped_logits", "scores are clamped at 50, against overflow", "prescient-design/e3tools/pull/3",
         ("single_maximum_large", "accuracy"),
         product=lambda sound, request, keys: sound(request, keys).clamp(-50.0, 50.0)),
    _row("truncated_p", "P is truncated for its product with V", "ROCm/flash-attention/pull/78",
         ("random", "accuracy gradients"), p_bar=lambda _, p, request: truncated(p)),
    _row("narrow_row_sum", "l is summed in bf16, key after key", "Intel-tensorflow/tensorflow/pull/23",
         ("random_causal", "accuracy gradients"), row_sum=_key_after_key),
    _row("partial_o_truncated", "what a part of the keys gives is stored in bf16, truncated, and combined from there",
         "flashinfer-ai/flashinfer/issues/5107", ("random", "accuracy gradients"), twin="split",
         part=lambda _, o, request: truncated(o)),
    _row("running_o_truncated", "O is stored in bf16 after every tile, truncated: an error of one sign that adds up",
         "ROCm/aiter/issues/5151", ("random", "accuracy gradients"), twin="flash_1", step=_o_between_tiles(truncated)),
    _row("narrow_recomputation", "the backward pass recomputes the scores in 16 bits",
         "NVIDIA/cudnn-frontend/issues/744", ("random", "gradients"), heads=64,
         recomputed=lambda sound, request, keys: sound(request, keys).to(request.q.dtype).float()),
    _row("narrow_dq", "dQ is added up over the key tiles in the format of the call",
         "NVIDIA/TransformerEngine/pull/821", ("random_causal_chunk", "gradients"), heads=32,
         dq=lambda sound, dq, added, request, keys: sound(dq, added, request, keys).to(request.q.dtype).float()),
    _row("delta_truncated", "delta is stored in bf16, truncated", "ROCm/aiter/issues/5151", ("random", "gradients"),
         delta=lambda sound, do, o: truncated(sound(do, o))),
    _row("narrow_dp", "dO is cast to fp16 in the backward pass: a large one becomes Inf",
         "fla-org/flash-linear-attention/pull/1214", ("scaled_do", "usage"),
         gradients=lambda sound, request, do, o: sound(request, (do.float() * 8).half().float() / 8, o)),
    # Memory, and what is kept from call to call.
    _row("strides_of_v_ignored", "V is read as if it were contiguous", "flagos-ai/FlagGems/issues/5896",
         ("strided_views", "usage"), prepared=_asking(v=lambda request: read_as_contiguous(request.v))),
    _row("strides_of_do_ignored", "dO is read as if it were contiguous", "Dao-AILab/flash-attention/issues/355",
         ("strided_views", "usage"),
         gradients=lambda sound, request, do, o: sound(request, read_as_contiguous(do), o)),
    _row("keys_past_the_end", "the last tile of V is read whole, and what is past the last key is multiplied by 0",
         "vllm-project/vllm/pull/47305", ("past_the_end", "usage"), step=_whole_tile_of_v),
    _row("cached_by_address", "what was made of K is kept, and found again by K's address",
         "flashinfer-ai/flashinfer/pull/4601", ("rewritten_in_place", "usage"), product=_k_of_the_address),
    _row("saved_in_a_global", "the backward pass takes the log-sum-exp of the last forward pass",
         "spfrommer/torchexplorer/issues/33", ("interleaved", "usage"), output=_remembered,
         lse=lambda sound, request: sound(request.kept["last"])),
    _row("one_buffer", "O of all calls of a shape is returned in one buffer", "ROCm/torch_migraphx/pull/247",
         ("interleaved", "usage"), stored=_one_buffer),
    _row("tuned_in_place", "the first call of a shape tries two tile sizes, and both add to the same dQ",
         "triton-lang/triton/issues/781", ("third_call", "usage"), gradients=_twice_at_first),
    _row("sum_not_reset", "an accumulator outlives the call, and the next one starts from what it holds",
         "flashinfer-ai/flashinfer/pull/5029", ("contract_tile", "repeatable"), start=_left_from_before,
         sums=_left_behind),
    _row("race_in_o", "two threads add to O in an order of their own, and sometimes one of them is lost",
         "ROCm/triton/issues/953", ("contract_tiles", "repeatable"), stored=_one_lost),
    _row("race_in_dq", "the order in which key tiles add to dQ differs from call to call",
         "Dao-AILab/flash-attention/issues/414", ("contract_tile", "repeatable"), dq=_another_order),
    # What a call must return, and leave alone.
    _row("stored_in_fp32", "O is returned in fp32, whatever inputs are in", "lucidrains/flash-attention-jax/pull/13",
         ("tied_maxima[k=2]", "contract"), stored=lambda _, o, request: o),
    _row("query_overwritten", "Q is scaled where it lies", "unslothai/unsloth/issues/5001",
         ("tied_maxima[k=2]", "contract"), prepared=_query_overwritten),
    _row("switch_left_on", "a global switch is set for speed and stays set", "MouseLand/cellpose/issues/1253",
         ("tied_maxima[k=2]", "contract"), output=_set_for_speed),
    _row("returned_in_base_two", "the log-sum-exp is in base two, where base e is documented",
         "lightseekorg/tokenspeed/pull/571", ("log_sum_exp", "usage"), twin="returning",
         returned_lse=lambda sound, request: sound(request) * LOG2_E),
    _row("returned_of_shifted_keys", "the mean of K is taken off, and the log-sum-exp is that of such scores",
         "ROCm/aiter/pull/3334", ("log_sum_exp", "usage"), twin="returning", options={"lse": ""},
         returned_lse=lambda sound, request: sound(
             replace(request, k=(request.k.float() - request.k.float().mean(-2, keepdim=True))))),
    _row("gradient_of_returned_dropped", "the log-sum-exp is differentiable, and its gradient is 0",
         "Dao-AILab/flash-attention/issues/1817", ("log_sum_exp", "usage"), twin="returning",
         dlse=lambda _, dlse: torch.zeros_like(dlse)),
    # What calls ask more.
    _row("window_off_by_one", "a window's number of keys, a query's own among them, is taken for those before it",
         "huggingface/transformers/issues/39408",
         ("random_causal+softcap=2+window=9", "accuracy bound gradients range"), prepared=_asking(window_size=_wider)),
    _row("soft_cap_not_planned", "the cap is given where it is not read: scores stay as they are",
         "sgl-project/sglang/issues/33915", ("random_causal+softcap=2+window=9", "accuracy bound gradients"),
         slip="the soft cap is not applied", prepared=_asking(softcap=0.0)),
    _row("soft_cap_without_division", "the tanh is of the scores themselves, not of the scores over the cap",
         "Dao-AILab/flash-attention/pull/2402", ("random_causal+softcap=2+window=9", "accuracy bound gradients"),
         slip="the tanh is of scores that are not divided by the cap",
         capped=lambda sound, s, request: sound(s * (request.softcap or 1.0), request)),
    _row("soft_cap_without_slope", "the backward pass takes capped scores for the product",
         "Dao-AILab/flash-attention/pull/1033", ("random_causal+softcap=2+window=9", "gradients"),
         slip="the soft cap's slope is left out in dQ, dK", slope=lambda *_: 1.0),
    _row("blocks_counted", "a row's list of blocks is as wide as the row has blocks, and the keys are taken to be, too",
         "pytorch/pytorch/pull/185687", ("random+block_mask", "accuracy bound gradients"),
         prepared=_asking(base_blockmask=_blocks_counted)),
    _row("sink_twice", "two splits add the sink", "ROCm/rocm-libraries/issues/12227",
         ("sink_at_maximum", "accuracy bound gradients"), slip="the sink is counted twice",
         with_sink=lambda sound, sums, request: sound(sound(sums, request), request)),
    _row("sink_dropped", "one way through the library forgets the sink, and its gradient is 0",
         "NVIDIA/TransformerEngine/pull/3551", ("sink_at_maximum", "bound gradients"), slip="the sink is left out",
         with_sink=lambda _, sums, request: sums, dsink=lambda _, dsink, request: torch.zeros_like(dsink)),
    _row("sink_gradient_of_one_entry", "the gradient of the sink is that of the last row alone",
         "NVIDIA/TransformerEngine/issues/3249", ("sink_at_maximum", "gradients"),
         dsink=lambda _, dsink, request: dsink / request.queries),
    _row("bias_scaled", "the bias is added before the scale, and scaled with the product",
         "tenstorrent/tt-metal/pull/56406", ("bias_makes_tie", "accuracy bound"), slip="the bias is scaled",
         biased=lambda sound, s, request, keys: sound(s / request.factor, request, keys) * request.factor),
    _row("lengths_ignored", "packed sequences see each other", "huggingface/transformers/pull/46634",
         ("packed_ties", "accuracy bound"), prepared=_asking(cu_seqlens_q=None)),
    _row("page_tail_read", "the last page is read to its end, past the last key",
         "Dao-AILab/flash-attention/issues/2374", ("paged_ties", "accuracy bound range"),
         prepared=_asking(cache_seqlens=_whole_pages)),
    _row("descale_of_k", "V is descaled with the factors of K", "sgl-project/sglang/pull/26852",
         ("fp8_cache", "bound range"), slip="V is multiplied by K's factors",
         prepared=_asking(v_descale=lambda request: request.k_descale)),
    # Parameters that differ by head, sequence and row.
    _row("sink_of_the_row", "a row's number, not its head's, picks the sink", "modular/modular/pull/6591",
         ("served[sink]", "accuracy bound gradients"), with_sink=_sink_by_row),
    _row("bias_of_the_first_row", "all rows have the bias of the first", "google-research/tabfm/pull/40",
         ("served[bias]", "accuracy bound gradients"),
         prepared=_asking(attn_bias=lambda request: _first(request.attn_bias, 2))),
    _row("alibi_of_the_first_head", "all heads have the slope of the first", "flashinfer-ai/flashinfer/pull/5101",
         ("served[alibi]", "accuracy bound gradients"),
         prepared=_asking(alibi_slopes=lambda request: _first(request.alibi_slopes, -1))),
    _row("alibi_raises", "the bias of ALiBi is added, and not taken off", "",
         ("served_causal[alibi]", "accuracy bound gradients"), slip="ALiBi raises the scores of keys far away",
         prepared=_asking(alibi_slopes=lambda request: _negative(request.alibi_slopes))),
    _row("alibi_ahead", "the bias of ALiBi is -slope (i - j), which is above 0 ahead of a row's own key",
         "Dao-AILab/flash-attention/issues/1585", ("served[alibi]", "accuracy bound gradients"),
         slip="ALiBi raises the scores of keys ahead of a row's own", distance=_signed),
    _row("alibi_scaled", "the bias of ALiBi is added before the scale, and scaled with the product", "",
         ("served_causal[alibi.gqa]", "accuracy bound gradients"), slip="the bias is scaled",
         prepared=_asking(alibi_slopes=lambda request: _scaled(request.alibi_slopes, request.factor))),
    _row("backward_without_alibi", "the backward pass recomputes scores without the slopes", "",
         ("served[alibi]", "gradients"), slip="the slopes of ALiBi are left out in dQ, dK, dV",
         recomputed=lambda sound, request, keys: sound(replace(request, alibi_slopes=None), keys)),
    _row("window_without_a_right_side", "a window hides the keys before it alone",
         "flashinfer-ai/flashinfer/issues/4893", ("served[window]", "accuracy bound gradients"),
         prepared=_asking(window_size=lambda request: (request.window_size[0], -1))),
    _row("window_of_whole_tiles", "a window hides whole tiles alone", "Dao-AILab/flash-attention/issues/1133",
         ("served_causal[window.sink]", "accuracy bound gradients"), prepared=_asking(window_size=_whole_tiles)),
    _row("length_of_the_longest", "all sequences are taken to be as long as the longest",
         "Dao-AILab/flash-attention/pull/1455", ("cached[pages.padding]", "accuracy bound range"),
         slip="the mask is not applied",
         prepared=_asking(
             cache_seqlens=lambda request: _largest(request.cache_seqlens), attn_mask=lambda request: None)),
    _row("length_of_the_first", "all sequences are taken to be as long as the first",
         "karpathy/nanochat/pull/485", ("padded", "accuracy bound gradients"), twin="cached", heads=64,
         prepared=_asking(cache_seqlens=lambda request: _first(request.cache_seqlens, 0))),
    _row("causal_at_the_padded_end", "a causal mask ends with the cache, and not with the keys of each sequence in it",
         "ml-explore/mlx-lm/pull/873", ("cached[padding.own_ends]", "accuracy bound gradients range"), twin="cached",
         slip="the causal mask ends with the last keys, not a sequence's own",
         ends=lambda _, request: torch.zeros(1, 1, 1, 1, dtype=torch.long)),
    _row("table_of_the_first", "all sequences have the pages of the first", "meta-pytorch/attention-gym/issues/189",
         ("cached[pages]", "accuracy"),
         prepared=_asking(block_table=lambda request: _first(request.block_table, 0))),
    _row("pages_side_by_side", "every other page is taken to lie behind the one before it",
         "hw-native-sys/pypto/pull/470", ("cached[pages]", "accuracy bound range"),
         prepared=_asking(block_table=_adjacent)),
    _row("factors_transposed", "factors are read with the strides of another layout",
         "flashinfer-ai/flashinfer/pull/3626", ("cached[descale]", "accuracy bound range"),
         prepared=_asking(v_descale=lambda request: _transposed(request.v_descale))),
    # Sizes, and calls that others have gone before.
    _row("last_tile_of_one_key", "a tile of one key is left out", "jax-ml/jax/issues/27224",
         ("sizes", "usage"), tiles=lambda sound, request: _long_tiles(sound(request))),
    _row("keys_in_13_bits", "keys are counted in 13 bits", "NVIDIA/TensorRT-LLM/pull/1076",
         ("long_keys", "usage"), tiles=lambda sound, request: [each for each in sound(request) if each.start < 8192]),
    _row("rows_of_one_block", "rows beyond the first 128 see what a causal mask hides",
         "Dao-AILab/flash-attention/pull/436", ("sizes", "usage"), hidden=_of_a_block),
    _row("window_of_the_shape", "a window is kept for calls of the same shape", "flashinfer-ai/flashinfer/pull/4015",
         ("other_parameters", "usage"), prepared=_kept("window_size")),
    _row("table_of_the_shape", "a table of pages is kept for calls of the same shape",
         "flashinfer-ai/flashinfer/pull/4714", ("other_parameters", "usage"), prepared=_kept("block_table")),
    _row("lengths_of_the_shape", "lengths are kept for calls of the same shape", "paiml/aprender/pull/2030",
         ("other_parameters", "usage"), prepared=_kept("cu_seqlens_k")),
    _row("scale_of_the_shape", "the scale is compiled into the kernel of a shape", "local-inference-lab/b12x/pull/63",
         ("other_parameters", "usage"), prepared=_kept("scale")),
    _row("workspace_left", "what a larger call has left in a workspace is added", "NVIDIA/TensorRT-LLM/pull/18754",
         ("after_a_larger_call", "usage"), sums=_left_over),
    # Shapes with a path of their own.
    _row("merged_by_another_scale", "parts are merged by maxima that are scaled by 1 / sqrt(d), whatever the scale",
         "NVIDIA/TensorRT-LLM/issues/19112", ("shapes", "usage"), twin="split", combined=_merged_by_another_scale),
    _row("sink_in_each_part", "every part of the keys adds the sink", "ROCm/rocm-libraries/issues/12227",
         ("shapes", "usage"), twin="split",
         sums_of=lambda sound, request, tiles: Attention().with_sink(sound(request, tiles), request)),
    _row("last_part_of_a_batch", "the last part of the keys is left out where a batch has more than one entry",
         "sgl-project/sglang/issues/22688", ("shapes", "usage"),
         tiles=lambda sound, request: sound(request)[: None if len(request.q) == 1 or request.keys < 300 else -1]),
    _row("wide_heads_unscaled", "the scale is that of the head dimension up to 128",
         "Dao-AILab/flash-attention/issues/2667", ("shapes", "usage"),
         product=lambda sound, request, keys: sound(request, keys) * max(1.0, request.q.shape[-1] / 128) ** 0.5),
    _row("columns_of_v_in_fours", "dV has 64 columns at a time, and the rest is left out",
         "Dao-AILab/flash-attention/issues/2896", ("head_dimensions", "usage"),
         gradients=lambda sound, request, do, o: _without(sound(request, do, o), 2, request.v.shape[-1] // 64 * 64)),
    _row("rows_of_v_side_by_side", "rows of V are taken to lie side by side where V is narrower than K",
         "vllm-project/vllm/pull/45111", ("latent_views", "usage"), prepared=_asking(v=_rows_side_by_side)),
    _row("padded_dimension", "the scale is that of the next power of two of d",
         "Dao-AILab/flash-attention/issues/2552", ("head_dimensions", "usage"),
         product=lambda sound, request, keys: sound(request, keys) * 2 ** (math.log2(request.q.shape[-1]) % -1 / 2)),
    _row("late_window", "the first tile that a window reaches is left out where it is not the first of all",
         "vllm-project/tpu-inference/issues/1954", ("late_windows", "usage"), tiles=_one_tile_late),
    _row("mask_of_512_keys", "the mask goes round after 512 keys", "vllm-project/vllm-ascend/issues/15503",
         ("long_tables", "usage"), hidden=_going_round),
    _row("bias_of_the_first", "a bias of one head is that of the first entry of the batch", "",
         ("broadcast_shapes", "usage"), prepared=_asking(attn_bias=_bias_of_the_first)),
    _row("alibi_of_the_first", "all sequences have the slopes of the first", "",
         ("broadcast_shapes", "usage"), prepared=_asking(alibi_slopes=lambda request: _of_one(request.alibi_slopes))),
    _row("alibi_upper_left", "ALiBi's distances are |i - j|, however many keys there are",
         "keras-team/keras-hub/pull/2862", ("shapes", "usage"), distance=_from_row_to_row),
    _row("empty_sequence_skipped", "sequences without rows are skipped, and not their keys", "",
         ("empty_sequences", "usage"), sequences=_without_empty_rows),
    _row("entries_in_16_bits", "entries of the batch are counted in 16 bits", "flashinfer-ai/flashinfer/issues/3125",
         ("many_entries", "usage"), stored=lambda sound, o, request: sound(o[torch.arange(len(o)) % 65535], request)),
    _row("backward_of_128_entries", "the backward pass has 128 entries of the batch",
         "NVIDIA/TransformerEngine/issues/3216", ("many_entries", "usage"),
         gradients=lambda sound, request, do, o: tuple(
             x.index_fill(0, torch.arange(len(x))[128:], 0.0) for x in sound(request, do, o))),
    _row("offsets_in_32_bits", "offsets wrap beyond 2^31 elements", "thu-ml/SageAttention/issues/386",
         ("far_apart", "usage"), prepared=_asking(
             v=lambda request: request.v[:1].expand_as(request.v) if request.v.stride(0) >= 2**31 else request.v)),
    _row("pages_of_128", "keys beyond 128 in a page are not read", "flashinfer-ai/flashinfer/issues/4347",
         ("page_sizes", "usage"), prepared=_asking(v=_of_small_pages)),
    _row("tanh_written_out", "tanh is (exp(2x) - 1) / (exp(2x) + 1)", "chrishayuk/larql/issues/237",
         ("extremes", "usage"), capped=lambda sound, s, request: _capped_by_exponentials(s, request)),
    _row("maximum_from_minus_100", "the running maximum begins at -100", "pytorch/pytorch/issues/196678",
         ("extremes", "usage"), first_maximum=-100.0),
    _row("causal_of_all_rows", "the causal mask is that of all packed rows", "",
         ("packed_causal", "usage"), hidden=_causal_of_all_rows),
    _row("wide_views_read_flat", "strides are not looked at where d is 256", "Dao-AILab/flash-attention/issues/2667",
         ("strided_views", "usage"), prepared=_asking(
             v=lambda request: read_as_contiguous(request.v) if request.v.shape[-1] > 128 else request.v)),
    # Right in any one call, and changed by what should not matter.
    _row("tile_of_the_longest", "the tile is chosen by the longest sequence of queries in the batch",
         "vllm-project/vllm/issues/51902", ("invariance[batch]", "invariance"), twin="batch_invariant",
         tiles=_small_tiles),
    _row("partial_o_rounded", "O of a split is stored in the format of q: each half of a tie is rounded by itself",
         "flashinfer-ai/flashinfer/issues/5107", ("invariance[split]", "invariance"),
         part=lambda _, o, request: o.to(request.q.dtype).float()),
    _row("fast_in_whole_vectors", "a fast exponential takes whole vectors of keys, the exact one those that are left",
         "pytorch/pytorch/pull/151441", ("invariance[padding]", "invariance"), exp=_fast_in_vectors),
    _row("decoded_truncated", "one query alone has a kernel of its own, whose O is truncated",
         "vllm-project/vllm/issues/54035", ("invariance[decode]", "invariance"),
         stored=lambda sound, o, request: sound(truncated(o) if request.queries == 1 else o, request)),
    _row("p_truncated_unaligned", "where v does not start at a multiple of 16 bytes another path truncates P",
         "intel/torch-xpu-ops/pull/3328", ("invariance[memory]", "invariance"),
         p_bar=lambda sound, p, request: sound(p, request) if request.v.data_ptr() % 16 == 0 else truncated(p)),
)
_PAPER = "https://arxiv.org/abs/2510.04212"
_OF_A_PLAN = (
    _plan_row("as_printed_v1", "line 10 of v1 takes max(m, r_m): nothing changes", f"{_PAPER}v1",
              ("tied_maxima_positive_v", "claim prediction"), "stabilized@paper", "as_printed_v1@paper"),
    _plan_row("as_printed_v2", "line 10 of v2 takes m': the negative branch is lost", f"{_PAPER}v2",
              ("repeated_negative", "claim prediction"), "stabilized@paper", "as_printed_v2@paper"),
    _plan_row("truncating_cast", "every cast truncates", "sgl-project/sglang/pull/28650",
              ("tied_maxima[k=2]", "accuracy claim gradients prediction"), arithmetic=CastingIn(Rounding.RTZ)),
    _plan_row("ties_away_cast", "every cast rounds ties away from zero", "pytorch/FBGEMM/pull/786",
              ("no_tail", "claim prediction"), arithmetic=CastingIn(Rounding.RTNA)),
    _plan_row("narrow_accumulator", "matrix products are added up in bf16", "Xilinx/mlir-air/pull/1606",
              ("repeated_large[r=10000]", "accuracy bound claim prediction"), arithmetic=NarrowAccumulator()),
    _plan_row("rounded_o_bar", "O of every tile is stored in bf16", "zhuzilin/ring-flash-attention/issues/22",
              ("tied_maxima[k=2]", "claim prediction"), done="flash@paper"),
    _plan_row("partial_o_cast", "O of a split is stored in the format of the call",
              "flashinfer-ai/flashinfer/issues/5107", ("split_tie", "accuracy claim prediction"), "split@fused",
              o_bar=Cast(BF16)),
    _plan_row("row_sum_of_rounded", "l sums P after its cast", _PAPER, ("sink_tie", "prediction"), "dithered@fused",
              row_sum_of=SumOf.ROUNDED),
    _plan_row("fast_exponential", "an exponential of 20 bits, whose value at 0 is not 1",
              "pytorch/pytorch/pull/151441", ("tied_maxima_positive_v", "claim prediction"), exponential=FEXP_U20),
    # Unbiased over heads, and so predicted: a row's own bias gives it away.
    _plan_row("contracted", "S c - m c is one fused multiply-add", "pytorch/pytorch/issues/121558",
              ("inexact_ties[r=6]", "claim"), done="flash@fused_contracted"),
    _plan_row("not_contracted", "S c is rounded before m c is subtracted", "deepseek-ai/FlashMLA/pull/68",
              ("inexact_ties[r=6]", "claim"), "flash@fused_contracted", "flash@fused"),
    _plan_row("noise_shared", "all elements are rounded with one random number", "karpathy/llm.c/pull/432",
              ("tied_maxima[k=2]", "claim prediction"), "flash@fused_stochastic", arithmetic=NoiseOfTheFirst()),
    _plan_row("dither_without_noise", "the dither and the stochastic cast are left out",
              "AMD-AGI/Primus-Turbo/pull/365", ("sink_tie", "claim prediction"), "fair", "flash@fused"),
)
# fmt: on

#: Every planted defect, by name.
DEFECTS: Mapping[str, Defect] = {defect.name: defect for defect in (*_OF_USERS, *_OF_A_PLAN)}
