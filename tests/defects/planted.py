"""The planted defects: what is wrong, the public bug that each stands for, its sound twin, and what catches it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from tiebreak.backends.backend import CPU, Backend
from tiebreak.defects import backward, forward
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
from tiebreak.kernels.external.options import KernelOptions
from tiebreak.kernels.formats import BF16, FP16, Format, Rounding
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import Kernel
from tiebreak.kernels.plans import FEXP_U20, Cast, SumOf

_GITHUB = "https://github.com/"
_PAPER = "https://arxiv.org/abs/2510.04212"
_LOW = Cast(BF16)
_NO_PLAN = "it declares no plan, and its error is within the bound of kernels that may round every step to 16 bits"
_GRADIENTS = "the bound of gradients allows a cast to 16 bits at every step of the backward pass"


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


def _run(caller: Caller, inputs: AttentionInputs, arithmetic: Arithmetic, gradients: bool) -> AttentionOutput:
    del arithmetic  # it is the user's own
    return caller.run(inputs, gradients=gradients)


def users(function: Callable[[], Tiled], name: str) -> Kernel:
    """A user's kernel that declares no plan, called and held to its contract as `--kernel` does."""
    made = function()
    caller = Caller(made, convention(made, KernelOptions(backward=made.backward)))
    return Kernel(
        name,
        partial(_run, caller),
        None,
        takes=caller.convention.takes,
        missing_requirement=caller.missing_requirement,
        external=True,
    )


def _of(name: str, function: Callable[[], Tiled], where: str, twin: str = "tiled", **options: object) -> Defect:
    """A user's kernel; what is wrong with it is in its docstring."""
    wrong = (function.__doc__ or "").splitlines()[0].rstrip(".")
    return Defect(name, wrong, _GITHUB + where, twin, partial(users, function), **options)  # type: ignore[arg-type]


def _masks() -> tuple[Defect, ...]:
    return (
        _of(
            "causal_upper_left",
            forward.UpperLeftCausal,
            "NVIDIA/cutlass/issues/2336",
        ),
        _of("causal_strict", forward.StrictCausal, "pbloem/former/issues/10"),
        _of("causal_skipped", forward.CausalWithoutMaskSkipped, "facebookresearch/xformers/issues/103"),
        _of("padding_ignored", forward.PaddingIgnored, "huggingface/diffusers/issues/8886"),
        _of("tiny_mask_value", forward.TinyMaskValue, "Shujun-He/RibonanzaNet/issues/5"),
        _of("finite_mask_value", forward.FiniteMaskValue, "TransformerLensOrg/TransformerLens/issues/318"),
        _of(
            "added_mask", forward.AddedMask, "pytorch/pytorch/issues/101967", missed="no case has a NaN at a masked key"
        ),
        _of("blind_rows_nan", forward.BlindRowsNan, "pytorch/pytorch/issues/103963"),
        _of("blind_rows_mean", forward.BlindRowsMean, "ml-explore/mlx/issues/2395"),
        _of("blind_rows_unwritten", forward.BlindRowsUnwritten, "vllm-project/vllm/pull/19784"),
    )


def _scales_and_shapes() -> tuple[Defect, ...]:
    return (
        _of("scale_ignored", forward.ScaleIgnored, "tenstorrent/tt-xla/issues/2342"),
        _of("scaled_twice", forward.ScaledTwice, "huggingface/transformers/pull/38290"),
        _of("scale_divides", forward.ScaleDivides, "esceptico/perceiver-io/issues/9"),
        _of("scaled_after_softmax", forward.ScaledAfterSoftmax, "FrancescoSaverioZuppichini/ViT/issues/2"),
        _of("scale_grows", forward.ScaleGrows, "flagos-ai/FlagGems/pull/424"),
        _of("heads_tiled", forward.HeadsTiled, "ekzhang/jax-js/pull/180"),
        _of(
            "sixty_four_dimensions",
            forward.SixtyFourDimensions,
            "triton-lang/triton/issues/621",
        ),
        _of("odd_dimensions_dropped", forward.OddDimensionsDropped, "66RING/tiny-flash-attention/issues/12"),
        _of("last_tile_filled_up", forward.LastTileFilledUp, "flashinfer-ai/flashinfer/pull/5090"),
        _of("last_tile_dropped", forward.LastTileDropped, "jax-ml/jax/issues/27224"),
        _of(
            "strides_of_v_ignored",
            forward.StridesOfVIgnored,
            "flagos-ai/FlagGems/issues/5896",
            missed="users' kernels are given contiguous copies only",
        ),
        _of("batch_stride_zero", forward.BatchStrideZero, "vllm-project/flash-attention/pull/176"),
        _of("split_in_base_two", forward.SplitInBaseTwo, "sgl-project/sglang/issues/33064", "split"),
        _of("split_unweighted", forward.SplitUnweighted, "flashinfer-ai/flashinfer/pull/50", "split"),
    )


