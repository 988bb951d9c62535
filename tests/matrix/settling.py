"""The known plan that a kernel follows, settled once for a kernel on a backend, in a format, before its cells.

A kernel is asked designed inputs, of which a plan has to explain all. Where none does, normal numbers say which plans
it is held to. Of all processes of a run one asks, and the others wait: no cell depends on which cells ran before it.
"""

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import msgspec
from torch import Tensor

from tiebreak.cases.errors import signed_error_ulps
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.kernels.formats import Format, Formats
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import Declaration, first_line
from tiebreak.kernels.reference import reference
from tiebreak.matrix.asking import Answer, Asked
from tiebreak.matrix.backward_attribution import backward_pass_of
from tiebreak.matrix.candidates import BY_LAW, accepted, drawn, on_device
from tiebreak.matrix.designed import BINDING, DESIGNED, OF_SUMS
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.workbench import Settled, SharedBatch, Workbench, equal_bits
from tiebreak.reports.records.record import FOLLOWED
from tiebreak.reports.tables.run import counted

#: Share of a designed input's bits that may be missed, 1.5 %: another order of fp32 sums, and the exponential's last
#: bit, cost a sound kernel up to 1.2 % (normal numbers, d = 128), and kernels of no known plan missed 4 % and more.
DESIGNED_MISSED = 0.015
#: Share of equal bits up to which a kernel of which no plan has more may cast O with random bits of its own.
RANDOM = 0.9
_LEAST = 4  # designed inputs that a kernel has to take
_LOST = 1e-3  # share of a designed input's bits below which a miss hardly counts
NORMAL = tuple(case for case in SCRIPTED if case.normal)[:3]
_ASKED = (*NORMAL, next(case for case in SCRIPTED if case.name == "tied_maxima[k=2]"))  # where random shifts show most
#: Share of equal rows that differ in a bit, from which on a kernel has random bits of its own: with random shifts 9 in
#: 10 do (4 % of elements), where fp32 sums come in another order 1 in 8 (0.2 %).
_OTHER_ROWS = 0.5
HEADS = 32  # of normal numbers: on as many, attribution tells the candidates of a cell apart
_LOOK = 0.05  # seconds between two looks at whether another process has come to an end


class UnidentifiedError(Exception):
    """Nothing can be said of a kernel's plan; one line."""


def settled(cell: Cell, bench: Workbench) -> Settled:
    """Return what is known of the plan of a cell's kernel; the first that asks settles it for all processes."""
    kernel, backend = cell.kernel, cell.backend
    if kernel.declaration is not None:
        return Settled("what it declares", kernel.declaration.label)
    key = backend.name, kernel.name, cell.fmt.name
    if key not in bench.settled:
        asked = asking(cell, bench)
        bench.settled[key] = _once(bench.shared, "-".join(key), lambda: _settle(asked, bench.settings.seed))
    return bench.settled[key]


def asking(cell: Cell, bench: Workbench) -> Asked:
    """Return what a cell's kernel has been asked in this process."""
    key = cell.backend.name, cell.kernel.name, cell.fmt.name
    asked: Asked = bench.asked.setdefault(key, Asked(cell.backend, cell.kernel, cell.fmt))
    return asked


def _once(folder: Path | None, name: str, make: Callable[[], Settled]) -> Settled:
    """Make what all processes of a run share in one of them; the others wait for it.

    What leaves the device beyond use is raised in the process that asked, and no other asks again.
    """
    if folder is None:
        return make()
    made, owner = (file_of(folder, name, kind) for kind in ("settled", "owner"))
    while not made.exists():
        with _owned(owner) as own:
            if own:
                try:
                    _share(made, make())
                except Exception as error:
                    _share(made, Settled(f"nothing: {first_line(error)}"))
                    raise
            elif not _alive(owner):
                return Settled("nothing: as it was asked for its plan, its process ended")
        if not made.exists():
            time.sleep(_LOOK)
    return msgspec.json.decode(made.read_bytes(), type=Settled)


