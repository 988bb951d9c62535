"""A pair of kernels through a model: what becomes of the log-probabilities of its tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tiebreak.backends.backend import EMULATION, Backend
from tiebreak.cases.capture.watch import AttentionCall, ModelWatch, NotHeldError, OnCall, Place, compiled_module
from tiebreak.cases.gpt2 import fixture
from tiebreak.cases.gpt2.attention import HeadKernel
from tiebreak.cases.gpt2.fixture import Read, Way
from tiebreak.cases.verdicts import interval
from tiebreak.kernels.external.isolation import own_randomness
from tiebreak.kernels.external.loading import load, place_of
from tiebreak.kernels.external.options import LoadError
from tiebreak.kernels.formats import BF16, FP16, FP32, Format, Formats
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionInputs
from tiebreak.kernels.kernel import CannotRunError, Kernel, composed, first_line, in_one_line
from tiebreak.kernels.plans import Cast
from tiebreak.kernels.reference import reference
from tiebreak.matrix.identification.asking import threads
from tiebreak.matrix.pairs import Side
from tiebreak.matrix.trial import raised
from tiebreak.reports.errors import UsageError
from tiebreak.reports.pairs import log_probabilities as records
from tiebreak.reports.records.record import Estimate, finite

_EXACT, _PLAN_OF = "exact", "plan of "  # in addition to A and B: exact attention, and a side's plan, emulated
_SEED = 1  # of what a kernel draws


@dataclass(frozen=True)
class SuiteModel:
    """The suite's own language model: see `gpt2.fixture`."""

    ways: Sequence[Way] = tuple(Way)  # how its tokens can go through it; a pair is called in the first
    formats: Sequence[Format] = ()  # of q, k and v, that it is in; none: any

    @property
    def name(self) -> str:
        """The name, with a digest that identifies its bits."""
        with threads(1):
            return f"the suite's GPT-2 (version {fixture.VERSION}, {fixture.fixture().digest})"

    def read(self, side: Side | None, fmt: Format, way: Way = Way.PREFILL, draw: int = 0) -> Read:
        """Return the log-probabilities with a side as attention, None for exact attention; its errors are raised."""
        with threads(1):  # its tensors are small
            if side is None:
                return fixture.exact()
            with side.backend.in_use():
                head = HeadKernel(replace(side.kernel, has_backward=False), Cast(fmt))
                return fixture.read(head, side.backend.arithmetic, side.backend.device, way, draw)


@dataclass(frozen=True)
class OwnModel:
    """A user's language model."""

    name: str  # as it was asked for
    module: nn.Module  # of the tokens it returns logits, (batch, tokens, vocabulary), or what has them as `.logits`
    tokens: Tensor  # (batch, tokens), whole numbers: those whose log-probabilities are compared
    formats: Sequence[Format] = ()  # see `SuiteModel`
    ways: Sequence[Way] = (Way.PREFILL,)  # likewise: it is called as it is

    @torch.no_grad()
    def run(self, on_call: OnCall) -> Any:
        """Return what the module makes of its tokens; each call of attention is told. Its errors are raised."""
        watch = ModelWatch(self.module, {}, on_call)
        with watch.installed():
            watch.look(True)
            return self.module(self.tokens)

    def read(self, side: Side | None, fmt: Format, way: Way = Way.PREFILL, draw: int = 0) -> Read:
        """Do as `SuiteModel`; the streams are O of every call seen, and exact attention takes q, k, v unrounded."""
        del way
        outputs, fmt = list[Tensor](), fmt if side else FP32

        def put(place: Place, call: Callable[[], AttentionCall], out: Tensor, to_heads: Callable[..., Tensor]) -> None:
            inputs = inputs_of(call(), fmt, noise_seed=draw << 16 | len(outputs))
            o = to_heads(out)  # a view: what is written into it is what the model goes on with
            o.copy_(attention(side.kernel, side.backend, inputs) if side else reference(inputs).o)
            outputs.append(o.cpu().double())

        try:
            made = self.run(put)
        except NotHeldError as reason:
            raise UsageError(f"--model {self.name}: kernels here take no calls with {reason}") from reason
        logits = getattr(made, "logits", made)
        if not outputs:
            raise UsageError(f"--model {self.name}: calls neither torch's attention nor Hugging Face's")
        if not isinstance(logits, Tensor) or logits.shape[:-1] != self.tokens.shape:
            raise UsageError(f"--model {self.name}: returns no logits (batch, tokens, vocabulary) of its tokens")
        return Read(fixture.log_probabilities_of(logits, self.tokens), tuple(outputs))


