"""A kernel that someone else wrote: how it is found and called, and the contract that it is held to."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tiebreak.backends.backend import CPU
from tiebreak.kernels.external import LoadError, external_kernel
from tiebreak.kernels.external.loading import load
from tiebreak.kernels.features import (
    BLIND_ROWS,
    BLOCK_MASK,
    CAUSAL,
    GROUPED,
    KEY_PADDING,
    LENGTHS,
    OBLONG_CAUSAL,
    OWN_ENDS,
    OWN_SCALE,
    VALUE_DIM,
    WINDOW,
    Feature,
)
from tiebreak.kernels.formats import BF16, FP16, FP32, Format, Formats
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import CannotRunError, Kernel
from tiebreak.kernels.reference import reference

# Attention in fp32 in the suite's own layout, for all the signatures around it.
FILE = """
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from tiebreak import kernel

def plain(q, k, v, *, causal=False, scale=None):
    s = q.float() @ k.float().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + s.shape[-1] - s.shape[-2]), -torch.inf)
    return (s.softmax(-1) @ v.float()).to(q.dtype)

"""

# Which looks its module up as it is executed.
POSTPONED = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Size:
    n: int = 1
"""
BY_MASK = (OWN_ENDS, WINDOW, LENGTHS, BLOCK_MASK)  # what a mask of scores says too


@pytest.fixture
def loaded(tmp_path: Path) -> Callable[..., Kernel]:
    """A kernel of a file that ends with these lines."""

    def load(source: str, *flags: str) -> Kernel:
        file = tmp_path / f"written_{len(list(tmp_path.iterdir()))}.py"
        file.write_text(FILE + source)
        return external_kernel(f"{file}:f", flags=flags)

    return load


