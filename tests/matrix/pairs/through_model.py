"""A pair of kernels through a model: what becomes of the log-probabilities of its tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from tiebreak.backends.backend import EMULATION, Backend
from tiebreak.cases.capture.watch import AttentionCall, NotHeldError, Place, Watch
from tiebreak.cases.gpt2 import fixture
from tiebreak.cases.gpt2.attention import HeadKernel
from tiebreak.cases.gpt2.fixture import Read, Way, chosen
from tiebreak.cases.verdicts import interval
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.external.isolation import own_randomness
from tiebreak.kernels.external.loading import load
from tiebreak.kernels.external.options import LoadError
from tiebreak.kernels.formats import BF16, FP16, FP32, Format, Formats
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import CannotRunError, Kernel, composed
from tiebreak.kernels.plans import Cast
from tiebreak.kernels.reference import reference
from tiebreak.matrix.pairs.side import Side
from tiebreak.matrix.trial import first_line, raised
from tiebreak.reports.errors import UsageError
from tiebreak.reports.pairs import log_probabilities as records
from tiebreak.reports.records.record import Estimate, finite

_SEED = 1  # of what a kernel draws
_EMULATED = "plan of "
_DRAWN = ("other random bits",)
_Reading = tuple[str, Way, int]  # whose, how it was called, and the number of the draw


class SuiteModel:
    """The suite's own language model: see `gpt2.fixture`."""

    ways: Sequence[Way] = tuple(Way)  # how its tokens can go through it; a pair is called in the first

    @property
    def name(self) -> str:
        """What it is, in one line."""
        sizes = f"{fixture.CONFIGURATION.layers} layers, {fixture.SEQUENCES} sequences of {fixture.CONTEXT} tokens"
        return f"the suite's GPT-2: {sizes}, version {fixture.VERSION}, {fixture.fixture().digest}"

    @property
    def layers(self) -> Sequence[str]:
        """What the streams of a reading stand behind."""
        return [f"layer {number}" for number in range(fixture.CONFIGURATION.layers)]

    @property
    def formats(self) -> Sequence[Format]:
        """Those of q, k and v that it comes in."""
        return BF16, FP16

    def read(self, backend: Backend, kernel: Kernel, fmt: Format, way: Way = Way.PREFILL, draw: int = 0) -> Read:
        """What a kernel in the place of all attention makes of the tokens; whatever it raises is raised."""
        with backend.in_use():
            return fixture.read(HeadKernel(_asking(kernel), Cast(fmt)), backend.arithmetic, backend.device, way, draw)

    def exact(self) -> Read:
        """What exact attention makes of them."""
        return fixture.exact()


@dataclass
class OwnModel(SuiteModel):
    """A user's model and its tokens. It is called as it is, and what of its attention is not seen stays its own."""

    target: str  # as it was asked for
    module: nn.Module  # of the tokens it returns logits, (batch, tokens, vocabulary), or what has them as `.logits`
    tokens: Tensor  # (batch, tokens), whole numbers: those whose log-probabilities are compared
    _places: list[str] = field(default_factory=list)  # of its calls of attention, when last read
    ways = (Way.PREFILL,)

    @property
    def name(self) -> str:
        return f"{self.target}, {self.tokens.shape[0]} sequences of {self.tokens.shape[1]} tokens"

    @property
    def layers(self) -> Sequence[str]:
        return self._places

    @property
    def formats(self) -> Sequence[Format]:
        """The one that its weights are in, if that is of 16 bits."""
        own = {weight.dtype for weight in self.module.parameters()}
        return tuple(fmt for fmt in super().formats if TORCH_DTYPES[fmt] in own) or super().formats

    def read(self, backend: Backend, kernel: Kernel, fmt: Format, way: Way = Way.PREFILL, draw: int = 0) -> Read:
        del way
        return self._read(lambda inputs: backend.run(_asking(kernel), inputs, gradients=False).o, fmt, draw)

    def exact(self) -> Read:
        """Attention in fp64, of q, k and v as they are; all else as the module has it."""
        return self._read(lambda inputs: reference(inputs).o, FP32, 0)

    @torch.no_grad()
    def _read(self, attention: Callable[[AttentionInputs], Tensor], fmt: Format, draw: int) -> Read:
        outputs = dict[str, Tensor]()

        def put(
            place: Place, call: Callable[[], AttentionCall], out: Tensor, to_heads: Callable[[Tensor], Tensor]
        ) -> None:
            o = to_heads(out)  # a view: what is written into it is what the model goes on with
            o.copy_(attention(_inputs(call(), fmt, draw << 16 | len(outputs))))
            outputs[f"{place.module} {place.number or ''}".strip()] = o.double().cpu()

        watch = Watch(self.module, {}, put)
        try:
            with watch.installed():
                watch.look(True)
                made = self.module(self.tokens)
        except NotHeldError as reason:
            raise UsageError(
                f"--model {self.target}: a call of attention with {reason}; only plain ones fit"
            ) from reason
        self._places[:] = outputs
        logits = getattr(made, "logits", made)
        if not outputs:
            raise UsageError(
                f"--model {self.target}: it calls neither torch's attention nor Hugging Face's, or is compiled"
            )
        if not isinstance(logits, Tensor) or logits.shape[:-1] != self.tokens.shape:
            raise UsageError(f"--model {self.target}: it returns no logits (batch, tokens, vocabulary) of its tokens")
        return Read(chosen(logits, self.tokens), tuple(outputs.values()))