def inputs_of(call: AttentionCall, fmt: Format, noise_seed: int = 0) -> AttentionInputs:
    """Return a model's call with q, k and v in a format, without gradients; NotHeldError: kernels here take no such."""
    if call.spans:
        raise NotHeldError("padding")
    q, k, v = (x.cpu().to(TORCH_DTYPES[fmt]).float() for x in (call.q * call.factor, call.k, call.v))
    return AttentionInputs(q, k, v, q, Formats.of(fmt), call.causal, noise_seed=noise_seed, softmax_scale=call.scale)


def attention(kernel: Kernel, backend: Backend, inputs: AttentionInputs) -> Tensor:
    """Return a kernel's O, (batch, heads, queries, d); CannotRunError: it takes no such call."""
    if reason := kernel.refusal(inputs):
        raise CannotRunError(reason)
    return backend.run(kernel, inputs, gradients=False).o


def own_model(target: str, flag: str = "--model ") -> OwnModel:
    """Return the model that `--model FILE.py:FUNCTION` names: the function takes nothing and returns (module, tokens).

    UsageError: it can't be found, called or used; one line that names the flag.
    """
    try:
        made = load(target)()
    except (Exception, SystemExit) as error:  # whatever a user's function raises
        raise UsageError(f"{flag}{target}: {shown(error)}") from error
    try:
        module, tokens = made
        used = {weight.dtype for weight in module.eval().parameters()}
        if tokens.dim() != 2 or tokens.shape[1] < 2 or tokens.is_floating_point():
            raise ValueError(f"tokens are {tokens.dtype} {tuple(tokens.shape)}, not whole numbers (batch, 2 or more)")
    except (AttributeError, TypeError, ValueError) as error:
        raise UsageError(f"{flag}{target}: {first_line(error)}; it has to return (module, tokens)") from error
    if (compiled := compiled_module(module)) is not None:
        raise UsageError(
            f"{flag}{target}: {compiled} is compiled, which hides its calls; return it before torch.compile"
        )
    return OwnModel(target, module, tokens, tuple(fmt for fmt in (BF16, FP16) if TORCH_DTYPES[fmt] in used))


def shown(error: BaseException) -> str:
    """Return in one line what a user's model raised, and where."""
    return first_line(error) if isinstance(error, LoadError) else f"{in_one_line(error)}{place_of(error)}"


