"""Rows and keys that a kernel needs and a call lacks, added so that no bit of the others changes.

A row of attention knows nothing of other rows, and a key whose P is 0 adds an exact 0. So dummy rows are free, and
dummy keys go where a mask hides them: the kernel's own mask, or a causal one, behind the last key that a row sees.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from tiebreak.kernels.features import PLACED
from tiebreak.kernels.inputs import AttentionInputs

Cut = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Arranged:
    """A call that a kernel can take in the place of another."""

    inputs: AttentionInputs
    rows: Cut  # from what has the shape of its q to what has the shape of the other's
    keys: Cut | None  # the same for k; None: its gradients of k and v are not those of the other call


@dataclass(frozen=True)
class Needs:
    """What a kernel needs of a call's numbers of queries and keys."""

    square: bool = False  # as many queries as keys
    multiple_of: int = 1  # of both
    causal: bool = False  # its mask is causal in every call
    has_causal: bool = False  # it has a flag for a causal mask
    causal_where_square: bool = False  # a causal mask is right only where queries and keys are as many
    has_padding: bool = False  # it has a mask that hides keys

    def arrange(self, inputs: AttentionInputs) -> Arranged:
        """The call to make.

        Args:
            inputs: of any shape.

        Returns:
            The same inputs where they are as the kernel needs them, else larger ones.

        Raises:
            ValueError: there is no such call; one line.
        """
        queries, keys = inputs.q.shape[2], inputs.k.shape[2]
        rows, columns = self._up(queries), self._up(keys)
        if self.square:
            rows = columns = max(rows, columns)
        right_mask = not (inputs.causal and queries != keys and self.causal_where_square)
        right_mask = right_mask and (inputs.causal or not self.causal)
        if right_mask and (rows, columns) == (queries, keys):
            return Arranged(inputs, _whole, _whole)
        if placed := [feature.words for feature in inputs.asks() if feature in PLACED]:
            raise ValueError(f"with a {placed[0]} there is no place for dummy rows or keys")
        if right_mask and inputs.causal and queries == keys and inputs.key_padding is None:
            return _longer(inputs, max(rows, columns), max(rows, columns))
        if right_mask and not inputs.causal and (columns == keys or self.has_padding):
            return _longer(_hiding(inputs, columns), rows, columns)
        if inputs.causal and queries <= keys and inputs.key_padding is None and (self.causal or self.has_causal):
            return _at_the_end(inputs, self._up(keys))
        return self._row_by_row(inputs)

    def _row_by_row(self, inputs: AttentionInputs) -> Arranged:
        """Each row as a causal sequence of its own, in which it stands where it sees its keys and no other."""
        if not (self.has_causal or self.causal):
            keys, queries = inputs.k.shape[2], inputs.q.shape[2]
            needed = f"{keys} keys are no multiple of {self.multiple_of}"
            if keys % self.multiple_of == 0:
                needed = f"it needs as many keys as queries, {keys} are not {queries}"
            raise ValueError(f"{needed}, and it has no mask to hide dummy keys")
        if inputs.key_padding is not None:
            raise ValueError("a causal sequence for each row has no place for a key padding mask")
        batch, _, queries, _ = inputs.q.shape
        keys = inputs.k.shape[2]
        places = [keys - queries + row if inputs.causal else keys - 1 for row in range(queries)]
        if places[0] < 0:
            raise ValueError("a row without a visible key is no row of a causal sequence")
        length = self._up(keys)
        q, do = (_spread(tensor, places, length) for tensor in (inputs.q, inputs.do))
        k, v = (_to(tensor, length).repeat_interleave(queries, 0) for tensor in (inputs.k, inputs.v))

        def rows(o: Tensor) -> Tensor:
            rows = o.reshape(batch, queries, *o.shape[1:])
            return torch.stack([rows[:, row, :, place] for row, place in enumerate(places)], 2)

        return Arranged(replace(inputs, q=q, k=k, v=v, do=do, causal=True), rows, None)

    def _up(self, length: int) -> int:
        return -(-length // self.multiple_of) * self.multiple_of


def _whole(x: Tensor) -> Tensor:
    return x


def _to(x: Tensor, length: int) -> Tensor:
    """Zeros appended to (batch, heads, N, d), up to N = `length`."""
    return pad(x, (0, 0, 0, length - x.shape[2]))


def _longer(inputs: AttentionInputs, rows: int, columns: int) -> Arranged:
    """Dummy rows and keys at the end."""
    queries, keys = inputs.q.shape[2], inputs.k.shape[2]
    q, do = (_to(tensor, rows) for tensor in (inputs.q, inputs.do))
    k, v = (_to(tensor, columns) for tensor in (inputs.k, inputs.v))
    made = replace(inputs, q=q, k=k, v=v, do=do)
    return Arranged(made, lambda o: o[:, :, :queries], lambda dk: dk[:, :, :keys])


def _at_the_end(inputs: AttentionInputs, length: int) -> Arranged:
    """As many dummy rows before the rows as they lack keys to be square; a dummy row's dO is 0, and all it adds is."""
    queries, keys = inputs.q.shape[2], inputs.k.shape[2]
    q, do = (pad(tensor, (0, 0, keys - queries, length - keys)) for tensor in (inputs.q, inputs.do))
    k, v = (_to(tensor, length) for tensor in (inputs.k, inputs.v))
    made = replace(inputs, q=q, k=k, v=v, do=do)
    return Arranged(made, lambda o: o[:, :, keys - queries : keys], lambda dk: dk[:, :, :keys])


def _hiding(inputs: AttentionInputs, columns: int) -> AttentionInputs:
    """The inputs with a mask that hides all keys beyond their own, if there will be any."""
    batch, _, keys, _ = inputs.k.shape
    if columns == keys:
        return inputs
    mask = inputs.key_padding
    if mask is None:
        mask = torch.ones(batch, keys, dtype=torch.bool, device=inputs.k.device)
    return replace(inputs, key_padding=pad(mask, (0, columns - keys)))


def _spread(x: Tensor, places: list[int], length: int) -> Tensor:
    """(batch, heads, rows, d) to (batch * rows, heads, length, d), each row at its place, 0 elsewhere."""
    batch, heads, rows, d = x.shape
    wide = x.new_zeros(batch, rows, heads, length, d)
    for row, place in enumerate(places):
        wide[:, row, :, place] = x[:, :, row]
    return wide.flatten(0, 1)
