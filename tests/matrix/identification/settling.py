"""The known plan that a kernel follows, settled once for a kernel on a backend, in a format, before its cells.

A kernel is asked designed inputs, of which a plan has to explain all. Where none does, normal numbers say which plans
it is held to. Of all processes of a run one asks, and the others wait: no cell depends on which cells ran before it.
"""

import fcntl
import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import msgspec
from torch import Tensor

from tiebreak.cases.errors import signed_error_ulps
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.kernels.formats import FP8_E4M3, Format, Formats
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import Declaration, first_line, is_random
from tiebreak.kernels.reference import reference
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.identification.asking import DesignedOutput, ProbedKernel
from tiebreak.matrix.identification.backward_attribution import backward_pass_of
from tiebreak.matrix.identification.candidates import MATCHED_BY_ERROR_SIZE, accepted, on_device
from tiebreak.matrix.identification.designed import BINDING, DESIGNED, OF_SUMS
from tiebreak.matrix.trial import raised
from tiebreak.matrix.workbench import Settled, SharedBatch, Workbench, equal_bits
from tiebreak.reports.records.record import FOLLOWED
from tiebreak.reports.tables.run import counted

#: Share of a designed input's bits that may be missed, 1.5 %: another order of fp32 sums, and the exponential's last
#: bit, cost a sound kernel up to 1.2 % (normal numbers, d = 128), and kernels of no known plan missed 4 % and more.
DESIGNED_MISSED = 0.015
#: Share of equal bits up to which a kernel of which no plan has more may cast O with its own random bits.
RANDOM = 0.9
_LEAST = 4  # designed inputs that a kernel has to take
_LOST = 1e-3  # share of a designed input's bits below which a miss hardly counts
NORMAL = tuple(case for case in SCRIPTED if case.normal)[:3]
_ASKED = (*NORMAL, next(case for case in SCRIPTED if case.name == "tied_maxima[k=2]"))  # where random shifts show most
#: Share of equal rows that differ in a bit, from which on a kernel has its own random bits: with random shifts 9 in
#: 10 do (4 % of elements), where fp32 sums come in another order 1 in 8 (0.2 %).
_OTHER_ROWS = 0.5
HEADS = 32  # of normal numbers: on as many, attribution tells the candidates of a cell apart


class UnidentifiedError(Exception):
    """A kernel's plan can't be determined; one line."""


def plan_of(cell: Cell, bench: Workbench) -> Settled:
    """Return the knowledge about the plan of a cell's kernel; the first caller settles it for all processes."""
    key = cell.backend.name, cell.kernel.name, cell.fmt.name
    if key not in bench.settled:
        probed = probe_of(cell, bench)
        bench.settled[key] = _once(bench.shared, "-".join(key), lambda: _settle(probed, bench.settings.seed))
    return bench.settled[key]


def probe_of(cell: Cell, bench: Workbench) -> ProbedKernel:
    """Return a cell's kernel with its outputs in this process."""
    key = cell.backend.name, cell.kernel.name, cell.fmt.name
    probed: ProbedKernel = bench.asked.setdefault(key, ProbedKernel(cell.backend, cell.kernel, cell.fmt))
    return probed


def _once(folder: Path | None, name: str, make: Callable[[], Settled]) -> Settled:
    """Make what all processes of a run share in one of them; the others wait for it.

    An error that makes the device unusable is raised in the process that made the call, and no other tries again.
    """
    if folder is None:
        return make()
    made, owner = (file_of(folder, name, kind) for kind in ("settled", "owner"))
    with owner.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system gives it back, whatever ends a process
        if not made.exists():
            if owner.stat().st_size:  # somebody began
                return Settled("nothing: as it was asked for its plan, its process ended")
            lock.write("begun")
            lock.flush()
            try:
                _share(made, make())
            except Exception as error:
                _share(made, Settled(f"nothing: {first_line(error)}"))
                raise
            finally:
                lock.truncate(0)  # what a budget ends is asked again
    return msgspec.json.decode(made.read_bytes(), type=Settled)


def _share(file: Path, settled: Settled) -> None:
    part = file.with_suffix(f".{os.getpid()}")
    part.write_bytes(msgspec.json.encode(settled))
    part.replace(file)