def through_model(
    a: Side,
    b: Side,
    formats: Sequence[Format] = (BF16, FP16),
    model: SuiteModel | OwnModel | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> records.ModelRecord:
    """Read a model with each of two kernels as all its attention: the suite's model, or a user's (`own_model`).

    `tell` is called with a line of progress. A model in 16 bits is read in its own format only. UsageError: a user's
    model makes no call that is seen, or one that no kernel takes, or returns no logits.
    """
    model, sides = model or SuiteModel(), {_EXACT: None, records.A: a, records.B: b, _PLAN_OF + _EXACT: None}
    for letter, side in zip(records.SIDES, (a, b), strict=True):
        if side.plan is not None and side.known:
            sides[_PLAN_OF + letter] = replace(side, backend=EMULATION, kernel=composed(side.plan.label, side.plan))
    with own_randomness(_SEED):
        read = tuple(_Readings(sides, model, fmt, tell).record() for fmt in model.formats or formats)
    return records.ModelRecord(a.name, b.name, model.name, read)


class _Reading(NamedTuple):
    whose: str  # letter of the side
    way: Way  # in which it is called
    draw: int = 0  # of random bits

    def __str__(self) -> str:
        ways = [self.way.value] if self.way is not Way.PREFILL else []
        return ", ".join([self.whose, *ways, *["other random bits"] * self.draw])


@dataclass(frozen=True)
class _Readings:
    sides: dict[str, Side | None]  # by letter; None: exact attention
    model: SuiteModel | OwnModel
    fmt: Format
    tell: Callable[[str], None]
    made: dict[_Reading, Read | str] = field(default_factory=dict)  # or why not

    def record(self) -> records.FormatRecord:
        way, *others = self.model.ways
        exact, a, b = (_Reading(letter, way) for letter in (_EXACT, *records.SIDES))
        rows = [self._compared(records.PAIR, a, b)]
        rows += [self._compared(records.EXACT, exact, one) for one in (a, b)]
        rows += [self._compared(records.WAYS, a, b._replace(way=other)) for other in others]
        for one in (a, b):
            rows += [self._compared(records.FLOOR, one, one._replace(way=other)) for other in others]
            again = self._compared(records.FLOOR, one, one._replace(draw=1))
            rows += [again] if again.difference and again.difference.equal < 1.0 else []  # else it has no random bits
        logs = [read.log_probabilities for one in (exact, a, b) if isinstance(read := self._read(one), Read)]
        squares = [(each - logs[0]).square().mean(1) for each in logs[1:]]
        more = interval(squares[-1] - squares[0]) if len(squares) == 2 else None  # of B's mean square than of A's
        nearer = None if more is None or not more.is_beyond(0.0) else records.A if more.mean > 0 else records.B
        return records.FormatRecord(self.fmt.name, tuple(rows), nearer)

    def _compared(self, role: str, first: _Reading, second: _Reading) -> records.ReadingComparison:
        apart = self._apart(first, second)
        if isinstance(apart, str):
            return records.ReadingComparison(str(first), str(second), role, skipped=apart)
        plans = role in (records.PAIR, records.EXACT)
        of_plans = self._apart(self._plan(first), self._plan(second)) if plans else None
        predicted = of_plans.rms if isinstance(of_plans, records.LogProbabilityDifference) else None
        return records.ReadingComparison(str(first), str(second), role, apart, predicted=predicted)

    def _plan(self, reading: _Reading) -> _Reading:
        """Return the same reading of a side's plan, with independent random bits unless they are the suite's own."""
        side = self.sides[reading.whose]
        apart = reading.whose == records.B and side is not None and not side.kernel.composed
        return reading._replace(whose=_PLAN_OF + reading.whose, draw=int(apart))

    def _apart(self, first: _Reading, second: _Reading) -> records.LogProbabilityDifference | str:
        before, after = self._read(first), self._read(second)
        if isinstance(before, str):
            return before
        return after if isinstance(after, str) else difference(before, after)

    def _read(self, reading: _Reading) -> Read | str:
        """Return a reading, or in one line what is unknown, or what the kernel refuses or raises."""
        if reading.whose not in self.sides:
            return f"no {reading.whose} is known"
        if reading not in self.made:
            side = self.sides[reading.whose]
            self.tell(f"{self.fmt.name}: {reading}")
            try:
                self.made[reading] = self.model.read(side, self.fmt, reading.way, reading.draw)
            except Exception as error:  # the kernel is not ours, nor a model: whatever they raise
                if isinstance(error, UsageError) or (side is not None and side.backend.poisoned()):
                    raise
                if side is None:
                    raise UsageError(f"--model {self.model.name}: {first_line(error)}{place_of(error)}") from error
                refused = isinstance(error, CannotRunError)
                self.made[reading] = first_line(error) if refused else raised(error, side.kernel)
        return self.made[reading]


def difference(first: Read, second: Read) -> records.LogProbabilityDifference:
    """Return the second reading less the first."""
    d = second.log_probabilities - first.log_probabilities
    off, streams = d.expm1(), list(zip(first.streams, second.streams, strict=True))  # off: what ratios are more than 1
    return records.LogProbabilityDifference(
        tokens=d.numel(),
        equal=_share(d == 0),
        mean=Estimate.of(*vars(interval(d.mean(1))).values()),
        rms=_rms(d),
        largest=finite(d.abs().max().item()),
        k1=finite(-d.mean().item()),
        k3=finite((off - d).mean().item()),
        beyond_1_percent=_share(~(off.abs() <= 0.01)),  # NaN too
        beyond_20_percent=_share(~(off.abs() <= 0.2)),
        by_position=tuple(map(_rms, d.tensor_split(records.EIGHTHS, 1))),
        by_layer=tuple(finite(((y - x).norm() / x.norm()).item()) for x, y in streams),
        equal_by_layer=tuple(_share(x == y) for x, y in streams),
    )


def _rms(d: Tensor) -> float | None:
    return finite(d.square().mean().sqrt().item())


def _share(those: Tensor) -> float:
    return those.double().mean().item()
