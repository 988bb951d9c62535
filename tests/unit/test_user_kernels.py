"""Kernels of users in the matrix: sound ones pass and are told which plan they follow, others are told why not.

What wrong ones fall by is tried with planted defects (test_planted_defects.py).
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tiebreak.backends.backend import CPU
from tiebreak.backends.probes import plan_changes
from tiebreak.kernels.external import external_kernel
from tiebreak.matrix.workbench import Settings, Workbench
from tiebreak.reports.records.record import CLAIM, CRASHED, FOLLOWED, FOLLOWS, PREDICTION, UNEXPLAINED, Record, Run
from tiebreak.studies.cells import judged

MatrixRun = Callable[..., pytest.RunResult]
Kept = Callable[..., Run]

KERNELS = '''
"""Attention as users write it; every function is one kernel."""

import torch
from torch.nn.functional import scaled_dot_product_attention

def scores(q, k, causal, scale):
    s = q.float() @ k.float().mT * scale
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return s

def weights(q, k, causal, scale):
    s = scores(q, k, causal, scale)
    return torch.exp(s - s.amax(-1, keepdim=True))

def exact(q, k, v, causal, scale):
    return scores(q, k, causal, scale).softmax(-1) @ v.float()

def precise(q, k, v, *, causal=False, scale=None):
    return exact(q, k, v, causal, scale).to(q.dtype)

def unfused(q, k, v, *, causal=False, scale=None):
    p = weights(q, k, causal, scale)
    return ((p.to(v.dtype) @ v) / p.sum(-1, keepdim=True)).to(q.dtype)

def fused(q, k, v, *, causal=False, scale=None):
    p = weights(q, k, causal, scale)
    return ((p.to(v.dtype).float() @ v.float()) / p.sum(-1, keepdim=True)).to(q.dtype)

def sdpa(q, k, v, *, causal=False, scale=None):
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)

def stochastic(q, k, v, *, causal=False, scale=None):
    """Fused, with a dithered shift and a stochastic cast of O."""
    noise = torch.Generator().manual_seed(1)
    s = scores(q, k, causal, scale)
    u = torch.rand((*s.shape[:-1], 1), generator=noise)
    p = torch.exp(s - s.amax(-1, keepdim=True) - u * 0.6931472)
    o = (p.to(v.dtype).float() @ v.float()) / p.sum(-1, keepdim=True)
    bits = o.view(torch.int32) + torch.randint(0, 1 << 16, o.shape, generator=noise, dtype=torch.int32)
    return (bits & -65536).view(torch.float32).to(q.dtype)

def truncates(q, k, v, *, causal=False, scale=None):
    o = exact(q, k, v, causal, scale)
    return (o.view(torch.int32) & -65536).view(torch.float32).to(q.dtype)

def grouped(q, k, v, *, causal=False, scale=None):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return precise(q, k, v, causal=causal, scale=scale)

def of_key_heads(q, k, v, *, causal=False, scale=None):
    return precise(q[:, : k.shape[1]], k, v, causal=causal, scale=scale)

def unmasked(q, k, v, *, causal=False, scale=None):
    assert not causal
    return grouped(q, k, v, scale=scale)

def square(q, k, v, *, causal=False, scale=None):
    assert not causal or q.shape[2] == k.shape[2], "as many queries as keys"
    return grouped(q, k, v, causal=causal, scale=scale)
'''

# Cases that tell plans apart, one that spans several tiles, and plain numbers.
TELLING = "tied_maxima[k=2],ties_across_blocks,random,overshooting_shift,single_maximum_sink,inexact_ties[r=6],"
TELLING += "tied_p_bar"
FOLLOWED_TEXT = re.compile(r"cpu-(\w+): follows (\S+) \((99\.[5-9]\d|100\.00) % of bits on this machine in 7 cells\)")


pytestmark = pytest.mark.usefixtures("shared_cases")


@pytest.fixture
def judge(matrix: MatrixRun, pytester: pytest.Pytester) -> MatrixRun:
    """Runs the matrix on one of the kernels above."""
    (pytester.path / "mine.py").write_text(KERNELS, encoding="utf-8")

    def run(name: str, *options: str, cases: str = TELLING, heads: int = 32) -> pytest.RunResult:
        return matrix("--kernel", f"mine.py:{name}", "--cases", cases, "--heads", str(heads), *options)

    return run


MASKS, SHAPES = ("random", "random_causal", "random_causal_chunk"), ("random_grouped", "random_odd", "random_wide")


@pytest.mark.parametrize(
    ("kernel", "names", "outcomes", "why"),
    [
        ("precise", SHAPES, "skipped passed passed",
         r"tried with grouped-query heads, it raised RuntimeError: The size of tensor a \(16\) must match the size of"
         r" tensor b \(4\) at non-singleton dimension 1 \(mine.py, line \d+\)"),
        ("of_key_heads", SHAPES, "skipped passed passed",
         r"tried with grouped-query heads, it returned shape \(1, 4, 4, 64\), expected \(1, 16, 4, 64\)"),
        ("unmasked", MASKS, "passed crashed skipped", r"AssertionError: no message \(mine.py"),
        ("square", MASKS, "passed passed skipped",
         r"tried with causal mask of fewer or more queries than keys and d = 32 and 16 queries and 100 keys, it raised"
         r" AssertionError: as many queries as keys \(mine"),
    ],
)  # fmt: skip
def test_what_nobody_has_said_of_a_kernel_is_tried_and_what_computes_is_judged(
    pytester: pytest.Pytester, kernel: str, names: tuple[str, ...], outcomes: str, why: str
) -> None:
    (pytester.path / "mine.py").write_text(KERNELS, encoding="utf-8")
    mine, bench = external_kernel(f"mine.py:{kernel}", "fp32_inside"), Workbench(Settings(heads=16))
    records = [judged(mine, name, bench=bench) for name in names]
    assert " ".join(record.outcome for record in records) == outcomes
    assert re.search(why, "; ".join(reason for record in records for reason in record.reasons))


def test_a_sound_kernel_is_told_its_plan_and_keeps_what_it_is_told(judge: MatrixRun, kept: Kept) -> None:
    plan, result = "flash@fused,tile=one", judge("fused")
    assert result.ret == 0
    match = FOLLOWED_TEXT.search(result.stdout.str())
    assert match is not None
    assert match.group(1, 2) == ("fused", plan)
    explanation = kept().explanations["cpu-fused"]
    assert (explanation.state, explanation.plans) == (FOLLOWS, (plan,))
    held = judge("fused", "--plan", plan, cases="tied_maxima[k=2],sink_tie,random")
    assert held.ret == 0
    assert all(record.passed(PREDICTION) and record.plan == plan for record in kept().records)


@pytest.mark.processor
def test_torchs_own_flash_kernel_follows_the_declared_one(judge: MatrixRun) -> None:
    result = judge("sdpa")
    assert result.ret == 0
    match = FOLLOWED_TEXT.search(result.stdout.str())
    assert match is not None
    # Without vector instructions its exponential is exact at 0 and its plan is `fused`, in its tiles.
    assert match[2] in ("flash@fused_fast_exp", "flash@fused,tile=32x512", "flash@fused,tile=one")


def test_kernel_that_follows_no_plan_is_unexplained_and_held_to_the_loosest(judge: MatrixRun, kept: Kept) -> None:
    result = judge("truncates", cases="tied_maxima[k=2],sink_tie,random")
    assert result.ret == 1
    bits = r"\d\d\.\d\d % of bits on this machine in 3 cells \(.*\)"
    nearest = rf"unexplained: no known plan agrees; nearest is \S+ with {bits}"
    result.stdout.re_match_lines([f"cpu-truncates: {nearest}"])
    assert kept().explanations["cpu-truncates"].state == UNEXPLAINED
    (why,) = (record.answers["accuracy"].why for record in kept().records if record.case == "random")
    held_to = "the loosest plan of random bits"
    assert re.fullmatch(rf"mean square \S+ times what {held_to} has .*; bias -0\.\d\d ulp .* from what .*", why)


def equal_bits(record: Record) -> float:
    share = record.number("equal_bits")
    assert share is not None
    return share


@pytest.mark.processor
def test_a_plan_without_tiles_is_of_the_kernels_own_and_another_fails(judge: MatrixRun, kept: Kept) -> None:
    """In one tile the maxima of `growing_maximum` are not the first thing in O-bar, and nothing is claimed of that."""
    products, cases = plan_changes(CPU.arithmetic, CPU.device), "growing_maximum,ties_across_blocks"
    result = judge("unfused", "--plan", ",".join(("paper", *products)), cases=cases)
    assert result.ret == 0
    assert all(record.passed(PREDICTION) and equal_bits(record) >= FOLLOWED for record in kept().records)
    assert judge("unfused", "--plan", "flash@paper,tile=64", cases=cases).ret == 1
    assert all(equal_bits(record) < FOLLOWED for record in kept().records)
    assert judge("unfused", "--plan", "fused", cases="tied_maxima[k=2]").ret == 1
    (record,) = kept().records
    failed = r"not what \S+@fused predicts: bias \S+ \+- \S+ ulp measured, bias .* emulated"
    assert re.search(failed, " ".join(record.reasons))


@pytest.mark.parametrize("plan", [(), ("--plan", "fair")], ids=["undeclared", "declared"])
def test_a_fair_kernel_is_fair_and_told_that_its_random_bits_are_its_own(
    judge: MatrixRun, kept: Kept, plan: tuple[str, ...]
) -> None:
    result = judge("stochastic", "--fair", *plan, cases="tied_maxima[k=2],sink_tie", heads=256)
    assert result.ret == 0
    claims = [record.answers[CLAIM] for record in kept().records if CLAIM in record.answers]
    assert [claim.source for claim in claims] == ["--fair: no bias on any failure input"] * 2
    assert all(claim.passed for claim in claims)
    if not plan:
        told = r"cpu-stochastic: behaves like .*fair.* in 2 cells \(its random bits are its own\)"
        result.stdout.re_match_lines([told])


def test_a_correctly_rounded_output_is_no_worse_than_itself_though_it_is_not_fair(judge: MatrixRun, kept: Kept) -> None:
    """On a sink O's own ties break to one side; a kernel that rounds O-bar too is biased where they do not."""
    cases = "tied_maxima[k=2],sink_tie"
    precise, unfused = ("precise", "--plan", "fp32_inside"), ("unfused", "--plan", "paper")  # not looked for
    assert judge(*precise, "--fair", cases=cases).ret == 1
    assert {record.case: record.tied for record in kept().records} == {"tied_maxima[k=2]": None, "sink_tie": True}
    assert judge(*precise, "--no-worse-than", "rounded", cases=cases).ret == 0
    assert all("no more bias than a correctly rounded O" in cell.answers[CLAIM].asked for cell in kept().records)
    assert judge(*unfused, "--no-worse-than", "rounded", cases=cases).ret == 1
    assert [record.tied for record in kept().records] == [False, False]
    (reason,) = (record.reasons[0] for record in kept().records if record.case == "tied_maxima[k=2]")
    assert re.search(r"claim failed: .* bias \+0\.2\d\d .* measured, bias -0\.0\d\d .* of O rounded once", reason)


