"""`tiebreak model`: what the attention of your model meets, and which kernels would be biased by it, in which heads."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tiebreak.backends.backend import CPU, EMULATION, Backend
from tiebreak.cases.capture.watch import AttentionCall, ModelWatch, NotHeldError, Place
from tiebreak.cases.captured import CANCELLED
from tiebreak.cases.errors import signed_error_ulps
from tiebreak.cases.verdicts import CONFIDENCE, BiasVerdict, Interval, judge, quantile
from tiebreak.kernels.formats import BF16, Format, Formats
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionInputs
from tiebreak.kernels.kernel import CannotRunError, Kernel, first_line
from tiebreak.kernels.reference import Reference, reference
from tiebreak.matrix.pairs.through_model import OwnModel, own_model
from tiebreak.matrix.selection import Selection, matching_backends
from tiebreak.matrix.trial import raised
from tiebreak.programs.identify import FORMATS
from tiebreak.programs.pair import kernel_of, plan_of
from tiebreak.reports import terminal
from tiebreak.reports.cli import FAILED, PASSED, Parser
from tiebreak.reports.errors import UsageError
from tiebreak.reports.tables.run import counted
from tiebreak.reports.tables.texts import percent

#: Plain flash attention, with the published fix, with sums in fp32 as most kernels have them, and eager attention.
_PLANS = ("flash@paper", "stabilized@paper", "flash@fused", "standard")
_SINK = 0.9  # a row that has a P above this has a sink
_FEWEST = 16  # sequences: with fewer a quantile over all heads has no value that is known well enough
_LINES = "flash@paper"  # whose most biased head the rows' line is about, where it is among the kernels


class Head(NamedTuple):
    """A head of one layer."""

    module: str
    layer: int  # by the order in which layers were called
    head: int

    def __str__(self) -> str:
        return f"layer {self.layer}, head {self.head} ({self.module or 'of no module'})"


@dataclass(frozen=True)
class Measured:
    """The attention of a model, by its sequences: columns of tensors are heads, (sequences, heads)."""

    name: str
    calls: str  # their shape, in words
    heads: Sequence[Head]
    rows: Mapping[str, Tensor]  # shares of rows by what they meet
    largest: float  # score
    bias: Mapping[str, Tensor]  # ulp, by kernel
    refused: Mapping[str, str]  # kernels that gave no number, and why
    unseen: Mapping[str, int] = field(default_factory=dict)  # calls that were not asked, by why

    def interval(self, kernel: str, head: int | None = None) -> Interval:
        """Return a kernel's bias in one head, at the confidence of all heads together, or in the mean of all."""
        bias = self.bias[kernel]
        values, of = (bias.nanmean(1), 1) if head is None else (bias[:, head], bias.shape[1])
        values = values[values.isfinite()]
        count = values.numel()
        wide = math.inf if count < _FEWEST else quantile(count, 1 - (1 - CONFIDENCE) / of, looks=1)
        mean = values.mean().item() if count else math.nan
        return Interval(mean, wide * values.std().item() / math.sqrt(count) if count > 1 else math.inf)

    def worst(self, kernel: str) -> int:
        """Return the column of the head that is most surely biased; without intervals, of the largest mean."""
        found = [self.interval(kernel, head) for head in range(len(self.heads))]
        sure = [abs(one.mean) - (one.half_width if math.isfinite(one.half_width) else 0.0) for one in found]
        return max(range(len(found)), key=lambda head: -math.inf if math.isnan(sure[head]) else sure[head])

    def verdicts(self, kernel: str) -> Counter[BiasVerdict]:
        """Return how many heads are biased, unbiased or undecided."""
        return Counter(judge(self.interval(kernel, head)) for head in range(len(self.heads)))

    def lines(self) -> Iterator[str]:
        """Yield the verdict, after its first word, and what it rests on."""
        yield f"{self.name}: {'; '.join(map(self._verdict, self.bias))}"
        yield f"  calls       {self.calls}"
        shown = self.worst(_LINES if _LINES in self.bias else next(iter(self.bias)))
        yield f"  rows        {self._shares()}; largest score {self.largest:.3g}"
        yield f"  most in     {self.heads[shown]}: {self._shares(shown)}"
        for name in self.bias:
            at = self.worst(name)
            bias = f"{_told(self.interval(name, at))} ulp {'there' if at == shown else f'in {self.heads[at]}'}"
            yield f"  {name:<18}{bias}, {_told(self.interval(name))} over all heads"
        sequences = next(iter(self.rows.values())).shape[0]
        if sequences < _FEWEST:
            yield f"  intervals   none: {_FEWEST} sequences of tokens at least, {sequences} were given"
        yield from (f"  {name:<18}{why}" for name, why in self.refused.items())
        yield from (f"  not asked   {counted(count, 'call')} with {why}" for why, count in self.unseen.items())

    def _verdict(self, kernel: str) -> str:
        found = self.verdicts(kernel)
        if found[BiasVerdict.BIASED]:
            return f"{kernel} is biased in {counted(found[BiasVerdict.BIASED], 'head')} of {len(self.heads)}"
        unknown = len(self.heads) - found[BiasVerdict.UNBIASED]
        return f"{kernel} is not known to be unbiased in {unknown}" if unknown else f"{kernel} is biased in no head"

    def _shares(self, head: int | None = None) -> str:
        every = slice(None) if head is None else head
        return ", ".join(f"{what} in {percent(share[:, every].mean().item())}" for what, share in self.rows.items())


