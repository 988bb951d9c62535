"""`tiebreak model`: what the attention of your model meets, and which kernels would be biased by it, in which heads."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from tiebreak.backends.backend import Backend
from tiebreak.cases.capture.interest import FEW, SINK, UNLIKE
from tiebreak.cases.capture.watch import AttentionCall, NotHeldError, Place
from tiebreak.cases.captured import uncancelled_ulps
from tiebreak.cases.verdicts import CONFIDENCE, BiasVerdict, Interval, interval, judge
from tiebreak.kernels.formats import BF16, Format
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionInputs
from tiebreak.kernels.kernel import CannotRunError, Kernel, first_line
from tiebreak.kernels.reference import Reference, reference
from tiebreak.matrix.pairs.through_model import OwnModel, attention, inputs_of, own_model, shown
from tiebreak.matrix.result import recorded
from tiebreak.matrix.trial import raised
from tiebreak.programs.identify import FORMATS
from tiebreak.programs.pair import kernel_of
from tiebreak.reports import terminal
from tiebreak.reports.cli import FAILED, PASSED, Parser
from tiebreak.reports.errors import UsageError
from tiebreak.reports.records.decode import SCHEMA, encode
from tiebreak.reports.tables import grids
from tiebreak.reports.tables.grids import Grid
from tiebreak.reports.tables.run import counted
from tiebreak.reports.tables.texts import percent

#: Plain flash attention, with the published fix, with sums in fp32 as most kernels have them, and eager attention.
_PLANS = ("flash@paper", "stabilized@paper", "flash@fused", "standard")
_FEWEST = 16  # sequences: with fewer a quantile over all heads has no value that is known well enough


class Head(NamedTuple):
    """A head of one layer."""

    module: str
    layer: int  # by the order in which layers were called
    head: int

    def __str__(self) -> str:
        return f"layer {self.layer}, head {self.head} ({self.module or 'of no module'})"


@dataclass(frozen=True)
class Measured:
    """The attention of a model, each call asked as it comes: tensors are (sequences, heads), one for each layer."""

    name: str
    kernels: Mapping[str, tuple[Backend, Kernel]]
    fmt: Format
    tell: Callable[[str], None]
    errors: dict[str, list[Tensor]]  # ulp, by kernel, of those that took all calls
    heads: list[Head] = field(default_factory=list)
    met: list[dict[str, Tensor]] = field(default_factory=list)  # shares of rows, by what
    scores: list[float] = field(default_factory=list)  # the largest of each layer
    refused: dict[str, str] = field(default_factory=dict)  # kernels that take no such calls, and why
    wrong: dict[str, str] = field(default_factory=dict)  # kernels that raised, gave NaN or another function, and where
    unseen: Counter[str] = field(default_factory=Counter)  # calls that were not asked, by why
    shapes: Counter[str] = field(default_factory=Counter)

    @cached_property
    def bias(self) -> Mapping[str, Tensor]:
        """The mean errors of all heads, (sequences, heads), by kernel."""
        return {kernel: torch.cat(errors, 1) for kernel, errors in self.errors.items()}

    @cached_property
    def rows(self) -> Mapping[str, Tensor]:
        """The shares of rows of all heads, likewise, by what they meet."""
        return {what: torch.cat([met[what] for met in self.met], 1) for what in self.met[0]}

    @property
    def calls(self) -> str:
        """The shapes of all calls."""
        shapes = "; ".join(f"{counted(count, 'layer')} of {shape}" for shape, count in self.shapes.items())
        return f"{shapes}; q, k, v in {self.fmt.name}"

    def look(
        self, place: Place, call: Callable[[], AttentionCall], out: Tensor, to_heads: Callable[[Tensor], Tensor]
    ) -> None:
        """Ask one call, as `ModelWatch` reports it."""
        del out, to_heads
        try:
            inputs = inputs_of(call(), self.fmt)
        except NotHeldError as reason:
            self.unseen[str(reason)] += 1
            return
        ref, layer = reference(inputs), len(self.scores)
        self.tell(f"layer {layer}, {place.module}")
        met, largest = _met(inputs, ref)
        self.met.append(met)
        self.scores.append(largest)
        for name in list(self.errors):
            if (error := self._ask(name, inputs, ref, layer)) is None:
                del self.errors[name]
            else:
                self.errors[name].append(error)
        (sequences, heads, queries, d), (key_heads, keys) = inputs.q.shape, inputs.k.shape[1:3]
        self.heads.extend(Head(place.module, layer, head) for head in range(heads))
        seen = f"{queries} queries, {keys} keys, d {d}{', causal' if inputs.causal else ''}"
        self.shapes[f"{heads} heads on {key_heads}, {sequences} sequences, {seen}"] += 1

    def _ask(self, name: str, inputs: AttentionInputs, ref: Reference, layer: int) -> Tensor | None:
        """Return a kernel's mean signed error in ulps, by sequence and head; None: it gave none, and is told of."""
        backend, kernel = self.kernels[name]
        try:
            o = attention(kernel, backend, inputs)
        except CannotRunError as reason:
            self.refused[name] = first_line(reason)
            return None
        except Exception as error:  # the kernel is not ours: whatever it raises
            self.wrong[name] = f"raised {raised(error, kernel)}"
            return None
        off = (o.double() - ref.o).flatten(2).norm(dim=2) / ref.o.flatten(2).norm(dim=2)  # (sequences, heads)
        if (~o.isfinite() & ref.o.isfinite()).any():
            self.wrong[name] = f"has NaN or Inf in layer {layer}"
        elif (off > UNLIKE).any():
            apart = f"{off.nan_to_num().max():.0%} in a head of layer {layer}"
            self.wrong[name] = f"is another function: O is off by {apart}"
        else:
            return uncancelled_ulps(o, ref, inputs.formats.output).flatten(2).nanmean(2)
        return None

    def interval(self, kernel: str, head: int | None = None) -> Interval:
        """Return a kernel's bias in one head, at the confidence of all heads together, or in the mean of all."""
        bias = self.bias[kernel]
        values, of = (bias.nanmean(1), 1) if head is None else (bias[:, head], bias.shape[1])
        found = interval(values[values.isfinite()], 1 - (1 - CONFIDENCE) / of, looks=1)
        return found if values.isfinite().sum() >= _FEWEST else Interval(found.mean, math.inf)

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
        found = [f"{kernel} {why}" for kernel, why in self.wrong.items()]
        yield f"{self.name}: {'; '.join([*found, *map(self._verdict, self.bias)]) or 'no kernel takes its calls'}"
        yield f"  calls       {self.calls}"
        yield f"  rows        {self._shares()}; largest score {max(self.scores):.3g}"
        if self.bias:
            most = self.worst(next(iter(self.bias)))
            yield f"  most in     {self.heads[most]}: {self._shares(most)}"
            yield f"  bias there  {', '.join(f'{name} {_told(self.interval(name, most))}' for name in self.bias)} ulp"
        sequences = next(iter(self.rows.values())).shape[0]
        if sequences < _FEWEST:
            yield f"  intervals   none: {_FEWEST} sequences of tokens at least, {sequences} were given"
        yield from (f"  not asked   {name}: {why}" for name, why in self.refused.items())
        yield from (f"  not asked   {counted(count, 'call')} with {why}" for why, count in self.unseen.items())

    @property
    def table(self) -> Grid:
        """The kernels: in how many heads each is biased, the head where it is most surely, and its mean over all."""
        rows = []
        for name in self.bias:
            found, worst = self.verdicts(name), self.worst(name)
            biased, unbiased = found[BiasVerdict.BIASED], found[BiasVerdict.UNBIASED]
            at = f"{self.heads[worst].layer}, {self.heads[worst].head}"
            means = (_told(self.interval(name, head)) for head in (worst, None))
            rows.append([name, biased, len(self.heads) - biased - unbiased, at, *means])
        return Grid(["kernel", "biased", "undecided", "layer, head of most", "its bias", "of all heads"], rows)

    def as_json(self) -> str:
        """Return all of it: kernels, and heads with the shares of their rows and the bias of each kernel."""
        kept = {name: getattr(self, name) for name in ("name", "calls", "refused", "wrong", "unseen")}
        heads = [
            {
                **head._asdict(),
                "rows": {what: share[:, at].mean().item() for what, share in self.rows.items()},
                "bias": recorded({name: self.interval(name, at) for name in self.bias}),
                "verdict": {name: judge(self.interval(name, at)).value for name in self.bias},
            }
            for at, head in enumerate(self.heads)
        ]
        kept["largest"] = max(self.scores)
        kept["bias"] = recorded({name: self.interval(name) for name in self.bias})
        return encode({"schema": SCHEMA, **kept, "heads": heads}, 2)

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
    if math.isnan(interval.mean):
        return "unknown"  # all of O has cancelled, or is 0
    return f"{interval.mean:+.4f}" + (f" +- {interval.half_width:.4f}" if math.isfinite(interval.half_width) else "")


