"""The Triton kernels, in Triton's interpreter: what the declaration says, up to fp32's own rounding.

The kernels and the emulation round to narrow formats at the same points, so their outputs can differ only where fp32,
which sums in another order and has another exponential, comes out on the other side of a tie. `_enclosure` follows
that through: with u = 2^-24 it gives every fp32 quantity the interval that holds it in whatever order it is summed
(Higham, Accuracy and Stability of Numerical Algorithms, 3.1: n terms err by at most (n - 1) u of their magnitudes' sum)
and casts its ends, for casts are monotone. An element whose two ends meet must have just these bits. The share of bits
that do differ is counted, and held to that of the ends that do not meet where roundings are taken as random: n of them
then come to sqrt(n) u. Exponentials of numpy err by at most 4 ulps, and are 1 at 0.

Gradients in the fp32 plan are held to fp64: with T the largest |S| and sums of d, of queries and of keys terms in any
order, P errs by at most (4T + 3d T + n) u and a gradient, to first order, by that much and its own sum's length of
itself with every term's magnitude in its place.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.backends.emulation.rounding import round_to
from tiebreak.kernels.algorithms import FLASH_ATTENTION, STANDARD_ATTENTION
from tiebreak.kernels.arithmetic import Noise
from tiebreak.kernels.flash import Block
from tiebreak.kernels.formats import BF16, FP8_E4M3, FP16, FP32, Format, Formats, Rounding
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput, Gradients, sum_groups
from tiebreak.kernels.kernel import Declaration, run_declared
from tiebreak.kernels.plans import FP32_PLAN, FUSED, PLANS, PRESETS, Cast, DeltaSource, Exponential, RoundingPlan, SumOf
from tiebreak.kernels.reference import reference, reference_gradients
from tiebreak.kernels.shift_rules import SHIFT_RULES, ShiftRule
from tiebreak.kernels.triton.compiling import not_interpreting
from tiebreak.kernels.triton.launch import run
from tiebreak.kernels.triton.roster import BLOCK, DECLARATIONS, triton_kernels
from tiebreak.studies.cells import CASES

if (reason := not_interpreting()) is not None:
    pytest.skip(reason, allow_module_level=True)

from tiebreak.backends.interpreter.assumptions import EXACT
from tiebreak.backends.interpreter.session import interpreting

U = FP32.unit_roundoff
HEADS = 16
FEW = 0.001  # of the bits
ARITHMETIC = EmulatedArithmetic()


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    """The kernels are interpreted in every test."""
    with interpreting(EXACT):
        yield


@dataclass(frozen=True)
class Interval:
    """Ends of what an fp32 quantity can be, fp64."""

    low: Tensor
    high: Tensor

    def widened(self, by: Tensor) -> "Interval":
        return Interval(self.low - by, self.high + by)

    def rounded(self) -> "Interval":
        """After one fp32 operation, whose rounding is monotone too."""
        return Interval(self.low.float().double(), self.high.float().double())

    def cast(self, cast: Cast, random: Tensor | None = None) -> "Interval":
        if not cast.narrows:
            return self
        low, high = (x.clamp(max=cast.fmt.largest) if cast.saturates else x for x in (self.low, self.high))
        low, high = (round_to(x.float(), cast.fmt, cast.rounding, random_bits=random) for x in (low, high))
        return Interval(low.double(), high.double())

    def times(self, other: "Interval") -> "Interval":
        corners = torch.stack([a * b for a in (self.low, self.high) for b in (other.low, other.high)])
        return Interval(corners.amin(0), corners.amax(0))

    def plus(self, other: "Interval") -> "Interval":
        return Interval(self.low + other.low, self.high + other.high)

    def over(self, positive: "Interval") -> "Interval":
        return self.times(Interval(1 / positive.high, 1 / positive.low))


@dataclass(frozen=True)
class Errors:
    """How much the sum of n fp32 terms errs, in units of u of their magnitudes' sum."""

    random: bool  # n roundings taken as random, not at their worst

    def of(self, terms: Tensor) -> Tensor:
        return terms.sqrt() if self.random else terms

    def product(self, p: Interval, v: Tensor) -> Interval:
        above, below = v.clamp_min(0), v.clamp_max(0)
        total = Interval(p.low @ above + p.high @ below, p.high @ above + p.low @ below)
        return total.widened(self.of(torch.tensor(float(v.shape[-2]))) * U * (p.high @ v.abs()))

    def sum(self, p: Interval) -> Interval:
        total = Interval(p.low.sum(-1, keepdim=True), p.high.sum(-1, keepdim=True))
        return total.widened(self.of(torch.tensor(float(p.high.shape[-1]))) * U * total.high)


