"""Questions about how a kernel is used: the same numbers, called in another way, must have the same answer.

The field calls them metamorphic relations: no reference is needed to see that they do not hold.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tiebreak.kernels.external.call import FULL, Call, Places
from tiebreak.kernels.features import HIDDEN_NAN
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import CannotRunError
from tiebreak.matrix.usage.log_sum_exp import judge_lse
from tiebreak.matrix.usage.placements import before_nan, expanded, fused, transposed, within_nan
from tiebreak.matrix.usage.relations import Answers
from tiebreak.matrix.usage.session import BATCH, CallShape, Cut, Session, visible_keys

GROUP = "the same numbers, called in another way"
_LARGE = 2.0**20  # times q below any 16-bit format's largest number but fp16's, and far above what a weak mask hides
_LARGE_FP16 = 2.0**6
_SQUARE = 64  # queries and keys of a call with a mask, or more
_BATCHES, _HEADS = 60, 5  # more than 2^8 in all, and a power of two in neither
_HIDDEN = 12  # keys at the end that padding hides


@dataclass(frozen=True)
class Question:
    """One question."""

    name: str  # of its cells
    about: str  # one line
    ask: Callable[[Session], None]  # takes down what is so
    source: str = "this suite"
    version: int = 1  # raised when the calls change: records of other versions are not comparable


def strided_views(session: Session) -> None:
    """Transposed views, slices of a fused buffer, dO of one expanded number."""
    _not_of_contiguous(session)
    inputs, plain = session.inputs(), session.plain
    views = {
        "transposed views": Places.all(transposed),
        "slices of a fused qkv buffer": Places.all(fused),
        "k alone transposed": Places(k=transposed),
    }
    session.same_in(views, plain, inputs)
    if session.has_gradients:
        ones = replace(inputs, do=torch.ones_like(inputs.do))
        session.same_in({"dO of stride 0": Places(do=expanded)}, session.answers(ones), ones)


def past_the_end(session: Session) -> None:
    """NaN in the storage behind the last head, key and column."""
    inputs, plain = session.inputs(), session.plain
    views = {"NaN behind the last element": Places.all(before_nan)}
    if not session.kernel.caller.convention.options.contiguous:
        views["NaN behind every head's last key, and behind d"] = Places.all(within_nan)
    session.same_in(views, plain, inputs)


def many_heads(session: Session) -> None:
    """More heads than 7 or 8 bits count, each compared with itself in a small call."""
    whole = session.inputs_of(_BATCHES, _HEADS)
    some = replace(whole, **{name: getattr(whole, name)[-BATCH:] for name in ("q", "k", "v", "do")})
    # With dummies a row may be an entry of the batch of its own.
    whole, some = session.arranged(whole), session.arranged(some)

    def cut(answers: Answers) -> Answers:
        return {name: tensor[-len(some.q) :] for name, tensor in answers.items()}

    session.same("the last of 300 heads", session.answers(whole), session.answers(some), some, cut=cut)


def _not_of_contiguous(session: Session) -> None:
    if session.kernel.caller.convention.options.contiguous:
        raise CannotRunError("declares contiguous=true: it is given no views")


@dataclass(frozen=True)
class _Masked:
    """A call with a mask that hides some keys, from all rows or from some."""

    words: str  # such keys
    inputs: AttentionInputs
    at: slice  # those keys
    cut: Cut  # what they must not change

    @property
    def padded(self) -> bool:
        """Whether no row sees them."""
        return not self.inputs.causal

    def with_keys(self, k: Tensor, v: Tensor) -> AttentionInputs:
        """With other K and V at those keys."""
        all_k, all_v = self.inputs.k.clone(), self.inputs.v.clone()
        all_k[:, :, self.at], all_v[:, :, self.at] = k, v
        return replace(self.inputs, k=all_k, v=all_v)


def _masked(session: Session) -> Iterator[_Masked]:
    """The calls that the kernel takes.

    Raises:
        CannotRunError: none; why not.
    """
    refusals, calls = [], (_padded, _causal, _windowed)
    for make in calls:
        masked = make(session)
        refusal = session.refusal(masked.inputs)
        if refusal is None and session.arranged(masked.inputs) is masked.inputs:
            yield masked
        else:
            refusals.append(refusal or "it is given dummy keys")
    if len(refusals) == len(calls):
        raise CannotRunError("; ".join(refusals))


def _square(session: Session) -> CallShape:
    """As many queries as keys, and as many as the kernel needs."""
    step = session.kernel.caller.convention.options.multiple_of
    size = -(-_SQUARE // step) * step
    return CallShape(size, size, session.shape.d)


def _padded(session: Session) -> _Masked:
    inputs = session.draw(_square(session))
    batch, _, keys, _ = inputs.k.shape
    takes_part = torch.ones(batch, keys, dtype=torch.bool)
    takes_part[:, -_HIDDEN:] = False
    cut = visible_keys(slice(0, keys - _HIDDEN), slice(None))
    return _Masked("padded keys", replace(inputs, key_padding=takes_part), slice(keys - _HIDDEN, keys), cut)


def _causal(session: Session) -> _Masked:
    """The last key is seen by the last row alone, whose dO is 0: it adds 0 to all gradients."""
    inputs = session.draw(replace(_square(session), causal=True))
    do = inputs.do.clone()
    do[:, :, -1] = 0.0
    before = slice(0, inputs.k.shape[2] - 1)
    last = slice(before.stop, before.stop + 1)
    return _Masked("keys ahead of a causal row", replace(inputs, do=do), last, visible_keys(before, before))


def _windowed(session: Session) -> _Masked:
    """Half as many rows as keys, whose windows leave the first keys out."""
    square = _square(session)
    inputs = session.draw(replace(square, queries=square.queries // 2))
    keys = inputs.k.shape[2]
    seen = keys // 4, keys
    cut = visible_keys(slice(*seen), slice(None))
    first = replace(inputs, window=(keys - inputs.q.shape[2] - seen[0], 0))
    return _Masked("keys outside of all windows", first, slice(0, seen[0]), cut)


def hidden_keys(session: Session) -> None:
    """Other K and V where a mask hides them: large ones in padding, which holds anything, else the same negated.

    A key ahead of a causal row is another row's own: a kernel in 8 bits may share a scale with it.
    """
    large = torch.tensor(_LARGE if session.fmt.largest > _LARGE**2 else _LARGE_FP16)
    for masked in _masked(session):
        plain, inputs = session.answers(masked.inputs), masked.inputs
        k, v = (large, large) if masked.padded else (-inputs.k[:, :, masked.at], -inputs.v[:, :, masked.at])
        asked = f"{f'{large:.0f}' if masked.padded else 'other numbers'} in {masked.words}"
        session.same(asked, session.answers(masked.with_keys(k, v)), plain, inputs, cut=masked.cut)


def hidden_nan(session: Session) -> None:
    """NaN and Inf there, asked of kernels that say that they take it: 0 times NaN is NaN, and most compute it."""
    worst = 0.0
    for masked in _masked(session):
        plain = session.answers(masked.inputs)
        # The row that sees a NaN has NaN gradients, and so have all keys that it sees: of a causal mask O alone tells,
        # and V's NaN is multiplied by a P of 0 in every tile that has it.
        for number in (torch.nan, torch.inf):
            full, cut = torch.tensor(number), masked.cut
            v = full if masked.padded else masked.inputs.v[:, :, masked.at]
            answers = session.answers(masked.with_keys(full, v))
            judged = answers if masked.padded else {"O": answers["O"]}
            lost = [(~torch.isfinite(tensor)).double().mean().item() for tensor in cut(judged).values()]
            worst = max(worst, *lost)
            if HIDDEN_NAN in session.kernel.takes:
                session.same(f"{number} in {masked.words}", judged, plain, masked.inputs, cut=cut)
    session.measures["nan_let_in"] = worst


@dataclass(frozen=True)
class _MaskInPlace(Call):
    """A call whose mask lies where that of the calls before it lay."""

    masks: dict[int, Tensor]  # by where the part of K that they are of begins

    def keywords(self, inputs: AttentionInputs) -> dict[str, Any]:
        """As `Call.keywords`."""
        keywords, name = super().keywords(inputs), str(self.convention.mask)
        there = self.masks.setdefault(int(inputs.k.storage_offset()), keywords[name].clone())
        return keywords | {name: there.copy_(keywords[name])}


def other_mask(session: Session) -> None:
    """After a call with another mask of the same shape, against one that has as many keys again, all hidden."""
    shape, first = _square(session), _padded(session).inputs
    refusal = session.refusal(first)
    if refusal is not None:
        raise CannotRunError(refusal)
    batch, _, keys, _ = first.k.shape
    seen = slice(0, keys - 2 * _HIDDEN)
    takes_part = torch.arange(keys).expand(batch, -1) < seen.stop
    inputs = replace(first, key_padding=takes_part)
    more = session.draw(replace(shape, queries=2 * keys, keys=2 * keys), 1)
    more.do.zero_()
    for name in ("q", "k", "v", "do"):
        getattr(more, name)[:, :, :keys] = getattr(inputs, name)
    longer = replace(more, key_padding=pad(takes_part, (0, keys)))
    cut = visible_keys(seen, slice(0, keys))
    masks: dict[int, Tensor] = {}
    plain = session.answers(longer)
    session.answers(first)
    session.same("another mask of the same shape", session.answers(inputs), plain, inputs, cut=cut)
    calls = [_MaskInPlace(**vars(session.call(each)), masks=masks) for each in (first, inputs)]
    answers = [session.answers_of(call, session.placed(call)) for call in calls]
    session.same("a mask rewritten in place", answers[1], plain, inputs, cut=cut)


def interleaved(session: Session) -> None:
    """Two forward passes, then their backward passes in either order."""
    both = [session.inputs(index) for index in range(2)]
    plain, again = ([session.answers(inputs) for inputs in both] for _ in range(2))
    orders = list(permutations(range(2))) if session.has_gradients else [(0, 1)]
    for order in orders:
        calls = [session.call(inputs) for inputs in both]
        placed = [session.placed(call) for call in calls]
        outputs = [call.forward(where) for call, where in zip(calls, placed, strict=True)]
        gradients = {i: session.backward(calls[i], placed[i], outputs[i]) for i in order}
        for i, words in enumerate(("the first", "the second")):
            turn = ("first" if order[0] == i else "last") if session.has_gradients else ""
            asked = f"{words} of two calls in turn{turn and f', backward {turn}'}"
            ours = session.collected(calls[i], outputs[i], gradients[i])
            session.same(asked, ours, plain[i], both[i], again=again[i])


def rewritten_in_place(session: Session) -> None:
    """A second call with other numbers at the same addresses."""
    both = [session.inputs(index) for index in range(2)]
    calls = [session.call(inputs) for inputs in both]
    placed = [session.placed(call) for call in calls]
    plain, again = (session.answers(both[1]) for _ in range(2))
    session.answers_of(calls[0], placed[0])
    with torch.no_grad():
        for there, new in zip((*placed[0].arguments, placed[0].do), (*placed[1].arguments, placed[1].do), strict=True):
            there.copy_(new)
    ours = session.answers_of(calls[1], placed[0])
    session.same("q, k, v and dO rewritten in place", ours, plain, both[1], again=again)


def third_call(session: Session) -> None:
    """The first call of a shape against the third: either may be the wrong one."""
    inputs = session.inputs()
    _, third = (session.answers(inputs) for _ in range(2))
    session.same("the third call against the first", third, session.plain, inputs)
    session.same("the first call against the third", session.plain, third, inputs)


def scaled_do(session: Session) -> None:
    """dO times a power of two: gradients are finite, and as much larger."""
    inputs, plain = session.inputs(), session.plain
    if not session.has_gradients:
        raise CannotRunError("has no backward pass")
    # Of fp16 dP would overflow, and dS underflow, in a sound kernel too.
    power = 10 if session.fmt.largest > _LARGE else 4
    for exponent in (power, -power):
        factor = 2.0**exponent
        answers = session.answers(replace(inputs, do=inputs.do * factor))
        ours = {name: tensor if name == "O" else tensor / factor for name, tensor in answers.items()}
        session.same(f"dO times 2^{exponent}", ours, plain, inputs)


def log_sum_exp(session: Session) -> None:
    """The log-sum-exp that it returns beside O, in base e or two."""
    options = session.kernel.caller.convention.options
    if len(options.layout) < len(FULL):
        raise CannotRunError("is called for every sequence: its log-sum-exp is not looked at")
    inputs = session.inputs()
    call = session.call(inputs)
    returned = call.returned(call.placed(gradients=False))
    second = returned[1] if isinstance(returned, (tuple, list)) and len(returned) > 1 else None
    judged = judge_lse(second, inputs, options.lse)
    session.relations.append(judged.relation)
    session.measures |= judged.measures
    session.unit = judged.unit


QUESTIONS = (
    Question("strided_views", "q, k, v and dO are views with other strides, as frameworks pass them", strided_views),
    Question("past_the_end", "what lies in memory behind q, k, v and dO is NaN", past_the_end),
    Question("many_heads", "300 heads in one call, against the last of them in a call of their own", many_heads),
    Question("hidden_keys", "K and V hold other numbers where a mask hides them", hidden_keys),
    Question("hidden_nan", "K and V hold NaN and Inf where a mask hides them", hidden_nan),
    Question("other_mask", "another mask of the same shape hides other keys", other_mask),
    Question("interleaved", "two forward passes, then their backward passes in either order", interleaved),
    Question("rewritten_in_place", "a second call with other numbers at the same addresses", rewritten_in_place),
    Question("third_call", "the third call on the same numbers against the first", third_call),
    Question("log_sum_exp", "the log-sum-exp that a kernel returns beside O", log_sum_exp),
    Question("scaled_do", "dO times a power of two", scaled_do),
)