@pytest.mark.parametrize(("wrong", "failed"), [("", set()), ("dq = 2 * dq", {"gradients"})])
def test_a_kernel_of_one_head_dimension_is_asked_all_in_it(tmp_path: Path, wrong: str, failed: set[str]) -> None:
    """Columns of zeros come first, and q is twice as large: the scores of d = 64, in a kernel that has 256 alone."""
    (tmp_path / "wide.py").write_text(WIDE.replace("pass  # wrong", wrong or "pass"), encoding="utf-8")
    mine = external_kernel(f"{tmp_path}/wide.py:wide", None, ("head_dims=[256]",))
    for name in ("sink_tie", "random"):
        record = judged(mine, name)
        assert {check for check, answer in record.answers.items() if answer.passed is False} == failed, record.reasons


@pytest.mark.parametrize(("dims", "hint"), [("256,", "head_dims=[256]"), ("64, 96", None), ("80,", None)])
def test_a_kernel_that_raises_at_the_usual_head_dimension_alone_is_told_what_to_declare(
    tmp_path: Path, dims: str, hint: str | None
) -> None:
    narrow = (
        "if q.shape[-1] not in (DIMS): raise ValueError('no such d')\n    if q.shape[2] < 128: raise ValueError('few')"
    )
    source = f"import torch\ndef f(q, k, v):\n    {narrow}\n    return q @ k.mT @ v\n".replace("DIMS", dims)
    (tmp_path / "narrow.py").write_text(source, encoding="utf-8")
    mine = external_kernel(f"{tmp_path}/narrow.py:f", None)
    record = judged(mine, "no_tail")
    assert record.outcome == CRASHED
    first = record.reasons[0].partition("; ")[0]
    assert (hint in first) if hint else "head_dims" not in record.reasons[0]


WIDE = """
import torch


class Wide(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal):
        assert q.shape[-1] == 256
        s = q.float() @ k.float().mT / 16
        if causal:
            s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(s.shape[-1] - s.shape[-2] + 1), -torch.inf)
        p = torch.softmax(s, -1)
        ctx.save_for_backward(q, k, v, p)
        return (p.to(v.dtype).float() @ v.float()).to(q.dtype)

    @staticmethod
    def backward(ctx, do):
        q, k, v, p = ctx.saved_tensors
        dv = p.to(v.dtype).float().mT @ do.float()
        dp = do.float() @ v.float().mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) / 16
        dq, dk = ds @ k.float(), ds.mT @ q.float()
        pass  # wrong
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None


def wide(q, k, v, *, causal=False):
    return Wide.apply(q, k, v, causal)
"""
