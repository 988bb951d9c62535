"""Launching the kernels: checks, memory, grids."""

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tiebreak.kernels.algorithms import FLASH_ATTENTION, STANDARD_ATTENTION
from tiebreak.kernels.arithmetic import CAST_STREAM, DITHER_STREAM
from tiebreak.kernels.counter import random_bits
from tiebreak.kernels.flash import Block
from tiebreak.kernels.formats import BF16, FP8_E4M3, Format, Formats
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionInputs, AttentionOutput, Gradients
from tiebreak.kernels.kernel import Declaration
from tiebreak.kernels.plans import Cast, RoundingPlan
from tiebreak.kernels.triton.config import Config, power_of_two
from tiebreak.kernels.triton.loading import interpreting, source

LARGEST_HEAD = 256  # of the head dimension
_TILE_ELEMENTS = 2**20  # Triton's limit on a tile, and about what stays in a CPU's cache
_DTYPES = {**TORCH_DTYPES, FP8_E4M3: torch.float8_e4m3fn}


def options(d: int) -> dict[str, int]:
    """How a kernel is compiled for a head dimension. Without contraction: a plan rounds every product and sum apart."""
    warps, stages = (4, 3) if d <= 64 else (8, 2) if d <= 128 else (4, 1)
    return {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}


def forward_block(block: Block, d: int) -> Block:
    """The tiles of a forward launch on a GPU: as declared, or with fewer queries where the shared memory is short.

    With `options` they fit the 99 KiB of the smallest card, an Ada or a desktop Blackwell, at every head dimension.
    How many queries share a tile changes no bit of any row.
    """
    return block if d <= 128 else Block(min(block.queries, 64), block.keys)


def backward_block(plan: RoundingPlan, d: int) -> Block:
    """The tiles of the backward launches: they fit as the forward ones do, P and dS in fp32 where the plan has them."""
    narrow = plan.p.narrows and plan.ds.narrows
    return Block(64, 64) if d <= (128 if narrow else 64) else Block(32, 32)


