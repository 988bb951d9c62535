"""Every kernel of the suite that a CPU runs, on inputs that nobody chose, put through the very checks of the matrix.

An example is written down as a captured layer that says it is made, and run as `--captured` runs it. One that fails is
shrunk and stays in `out/fuzz-...`, with the command that runs it again. `--hypothesis-profile=long` draws more of them.
"""

import itertools
import math
import os
import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from safetensors.torch import save_file
from torch import Tensor

from tiebreak.backends.backend import CPU, EMULATION, Backend
from tiebreak.cases.bounds import UNDECLARED
from tiebreak.cases.captured import captured_cases
from tiebreak.cases.case import Case
from tiebreak.kernels.external import external_kernel
from tiebreak.kernels.formats import BF16, FP16, FP32, Format
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionInputs
from tiebreak.kernels.kernel import Declaration, Kernel
from tiebreak.kernels.plans import PLANS, Accumulator
from tiebreak.kernels.roster import composed_kernel
from tiebreak.kernels.shift_rules import OFFSET
from tiebreak.matrix.checks import checks
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.experiments.call import OneCall
from tiebreak.matrix.run import run_cell
from tiebreak.matrix.workbench import Settings, SharedBatch, Workbench
from tiebreak.reports.records import store
from tiebreak.reports.records.record import FAILED, Record
from tiebreak.reports.terminal import runnable

FORMATS = {"bf16": BF16, "fp16": FP16}
FROM_ANYWHERE = ("-p", "tiebreak.matrix.plugin", "--pyargs", "tiebreak.matrix")
TENSORS = ("q", "k", "v", "do")


@dataclass(frozen=True)
class Example:
    """What is drawn; the simplest comes first in everything, so that shrinking ends there."""

    fmt: str
    key_heads: int
    groups: int
    queries: int
    keys: int
    d: int
    causal: bool
    visible: tuple[bool, ...] | None  # by key, repeated; None: no padding
    order: str  # in memory
    scale: float | None
    repeated: int  # keys that equal the first
    signed: bool  # whether V has both signs
    exponents: tuple[int, int, int, int]  # of the sizes of q, k, v and dO
    planted: tuple[tuple[str, int, float], ...]  # tensor, place, value
    seed: int

    def tensors(self) -> dict[str, Tensor]:
        """q, k, v and dO in the format of the example."""
        rng = np.random.default_rng(self.seed)
        heads = self.key_heads * self.groups
        shapes = dict.fromkeys(("k", "v"), (1, self.key_heads, self.keys, self.d))
        shapes |= dict.fromkeys(("q", "do"), (1, heads, self.queries, self.d))
        drawn = {}
        for name, exponent in zip(TENSORS, self.exponents, strict=True):
            normal = torch.from_numpy(rng.standard_normal(shapes[name])).clamp(-4, 4)
            if name == "v" and not self.signed:
                normal = normal.abs()
            if name == "k":
                normal[:, :, 1 : 1 + self.repeated] = normal[:, :, :1]
            drawn[name] = (normal * 2.0**exponent).to(TORCH_DTYPES[FORMATS[self.fmt]])
        for name, place, value in self.planted:
            flat = drawn[name].view(-1)
            flat[place % flat.numel()] = value
        return drawn

    def write(self, folder: Path) -> Case:
        """Keep it as a captured layer; the case that `--captured` makes of it."""
        tensors = {f"layer0.{name}": tensor.contiguous() for name, tensor in self.tensors().items()}
        if self.visible is not None:
            visible = list(itertools.islice(itertools.cycle(self.visible), self.keys))
            tensors["layer0.key_padding"] = torch.tensor(visible, dtype=torch.uint8)
        metadata = {"step": "0", "causal": str(self.causal).lower(), "layer0.made": "true", "layer0.order": self.order}
        metadata |= {} if self.scale is None else {"scale": repr(self.scale)}
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "inputs-000000.safetensors", metadata)
        (case,) = captured_cases(folder)
        return case


