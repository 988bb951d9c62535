"""Questions about how a kernel is used: the same numbers, called in another way, must have the same answer."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, permutations, product
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tiebreak.cases.feature_cases import VARIED
from tiebreak.kernels.external.call import Call, Made, Places
from tiebreak.kernels.external.kernels import UserKernel
from tiebreak.kernels.external.options import AUTOGRAD, split_words
from tiebreak.kernels.features import CAPPED_BIAS, CAUSAL, GROUPED, HIDDEN_NAN, OWN_ENDS, OWN_SCALE, VALUE_DIM, WINDOW
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import CannotRunError, Declaration
from tiebreak.matrix.questions.comparison import BATCH, DQ, Answers, Cut, O, WithinError
from tiebreak.matrix.questions.log_sum_exp import log_sum_exp
from tiebreak.matrix.questions.placements import before_nan, expanded, fused, transposed, within_nan
from tiebreak.matrix.questions.session import SHAPES, CallShape, PlacedCall, Question, Session

GROUP = "the same numbers, called in another way"
_LARGE = 2.0**20  # times q below any 16-bit format's largest number but fp16's, and far above what a weak mask hides
_LARGE_FP16 = 2.0**6
_SQUARE = 64  # queries and keys of a call with a mask, or more
_BATCHES, _HEADS = 60, 5  # more than 2^8 in all, and a power of two in neither
_FEW = 16  # queries and keys of such a call
_HIDDEN = 12  # keys at the end that padding hides
_SIZES = (1, 2, 63, 64, 65, 97, 127, 128, 129, 255, 256, 257)  # rows and keys, at which kernels take another path
_MANY_ROWS = ((1_037, 1_037), (9_001, 65))  # rows and keys: more rows than a prefill's first tiles have
_LONG = (9_001, 40_009)  # keys: so many beyond 2^13 and 2^15 that their loss shows
_FEW_ROWS = 3
_WIDE = 256  # a head dimension that may have a path of its own
_SEQUENCE = 128  # rows of a call with parameters, or after a larger one
_PLAIN = 2  # the index of numbers that have no parameter, behind those of the two that do
UNSAID = frozenset({GROUPED, VALUE_DIM, HIDDEN_NAN, OWN_ENDS, CAPPED_BIAS})  # what no parameter alone says


def strided_views(session: Session, results: WithinError) -> None:
    """Compare with arguments that are views: transposed, slices of one buffer, and dO of stride 0."""
    if session.options.contiguous:
        raise CannotRunError("declares contiguous=true: it is given no views")
    views = {
        "transposed views": Places.all(transposed),
        "slices of a fused qkv buffer": Places.all(fused),
        "k alone transposed": Places(k=transposed),
    }
    _compare_views(session, results, views)
    if session.has_gradients and not results.is_empty:
        inputs = session.inputs()
        ones = replace(inputs, do=torch.ones_like(inputs.do))
        plain, answer = session.answers(ones), session.answers_with_placement(ones, Places(do=expanded))
        results.compare("dO of stride 0", plain, answer, ones)


def past_the_end(session: Session, results: WithinError) -> None:
    """Compare with NaN in memory after the arguments, where no kernel should read."""
    views = {"NaN behind the last element": Places.all(before_nan)}
    if not session.options.contiguous:
        views["NaN behind every head's last key, and behind d"] = Places.all(within_nan)
    _compare_views(session, results, views)


def _compare_views(session: Session, results: WithinError, views: dict[str, Places]) -> None:
    """Compare with arguments that are placed elsewhere; a placement that the kernel refuses has no answer."""
    inputs = session.draw_small(CallShape(session.multiple(_FEW), session.multiple(_FEW), _WIDE))
    calls = [("", session.inputs(), session.plain)]
    if session.takes(inputs):
        calls.append((f", d = {_WIDE}", inputs, session.answers(inputs)))
    for (more, inputs, plain), (words, places) in product(calls, views.items()):
        results.compare(words + more, plain, session.answers_with_placement(inputs, places), inputs)


def many_heads(session: Session, results: WithinError) -> None:
    """Compare more heads than 7 or 8 bits count with each of them in a small call."""
    shape = session.shape
    if session.options.multiple_of == 1:
        shape = replace(shape, queries=min(shape.queries, _FEW), keys=_FEW)
    whole = session.draw_small(shape, 0, _BATCHES, _HEADS)
    # With dummies a row may be a separate entry of the batch.
    whole, some = session.arranged(whole), session.arranged(whole.part(slice(-BATCH, None)))
    answers, last = session.answers(whole), Cut(batch=slice(-len(some.q), None))
    results.compare("the last of 300 heads", session.answers(some), answers, some, last)


def _square(session: Session, least: int = _SQUARE) -> CallShape:
    """Return a shape with as many queries as keys, at least as many as the kernel needs."""
    size = session.multiple(least)
    return CallShape(size, size, session.shape.d)


def _padded(session: Session, hidden: int = _HIDDEN) -> AttentionInputs:
    inputs = session.draw_small(_square(session))
    batch, _, keys, _ = inputs.k.shape
    return replace(inputs, key_padding=(torch.arange(keys) < keys - hidden).repeat(batch, 1))


def _masked(session: Session) -> Iterator[tuple[str, AttentionInputs, slice, Cut]]:
    """Yield calls with keys hidden by a mask that the kernel takes: in words, where, and what they must not change.

    Under a causal mask only the last row sees the last key, and its dO is 0, so the key adds 0 to all gradients.
    Windows of half as many rows as keys hide the first keys.
    """
    shape = _square(session)
    keys, unseen, before = shape.keys, shape.keys // 4, slice(0, shape.keys - 1)
    causal = session.draw_small(replace(shape, causal=True))
    causal.do[:, :, -1] = 0.0
    windowed = session.draw_small(replace(shape, queries=shape.queries // 2))
    windowed = replace(windowed, window=(keys - windowed.q.shape[2] - unseen, 0))
    calls = {
        "padded keys": (_padded(session), slice(keys - _HIDDEN, keys), Cut(keys=slice(0, keys - _HIDDEN))),
        "keys ahead of a causal row": (causal, slice(keys - 1, keys), Cut(rows=before, keys=before)),
        "keys outside of all windows": (windowed, slice(0, unseen), Cut(keys=slice(unseen, keys))),
    }
    for words, (inputs, at, cut) in calls.items():
        if session.takes(inputs):
            yield words, inputs, at, cut


def _with_keys(inputs: AttentionInputs, at: slice, k: Tensor, v: Tensor) -> AttentionInputs:
    all_k, all_v = inputs.k.clone(), inputs.v.clone()
    all_k[:, :, at], all_v[:, :, at] = k, v
    return replace(inputs, k=all_k, v=all_v)


def hidden_keys(session: Session, results: WithinError) -> None:
    """Change K and V where a mask hides them: to large numbers where no row sees them, else to their negatives.

    A key that is hidden from one causal row is visible to another, and a kernel in 8 bits may share a scale with it.
    """
    large = torch.tensor(_LARGE if session.cell.fmt.largest > _LARGE**2 else _LARGE_FP16)
    for words, inputs, at, cut in _masked(session):
        k, v = (-inputs.k[:, :, at], -inputs.v[:, :, at]) if inputs.causal else (large, large)
        plain, answer = session.answers(inputs), session.answers(_with_keys(inputs, at, k, v))
        number = "other numbers" if inputs.causal else f"{large:.0f}"
        results.compare(f"{number} in {words}", plain, answer, inputs, cut)


def hidden_nan(session: Session, results: WithinError) -> None:
    """Put NaN and Inf where a mask hides keys, for kernels that declare it: 0 times NaN is NaN, and most compute it."""
    for words, inputs, at, cut in _masked(session):
        plain = session.answers(inputs)
        # The row that sees a NaN has NaN gradients, and so have all keys that it sees: of a causal mask O alone tells,
        # and V's NaN is multiplied by a P of 0 in every tile that has it.
        for number in (torch.nan, torch.inf):
            full = torch.tensor(number)
            answer = session.answers(_with_keys(inputs, at, full, inputs.v[:, :, at] if inputs.causal else full))
            answer = {O: answer[O]} if inputs.causal else answer
            lost = [(~torch.isfinite(cut.of(part, x))).double().mean().item() for part, x in answer.items()]
            results.measures["nan_let_in"] = max(results.measures.get("nan_let_in", 0.0), *lost)
            if HIDDEN_NAN in session.kernel.takes:
                results.compare(f"{number} in {words}", plain, answer, inputs, cut)


@dataclass(frozen=True)
class _MaskInPlace(Call):
    """A call whose mask has the address of the mask of the calls before it."""

    masks: dict[int, Tensor]  # by where the part of K that they are of begins

    def keywords(self, inputs: AttentionInputs) -> dict[str, Any]:
        keywords, name = super().keywords(inputs), str(self.convention.mask)
        mask = self.masks.setdefault(int(inputs.k.storage_offset()), keywords[name].clone())
        return keywords | {name: mask.copy_(keywords[name])}


def other_mask(session: Session, results: WithinError) -> None:
    """Compare after a call with another mask of the same shape with a call that has more keys, all of them hidden."""
    shape, first, inputs = _square(session), _padded(session), _padded(session, 2 * _HIDDEN)
    if not session.takes(first):
        return
    keys, takes_part = shape.keys, inputs.key_padding
    assert takes_part is not None
    more = session.draw_small(replace(shape, queries=2 * keys, keys=2 * keys), 1)
    more.do.zero_()
    for name in ("q", "k", "v", "do"):
        getattr(more, name)[:, :, :keys] = getattr(inputs, name)
    plain = session.answers(replace(more, key_padding=pad(takes_part, (0, keys))))
    session.answers(first)
    cut = Cut(rows=slice(0, keys), keys=slice(0, keys - 2 * _HIDDEN))
    results.compare("another mask of the same shape", plain, session.answers(inputs), inputs, cut)
    if session.call(first).convention.mask is not None:  # else, as a device's own kernel, it is given none
        masks: dict[int, Tensor] = {}
        calls = (_MaskInPlace(**vars(session.call(each)), masks=masks) for each in (first, inputs))
        _, answers = [session.place(call).answers() for call in calls]
        results.compare("a mask rewritten in place", plain, answers, inputs, cut)


def interleaved(session: Session, results: WithinError) -> None:
    """Compare two calls made step by step in turn with the same calls one after the other."""
    both = [session.inputs(index) for index in range(2)]
    plain, again = ([session.answers(inputs) for inputs in both] for _ in range(2))
    for order in list(permutations(range(2)))[: 2 if session.has_gradients else 1]:
        calls = [session.place(inputs) for inputs in both]
        outputs = [call.forward() for call in calls]
        gradients = {i: calls[i].backward(outputs[i]) for i in order}
        for i, words in enumerate(("the first", "the second")):
            turn = f", backward {'first' if order[0] == i else 'last'}" if session.has_gradients else ""
            answers = calls[i].collected(outputs[i], gradients[i])
            same = torch.equal(again[i][O], plain[i][O])
            results.compare(f"{words} of two calls in turn{turn}", plain[i], answers, both[i], same=same)


def rewritten_in_place(session: Session, results: WithinError) -> None:
    """Compare a call whose arguments were overwritten in place with the same call at new addresses."""
    both = [session.inputs(index) for index in range(2)]
    first, second = map(session.place, both)
    plain, again = (session.answers(both[1]) for _ in range(2))
    first.answers()
    with torch.no_grad():
        there, new = ((*each.placed.arguments, each.placed.do) for each in (first, second))
        for x, other in zip(there, new, strict=True):
            x.copy_(other)
    answers = replace(second, placed=first.placed).answers()
    same = torch.equal(again[O], plain[O])
    results.compare("q, k, v and dO rewritten in place", plain, answers, both[1], same=same)


def third_call(session: Session, results: WithinError) -> None:
    """Compare the first call of a shape with the third: either may be the wrong one."""
    inputs, first = session.inputs(), session.plain
    _, third = (session.answers(inputs) for _ in range(2))
    results.compare("the third call against the first", first, third, inputs)
    results.compare("the first call against the third", third, first, inputs)


def scaled_do(session: Session, results: WithinError) -> None:
    """Multiply dO by a power of two: gradients must be finite, and larger by that factor."""
    inputs, plain = session.inputs(), session.plain
    if not session.has_gradients:
        raise CannotRunError("has no backward pass")
    # In fp16 dP would overflow, and dS underflow, in a sound kernel too.
    power = 10 if session.cell.fmt.largest > _LARGE else 4
    for exponent in (power, -power):
        factor = 2.0**exponent
        answers = session.answers(replace(inputs, do=inputs.do * factor))
        ours = {part: x if part == O else x / factor for part, x in answers.items()}
        results.compare(f"dO times 2^{exponent}", plain, ours, inputs)


def _gradients_of(session: Session, call: PlacedCall, o: Tensor, wanted: tuple[Tensor, ...]) -> Made:
    """Return autograd's gradients of some arguments, and keep its graph; none, but why, where that raises."""
    with session.leaving_out("gives no such gradients"), session.calling(gradients=True):
        return torch.autograd.grad(o, wanted, call.placed.do, retain_graph=True)
    return ()


