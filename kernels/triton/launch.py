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
from tiebreak.kernels.triton.compiling import is_executing, source
from tiebreak.kernels.triton.config import Config, power_of_two
from tiebreak.kernels.triton.loading import is_interpreting
from tiebreak.kernels.vendor import empty

LARGEST_HEAD = 256  # of the head dimension
_DTYPES = {**TORCH_DTYPES, FP8_E4M3: torch.float8_e4m3fn}
#: Kernels of the forward pass in `device/forward.py`, by the algorithm that they are
FORWARD = {FLASH_ATTENTION.name: "forward", STANDARD_ATTENTION.name: "standard"}


def options(d: int) -> dict[str, int]:
    """Return the compile options for a head dimension. Without contraction: a plan rounds products and sums apart."""
    warps, stages = (4, 3) if d <= 64 else (8, 2) if d <= 128 else (4, 1)
    return {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}


def forward_block(block: Block, d: int) -> Block:
    """Return the tiles of a forward launch on a GPU: as declared, or with fewer queries to fit the shared memory.

    With `options` they fit the 99 KiB of the smallest card, an Ada or a desktop Blackwell, at every head dimension.
    How many queries share a tile changes no bit of any row, except that of B200's row sums (two threads may share one).
    """
    return block if d <= 128 else Block(min(block.queries, 64), block.keys)


def backward_block(plan: RoundingPlan, d: int) -> Block:
    """Return the tiles of the backward launches, which fit as the forward ones do, with P and dS in fp32 if planned."""
    narrow = plan.p.narrows and plan.ds.narrows
    return Block(64, 64) if d <= (128 if narrow else 64) else Block(32, 32)


@dataclass(frozen=True)
class TritonCall:
    """A call: tensors as the kernels take them, (batch x heads, n, d), and the properties they are compiled for."""

    q: Tensor
    k: Tensor
    v: Tensor
    padding: Tensor | None  # int8 (batch, keys), 0 where a key is padding
    config: Config  # whose tiles every launch chooses anew
    seed: int  # of the noise
    algorithm: str  # its name

    @classmethod
    def from_inputs(cls, inputs: AttentionInputs, declaration: Declaration) -> "TritonCall":
        """Return the call that a declaration makes of inputs, of any type; ValueError: `refusal` gives the reason."""
        reason = refusal(inputs, declaration, interpreted=inputs.q.device.type == "cpu")
        if reason is not None:
            raise ValueError(reason)
        plan, padding = declaration.plan.in_formats(inputs.formats), inputs.key_padding
        config = Config(
            plan=plan,
            shift=declaration.shift_rule,
            causal=inputs.causal,
            d=inputs.q.shape[-1],
            block=declaration.block,
            query_heads=inputs.q.shape[1],
            groups=inputs.groups,
            padded=padding is not None,
            softmax_scale=inputs.softmax_scale,
        )
        q, k = (_flat(tensor, _DTYPES[inputs.formats.inputs]) for tensor in (inputs.q, inputs.k))
        v = _flat(inputs.v, _DTYPES[format_of_v(plan, inputs.formats)])
        if padding is not None:
            padding = padding.to(inputs.q.device, torch.int8).contiguous()
        return cls(q, k, v, padding, config, inputs.noise_seed, declaration.algorithm.name)

    @property
    def is_interpreted(self) -> bool:
        """True if Triton's interpreter runs the kernels, and no card, real or emulated on the host."""
        return self.q.device.type == "cpu" and not is_executing()

    def tiled(self, block: Block) -> Config:
        """Return the configuration of one launch; on a CPU without spare queries, which changes no bit."""
        if self.is_interpreted:
            block = Block(min(block.queries, power_of_two(self.q.shape[1])), block.keys)
        return replace(self.config, block=block)

    def empty(self, cast: Cast, like: Tensor) -> Tensor:
        """Return memory in the shape of `like` for the result of a cast."""
        return torch.empty_like(like, dtype=_DTYPES[cast.fmt])

    def row_numbers(self) -> Tensor:
        """Return memory for one fp32 number a query, (batch x heads, queries)."""
        return torch.empty(self.q.shape[:2], dtype=torch.float32, device=self.q.device)

    def launch(self, part: str, kernel: str, grid: tuple[int, ...], *args: Tensor | int, block: Block) -> None:
        """Run one kernel of a module of `device/` on q, K, V, the padding, `args`, and the lengths of queries and keys.

        ValueError: the device has too little shared memory for it, or is the host and interprets nothing.
        """
        from triton import OutOfResources

        if self.is_interpreted and not is_interpreting():
            raise ValueError("the compiled kernels run on a GPU, not on cpu: there the backend interpreter runs them")
        function, inputs = getattr(source(part), kernel), (self.q, self.k, self.v, self.padding)
        config = self.tiled(block)
        # A card may order a row's sum by how many rows a tile has there.
        rows = {"rows": block.queries} if self.is_interpreted else {}
        try:
            with (
                nullcontext()
                if self.q.device.type == "cpu"
                else torch.get_device_module(self.q.device).device(self.q.device)
            ):
                function[grid](*inputs, *args, C=config, **options(config.d), **rows)
        except OutOfResources as error:
            raise ValueError(f"{kernel} at head dimension {config.d}: {' '.join(str(error).split())}") from error


