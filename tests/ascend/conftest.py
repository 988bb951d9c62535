"""A stand-in for an NPU: torch on the CPU behind the vendor's operators, and the backend class that runs on it.

It is here to run the host's side of the backend without the hardware, and proves nothing of an NPU. Its schemas are
those of torch-npu 2.13.0, held to the real package in `test_contract.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tiebreak.backends.ascend import Ascend, ascend
from tiebreak.kernels.npu import Operator, pack, unpack

NAMESPACE = "npu_stand_in"
_COPIES = 8  # of every row statistic
SCHEMAS = (
    "npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, Tensor? pse=None, "
    "Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., float keep_prob=1., "
    "int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int[]? prefix=None, "
    "int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, "
    'bool sync=False, str softmax_layout="", Tensor? sink=None, Tensor? dropout_mask=None, int seed=0, int offset=0) '
    "-> (Tensor, Tensor, Tensor, Tensor, int, int, int)",
    "npu_fusion_attention_grad(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num, str input_layout, *, "
    "Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor? softmax_max=None, "
    "Tensor? softmax_sum=None, Tensor? softmax_in=None, Tensor? attention_in=None, float scale_value=1., "
    "float keep_prob=1., int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int seed=0, "
    "int offset=0, int numels=0, int[]? prefix=None, int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, "
    'int sparse_mode=0, bool gen_mask_parallel=True, bool sync=False, str softmax_layout="", Tensor? sink=None) '
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "npu_prompt_flash_attention(Tensor query, Tensor key, Tensor value, *, Tensor? padding_mask=None, "
    "Tensor? atten_mask=None, Tensor? pse_shift=None, int[]? actual_seq_lengths=None, Tensor? deq_scale1=None, "
    "Tensor? quant_scale1=None, Tensor? deq_scale2=None, Tensor? quant_scale2=None, Tensor? quant_offset2=None, "
    "int num_heads=1, float scale_value=1., int pre_tokens=2147483647, int next_tokens=0, "
    'str input_layout="BSH", int num_key_value_heads=0, int[]? actual_seq_lengths_kv=None, int sparse_mode=0) '
    "-> Tensor",
    "npu_fused_infer_attention_score(Tensor query, Tensor key, Tensor value, *, Tensor? pse_shift=None, "
    "Tensor? atten_mask=None, SymInt[]? actual_seq_lengths=None, SymInt[]? actual_seq_lengths_kv=None, "
    "Tensor? dequant_scale1=None, Tensor? quant_scale1=None, Tensor? dequant_scale2=None, "
    "Tensor? quant_scale2=None, Tensor? quant_offset2=None, Tensor? antiquant_scale=None, "
    "Tensor? antiquant_offset=None, Tensor? key_antiquant_scale=None, Tensor? key_antiquant_offset=None, "
    "Tensor? value_antiquant_scale=None, Tensor? value_antiquant_offset=None, Tensor? block_table=None, "
    "Tensor? query_padding_size=None, Tensor? kv_padding_size=None, Tensor? key_shared_prefix=None, "
    "Tensor? value_shared_prefix=None, SymInt[]? actual_shared_prefix_len=None, Tensor? query_rope=None, "
    "Tensor? key_rope=None, Tensor? key_rope_antiquant_scale=None, int num_heads=1, float scale=1., "
    'int pre_tokens=2147483647, int next_tokens=2147483647, str input_layout="BSH", int num_key_value_heads=0, '
    "int sparse_mode=0, int inner_precise=0, int block_size=0, int antiquant_mode=0, int key_antiquant_mode=0, "
    "int value_antiquant_mode=0, bool softmax_lse_flag=False) -> (Tensor, Tensor)",
)


Arguments = Mapping[str, Any]  # of one call, by the names of the schema


def _unpacked(x: Tensor, layout: str, heads: int) -> Tensor:
    """(batch, heads, N, d) in fp32, by the conversion that `test_kernels.py` holds to single elements."""
    if not x.is_contiguous():
        raise RuntimeError("the operator takes contiguous tensors only")
    return unpack(x.float(), layout, heads)


def _hidden(queries: int, keys: int, mask: Tensor | None, mode: int, sides: tuple[int, int]) -> Tensor:
    """What a sparse mode makes of a mask, as torch-npu's documents say."""
    if mask is None:
        return torch.zeros(queries, keys, dtype=torch.bool)
    if mode == 1:
        if mask.shape[-2:] != (queries, keys):
            raise RuntimeError(f"sparse_mode 1 takes the whole mask, not {tuple(mask.shape)}")
        return mask
    if mode in (3, 4):
        if not torch.equal(mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1)):
            raise RuntimeError(f"sparse_mode {mode} takes the compressed triangle")
        before, after = sides if mode == 4 else (2**31 - 1, 0)
        apart = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
        return (apart > after) | (apart < -before)
    raise RuntimeError(f"sparse_mode {mode} is not supported")