def _told(interval: Interval) -> str:
    return f"{interval.mean:+.4f}" + (f" +- {interval.half_width:.4f}" if math.isfinite(interval.half_width) else "")


def main(arguments: Sequence[str]) -> int:
    """Run the verb `model`: print the verdict on each kernel; with --fair a bias, or one that is not told, fails."""
    parser = _parser()
    options = parser.parse_args(arguments)
    names = list(dict.fromkeys(options.kernel or _PLANS))
    kernels = {name: _kernel(name, options.backend, options.declare) for name in names}
    model, fmt = own_model(options.model), FORMATS[options.dtype]
    measured = measure(model, kernels, fmt, lambda line: terminal.say(f"model: {line}"))
    known = [measured.verdicts(name)[BiasVerdict.UNBIASED] == len(measured.heads) for name in measured.bias]
    failed = options.fair and not (known and all(known) and not measured.refused)
    first, *lines = measured.lines()
    biased = any(measured.verdicts(name)[BiasVerdict.BIASED] for name in measured.bias)
    print("\n".join([f"{('FAIL' if biased else 'UNDECIDED') if failed else 'PASS'}: {first}", *lines]))
    return FAILED if failed else PASSED


def _kernel(name: str, backend: str | None, declare: Sequence[str]) -> tuple[Kernel, Backend]:
    plan = plan_of(name)
    where = (CPU if plan is None else EMULATION).name if backend is None else backend
    (found,) = matching_backends(Selection(backends=where))[:1]
    return kernel_of(name, plan, found, declare), found


def measure(
    model: OwnModel,
    kernels: Mapping[str, tuple[Kernel, Backend]],
    fmt: Format = BF16,
    tell: Callable[[str], None] = lambda _: None,
) -> Measured:
    """Send the tokens through a model once, and each call of attention through kernels, q, k and v in a format.

    Elements of O below a quarter of sum P |V| are left out: they have cancelled.

    Raises:
        UsageError: the model raises, or makes no call that can be asked.
    """
    heads, rows, bias = list[Head](), list[Mapping[str, Tensor]](), list[Mapping[str, Tensor]]()
    refused, unseen, shapes, largest = dict[str, str](), Counter[str](), Counter[str](), [-math.inf]

    def look(place: Place, call: Callable[[], AttentionCall], out: Tensor, to_heads: Callable[..., Tensor]) -> None:
        del out, to_heads
        try:
            given = call()
            if given.spans:
                raise NotHeldError("padding")
        except NotHeldError as reason:
            unseen[str(reason)] += 1
            return
        parts = (x.cpu().to(TORCH_DTYPES[fmt]).float() for x in (given.q * given.factor, given.k, given.v))
        q, k, v = parts
        inputs = AttentionInputs(q, k, v, q, Formats.of(fmt), given.causal, softmax_scale=given.scale)
        ref = reference(inputs)
        met, top = _met(inputs, ref)
        layer = len(rows)
        tell(f"layer {layer}, {place.module}")
        heads.extend(Head(place.module, layer, head) for head in range(q.shape[1]))
        rows.append(met)
        bias.append(_biases(kernels, inputs, ref, refused))
        largest[0] = max(largest[0], top)
        seen = f"{q.shape[2]} queries, {k.shape[2]} keys, d {q.shape[3]}{', causal' if given.causal else ''}"
        shapes[f"{q.shape[1]} heads on {k.shape[1]}, {q.shape[0]} sequences, {seen}"] += 1

    watch = ModelWatch(model.module, {}, look)
    try:
        with torch.no_grad(), watch.installed():
            watch.look(True)
            model.module(model.tokens)
    except Exception as error:  # whatever a user's model raises
        raise UsageError(f"{model.name}: the model raised {first_line(error)}") from error
    if not rows:
        why = "; ".join(f"calls with {why}" for why in unseen) or "torch's and Hugging Face's attention are seen"
        raise UsageError(f"{model.name}: no call of attention could be asked: {why}")
    if len({part.shape[0] for met in rows for part in met.values()}) > 1:
        raise UsageError(f"{model.name}: its layers are called with different numbers of sequences")
    asked = [name for name in kernels if name not in refused]
    if not asked:
        raise UsageError(f"{model.name}: no kernel could be asked: {'; '.join(refused.values())}")
    words = "; ".join(f"{counted(count, 'layer')} of {shape}" for shape, count in shapes.items())
    return Measured(
        model.name,
        f"{words}; q, k, v in {fmt.name}",
        heads,
        {name: torch.cat([met[name] for met in rows], 1) for name in rows[0]},
        largest[0],
        {name: torch.cat([layer[name] for layer in bias], 1) for name in asked},
        refused,
        unseen,
    )