def main(arguments: Sequence[str]) -> int:
    """Run the verb `model`: print what there is to say; a kernel that is no attention fails, with --fair a bias too."""
    options = _parser().parse_intermixed_args(arguments)
    terminal.check_folders(json=options.json)
    names = list(dict.fromkeys(options.kernel or _PLANS))
    kernels = {name: kernel_of(name, options.backend, None, options.declare) for name in names}
    model = own_model(options.model, "")
    fmt = FORMATS[options.dtype] if options.dtype else next(iter(model.formats), BF16)
    measured = measure(model, kernels, fmt, lambda line: terminal.say(f"model: {line}"))
    found = sum((measured.verdicts(name) for name in measured.bias), Counter[BiasVerdict]())
    told = found[BiasVerdict.UNBIASED] == found.total() and not measured.refused and not measured.unseen
    biased = options.fair and found[BiasVerdict.BIASED]
    word = "FAIL" if measured.wrong or biased else "UNDECIDED" if options.fair and not told else "PASS"
    first, *lines = measured.lines()
    if options.json != terminal.STDOUT:
        terminal.show("\n".join([f"{word}: {first}", *lines]))
        if options.verbose:
            grids.show(["", measured.table])
    terminal.write(f"{measured.as_json()}\n", options.json)
    return PASSED if word == "PASS" else FAILED


