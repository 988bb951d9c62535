"""Questions of invariance: what is changed about a call whose answer should stay, and what shows that it was reached.

A control is a second change that must change O, by what it does to the numbers. Where it changes no bit, the change did
nothing, and that bits are the same says nothing. Each question's docstring ends with its control, and why that tells.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tiebreak.cases.case import ONE_SIGNED, Draw, Scores, Shape, Values, normal_numbers, scripted
from tiebreak.kernels.algorithms import SPLIT_ATTENTION
from tiebreak.kernels.external.call import CONTIGUOUS, Places
from tiebreak.kernels.external.kernels import UserKernel
from tiebreak.kernels.features import CAUSAL
from tiebreak.kernels.flash import Block
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import CannotRunError, Kernel, composed, is_random
from tiebreak.matrix.questions.comparison import DQ, OF_QUERIES, Answers, Cut, O, WithoutBias, joined
from tiebreak.matrix.questions.placements import fused, misaligned, read_as_contiguous, transposed
from tiebreak.matrix.questions.session import SHARE, Material, Question, Session
from tiebreak.matrix.workbench import equal_bits

GROUP = "a call compared with itself"
_Pieces = Mapping[str, Sequence[AttentionInputs]]  # calls that have the queries of another between them, by words
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
_NEAR = (16.0, 20.0)  # below two maxima that cancel: all of it together is about 2^-16 of one


def _tied(draw: Draw, shape: Shape, apart: bool = True, values: Values = ONE_SIGNED, **scores: Any) -> AttentionInputs:
    """Draw two equal maxima: the last key, and one in the first half or the key before."""
    first = shape.keys // 4 if apart else shape.keys - 2
    return scripted(draw, Scores(positions=(first, shape.keys - 1), **scores), values, shape)


def _cancelling(draw: Draw, shape: Shape) -> AttentionInputs:
    """Draw two equal maxima in different halves whose V cancels.

    O is then about 2^-16 of either maximum's V: its bf16 bits are the last bits of fp32 sums, which any other order of
    summation, or division of a part, mostly changes, in any plan.
    """
    inputs = _tied(draw, shape, gap=_NEAR)
    inputs.v[:, :, -1] = -inputs.v[:, :, shape.keys // 4]
    return inputs


#: The materials of inputs, by name: normal numbers, and rows on which a rounding that a change moves shows as a bias.
_MATERIALS: Mapping[str, Material] = {
    "normal numbers": normal_numbers,
    "ties apart": _tied,
    "ties apart on a sink": partial(_tied, values=Values(tail_mean=-0.1)),
    "ties at the end": partial(_tied, apart=False),
}


def _drawn(session: Session, shape: Shape, share: int = SHARE) -> Iterator[tuple[str, AttentionInputs]]:
    for name, material in _MATERIALS.items():
        yield name, session.draw(name, material, shape, share)


def _of_rows(inputs: AttentionInputs, rows: slice, keys: int, **other: Any) -> AttentionInputs:
    """Return the call with some of its queries and its first keys alone, and with other fields replaced."""
    q, do, k, v = inputs.q[:, :, rows], inputs.do[:, :, rows], inputs.k[:, :, :keys], inputs.v[:, :, :keys]
    return replace(inputs, q=q, k=k, v=v, do=do, **other)


def _negated(x: Tensor, at: slice, dimension: int) -> Tensor:
    other = x.clone()
    other.movedim(dimension, 0)[at] *= -1.0
    return other


def _with_more(inputs: AttentionInputs, names: str, more: int, session: Session) -> AttentionInputs:
    """Return the call with rows of normal numbers appended to some arguments: "q do" or "k v"."""
    added = session.draw("more", normal_numbers, Shape(queries=_MOST, keys=_MOST))
    longer: dict[str, Any] = {
        name: torch.cat([getattr(inputs, name), getattr(added, name)[:, :, :more]], 2) for name in names.split()
    }
    return replace(inputs, **longer)


def batch(session: Session, results: WithoutBias) -> None:
    """Compare a sequence alone with the same among others, and next to one of another length: all get padded to it.

    Control: the V of a neighbour negated, which changes the neighbour's O, a mean of it.
    """
    if isinstance(session.kernel, UserKernel) and "b" not in session.options.layout:
        raise CannotRunError("is called once for every sequence: it sees no batch")
    for material, inputs in _drawn(session, Shape(keys=_KEYS)):
        number, rows = len(inputs.q), inputs.q.shape[2]
        first = slice(0, min(_ALONE, number))
        alone = joined((session.run(inputs.part(slice(at, at + 1))) for at in range(first.stop)), 0)
        # Two sequences or more there are always, and the last is a neighbour of the others.
        negated = replace(inputs, v=_negated(inputs.v, slice(-1, None), 0))
        together, others = session.run(inputs), session.run(negated, gradients=False)
        results.compare(f"among {number - 1} others, {material}", alone, together, inputs, Cut(first))
        results.control("V of a neighbour negated", together[O][-1:], others[O][-1:])
        results.compare(f"next to other numbers, {material}", together, others, inputs, Cut(slice(0, -1)))
        changes = {f"next to one of {keys} keys": _with_neighbour(inputs, keys) for keys in _NEIGHBOURS}
        for queries in _ROWS:
            longer = _with_more(inputs, "q do", queries - rows, session)
            changes[f"padded to a neighbour's {queries} queries"] = longer
            more = _with_more(inputs, "q do", queries, session).q[:1, :, rows:]
            changes[f"packed before one of {queries} queries"] = _packed(inputs, more)
        for words, changed in changes.items():
            if session.takes(changed):
                answer = session.run(changed, gradients=False)
                if changed.lengths is not None:  # packed
                    o = answer[O][0, :, : number * rows]
                    answer = {O: o.reshape(len(o), number, rows, -1).transpose(0, 1)}
                results.compare(f"{words}, {material}", alone, answer, inputs, Cut(first, rows=slice(0, rows)))


def _packed(inputs: AttentionInputs, queries: Tensor) -> AttentionInputs:
    """Pack all sequences into a batch of 1, with one more of these queries and the keys of the first."""
    rows, keys, number, more = inputs.q.shape[2], inputs.k.shape[2], len(inputs.q), queries.shape[2]
    begins = [[size * at for at in range(number + 1)] for size in (rows, keys)]
    lengths = ((*begins[0], number * rows + more), (*begins[1], (number + 1) * keys))
    added = {"q": queries, "k": inputs.k[:1], "v": inputs.v[:1], "do": queries}
    packed: dict[str, Any] = {
        name: torch.cat([getattr(inputs, name).transpose(0, 1).flatten(1, 2)[None], last], 2)
        for name, last in added.items()
    }
    return replace(inputs, **packed, lengths=lengths)


def _with_neighbour(inputs: AttentionInputs, keys: int) -> AttentionInputs:
    """Add one more sequence, a copy of the first in another length: all are padded to the longest."""
    keys_before = inputs.k.shape[2]
    longest = max(keys, keys_before)
    q, k, v, do = (torch.cat([x, x[:1]]) for x in (inputs.q, inputs.k, inputs.v, inputs.do))
    k, v = (torch.cat([x, x[:, :, : longest - keys_before]], 2) for x in (k, v))
    lengths = torch.tensor([*[keys_before] * len(inputs.k), keys])
    return replace(inputs, q=q, k=k, v=v, do=do, key_padding=torch.arange(longest) < lengths[:, None])


def split(session: Session, results: WithoutBias) -> None:
    """Compare keys in 2, 3, 4 and 8 splits with one. Control: 1 and 8 where the terms cancel (`_cancelling`)."""
    in_splits = _splitting(session.kernel)
    keys = session.rows = session.rows or _long_enough(session, results, in_splits)
    for material, inputs in _drawn(session, Shape(keys=keys), share=SHARE * keys // _SPLIT_ROWS[0]):
        whole = session.run(inputs, in_splits(1, keys))
        for number in _SPLITS:
            parts = session.run(inputs, in_splits(number, keys))
            results.compare(f"{number} splits of {keys} keys, {material}", whole, parts, inputs)


def _long_enough(session: Session, results: WithoutBias, in_splits: Callable[[int, int], Kernel]) -> int:
    """Return the fewest keys of a row that the kernel splits as it is told; the fewest tried if it splits none."""
    for keys in _SPLIT_ROWS:
        inputs = session.draw("cancelling", _cancelling, Shape(keys=keys), share=_LONG)
        whole, parts = (session.run(inputs, in_splits(number, keys), gradients=False)[O] for number in (1, _SPLITS[-1]))
        if keys == _SPLIT_ROWS[-1] or not torch.equal(whole, parts):
            break
    results.control(f"{_SPLITS[-1]} splits of {keys} keys whose V cancels", whole, parts)
    return _SPLIT_ROWS[0] if torch.equal(whole, parts) else keys


def _splitting(kernel: Kernel) -> Callable[[int, int], Kernel]:
    """Return a function that makes the kernel split keys into a number of parts; None if nothing says how."""
    if isinstance(kernel, UserKernel):
        called = kernel.caller.convention
        if (keyword := called.splits) is None:
            raise CannotRunError("no parameter num_splits or num_kv_splits")

        def splitting(number: int, keys: int) -> UserKernel:
            options = replace(called.options, options={**called.options.options, keyword: number})
            caller = replace(kernel.caller, convention=replace(called, options=options))
            return replace(kernel, caller=caller, compute=caller.compute)

        return splitting
    declared = kernel.declaration
    if not kernel.composed or declared is None or declared.algorithm is not SPLIT_ATTENTION:
        raise CannotRunError("does not split a row's keys")
    return lambda number, keys: composed(
        kernel.name, replace(declared, block=Block(declared.block.queries, -(-keys // number)))
    )


def padding(session: Session, results: WithoutBias) -> None:
    """Compare with more keys at the end, hidden by a mask, and with more queries.

    Controls: the padded keys made visible, which have their own P and V; and other rows after the end, by their O.
    """
    for keys, more in _PADDED:
        for material, inputs in _drawn(session, Shape(keys=keys)):
            seen = _with_more(inputs, "k v", more, session)
            padded = replace(seen, key_padding=(torch.arange(keys + more) < keys).expand(len(inputs.q), -1))
            if session.takes(inputs, padded):
                plain, answer = session.run(inputs), session.run(padded)
                words = f"{more} padded behind {keys} keys, {material}"
                results.compare(words, plain, answer, inputs, Cut(keys=slice(0, keys)))
                results.control("the padded keys seen", answer[O], session.run(seen, gradients=False)[O])
    for more in _MORE_QUERIES:
        for material, inputs in _drawn(session, Shape(keys=_KEYS)):
            longer, rows = _with_more(inputs, "q do", more, session), inputs.q.shape[2]
            if session.takes(inputs, longer):
                negated = replace(longer, q=_negated(longer.q, slice(rows, None), 2))
                plain, answer, other = (session.run(each, gradients=False) for each in (inputs, longer, negated))
                results.compare(f"{more} more queries, {material}", plain, answer, inputs, Cut(rows=slice(0, rows)))
                results.control("other queries behind the end", answer[O][:, :, rows:], other[O][:, :, rows:])


def memory(session: Session, results: WithoutBias) -> None:
    """Compare with other strides, and with a start that is not aligned.

    Controls: the same storage read in other strides, which reorders the numbers; for dO alone, by dQ.
    """
    if session.options.contiguous:
        raise CannotRunError("declares contiguous=true: it is given no views")
    views = {
        "transposed": Places.all(transposed),
        "in a fused qkv buffer": Places.all(fused),
        "one element off alignment": Places.all(misaligned),
    }
    as_contiguous = Places.all(lambda x: read_as_contiguous(transposed(x)))
    for material, inputs in _drawn(session, Shape(keys=_KEYS)):
        plain = {**session.place(inputs, gradients=False).answers(), **_gradients_from(session, inputs, CONTIGUOUS)}
        for words, places in views.items():
            answer = session.answers_with_placement(inputs, places, gradients=False)
            answer = {**answer, **_gradients_from(session, inputs, places)} if answer else answer
            results.compare(f"{words}, {material}", plain, answer, inputs)
        paged = _paged(inputs)
        if session.takes(*paged):
            in_order, shuffled = map(session.run, paged)
            results.compare(f"pages in another order, {material}", in_order, shuffled, inputs)
        other = session.place(inputs, as_contiguous, gradients=False).answers()
        results.control("the same storage in other strides", plain[O], other[O])
        if DQ in plain:
            other = session.place(inputs, Places(do=as_contiguous.do)).answers()
            results.control("dO's storage in other strides", plain[DQ], other[DQ])
        session.held.clear()  # a kernel that keeps what it finds by its address is another question's matter


def _gradients_from(session: Session, inputs: AttentionInputs, places: Places) -> Answers:
    """Return the gradients of a call with arguments so placed; its O may differ from one without gradients."""
    answer = session.answers_with_placement(inputs, places) if session.kernel.has_backward else {}
    return {part: x for part, x in answer.items() if part != O}


def _paged(inputs: AttentionInputs) -> tuple[AttentionInputs, AttentionInputs]:
    """Return the inputs with K and V in pages in order, and in reverse order."""
    pages = inputs.k.shape[2] // _PAGE
    table = torch.arange(len(inputs.k) * pages, dtype=torch.int32).view(len(inputs.k), pages)
    in_order = replace(inputs, block_table=table, page_size=_PAGE, pool_pages=table.numel())
    return in_order, replace(in_order, block_table=table.numel() - 1 - table)


def _prefills(session: Session, inputs: AttentionInputs) -> list[AttentionInputs]:
    """Return a call whose queries follow one another, without a causal mask where the kernel takes none."""
    return [replace(inputs, causal=causal) for causal in (True, False) if not causal or CAUSAL in session.kernel.takes]


def _in_pieces(session: Session, results: WithoutBias, whole: AttentionInputs, pieces: _Pieces, cut: Cut) -> bool:
    """Compare a prefill with its queries in pieces, in all ways that the kernel takes; return whether there is one."""
    taken = {words: calls for words, calls in pieces.items() if session.takes(whole, *calls)}
    if taken:
        answer, at = session.run(whole), slice(-2, -1)
        for words, calls in taken.items():
            results.compare(words, answer, joined(map(session.run, calls), 2, OF_QUERIES), whole, cut)
        other = session.run(replace(whole, q=_negated(whole.q, at, 2)), gradients=False)
        results.control("another query in a row of the prefill", answer[O][:, :, at], other[O][:, :, at])
    return bool(taken)


def decode(session: Session, results: WithoutBias) -> None:
    """Compare one query alone with the last row of a prefill. Control: another q in the row before, of another P."""
    # Random bits go by a row's place, so that two answers are two draws, and one row of a head tells little. Without a
    # causal mask more rows see as many keys.
    declaration = session.kernel.declaration
    draws = declaration is not None and is_random(declaration)
    rows = _DRAWN_ROWS if draws else 1
    for keys in _DECODED:
        for material, inputs in _drawn(session, Shape(queries=keys, keys=keys), share=1):
            prefills = _prefills(session, inputs)
            pieces = {
                f"one query of {keys} keys{', causal' if prefill.causal else ''}, {material}": [
                    _of_rows(prefill, slice(row, row + 1), keys, noise_seed=inputs.noise_seed + row)
                    for row in range(keys - rows, keys)
                ]
                for prefill in reversed(prefills)
            }
            wholes, cut = prefills[-1 if draws else 0 :], Cut(rows=slice(-rows, None))
            any(_in_pieces(session, results, whole, pieces, cut) for whole in wholes)
        if not results.is_empty:
            break


def chunks(session: Session, results: WithoutBias) -> None:
    """Compare the queries of a prefill in chunks, each after the keys before it. Control: as of `decode`."""
    seeing = Cut(rows=slice(_PREFILL // 4, None))  # a maximum, if there is one: the few keys before it may cancel
    for material, inputs in _drawn(session, Shape(queries=_PREFILL, keys=_PREFILL), share=_LONG):
        for whole in _prefills(session, inputs):
            pieces = {
                f"in chunks of {size} queries, {material}": [
                    _of_rows(whole, slice(start, start + size), start + size if whole.causal else _PREFILL)
                    for start in range(0, _PREFILL, size)
                ]
                for size in _CHUNKS
            }
            if _in_pieces(session, results, whole, pieces, seeing):
                break


def repeat(session: Session, results: WithoutBias) -> None:
    """Compare 100 calls on the same inputs. Control: V negated, so no answer is kept from an earlier call."""
    if session.cell.backend.repeats(session.kernel):
        raise CannotRunError("a second run could only have the same bits: one program runs after the other")
    for material, inputs in _drawn(session, Shape(keys=_KEYS)):
        plain = least = session.run(inputs)
        for _ in range(_CALLS - 1):
            again = session.run(inputs)
            # The one of two more answers that has fewer of the plain answer's bits.
            least = {part: min(least[part], again[part], key=partial(equal_bits, x)) for part, x in plain.items()}
        results.compare(f"{_CALLS} calls, {material}", plain, least, inputs)
        results.control("V negated", plain[O], session.run(replace(inputs, v=-inputs.v), gradients=False)[O])


QUESTIONS = (
    Question("invariance[batch]", "a sequence alone, and among neighbours of any length", batch, "vLLM issue 51902", 2),
    Question("invariance[split]", "a row's keys in another number of splits", split, "vLLM PR 58131", 2),
    Question("invariance[padding]", "more padded keys, or more queries, behind the end", padding, version=2),
    Question("invariance[memory]", "q, k, v and dO in other strides, or not aligned", memory, version=3),
    Question("invariance[decode]", "one query alone, and as the last row of a prefill", decode, "vLLM issue 54035", 3),
    Question("invariance[chunks]", "the queries of a prefill in chunks", chunks, version=2),
    Question("invariance[repeat]", f"the same call {_CALLS} times", repeat, version=2),
)
