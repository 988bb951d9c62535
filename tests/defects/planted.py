"""The planted defects: what is wrong, the public bug that each stands for, its sound twin, and what catches it."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from tiebreak.backends.backend import CPU, Backend
from tiebreak.defects import backward, changing, featured, forward, rounding, using
from tiebreak.defects.declared import (
    EXACT,
    CastingIn,
    NarrowAccumulator,
    NoiseMaskedTo,
    NoiseOfTheFirst,
    doing,
    honest,
    on_other_inputs,
)
from tiebreak.defects.tiled import Tiled
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.external.caller import Caller
from tiebreak.kernels.external.conventions import convention
from tiebreak.kernels.external.kernels import users_kernel
from tiebreak.kernels.external.options import KernelOptions
from tiebreak.kernels.formats import BF16, Format, Rounding
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import Kernel
from tiebreak.kernels.plans import FEXP_U20, Cast, SumOf

_GITHUB = "https://github.com/"
_PAPER = "https://arxiv.org/abs/2510.04212"
_LOW = Cast(BF16)


def on(arithmetic: Arithmetic = EXACT) -> Backend:
    """The backend that planted kernels run on: this CPU with this arithmetic for those that take one."""
    return replace(CPU, name="planted", arithmetic=arithmetic)


@dataclass(frozen=True)
class Defect:
    """A kernel that is wrong in one step, and what the suite makes of it."""

    name: str  # of the defect
    wrong: str  # one line
    stands_for: str  # where such a bug was reported
    twin: str  # the sound kernel that it is otherwise
    make: Callable[[str], Kernel]  # a fresh kernel of this name: some keep state from call to call
    missed: str = ""  # why no case sees it, where none does
    arithmetic: Arithmetic = EXACT  # where it runs
    fmt: Format = BF16  # of q, k, v and O

    @property
    def kernel(self) -> Kernel:
        """The kernel, as new."""
        return self.make(self.name)


def users(function: Callable[[], Tiled], name: str) -> Kernel:
    """A user's kernel that declares no plan, called and held to its contract as `--kernel` does."""
    made = function()
    options = KernelOptions(backward=made.backward, **made.options)
    return users_kernel(name, Caller(made, convention(made, options)))


def _of_users() -> Iterator[Defect]:
    """Every class that stands for a bug; what is wrong with it is in its docstring."""
    modules = (forward, backward, rounding, using, changing, featured)
    for made in (made for module in modules for made in vars(module).values()):
        if isinstance(made, type) and issubclass(made, Tiled) and made.bug:
            name = re.sub(r"(?<!^)(?=[A-Z])", "_", made.__name__).lower()
            wrong = (made.__doc__ or "").splitlines()[0].rstrip(".")
            yield Defect(name, wrong, _GITHUB + made.bug, make=partial(users, made), **made.of_defect)


