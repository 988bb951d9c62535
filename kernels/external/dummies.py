"""Rows and keys that a kernel needs and a call lacks, added so that no bit of the others changes.

A row of attention knows nothing of other rows, and a key whose P is 0 adds an exact 0. So dummy rows are free, and
dummy keys go where a mask hides them: the kernel's own mask, or a causal one, behind the last key that a row sees.
"""

from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from tiebreak.kernels.external.conventions import Convention
from tiebreak.kernels.features import PLACED
from tiebreak.kernels.inputs import AttentionInputs

_WRAP = "write a function around it that has every row last in a causal sequence (docs/your-kernel.md#wrappers)"


@dataclass(frozen=True)
class Arranged:
    """A call that a kernel can take in the place of another."""

    inputs: AttentionInputs
    rows: slice  # of its queries, those of the other call
    keys: slice  # the same of its keys


def arrange(inputs: AttentionInputs, convention: Convention) -> Arranged:
    """The call to make: the same inputs where they are as the kernel needs them, else larger ones.

    Args:
        inputs: of any shape.
        convention: `square` and `multiple_of` of its options say what the kernel needs.

    Raises:
        ValueError: there is no such call; one line.
    """
    (queries, keys), step = (inputs.q.shape[2], inputs.k.shape[2]), convention.options.multiple_of
    rows, columns = (-(-length // step) * step for length in (queries, keys))
    # With a mask of scores to say it by, a causal flag that is right in square calls alone need not.
    where_square = inputs.causal and convention.causal_where_square and convention.mask is None
    if convention.options.square or where_square:
        rows = columns = max(rows, columns)
    if (rows, columns) == (queries, keys):
        return Arranged(inputs, slice(None), slice(None))
    if placed := [feature.words for feature in inputs.asks() if feature in PLACED]:
        raise ValueError(f"with a {placed[0]} there is no place for dummy rows or keys")
    before = keys - queries if inputs.causal else 0  # rows that a causal mask has the others behind
    if before < 0:
        raise ValueError("a row without a visible key is no row of a square causal call")
    if inputs.causal:
        rows = columns
    if columns > keys and not (inputs.causal and inputs.key_padding is None):
        inputs = _with_hidden_keys(inputs, columns, convention)
    q, do = (pad(x, (0, 0, before, rows - queries - before)) for x in (inputs.q, inputs.do))
    k, v = (pad(x, (0, 0, 0, columns - keys)) for x in (inputs.k, inputs.v))
    return Arranged(replace(inputs, q=q, k=k, v=v, do=do), slice(before, before + queries), slice(0, keys))


def _with_hidden_keys(inputs: AttentionInputs, columns: int, convention: Convention) -> AttentionInputs:
    """The inputs with a mask that hides all keys beyond their own."""
    batch, _, keys, _ = inputs.k.shape
    if convention.mask is None:
        step = convention.options.multiple_of
        needed = f"{keys} keys are no multiple of {step}"
        if keys % step == 0:
            needed = f"it needs as many keys as queries, {keys} are not {inputs.q.shape[2]}"
        raise ValueError(f"{needed}, and it has no attn_mask to hide dummy keys: {_WRAP}")
    mask = inputs.key_padding
    if mask is None:
        mask = torch.ones(batch, keys, dtype=torch.bool, device=inputs.k.device)
    return replace(inputs, key_padding=pad(mask, (0, columns - keys)))