def measure(
    model: OwnModel,
    kernels: Mapping[str, tuple[Backend, Kernel]],
    fmt: Format = BF16,
    tell: Callable[[str], None] = lambda _: None,
) -> Measured:
    """Send the tokens through a model once, and each call of attention through kernels, q, k and v in a format.

    Elements of O below a quarter of sum P |V| are left out: they have cancelled. UsageError: the model raises, or makes
    no call that can be asked, or its tokens are no independent samples.
    """
    if len(set(map(tuple, model.tokens.tolist()))) < len(model.tokens):
        raise UsageError(f"{model.name}: tokens has a sequence twice, and sequences are the samples")
    calls = Measured(model.name, kernels, fmt, tell, errors={name: [] for name in kernels})
    try:
        model.run(calls.look)
    except (Exception, SystemExit) as error:  # whatever a user's model raises
        raise UsageError(f"{model.name}: the model raised {shown(error)}") from error
    if not calls.met:
        why = "; ".join(f"calls with {why}" for why in calls.unseen) or "it calls neither torch's nor Hugging Face's"
        raise UsageError(f"{model.name}: no call of attention could be asked: {why}")
    if len({len(share) for met in calls.met for share in met.values()}) > 1:
        raise UsageError(f"{model.name}: its layers are called with different numbers of sequences")
    return calls


def _met(inputs: AttentionInputs, ref: Reference) -> tuple[dict[str, Tensor], float]:
    """Return the shares of rows, by sequence and head, that meet what kernels round wrongly, and the largest score."""
    hidden = inputs.hidden()
    product = inputs.q @ inputs.expanded_k().mT
    low = TORCH_DTYPES[inputs.formats.inputs]
    scores = {"fp32": product * inputs.scale, inputs.formats.inputs.name: product.to(low) * inputs.scale}
    found = {}
    for name, each in scores.items():
        s = inputs.visible(each)
        again = (s == s.amax(-1, keepdim=True)).sum(-1) > 1
        found[f"a repeated maximum (S in {name})"] = again.double().mean(-1)
    many = inputs.k.shape[2] if hidden is None else (~hidden).sum(-1)
    found[f"a P above {SINK}"] = ((ref.p.amax(-1) > SINK) & torch.as_tensor(many >= FEW)).double().mean(-1)
    return found, inputs.visible(ref.s).max().item()


def _parser() -> Parser:
    parser = Parser(
        prog="tiebreak model",
        description="Send a model's tokens through it once, and what its attention is given through kernels: how often"
        " rows meet what rounding is biased by, and the bias of each kernel in each head.",
        epilog="exit codes: 0 measured, 1 a kernel raised, gave NaN or another function; with --fair a bias, or one"
        " that is not told; 2 bad usage",
    )
    add = parser.add_argument
    add("model", metavar="FILE.py:FUNCTION", help="takes nothing and returns (module, tokens), a row a sequence")
    add("kernel", nargs="*", metavar="KERNEL", help=f"as of tiebreak pair (default: {', '.join(_PLANS)})")
    add("--backend", metavar="NAME", help="of the kernels (default: cpu; of a plan: emulation)")
    add("--declare", action="append", default=[], metavar="WORD=VALUE", help="as of tiebreak check")
    add("--dtype", choices=FORMATS, help="of q, k and v (default: the model's, of one in fp32 bf16)")
    add("-v", "--verbose", action="store_true", help="show each kernel's heads too, as a table")
    add("--json", metavar="FILE", help="write it as JSON too, head by head; -: to the terminal, and nothing else")
    add("--fair", action="store_true", help="fail where a head is biased, or where that is not told")
    return parser