WORST = Errors(random=False)


def _scores(inputs: AttentionInputs, plan: RoundingPlan, errors: Errors) -> tuple[Interval, Tensor]:
    """S and the error of an element: of its products' sum, of which zeros are no term, and of the scale and its use."""
    q, k = inputs.q.double(), inputs.expanded_k().double().transpose(-1, -2)
    s = q @ k * inputs.scale
    terms = (q != 0).double() @ (k != 0).double()
    error = (errors.of((terms - 1).clamp_min(0)) * (q.abs() @ k.abs()) * inputs.scale + 3 * s.abs()) * U
    hidden = inputs.hidden()
    spread = Interval(s, s).widened(error).cast(plan.s)
    error = torch.maximum(error, spread.high - spread.low)
    if hidden is not None:
        spread = Interval(*(x.masked_fill(hidden, -torch.inf) for x in (spread.low, spread.high)))
    return spread, error


def _exp(x: Tensor, error: Tensor) -> Interval:
    """Of an exponent with an error; of 0 without one it is 1."""
    slack = torch.where((x == 0) & (error == 0), 0.0, 8 * U)
    return Interval(torch.exp(x - error) * (1 - slack), torch.exp(x + error) * (1 + slack))


def _finite(x: Tensor) -> Tensor:
    return torch.where(x == -torch.inf, 0.0, x)


def _shifted(
    s: Interval, error: Tensor, m: Tensor, rule: ShiftRule, dither: Tensor
) -> tuple[Interval, Interval, Tensor]:
    """P and alpha of one block of keys, and the running shift after it."""
    middle = (s.low + s.high) / 2
    largest = middle.amax(-1, keepdim=True)
    proposed = rule.propose(middle, largest, dither)
    new = torch.maximum(m, torch.where(largest == -torch.inf, largest, proposed))
    new = torch.where(new - m <= rule.lag, m, new) if rule.lag else new
    shift = _finite(new)
    x = middle - shift
    # The maximum's own error cancels in its own distance to itself; scaled, it does not.
    bound = rule.above * error.amax(-1, keepdim=True) + 4 * U * shift.abs()
    spread = torch.where(x == 0, 0.0, error + bound + U * _finite(x).abs())
    alpha = _exp(m - shift, torch.where((m == new) | (m == -torch.inf), 0.0, 2 * bound))
    return _exp(x, spread), alpha, new


def _summed(p: Interval, plan: RoundingPlan) -> Interval:
    if plan.row_sum_of is SumOf.CLAMPED:
        return Interval(*(x.clamp(max=plan.p_bar.fmt.largest) for x in (p.low, p.high)))
    return p.cast(plan.p_bar) if plan.row_sum_of is SumOf.ROUNDED else p


def _enclosure(inputs: AttentionInputs, declaration: Declaration, errors: Errors) -> Interval:
    """What O can be, element by element."""
    plan, rule = declaration.plan.in_formats(inputs.formats), declaration.shift_rule
    unfused, keys = declaration.algorithm is STANDARD_ATTENTION, inputs.k.shape[2]
    noise, shape, cpu = Noise(inputs.noise_seed, inputs.q.shape[1]), inputs.q.shape, torch.device("cpu")
    dither = noise.dither(shape, 0, cpu).double() if rule.dithered else torch.zeros(*shape[:3], 1).double()
    s, error = _scores(inputs, plan, errors)
    m, v = torch.full_like(dither, -torch.inf), inputs.expanded_v().double()
    l, o = (Interval(zero, zero) for zero in (torch.zeros_like(m), torch.zeros(shape).double()))
    size = keys if unfused else declaration.block.keys
    for tile in (slice(start, start + size) for start in range(0, keys, size)):
        p, alpha, m = _shifted(Interval(s.low[..., tile], s.high[..., tile]), error[..., tile], m, rule, dither)
        p = Interval(p.low * 2**plan.offset, p.high * 2**plan.offset)
        total = errors.sum(_summed(p, plan))
        if rule.row_sum_floor:
            total = Interval(*(x.clamp_min(rule.row_sum_floor) for x in (total.low, total.high)))
        l = alpha.times(l).rounded().cast(plan.row_sum).plus(total.cast(plan.row_sum)).rounded().cast(plan.row_sum)
        weights = p.over(l).rounded() if unfused else p
        pv = errors.product(weights.cast(plan.p_bar), v[:, :, tile]).cast(plan.o_bar)
        o = alpha.times(o).rounded().cast(plan.o_bar).plus(pv).rounded().cast(plan.o_bar)
    o = o if unfused else o.over(l).rounded()
    blind = (m == -torch.inf).expand(shape)
    o = Interval(*(x.masked_fill(blind, 0.0) for x in (o.low, o.high)))
    return o.cast(plan.o, noise.bits(shape, 0, cpu) if plan.o.rounding is Rounding.STOCHASTIC else None)