def _met(inputs: AttentionInputs, ref: Reference) -> tuple[dict[str, Tensor], float]:
    """Return the shares of rows, by sequence and head, that meet what kernels round wrongly, and the largest score."""
    hidden = inputs.hidden()
    product = inputs.q @ inputs.expanded_k().mT
    low = TORCH_DTYPES[inputs.formats.inputs]
    scores = {"fp32": product * inputs.scale, inputs.formats.inputs.name: product.to(low) * inputs.scale}
    found = {}
    for name, each in scores.items():
        s = each if hidden is None else each.masked_fill(hidden, -torch.inf)
        again = (s == s.amax(-1, keepdim=True)).sum(-1) > 1
        found[f"a repeated maximum (S in {name})"] = again.double().mean(-1)
    found[f"a P above {_SINK}"] = (ref.p.amax(-1) > _SINK).double().mean(-1)
    s = ref.s if hidden is None else ref.s.masked_fill(hidden, -torch.inf)
    return found, s.max().item()


def _biases(
    kernels: Mapping[str, tuple[Kernel, Backend]], inputs: AttentionInputs, ref: Reference, refused: dict[str, str]
) -> dict[str, Tensor]:
    """Return the mean signed error in ulps, by sequence and head; what a kernel refuses goes into `refused`."""
    cancelled, biases = ref.o.abs() < CANCELLED * ref.magnitude, {}
    for name, (kernel, backend) in kernels.items():
        if name in refused:
            continue
        try:
            if reason := kernel.refusal(inputs):
                raise CannotRunError(reason)
            o = backend.run(kernel, inputs, gradients=False).o
        except Exception as error:  # the kernel is not ours: whatever it raises
            refused[name] = first_line(error) if isinstance(error, CannotRunError) else raised(error, kernel)
            continue
        ulps = signed_error_ulps(o, ref.o, inputs.formats.output).masked_fill(cancelled, torch.nan)
        biases[name] = ulps.flatten(2).nanmean(2)
    return biases


def _parser() -> Parser:
    parser = Parser(
        prog="tiebreak model",
        description="Send a model's tokens through it once, and what its attention is given through kernels: how often"
        " rows meet what rounding is biased by, and the bias of each kernel in each head.",
        epilog="exit codes: 0 measured, 1 --fair: a bias, or one that is not told, 2 bad usage",
    )
    add = parser.add_argument
    add("model", metavar="FILE.py:FUNCTION", help="takes nothing and returns (module, tokens), (sequences, tokens)")
    add("kernel", nargs="*", metavar="KERNEL", help=f"as of tiebreak pair (default: {', '.join(_PLANS)})")
    add("--backend", metavar="NAME", help="of the kernels (default: cpu; of a plan: emulation)")
    add("--declare", action="append", default=[], metavar="WORD=VALUE", help="as of tiebreak check")
    add("--dtype", choices=FORMATS, default=BF16.name, help="of q, k and v (default: bf16)")
    add("--fair", action="store_true", help="fail where a head is biased, or where that is not told")
    return parser
