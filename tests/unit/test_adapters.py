"""Adapters by name: against the packages that are here, and against the signatures of those that are not.

A stand-in has the signature of the function that it stands for, name by name and default by default, as it was read in
the public repository at the commit that is named, and computes attention by that function's document: its layout, where
its causal mask is aligned, how it calls the scale, which key head is whose, what it returns.
"""

import inspect
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tiebreak.backends.backend import CPU
from tiebreak.kernels.external import LoadError, external_kernel
from tiebreak.kernels.external.adapters import ADAPTERS
from tiebreak.kernels.external.adapters.foreign import needs_of
from tiebreak.kernels.external.loading import load
from tiebreak.kernels.formats import BF16, FP16, Format, Formats
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionInputs
from tiebreak.kernels.kernel import CannotRunError, Kernel
from tiebreak.kernels.reference import reference, reference_gradients

FOREIGN = Path(__file__).parents[2] / "examples" / "foreign_kernels.py"  # what docs/other-kernels.md calls
HERE = ("hf:eager", "hf:sdpa", "x_transformers", "jax", "onnxruntime", "openvino")  # run on a CPU
Mask = Callable[[int, int], Tensor]  # of so many queries and keys


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None, mask: Mask | None = None, cap: float = 0.0) -> Tensor:
    """Attention in fp32 of (batch, heads, N, d); a row without a key is 0."""
    k, v = (tensor.float().repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    scores = q.float() @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = cap * torch.tanh(scores / cap) if cap else scores
    if mask is not None:
        scores = scores.masked_fill(mask(q.shape[2], k.shape[2]), -torch.inf)
    return (scores.softmax(-1).nan_to_num() @ v).to(q.dtype)


def tokens_first(q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Tensor:
    """The same of (batch, N, heads, d)."""
    return attend(*(tensor.transpose(1, 2) for tensor in (q, k, v)), *how).transpose(1, 2)


def upper_left(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).triu(1)


def lower_right(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)


def banded(causal: bool, window: tuple[int | None, int | None]) -> Mask:
    """What FlashAttention's window hides, with what a causal mask does."""
    left, right = (None if side in (None, -1) else side for side in window)
    right = 0 if causal else right

    def mask(queries: int, keys: int) -> Tensor:
        apart = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
        before = torch.zeros_like(apart, dtype=torch.bool) if left is None else apart < -left
        return before if right is None else before | (apart > right)

    return mask


class LowerTriangularFromBottomRightMask:
    """xformers 0.0.35, ca6d2aa0."""


def aiter(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, **_: Any) -> Tensor:
    return tokens_first(q, k, v, softmax_scale, lower_right if causal else None)


def flashinfer(
    q: Tensor, k: Tensor, v: Tensor, sm_scale: float, causal: bool, logits_soft_cap: Any, **_: Any
) -> Tensor:
    mask = lower_right if causal else None
    return tokens_first(q[None], k[None], v[None], sm_scale, mask, logits_soft_cap or 0.0)[0]


def flash(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, softcap: float, **more: Any) -> Tensor:
    return tokens_first(q, k, v, softmax_scale, banded(more["causal"], more["window_size"]), softcap)


def fla(q: Tensor, k: Tensor, v: Tensor, scale: float, **_: Any) -> Tensor:
    assert q.shape[1] == k.shape[1], "one T for all"
    return tokens_first(q, k, v, scale, upper_left)


def gems(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float, enable_gqa: bool, **_: Any
) -> Tensor:
    assert enable_gqa or query.shape[1] == key.shape[1]
    return attend(query, key, value, scale, upper_left if is_causal else None)


def liger(query: Tensor, key: Tensor, value: Tensor, kernel_size: int, dilation: int, scale: float) -> Tensor:
    assert query.shape == key.shape
    place = torch.arange(query.shape[2])
    distance = (place[:, None] - place).abs()
    hidden = (distance > kernel_size // 2 * dilation) | (distance % dilation != 0)
    return attend(query, key, value, scale, lambda *_: hidden)


def npu(query: Tensor, key: Tensor, value: Tensor, head_num: int, atten_mask: Any, scale: float, **more: Any) -> Any:
    assert head_num == query.shape[1]
    if more["sparse_mode"] == 3:  # its mask is then the triangle of 2048 whatever the lengths
        assert torch.equal(atten_mask, upper_left(2048, 2048))
        return attend(query, key, value, scale, lower_right), None, None, None, 0, 0, 0
    assert atten_mask is None
    return attend(query, key, value, scale), None, None, None, 0, 0, 0


def sage(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, sm_scale: float, **_: Any) -> Tensor:
    assert not is_causal or q.shape[2] == k.shape[2], "its document: only applicable when qo_len == kv_len"
    return attend(q, k, v, sm_scale, upper_left if is_causal else None)


def transformer_engine(num_attention_heads: int, kv_channels: int, num_gqa_groups: int, **more: Any) -> Any:
    """Its module, of whose forward pass the adapter gives q, k and v alone."""
    mask = {"no_mask": None, "causal": upper_left, "causal_bottom_right": lower_right}[more["attn_mask_type"]]

    def forward(query_layer: Tensor, key_layer: Tensor, value_layer: Tensor) -> Tensor:
        chosen = [os.environ.get(f"NVTE_{name}_ATTN", "1") for name in ("FUSED", "FLASH", "UNFUSED")]
        assert chosen == ["1", "0", "0"], "it would choose by itself"
        assert query_layer.shape[2:] == (num_attention_heads, kv_channels)
        assert key_layer.shape[2] == num_gqa_groups
        return tokens_first(query_layer, key_layer, value_layer, more["softmax_scale"], mask).flatten(2)

    return forward


def xformers(query: Tensor, key: Tensor, value: Tensor, attn_bias: Any, scale: float, **_: Any) -> Tensor:
    assert attn_bias is None or isinstance(attn_bias, LowerTriangularFromBottomRightMask)
    return tokens_first(query, key, value, scale, None if attn_bias is None else lower_right)


@dataclass(frozen=True)
class StandIn:
    """A function of a package that is not here, and what else of the package its adapter asks for."""

    place: str  # module:function
    signature: str  # as it was read
    compute: Callable[..., Any]  # of all its arguments
    given: dict[str, Any]  # arguments without which it would choose by itself, or do something else
    beside: dict[str, Any] = field(default_factory=dict)  # contents of modules, by module:name

    def install(self, patch: pytest.MonkeyPatch) -> None:
        made: dict[str, Any] = {}
        exec(f"def signed({self.signature}): return called(**locals())", {"called": self._called}, made)
        install(patch, {self.place: made["signed"], **self.beside})

    def _called(self, kwargs: object = None, **given: Any) -> Any:
        assert not kwargs, "what it does not know it drops without a word"
        assert given | self.given == given
        return self.compute(**given)


def install(patch: pytest.MonkeyPatch, contents: dict[str, Any]) -> None:
    """Put modules and the packages that they lie in where they are imported from."""
    for place, value in contents.items():
        parts, name = place.partition(":")[0].split("."), place.partition(":")[2]
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if not hasattr(sys.modules.get(path), "stands_in"):
                module = ModuleType(path)
                vars(module).update(__path__=[], __version__="99.0", stands_in=True)
                patch.setitem(sys.modules, path, module)
        vars(sys.modules[".".join(parts)])[name] = value


STAND_INS = {
    "flash_attn": StandIn(  # flash-attn 2.8.4, 0251105
        "flash_attn:flash_attn_func",
        "q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,"
        " alibi_slopes=None, deterministic=False, return_attn_probs=False",
        flash,
        {"deterministic": True},
    ),
    "flash_attn_cute": StandIn(  # flash-attn-4 4.0.0b27, flash_attn/cute/interface.py, 0251105
        "flash_attn.cute:flash_attn_func",
        "q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, None),"
        " learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, score_mod=None,"
        " score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None,"
        " block_sparse_tensors_bwd=None, return_lse=False",
        lambda **given: (flash(**given), None),
        {"deterministic": True, "qv": None},
    ),
    "xformers": StandIn(  # xformers 0.0.35, ca6d2aa0, which has it from mslk 1.3.0, 2a3c897
        "xformers.ops.fmha:memory_efficient_attention",
        "query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None",
        xformers,
        {"op": ("cutlass forward", "cutlass backward")},
        {
            "xformers.ops.fmha:MemoryEfficientAttentionCutlassOp": ("cutlass forward", "cutlass backward"),
            "xformers.ops.fmha.attn_bias:LowerTriangularFromBottomRightMask": LowerTriangularFromBottomRightMask,
        },
    ),
    "flashinfer": StandIn(  # flashinfer 0.6.18, fb28d72
        "flashinfer:single_prefill_with_kv_cache",
        "q, k, v, scale_q=None, scale_k=None, scale_v=None, o_dtype=None, custom_mask=None, packed_custom_mask=None,"
        " causal=False, kv_layout='NHD', pos_encoding_mode='NONE', use_fp16_qk_reduction=False, sm_scale=None,"
        " window_left=-1, logits_soft_cap=None, rope_scale=None, rope_theta=None, backend='auto', return_lse=False,"
        " kv_cache_sf=None, k_scale=None, v_scale=None",
        flashinfer,
        {"kv_layout": "NHD", "backend": "fa2"},
    ),
    "sageattention": StandIn(  # sageattention 2.2.0, d1a57a5
        "sageattention:sageattn",
        "q, k, v, tensor_layout='HND', is_causal=False, sm_scale=None, return_lse=False, **kwargs",
        sage,
        {"tensor_layout": "HND"},
    ),
    "aiter": StandIn(  # aiter 0.1.20, aiter/ops/mha.py, e404860
        "aiter:flash_attn_func",
        "q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1, 0), bias=None,"
        " alibi_slopes=None, deterministic=True, return_lse=False, return_attn_probs=False, how_v3_bf16_cvt=1,"
        " cu_seqlens_q=None, cu_seqlens_kv=None, sink_ptr=None, num_splits=0",
        aiter,
        {"deterministic": True, "how_v3_bf16_cvt": 1},
        {"aiter.ops.mha:ENABLE_CK": True},
    ),
    "transformer_engine": StandIn(  # transformer_engine 2.20.0.dev0, d0067d0
        "transformer_engine.pytorch:DotProductAttention",
        "num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0, qkv_format='sbhd',"
        " attn_mask_type='causal', window_size=None, bottom_right_diagonal=None, sequence_parallel=False, tp_size=1,"
        " get_rng_state_tracker=None, tp_group=None, layer_number=None, attention_type='self', cp_group=None,"
        " cp_global_ranks=None, cp_stream=None, cp_comm_type='p2p', softmax_scale=None, softmax_type='vanilla',"
        " return_max_logit=False, name=None",
        transformer_engine,
        {"qkv_format": "bshd"},
    ),
    "flag_gems": StandIn(  # flag_gems 5.3.4, ed2508b: a bool mask hides where it is True
        "flag_gems:scaled_dot_product_attention",
        "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False",
        gems,
        {"attn_mask": None},
    ),
    "liger": StandIn(  # liger-kernel 0.8.2, ead96b6
        "liger_kernel.transformers.functional:liger_fused_neighborhood_attention",
        "query, key, value, kernel_size=7, dilation=1, scale=None",
        liger,
        {},
    ),
    "fla": StandIn(  # flash-linear-attention 0.5.2, bc3b101
        "fla.ops.attn:parallel_attn",
        "q, k, v, g=None, scale=None, window_size=None, cu_seqlens=None, chunk_indices=None, *,"
        " sink_bias=None, **kwargs",
        fla,
        {},
    ),
    "npu_fusion_attention": StandIn(  # torch_npu's document of release 6.0.0
        "torch_npu:npu_fusion_attention",
        "query, key, value, head_num, input_layout, pse=None, padding_mask=None, atten_mask=None, scale=1.0,"
        " keep_prob=1.0, pre_tockens=2147483647, next_tockens=2147483647, inner_precise=0, prefix=None,"
        " actual_seq_qlen=None, actual_seq_kvlen=None, sparse_mode=0, gen_mask_parallel=True, sync=False",
        npu,
        {"input_layout": "BNSD"},
    ),
}
# What these take no more of than their documents say.
REFUSED = {
    "xformers": {"grouped", "grouped causal", "blind"},
    "liger": {"causal", "oblong", "one row", "grouped", "grouped causal", "blind", "short"},
    "openvino": {"grouped", "grouped causal", "scale", "blind"},
    "fla": {"blind", "padded"},
    **{name: {"blind"} for name in ("flash_attn_cute", "flashinfer", "transformer_engine", "npu_fusion_attention")},
    **{name: {"blind"} for name in ("sageattention", "flag_gems", "hf:eager", "jax", "onnxruntime")},
}
CAPPED, WINDOWED = {"flash_attn", "flash_attn_cute", "flashinfer"}, {"flash_attn", "flash_attn_cute"}
# Called for each row, as one of a causal sequence: then without gradients.
ROW_BY_ROW = {"fla": {"full", "scale", "grouped", "short"}}
FORWARD_ONLY = {"flashinfer", "sageattention", "onnxruntime", "openvino"}


@dataclass(frozen=True)
class Absent:
    """Finds nothing of some packages."""

    packages: set[str]

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        del path, target
        if name in self.packages:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def calls(fmt: Format) -> dict[str, AttentionInputs]:
    generator = torch.Generator().manual_seed(1)

    def inputs(queries: int = 8, keys: int = 8, groups: int = 1, causal: bool = False) -> AttentionInputs:
        q, do, k, v = (
            torch.randn(2, heads, n, 16, generator=generator).to(TORCH_DTYPES[fmt]).float()
            for heads, n in ((4, queries), (4, queries), (4 // groups, keys), (4 // groups, keys))
        )
        return AttentionInputs(q, k, v, do, Formats.of(fmt), causal=causal)

    return {
        "full": inputs(),
        "causal": inputs(causal=True),
        "oblong": inputs(4, 8, causal=True),
        "one row": inputs(1, 8, causal=True),
        "short": inputs(8, 4),
        "grouped": inputs(groups=2),
        "grouped causal": inputs(groups=4, causal=True),
        "scale": replace(inputs(), softmax_scale=0.3),
        "blind": inputs(8, 4, causal=True),
        "capped": replace(inputs(), softcap=1.5),
        "windowed": replace(inputs(), window=(2, 1)),
        "causal window": replace(inputs(causal=True), window=(3, None)),
        "padded": replace(inputs(), key_padding=torch.tensor([[True] * 5 + [False] * 3, [True] * 8])),
    }


def hold(adapter: str, kernel: Kernel, inputs_by_label: dict[str, AttentionInputs], ulp: float, away: str = "") -> None:
    """Every call is computed or refused as the adapter says; `away` is what it says of being on a CPU."""
    refused, without_gradients = set(), set()
    for label, inputs in inputs_by_label.items():
        reason = kernel.refusal(inputs)
        if reason is not None and not (away and reason.endswith(away)):
            refused.add(label)
            continue
        try:
            output = CPU.run(kernel, inputs, gradients=True)
        except CannotRunError:
            refused.add(label)
            continue
        ref, actual = reference(inputs), [output.o]
        if output.gradients is None:
            without_gradients.add(label)
        else:
            actual += [output.gradients.dq, output.gradients.dk, output.gradients.dv]
        for name, tensor, right in zip(
            ("O", "dQ", "dK", "dV"), actual, (ref.o, *reference_gradients(inputs, ref)), strict=False
        ):
            assert (tensor - right).norm() < 4 * ulp * right.norm(), f"{label}: {name}"
    padded = adapter in HERE
    untaken = {"capped"} - ({"capped"} if adapter in CAPPED else set())
    untaken |= set() if padded else {"padded"}
    untaken |= set() if padded or adapter in WINDOWED else {"windowed", "causal window"}
    assert refused == REFUSED.get(adapter, set()) | untaken
    assert without_gradients == (
        inputs_by_label.keys() - refused if adapter in FORWARD_ONLY else ROW_BY_ROW.get(adapter, set())
    )


@pytest.mark.parametrize("adapter", STAND_INS)
def test_an_adapter_calls_a_package_as_its_document_says(adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    STAND_INS[adapter].install(monkeypatch)
    kernel = external_kernel(adapter)
    backend = "ascend" if adapter == "npu_fusion_attention" else "cuda"
    away = " or ascend" if adapter in ("flag_gems", "liger") else f"has no kernel for cpu: give --backend {backend}"
    assert str(kernel.refusal(calls(BF16)["full"])).endswith(away)
    hold(adapter, kernel, calls(BF16), 2**-8, away)


@pytest.mark.parametrize("adapter", HERE)
def test_an_adapter_is_right_with_the_package_itself(adapter: str) -> None:
    kernel = external_kernel(adapter)
    fmt, ulp = (FP16, 2**-11) if adapter == "onnxruntime" else (BF16, 2**-8)
    inputs_by_label = calls(fmt)
    lacking = kernel.refusal(inputs_by_label["full"])
    if lacking is not None:
        pytest.skip(lacking)
    hold(adapter, kernel, inputs_by_label, ulp)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_is_short_and_held_and_says_what_to_install(adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert adapter in {*STAND_INS, *HERE}
    assert len(inspect.getsourcelines(load(adapter))[0]) <= 25
    tops = {module.place.partition(":")[0].partition(".")[0] for module in needs_of(load(adapter))}
    assert tops
    for name in [module for module in sys.modules if module.partition(".")[0] in tops]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Absent(tops), *sys.meta_path])
    reason = str(external_kernel(adapter).refusal(calls(FP16)["full"]))
    assert re.match(r"[\w-]+ is not installed: pip install .*$", reason), reason


def test_a_version_that_an_adapter_does_not_know_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    call = calls(BF16)["full"]
    install(monkeypatch, {"flash_attn:other": None})
    reason = str(external_kernel("flash_attn").refusal(call))
    assert reason.startswith("flash-attn 99.0 has no flash_attn.flash_attn_func; this adapter knows 2.8; ")
    older = lambda q, k, v, softmax_scale, causal, window_size=(-1, -1), softcap=0.0: q.clone()  # noqa: E731
    install(monkeypatch, {"flash_attn:flash_attn_func": older})
    message = "flash_attn_func of flash-attn 99.0 has no parameter deterministic; this adapter knows 2.8"
    with pytest.raises(CannotRunError, match=message):
        CPU.run(external_kernel("flash_attn"), call, gradients=False)
    # A package that was built for another torch.
    (tmp_path / "sageattention.py").write_text("raise OSError('undefined symbol:\\n _ZN')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sageattention", raising=False)
    reason = str(external_kernel("sageattention").refusal(call))
    assert reason.startswith("sageattention of an unknown version can't be imported: OSError: undefined symbol: _ZN")


def test_aiter_is_not_replaced_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    STAND_INS["aiter"].install(monkeypatch)
    monkeypatch.setattr(sys.modules["aiter.ops.mha"], "ENABLE_CK", False)
    with pytest.raises(CannotRunError, match="unset ENABLE_CK"):
        CPU.run(external_kernel("aiter"), calls(BF16)["full"], gradients=False)


def test_transformer_engines_switches_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    STAND_INS["transformer_engine"].install(monkeypatch)
    monkeypatch.setenv("NVTE_FLASH_ATTN", "1")
    monkeypatch.delenv("NVTE_UNFUSED_ATTN", raising=False)
    q, k, v = (torch.ones(1, 8, 2, 16) for _ in "qkv")
    load("transformer_engine")(q, k, v, causal=False, softmax_scale=1.0)
    assert os.environ["NVTE_FLASH_ATTN"] == "1"
    assert "NVTE_UNFUSED_ATTN" not in os.environ


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flash_atn", "no adapter 'flash_atn': did you mean flash_attn? known are flash_attn, flash_attn_cute, "),
        ("hf:flash", "no adapter 'hf:flash': "),
        ("mine", "no adapter 'mine': known are flash_attn, "),
    ],
)
def test_an_unknown_name_is_told_the_known_ones(name: str, message: str) -> None:
    with pytest.raises(LoadError, match=re.escape(message)) as caught:
        external_kernel(name)
    assert "openvino; one of your own is path/to/file.py:function" in str(caught.value)


@pytest.mark.parametrize(("name", "calls_taken"), [("sdpa_flash", 12), ("sdpa_math", 12), ("multihead_attention", 1)])
def test_the_documents_functions_around_pytorch_are_right(
    name: str, calls_taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    called, fast = list[Any](), torch._native_multi_head_attention

    def counted(*arguments: Any) -> Any:
        called.append(arguments)
        return fast(*arguments)

    monkeypatch.setattr(torch, "_native_multi_head_attention", counted)
    kernel = external_kernel(f"{FOREIGN}:{name}")
    taken = [inputs for inputs in calls(BF16).values() if kernel.refusal(inputs) is None]
    assert len(taken) == calls_taken
    for inputs in taken:
        o, right = CPU.run(kernel, inputs, gradients=False).o, reference(inputs).o
        assert (o - right).norm() < 2**-7 * right.norm()
    assert bool(called) is (name == "multihead_attention"), "its fast path"
