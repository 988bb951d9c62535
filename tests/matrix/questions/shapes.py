"""Questions about the shapes by which kernels change their path: each call is compared with its plan's emulation."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tiebreak.cases.shapes import PARAMETERS, ShapedCall, covering, dimensions, reported, separating
from tiebreak.kernels.external.call import Places
from tiebreak.kernels.features import CAUSAL, FEATURES, GROUPED
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import CannotRunError, Declaration
from tiebreak.matrix.questions.comparison import BATCH, Answers, Cut, O, WithinError
from tiebreak.matrix.questions.placements import far_apart
from tiebreak.matrix.questions.session import Question, Session
from tiebreak.matrix.questions.usage import compare_with_emulation

_HEADS = 6  # which has divisors that are odd, and others
_MANY = 2**12  # entries of a batch
_DRAWS = 2**16  # more than a question has calls
_REPORTED = {
    "head_dimensions": "head dimensions of kernels in service, one of V that is another among them",
    "group_sizes": "7 to 71 query heads to a key head",
    "latent_views": "one key head, whose first columns are V, in the same memory",
    "late_windows": "windows that leave out the first tiles of keys",
    "long_tables": "masks, biases and lengths of up to 4,133 keys",
    "broadcast_shapes": "biases and block masks of size 1 in some dimensions",
    "empty_sequences": "sequences without rows, without keys, and without both",
    "many_entries": "batches of 130 to 65,536 entries",
    "page_sizes": "pages of 1 to 256 keys, and of no power of two",
    "extremes": "a soft cap far below the scores, and log-sum-exps down to -500",
    "packed_causal": "packed sequences under a causal mask",
}
_VERSIONS = {"many_entries": 2}  # of those whose calls have changed


def _hold(session: Session, results: WithinError, call: ShapedCall, index: int) -> bool | None:
    """Compare a call with its emulation; return whether it is wrong, None where the kernel does not take it."""
    call = replace(call, queries=session.multiple(call.queries), keys=session.multiple(call.keys))
    inputs, words = call.inputs(session.small_draw(index), session.shape.d), call.words
    answer: Answers = {}
    with session.leaving_out():  # it refuses this call, and no other
        if session.takes(inputs):
            if call.v_in_k and session.options.contiguous:
                raise CannotRunError("declares contiguous=true: it is given no views")
            answer = _answers(session, call, inputs)
    if not answer:
        return None
    if call.batch > _MANY:  # which a reference takes seconds for: the last entries, against a call of them alone
        last = inputs.part(slice(-BATCH, None))
        results.compare(words, session.answers(last), answer, last, Cut(batch=slice(-BATCH, None)))
        return bool(results.requirements[words])
    # Far from 0 a cast of the scores decides, which the first call shows nothing of: the plan that it follows does, and
    # one that nobody knows may err as much as the least accurate.
    plan = session.followed if call.lse else None
    found = _against_emulation(session, words, inputs, answer, plan)
    if found.requirements[words] and (call.lse or not found.requirements[words].startswith(f"{words}: {O} ")):
        # One that nearly cancels may err by chance, and its emulation by chance not: another draw tells.
        inputs = call.inputs(session.small_draw(_DRAWS + index), session.shape.d)
        found = _against_emulation(session, words, inputs, _answers(session, call, inputs), plan)
    results.requirements |= found.requirements
    results.differences += found.differences
    return bool(results.requirements[words])


def _answers(session: Session, call: ShapedCall, inputs: AttentionInputs) -> Answers:
    """Return the answer of a call; none where the kernel raises that it takes no V within K."""
    if call.v_in_k:
        return session.answers_with_placement(inputs, Places(v_in_k=True), gradients=call.gradients)
    return session.place(inputs, gradients=call.gradients).answers()


def _against_emulation(
    session: Session, words: str, inputs: AttentionInputs, answer: Answers, plan: Declaration | None
) -> WithinError:
    found = WithinError(session.cell.fmt)
    compare_with_emulation(session, found, words, inputs, answer, plan)
    if not found.requirements[words] and _blind_rows_show(inputs, answer):
        found.requirements[words] = f"{words}: {O} is not 0 in a row without a visible key"
    if not found.requirements[words] and plan and not answer[O].any():  # which errs less than rounded scores may
        found.requirements[words] = f"{words}: {O} is 0 throughout"
    return found


def _blind_rows_show(inputs: AttentionInputs, answer: Answers) -> bool:
    hidden = inputs.hidden()
    return hidden is not None and bool((answer[O] * hidden.all(-1, keepdim=True)).any())


def _ask_reported(session: Session, results: WithinError, name: str) -> None:
    calls, known = [each for each in reported() if each.asks == name], []
    said = ("asks", "source", "gradients")
    varied = [each for each in vars(calls[0]) if len({getattr(call, each) for call in calls}) > 1 and each not in said]
    for index, call in enumerate(calls):
        if call.parameter and call.parameter not in _parameters(session):
            session.refused[f"has no parameter of the kind {call.parameter}"] = None
        elif (is_wrong := _hold(session, results, call, index)) is not None:
            known.append(({field: getattr(call, field) for field in varied}, is_wrong))
    results.where = separating(known)


def _parameters(session: Session) -> frozenset[str]:
    return frozenset(feature.taken for feature in FEATURES if feature in session.kernel.takes) & frozenset(PARAMETERS)


def shapes(session: Session, results: WithinError) -> None:
    """Compare calls in which every two sizes meet, with each parameter; name what the wrong ones have in common."""
    values: dict[str, Sequence[Any]] = {**dimensions(), "parameter": ["", *sorted(_parameters(session))]}
    if GROUPED not in session.kernel.takes:
        del values["key_heads"]
    if CAUSAL in session.kernel.takes:
        values["causal"] = [False, True]
    known: list[tuple[Mapping[str, Any], bool]] = []
    never = {(("batch", batch), ("parameter", "lengths")) for batch in values["batch"] if batch > 1}
    for index, chosen in enumerate(covering(values, never)):
        call = _shaped(chosen)
        is_wrong = _hold(session, results, call, index)
        if is_wrong is not None:
            named = {name: getattr(call, name) for name in chosen} | {"d": call.d or session.shape.d}
            known.append((named, is_wrong))
    results.where = separating(known)


def _shaped(chosen: Mapping[str, Any]) -> ShapedCall:
    """Return a choice as a call."""
    window = chosen["keys"] // 5 if chosen["parameter"] == "window" else 0
    return ShapedCall("shapes", "pairs of sizes", heads=_HEADS, **chosen, window=window)


def offsets(session: Session, results: WithinError) -> None:
    """Compare with arguments one of which has an entry of the batch 2^31 elements behind the other."""
    if session.options.contiguous:
        raise CannotRunError("declares contiguous=true: it is given no views")
    if session.cell.backend.device != "cpu":
        raise CannotRunError("memory that is mapped when it is used is had on a CPU alone")
    inputs = session.inputs()
    for name in ("q", "k", "v", *(["do"] if session.has_gradients else [])):
        there: dict[str, Any] = {name: far_apart}
        answer = session.answers_with_placement(inputs, Places(**there))
        results.compare(f"{name} with an entry beyond 2^31 elements", session.plain, answer, inputs)


QUESTIONS = (
    Question("shapes", "every two sizes of d, rows, keys, batch and key heads, with each parameter", shapes),
    *(
        Question(name, about, partial(_ask_reported, name=name), version=_VERSIONS.get(name, 1))
        for name, about in _REPORTED.items()
    ),
    Question("far_apart", "arguments whose entries lie 2^31 elements apart", offsets),
)