def _flat(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (batch, heads, n, d) as contiguous (batch x heads, n, d) of a type, outside any graph."""
    return tensor.detach().to(dtype).flatten(0, 1).contiguous()


def refusal(inputs: AttentionInputs, declaration: Declaration, *, interpreted: bool) -> str | None:
    """Return None, or why the kernels can't take some inputs, in one line."""
    (_, _, _, d), formats, block = inputs.q.shape, inputs.formats, declaration.block
    if declaration.algorithm.name not in FORWARD:
        return f"the Triton kernels have no algorithm {declaration.algorithm.name}: they have {', '.join(FORWARD)}"
    if (nothing := empty(inputs)) is not None:
        return nothing
    if d > LARGEST_HEAD:
        return f"head dimension {d} is above {LARGEST_HEAD}"
    if {power_of_two(block.queries), power_of_two(block.keys)} != {block.queries, block.keys}:
        return f"tiles of the Triton kernels are powers of two, not {block.queries} x {block.keys}"
    if formats.inputs not in TORCH_DTYPES:
        return f"the Triton kernels take {', '.join(fmt.name for fmt in TORCH_DTYPES)}, not {formats.inputs.name}"
    lacks = None if interpreted else lacking(formats, declaration.plan, inputs.q.device)
    return unsuited(declaration.plan, formats) or lacks


def format_of_v(plan: RoundingPlan, formats: Formats) -> Format:
    """Return the format that the kernels hold V in: P-bar's where their product is 8-bit, else that of q and k."""
    return plan.p_bar.fmt if plan.p_bar.fmt == FP8_E4M3 else formats.inputs


def unsuited(plan: RoundingPlan, formats: Formats) -> str | None:
    """Return None, or that V would have to be rounded first: it is kept as given, or in a wider format."""
    held_format = format_of_v(plan, formats)
    if held_format in (formats.v, formats.inputs):
        return None
    return f"plan {plan.name} multiplies a V in {held_format.name}, not in {formats.v.name}: round it first"


def lacking(formats: Formats, plan: RoundingPlan, device: torch.device) -> str | None:
    """Return None, or what a device lacks for a call in these formats under a plan, in one line."""
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


def forward(call: TritonCall) -> tuple[Tensor, Tensor]:
    """Return O (batch x heads, queries, d) and the log-sum-exp (batch x heads, queries)."""
    (heads, queries, d), keys = call.q.shape, call.k.shape[1]
    o, lse = call.empty(call.config.plan.o, call.q), call.row_numbers()
    block = forward_block(call.config.block, d)
    grid = (math.ceil(queries / call.tiled(block).block.queries), heads)
    # The noise's state after (seed, stream), its bits as int32.
    states = (int(random_bits(call.seed, stream)) for stream in (DITHER_STREAM, CAST_STREAM))
    starts = (state - 2**32 if state >= 2**31 else state for state in states)
    call.launch("forward", FORWARD[call.algorithm], grid, o, lse, queries, keys, *starts, block=block)
    return o, lse


def backward(call: TritonCall, o: Tensor, lse: Tensor, do: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dQ, dK and dV in the shapes of the call's q, k and v, and delta (batch x heads, queries).

    They follow from what the forward pass returned and dO, (batch, heads, queries, d) of any type and strides.
    """
    do, plan, lengths = _flat(do, call.q.dtype), call.config.plan, (call.q.shape[1], call.k.shape[1])
    dq, dk, dv = (call.empty(plan.gradients, tensor) for tensor in (call.q, call.k, call.v))
    block, delta = backward_block(plan, call.config.d), call.row_numbers()
    rows = (math.ceil(lengths[0] / call.tiled(block).block.queries), call.q.shape[0])
    call.launch("backward", "delta", rows, o, do, lse, delta, *lengths, block=block)
    call.launch("backward", "query_gradient", rows, do, lse, delta, dq, *lengths, block=block)
    columns = (math.ceil(lengths[1] / block.keys), call.k.shape[0])
    call.launch("backward", "key_gradients", columns, do, lse, delta, dk, dv, *lengths, block=block)
    return dq, dk, dv, delta


def run(inputs: AttentionInputs, arithmetic: object, gradients: bool, *, declaration: Declaration) -> AttentionOutput:
    """Compute attention as declared, by the Triton kernels: O, the log-sum-exp and, if asked for, gradients with delta.

    The inputs are on a GPU, or on the host, where `tiebreak.backends.interpreter` runs them; of any type. ValueError:
    no triton, or inputs that the kernels or the device can't take.
    """
    del arithmetic  # the kernels bring their own
    call = TritonCall.from_inputs(inputs, declaration)
    o, lse = forward(call)
    made, of_rows = None, (*inputs.q.shape[:3], 1)
    if gradients:
        dq, dk, dv, delta = backward(call, o, lse, inputs.do)
        made = Gradients(dq.view_as(inputs.q), dk.view_as(inputs.k), dv.view_as(inputs.v), delta.view(of_rows))
    return AttentionOutput(o.view_as(inputs.q), lse.view(of_rows), made)