def _share(file: Path, found: Settled) -> None:
    part = file.with_suffix(f".{os.getpid()}")
    part.write_bytes(msgspec.json.encode(found))
    part.replace(file)


def file_of(folder: Path, name: str, kind: str) -> Path:
    """Return a file of what processes share, whatever characters the name has."""
    return folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.{kind}"


@contextmanager
def _owned(file: Path) -> Iterator[bool]:
    """Take a file that stays as long as this process is at it, or for good if it ends in the middle."""
    try:
        with file.open("x") as opened:
            opened.write(str(os.getpid()))
    except FileExistsError:
        yield False
        return
    try:
        yield True
    finally:
        file.unlink()


def _alive(owner: Path) -> bool:
    """Tell whether the process that owns a file still runs, or has given it back by now."""
    try:
        text = owner.read_text()
        os.kill(int(text or os.getpid()), 0)  # it has just been made, where it is empty
    except ProcessLookupError:
        return False
    except (OSError, ValueError):
        return True
    return True


def _settle(asked: Asked, seed: int) -> Settled:
    """Ask a kernel; whatever it raises on the way leaves its plan unknown, and its cells say what it was."""
    try:
        answers = designed_answers(asked)
        followed, known = explaining(asked, answers), f"{asked.backend.evidence} on {counted(len(answers), 'input')}"
    except Exception as error:
        if asked.backend.poisoned():
            raise
        followed, known = None, f"nothing: {first_line(error)}"
    if followed is not None:
        return Settled(known, followed, backward=_backward(asked, followed, seed))
    try:
        return Settled(known, candidates=on_normal_numbers(asked, seed))
    except Exception:  # its cells say what it was
        if asked.backend.poisoned():
            raise
        return Settled(known)


def designed_answers(asked: Asked, tell: Callable[[str], None] = lambda line: None) -> Sequence[Answer]:
    """Return what a kernel makes of the designed inputs, where that can tell anything; it may raise anything.

    Raises:
        UnidentifiedError: it does not give the same bits twice, nothing finite, or takes too few of the inputs.
    """
    answers = []
    for designed in DESIGNED:
        tell(f"asking {designed.name}")
        if (answer := asked.ask(designed)) is not None:
            answers.append(answer)
    if len(answers) < _LEAST:
        why = next(iter(asked.refused.values()), "none is for this format")
        raise UnidentifiedError(f"it takes {counted(len(answers), 'input')} of {len(DESIGNED)}: {why}")
    again = [] if asked.backend.repeats(asked.kernel) else answers
    if unsteady := next((each.name for each in again if equal_bits(each.o, asked.run(each.inputs)) < 1.0), None):
        raise UnidentifiedError(f"it is not deterministic: two calls on {unsteady} differ, and bits name no plan")
    if not any(answer.o.isfinite().any() for answer in answers):
        raise UnidentifiedError(f"nothing that it returns is finite, of {counted(len(answers), 'input')} that are")
    return answers


def unexplained(answers: Sequence[Answer], plan: Declaration) -> dict[str, float]:
    """Return the designed inputs of which a plan misses more bits than it leaves open, and the share missed."""
    missed = {answer.name: answer.missed(plan) for answer in answers if answer.name in BINDING}
    return {name: share for name, share in missed.items() if share > DESIGNED_MISSED}


def explaining(asked: Asked, answers: Sequence[Answer]) -> str | None:
    """Return the accepted plan that explains every designed input, of several the one that misses least; None: none."""
    first = [answer for answer in answers if answer.name in BINDING]
    known = accepted(on_device(asked.backend), Formats.of(asked.fmt))
    explain = [name for name, plan in known.items() if all(each.missed(plan) <= DESIGNED_MISSED for each in first)]

    def cost(name: str) -> float:
        told = (each.missed(known[name]) for each in answers if each.name not in OF_SUMS)
        return sum(math.log1p(share / _LOST) for share in told)

    return min(explain, key=cost, default=None)