def _inputs(call: AttentionCall, fmt: Format, noise: int) -> AttentionInputs:
    """A model's call as a kernel of the suite takes it: numbers of the format in fp32, on the host."""
    q, k, v = (part.cpu().to(TORCH_DTYPES[fmt]).float() for part in (call.q * call.factor, call.k, call.v))
    return AttentionInputs(q, k, v, q, Formats.of(fmt), causal=call.causal, noise_seed=noise, softmax_scale=call.scale)


def own_model(target: str) -> OwnModel:
    """The model that `--model FILE.py:FUNCTION` names: the function takes nothing and returns (module, tokens).

    Raises:
        UsageError: it can't be found, called or used; one line that names the flag.
    """
    try:
        made = load(target)()
    except LoadError as error:
        raise UsageError(f"--model {target}: {error}") from error
    except Exception as error:  # whatever a user's function raises
        raise UsageError(f"--model {target}: it raised {type(error).__name__}: {first_line(error)}") from error
    module, tokens = made if isinstance(made, tuple) and len(made) == 2 else (None, None)
    if not isinstance(module, nn.Module) or not isinstance(tokens, Tensor):
        raise UsageError(f"--model {target}: expected a function that returns (module, tokens)")
    if tokens.dim() != 2 or tokens.shape[1] < 2 or tokens.is_floating_point():
        raise UsageError(f"--model {target}: expected tokens of shape (batch, 2 or more), whole numbers")
    return OwnModel(target, module.eval(), tokens)


def _asking(kernel: Kernel) -> Kernel:
    """The forward pass of a kernel that refuses what it does not take, in the place of a wrong answer."""

    def compute(inputs: AttentionInputs, arithmetic: Arithmetic, gradients: bool) -> AttentionOutput:
        if reason := kernel.refusal(inputs):
            raise CannotRunError(reason)
        return kernel.compute(inputs, arithmetic, gradients)

    return Kernel(kernel.name, compute, kernel.declaration, has_backward=False)


def through_model(
    a: Side,
    b: Side,
    formats: Sequence[Format] = (BF16, FP16),
    model: SuiteModel | None = None,
    told: Callable[[str], None] = lambda _: None,
) -> records.ModelRecord:
    """Each of two kernels in the place of all attention of a model: the suite's, or a user's (`own_model`).

    `told` hears what is being read. A model in 16 bits is read in its own format alone.

    Raises:
        UsageError: a user's model is in none of the formats, makes no call that is seen, or returns no logits.
    """
    model = SuiteModel() if model is None else model
    own = [fmt for fmt in formats if fmt in model.formats]
    if not own:
        raise UsageError(f"--model {model.name}: its weights are in {model.formats[0].name}; name that as --dtype")
    sides = {"A": a, "B": b}
    for letter, side in {"A": a, "B": b}.items():
        if side.plan is not None and side.known:  # what it is, emulated, predicts of the difference
            sides[_EMULATED + letter] = replace(side, backend=EMULATION, kernel=composed(side.plan.label, side.plan))
    with own_randomness(_SEED):
        read = tuple(_Readings(sides, model, fmt, told).record() for fmt in own)
    return records.ModelRecord(a.name, b.name, model.name, read)