def sizes(fmt: str) -> st.SearchStrategy[tuple[int, int, int, int]]:
    """Exponents of q, k, v and dO, from below the smallest normal number to near the largest."""
    low, high = FORMATS[fmt].min_exponent - 3, FORMATS[fmt].max_exponent - 3
    wild = st.one_of(st.integers(-3, 3), st.integers(low, high))
    return st.tuples(wild, wild, wild, wild)


@st.composite
def examples(draw: st.DrawFn) -> Example:
    """Inputs of every feature that a kernel may say it takes, one call each."""
    fmt = draw(st.sampled_from(list(FORMATS)))
    plant = st.tuples(
        st.sampled_from(TENSORS), st.integers(0, 2**12), st.sampled_from([math.inf, -math.inf, math.nan, 0.0])
    )
    return Example(
        fmt=fmt,
        key_heads=draw(st.integers(1, 3)),
        groups=draw(st.integers(1, 3)),
        queries=draw(st.one_of(st.integers(1, 9), st.integers(1, 140))),
        keys=draw(st.one_of(st.integers(1, 9), st.integers(1, 300))),
        d=draw(st.sampled_from([1, 2, 7, 8, 16, 33, 64])),
        causal=draw(st.booleans()),
        visible=draw(st.none() | st.lists(st.booleans(), min_size=1, max_size=9).map(tuple)),
        order=draw(st.sampled_from(["bhnd", "bnhd", "bhdn"])),
        scale=draw(st.sampled_from([None, 1.0, 2.0**-7, 0.3, 5.0])),
        repeated=draw(st.integers(0, 3)),
        signed=draw(st.booleans()),
        exponents=draw(st.one_of(st.just((0, 0, 0, 0)), sizes(fmt))),
        planted=draw(st.one_of(st.just(()), st.lists(plant, min_size=1, max_size=2).map(tuple))),
        seed=draw(st.integers(0, 2**16)),
    )


def largest(x: Tensor) -> float:
    """The largest finite size."""
    return x.abs().nan_to_num(nan=0.0, posinf=0.0).max().item()


def shifted_away(inputs: AttentionInputs, declaration: Declaration) -> bool:
    """Whether a rule may shift a row farther from its maximum than `fixed_offset` does.

    P-bar then underflows. That is the harm that such a rule does; cases of its own claim it.
    """
    rule = declaration.shift_rule
    scores = inputs.q.shape[3] * largest(inputs.q) * largest(inputs.k) * inputs.scale
    return scores * max(abs(rule.above - 1.0), abs(rule.below - 1.0)) > OFFSET


def forward_sizes(inputs: AttentionInputs, declaration: Declaration) -> list[tuple[Format, float]]:
    """What has to fit into which format as O is computed: by the largest elements of the inputs, all of one sign."""
    plan, keys = declaration.plan.in_formats(inputs.formats), inputs.k.shape[2]
    q, k, v = (largest(tensor) for tensor in (inputs.q, inputs.k, inputs.v))
    product = inputs.q.shape[3] * q * k
    scores = product * inputs.scale
    # fma(S, c, -m c) is no 0 at the maximum: it is what rounding m c lost.
    lost = 2 * scores * FP32.unit_roundoff if plan.contracted else 0.0
    peak = math.exp(min(declaration.shift_rule.lag + lost, 700.0))
    return [
        (FP32, product),
        (plan.p_bar.fmt, peak),
        (FP32, 2 * scores),
        (plan.qk.fmt, product),
        (plan.q.fmt, 2 * q * inputs.scale),
        (plan.s.fmt, scores),
        (plan.shifted.fmt, 2 * scores),
        (plan.row_sum.fmt, keys * peak),
        (plan.o_bar.fmt, keys * peak * v),
    ]


def backward_sizes(inputs: AttentionInputs) -> list[tuple[Format, float]]:
    """The same for the gradients, whose every intermediate may be in the format of the operands."""
    d, keys, queries = inputs.q.shape[3], inputs.k.shape[2], inputs.q.shape[2] * inputs.groups
    q, k, v, do = (largest(tensor) for tensor in (inputs.q, inputs.k, inputs.v, inputs.do))
    ds, most = 2 * d * do * v, max(1.0, inputs.scale)
    fmt = inputs.formats.operands
    # exp(S - log-sum-exp) is at most 1 but for what S was rounded by, there and in the forward pass.
    p = math.exp(min(2 * d * q * k * inputs.scale * FP32.unit_roundoff, 700.0))
    return [(fmt, p), (fmt, ds), (fmt, keys * ds * k * most), (fmt, queries * ds * q * most), (fmt, queries * do)]


