"""The knobs: what is changed about a call whose answer should stay, and what shows that the kernel was reached.

A control is a second change that must change O, by what it does to the numbers. Where it changes no bit, the knob did
nothing, and that bits are the same says nothing.

| knob | its control | why that must change bits |
|---|---|---|
| batch | V of a neighbour negated: the neighbour's own O | O of a row is a mean of V: it is negated too |
| split | 1 split and 8 where what the splits add up cancels | `materials.cancelling`: O is made of fp32's last bits |
| padding | the padded keys seen; other rows behind the end: their own O | they have a P and a V of their own |
| memory | the same storage read in other strides; of dO alone: dQ | its numbers are in another order |
| decode, chunks | another q in the row before | its P is another |
| repeat | V negated: no answer is kept from an earlier call | as of batch |
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tiebreak.cases.case import Shape
from tiebreak.cases.recipes import normal_numbers
from tiebreak.kernels.algorithms import SPLIT_ATTENTION
from tiebreak.kernels.external.call import CONTIGUOUS, Places
from tiebreak.kernels.external.kernels import UserKernel
from tiebreak.kernels.external.options import INVARIANT
from tiebreak.kernels.features import CAUSAL
from tiebreak.kernels.flash import Block
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import CannotRunError, Kernel, composed
from tiebreak.matrix.attribution import equal_bits
from tiebreak.matrix.invariance.materials import cancelling
from tiebreak.matrix.invariance.session import SHARE, Session
from tiebreak.matrix.usage.placements import fused, misaligned, read_as_contiguous, transposed

GROUP = "a call compared with itself"
_KEYS = 128  # where no other number matters more
_ALONE = 4  # sequences that are called alone, at most
_NEIGHBOURS, _ROWS = (9, 10, 200), (9, 10)  # keys of one more sequence; queries
_PAGE = 16  # keys
_PADDED = ((100, 1), (100, 28), (128, 64))  # keys, and how many padded ones behind them
_MORE_QUERIES = (1, 28)
_MOST = 64  # of both
_DECODED = (97, 128)  # keys that the last row sees: the second where a kernel takes no such first
_DRAWN_ROWS = 4  # that are compared of a kernel that draws random bits: as many as a head has in other calls
_PREFILL, _CHUNKS = 192, (64, 50)  # queries and keys; queries of a chunk
_LONG = 8  # where rows are as many as keys, one in so many heads is drawn
_SPLITS, _SPLIT_ROWS = (2, 3, 4, 8), (256, 1024, 4096)  # the first row that is long enough to be split is taken
_CALLS = 100
_OF_ROWS = 2  # parts of an answer that have a row for every query: O and dQ


@dataclass(frozen=True)
class Knob:
    """One change."""

    word: str  # by which a kernel says that it is invariant under it
    about: str  # one line
    turn: Callable[[Session], None]  # compares one batch of heads
    source: str = "this suite"
    version: int = 2  # raised when the calls change: records of other versions are not comparable

    @property
    def name(self) -> str:
        """Of its cells."""
        return f"invariance[{self.word}]"


def _of_rows(inputs: AttentionInputs, rows: slice, keys: int, *, causal: bool) -> AttentionInputs:
    """Some queries, and the first keys."""
    q, do, k, v = inputs.q[:, :, rows], inputs.do[:, :, rows], inputs.k[:, :, :keys], inputs.v[:, :, :keys]
    return replace(inputs, q=q, k=k, v=v, do=do, causal=causal)


def _negated(x: Tensor, at: slice, dimension: int) -> Tensor:
    """Part of it negated."""
    other = x.clone()
    other.movedim(dimension, 0)[at] *= -1.0
    return other


def _with_more(inputs: AttentionInputs, name: str, more: int, session: Session) -> AttentionInputs:
    """Rows of normal numbers behind the end of q and dO, or of k and v."""
    added = session.draw("more", normal_numbers, Shape(queries=_MOST, keys=_MOST))

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(inputs, name), getattr(added, name)[:, :, :more]], 2)

    if name == "q":
        return replace(inputs, q=joined("q"), do=joined("do"))
    return replace(inputs, k=joined("k"), v=joined("v"))


def batch(session: Session) -> None:
    """Alone, among others, and beside one of another length, which grows from 9 to 10 keys, or queries."""
    if session.called_by_sequence:
        raise CannotRunError("is called once for every sequence: it sees no batch")
    for material, inputs in session.materials(Shape(keys=_KEYS)):
        first = slice(0, min(_ALONE, len(inputs.q)))
        single = [inputs.part(slice(at, at + 1)) for at in range(len(inputs.q))[first]]
        some, alone = inputs.part(first), [torch.cat(x) for x in zip(*map(session.answers, single), strict=False)]
        # Two sequences or more there are always, and the last is a neighbour of the others.
        together, others = session.answers(inputs), session.o(replace(inputs, v=_negated(inputs.v, slice(-1, None), 0)))
        session.compare(f"among {len(inputs.q) - 1} others", material, alone, [x[first] for x in together], some)
        session.control("V of a neighbour negated", together[0][-1:], others[-1:])
        rest = slice(0, -1)
        session.compare("beside other numbers", material, [together[0][rest]], [others[rest]], inputs.part(rest))
        for keys in _NEIGHBOURS:
            beside = _beside(inputs, keys)
            if session.takes(beside):
                session.compare(f"beside one of {keys} keys", material, alone, [session.o(beside)[first]], some)
        rows = inputs.q.shape[2]
        for queries in _ROWS:
            longer = _with_more(inputs, "q", queries - rows, session)
            if session.takes(longer):
                o = session.o(longer)[first, :, :rows]
                session.compare(f"padded to a neighbour's {queries} queries", material, alone, [o], some)
            packed = _packed(inputs, _with_more(inputs, "q", queries, session).q[:1, :, rows:])
            if session.takes(packed):
                o = _unpacked(session.o(packed), inputs.q.shape)[first]
                session.compare(f"packed before one of {queries} queries", material, alone, [o], some)


def _packed(inputs: AttentionInputs, queries: Tensor) -> AttentionInputs:
    """All sequences one behind the other in a batch of 1, and one more of these queries with the keys of the first."""

    def joined(x: Tensor, last: Tensor) -> Tensor:
        return torch.cat([x.transpose(0, 1).flatten(1, 2)[None], last], 2)

    rows, keys = inputs.q.shape[2], inputs.k.shape[2]
    number, more = len(inputs.q), queries.shape[2]
    begins = [[size * at for at in range(number + 1)] for size in (rows, keys)]
    lengths = ((*begins[0], number * rows + more), (*begins[1], (number + 1) * keys))
    q, do = joined(inputs.q, queries), joined(inputs.do, queries)
    return replace(
        inputs, q=q, k=joined(inputs.k, inputs.k[:1]), v=joined(inputs.v, inputs.v[:1]), do=do, lengths=lengths
    )


def _unpacked(o: Tensor, shape: torch.Size) -> Tensor:
    """The first rows of packed ones, as (batch, heads, rows, d)."""
    batch, heads, rows, d = shape
    return o[0, :, : batch * rows].reshape(heads, batch, rows, d).transpose(0, 1)


def _beside(inputs: AttentionInputs, keys: int) -> AttentionInputs:
    """With one more sequence, a copy of the first in another length: all are padded to the longest."""
    longest = max(keys, inputs.k.shape[2])
    k, v = (torch.cat([x, x[:1]]) for x in (inputs.k, inputs.v))
    k, v = (torch.cat([x, x[:, :, : longest - x.shape[2]]], 2) for x in (k, v))
    lengths = torch.tensor([*[inputs.k.shape[2]] * len(inputs.k), keys])
    q, do = (torch.cat([x, x[:1]]) for x in (inputs.q, inputs.do))
    return replace(inputs, q=q, k=k, v=v, do=do, key_padding=torch.arange(longest) < lengths[:, None])


def split(session: Session) -> None:
    """Keys in 2, 3, 4 and 8 splits, against one."""
    in_splits = _splitting(session)
    keys = session.rows = session.rows or _long_enough(session, in_splits)
    for material, inputs in session.materials(Shape(keys=keys), share=SHARE * keys // _SPLIT_ROWS[0]):
        whole = session.answers(inputs, in_splits(1, keys))
        for number in _SPLITS:
            in_parts = session.answers(inputs, in_splits(number, keys))
            session.compare(f"{number} splits of {keys} keys", material, whole, in_parts, inputs)


def _long_enough(session: Session, in_splits: Callable[[int, int], Kernel]) -> int:
    """The keys of the shortest rows that the kernel splits as it is told; if it splits none the fewest."""
    for keys in _SPLIT_ROWS:
        inputs = session.draw("cancelling", cancelling, Shape(keys=keys), share=_LONG)
        kernels = (in_splits(number, keys) for number in (1, _SPLITS[-1]))
        whole, parts = (session.answers(inputs, kernel, forward_alone=True)[0] for kernel in kernels)
        if keys == _SPLIT_ROWS[-1] or not torch.equal(whole, parts):
            break
    session.control(f"{_SPLITS[-1]} splits of {keys} keys whose V cancels", whole, parts)
    return _SPLIT_ROWS[0] if torch.equal(whole, parts) else keys


def _splitting(session: Session) -> Callable[[int, int], Kernel]:
    """The kernel in so many splits of so many keys.

    Raises:
        CannotRunError: nothing says how their number is set.
    """
    kernel = session.kernel
    if isinstance(kernel, UserKernel):
        keyword = kernel.caller.convention.splits
        if keyword is None:
            raise CannotRunError("no parameter num_splits, and no option splits=NAME that names it")
        return lambda number, keys: kernel.given(**{keyword: number})
    declared = kernel.declaration
    if not kernel.composed or declared is None or declared.algorithm is not SPLIT_ATTENTION:
        raise CannotRunError("does not split a row's keys")
    return lambda number, keys: composed(
        kernel.name, replace(declared, block=Block(declared.block.queries, -(-keys // number)))
    )


def padding(session: Session) -> None:
    """More keys behind the end, hidden by a mask, and more queries."""
    for keys, more in _PADDED:
        for material, inputs in session.materials(Shape(keys=keys)):
            seen = _with_more(inputs, "k", more, session)
            padded = replace(seen, key_padding=(torch.arange(keys + more) < keys).expand(len(inputs.q), -1))
            if session.takes(inputs, padded):
                answers = session.answers(padded)
                of_keys = [x[:, :, :keys] for x in answers]  # O and dQ, of fewer rows, whole
                session.compare(f"{more} padded behind {keys} keys", material, session.answers(inputs), of_keys, inputs)
                session.control("the padded keys seen", answers[0], session.o(seen))
    for more in _MORE_QUERIES:
        for material, inputs in session.materials(Shape(keys=_KEYS)):
            longer = _with_more(inputs, "q", more, session)
            if session.takes(inputs, longer):
                rows = inputs.q.shape[2]
                o, added = session.o(longer), slice(rows, None)
                session.compare(f"{more} more queries", material, [session.o(inputs)], [o[:, :, :rows]], inputs)
                other = session.o(replace(longer, q=_negated(longer.q, added, 2)))
                session.control("other queries behind the end", o[:, :, added], other[:, :, added])


def memory(session: Session) -> None:
    """Other strides, and a start that is not aligned."""
    kernel = session.kernel
    if isinstance(kernel, UserKernel) and kernel.caller.convention.options.contiguous:
        raise CannotRunError("declares contiguous=true: it is given no views")
    views = {
        "transposed": Places.all(transposed),
        "in a fused qkv buffer": Places.all(fused),
        "one element off alignment": Places.all(misaligned),
    }
    as_contiguous = Places.all(lambda x: read_as_contiguous(transposed(x)))
    for material, inputs in session.materials(Shape(keys=_KEYS)):
        plain = _from(session, inputs, CONTIGUOUS)
        for words, places in views.items():
            session.compare(words, material, plain, _from(session, inputs, places), inputs)
        paged = _paged(inputs)
        if session.takes(*paged):
            in_order, shuffled = map(session.answers, paged)
            session.compare("pages in another order", material, in_order, shuffled, inputs)
        session.control("the same storage in other strides", plain[0], *session.placed(inputs, as_contiguous))
        if plain[1:]:
            other = session.placed(inputs, Places(do=as_contiguous.do), gradients=True)
            session.control("dO's storage in other strides", plain[1], other[0])


def _from(session: Session, inputs: AttentionInputs, places: Places) -> list[Tensor]:
    """O and the gradients of a call whose arguments lie there, as far as the kernel takes them from there."""
    answers: list[Tensor] = []
    try:
        for gradients in (False, True)[: 1 + session.kernel.has_backward]:
            answers.extend(session.placed(inputs, places, gradients=gradients))
    except Exception as error:  # it says that it takes no such view, and computes nothing wrong
        if session.cell.backend.poisoned() or (places is CONTIGUOUS and not answers):
            raise
        session.refused[f"takes no such view: {type(error).__name__}: {error}"] = None
    return answers


def _paged(inputs: AttentionInputs) -> tuple[AttentionInputs, AttentionInputs]:
    """With K and V in pages that lie in order, and in the opposite one."""
    pages = inputs.k.shape[2] // _PAGE
    table = torch.arange(len(inputs.k) * pages, dtype=torch.int32).view(len(inputs.k), pages)
    in_order = replace(inputs, block_table=table, page_size=_PAGE, pool_pages=table.numel())
    return in_order, replace(in_order, block_table=table.numel() - 1 - table)


def _causal_or_not(session: Session, whole: AttentionInputs) -> list[AttentionInputs]:
    """A call in which queries come after one another; without a causal mask where the kernel takes none."""
    return [replace(whole, causal=causal) for causal in (True, False) if not causal or session.can(CAUSAL)]


def decode(session: Session) -> None:
    """One query alone, and as the last row of a prefill."""
    for keys in _DECODED:
        for material, inputs in session.materials(Shape(queries=keys, keys=keys), share=1):
            _decode(session, material, inputs)
        if session.comparisons:
            break


def _decode(session: Session, material: str, inputs: AttentionInputs) -> None:
    keys = inputs.k.shape[2]
    # Random bits go by a row's place, so that two answers are two draws, and one row of a head tells little. Without a
    # causal mask more rows see as many keys.
    rows = range(keys - (_DRAWN_ROWS if session.draws else 1), keys)
    last = slice(rows.start, rows.stop)
    for whole in _causal_or_not(session, inputs)[-1 if session.draws else 0 :]:
        alone = {causal: [_alone(inputs, row, causal=causal) for row in rows] for causal in (False, True)}
        if not session.takes(whole, *alone[False]):
            continue
        answers = session.answers(whole)
        for causal in (False, True) if session.can(CAUSAL) and session.takes(*alone[True]) else (False,):
            of_rows = [torch.cat(each, 2) for each in zip(*map(session.answers, alone[causal]), strict=False)]
            words, some = f"one query of {keys} keys", _of_rows(inputs, last, keys, causal=False)
            plain = [x[:, :, last] for x in answers[:_OF_ROWS]]
            session.compare(f"{words}, causal" if causal else words, material, plain, of_rows, some)
        _control_of_rows(session, whole, answers[0], keys - 2)
        break


def _alone(inputs: AttentionInputs, row: int, *, causal: bool) -> AttentionInputs:
    """One query and all keys, with random bits of its own."""
    single = _of_rows(inputs, slice(row, row + 1), inputs.k.shape[2], causal=causal)
    return replace(single, noise_seed=inputs.noise_seed + row)


def _control_of_rows(session: Session, whole: AttentionInputs, o: Tensor, row: int) -> None:
    """Another q in one row of it."""
    at = slice(row, row + 1)
    other = session.o(replace(whole, q=_negated(whole.q, at, 2)))
    session.control("another query in a row of the prefill", o[:, :, at], other[:, :, at])


def chunks(session: Session) -> None:
    """The queries of a prefill in chunks, each behind the keys before it."""
    seeing = (slice(None), slice(None), slice(_PREFILL // 4, None))
    for material, inputs in session.materials(Shape(queries=_PREFILL, keys=_PREFILL), share=_LONG):
        for whole in _causal_or_not(session, inputs):
            answers: tuple[Tensor, ...] = ()
            some = _of_rows(whole, seeing[-1], _PREFILL, causal=whole.causal)
            for size in _CHUNKS:
                ends = [min(start + size, _PREFILL) for start in range(0, _PREFILL, size)]
                parts = [
                    _of_rows(whole, slice(end - size if end % size == 0 else end - end % size, end),
                             end if whole.causal else _PREFILL, causal=whole.causal)
                    for end in ends
                ]  # fmt: skip
                if not session.takes(whole, *parts):
                    continue
                answers = answers or session.answers(whole)
                of_parts = zip(*(session.answers(part)[:_OF_ROWS] for part in parts), strict=False)
                # Rows that see a maximum, if there is one: the few keys before it may cancel.
                chunked = [torch.cat(each, 2)[seeing] for each in of_parts]
                rows = [x[seeing] for x in answers[:_OF_ROWS]]
                session.compare(f"in chunks of {size} queries", material, rows, chunked, some)
            if answers:
                _control_of_rows(session, whole, answers[0], _PREFILL - 2)
                break


def repeat(session: Session) -> None:
    """The same call 100 times."""
    if session.cell.backend.repeats(session.kernel):
        raise CannotRunError("a second run could only have the same bits: one program runs after the other")
    for material, inputs in session.materials(Shape(keys=_KEYS)):
        plain = least = session.answers(inputs)
        for _ in range(_CALLS - 1):
            least = tuple(map(_less_alike, plain, least, session.answers(inputs)))
        session.compare(f"{_CALLS} calls", material, plain, least, inputs)
        session.control("V negated", plain[0], session.o(replace(inputs, v=-inputs.v)))


def _less_alike(plain: Tensor, kept: Tensor, other: Tensor) -> Tensor:
    """Of two more answers the one with fewer of the plain one's bits."""
    return kept if torch.equal(other, plain) or equal_bits(other, plain) >= equal_bits(kept, plain) else other


KNOBS = (
    Knob("batch", "a sequence alone, and among neighbours of any length", batch, "vLLM issue 51902"),
    Knob("split", "a row's keys in another number of splits", split, "vLLM PR 58131"),
    Knob("padding", "more padded keys, or more queries, behind the end", padding),
    Knob("memory", "q, k, v and dO in other strides, or at an address that is not aligned", memory, version=3),
    Knob("decode", "one query alone, and as the last row of a prefill", decode, "vLLM issue 54035", version=3),
    Knob("chunks", "the queries of a prefill in chunks", chunks),
    Knob("repeat", f"the same call {_CALLS} times", repeat),
)
assert tuple(knob.word for knob in KNOBS) == INVARIANT  # what a kernel may declare
