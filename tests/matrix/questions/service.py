"""Questions of kernels in service: sizes at which they take another path, and calls that others have gone before.

Answers are compared with an emulation of the plan that the kernel declares, else of the loosest there is. It says how
errors grow with the size, and the kernel's first call how large they are (`Session.levels`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from tiebreak.kernels.features import (
    BIAS,
    BLOCK_MASK,
    CAUSAL,
    DESCALE,
    KEY_PADDING,
    LENGTHS,
    OWN_SCALE,
    PAGES,
    SINK,
    SOFTCAP,
    WINDOW,
    Feature,
)
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.matrix.questions.answers import DQ, Answers
from tiebreak.matrix.questions.comparison import WithinError
from tiebreak.matrix.questions.session import CallShape, Session

_SIZES = (1, 2, 63, 64, 65, 97, 127, 128, 129, 255, 256, 257)  # rows and keys
_LONG = (9_001, 40_009)  # keys: so many beyond 2^13 and 2^15 that their loss shows
_FEW = 3  # rows
_SEQUENCE = 64  # keys of a call with parameters, or more
_PAGE = 16


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
    plain = session.draw_small(CallShape(size, size, session.shape.d))
    for feature, parameters in _PARAMETERS.items():
        if feature not in session.kernel.takes:
            continue
        calls = [replace(plain, **each) for each in parameters(plain)]
        if feature is LENGTHS:
            calls = [each.part(slice(1)) for each in calls]
        words = f"a call after one with another {feature.name}"
        if session.takes(*calls):
            for inputs in (*calls, calls[0]):
                _compare(session, found, words, inputs, session.answers(inputs))


def after_a_larger_call(session: Session, found: WithinError) -> None:
    size, inputs = session.multiple(2 * _SEQUENCE), session.inputs()
    larger = session.draw_small(CallShape(size, 2 * size, session.shape.d), heads=8)
    if session.takes(larger):
        session.answers(larger)
        _compare(session, found, "a call after a larger one", inputs, session.answers(inputs))


def _first_keys(inputs: AttentionInputs, share: int) -> torch.Tensor:
    """(batch, keys): True for the first keys, one in `share` of them."""
    keys = inputs.k.shape[2]
    return (torch.arange(keys) < keys // share).expand(len(inputs.q), -1)


def _lengths(inputs: AttentionInputs, share: int) -> dict[str, Any]:
    keys = inputs.k.shape[2]
    return {"lengths": ((0, keys // share, keys),) * 2}


def _blocks(inputs: AttentionInputs, first: bool) -> dict[str, Any]:
    keys = inputs.k.shape[2]
    seen = torch.tensor([first, not first]).expand(1, 1, -(-inputs.q.shape[2] // 64), 2)
    return {"block_mask": seen, "block_size": (64, keys // 2)}


def _pages(inputs: AttentionInputs, reverse: bool) -> dict[str, Any]:
    pages = inputs.k.shape[2] // _PAGE
    table = torch.arange(len(inputs.q) * pages).reshape(len(inputs.q), pages)
    return {"block_table": table.flip(0, 1) if reverse else table, "page_size": _PAGE, "pool_pages": table.numel()}


def _factors(inputs: AttentionInputs, factor: float) -> dict[str, Any]:
    k, v = (x.to(torch.float8_e4m3fn).float() for x in (inputs.k, inputs.v))
    factors = torch.full(k.shape[:2], factor)
    return {"k": k, "v": v, "k_descale": factors, "v_descale": factors.clone()}


def _by_head(inputs: AttentionInputs, size: float) -> torch.Tensor:
    return size * torch.arange(1.0, 1.0 + inputs.q.shape[1])


#: What a call says in two ways, by feature: fields of inputs.
_PARAMETERS: Mapping[Feature, Callable[[AttentionInputs], tuple[dict[str, Any], dict[str, Any]]]] = {
    CAUSAL: lambda _: ({}, {"causal": True}),
    OWN_SCALE: lambda _: ({"softmax_scale": 0.25}, {"softmax_scale": 0.0625}),
    WINDOW: lambda _: ({"window": (9, 0)}, {"window": (30, 0)}),
    SOFTCAP: lambda _: ({"softcap": 1.0}, {"softcap": 8.0}),
    SINK: lambda x: ({"sink": _by_head(x, 1.0)}, {"sink": _by_head(x, 2.0)}),
    BIAS: lambda x: (
        {"bias": (torch.arange(x.k.shape[2]) % 4 - 2.0)[None, None, None]},
        {"bias": (torch.arange(x.k.shape[2]) % 3 - 1.0)[None, None, None]},
    ),
    KEY_PADDING: lambda x: ({"key_padding": _first_keys(x, 2)}, {"key_padding": _first_keys(x, 4)}),
    LENGTHS: lambda x: (_lengths(x, 2), _lengths(x, 4)),
    BLOCK_MASK: lambda x: (_blocks(x, True), _blocks(x, False)),
    PAGES: lambda x: (_pages(x, False), _pages(x, True)),
    DESCALE: lambda x: (_factors(x, 1.0), _factors(x, 0.25)),
}
