"""What a call may ask beyond softmax(Q K^T) V: the reference against torch's autograd, the algorithms against it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.random import default_rng
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from tiebreak.backends.backend import CPU
from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.backends.torch_arithmetic import TorchArithmetic
from tiebreak.cases.gradients import sink_faults
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.external import external_kernel
from tiebreak.kernels.external.caller import Caller
from tiebreak.kernels.external.options import KernelOptions, convention
from tiebreak.kernels.features import (
    ALIBI,
    BIAS,
    BLOCK_MASK,
    CAPPED_BIAS,
    DESCALE,
    FEATURES,
    KEY_PADDING,
    LENGTHS,
    OWN_SLOPES,
    PAGES,
    SINK,
    SOFTCAP,
    VALUE_DIM,
    WINDOW,
    Feature,
)
from tiebreak.kernels.formats import BF16, FP32, Formats
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import run_declared
from tiebreak.kernels.reference import reference, reference_gradients, sink_gradient
from tiebreak.matrix.trial import failed_trial
from tiebreak.matrix.workbench import SharedBatch

pytestmark = pytest.mark.quick

BATCH, HEADS, KEY_HEADS, QUERIES, KEYS, D, D_V = 2, 4, 2, 9, 13, 8, 6


def _draw(*shape: int) -> Tensor:
    return torch.from_numpy(default_rng(shape).standard_normal(shape, dtype="float32")).bfloat16().float()


def _d_v(inputs: AttentionInputs) -> AttentionInputs:
    return replace(inputs, v=inputs.v[..., :D_V], do=inputs.do[..., :D_V])


def _with(**fields: Any) -> Callable[[AttentionInputs], AttentionInputs]:
    return lambda inputs: replace(inputs, **fields)


#: What makes inputs ask for a feature, of all that a call has a value of.
ASKING: Mapping[Feature, Callable[[AttentionInputs], AttentionInputs]] = {
    VALUE_DIM: _d_v,
    WINDOW: _with(window=(3, 1)),
    SOFTCAP: _with(softcap=2.0),
    SINK: _with(sink=_draw(HEADS)),
    OWN_SLOPES: lambda inputs: replace(inputs, alibi=_draw(BATCH, HEADS)[: len(inputs.q)].abs()),
    ALIBI: lambda inputs: inputs if inputs.alibi is not None else replace(inputs, alibi=_draw(HEADS).abs()),
    CAPPED_BIAS: _with(capped_bias=True, softcap=2.0, bias=_draw(1, HEADS, 1, KEYS)),
    BIAS: _with(bias=_draw(1, HEADS, 1, KEYS)),
    LENGTHS: lambda inputs: replace(inputs.part(slice(1)), lengths=((0, 4, 4, 9), (0, 7, 9, 13))),
    BLOCK_MASK: _with(
        block_mask=torch.tensor([[True, False, True, True], [False, True, False, True], [True, True, True, False]])[
            None, None
        ],
        block_size=(4, 4),
    ),
    PAGES: lambda inputs: replace(
        inputs, block_table=torch.tensor([[5, 0, 8, 3], [1, 7, 2, 4]])[: len(inputs.q)], page_size=4, pool_pages=9
    ),
    DESCALE: lambda inputs: replace(
        inputs,
        k=inputs.k.to(torch.float8_e4m3fn).float(),
        v=inputs.v.to(torch.float8_e4m3fn).float(),
        k_descale=_draw(BATCH, KEY_HEADS).abs()[: len(inputs.q)] * 0.3,
        v_descale=_draw(BATCH, KEY_HEADS).abs()[: len(inputs.q)] * 0.7,
    ),
}
PLAIN = AttentionInputs(
    _draw(BATCH, HEADS, QUERIES, D),
    _draw(BATCH, KEY_HEADS, KEYS, D),
    _draw(BATCH, KEY_HEADS, KEYS + 1, D)[:, :, 1:],
    _draw(BATCH, HEADS, QUERIES, D) + 1.0,
    Formats.of(FP32),
)
SEEN: Mapping[str, Callable[[AttentionInputs], AttentionInputs]] = {
    "full": lambda inputs: inputs,
    "causal": _with(causal=True),
    "padded": _with(key_padding=torch.tensor([[True] * 10 + [False] * 3, [False] * 2 + [True] * 11])),
    "blind": _with(key_padding=torch.tensor([[False] * 13, [True] * 13])),
}
ALONE = [(feature,) for feature in ASKING]
SETS = [*ALONE, *combinations(ASKING, 2), tuple(ASKING)]
FEW = [*ALONE, *list(combinations(ASKING, 2))[::9], tuple(ASKING)]


def asking(features: tuple[Feature, ...], seen: str = "full") -> AttentionInputs:
    """Inputs that ask for these."""
    inputs = SEEN[seen](PLAIN)
    for feature in features:
        inputs = ASKING[feature](inputs)
    assert set(features) <= set(inputs.required_features())
    return inputs


def visible(inputs: AttentionInputs) -> Tensor:
    """Which keys a row sees, asked one by one, (batch, heads, queries, keys)."""
    batch, heads, queries, keys = *inputs.q.shape[:3], inputs.k.shape[2]
    left, right = (10**9 if side is None else side for side in inputs.window)
    rows, columns = inputs.lengths or ((0, queries), (0, keys))
    seen = torch.zeros(batch, heads, queries, keys, dtype=torch.bool)
    for b, ((row, end), (column, last)) in product(range(batch), zip(pairwise(rows), pairwise(columns), strict=True)):
        for i, j in product(range(row, end), range(column, last)):
            own = last - end + i
            sees = own - left <= j <= own + right and not (inputs.causal and j > own)
            sees = sees and (inputs.key_padding is None or bool(inputs.key_padding[b, j]))
            seen[b, :, i, j] = sees and (inputs.block_mask is None or bool(inputs.block_mask[0, 0, i // 4, j // 4]))
    return seen


def apart(inputs: AttentionInputs) -> Tensor:
    """Count the keys between a row's own and each, (queries, keys), one by one; 0 in another sequence."""
    queries, keys = inputs.q.shape[2], inputs.k.shape[2]
    rows, columns = inputs.lengths or ((0, queries), (0, keys))
    apart = torch.zeros(queries, keys)
    for (row, end), (column, last) in zip(pairwise(rows), pairwise(columns), strict=True):
        for i, j in product(range(row, end), range(column, last)):
            apart[i, j] = abs(i - row + (last - column) - (end - row) - (j - column))
    return apart


