"""Adapters by name: against the packages that are here, and against the signatures of those that are not.

A stand-in has the signature of the function that it stands for, name by name and default by default, as it was read in
the public repository at the commit that foreign_functions.csv names, and computes attention by the function's document:
its layout, where its causal mask is aligned, how it calls the scale, which key head is whose, what it returns.
"""

import csv
import inspect
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tiebreak
from tiebreak.backends.backend import CPU
from tiebreak.kernels.external import external_kernel
from tiebreak.kernels.external.loading import ADAPTERS, load
from tiebreak.kernels.external.options import needs_of
from tiebreak.kernels.formats import BF16, FP16, Format, Formats
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionInputs
from tiebreak.kernels.kernel import CannotRunError, Kernel
from tiebreak.kernels.reference import reference, reference_gradients

FOREIGN = Path(__file__).parents[2] / "examples" / "foreign_kernels.py"  # what docs/other-kernels.md calls
with (Path(__file__).parent / "foreign_functions.csv").open(encoding="utf-8", newline="") as rows:
    READ = {row["adapter"]: row for row in csv.DictReader(rows)}
JAX = ("jax", "pallas_flash", "pallas_splash")
IN_FP16 = ("onnxruntime", "onnxruntime:mha", "onnxruntime:gqa")  # which has no bf16 on a CPU
RUNTIMES = (*IN_FP16, "onnx", "iree", "tinygrad", "ggml", "keras:tensorflow", "executorch", "openvino")  # forward only
HERE = ("hf:eager", "hf:sdpa", "x_transformers", *JAX, *RUNTIMES)  # run on a CPU
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
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return attend(q, k, v, *how).transpose(1, 2)


def upper_left(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).triu(1)


def lower_right(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)


def banded(causal: bool, left: int | None = None, right: int | None = None) -> Mask:
    """What FlashAttention's window hides, with what a causal mask does."""
    left, right = (None if side in (None, -1) else side for side in (left, 0 if causal else right))

    def mask(queries: int, keys: int) -> Tensor:
        apart = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
        before = torch.zeros_like(apart, dtype=torch.bool) if left is None else apart < -left
        return before if right is None else before | (apart > right)

    return mask


class LowerTriangularFromBottomRightMask:
    """xformers 0.0.35, ca6d2aa0."""


def usual(**given: Any) -> Tensor:
    """Attention of (batch, N, heads, d), its causal mask aligned at the lower right."""
    q, k, v = (given[name] for name in "qkv")
    scale, cap = given.get("softmax_scale", given.get("sm_scale")), given.get("softcap", given.get("logits_soft_cap"))
    mask = banded(given["causal"], *given.get("window_size", ())[:2])
    if q.dim() == 3:
        return tokens_first(q[None], k[None], v[None], scale, mask, cap or 0.0)[0]
    return tokens_first(q, k, v, scale, mask, cap or 0.0)


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

    compute: Callable[..., Any]  # of all its arguments
    given: dict[str, Any] = field(default_factory=dict)  # without which it would choose by itself, or do something else
    beside: dict[str, Any] = field(default_factory=dict)  # contents of modules, by module:name

    def install(self, patch: pytest.MonkeyPatch, adapter: str) -> None:
        made: dict[str, Any] = {}
        exec(f"def signed({READ[adapter]['parameters']}): return called(**locals())", {"called": self._called}, made)
        install(patch, {READ[adapter]["function"]: made["signed"], **self.beside})

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
    "flash_attn": StandIn(usual, {"deterministic": True}),
    "flash_attn_cute": StandIn(lambda **given: (usual(**given), None), {"deterministic": True, "qv": None}),
    "xformers": StandIn(
        xformers,
        {"op": ("cutlass forward", "cutlass backward")},
        {
            "xformers.ops.fmha:MemoryEfficientAttentionCutlassOp": ("cutlass forward", "cutlass backward"),
            "xformers.ops.fmha.attn_bias:LowerTriangularFromBottomRightMask": LowerTriangularFromBottomRightMask,
        },
    ),
    "flashinfer": StandIn(usual, {"kv_layout": "NHD", "backend": "fa2"}),
    "sageattention": StandIn(sage, {"tensor_layout": "HND"}),
    "aiter": StandIn(usual, {"deterministic": True, "how_v3_bf16_cvt": 1}, {"aiter.ops.mha:ENABLE_CK": True}),
    "transformer_engine": StandIn(transformer_engine, {"qkv_format": "bshd"}),
    "flag_gems": StandIn(gems, {"attn_mask": None}),  # a bool one hides where it is True
    "liger": StandIn(liger),
    "fla": StandIn(fla),
    "npu_fusion_attention": StandIn(npu, {"input_layout": "BNSD"}),
}
# What these take no more of than their documents say.
REFUSED = {
    "xformers": {"grouped", "grouped causal", "blind"},
    "liger": {"causal", "oblong", "one row", "grouped", "grouped causal", "blind", "short"},
    "openvino": {"grouped", "grouped causal", "scale", "blind"},
    "fla": {"blind", "padded"},
    **{name: {"blind"} for name in ("flash_attn_cute", "flashinfer", "transformer_engine", "npu_fusion_attention")},
    **{name: {"blind"} for name in ("sageattention", "flag_gems", "hf:eager", *JAX)},
    **{name: {"blind"} for name in ("onnxruntime", "ggml", "onnxruntime:gqa")},
    "onnxruntime:mha": {"grouped", "grouped causal", "blind"},
    "iree": {"grouped", "grouped causal", "blind"},
    "tinygrad": {"scale", "blind"},
    "executorch": {"short", "blind"},
    "keras:tensorflow": {"grouped causal", "blind"},
    "pallas_flash": {"grouped", "grouped causal", "blind"},
}
PADDED = {"padded", "windowed", "causal window"}  # what goes by a mask too
UNUSUAL = {*PADDED, "capped"}
TAKEN = {
    "flashinfer": {"capped"},
    **{name: {"padded"} for name in ("pallas_flash", "pallas_splash")},
    **{name: set() for name in ("onnxruntime:mha", "onnxruntime:gqa", "executorch")},
    **dict.fromkeys(("flash_attn", "flash_attn_cute"), UNUSUAL - {"padded"}),
}
# Called for each row, as one of a causal sequence: then without gradients.
ROW_BY_ROW = {"fla": {"full", "scale", "grouped", "short"}}
FORWARD_ONLY = {"flashinfer", "sageattention", *RUNTIMES}


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
    assert refused == UNUSUAL - TAKEN.get(adapter, PADDED if adapter in HERE else set()) | REFUSED.get(adapter, set())
    assert without_gradients == (
        inputs_by_label.keys() - refused if adapter in FORWARD_ONLY else ROW_BY_ROW.get(adapter, set())
    )