def file_of(folder: Path, name: str, kind: str) -> Path:
    """Return a file of what processes share, whatever characters the name has."""
    return folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.{kind}"


def _settle(probed: ProbedKernel, seed: int) -> Settled:
    """Find a kernel's plan; if it raises on the way the plan is unknown, and its cells fail for the error."""
    error_text = ""
    try:
        answers = designed_answers(probed)
        followed, basis = explaining(probed, answers), f"{probed.backend.evidence} on {counted(len(answers), 'input')}"
    except Exception as error:
        if probed.backend.poisoned():
            raise
        followed, basis = None, f"nothing: {first_line(error)}"
        if not isinstance(error, UnidentifiedError):
            error_text = f"asked for its plan, it raised {raised(error, probed.kernel)}"
    wrong = _wrong(probed, followed) or error_text
    if followed is not None:
        return Settled(basis, followed, backward=_backward(probed, followed, seed), wrong=wrong)
    try:
        return Settled(basis, candidates=on_normal_numbers(probed, seed), wrong=wrong)
    except Exception:  # its cells say what it was
        if probed.backend.poisoned():
            raise
        return Settled(basis, wrong=wrong)


def _wrong(probed: ProbedKernel, followed: str | None) -> str:
    """Return what is wrong with an O on a designed input, which no cell judges; empty: nothing.

    It is NaN or Inf, or 0 throughout though weights are not too small for a P in 8 bits, and the plan that the kernel
    follows has other bits.
    """
    plan = None if followed is None else on_device(probed.backend)[followed]
    for answer in probed.answers.values():
        if plan is None or answer.missed(plan) > DESIGNED_MISSED:
            least = FP8_E4M3.smallest_subnormal * answer.inputs.v.abs().max()
            zeros = not answer.o.any() and bool(reference(answer.inputs).o.abs().max() > least)
            if zeros or not answer.o.isfinite().all():
                what = "0 throughout" if zeros else "NaN or Inf"
                return f"asked for its plan by the input {answer.name}, its O is {what}"
    return ""


def designed_answers(probed: ProbedKernel, tell: Callable[[str], None] = lambda line: None) -> Sequence[DesignedOutput]:
    """Return a kernel's outputs on the designed inputs, where they can tell anything; it may raise anything.

    UnidentifiedError: it does not give the same bits twice, nothing finite, or takes too few of the inputs.
    """
    answers = []
    for designed in DESIGNED:
        tell(f"asking {designed.name}")
        if (answer := probed.ask(designed)) is not None:
            answers.append(answer)
    if len(answers) < _LEAST:
        why = next(iter(probed.refused.values()), "none is for this format")
        raise UnidentifiedError(f"it takes {counted(len(answers), 'input')} of {len(DESIGNED)}: {why}")
    again = [] if probed.backend.repeats(probed.kernel) else answers
    if unsteady := next((each.name for each in again if equal_bits(each.o, probed.run(each.inputs)) < 1.0), None):
        raise UnidentifiedError(f"it is not deterministic: two calls on {unsteady} differ, and bits name no plan")
    if not any(answer.o.isfinite().any() for answer in answers):
        raise UnidentifiedError(f"nothing that it returns is finite, of {counted(len(answers), 'input')} that are")
    return answers


def unexplained(answers: Sequence[DesignedOutput], plan: Declaration) -> dict[str, float]:
    """Return the designed inputs of which a plan misses more bits than it leaves open, and the share missed."""
    missed = {answer.name: answer.missed(plan) for answer in answers if answer.name in BINDING}
    return {name: share for name, share in missed.items() if share > DESIGNED_MISSED}


def explaining(probed: ProbedKernel, answers: Sequence[DesignedOutput]) -> str | None:
    """Return the accepted plan that explains every designed input and misses least; None: there is none."""
    first = [answer for answer in answers if answer.name in BINDING]
    plans = accepted(on_device(probed.backend), Formats.of(probed.fmt))
    explain = [name for name, plan in plans.items() if all(each.missed(plan) <= DESIGNED_MISSED for each in first)]

    def cost(name: str) -> float:
        misses = (answer.missed(plans[name]) for answer in answers if answer.name not in OF_SUMS)
        return sum(math.log1p(share / _LOST) for share in misses)

    return min(explain, key=cost, default=None)


