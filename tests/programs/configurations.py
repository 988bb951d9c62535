"""`tiebreak configs`: `tiebreak check --configs`, which checks the first of each class of equal bits."""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, product

from msgspec.structs import replace

from tiebreak.kernels.external.isolation import own_randomness
from tiebreak.kernels.inputs import AttentionOutput
from tiebreak.kernels.kernel import CannotRunError
from tiebreak.kernels.triton.loading import Tuning
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.experiments.call import OneCall, digest
from tiebreak.matrix.identification.asking import threads
from tiebreak.matrix.workbench import Settings, Workbench
from tiebreak.programs import check
from tiebreak.reports.errors import UsageError
from tiebreak.reports.names import split
from tiebreak.reports.records.order import grouped
from tiebreak.reports.tables.run import counted
from tiebreak.reports.verdict import Finding, Verdict, worst_first

_ALL, _HEADS = "all", 4  # of each call
_ASSUMED = "; {} more, by num_warps and the like alone, have the same bits by assumption: the interpreter has no warps"
Looks = dict[str, dict[str, tuple[str, ...]]]  # by --kernel and call: digests of O, dQ, dK, dV, or what was raised
_REFUSED = (CannotRunError.__name__,)


def main(arguments: Sequence[str]) -> int:
    """Run the verb `configs`: check the first of each class of configurations."""
    options, follower = check.parsed(arguments, "tiebreak configs"), check.Follower(sys.stderr)
    options.configs = options.configs or [_ALL]

    def look(targets: list[str]) -> Looks:
        asked = argparse.Namespace(**{**vars(options), "targets": targets, "workers": 0})
        _, printed = check.run(asked, collected := check.Follower(follower.stream), "--collect-only")
        if collected.collector is None:
            raise UsageError(check.refusal(printed))
        follower.tell(f"a look at {len(targets)} of {options.targets[0]}")
        return outputs_of_calls(collected.collector.expected.values(), collected.collector.settings.seed)

    if options.targets[1:]:
        raise UsageError(f"--configs: {len(options.targets)} targets; name one")
    configurations = Configurations(options.targets[0], options.configs, look)
    follower.judged, options.targets = configurations.add_to_verdicts, [own[0] for own in configurations.classes]
    return check.checked(options, follower)


class Configurations:
    """The outputs of configurations that vary one keyword or autotuned kernel, on a few heads of every call."""

    def __init__(self, target: str, asked: Sequence[str], look: Callable[[list[str]], Looks]) -> None:
        """Look at the requested configurations, `all` or NAME=V1,V2, by their targets; UsageError: there are none."""
        words, self.target, self.merged = list[str](), target, 0  # how many interpreted code can't tell from others
        for each in asked:
            name, _, values = each.partition("=")
            words += [f"[{name}={value}]" for value in split(values)]
            if each == _ALL:
                Tuning.left.clear()
                look([target])
                left = Tuning.left.items()
                words += [f"[{kernel}.{members}]" for kernel, known in left if len(known) > 1 for members in known]
                self.merged = sum(len(members) - 1 for _, known in left for members in known.values())
        targets = [target + each for each in dict.fromkeys(words or [""] * bool(self.merged))]
        looks = look(targets) if targets else {}
        self.bits = {name: bits for name, bits in looks.items() if {*bits.values()} != {_REFUSED}} or looks
        self.refused = [name.removeprefix(target) for name in looks if name not in self.bits]
        if not self.bits:
            advice = "name NAME=V1,V2 of a keyword; all is of autotuned kernels, with --backend interpreter or ptx"
            raise UsageError(f"--configs {' '.join(asked)}: there are none, or no case is a call; {advice}")
        self.classes = list(grouped(self.bits, lambda name: tuple(self.bits[name].items())).values())

    def telling(self) -> list[str]:
        """Return calls that tell all classes apart, each the one that splits most: greedy, so perhaps not minimal."""
        left, chosen, bits = set(combinations([members[0] for members in self.classes], 2)), list[str](), self.bits
        while left:
            parts = {at: {(a, b) for a, b in left if bits[a][at] != bits[b][at]} for at in next(iter(bits.values()))}
            chosen.append(max(parts, key=lambda at: len(parts[at])))
            left -= parts[chosen[-1]]
        return chosen

    def add_to_verdicts(self, verdicts: Sequence[Verdict]) -> list[Verdict]:
        """Return the verdicts on the first of each class, the worst first, which also reports on all."""
        ran, apart = [made for made in self.bits[self.classes[0][0]].values() if made != _REFUSED], self.telling()
        text = f"{len(self.bits)}, {len(self.classes)} of other bits on {_HEADS} heads of {counted(len(ran), 'call')}"
        text += f" ({sum(len(made) > 1 for made in ran)} with gradients)"
        text += f", told apart by {', '.join(apart)}" * bool(apart) + _ASSUMED.format(self.merged) * bool(self.merged)
        text += f"; refused on every call: {' '.join(self.refused)}" * bool(self.refused)
        findings = [Finding("configs", text, tuple(apart))]
        ranked = worst_first(verdicts)
        for verdict, members in product(ranked, self.classes):
            names = [name.removeprefix(self.target) for name in members]
            if verdict.kernel.endswith(names[0]):
                texts = [finding.text for finding in verdict.findings if finding.name in ("biased", "rounding")]
                findings.append(Finding("equal bits", "; ".join([f"{' '.join(names)}: {verdict.statement}", *texts])))
        return [replace(ranked[0], findings=(*findings, *ranked[0].findings)), *ranked[1:]]


def outputs_of_calls(cells: Iterable[Cell], seed: int) -> Looks:
    """Return the outputs of the calls among some cells, on a few heads."""
    looks, bench = Looks(), Workbench(Settings(seed, _HEADS))
    for cell in cells:
        if isinstance(call := cell.experiment, OneCall) and cell.kernel.external:
            by_call = looks.setdefault(cell.kernel.origin[1], {})
            with threads(1), own_randomness(seed):
                by_call[call.name] = (*by_call.get(call.name, ()), *_bits(cell, call, bench))
    return looks


def _bits(cell: Cell, call: OneCall, bench: Workbench) -> tuple[str, ...]:
    try:
        inputs = bench.case(call.case, cell.fmt).batch(0).inputs
        if call.refusal(cell, bench) is not None:
            return _REFUSED
        output = cell.backend.run(cell.kernel, inputs, gradients=call.case.gradients and cell.kernel.has_backward)
    except Exception as error:  # whatever the kernel raises; its message may name the configuration
        return (type(error).__name__,)
    tensors = (output.o, made.dq, made.dk, made.dv) if (made := output.gradients) else (output.o,)
    return tuple(digest(AttentionOutput(tensor)) for tensor in tensors)