def inputs(
    queries: int = 8, keys: int = 8, *, groups: int = 1, causal: bool = False, fmt: Format = BF16
) -> AttentionInputs:
    generator = torch.Generator().manual_seed(1)

    def draw(heads: int, n: int) -> Tensor:
        return torch.randn(2, heads, n, 16, generator=generator).to(TORCH_DTYPES[fmt]).float()

    q, do, k, v = draw(4, queries), draw(4, queries), draw(4 // groups, keys), draw(4 // groups, keys)
    return AttentionInputs(q, k, v, do, Formats.of(fmt), causal=causal)


def run(kernel: Kernel, call: AttentionInputs, *, gradients: bool = False) -> AttentionOutput:
    assert kernel.refusal(call) is None
    return CPU.run(kernel, call, gradients=gradients)


def returned(output: AttentionOutput) -> tuple[Tensor, ...]:
    assert output.gradients is not None
    return output.o, output.gradients.dq, output.gradients.dk, output.gradients.dv


def assert_right(output: AttentionOutput, call: AttentionInputs) -> None:
    """To within the roundings of P-bar and O to bf16; a wrong mask, scale or order of dimensions is far beyond."""
    expected = reference(call).o
    assert (output.o - expected).norm() < 2**-8 * expected.norm()


@pytest.mark.parametrize(
    ("source", "takes"),
    [
        ("f = plain", {CAUSAL, OBLONG_CAUSAL, BLIND_ROWS, OWN_SCALE}),
        ("def f(q, k, v): return plain(q, k, v)", set()),
        ("def f(query, key, value, sm_scale=None): return plain(query, key, value, scale=sm_scale)", {OWN_SCALE}),
        ("def f(q, k, v, causal, sm_scale): return plain(q, k, v, causal=causal, scale=sm_scale)",
         {CAUSAL, OBLONG_CAUSAL, BLIND_ROWS, OWN_SCALE}),
        ("def f(q, k, v, causal=False, /, scale=None): return plain(q, k, v, causal=causal, scale=scale)",
         {CAUSAL, OBLONG_CAUSAL, BLIND_ROWS, OWN_SCALE}),
        ("def f(q, k, v, softmax_scale=None, is_causal=False):\n"
         "    return sdpa(q, k, v, scale=softmax_scale, is_causal=is_causal)", {CAUSAL, OBLONG_CAUSAL, OWN_SCALE}),
        ("def f(q, k, v, **more): return plain(q, k, v, **more)", {CAUSAL, OBLONG_CAUSAL, BLIND_ROWS, OWN_SCALE}),
        ("def f(q, k, v, attn_mask=None): return sdpa(q, k, v, attn_mask=attn_mask)",
         {CAUSAL, OBLONG_CAUSAL, KEY_PADDING, BLIND_ROWS, *BY_MASK}),
        ("f = kernel(refuses='blind_rows, oblong_causal')(plain)", {CAUSAL, OWN_SCALE}),
        ("f = sdpa", {CAUSAL, OBLONG_CAUSAL, KEY_PADDING, BLIND_ROWS, *BY_MASK, OWN_SCALE, GROUPED}),
        ("def f(q, k, v, out, scale=None): out.copy_(plain(q, k, v, scale=scale))", {OWN_SCALE}),
        ("def f(q, k, v, out, /, causal=False): return out.copy_(plain(q, k, v, causal=causal)), 0",
         {CAUSAL, OBLONG_CAUSAL, BLIND_ROWS}),
        ("f = kernel(takes='gqa')(lambda q, k, v: sdpa(q, k, v, enable_gqa=True))", {GROUPED}),
    ],
    ids=["suite", "bare", "triton", "required", "by position", "torch flags", "anything", "mask",
         "refused", "sdpa", "written into", "beside more", "said"],
)  # fmt: skip
def test_what_a_kernel_takes_follows_from_its_signature(
    loaded: Callable[..., Kernel], source: str, takes: set[Feature]
) -> None:
    kernel = loaded(source)
    assert kernel.takes == takes | {GROUPED, VALUE_DIM}, "which are tried"
    calls = [
        inputs(),
        inputs(causal=True),
        inputs(4, 8, causal=True),
        inputs(groups=2),
        replace(inputs(), softmax_scale=0.3),
        replace(inputs(), key_padding=torch.tensor([[True] * 5 + [False] * 3, [True] * 8])),
    ]
    ran = [
        call for call in calls if kernel.refusal(call) is None and GROUPED not in set(call.required_features()) - takes
    ]
    assert len(ran) == sum(set(call.required_features()) <= takes for call in calls)
    for call in ran:
        assert_right(run(kernel, call), call)


@pytest.mark.parametrize("layout", ["bnhd", "bhdn", "hnd", "nhd", "nd"])
def test_a_kernel_gets_contiguous_tensors_in_its_layout(loaded: Callable[..., Kernel], layout: str) -> None:
    order = [layout.index(letter) for letter in "bhnd" if letter in layout]
    back = [[letter for letter in "bhnd" if letter in layout].index(letter) for letter in layout]
    kernel = loaded(
        f"def f(q, k, v, *, causal=False, scale=None):\n"
        f"    assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()\n"
        f"    return plain(*(x.permute({order}) for x in (q, k, v)), causal=causal, scale=scale).permute({back})",
        f"layout={layout}",
        *(["takes=gqa"] if layout == "nd" else []),
    )
    for call in (inputs(4, 8), inputs(causal=True), *([inputs(groups=2)] if layout == "nd" else [])):
        plain = run(loaded("f = plain"), replace(call, k=call.expanded_k(), v=call.expanded_v()), gradients=True)
        for ours, theirs in zip(returned(run(kernel, call, gradients=True))[:2], returned(plain), strict=False):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("what", ["o, None", "[o]", "o.requires_grad_()"])
def test_o_is_what_is_returned_or_the_first_of_it_without_its_graph(loaded: Callable[..., Kernel], what: str) -> None:
    output = run(loaded(f"def f(q, k, v):\n    o = plain(q, k, v)\n    return {what}"), inputs())
    assert_right(output, inputs())
    assert not output.o.requires_grad


def test_autograds_apply_is_called_by_position(loaded: Callable[..., Kernel]) -> None:
    """As the tutorials' Triton kernels are: a function of (ctx, q, k, v, causal, sm_scale, ...)."""
    kernel = loaded(
        "class Attention(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, q, k, v, causal, stages=2, sm_scale=None, warps=4):\n"
        "        assert (stages, warps) == (2, 4)\n"
        "        ctx.save_for_backward(q, k, v)\n"
        "        return plain(q, k, v, causal=causal, scale=sm_scale)\n"
        "    @staticmethod\n"
        "    def backward(ctx, do):\n"
        "        return (*(x * 0 + 3 for x in ctx.saved_tensors), None, None, None)\n"
        "f = Attention.apply"
    )
    call = replace(inputs(causal=True), softmax_scale=0.3)
    output = run(kernel, call, gradients=True)
    assert_right(output, call)
    assert set(returned(output)[2].flatten().tolist()) == {3.0}


def test_a_declared_backward_function_is_called(loaded: Callable[..., Kernel]) -> None:
    kernel = loaded(
        "def gradients(do, q, k, v, o, *, causal, scale):\n"
        "    assert (o == plain(q, k, v, causal=causal, scale=scale)).all()\n"
        "    return do * 2, k * 3, v * 4\n"
        "@kernel(backward=gradients, name='other')\n"
        "def f(q, k, v, *, causal=False, scale=None):\n"
        "    with torch.no_grad():\n"
        "        return plain(q, k, v, causal=causal, scale=scale)"
    )
    call = inputs(causal=True)
    _, dq, _, dv = returned(run(kernel, call, gradients=True))
    assert kernel.name == "other"
    assert torch.equal(dq, call.do * 2)
    assert torch.equal(dv, (call.v.bfloat16() * 4).float())


def test_a_kernel_that_autograd_does_not_know_has_no_gradients(loaded: Callable[..., Kernel]) -> None:
    kernel = loaded("@torch.no_grad()\ndef f(q, k, v): return plain(q, k, v)")
    output = run(kernel, inputs(), gradients=True)
    assert_right(output, inputs())
    assert output.gradients is None


@pytest.mark.parametrize(
    ("flags", "call"),
    [
        (("square=true",), inputs(4, 8)),
        (("multiple_of=16",), inputs(4, 16)),
        (("multiple_of=16",), inputs(12, 12, causal=True)),
        (("square=true", "multiple_of=16"), inputs(4, 16)),
        (("square=true", "multiple_of=16"), inputs(6, 12, causal=True)),
        (("multiple_of=16",), inputs(6, 12, causal=True)),
        (("multiple_of=16",), inputs(4, 12)),
        (("square=true",), inputs(8, 4)),
    ],
)
def test_dummy_rows_change_no_bit_of_the_others(
    loaded: Callable[..., Kernel], flags: tuple[str, ...], call: AttentionInputs
) -> None:
    """A kernel that refuses what it was not made for gives the bits of one that takes anything.

    Its own loop adds key by key, so that a hidden key adds an exact 0.
    """
    body = (
        "def f(q, k, v, *, causal=False, scale=None, attn_mask=None):\n"
        f"    flags = {flags!r}\n"
        "    n, m = q.shape[2], k.shape[2]\n"
        "    if 'multiple_of=16' in flags: assert n % 16 == 0 and m % 16 == 0\n"
        "    if 'square=true' in flags: assert n == m\n"
        "    s = (q.float()[:, :, :, None] * k.float()[:, :, None]).sum(-1) * scale\n"
        "    if causal:\n"
        "        s = s.masked_fill(torch.ones(n, m, dtype=torch.bool).triu(1 + m - n), -torch.inf)\n"
        "    if attn_mask is not None:\n"
        "        s = s.masked_fill(~attn_mask, -torch.inf)\n"
        "    p = torch.exp(s - s.amax(-1, keepdim=True))\n"
        "    o, l = 0.0, 0.0\n"
        "    for j in range(m):\n"
        "        o, l = o + p[..., j, None] * v.float()[:, :, None, j], l + p[..., j, None]\n"
        "    return (o / l).to(q.dtype)\n"
    )
    free = run(loaded(body.replace(f"flags = {flags!r}", "flags = ()")), call, gradients=True)
    bound = run(loaded(body, *flags), call, gradients=True)
    for ours, theirs in zip(returned(bound), returned(free), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("source", "flags", "call", "message"),
    [
        ("f = plain", ("multiple_of=16",), inputs(4, 12), "12 keys are no multiple of 16, and it has no attn_mask to"),
        ("f = plain", ("square=true",), inputs(8, 4), "as many keys as queries, 4 are not 8, and it has no attn_mask"),
        ("f = plain", ("head_dims=[4, 8]",), inputs(), "it has head dimensions 4, 8, not 16"),
        ("f = plain", ("square=true",), inputs(8, 4, causal=True), "a row without a visible key is no row of a square"),
        ("f = plain", ("multiple_of=16",), inputs(4, 12), "every row last in a causal sequence (docs/your-kernel.md#"),
    ],
)
def test_what_no_dummies_can_meet_is_refused(
    loaded: Callable[..., Kernel], source: str, flags: tuple[str, ...], call: AttentionInputs, message: str
) -> None:
    assert message in str(loaded(source, *flags).refusal(call))


@pytest.mark.parametrize("call", [inputs(4, 8), inputs(causal=True), inputs(4, 8, causal=True)])
def test_the_pages_wrapper_makes_a_kernel_that_is_always_causal_one_of_all_calls(
    loaded: Callable[..., Kernel], call: AttentionInputs
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "your-kernel.md").read_text("utf-8")
    (wrapper,) = re.findall(r"```python\n(def attention\(q, k, v, is_causal\):\n.*?)```", page, re.DOTALL)
    always = "def always_causal(q, k, v):\n    return sdpa(q, k, v, is_causal=True)\n"
    kernel = loaded(f"{always}{wrapper}f = attention")
    assert_right(run(kernel, call), call)


@pytest.mark.parametrize(
    ("source", "flags", "message"),
    [
        ("def f(q, k): pass", (), "expected a function of (q, k, v, ...), this one has 2 parameters by position"),
        ("def f(q, k, v, workspace): pass", (), "its parameter 'workspace' has no default"),
        ("f = plain", ("layout=bhn",), "--declare: layout 'bhn': expected the letters b, h, n and d"),
        ("f = plain", ("takes=flying",), "--declare: takes 'flying': known are causal, gqa, "),
        ("f = plain", ("mood=good",), "--declare: unknown word 'mood'; known are layout, takes, "),
        ("f = plain", ("square",), "--declare square: expected WORD=VALUE, such as layout=bnhd"),
        ("f = plain", ("multiple_of=-1",), "--declare: multiple_of -1: expected a positive integer"),
        ("f = plain", ("square=7",), "--declare: square = 7: expected bool"),
        ("f = plain", ("head_dims=[0]",), "--declare: head_dims [0]: expected integers from 1 to 1024"),
        ("f = plain", ("head_dims=[]",), "--declare: head_dims []: expected integers from 1 to 1024, at least one"),
        ("f = plain", ("head_dims=[64, 100000]",), "--declare: head_dims [64, 100000]: expected integers from 1 to"),
        ("f = plain", ("backward=maybe",), "--declare: backward 'maybe': expected autograd, none or a function"),
        ("f = plain", ("options.size=1",), "it has no parameter 'size'; after q, k and v it has causal, scale"),
        ("f = plain", ("plan=best",), "plan best: unknown"),
        ("f = kernel(mood='good')(plain)", (), "@kernel: unknown word 'mood'"),
        ("f = plain", ("takes=softcap",), "takes 'softcap': it has no parameter softcap or logits_soft_cap"),
    ],
)  # fmt: skip
def test_what_can_not_be_met_is_told_in_one_line(
    loaded: Callable[..., Kernel], source: str, flags: tuple[str, ...], message: str
) -> None:
    with pytest.raises(LoadError, match=re.escape(message)) as caught:
        loaded(source, *flags)
    assert str(caught.value).startswith("--kernel ")
    assert "\n" not in str(caught.value)


def test_options_are_passed_as_they_are(loaded: Callable[..., Kernel]) -> None:
    source = "def f(q, k, v, blocks, mode=''):\n    assert (blocks, mode) == (64, 'fast')\n    return plain(q, k, v)"
    assert_right(run(loaded(source, "options.blocks=64", "options.mode=fast"), inputs()), inputs())


def test_modules_beside_a_file_packages_and_the_only_function_of_a_file_are_found(tmp_path: Path) -> None:
    package = tmp_path / "a_package_of_kernels"
    package.mkdir()
    for path, text in {
        package / "__init__.py": "",
        package / "inner.py": FILE,
        package / "outer.py": "from .inner import plain as f\n",
        tmp_path / "sibling_of_a_kernel.py": f"{POSTPONED}{FILE}",
        tmp_path / "beside.py": "from sibling_of_a_kernel import plain as f\n",
        tmp_path / "inner_alone.py": FILE,
        tmp_path / "two.py": FILE + "def other(q, k, v): pass\n",
    }.items():
        path.write_text(text)
    for target in (tmp_path / "beside.py", package / "outer.py"):
        assert_right(run(external_kernel(f"{target}:f"), inputs()), inputs())
    assert load(f"{tmp_path / 'sibling_of_a_kernel.py'}:plain").__name__ == "plain"
    assert load("torch.nn.functional:scaled_dot_product_attention") is scaled_dot_product_attention
    assert external_kernel(str(tmp_path / "inner_alone.py")).name == "plain"
    with pytest.raises(LoadError, match=r"name the function, as in .*two\.py:NAME; it has other, plain"):
        external_kernel(str(tmp_path / "two.py"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        *(
            (spec, "expected path/to/file.py:function, package.module:function or the name of")
            for spec in ("", ":", "kernel.py:", ":function", "package.module")
        ),
        ("folder", "a folder: name a file in it, expected path/to/file.py:function"),
        ("./folder", "a folder: "),
        ("folder/:attention", "a folder: "),
        ("folder:attention", "a folder: "),
        ("flash_atn", "no adapter 'flash_atn': did you mean flash_attn? known are aiter, "),
        ("hf:flash", "no adapter 'hf:flash': "),
        ("mine", "xformers; one of your own is path/to/file.py:function"),
        ("no_such_package.module:f", "ModuleNotFoundError"),
        ("sound_kernel.py:absent", "has no function 'absent'; its functions are plain"),
        ("sound_kernel.py:kernel.nothing", "has no function 'kernel.nothing'; its functions are plain"),
    ],
)
def test_what_can_not_be_found_is_told_with_what_is_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sound_kernel.py").write_text(FILE)
    (tmp_path / "folder").mkdir()
    with pytest.raises(LoadError, match=re.escape(message)) as caught:
        external_kernel(spec)
    assert str(caught.value).startswith(f"--kernel {spec}: ")


@pytest.mark.parametrize("fmt", [BF16, FP16, FP32], ids=lambda fmt: fmt.name)
def test_a_kernel_gets_tensors_of_the_format_of_which_all_bits_are_looked_at(
    loaded: Callable[..., Kernel], fmt: Format
) -> None:
    call = inputs(causal=True, fmt=fmt)
    q, k, v = (tensor.to(TORCH_DTYPES[fmt]) for tensor in (call.q, call.k, call.v))
    o = run(loaded("def f(q, k, v, causal): return sdpa(q, k, v, is_causal=causal)"), call).o
    assert o.dtype == torch.float32
    assert torch.equal(o, scaled_dot_product_attention(q, k, v, is_causal=True).float())
    call = inputs(fmt=fmt)
    call.v[0, 0, 0, 0], call.q[0, 0, 0, 0] = 0.0, torch.nan  # a NaN that is left alone is no change
    before = call.v.clone()
    with pytest.raises(CannotRunError, match="changed its input v"):
        run(loaded("def f(q, k, v):\n    v[0, 0, 0, 0] = -0.0\n    return q.clone()"), call)
    assert torch.equal(call.v, before)
    assert torch.equal(run(loaded("def f(q, k, v): return q.clone()"), call).o.isnan(), call.q.isnan())


@pytest.mark.parametrize(
    ("body", "broken"),
    [
        ("return ()", "returned tuple, not a tensor"),
        ("return q", "returned a view of its input q"),
        ("return v[:].unflatten(3, (4, 4)).flatten(3)", "returned a view of its input v"),
        ("raise SystemExit(3)", "called sys.exit(3)"),
        ("return {'o': q}", "returned dict, not a tensor"),
        ("return q[..., :8]", "returned shape (2, 4, 8, 8), expected (2, 4, 8, 16)"),
        ("return q.float()", "returned torch.float32, expected torch.bfloat16"),
        ("return q.to('meta')", "returned a tensor on meta, expected cpu"),
        ("q *= 2; return q.clone()", "changed its input q"),
        ("k[0, 0, 0, 0] = torch.nan; return q.clone()", "changed its input k"),
    ],
)
def test_a_broken_contract_is_named(loaded: Callable[..., Kernel], body: str, broken: str) -> None:
    with pytest.raises(CannotRunError, match=f"^{re.escape(broken)}$"):
        run(loaded("def f(q, k, v):\n    " + body), inputs())


@pytest.mark.parametrize(
    ("keys", "groups", "body", "declared", "noted"),
    [
        (6, 1, "return q.transpose(-2, -3) @ k", (), "bnhd"),
        (8, 1, "return q.transpose(-2, -3) @ k", (), ""),
        (6, 1, "return q.transpose(-2, -3) @ k", ("layout=hnd",), ""),
        (6, 2, "return q @ k.mT", (), ""),
        (6, 1, "raise ValueError('my kernel says no')", (), ""),
        (6, 1, "b, n, h = q.shape", (), "bnhd"),
        (6, 1, "return q.transpose(-2, -3) @ k", ("cu_seqlens_q", "cu_seqlens_k"), "nhd"),
    ],
    ids=["undeclared", "any order fits", "declared", "grouped heads", "of something else", "of its own", "packed"],
)
def test_a_kernel_that_raises_on_shapes_is_told_of_the_layout(
    loaded: Callable[..., Kernel], keys: int, groups: int, body: str, declared: tuple[str, ...], noted: str
) -> None:
    more = "".join(f", {word}" for word in declared if "=" not in word)
    kernel = loaded(f"def f(q, k, v{more}): {body}", *(word for word in declared if "=" in word))
    with pytest.raises((RuntimeError, ValueError)) as caught:
        run(kernel, inputs(8, keys, groups=groups))
    notes = getattr(caught.value, "__notes__", [])
    assert [note.rpartition("--declare layout=")[2] for note in notes] == ([noted] if noted else [])


@pytest.mark.parametrize(
    ("dims", "factor", "scale"),
    [([16], 1.0, None), ([64], 2.0, None), ([32], 1.0, 0.25), ([144], 1.0, 0.25), ([32, 64], 1.0, 0.25)],
)
def test_a_larger_head_dimension_keeps_the_scores(
    loaded: Callable[..., Kernel], dims: list[int], factor: float, scale: float | None
) -> None:
    """In 64 q is doubled; in 32 and in 144, whose root of the ratio is no power of two, the scale is given."""
    mine, call = loaded("f = plain", f"head_dims={dims}"), inputs()
    arranged = mine.caller.arranged(call)  # type: ignore[attr-defined]
    wide = arranged.inputs
    assert (wide.q.shape[3], arranged.factor, wide.softmax_scale) == (min(dims), factor, scale)
    now, before = (each.q.double() @ each.k.double().mT * each.scale for each in (wide, call))
    torch.testing.assert_close(now, before, rtol=1e-13, atol=1e-13)  # fp64, in any order of summation