@dataclass(frozen=True)
class Call:
    """One call: tensors as the kernels take them, (batch x heads, n, d), and what the kernels are compiled for."""

    q: Tensor
    k: Tensor
    v: Tensor
    padding: Tensor | None  # int8 (batch, keys), 0 where a key is padding
    config: Config  # with one head a program: every launch chooses anew
    shape: torch.Size  # of q: (batch, heads, queries, d)
    seed: int  # of the noise
    algorithm: str  # its name

    @classmethod
    def from_inputs(cls, inputs: AttentionInputs, declaration: Declaration) -> "Call":
        """The call that a declaration makes of some inputs, whose tensors may be of any type.

        Raises:
            ValueError: `refusal` gives the reason.
        """
        interpreted = inputs.q.device.type == "cpu"
        reason = refusal(inputs, declaration, interpreted=interpreted)
        if reason is not None:
            raise ValueError(reason)
        plan = declaration.plan.in_formats(inputs.formats)
        config = Config(
            plan=plan,
            shift=declaration.shift_rule,
            causal=inputs.causal,
            d=inputs.q.shape[-1],
            block=declaration.block,
            query_heads=inputs.q.shape[1],
            groups=inputs.groups,
            padded=inputs.key_padding is not None,
            softmax_scale=inputs.softmax_scale,
        )
        q, k = (_flat(tensor, _DTYPES[inputs.formats.inputs]) for tensor in (inputs.q, inputs.k))
        v = _flat(inputs.v, _DTYPES[format_of_v(plan, inputs.formats)])
        padding = None
        if inputs.key_padding is not None:
            padding = inputs.key_padding.to(inputs.q.device, torch.int8).contiguous()
        return cls(q, k, v, padding, config, inputs.q.shape, inputs.noise_seed, declaration.algorithm.name)

    @property
    def interpreted(self) -> bool:
        """Whether Triton's interpreter runs the kernels: nothing else does on the host."""
        return self.q.device.type == "cpu"

    @property
    def lengths(self) -> tuple[int, int]:
        """Queries and keys of one head."""
        return self.q.shape[1], self.k.shape[1]

    def tiled(self, block: Block, heads: int) -> tuple[Config, int]:
        """The configuration of one launch over `heads` heads, and how many programs share the heads.

        On a GPU a program works on one head. An interpreted one costs milliseconds whatever its size, so it takes as
        many heads as fit, and no more queries than there are: neither changes a bit of any row.
        """
        if not self.interpreted:
            return replace(self.config, block=block), heads
        block = Block(min(block.queries, power_of_two(self.lengths[0])), block.keys)
        d = self.config.block_d
        largest = max(block.queries * block.keys, block.queries * d, block.keys * d)
        together = min(heads & -heads, max(1, _TILE_ELEMENTS // largest))
        return replace(self.config, block=block, heads=together), heads // together

    def empty(self, cast: Cast, like: Tensor) -> Tensor:
        """Memory in the shape of `like` for what a cast leaves."""
        return torch.empty_like(like, dtype=_DTYPES[cast.fmt])

    def row_numbers(self) -> Tensor:
        """Memory for one fp32 number a query, (batch x heads, queries)."""
        return torch.empty(self.q.shape[:2], dtype=torch.float32, device=self.q.device)

    def noise_start(self, stream: int) -> int:
        """The noise's state after (seed, stream), its bits as int32."""
        state = int(random_bits(self.seed, stream))
        return state - 2**32 if state >= 2**31 else state

    def launch(self, part: str, kernel: str, grid: tuple[int, ...], *args: Tensor | int | None, config: Config) -> None:
        """Run one kernel of a module of `device/`.

        Raises:
            ValueError: the device has too little shared memory for it, or is the host and interprets nothing.
        """
        from triton import OutOfResources

        if self.interpreted and not interpreting():
            raise ValueError("the compiled kernels run on a GPU, not on cpu: there the backend interpreter runs them")
        function = getattr(source(part), kernel)
        try:
            with nullcontext() if self.interpreted else torch.get_device_module(self.q.device).device(self.q.device):
                function[grid](*args, C=config, **options(config.d))
        except OutOfResources as error:
            raise ValueError(f"{kernel} at head dimension {config.d}: {' '.join(str(error).split())}") from error


def _flat(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """(batch, heads, n, d) as contiguous (batch x heads, n, d) of a type, outside of any graph."""
    return tensor.detach().to(dtype).flatten(0, 1).contiguous()


def refusal(inputs: AttentionInputs, declaration: Declaration, *, interpreted: bool) -> str | None:
    """None, or why the kernels can't take some inputs, in one line."""
    if declaration.algorithm.name not in _FORWARD:
        return f"the Triton kernels have no algorithm {declaration.algorithm.name}: they have {', '.join(_FORWARD)}"
    return _shape_refusal(inputs, declaration.block) or _format_refusal(inputs, declaration.plan, interpreted)


def _shape_refusal(inputs: AttentionInputs, block: Block) -> str | None:
    d, keys = inputs.q.shape[3], inputs.k.shape[2]
    if not inputs.q.numel() or not keys:
        return f"nothing to attend to: q {tuple(inputs.q.shape)}, k {tuple(inputs.k.shape)}"
    if d > LARGEST_HEAD:
        return f"head dimension {d} is above {LARGEST_HEAD}"
    if {power_of_two(block.queries), power_of_two(block.keys)} != {block.queries, block.keys}:
        return f"tiles of the Triton kernels are powers of two, not {block.queries} x {block.keys}"
    return None


def _format_refusal(inputs: AttentionInputs, plan: RoundingPlan, interpreted: bool) -> str | None:
    formats = inputs.formats
    if formats.inputs not in TORCH_DTYPES:
        return f"the Triton kernels take {', '.join(fmt.name for fmt in TORCH_DTYPES)}, not {formats.inputs.name}"
    return unsuited(plan, formats) or (None if interpreted else lacking(formats, plan, inputs.q.device))


def format_of_v(plan: RoundingPlan, formats: Formats) -> Format:
    """The format that the kernels hold V in: P-bar's where their product is one of 8 bits, else that of q and k."""
    return plan.p_bar.fmt if plan.p_bar.fmt == FP8_E4M3 else formats.inputs


def unsuited(plan: RoundingPlan, formats: Formats) -> str | None:
    """None, or that V would have to be rounded first: it is held as it comes, or in a wider format."""
    held_format = format_of_v(plan, formats)
    if held_format in (formats.v, formats.inputs):
        return None
    return f"plan {plan.name} multiplies a V in {held_format.name}, not in {formats.v.name}: round it first"


def lacking(formats: Formats, plan: RoundingPlan, device: torch.device) -> str | None:
    """None, or what a device lacks for a call in these formats under a plan, in one line."""
    if device.type != "cuda":
        return f"the compiled kernels run on a GPU, not on {device}"
    needed = {cast.fmt for _, cast in plan.in_formats(formats).casts()} | {formats.inputs}
    name = torch.cuda.get_device_name(device)
    if torch.version.hip is not None:
        # CDNA3's fp8 is another format, with one zero; CDNA4 and RDNA4 have e4m3 as OCP defines it.
        fp8 = torch.cuda.get_device_properties(device).gcnArchName.startswith(("gfx95", "gfx12"))
        return f"{name} has no fp8_e4m3" if FP8_E4M3 in needed and not fp8 else None
    capability = torch.cuda.get_device_capability(device)
    for narrow, first in ((BF16, (8, 0)), (FP8_E4M3, (8, 9))):
        if narrow in needed and capability < first:
            return f"{name} (sm_{capability[0]}{capability[1]}) has no {narrow.name}"
    return None


def _flash(call: Call) -> tuple[Tensor, Tensor]:
    queries, keys = call.lengths
    o = call.empty(call.config.plan.o, call.q)
    lse = call.row_numbers()
    config, programs = call.tiled(forward_block(call.config.block, call.config.d), call.q.shape[0])
    starts = (call.noise_start(DITHER_STREAM), call.noise_start(CAST_STREAM))
    grid = (math.ceil(queries / config.block.queries), programs)
    inputs = (call.q, call.k, call.v, call.padding)
    call.launch("forward", "forward", grid, *inputs, o, lse, queries, keys, *starts, config=config)
    return o, lse


def _standard(call: Call) -> tuple[Tensor, Tensor]:
    """Three launches; S and P are held in memory."""
    queries, keys = call.lengths
    o = call.empty(call.config.plan.o, call.q)
    s = torch.empty(call.q.shape[0], queries, keys, dtype=torch.float32, device=call.q.device)
    p = call.empty(call.config.plan.p_bar, s)
    lse = call.row_numbers()
    config, programs = call.tiled(forward_block(call.config.block, call.config.d), call.q.shape[0])
    grid = (math.ceil(queries / config.block.queries), programs)
    tiles = (*grid, math.ceil(keys / config.block.keys))
    call.launch("standard", "all_scores", tiles, call.q, call.k, call.padding, s, queries, keys, config=config)
    call.launch("standard", "softmax", grid, s, p, lse, queries, keys, config=config)
    cast_start = call.noise_start(CAST_STREAM)
    call.launch("standard", "output", grid, p, call.v, call.padding, o, queries, keys, cast_start, config=config)
    return o, lse


_FORWARD = {FLASH_ATTENTION.name: _flash, STANDARD_ATTENTION.name: _standard}


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """O (batch x heads, queries, d) and the log-sum-exp (batch x heads, queries)."""
    return _FORWARD[call.algorithm](call)


def backward(call: Call, o: Tensor, lse: Tensor, do: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients from what the forward pass returned.

    Args:
        call: of the forward pass.
        o: its O.
        lse: its log-sum-exp.
        do: upstream gradient (batch, heads, queries, d), of any type and strides.

    Returns:
        dQ, dK and dV in the shapes of the call's q, k and v, and delta (batch x heads, queries).
    """
    do = _flat(do, call.q.dtype)
    queries, keys = call.lengths
    gradients = call.config.plan.gradients
    dq, dk, dv = (call.empty(gradients, tensor) for tensor in (call.q, call.k, call.v))
    delta = call.row_numbers()
    config, programs = call.tiled(backward_block(call.config.plan, call.config.d), call.q.shape[0])
    rows = (math.ceil(queries / config.block.queries), programs)
    inputs = (call.q, call.k, call.v, call.padding)
    call.launch("backward", "delta", rows, *inputs, o, do, lse, delta, queries, keys, config=config)
    call.launch("backward", "query_gradient", rows, *inputs, do, lse, delta, dq, queries, keys, config=config)
    config, programs = call.tiled(backward_block(call.config.plan, call.config.d), call.k.shape[0])
    columns = (math.ceil(keys / config.block.keys), programs)
    call.launch("backward", "key_gradients", columns, *inputs, do, lse, delta, dk, dv, queries, keys, config=config)
    return dq, dk, dv, delta


def run(inputs: AttentionInputs, declaration: Declaration, *, gradients: bool) -> AttentionOutput:
    """Attention as declared, by the Triton kernels.

    Args:
        inputs: q, k, v and dO on a GPU, or on the host, where `tiebreak.backends.interpreter` runs them; of any type.
        declaration: algorithm, plan, shift rule and tile sizes.
        gradients: whether to run the backward pass too.

    Returns:
        O, the log-sum-exp and, if asked for, the gradients with delta.

    Raises:
        ValueError: no triton, or inputs that the kernels or the device can't take.
    """
    call = Call.from_inputs(inputs, declaration)
    o, lse = forward(call)
    made, of_rows = None, (*call.shape[:3], 1)
    if gradients:
        dq, dk, dv, delta = backward(call, o, lse, inputs.do)
        made = Gradients(dq.view_as(inputs.q), dk.view_as(inputs.k), dv.view_as(inputs.v), delta.view(of_rows))
    return AttentionOutput(o.view(call.shape), lse.view(of_rows), made)