def on_normal_numbers(probed: ProbedKernel, seed: int) -> tuple[str, ...]:
    """Return the accepted plan with the most bits; if O may have random bits, all that have; none without an output."""
    plans, answers = accepted(on_device(probed.backend), Formats.of(probed.fmt)), _outputs_on(probed, len(NORMAL), seed)
    total = {name: sum(equal_bits(o, batch.predicted(plan)) for o, batch in answers) for name, plan in plans.items()}
    best = max(total, key=total.__getitem__)
    if answers and total[best] < FOLLOWED * len(answers) and _has_random_bits(probed, answers[0][1].inputs):
        law = {name: plan for name, plan in plans.items() if is_random(plan)} | MATCHED_BY_ERROR_SIZE
        return (_by_error_size(probed.fmt, law, _outputs_on(probed, len(_ASKED), seed)),)
    return left_open(plans, best, total[best] / len(answers)) if answers else ()


def left_open(plans: Mapping[str, Declaration], best: str, share: float) -> tuple[str, ...]:
    """Return what a kernel may follow if `best` has most of its bits: that plan, or all of random bits."""
    return (best,) if share >= RANDOM else tuple(name for name in plans if plans[name].plan.is_stochastic)


@lru_cache(maxsize=len(_ASKED))  # every kernel that follows no plan on designed inputs meets the O of all of them
def _emulated(at: int, fmt: Format, seed: int) -> SharedBatch:
    inputs = _ASKED[at].make(seed, 0, HEADS, fmt)
    return SharedBatch(inputs, reference(inputs))


def _outputs_on(probed: ProbedKernel, number: int, seed: int) -> list[tuple[Tensor, SharedBatch]]:
    """Return the outputs on `number` inputs, without those that it can't run."""
    answers = []
    for at in range(number):
        emulated = _emulated(at, probed.fmt, seed)
        try:
            answer = probed.answer(_ASKED[at].name, emulated)
        except Exception:  # the cell of that case says what it raised
            if probed.backend.poisoned():
                raise
            continue
        if answer is not None and answer.o.isfinite().any():
            answers.append((answer.o, emulated))
    return answers


def _has_random_bits(probed: ProbedKernel, inputs: AttentionInputs) -> bool:
    """Return whether equal rows differ, of one head or of equal heads, or equal calls do.

    The O of one row may be far from a rounding boundary, so rows differ between heads.
    """
    q = inputs.q[:, :, :1].expand_as(inputs.q).contiguous()
    rows = replace(inputs, q=q, causal=False)
    q, k, v = (x[:1, :1].expand_as(x).contiguous() for x in (q, inputs.k, inputs.v))
    alike = replace(rows, q=q, k=k, v=v)
    owns, first, again = map(probed.run, (rows, alike, alike))
    pairs = (owns[:, :, 1:], owns[:, :, :1]), (first, first[:1, :1, :1]), (again, first[:1, :1, :1])
    return any((o != like).any(-1).double().mean().item() > _OTHER_ROWS for o, like in pairs)


def _by_error_size(fmt: Format, plans: Mapping[str, Declaration], answers: Sequence[tuple[Tensor, SharedBatch]]) -> str:
    """Return the plan with random bits whose errors are as large as the kernel's, input by input."""
    apart = dict.fromkeys(plans, 0.0)
    for o, emulated in answers:
        ours, *theirs = (
            signed_error_ulps(each, emulated.ref.o, fmt).square().nanmean()
            for each in (o, *map(emulated.predicted, plans.values()))
        )
        for name, square in zip(plans, theirs, strict=True):
            apart[name] = max(apart[name], (ours / square).log().abs().item())
    return min(apart, key=apart.__getitem__)


def _backward(probed: ProbedKernel, followed: str, seed: int) -> tuple[str, int] | None:
    """Return the backward pass that gradients on normal numbers come from, if there are any."""
    if not probed.kernel.has_backward:
        return None
    forward, batch = on_device(probed.backend)[followed], _emulated(0, probed.fmt, seed)
    with suppress(Exception):  # the cells with gradients say what the kernel raised
        output = probed.backend.run(probed.kernel, batch.inputs, gradients=True)
        return None if output.gradients is None else backward_pass_of(output.gradients, output.o, forward, batch)
    return None
