"""Questions of kernels in service: sizes at which they take another path, and calls that others have gone before.

Answers are compared with an emulation of the plan that the kernel declares, else of the loosest there is. It says how
errors grow with the size, and the kernel's first call how large they are (`Session.levels`).
"""

from dataclasses import replace

from tiebreak.cases.feature_cases import VARIED
from tiebreak.kernels.features import CAUSAL, GROUPED, HIDDEN_NAN, OWN_ENDS, VALUE_DIM, WINDOW
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.matrix.questions.answers import DQ, Answers
from tiebreak.matrix.questions.comparison import WithinError
from tiebreak.matrix.questions.session import CallShape, Session

_SIZES = (1, 2, 63, 64, 65, 97, 127, 128, 129, 255, 256, 257)  # rows and keys
_LONG = (9_001, 40_009)  # keys: so many beyond 2^13 and 2^15 that their loss shows
_FEW = 3  # rows
_SEQUENCE = 128  # rows of a call with parameters, or after a larger one
_PLAIN = 2  # the index of numbers that have no parameter, behind those of the two that do
UNSAID = frozenset({GROUPED, VALUE_DIM, HIDDEN_NAN, OWN_ENDS})  # what no parameter alone says


def sizes(session: Session, found: WithinError) -> None:
    causal = CAUSAL in session.kernel.takes
    for size in dict.fromkeys(map(session.multiple, _SIZES)):
        shapes = {
            f"{size} rows and keys": CallShape(size, size, session.shape.d, causal=causal),
            f"{size} keys": CallShape(session.multiple(_FEW), size, session.shape.d),
        }
        for words, shape in shapes.items():  # few numbers have chance in their errors
            inputs = session.draw_small(shape, batch=1, heads=max(2, _SIZES[-1] // (2 * size)))
            _hold(session, found, words, inputs, gradients=size > 2)  # of one or two keys dQ and dK cancel


def long_keys(session: Session, found: WithinError) -> None:
    for size in map(session.multiple, _LONG):
        inputs = session.draw_small(CallShape(session.multiple(_FEW), size, session.shape.d), batch=1, heads=2)
        _hold(session, found, f"{size} keys", inputs, gradients=False)


def _hold(session: Session, found: WithinError, words: str, inputs: AttentionInputs, gradients: bool = True) -> None:
    if session.takes(inputs):
        answer = session.place(inputs, gradients=gradients).answers()
        _compare(session, found, words, inputs, answer)


def _compare(session: Session, found: WithinError, words: str, inputs: AttentionInputs, answer: Answers) -> None:
    emulated = session.emulated(inputs, gradients=DQ in answer)
    found.compare(words, emulated, answer, inputs, levels=session.levels)


def other_parameters(session: Session, found: WithinError) -> None:
    """A call, another of the same tensors' shapes with another parameter, and the first again."""
    size = session.multiple(_SEQUENCE)
    plain = session.draw_small(CallShape(size, size, session.shape.d), _PLAIN)
    for feature, vary in VARIED.items():
        if feature not in session.kernel.takes - UNSAID:
            continue
        calls = [vary(plain, session.small_draw(index)) for index in range(_PLAIN)]
        if feature is WINDOW:  # a `sliding_window` has no right side
            calls = [replace(each, window=(each.window[0], 0)) for each in calls]
        words = f"a call after one with another {feature.name}"
        if session.takes(*calls):
            for inputs in (*calls, calls[0]):
                _compare(session, found, words, inputs, session.answers(inputs))


def after_a_larger_call(session: Session, found: WithinError) -> None:
    size, inputs = session.multiple(_SEQUENCE), session.inputs()
    larger = session.draw_small(CallShape(size, 2 * size, session.shape.d), heads=8)
    if session.takes(larger):
        session.answers(larger)
        _compare(session, found, "a call after a larger one", inputs, session.answers(inputs))