def _open(ends: Interval) -> Tensor:
    return ends.low != ends.high


@cache
def _made(name: str, fmt: Format = BF16) -> AttentionInputs:
    return CASES[name].make(1, 0, HEADS, fmt)


def _run(inputs: AttentionInputs, declaration: Declaration) -> AttentionOutput:
    return run(inputs, None, False, declaration=declaration)


def _assert_as_declared(inputs: AttentionInputs, declaration: Declaration, *, settled: bool = False) -> AttentionOutput:
    """Hold the kernel and the emulation to the enclosure; `settled`: it leaves few elements open, and few differ."""
    ends, output = _enclosure(inputs, declaration, WORST), _run(inputs, declaration)
    emulated = run_declared(declaration, inputs, ARITHMETIC, False).o
    for o in (output.o, emulated):
        assert ((ends.low <= o) & (o <= ends.high)).all()
    if settled:
        assert _open(ends).double().mean() <= 0.05
    differing = (output.o != emulated).double().mean().item()
    if differing > FEW:
        assert not settled
        assert differing <= _open(_enclosure(inputs, declaration, Errors(random=True))).double().mean().item()
    return output


def _declared(plan: RoundingPlan, rule: str = "safe", block: Block = BLOCK) -> Declaration:
    return Declaration(FLASH_ATTENTION, plan, SHIFT_RULES[rule], block)


PREDICTED = [
    "tied_maxima[k=2]", "sink_tie", "repeated_tiny", "ties_across_blocks", "growing_maximum[by=4]", "equal_keys",
    "random_causal", "random_grouped", "random_odd",
]  # fmt: skip
ROSTER = [name for name, declared in DECLARATIONS.items() if declared.plan.p_bar.fmt != FP8_E4M3]


@pytest.mark.parametrize(
    ("kernel", "case", "fmt"),
    [
        *product(ROSTER, PREDICTED, [BF16]),
        *product(["triton_flash", "triton_fair", "triton_standard"], ["tied_maxima[k=2]", "random_causal"], [FP16]),
        *(("triton_fp8", case, BF16) for case in ("fp8_ties", "fp8_flat_tail")),
    ],
)
def test_every_kernel_does_what_it_declares(kernel: str, case: str, fmt: Format) -> None:
    _assert_as_declared(_made(case, fmt), DECLARATIONS[kernel], settled=(case, fmt) == ("tied_maxima[k=2]", BF16))


@pytest.mark.parametrize("base_two", [False, True])
@pytest.mark.parametrize("rule", SHIFT_RULES)
def test_every_shift_rule_is_the_suites(rule: str, base_two: bool) -> None:
    plan = replace(FUSED, exponential=Exponential(base_two))
    # Scores of at most 2 where all are scaled: beyond, the scaled exponent of the tail is below fp32's range.
    for case in ("repeated_negative", "tied_maxima[k=3]", "growing_maximum")[: 1 if rule == "always_scaled" else None]:
        _assert_as_declared(_made(case), _declared(plan, rule))


@pytest.mark.parametrize(
    "plan",
    [
        *PRESETS,
        PLANS["fused_p_bar_away"],
        PLANS["fused_p_bar_o_away"],
        replace(FUSED, name="l_rounded", row_sum_of=SumOf.ROUNDED),
    ],
    ids=lambda p: p.name,
)
def test_every_plan_is_kept(plan: RoundingPlan) -> None:
    for case in ("tied_maxima[k=2]", "tied_p_bar", "no_tail", "random_causal"):
        _assert_as_declared(_made(case), _declared(plan))