def by_torch(inputs: AttentionInputs) -> tuple[Tensor, tuple[Tensor, ...]]:
    """O and the gradients of q, k, v and the sink in fp64: PyTorch's own softmax of scores given as a mask.

    O's upstream gradient is dO and, where there is one, that of the log-sum-exp is dlse.
    """
    q, k, v = (tensor.double().requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v))
    leaves, groups = [q, k, v], inputs.groups
    whole_k, whole_v = (
        x if factors is None else x * factors.double()[:, :, None, None]
        for x, factors in ((k, inputs.k_descale), (v, inputs.v_descale))
    )
    s = torch.einsum("bhid,bhjd->bhij", q, whole_k.repeat_interleave(groups, 1)) * inputs.scale
    bias = torch.zeros(1) if inputs.bias is None else inputs.bias.double()
    if inputs.alibi is not None:
        bias = bias - inputs.alibi.double().expand(*s.shape[:2])[..., None, None] * apart(inputs)
    s = s + bias if inputs.capped_bias else s
    s = inputs.softcap * torch.tanh(s / inputs.softcap) if inputs.softcap else s
    s = s if inputs.capped_bias else s + bias
    seen, values = visible(inputs), whole_v.repeat_interleave(groups, 1)
    s = torch.where(seen, s, -1e30)
    if inputs.sink is not None:  # one more key, whose V is 0
        sink = inputs.sink.double().requires_grad_()
        leaves.append(sink)
        s = torch.cat([s, sink[:, None, None].expand(*s.shape[:-1], 1)], -1)
        values = torch.cat([values, torch.zeros_like(values[:, :, :1])], 2)
    nothing = torch.zeros(*s.shape[:-1], 1, dtype=torch.float64)
    with sdpa_kernel(SDPBackend.MATH):
        o = sdpa(nothing, torch.zeros_like(values[..., :1]), values, attn_mask=s) * seen.any(-1, keepdim=True)
    lse, dlse = s.logsumexp(-1, keepdim=True), torch.zeros(()) if inputs.dlse is None else inputs.dlse
    upstream = [inputs.do.double(), dlse.double().expand_as(lse)]
    return o.detach(), torch.autograd.grad([o, lse], leaves, upstream)


