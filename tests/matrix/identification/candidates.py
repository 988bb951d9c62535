"""The declarations that a kernel whose own is unknown, or says nothing of tiles, may turn out to follow."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from tiebreak.backends.backend import Backend
from tiebreak.kernels.algorithms import FLASH_ATTENTION_1, STANDARD_ATTENTION
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.flash import ONE_TILE
from tiebreak.kernels.formats import BF16, Formats, Rounding
from tiebreak.kernels.kernel import LATER_TILES, Declaration, nameless
from tiebreak.kernels.plans import FUSED
from tiebreak.kernels.roster import DEFAULT_ROSTER

# Plans of fused, eager and published kernels, in any tiles, with S in base e or two.
_PLAIN = (
    "flash@paper",
    "flash@all_bf16",
    "flash@fused",
    "flash@fused,l_from=rounded",
    "flash_1@fused",
    "flash@fused_p_bar_o_away",
    "lazy@fused",
)
_UNTILED = ("standard", "standard,s=input", "standard,qk=input,s=input", "flash@fp32_inside")
# Triton kernels that fold the scale and log2(e) into q; PyTorch's MultiheadAttention and timm; PyTorch's math path;
# MLX; flax, whose softmax is in the inputs' format, divides q by a rounded sqrt(d).
_SCALED_FIRST = (
    "flash@fused,q=input,base=2",
    "standard,q=input,s=input",
    "standard,q=input,k=input,s=input",
    "standard,scale=input,q=input,s=input",
    "standard,divisor=input,q=input,s=input,shifted=input,exp=input,l=input",
)
# Written out in PyTorch, with Q K^T in 16 bits.
_WRITTEN_OUT = (
    "standard,qk=input",
    *(f"flash@{plan},qk=input{s},tile=one" for plan in ("paper", "fused") for s in ("", ",s=input")),
)
# Split-KV, with partial O in fp32 or in the inputs' format.
_SPLIT = tuple(f"split@fused{o_bar},tile={keys}" for o_bar in ("", ",o_bar=input") for keys in (64, 32))
# The authors' code, with and without autocast, and what else of public kernels has been read.
_MORE = (
    "flash@all_bf16,shifted=input,l_from=rounded",
    "flash@all_bf16,qk=input,shifted=input,l_from=rounded",
    "flash@all_bf16,qk=input,shifted=input",
    "flash@all_bf16,l_from=rounded",
    "flash@paper,l_from=rounded",
    "flash@fused_p_bar_away",
    "flash@fused_fp8",
    "flash@fused_contracted",
    "flash_1@fused,sink=last",
)
# Runtimes on a CPU: ONNX' reference evaluator, IREE in bf16 and fp16, tinygrad.
_RUNTIMES = (
    "standard,scale=input,q=input,k=input,s=input,shifted=input,exp=input,l=input/1",
    "flash@fp32_inside,scale=input,log2_e=input,base=2",
    "flash@fused,scale=input,log2_e=input,q=input,base=2,tile=16",
    "standard,s=input,shifted=input,exp=input,l=input,accumulator=rounded",
)
# ggml, fewer than 64 rows: O-bar in fp16, key by key.
_NARROW_SUMS = ("flash@fp32_inside,o_bar=fp16:kept,tile=1",)
# Online softmax written out in PyTorch, O cast to the inputs' format once a tile: o = (o * a + p @ v).to(q.dtype).
_LOOPS = tuple(f"flash@paper,o_bar=input:once,tile={keys}" for keys in (64, 32))
# In 8 bits, in the tiles of the kernels that do so: SageAttention, AITER's fp8, FlashAttention-3's.
_EIGHT_BITS = (
    "flash@sage,tile=128x64",
    "flash@fused,p_bar=fp32,base=2,q8=fp8_e4m3/head,k8=fp8_e4m3/head,v8=fp8_e4m3/head,p8=fp8_e4m3/head,tile=128x64",
    "flash@fp8",
)


@cache
def on_device(backend: Backend) -> Mapping[str, Declaration]:
    """Return the candidates on a backend, with plans that name its products' rounding where it has one."""
    return candidates(backend.plan_changes())