@pytest.mark.parametrize("rule", ["safe", "lazy_4"])
@pytest.mark.parametrize("plan", ["fused_fp8_offset", "fused_fp8_clamped", "fused_fp8_fair"])
def test_eight_bits_are_kept_where_they_saturate_too(plan: str, rule: str) -> None:
    inputs, declared = _made("fp8_stale_maximum"), _declared(PLANS[plan], rule)
    left = (_assert_as_declared(inputs, declared).o.double().abs().sum() / reference(inputs).o.abs().sum()).item()
    assert (left < 0.9) is (rule == "lazy_4" and plan == "fused_fp8_offset")
    _assert_rows(_made("fp8_ties"), _run(_made("fp8_ties"), declared))  # whose log-sum-exp does not show the offset


def test_the_authors_floor_is_under_every_block_of_keys_masked_ones_too() -> None:
    _assert_as_declared(_made("repeated_large[r=30]"), _declared(FUSED, "stabilized_authors"))
    # Two keys at 22 and the shift at 44: l is 6e-10, and each block of keys that a query does not see adds 1e-10.
    inputs = _normal(50, 50, 16, 1, 1, True)
    q, k = torch.zeros_like(inputs.q), torch.zeros_like(inputs.k)
    q[..., 0], k[:, :, :2, 0] = 11.0, 8.0
    inputs = replace(inputs, q=q, k=k)
    _assert_as_declared(inputs, _declared(FUSED, "stabilized_authors", Block(16, 16)))


Shape = tuple[int, int, int, int, int, bool]


def _normal(
    queries: int, keys: int, d: int, heads: int, key_heads: int, causal: bool, fmt: Format = BF16
) -> AttentionInputs:
    generator = torch.Generator().manual_seed(7)
    sizes = [(heads, queries), (key_heads, keys), (key_heads, keys), (heads, queries)]
    tensors = [torch.randn(2, *size, d, generator=generator) for size in sizes]
    q, k, v, do = (x if fmt == FP32 else x.bfloat16().float() for x in tensors)
    return AttentionInputs(q, k, v, do, Formats.of(fmt), causal=causal, noise_seed=2**32 - 3)


def _assert_rows(inputs: AttentionInputs, output: AttentionOutput) -> None:
    """The log-sum-exp is right, and rows that see no key are 0."""
    s, hidden = reference(inputs).s, inputs.hidden()
    exact = torch.logsumexp(s if hidden is None else s.masked_fill(hidden, -torch.inf), -1, keepdim=True)
    blind = exact == -torch.inf
    assert output.lse is not None
    assert torch.equal(output.lse == -torch.inf, blind)
    assert (output.o[blind.expand_as(output.o)] == 0).all()
    # Sums of d and of n terms at their worst; |S| stays below 64. A dither moves m, and log l the other way.
    error = (output.lse.double() - exact).abs()[~blind]
    assert (error <= (sum(inputs.k.shape[2:]) + 8) * U * 64).all()


@pytest.mark.parametrize("kernel", ["triton_fair", "triton_standard"])
def test_every_shape_is_right(kernel: str, attention_shape: Shape) -> None:
    inputs = _normal(*attention_shape)
    _assert_rows(inputs, _assert_as_declared(inputs, DECLARATIONS[kernel]))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", ["triton_flash", "triton_fair", "triton_standard"])
@pytest.mark.parametrize("first", [40, 150])
def test_padding_is_not_seen(first: int, kernel: str, causal: bool) -> None:
    """One batch entry with holes, one padded on the left: of its first rows, or of all, there is nothing to see."""
    key = torch.arange(150)
    padding = torch.stack([key * 7919 % 5 > 1, key >= first])
    inputs = replace(_normal(33, 150, 16, 4, 2, causal), key_padding=padding)
    _assert_rows(inputs, _assert_as_declared(inputs, DECLARATIONS[kernel]))