def _check_autograd(session: Session) -> None:
    """Raise CannotRunError where gradients are not autograd's."""
    _ = session.plain  # whose call shows whether there are gradients
    if session.options.backward != AUTOGRAD or not session.has_gradients or not isinstance(session.kernel, UserKernel):
        raise CannotRunError("has no gradients by autograd")


def backward_again(session: Session, results: WithinError) -> None:
    """Compare two backward passes of one forward pass, as `retain_graph=True` allows, with that of a plain call."""
    _check_autograd(session)
    call = session.place(session.inputs())
    o = call.forward()
    for words in ("the first", "the second"):
        if made := _gradients_of(session, call, o, call.placed.leaves):
            answers = call.collected(o, made)
            results.compare(f"{words} of two backward passes", session.plain, answers, session.inputs())


def frozen_inputs(session: Session, results: WithinError) -> None:
    """Compare gradients where some of q, K and V need none, as below frozen weights, with those of a plain call."""
    _check_autograd(session)
    for names in ("q", "k", "v", "kv"):
        call = session.place(session.inputs(), Places.all(Tensor.clone))  # it is given the leaves themselves
        leaves = dict(zip("qkv", call.placed.leaves, strict=True))
        for name, leaf in leaves.items():
            leaf.requires_grad_(name in names)
        with session.leaving_out():
            o = call.forward()
            if o.requires_grad and (made := _gradients_of(session, call, o, tuple(leaves[name] for name in names))):
                answers = {f"d{name.upper()}": call.call.restored(x).cpu() for name, x in zip(names, made, strict=True)}
                words = f"gradients of {' and '.join(names)} alone"
                results.compare(words, session.plain, answers, session.inputs())