def _softmax() -> tuple[Defect, ...]:
    return (
        _of(
            "maximum_from_zero",
            forward.MaximumFromZero,
            "Dao-AILab/flash-attention/issues/2082",
        ),
        _of(
            "maximum_from_finite",
            forward.MaximumFromAFiniteNumber,
            "flashinfer-ai/flashinfer/issues/4267",
        ),
        _of("maximum_of_the_tile", forward.MaximumOfTheTile, "tile-ai/tilelang/pull/1148"),
        _of("constant_shift", forward.ConstantShift, "HabanaAI/vllm-fork/issues/275"),
        _of("p_in_the_other_frame", forward.PInTheOtherFrame, "ROCm/rocm-libraries/pull/7194"),
        _of("rescaled_the_other_way", forward.RescaledTheOtherWay, "Dao-AILab/flash-attention/issues/991"),
        _of("nan_dropped", forward.NanDropped, "ohdearquant/lattice/issues/740"),
        _of("narrow_product", forward.NarrowProduct, "ultralytics/ultralytics/pull/24990", fmt=FP16),
        _of("narrow_softmax", forward.NarrowSoftmax, "apple/axlearn/pull/18", missed=_NO_PLAN),
        _of("narrow_row_sum", forward.NarrowRowSum, "Intel-tensorflow/tensorflow/pull/23", missed=_NO_PLAN),
        _of(
            "narrow_between_tiles",
            forward.NarrowBetweenTiles,
            "zhuzilin/ring-flash-attention/issues/22",
            missed=_NO_PLAN,
        ),
        _of("narrow_accumulation", forward.NarrowAccumulation, "Xilinx/mlir-air/pull/1606", missed=_NO_PLAN),
        _of("eight_bit_p", forward.EightBitP, "Dao-AILab/flash-attention/issues/1493"),
        _of("truncated_store", forward.TruncatedStore, "tinygrad/tinygrad/pull/11848", missed=_NO_PLAN),
    )


def _contract() -> tuple[Defect, ...]:
    return (
        _of("stored_in_fp32", forward.StoredInFp32, "lucidrains/flash-attention-jax/pull/13"),
        _of("query_overwritten", forward.QueryOverwritten, "unslothai/unsloth/issues/5001"),
        _of("switch_left_on", forward.SwitchLeftOn, "MouseLand/cellpose/issues/1253"),
        _of("sum_not_reset", forward.SumNotReset, "flashinfer-ai/flashinfer/pull/5029"),
        _of("race_in_o", forward.RaceInO, "ROCm/triton/issues/953"),
    )


def _backward() -> tuple[Defect, ...]:
    return (
        _of("unscaled_dk", backward.UnscaledDk, "Dao-AILab/flash-attention/issues/2651"),
        _of("first_of_group", backward.FirstOfGroup, "marin-community/levanter/pull/449"),
        _of("groups_transposed", backward.GroupsTransposed, "XunhaoLai/native-sparse-attention-triton/issues/27"),
        _of("backward_without_causal", backward.BackwardWithoutCausal, "Dao-AILab/flash-attention/issues/2424"),
        _of("backward_always_causal", backward.BackwardAlwaysCausal, "triton-lang/triton/issues/4541"),
        _of("lse_in_base_two", backward.LseInBaseTwo, "pytorch/pytorch/issues/181645"),
        _of(
            "narrow_recomputation", backward.NarrowRecomputation, "NVIDIA/cudnn-frontend/issues/744", missed=_GRADIENTS
        ),
        _of("narrow_dq", backward.NarrowDq, "NVIDIA/TransformerEngine/pull/821", missed=_GRADIENTS),
        _of("dq_of_the_first_entry", backward.DqOfTheFirstEntry, "ROCm/TransformerEngine/pull/657"),
        _of(
            "blind_gradients",
            backward.BlindGradients,
            "pytorch/pytorch/issues/41508",
        ),
        _of(
            "strides_of_do_ignored",
            backward.StridesOfDoIgnored,
            "Dao-AILab/flash-attention/issues/355",
            missed="users' kernels are given a contiguous dO only",
        ),
        _of(
            "race_in_dq",
            backward.RaceInDq,
            "Dao-AILab/flash-attention/issues/414",
            missed="`gradients_repeated` shows it; no check asks: most kernels add up dQ by atomics",
        ),
    )


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


def _named() -> Mapping[str, Defect]:
    kinds = (_masks(), _scales_and_shapes(), _softmax(), _backward(), _contract(), _rounding())
    return MappingProxyType({defect.name: defect for kind in kinds for defect in kind})


#: Every planted defect, by name.
DEFECTS = _named()

#: Sound twins that are users' kernels.
USERS: Mapping[str, Callable[[], Tiled]] = MappingProxyType({"tiled": Tiled, "split": forward.Split})


def twin(name: str) -> Kernel:
    """A sound twin: a user's kernel, or one that does what it declares."""
    return users(USERS[name], name) if name in USERS else honest(name)


#: The names of all sound twins.
TWINS = tuple(sorted({defect.twin for defect in DEFECTS.values()}))