@cache
def candidates(products: tuple[str, ...] = ()) -> Mapping[str, Declaration]:
    """Return the plans that an undeclared kernel may turn out to follow, by texts that --plan takes.

    The plainest come first. Plans with O in fp32 are left out, since a kernel returns O in the format of its inputs.
    `products` are the changes that a device's 16-bit products need, from `tiebreak.backends.probes.plan_changes`.
    """
    more = ("flash@fused_fast_exp", *_MORE, *_EIGHT_BITS, *DEFAULT_ROSTER, *_RUNTIMES, *_NARROW_SUMS)
    texts = dict.fromkeys((*_PLAIN, *_UNTILED, *_SCALED_FIRST, *_WRITTEN_OUT, *_LOOPS, *_SPLIT, *more))
    texts |= dict.fromkeys(f"{text},base=2" for text in (*_PLAIN, *_UNTILED))
    declarations: dict[str, Declaration] = {}
    for text in texts:
        declaration = parse_declaration(text)
        if declaration.plan.o.narrows:
            declarations.setdefault(text, declaration)
            tiled = declaration.algorithm.tiled and not declaration.tile_named
            tiled = tiled and text.partition(",")[0] not in _UNTILED
            blocks = LATER_TILES if text in (*_PLAIN, *_MORE) or text.endswith("base=2") else (ONE_TILE,)
            # In one tile flash attention 1 is standard attention.
            for block in blocks[text.startswith(FLASH_ATTENTION_1.name) :] if tiled else ():
                declarations[f"{text},tile={block}"] = replace(declaration, block=block, tile_named=True)
    changes = [",".join(products[:count]) for count in range(1, len(products) + 1)]
    for text in (*_PLAIN, *_UNTILED, *_SCALED_FIRST, *_WRITTEN_OUT):
        algorithm, plan = declarations[text].algorithm, declarations[text].plan
        # How a product whose result is in 16 bits comes about is the device's library's own.
        if algorithm is STANDARD_ATTENTION or plan.qk.narrows or plan.o_bar.narrows:
            # Kernels in tiles have no long products.
            changes_here = changes if "tile=one" in text or not algorithm.tiled else changes[:1]
            declarations |= {f"{text},{change}": parse_declaration(f"{text},{change}") for change in changes_here}
    first: dict[Declaration, str] = {}  # of those that do the same: `as_printed_v1` is `safe` by another name
    for text, declaration in declarations.items():
        first.setdefault(nameless(declaration), text)
    return {text: declarations[text] for text in first.values()}


def accepted(plans: Mapping[str, Declaration], formats: Formats) -> Mapping[str, Declaration]:
    """Return the plans among them that shipped kernels, or fixes, follow in these formats without declaring it.

    P in 8 bits with q, K and V in 16 is not accepted: it loses 4 bits of O, and kernels that do so declare it. Nor is a
    narrow sum that grows key by key: it stops growing, after 2,048 keys in fp16.
    """
    sound = {text: plan for text, plan in plans.items() if plan.shift_rule.accepted and not _p_alone(plan, formats)}
    return {text: plan for text, plan in sound.items() if text not in _NARROW_SUMS and plan.plan.row_sum.every != 1}


#: Known by the size of their errors alone, so no candidates: P cast at random, as by a hash of its place.
MATCHED_BY_ERROR_SIZE = {
    "flash@fused, P cast at random": replace(
        parse_declaration("flash@fused"),
        plan=replace(FUSED, name="fused_p_at_random", p_bar=replace(FUSED.p_bar, rounding=Rounding.STOCHASTIC)),
    )
}


def _p_alone(declaration: Declaration, formats: Formats) -> bool:
    """Return whether P is in 8 bits and nothing else is."""
    plan, fewest = declaration.plan, BF16.mantissa_bits
    return plan.p_bar.fmt.mantissa_bits < fewest <= formats.v.mantissa_bits and not plan.quantizes