def _rounding() -> tuple[Defect, ...]:
    """Kernels that declare a plan, and do otherwise."""
    fused, fair = "flash@fused", "fair"
    stochastic = "flash@fused_stochastic"
    return (
        Defect("as_printed_v1", "line 10 of v1 takes max(m, r_m): nothing changes", f"{_PAPER}v1",
               "stabilized@paper", doing("stabilized@paper", "as_printed_v1@paper")),
        Defect("as_printed_v2", "line 10 of v2 takes m': the negative branch is lost", f"{_PAPER}v2",
               "stabilized@paper", doing("stabilized@paper", "as_printed_v2@paper")),
        Defect("truncating_cast", "every cast truncates", f"{_GITHUB}sgl-project/sglang/pull/28650",
               fused, doing(fused, fused), arithmetic=CastingIn(Rounding.TOWARD_ZERO)),
        Defect("ties_away_cast", "every cast rounds ties away from zero", f"{_GITHUB}pytorch/FBGEMM/pull/786",
               fused, doing(fused, fused), arithmetic=CastingIn(Rounding.TIES_AWAY)),
        Defect("narrow_accumulator", "matrix products are added up in bf16",
               f"{_GITHUB}Xilinx/mlir-air/pull/1606", fused, doing(fused, fused), arithmetic=NarrowAccumulator()),
        Defect("scores_in_bf16", "S is cast to bf16", f"{_GITHUB}tinygrad/tinygrad/pull/12280",
               fused, doing(fused, fused, s=_LOW)),
        Defect("rounded_o_bar", "O of every tile is stored in bf16",
               f"{_GITHUB}zhuzilin/ring-flash-attention/issues/22", fused, doing(fused, "flash@paper")),
        Defect("partial_o_cast", "O of a split is stored in the format of the call",
               f"{_GITHUB}flashinfer-ai/flashinfer/issues/5107",
               "split@fused", doing("split@fused", "split@fused", o_bar=_LOW)),
        Defect("row_sum_of_rounded", "l sums P after its cast", _PAPER,
               "dithered@fused", doing("dithered@fused", "dithered@fused", row_sum_of=SumOf.ROUNDED)),
        Defect("fast_exponential", "an exponential of 20 bits, whose value at 0 is not 1",
               f"{_GITHUB}pytorch/pytorch/pull/151441", fused, doing(fused, fused, exponential=FEXP_U20)),
        # Unbiased over heads, and so predicted: a row's own bias gives it away.
        Defect("contracted", "S c - m c is one fused multiply-add", f"{_GITHUB}pytorch/pytorch/issues/121558",
               fused, doing(fused, "flash@fused_contracted")),
        Defect("not_contracted", "S c is rounded before m c is subtracted",
               f"{_GITHUB}deepseek-ai/FlashMLA/pull/68", "flash@fused_contracted",
               doing("flash@fused_contracted", fused)),
        Defect("noise_always_low", "random bits are not aligned with those that a cast drops: it rounds down",
               f"{_GITHUB}uxlfoundation/oneDNN/pull/2903", stochastic, doing(stochastic, stochastic),
               arithmetic=NoiseMaskedTo(2**28 - 1)),
        Defect("noise_of_seed_zero", "the seed is 0, and so are all random bits",
               f"{_GITHUB}AMD-AGI/Primus-Turbo/pull/365", stochastic, doing(stochastic, stochastic),
               arithmetic=NoiseMaskedTo(0)),
        Defect("noise_shared", "all elements are rounded with one random number",
               f"{_GITHUB}karpathy/llm.c/pull/432", stochastic, doing(stochastic, stochastic),
               arithmetic=NoiseOfTheFirst()),
        Defect("dither_without_noise", "the dither and the stochastic cast are left out",
               f"{_GITHUB}AMD-AGI/Primus-Turbo/pull/365", fair, doing(fair, fused)),
        Defect("scale_forgotten", "scores are not scaled", f"{_GITHUB}pytorch/torchtitan/pull/2173",
               fused, on_other_inputs(fused, _unscaled)),
    )  # fmt: skip


def _unscaled(inputs: AttentionInputs) -> AttentionInputs:
    return replace(inputs, q=inputs.q / inputs.scale)


#: Every planted defect, by name.
DEFECTS: Mapping[str, Defect] = {defect.name: defect for defect in (*_of_users(), *_rounding())}

#: Sound twins that are users' kernels.
USERS: Mapping[str, Callable[[], Tiled]] = {
    "tiled": Tiled,
    "split": forward.Split,
    "guarded": using.Guarded,
    "returning": using.Returning,
    "flash_1": rounding.Flash1,
    "any_order": rounding.AnyOrder,
    "batch_invariant": changing.BatchInvariant,
    "numbered_splits": changing.NumberedSplits,
    "featured": featured.Featured,
    "featured_split": featured.FeaturedSplit,
}


def twin(name: str) -> Kernel:
    """A sound twin: a user's kernel, or one that does what it declares."""
    return users(USERS[name], name) if name in USERS else honest(name)


#: The names of all sound twins.
TWINS = tuple(sorted({defect.twin for defect in DEFECTS.values()}))