def open_to_reading(batch: SharedBatch, kernel: Kernel) -> set[str]:
    """The checks of what kernels answer differently where an Inf or NaN was planted.

    A row that sees nothing but -Inf is NaN to some, and zeros, as a masked one, to others (FlashAttention-1, the
    authors' code, which clamps its sum). A P of 0 times an Inf in V that is hidden is NaN in whatever adds it up.
    PyTorch's own kernels lower what a mask hides by -Inf, give NaN in a row without a key where V has Inf, and lose the
    NaN of scores of +Inf (docs/other-kernels.md): where a score, or a V that is hidden, is not finite, nothing is
    asked of them.
    """
    inputs, hidden = batch.inputs, batch.inputs.hidden()
    everything = {"finite", "bound", "range", "gradients"}
    lost_in_v = hidden is not None and not bool(torch.isfinite(inputs.v).all())
    if not kernel.composed and (lost_in_v or not bool(torch.isfinite(batch.ref.s).all())):
        return everything
    sees = torch.ones(1, dtype=torch.bool) if hidden is None else ~hidden
    if bool((~sees | (batch.ref.s == -torch.inf)).all(-1).logical_and(sees.any(-1)).any()):
        return everything
    return {"gradients"} if lost_in_v else set()


def not_held_to(batch: SharedBatch, kernel: Kernel) -> set[str]:
    """The checks that a sound kernel may fail on an input: numbers leave the formats that it keeps them in."""
    # Of means over heads: here are too few.
    names = {name for name, check in checks().items() if check.described.judges} | open_to_reading(batch, kernel)
    inputs, declaration = batch.inputs, kernel.declaration or UNDECLARED
    if shifted_away(inputs, declaration) or overflows(forward_sizes(inputs, declaration)):
        return names | {"finite", "bound", "range", "gradients"}
    return names | ({"gradients"} if overflows(backward_sizes(inputs)) else set())


def overflows(sizes: Sequence[tuple[Format, float]]) -> bool:
    return any(size > fmt.largest for fmt, size in sizes)


Pair = tuple[Backend, Kernel]


def failed(
    example: Example, pairs: Sequence[Pair], folder: Path, known: Workbench
) -> Iterator[tuple[Record, list[str]]]:
    """The cells of an example, kept in a folder, that fall, and the checks that they don't meet.

    Every example is a case of one name: what the bench knows of kernels stays, what it holds of a case does not.
    """
    case, bench = example.write(folder), replace(known, _held=None)
    fmt = FORMATS[example.fmt]
    for backend, kernel in pairs:
        record = run_cell(Cell(backend, kernel, OneCall(case), fmt), bench)
        not_passed = {name for name, answer in record.answers.items() if answer.passed is False}
        if not_passed:
            not_passed -= not_held_to(bench.case(case, fmt).batch(0), kernel)
        if not_passed:
            yield record, sorted(not_passed)


def hold(example: Example, pairs: Sequence[Pair], kept: Path, known: Workbench) -> None:
    """Fail, and keep the example, if one of its cells fails; the last that fails is the smallest that was found."""
    with tempfile.TemporaryDirectory() as folder:
        first = next(failed(example, pairs, Path(folder), known), None)
    if first is not None:
        pair = next((backend, kernel) for backend, kernel in pairs if kernel.name == first[0].kernel)
        record, not_passed = next(failed(example, [pair], kept, known))
        reasons = "; ".join(f"{name}: {record.answers[name].why}" for name in not_passed)
        pytest.fail(f"{record.id} failed: {reasons}\n{example}\nrerun: {runnable(record.command)}", pytrace=False)