def _of_sequences(call: Arguments, queries: int, keys: int) -> Tensor:
    """The mask of a call, sequence by sequence where it has their ends."""
    sides = tuple(next(call[name] for name in names if name in call) for names in _SIDES)
    ends = [call.get(name) for name in ("actual_seq_qlen", "actual_seq_kvlen")]
    if call["input_layout"] != "TND":
        assert ends == [None, None], "lengths go with the layout TND"
        return _hidden(queries, keys, call["atten_mask"], call["sparse_mode"], sides)
    hidden, (row, column) = torch.ones(queries, keys, dtype=torch.bool), (0, 0)
    for end, last in zip(*ends, strict=True):
        own = end - row, last - column
        hidden[row:end, column:last] = _hidden(*own, call["atten_mask"], call["sparse_mode"], sides)
        row, column = end, last
    return hidden


_SIDES = (("pre_tockens", "pre_tokens"), ("next_tockens", "next_tokens"))


class Attention:
    """One call's attention, in fp32 with P-bar and O cast to the inputs' format."""

    def __init__(self, call: Arguments, heads: int, scale: float) -> None:
        self.layout, self.heads, self.scale = str(call["input_layout"]), heads, scale
        self.dtype = call["query"].dtype
        self.q = _unpacked(call["query"], self.layout, heads)
        # Of SBH alone the shape does not tell the key heads.
        self.key_heads = call["key"].shape[-1] // self.q.shape[-1] if self.layout == "SBH" else 0
        self.key_heads = self.key_heads or call["key"].shape[self.layout.index("N")]
        self.k, self.v = (_unpacked(call[name], self.layout, self.key_heads) for name in ("key", "value"))
        self.groups = heads // self.key_heads
        self.k, self.v = (x.repeat_interleave(self.groups, 1) for x in (self.k, self.v))
        self.hidden, self.sink = _of_sequences(call, self.q.shape[2], self.k.shape[2]), call.get("sink")

    def scores(self) -> Tensor:
        # As the vendor's kernels mask: a row without keys stays finite.
        return (self.q @ self.k.transpose(-1, -2) * self.scale).masked_fill(self.hidden, -3e38)

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """O in the layout; row maximum and row sum, (batch, heads, N, 1)."""
        s = self.scores()
        row_max = s.amax(-1, keepdim=True)
        p = torch.exp(s - row_max)
        row_sum = p.sum(-1, keepdim=True)
        if self.sink is not None:
            row_sum = row_sum + torch.exp(self.sink[:, None, None] - row_max)
        return pack((p.to(self.dtype).float() @ self.v / row_sum).to(self.dtype), self.layout), row_max, row_sum

    def backward(self, call: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """dQ, dK, dV in the layout and that of a sink, from the statistics and the O that the caller hands back."""
        row_max, row_sum = (self.statistic(call[name]) for name in ("softmax_max", "softmax_sum"))
        do, o = (_unpacked(call[name], self.layout, self.heads) for name in ("dy", "attention_in"))
        p = torch.exp(self.scores() - row_max) / row_sum
        ds = p * (do @ self.v.transpose(-1, -2) - (do * o).sum(-1, keepdim=True)) * self.scale
        dq, dk, dv = ds @ self.k, ds.transpose(-1, -2) @ self.q, p.transpose(-1, -2) @ do
        shared = (x.reshape(len(x), self.key_heads, self.groups, *x.shape[2:]).sum(2) for x in (dk, dv))
        dq, dk, dv = (pack(x.to(self.dtype), self.layout) for x in (dq, *shared))
        sink = torch.zeros(self.heads) if self.sink is None else self.sink
        weight = torch.exp(sink[:, None, None] - row_max) / row_sum
        return dq, dk, dv, -(weight * (do * o).sum(-1, keepdim=True)).sum((0, 2, 3))

    def statistic(self, x: Tensor) -> Tensor:
        """(batch, heads, N, 1) of one as the operators keep it."""
        return (x.transpose(0, 1)[None] if self.layout == "TND" else x)[..., :1]


def _fusion(call: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    attention = Attention(call, call["head_num"], call["scale"])
    o, *statistics = attention.forward()
    if attention.layout == "TND":
        statistics = [x[0].transpose(0, 1) for x in statistics]
    row_max, row_sum = (x.expand(*x.shape[:-1], _COPIES).contiguous() for x in statistics)
    return o, row_max, row_sum, torch.empty(0, dtype=o.dtype), 0, 0, 0


def _fusion_grad(call: Arguments) -> tuple[Tensor, ...]:
    dq, dk, dv, dsink = Attention(call, call["head_num"], call["scale_value"]).backward(call)
    return dq, dk, dv, torch.empty(0), dsink


def _prompt(call: Arguments) -> Tensor:
    unlimited = call["sparse_mode"] == 4 or call["next_tokens"] > 0
    assert call["atten_mask"] is None or unlimited, "the default of next_tokens hides later keys"
    return Attention(call, call["num_heads"], call["scale_value"]).forward()[0]


def _infer(call: Arguments) -> tuple[Tensor, Tensor]:
    assert call["softmax_lse_flag"]
    o, row_max, row_sum = Attention(call, call["num_heads"], call["scale"]).forward()
    return o, row_max + torch.log(row_sum)


def _by_name(name: str, implementation: Callable[[Arguments], Any]) -> Callable[..., Any]:
    """The implementation as torch calls it: arguments by position where the schema has them so, defaults left out."""
    arguments = getattr(getattr(torch.ops, NAMESPACE), name).default._schema.arguments

    def called(*positional: Any, **named: Any) -> Any:
        defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
        keywords = {argument.name: value for argument, value in zip(arguments, positional, strict=False)}
        return implementation(defaults | keywords | named)

    return called


_LIBRARY: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
for _schema, _implementation in zip(SCHEMAS, (_fusion, _fusion_grad, _prompt, _infer), strict=True):
    _name = _LIBRARY.define(_schema)
    _LIBRARY.impl(_name.split("::")[-1], _by_name(_name.split("::")[-1], _implementation), "CPU")


def operators(name: str) -> Operator | None:
    """The stand-in's operator called `name`."""
    operator: Operator | None = getattr(getattr(torch.ops, NAMESPACE), name, None)
    return operator


@dataclass(frozen=True)
class StandIn(Ascend):
    """An NPU that is a CPU, and what torch-npu has functions for."""

    broken: bool = False  # whether an error has left it unusable
    waits: list[str] = field(default_factory=list, compare=False)  # one entry a synchronisation

    def module(self) -> Any:
        return SimpleNamespace(
            device_count=lambda: 1,
            current_device=lambda: 0,
            get_device_name=lambda index: "none: torch on a CPU in an NPU's place",
            matmul=SimpleNamespace(),
            utils=SimpleNamespace(),
            synchronize=self._wait,
        )

    def _wait(self) -> None:
        self.waits.append(self.device)
        if self.broken:
            raise RuntimeError("aicore exception")


@pytest.fixture
def backend() -> StandIn:
    """The backend class on the stand-in."""
    plain = ascend(operators=operators)
    given = {each.name: getattr(plain, each.name) for each in fields(plain)}
    return StandIn(**given | {"name": "ascend_stand_in", "device": "cpu", "unavailable": lambda: None})


@pytest.fixture(scope="session")
def schemas() -> tuple[str, ...]:
    """The operators' schemas as the stand-in has them, without a namespace."""
    return tuple(
        str(getattr(getattr(torch.ops, NAMESPACE), schema.split("(")[0]).default._schema) for schema in SCHEMAS
    )