def through_lse(inputs: AttentionInputs) -> AttentionInputs:
    """The same with a gradient of the log-sum-exp."""
    return replace(inputs, dlse=_draw(*inputs.q.shape[:3], 1))


def _exact(inputs: AttentionInputs) -> tuple[Tensor, list[Tensor]]:
    ref = reference(inputs)
    dsink = sink_gradient(inputs, ref)
    return ref.o, [*reference_gradients(inputs, ref), *([] if dsink is None else [dsink])]


def test_all_that_goes_by_a_value_is_tested_here() -> None:
    assert {feature for features in SETS for feature in asking(features).required_features()} >= set(
        FEATURES[-len(ASKING) :]
    )


each_of_few = pytest.mark.parametrize("features", FEW, ids=lambda features: "+".join(each.name for each in features))


def assert_reference(output: AttentionOutput, inputs: AttentionInputs) -> None:
    """O and the gradients that there are, in fp32."""
    o, exact = _exact(inputs)
    assert torch.allclose(output.o.double(), o, rtol=0.0, atol=2e-6)
    if output.gradients is None:
        return
    made = [output.gradients.dq, output.gradients.dk, output.gradients.dv, output.gradients.dsink]
    for ours, theirs in zip((gradient for gradient in made if gradient is not None), exact, strict=True):
        assert torch.allclose(ours.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("features", SETS, ids=lambda features: "+".join(feature.name for feature in features))
def test_reference_is_what_torch_and_its_autograd_make_of_it(features: tuple[Feature, ...]) -> None:
    for seen in SEEN:
        inputs = asking(features, seen)
        inputs = through_lse(inputs) if seen in ("causal", "blind") else inputs
        o, gradients = _exact(inputs)
        expected, expected_gradients = by_torch(inputs)
        assert torch.allclose(o, expected, rtol=0.0, atol=1e-13)
        for ours, theirs in zip(gradients, expected_gradients, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-11, atol=1e-12)


@each_of_few
@pytest.mark.parametrize(
    "plan",
    ["flash@fp32,tile=4", "flash@fp32,contract=yes,sink=last,tile=5", "lazy@fp32,sink=maximum,base=2,tile=4x5",
     "lazy@fp32,contract=yes,base=2,tile=4x5", "flash@fp32,sink=afterwards,tile=5", "flash_1@fp32,tile=4",
     *(f"flash_1@fp32,sink={entry},tile=4" for entry in ("maximum", "last", "afterwards")),
     "flash_1@fp32,contract=yes,tile=4", "split@fp32,tile=5", "standard,p_bar=fp32,o=fp32,contract=yes"],
)  # fmt: skip
def test_algorithms_in_fp32_are_the_reference(features: tuple[Feature, ...], plan: str) -> None:
    inputs = through_lse(asking(features, "causal"))
    assert_reference(run_declared(parse_declaration(plan), inputs, EmulatedArithmetic(), True), inputs)


@each_of_few
@pytest.mark.parametrize(
    "plan", ["flash@fused,tile=4", "flash@fused,sink=afterwards", "flash@paper,tile=4", "dithered@all_bf16", "standard"]
)
def test_rounded_plans_keep_within_their_bounds(features: tuple[Feature, ...], plan: str) -> None:
    inputs = replace(asking(features, "causal"), formats=Formats.of(BF16))
    batch, declaration = SharedBatch(inputs, reference(inputs)), parse_declaration(plan)
    output = run_declared(declaration, inputs, EmulatedArithmetic(), True)
    share = (output.o.double() - batch.ref.o).abs() / batch.bounds.of(declaration)
    assert 1e-3 < share.max() <= 1.0
    assert batch.outside_values(output.o, declaration) <= 1.0
    assert output.gradients is not None
    bounds = batch.gradient_bounds.of(declaration)
    errors = batch.gradients.errors(output.gradients, bounds, inputs.groups)
    assert all(0.0 < each.faults.over_bound <= 1.0 for each in errors.each)
    if inputs.sink is not None:
        assert output.gradients.dsink is not None
        of_sink = sink_faults(output.gradients.dsink, batch.gradients.sink, bounds.sink)
        assert 0.0 < of_sink.over_bound <= 1.0
        wrong = sink_faults(-output.gradients.dsink, batch.gradients.sink, bounds.sink)
        assert wrong.over_bound > 1.0, "a sign that is wrong is beyond"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window": (-1, 0)}, "window \\(-1, 0\\): its sides are 0 or more keys, or None for all"),
        ({"softcap": -2.0}, "softcap -2.0: expected a positive number, or 0 for none"),
        ({"page_size": 0}, "page size 0: expected 1 key or more"),
    ],
)
def test_values_that_make_no_sense_are_refused(fields: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(PLAIN, **fields)


def test_a_pool_of_pages_has_poison_wherever_no_key_lies() -> None:
    inputs = asking((PAGES,))
    pool = inputs.stored("k")[0]
    assert inputs.block_table is not None
    assert torch.equal(pool[inputs.block_table[1, 0]], inputs.k[1, :, :4])
    assert torch.equal(pool[inputs.block_table[0, 3], :, :1], inputs.k[0, :, 12:])
    assert bool((pool[inputs.block_table[0, 3], :, 1:] == inputs.poison).all())
    assert bool((pool[6] == inputs.poison).all()), "which no sequence has"


def test_a_kernel_that_needs_pages_is_asked_no_call_without(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(q, k, v, block_table, scale=None):\n    return q\n")
    kernel = external_kernel(f"{tmp_path / 'mine.py'}:f")
    assert "--features pages" in str(kernel.missing_requirement(PLAIN))
    assert kernel.missing_requirement(asking((PAGES,))) is None


@pytest.mark.parametrize(("dimensions", "asked"), [(2, ALIBI), (1, OWN_SLOPES)])
def test_slopes_of_a_sequence_are_tried_and_those_of_all_are_taken(
    tmp_path: Path, dimensions: int, asked: Feature
) -> None:
    text = f"assert alibi_slopes is None or alibi_slopes.dim() == {dimensions}"
    (tmp_path / "mine.py").write_text(f"def f(q, k, v, scale=None, alibi_slopes=None):\n    {text}\n    return q\n")
    inputs = replace(asking((asked,)), k=PLAIN.q, v=PLAIN.q, formats=Formats.of(BF16))
    reason = failed_trial(CPU, external_kernel(f"{tmp_path / 'mine.py'}:f"), inputs)
    assert (reason is not None) == (asked is OWN_SLOPES), "a declared parameter that raises is no reason to skip"


def test_a_kernel_that_adds_a_bias_before_its_soft_cap_is_asked_no_other_order(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(q, k, v, softcap=0.0, bias=None):\n    return q\n")
    uncapped, capped = asking((SOFTCAP, BIAS)), asking((CAPPED_BIAS,))
    for flags, refused, taken in (((), capped, uncapped), (("takes=gqa,capped_bias",), uncapped, capped)):
        kernel = external_kernel(f"{tmp_path / 'mine.py'}:f", flags=flags)
        assert kernel.refusal(taken) is None
        assert "soft cap" in str(kernel.refusal(refused))


# Attention of all that goes by a value, as its author would write it: pages of K and V in 8 bits, layout bnhd. Packed
# sequences, each attended to by it; pages without the dimension of a batch.
VALUES = """
import torch
from tiebreak import kernel

@kernel(layout="bnhd", takes="gqa")
def f(q, k, v, causal=False, scale=None, window_size=(-1, -1), softcap=0.0, sinks=None, attn_bias=None,
      alibi_slopes=None, block_table=None, cache_seqlens=None, k_descale=None, v_descale=None):
    def of(x, descale):
        assert x.dtype == (torch.float8_e4m3fn if descale is not None else q.dtype)
        assert descale is None or descale.dtype == torch.float32
        if block_table is not None:
            x = x[block_table.long()].flatten(1, 2)[:, : int(cache_seqlens.max())]
        x = x.float().transpose(1, 2) * (1.0 if descale is None else descale[:, :, None, None])
        return x.repeat_interleave(q.shape[2] // x.shape[1], 1)
    s = q.float().transpose(1, 2) @ of(k, k_descale).mT * scale
    s = s if softcap == 0.0 else softcap * torch.tanh(s / softcap)
    s = s if attn_bias is None else s + attn_bias.float()
    apart = torch.arange(s.shape[-1]) - torch.arange(s.shape[-2])[:, None] - (s.shape[-1] - s.shape[-2])
    if alibi_slopes is not None:
        assert alibi_slopes.dtype == torch.float32
        s = s - alibi_slopes.reshape(-1, s.shape[1], 1, 1) * apart.abs()
    left, right = window_size
    hidden = (apart > 0) & causal
    hidden = hidden | ((apart < -left) if left >= 0 else False) | ((apart > right) if right >= 0 else False)
    s = s.masked_fill(hidden, -1e30)
    if sinks is not None:
        s = torch.cat([s, sinks.float()[None, :, None, None].expand(*s.shape[:-1], 1)], -1)
    p = s.softmax(-1)[..., : s.shape[-1] - (sinks is not None)].masked_fill(hidden, 0.0)
    return (p @ of(v, v_descale)).transpose(1, 2).to(q.dtype)

@kernel(layout="nhd", takes="gqa")
def packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False):
    parts = []
    for i in range(len(cu_seqlens_q) - 1):
        rows, keys = slice(*cu_seqlens_q[i : i + 2]), slice(*cu_seqlens_k[i : i + 2])
        assert rows.stop - rows.start <= max_seqlen_q and keys.stop - keys.start <= max_seqlen_k
        parts.append(f(q[None, rows], k[None, keys], v[None, keys], causal, 8**-0.5)[0])
    return torch.cat(parts)


@kernel(layout="nhd", takes="gqa")
def decoding(q, k, v, block_table=None, seqused_k=None, sinks=None):
    return f(q[None], k, v, scale=8**-0.5, sinks=sinks, block_table=block_table, cache_seqlens=seqused_k)[0]


def cached(q, k, v, causal=False, cache_seqlens=None):
    assert cache_seqlens is None or cache_seqlens.dtype == torch.int32 and len(cache_seqlens) == len(q)
    ends = [k.shape[2]] * len(q) if cache_seqlens is None else cache_seqlens.tolist()
    parts = []
    for i, end in enumerate(ends):
        of = (x[i : i + 1].transpose(1, 2) for x in (q, k[:, :, :end], v[:, :, :end]))
        parts.append(f(*of, causal, 8**-0.5).transpose(1, 2) if end else torch.zeros_like(q[i : i + 1]))
    return torch.cat(parts)


def masked(q, k, v, attn_mask=None):
    s = (q @ k.repeat_interleave(2, 1).mT * 8**-0.5).float()
    s = s.masked_fill(~attn_mask, -1e30)
    return s.softmax(-1).masked_fill(~attn_mask, 0.0).to(q.dtype) @ v.repeat_interleave(2, 1)
"""


@pytest.mark.parametrize(
    ("function", "features"),
    [
        ("f", (VALUE_DIM, WINDOW, SOFTCAP, SINK, BIAS)),
        *(("f", features) for features in ((ALIBI,), (OWN_SLOPES, BIAS), (PAGES,), (DESCALE,), (SINK, PAGES, DESCALE))),
        ("packed", (LENGTHS,)),
        ("decoding", (PAGES,)),
        ("decoding", (PAGES, SINK)),
        ("masked", (WINDOW, LENGTHS, BLOCK_MASK)),
    ],
)
def test_a_users_kernel_is_given_what_its_signature_names(
    tmp_path: Path, function: str, features: tuple[Feature, ...]
) -> None:
    file = tmp_path / "written.py"
    file.write_text(VALUES)
    kernel = external_kernel(f"{file}:{function}", flags=("takes=gqa",) if function == "masked" else ())
    inputs = asking(features, "full" if function == "decoding" else "causal")
    assert kernel.refusal(inputs) is None
    output = kernel.compute(inputs, TorchArithmetic(), True)
    assert_reference(output, inputs)
    assert (output.gradients is None) == bool({PAGES, DESCALE} & set(features))
    refused = set(ASKING) - kernel.takes
    assert refused, "and what it does not name it is refused"
    for feature in refused - {VALUE_DIM, OWN_SLOPES, CAPPED_BIAS}:
        assert kernel.refusal(asking((feature,))) == f"{function} takes no {feature.words}"


FIRST = torch.arange(KEYS) < torch.tensor([[4], [11]])


@pytest.mark.parametrize(
    ("parameters", "asked", "given"),
    [
        ("cache_seqlens=None", {"key_padding": FIRST}, [4, 11]),
        ("seqused_k=None", {"key_padding": FIRST & (torch.arange(BATCH) > 0)[:, None]}, [0, 11]),
        ("cache_seqlens=None", {}, None),
        ("cache_seqlens", {}, [KEYS, KEYS]),
        ("cache_seqlens=None, attn_mask=None", {"key_padding": FIRST}, None),
        ("cache_seqlens=None, block_table=None", {"key_padding": FIRST}, "its cache_seqlens counts keys in pages"),
        ("seqused_k=None, block_table=None, cu_seqlens_k=None", {"key_padding": FIRST}, "its seqused_k counts keys in"),
        ("cache_seqlens=None", {"key_padding": ~FIRST}, "its cache_seqlens counts the first keys, and others are seen"),
        (
            "cache_seqlens=None, causal=False",
            {"key_padding": FIRST, "causal": True},
            "moves a causal mask, a window or a distance",
        ),
        ("cache_seqlens=None, causal=False", {"key_padding": FIRST, "causal": True, "own_ends": True}, [4, 11]),
    ],
    ids=["ends", "blind", "plain", "required", "mask", "unpaged", "packed", "holes", "causal", "own ends"],
)
def test_a_cache_is_given_the_lengths_that_padding_leaves(
    parameters: str, asked: dict[str, Any], given: list[int] | str | None
) -> None:
    attention: dict[str, Any] = {}
    exec(f"def f(q, k, v, {parameters}): ...", attention)
    caller, inputs = Caller(attention["f"], convention(attention["f"], KernelOptions())), replace(PLAIN, **asked)
    reason = caller.missing_requirement(inputs)
    if isinstance(given, str):
        assert given in str(reason)
        return
    assert reason is None
    assert set(inputs.required_features()) <= caller.convention.takes | caller.convention.tried
    keywords = caller.call(inputs).keywords(inputs)
    lengths = [each.tolist() for word, each in keywords.items() if word in KEY_PADDING.keywords]
    assert lengths == ([] if given is None else [given])


@pytest.mark.parametrize("seen", ["full", "causal", "ends", "own ends"])
def test_keys_behind_a_sequences_length_are_not_seen(tmp_path: Path, seen: str) -> None:
    (tmp_path / "written.py").write_text(VALUES)
    kernel = external_kernel(f"{tmp_path / 'written.py'}:cached", flags=("takes=gqa",))
    ends = replace(PLAIN, key_padding=FIRST, causal=seen == "own ends", own_ends=True)
    inputs = ends if "ends" in seen else SEEN[seen](PLAIN)
    assert kernel.refusal(inputs) is None
    assert_reference(kernel.compute(inputs, TorchArithmetic(), True), inputs)