def fuzz(pairs: Sequence[Pair], kept: Path, number: int) -> None:
    """Hold so many examples; with `TIEBREAK_FUZZ` as many as it says, others in every run."""
    long, known = os.environ.get("TIEBREAK_FUZZ"), Workbench(Settings(matrix=FROM_ANYWHERE))

    @settings(
        max_examples=int(long) if long else number,
        derandomize=long is None,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(example=examples())
    def held(example: Example) -> None:
        hold(example, pairs, kept, known)

    held()


@pytest.fixture(autouse=True)
def no_foreign_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the same, whatever ran before: Hypothesis mixes in numbers from the source of all loaded modules."""
    monkeypatch.setattr(providers, "_get_local_constants", Constants, raising=False)
    monkeypatch.setattr(providers, "CONSTANTS_CACHE", type(providers.CONSTANTS_CACHE)(1024), raising=False)


# Of 16 bits, in either format: what fp8's and Volta's cores add up they read in a format of their own.
CORES = {Accumulator.AMPERE, Accumulator.HOPPER, Accumulator.CDNA3}
# Not in 8 bits with scales: a NaN makes the scale that it shares NaN, and all that share it. Not with an offset: 2^8
# times the largest V of 16 bits is beyond fp32.
FLASH_PLANS = {
    name: plan for name, plan in PLANS.items() if name != "standard" and not plan.quantizes and not plan.offset
}
ROSTERS: Mapping[str, Sequence[Pair]] = {
    "emulation": [(EMULATION, kernel) for kernel in EMULATION.kernels()],
    "cpu": [(CPU, kernel) for kernel in CPU.kernels()],
    "plans": [
        (EMULATION, composed_kernel(f"{rule}@{name}"))
        for name, plan in FLASH_PLANS.items()
        if plan.accumulator is Accumulator.EXACT
        for rule in ("flash", "flash_1", "split")
    ],
    "cores": [
        (EMULATION, composed_kernel(f"flash@{name}")) for name, plan in FLASH_PLANS.items() if plan.accumulator in CORES
    ],
}


@pytest.mark.parametrize(("roster", "number"), [("emulation", 5), ("cpu", 5), ("plans", 3), ("cores", 2)])
def test_every_kernel_keeps_within_its_bounds_on_any_input(roster: str, number: int) -> None:
    fuzz(ROSTERS[roster], Path("out") / f"fuzz-{roster}", number)


DEFECT = """
import torch

def attention(q, k, v, *, causal=False, scale=None):
    s = q.float() @ k.float().mT * (scale or q.shape[-1] ** -0.5)
    if s.shape[-1] % 2 and s.shape[-1] > 4:
        s = s[..., :-1]  # the last of an odd number of keys is forgotten
    hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(k.shape[2] - q.shape[2] + 1) & causal
    p = s.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden.all(-1, keepdim=True), 0.0)
    return (p @ v[:, :, : s.shape[-1]].float()).to(q.dtype)
"""


def test_a_planted_defect_is_found_made_small_and_fails_again_by_the_command_that_is_told(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TIEBREAK_FUZZ", raising=False)
    pytester.path.joinpath("mine.py").write_text(DEFECT, encoding="utf-8")
    kernel = external_kernel("mine.py:attention", "fp32_inside")  # to look for one takes longer than an example
    with pytest.raises(pytest.fail.Exception) as failed:
        fuzz([(CPU, kernel)], Path("out") / "fuzz", 40)
    message = str(failed.value)
    match = re.search(r"Example\(.*groups=(\d+), queries=(\d+), keys=(\d+)", message)
    assert match is not None
    assert list(map(int, match.groups())) == [1, 1, 5], message
    command = message.partition("\nrerun: ")[2]
    assert "--captured out/fuzz " in command
    words = shlex.split(command)
    assert words[1:3] == ["-m", "pytest"]
    again = pytester.runpytest_inprocess(*words[3:], "-p", "no:cacheprovider")
    assert again.ret == 1
    (record,) = store.read(Path("out", "last.json")).records
    assert record.outcome == FAILED
    assert record.passed("bound") is False
    assert message.startswith(f"{record.id} failed: bound: {record.answers['bound'].why}")