@pytest.mark.parametrize("adapter", STAND_INS)
def test_an_adapter_calls_a_package_as_its_document_says(adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    STAND_INS[adapter].install(monkeypatch, adapter)
    kernel = external_kernel(adapter)
    backend = "ascend" if adapter == "npu_fusion_attention" else "cuda"
    away = " or ascend" if adapter in ("flag_gems", "liger") else f"has no kernel for cpu: give --backend {backend}"
    if adapter == "flash_attn_cute":  # which the backend ptx executes, too
        with pytest.raises(CannotRunError, match="no kernel for cpu: give --backend cuda or ptx"):
            CPU.run(kernel, calls(BF16)["full"], gradients=False)
        monkeypatch.setattr("tiebreak.kernels.external.adapters.devices.is_executing", lambda: True)
    else:
        assert str(kernel.refusal(calls(BF16)["full"])).endswith(away)
    hold(adapter, kernel, calls(BF16), 2**-8, away)


@pytest.mark.parametrize("adapter", HERE)
def test_an_adapter_is_right_with_the_package_itself(adapter: str) -> None:
    kernel = external_kernel(adapter)
    fmt, ulp = (FP16, 2**-11) if adapter in IN_FP16 else (BF16, 2**-8)
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

    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name in tops:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=find_spec), *sys.meta_path])
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
    STAND_INS["aiter"].install(monkeypatch, "aiter")
    monkeypatch.setattr(sys.modules["aiter.ops.mha"], "ENABLE_CK", False)
    with pytest.raises(CannotRunError, match="unset ENABLE_CK"):
        CPU.run(external_kernel("aiter"), calls(BF16)["full"], gradients=False)


def test_a_pallas_kernel_of_ones_own_is_called_and_rounds_as_it_is_written() -> None:
    pytest.importorskip("jax", reason="jax is not installed: pip install jax")
    call = tiebreak.inputs("tied_maxima[k=2]", heads=64)
    q, k, v, do = (x.float() for x in (call.q, call.k, call.v, call.do))
    inputs = AttentionInputs(q, k, v, do, Formats.of(BF16), softmax_scale=call.scale)
    o = CPU.run(external_kernel(f"{FOREIGN}:pallas"), inputs, gradients=False).o
    tiebreak.assert_fair(o.bfloat16(), call.exact)  # it would not if P were divided before its cast


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