@pytest.mark.parametrize("kernel", ["triton_fair", "triton_paper", "triton_standard"])
def test_the_bits_depend_neither_on_the_query_block_nor_on_the_programs_that_run_together(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Integers and equal keys: every sum is exact, in whatever order a matrix product of another shape adds up.
    made = _normal(40, 64, 16, 2, 1, True)
    inputs = replace(made, q=made.q.round(), k=made.k[:, :, :1].round().expand_as(made.k), v=(8 * made.v).round())
    declaration = DECLARATIONS[kernel]
    together = _run(inputs, declaration).o
    for queries in (16, 32):
        assert torch.equal(_run(inputs, replace(declaration, block=Block(queries, 64))).o, together)
    monkeypatch.setattr("tiebreak.backends.interpreter.programs._MOST_AT_ONCE", 1)
    assert torch.equal(_run(inputs, declaration).o, together)


@pytest.mark.parametrize("kernel", ROSTER)
def test_nan_and_inf_spoil_what_they_must_and_no_more(kernel: str) -> None:
    row, column = (_run(_made(case), DECLARATIONS[kernel]).o for case in ("nan_in_q", "inf_in_v"))
    assert row[:, :, 1].isnan().all()
    assert not row[:, :, [0, 2, 3]].isnan().any()
    assert not column[..., 0].isfinite().any()
    assert column[..., 1:].isfinite().all()


NOT_KEPT = {
    "point": (replace(FUSED, qk=Cast(BF16)), "do not round qk"),
    "contracted": (PLANS["fused_contracted"], "contraction off"),
    "exponential": (replace(FUSED, exponential=Exponential(correction=(1e-4,))), "know no fast exponential"),
    "p_bar": (replace(FUSED, p_bar=Cast(BF16, Rounding.STOCHASTIC)), "do not round p_bar stochastic"),
    "backward": (replace(FUSED, delta_from=DeltaSource.UNNORMALISED), "have no backward pass of autograd.s"),
    "accumulated": (replace(FUSED, o=Cast(BF16, Rounding.RTZ)), "do not round o rtz"),
}


@pytest.mark.parametrize(("plan", "message"), NOT_KEPT.values(), ids=NOT_KEPT)
def test_a_plan_that_the_kernels_cannot_keep_is_refused(plan: RoundingPlan, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _run(_made("random"), _declared(plan))


def _refused(**changes: object) -> str | None:
    inputs = replace(_normal(4, 8, 16, 2, 2, False), **changes)  # type: ignore[arg-type]
    kernel = next(kernel for kernel in triton_kernels(interpreted=True) if kernel.name == "triton_flash")
    reason = kernel.refusal(inputs)
    if reason is not None:
        with pytest.raises(ValueError, match=reason.replace("(", r"\(").replace(")", r"\)")):
            kernel.compute(inputs, ARITHMETIC, False)
    return reason


def test_inputs_that_the_kernels_cannot_take_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(2, 2, 4, 16)
    assert _refused() is None
    assert _refused(formats=Formats.of(FP8_E4M3)) == "the Triton kernels take bf16, fp16, fp32, not fp8_e4m3"
    assert "nothing to attend to" in str(_refused(q=x[:, :, :0], do=x[:, :, :0]))
    assert "nothing to attend to" in str(_refused(k=x[:, :, :0], v=x[:, :, :0]))
    wide = torch.zeros(2, 2, 4, 257)
    assert _refused(q=wide, k=wide, v=wide, do=wide) == "head dimension 257 is above 256"
    with pytest.raises(ValueError, match="powers of two, not 48 x 64"):
        _run(_made("random"), _declared(FUSED, block=Block(48, 64)))
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="run on a GPU, not on cpu"):
        _run(_made("random"), DECLARATIONS["triton_flash"])


def test_strides_do_not_matter() -> None:
    inputs = _normal(33, 33, 16, 2, 2, False)
    strided = replace(inputs, **{x: getattr(inputs, x).transpose(1, 2).contiguous().transpose(1, 2) for x in "qkv"})
    assert not strided.q.is_contiguous()
    assert torch.equal(_run(strided, DECLARATIONS["triton_fair"]).o, _run(inputs, DECLARATIONS["triton_fair"]).o)


def _gradients_of(inputs: AttentionInputs, declaration: Declaration) -> Gradients:
    gradients = run(inputs, None, True, declaration=declaration).gradients
    assert gradients is not None
    return gradients


def _in_fp32(source: DeltaSource = DeltaSource.OUTPUT) -> Declaration:
    return _declared(replace(FP32_PLAN, delta_from=source, exponential=Exponential(base_two=True)))


def _assert_gradients_right(inputs: AttentionInputs, source: DeltaSource = DeltaSource.OUTPUT) -> Gradients:
    ref, gradients = reference(inputs), _gradients_of(inputs, _in_fp32(source))
    q, k, v, do = (x.double().abs() for x in (inputs.q, inputs.expanded_k(), inputs.expanded_v(), inputs.do))
    # How many roundings of fp32 may be in a gradient: in the scores, and in the sums.
    (queries, d), keys, groups = inputs.q.shape[2:], inputs.k.shape[2], inputs.groups
    largest = (q @ k.mT).amax().item() * inputs.scale
    roundoffs = 2 * ((d + 4) * largest + keys) + d + keys + groups * queries
    # dQ, dK and dV with every term's magnitude in its place.
    ds = inputs.scale * ref.p * (do @ v.mT + (do * ref.magnitude).sum(-1, keepdim=True))
    scales = ds @ k, sum_groups(ds.mT @ q, groups), sum_groups(ref.p.mT @ do, groups)
    computed = (gradients.dq, gradients.dk, gradients.dv)
    for gradient, expected, scale in zip(computed, reference_gradients(inputs, ref), scales, strict=True):
        assert gradient.shape == expected.shape
        assert ((gradient.double() - expected).abs() <= roundoffs * U * scale).all()
    return gradients


def test_in_fp32_the_gradients_are_those_of_fp64(attention_shape: Shape) -> None:
    _assert_gradients_right(_normal(*attention_shape, FP32))


@pytest.mark.parametrize("source", [source for source in DeltaSource if source is not DeltaSource.UNNORMALISED])
def test_padding_has_no_gradient_and_gives_none_wherever_delta_comes_from(source: DeltaSource) -> None:
    key = torch.arange(70)
    padding = torch.stack([key * 7919 % 5 > 1, key >= 45])
    inputs = replace(_normal(33, 70, 16, 4, 2, True, FP32), key_padding=padding)
    assert (reference(inputs).o[1, :, :8] == 0).all()  # query i sees keys to i + 37
    gradients = _assert_gradients_right(inputs, source)
    for gradient in (gradients.dk, gradients.dv):
        assert (gradient[~padding[:, None, :, None].expand_as(gradient)] == 0).all()


@pytest.mark.parametrize("kernel", ROSTER)
@pytest.mark.parametrize("case", ["tied_maxima[k=2]", "random_grouped"])
def test_delta_and_the_gradients_are_the_emulations(kernel: str, case: str) -> None:
    inputs, declaration = _made(case), DECLARATIONS[kernel]
    output = run(inputs, None, True, declaration=declaration)
    emulated = run_declared(declaration, inputs, ARITHMETIC, True)
    ours, theirs = output.gradients, emulated.gradients
    assert ours is not None
    assert theirs is not None
    assert ours.delta is not None
    assert theirs.delta is not None
    # Rows whose O has the emulation's bits: delta is a sum of d terms, and in standard attention of keys x d.
    same = (output.o == emulated.o).all(-1, keepdim=True)
    assert same.double().mean() > 0.9
    standard = kernel == "triton_standard"  # where P and dP err too
    terms = inputs.q.shape[3] + (inputs.k.shape[2] if standard else 0)
    size = (inputs.do.abs().double() * reference(inputs).magnitude).sum(-1, keepdim=True)
    assert ((ours.delta - theirs.delta).abs() <= (8 if standard else 1) * terms * U * size)[same].all()
    # In the norm: few of an element's roundings to bf16 go another way.
    for gradient, expected in ((ours.dq, theirs.dq), (ours.dk, theirs.dk), (ours.dv, theirs.dv)):
        assert (gradient - expected).norm() <= BF16.unit_roundoff * expected.norm()


# What narrowing a rounding point of the backward pass changes, by what delta is computed from.
SWITCHES = {
    DeltaSource.OUTPUT: {
        **dict.fromkeys(("o", "delta"), "delta dq dk"),
        **dict.fromkeys(("dp", "ds"), "dq dk"),
        "p": "dv",
        "gradients": "dq dk dv",
    },
    DeltaSource.PROBABILITIES: {"o": "", "dp": "delta dq dk"},
    DeltaSource.RECOMPUTED_OUTPUT: {"o": "", "dp": "dq dk"},
}


@pytest.mark.parametrize(("source", "point"), [(source, point) for source, of in SWITCHES.items() for point in of])
def test_every_rounding_point_of_the_backward_pass_is_a_switch_of_its_own(source: DeltaSource, point: str) -> None:
    inputs, plain = _normal(33, 70, 32, 2, 2, False), replace(FP32_PLAN, delta_from=source)
    narrowed = replace(plain, **{point: Cast(BF16)})  # type: ignore[arg-type]
    before, after = (_gradients_of(inputs, _declared(plan)) for plan in (plain, narrowed))
    names = ("delta", "dq", "dk", "dv")
    changed = {name for name in names if not torch.equal(getattr(before, name), getattr(after, name))}
    assert changed == set(SWITCHES[source][point].split())