@dataclass
class _Readings:
    """All readings of a pair in one format, each made when it is first asked for."""

    sides: dict[str, Side]  # by letter
    model: SuiteModel
    fmt: Format
    told: Callable[[str], None]
    _made: dict[_Reading | None, Read | str] = field(default_factory=dict)

    def record(self) -> records.FormatRecord:
        """Those that have to do with each other, side by side."""
        first, *other = self.model.ways
        a, b = ("A", first, 0), ("B", first, 0)
        rows = [self._compared(records.PAIR, a, b)]
        rows += [self._compared(records.EXACT, None, one) for one in (a, b)]
        rows += [self._compared(records.WAYS, a, ("B", way, 0)) for way in other]
        for one in (a, b):
            rows += [self._compared(records.FLOOR, one, (one[0], way, 0)) for way in other]
            drawn = self._compared(records.FLOOR, one, (one[0], first, 1))
            if drawn.difference is not None and drawn.difference.equal < 1.0:  # else it has no random bits
                rows.append(drawn)
        return records.FormatRecord(self.fmt.name, tuple(rows), self._nearer(a, b))

    def _compared(self, role: str, first: _Reading | None, second: _Reading) -> records.Compared:
        apart, predicted = self._apart(first, second), None
        if role in (records.PAIR, records.EXACT) and all(_EMULATED + letter in self.sides for letter in "AB"):
            # Random bits of two kernels are as good as independent, unless they are the suite's own.
            draw = int(role == records.PAIR and not self.sides["B"].kernel.composed)
            plans = [one and (_EMULATED + one[0], one[1], one[2]) for one in (first, (*second[:2], draw))]
            of_plans = self._apart(plans[0], plans[1])
            predicted = None if isinstance(of_plans, str) else of_plans.rms
        words = [", ".join((one[0], one[1].value, *_DRAWN[: one[2]])) if one else "exact" for one in (first, second)]
        if isinstance(apart, str):
            return records.Compared(words[0], words[1], role, skipped=apart)
        return records.Compared(words[0], words[1], role, apart, predicted=predicted)

    def _apart(self, first: _Reading | None, second: _Reading | None) -> records.Difference | str:
        """The difference, or why there is none."""
        before, after = self._read(first), self._read(second)
        if isinstance(before, str):
            return before
        return after if isinstance(after, str) else difference(before, after, self.model.layers)

    def _read(self, reading: _Reading | None) -> Read | str:
        """What is read, or in one line what the kernel refuses or raises; None: by exact attention."""
        if reading not in self._made:
            letter, way, draw = reading or ("exact", self.model.ways[0], 0)
            side = self.sides.get(letter)
            self.told(f"{self.fmt.name}: {letter}, {way.value}")
            try:
                read = (
                    self.model.exact()
                    if side is None
                    else self.model.read(side.backend, side.kernel, self.fmt, way, draw)
                )
                self._made[reading] = read
            except UsageError:
                raise
            except Exception as error:  # the kernel is not ours: whatever it raises
                if side is None or side.backend.poisoned():
                    raise
                self._made[reading] = raised(error, side.kernel)
        return self._made[reading]

    def _nearer(self, a: _Reading, b: _Reading) -> str | None:
        """Which has the smaller mean square of its errors, if that is sure; the samples are sequences."""
        reads = [self._read(one) for one in (None, a, b)]
        exact, *own = [read.log_probabilities for read in reads if isinstance(read, Read)]
        if len(own) < 2:
            return None
        squares = [(each - exact).square().mean(1) for each in own]
        more = interval(squares[1] - squares[0])
        return ("A" if more.mean > 0 else "B") if more.beyond(0.0) else None


def difference(first: Read, second: Read, layers: Sequence[str] = ()) -> records.Difference:
    """What the second reading has more than the first, in nats; `layers` name their streams."""
    d = second.log_probabilities - first.log_probabilities
    off = d.expm1()  # ratio of the probabilities, less 1
    mean, parts = interval(d.mean(1)), d.tensor_split(records.EIGHTHS, 1)
    streams = zip(layers, first.streams, second.streams, strict=True) if layers else ()
    return records.Difference(
        tokens=d.numel(),
        mean=Estimate.of(mean.mean, mean.half_width),
        rms=_rms(d),
        largest=finite(d.abs().max().item()),
        k1=finite(-d.mean().item()),
        k3=finite((off - d).mean().item()),
        beyond_1_percent=_share(~(off.abs() <= 0.01)),  # where there is no number, too
        beyond_20_percent=_share(~(off.abs() <= 0.2)),
        equal=_share(d == 0),
        by_position=tuple(map(_rms, parts)),
        layers=tuple(
            records.LayerDifference(name, finite(((y - x).norm() / x.norm()).item()), _share(x == y))
            for name, x, y in streams
        ),
    )


def _rms(d: Tensor) -> float | None:
    return finite(d.square().mean().sqrt().item())


def _share(those: Tensor) -> float:
    return those.double().mean().item()