def on_normal_numbers(asked: Asked, seed: int) -> tuple[str, ...]:
    """Return the accepted plan with the most bits; where O may have random bits, all that have; of no answer none."""
    known, answers = accepted(on_device(asked.backend), Formats.of(asked.fmt)), _on(asked, len(NORMAL), seed)
    total = {name: sum(equal_bits(o, batch.predicted(plan)) for o, batch in answers) for name, plan in known.items()}
    best = max(total, key=total.__getitem__)
    if answers and total[best] < FOLLOWED * len(answers) and _random(asked, answers[0][1].inputs):
        law = {name: plan for name, plan in known.items() if drawn(plan)} | BY_LAW
        return (_of_its_law(asked.fmt, law, _on(asked, len(_ASKED), seed)),)
    if not answers or total[best] >= RANDOM * len(answers):
        return (best,) if answers else ()
    return tuple(name for name in total if known[name].plan.stochastic)


@lru_cache(maxsize=len(_ASKED))  # every kernel that follows no plan on designed inputs meets the O of all of them
def _emulated(at: int, fmt: Format, seed: int) -> SharedBatch:
    inputs = _ASKED[at].make(seed, 0, HEADS, fmt)
    return SharedBatch(inputs, reference(inputs))


def _on(asked: Asked, number: int, seed: int) -> list[tuple[Tensor, SharedBatch]]:
    """Return what it makes of so many inputs, but for those that it can't run."""
    answers = []
    for at in range(number):
        emulated = _emulated(at, asked.fmt, seed)
        try:
            answer = asked.answer(_ASKED[at].name, emulated)
        except Exception:  # the cell of that case says what it raised
            if asked.backend.poisoned():
                raise
            continue
        if answer is not None and answer.o.isfinite().any():
            answers.append((answer.o, emulated))
    return answers


def _random(asked: Asked, inputs: AttentionInputs) -> bool:
    """Tell whether equal rows differ, of one head or of equal heads, or equal calls do.

    O of one row may lie far from where its bits turn. So every head has a row of its own first.
    """
    q = inputs.q[:, :, :1].expand_as(inputs.q).contiguous()
    rows = replace(inputs, q=q, causal=False)
    q, k, v = (x[:1, :1].expand_as(x).contiguous() for x in (q, inputs.k, inputs.v))
    alike = replace(rows, q=q, k=k, v=v)
    own, first, again = map(asked.run, (rows, alike, alike))
    pairs = (own[:, :, 1:], own[:, :, :1]), (first, first[:1, :1, :1]), (again, first[:1, :1, :1])
    return any((o != like).any(-1).double().mean().item() > _OTHER_ROWS for o, like in pairs)


def _of_its_law(fmt: Format, plans: Mapping[str, Declaration], answers: Sequence[tuple[Tensor, SharedBatch]]) -> str:
    """The plan of random bits whose errors are as large as the kernel's, input by input: its bits are its own."""
    apart = dict.fromkeys(plans, 0.0)
    for o, emulated in answers:
        ours, *theirs = (
            signed_error_ulps(each, emulated.ref.o, fmt).square().nanmean()
            for each in (o, *map(emulated.predicted, plans.values()))
        )
        for name, square in zip(plans, theirs, strict=True):
            apart[name] = max(apart[name], (ours / square).log().abs().item())
    return min(apart, key=apart.__getitem__)


def _backward(asked: Asked, followed: str, seed: int) -> tuple[str, int] | None:
    """The backward pass that gradients on normal numbers come from, where there are any."""
    if not asked.kernel.has_backward:
        return None
    forward, batch = on_device(asked.backend)[followed], _emulated(0, asked.fmt, seed)
    with suppress(Exception):  # the cells with gradients say what the kernel raised
        output = asked.backend.run(asked.kernel, batch.inputs, gradients=True)
        return None if output.gradients is None else backward_pass_of(output.gradients, output.o, forward, batch)
    return None