def sizes(session: Session, results: WithinError) -> None:
    """Compare with the emulation at sizes at which kernels take another path."""
    causal = CAUSAL in session.kernel.takes
    for size in dict.fromkeys(map(session.multiple, _SIZES)):
        shapes = {
            f"{size} rows and keys": CallShape(size, size, session.shape.d, causal=causal),
            f"{size} keys": CallShape(session.multiple(_FEW_ROWS), size, session.shape.d),
        }
        for words, shape in shapes.items():  # few numbers have chance in their errors
            inputs = session.draw_small(shape, batch=1, heads=max(2, _SIZES[-1] // (2 * size)))
            _hold(session, results, words, inputs, gradients=size > 2)  # of one or two keys dQ and dK cancel
    for rows, keys in ((session.multiple(rows), session.multiple(keys)) for rows, keys in _MANY_ROWS):
        shape = CallShape(rows, keys, session.shape.d, causal=causal and rows == keys)
        _hold(session, results, f"{rows} rows, {keys} keys", session.draw_small(shape, batch=1, heads=2))


def long_keys(session: Session, results: WithinError) -> None:
    """Compare with the emulation at more keys than 2^13 and 2^15."""
    for size in map(session.multiple, _LONG):
        inputs = session.draw_small(CallShape(session.multiple(_FEW_ROWS), size, session.shape.d), batch=1, heads=2)
        _hold(session, results, f"{size} keys", inputs, gradients=False)


def _hold(session: Session, results: WithinError, words: str, inputs: AttentionInputs, gradients: bool = True) -> None:
    if session.takes(inputs):
        compare_with_emulation(session, results, words, inputs, session.place(inputs, gradients=gradients).answers())


def compare_with_emulation(
    session: Session,
    results: WithinError,
    words: str,
    inputs: AttentionInputs,
    answer: Answers,
    plan: Declaration | None = None,
) -> None:
    """Compare an answer with an emulation of a plan, or the declared one; of the least accurate plan if there is none.

    The emulation shows how errors grow with the size, the kernel's first call how large they are (`Session.levels`);
    those of O are as large as a plan's that is given.
    """
    emulated = session.emulated(inputs, plan, gradients=DQ in answer)
    results.compare(words, emulated, answer, inputs, levels={**session.levels, **({O: 1.0} if plan else {})})


def other_parameters(session: Session, results: WithinError) -> None:
    """Compare a call before and after a call on tensors of the same shapes with another parameter."""
    plain = session.draw_small(_square(session, _SEQUENCE), _PLAIN)
    for feature, vary in VARIED.items():
        if feature not in session.kernel.takes - UNSAID:
            continue
        calls = [vary(plain, session.small_draw(index)) for index in range(_PLAIN)]
        if feature is WINDOW:  # a `sliding_window` has no right side
            calls = [replace(call, window=(call.window[0], 0)) for call in calls]
        words = f"a call after one with another {feature.name}"
        if session.takes(*calls):
            for inputs in (*calls, calls[0]):
                compare_with_emulation(session, results, words, inputs, session.answers(inputs))


def after_a_larger_call(session: Session, results: WithinError) -> None:
    """Compare a call after a larger one with the same call before it."""
    shape, inputs = _square(session, _SEQUENCE), session.inputs()
    larger = session.draw_small(replace(shape, keys=2 * shape.keys), heads=8)
    if session.takes(larger):
        session.answers(larger)
        compare_with_emulation(session, results, "a call after a larger one", inputs, session.answers(inputs))


@dataclass(frozen=True)
class _LeavingOut(Call):
    """A call without some arguments, for whose parameters the kernel has defaults."""

    left_out: frozenset[str]

    def keywords(self, inputs: AttentionInputs) -> dict[str, Any]:
        return {name: value for name, value in super().keywords(inputs).items() if name not in self.left_out}


def _answers(session: Session, call: Call, gradients: bool) -> Answers:
    """Return the answer of a call; none, but the reason kept, where the kernel raises that it takes no such call."""
    with session.leaving_out():
        return session.place(call, gradients=gradients).answers()
    return {}


def defaults(session: Session, results: WithinError) -> None:
    """Leave out the arguments of a call, one more each time, except those whose defaults mean something else.

    Two head dimensions are used if the kernel takes two: a default may be 1/sqrt(d) of one.
    """
    plain_call, options = session.call(session.draw_small(SHAPES[0])), session.options
    given, has = plain_call.keywords(plain_call.inputs), plain_call.convention.parameters
    meant = {*plain_call.convention.required, *options.options, *split_words(options.own_defaults)}
    asked = [name for name in given if name in has and name not in meant]
    if not asked:
        raise CannotRunError("has no parameter with a default that every call is given")
    gradients = options.backward == AUTOGRAD  # a function's parameters have their own defaults
    shapes = [replace(_square(session), d=d) for d in dict.fromkeys(shape.d for shape in (session.shape, *SHAPES))]
    taken = filter(session.takes, map(session.draw_small, shapes))
    answered = ((inputs, _answers(session, session.call(inputs), gradients)) for inputs in taken)
    for inputs, plain in islice(filter(itemgetter(1), answered), 2):
        call, left_out = session.call(inputs), frozenset[str]()
        for name in asked:
            scale = call.convention.values.get(name) is OWN_SCALE
            value = f"1/sqrt({inputs.q.shape[3]})" if scale else given[name]
            words = f"{name} left out (default {has[name]!r:.40}), as {name}={value}"
            try:
                answers = _answers(session, _LeavingOut(**vars(call), left_out=left_out | {name}), gradients)
            except Exception as error:
                error.add_note(words)
                raise
            if answers:
                results.compare(words, plain, answers, inputs)
            if results.requirements.get(words):
                results.requirements[words] += f" (meant so: --declare own_defaults={name})"
            elif answers:
                left_out |= {name}


QUESTIONS = (
    Question("strided_views", "q, k, v and dO are views with other strides, as frameworks pass them", strided_views),
    Question("past_the_end", "what lies in memory behind q, k, v and dO is NaN", past_the_end),
    Question("many_heads", "300 heads in one call, against the last of them in a separate call", many_heads),
    Question("hidden_keys", "K and V hold other numbers where a mask hides them", hidden_keys),
    Question("hidden_nan", "K and V hold NaN and Inf where a mask hides them", hidden_nan),
    Question("other_mask", "another mask of the same shape hides other keys", other_mask),
    Question("interleaved", "two forward passes, then their backward passes in either order", interleaved),
    Question("rewritten_in_place", "a second call with other numbers at the same addresses", rewritten_in_place),
    Question("other_parameters", "calls of one shape with another window, table or sink", other_parameters, version=2),
    Question("after_a_larger_call", "a call after one of more rows, keys and heads", after_a_larger_call),
    Question("backward_again", "two backward passes of one forward pass", backward_again),
    Question("frozen_inputs", "gradients of some of q, K and V alone", frozen_inputs),
    Question("sizes", "1 to 257 rows and keys, around the sizes of tiles, and up to 9,001 rows", sizes, version=2),
    Question("long_keys", "9,001 and 40,009 keys", long_keys),
    Question("third_call", "the third call on the same numbers against the first", third_call),
    Question("log_sum_exp", "the log-sum-exp that a kernel returns with O, and its gradients", log_sum_exp, version=3),
    Question("scaled_do", "dO times a power of two", scaled_do),
    Question("defaults", "without scale, causal flag and mask, as far as there are defaults", defaults),
)
