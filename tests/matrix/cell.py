"""One cell of the matrix: make inputs, run the kernel, measure, judge, record."""

import hashlib
import math
import shlex
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from tiebreak.backends.backend import EMULATION, Backend
from tiebreak.cases.bounds import UNDECLARED, error_bound
from tiebreak.cases.case import Case
from tiebreak.cases.claims import UNBIASED, Claim, claim, predicted
from tiebreak.cases.gradients import gradient_measures
from tiebreak.cases.measures import Measures, difference, measure, merge, signed_error_ulps
from tiebreak.cases.trace import trace
from tiebreak.cases.verdicts import LOOKS, MARGIN_ULPS, Interval, Verdict, judge
from tiebreak.kernels.external import ContractError
from tiebreak.kernels.flash import Block
from tiebreak.kernels.formats import FP32, Format
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import Declaration, Kernel, composed
from tiebreak.kernels.reference import Reference, reference
from tiebreak.kernels.roster import DEFAULT_ROSTER, PLAIN
from tiebreak.reports import records

_BINS, _REACH_ULPS = 64, 2.0  # of the histogram of signed errors

ONE_TILE = " in one tile"  # what a plan's name ends with where rows are not split into tiles
_ONE_TILE = Block(2**31, 2**31)

_FAIR_CLAIM = claim(UNBIASED, "--fair: no bias on any failure input", formats="bf16 fp16 fp32")


@dataclass(frozen=True)
class Cell:
    """What is run: backend x kernel x case x format."""

    backend: Backend
    kernel: Kernel
    case: Case
    fmt: Format

    @property
    def id(self) -> str:
        """`backend-kernel-case-format`, as pytest shows it."""
        return f"{self.backend.name}-{self.kernel.name}-{self.case.name}-{self.fmt.name}"


@dataclass(frozen=True)
class Settings:
    """What the command line says of every cell."""

    seed: int = 1
    heads: int = 256  # query heads of one batch; a cell draws up to 8 times as many
    fair: bool = False  # hold external kernels to no bias on failure inputs
    kernel_options: tuple[str, ...] = ()  # --kernel and --plan as given, for the command that reruns a cell
    matrix: str = "tests/matrix"  # the folder of the cells from where pytest was called, for the same command

    def command(self, cell: Cell) -> str:
        """The command that reruns one cell."""
        kernel: tuple[str, ...] = ("--kernels", cell.kernel.name)
        if cell.kernel.external:
            kernel = (*self.kernel_options, *(("--fair",) if self.fair else ()))
        where = ["--backend", cell.backend.name, *kernel, "--cases", cell.case.name, "--dtype", cell.fmt.name]
        return shlex.join(["pytest", self.matrix, *where, "--seed", str(self.seed), "--heads", str(self.heads)])


@dataclass(frozen=True)
class Batch:
    """One batch of a case's heads with its reference."""

    inputs: AttentionInputs
    ref: Reference


@dataclass
class Workbench:
    """What cells of one case share: inputs, references, and the emulation's outputs. Holds one case at a time."""

    settings: Settings
    _key: tuple[str, str] = ("", "")
    _batches: dict[int, Batch] = field(default_factory=dict)
    _bounds: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    _emulated: dict[tuple[Declaration, int], tuple[AttentionOutput, Measures]] = field(default_factory=dict)

    def batch(self, case: Case, fmt: Format, index: int) -> Batch:
        """Batch `index` of a case."""
        if self._key != (case.name, fmt.name):
            self._key = (case.name, fmt.name)
            for cache in (self._batches, self._bounds, self._emulated):
                cache.clear()
        if index not in self._batches:
            inputs = case.make(self.settings.seed, index, self.settings.heads, fmt)
            self._batches[index] = Batch(inputs, reference(inputs))
        return self._batches[index]

    def bound(self, cell: Cell, index: int, declaration: Declaration) -> Tensor:
        """Error bound of every element of O under a declaration."""
        key = (f"{declaration.label}/{declaration.block}", index)
        if key not in self._bounds:
            batch = self.batch(cell.case, cell.fmt, index)
            self._bounds[key] = error_bound(batch.inputs, batch.ref, declaration)
        return self._bounds[key]

    def measure(self, cell: Cell, index: int, output: AttentionOutput, declaration: Declaration) -> Measures:
        """Measures of an output on one batch."""
        batch = self.batch(cell.case, cell.fmt, index)
        delta = output.gradients.delta if output.gradients else None
        return measure(output.o.float(), delta, batch.inputs, batch.ref, self.bound(cell, index, declaration))

    def emulated(self, cell: Cell, index: int, declaration: Declaration) -> tuple[AttentionOutput, Measures]:
        """What the emulation makes of a declaration on one batch."""
        batch = self.batch(cell.case, cell.fmt, index)
        # Tiles beyond the input's size change nothing: such declarations share one emulation.
        queries, keys = batch.inputs.q.shape[-2], batch.inputs.k.shape[-2]
        block = Block(min(declaration.block.queries, queries), min(declaration.block.keys, keys))
        declaration = replace(declaration, block=block)
        key = (declaration, index)
        if key not in self._emulated:
            kernel = composed(declaration.label, declaration)
            output = EMULATION.run(kernel, batch.inputs, gradients=cell.case.gradients)
            self._emulated[key] = (output, self.measure(cell, index, output, declaration))
        return self._emulated[key]


@dataclass
class _Progress:
    """What has been measured of a cell so far, look after look."""

    batches: list[Measures] = field(default_factory=list)
    predictions: dict[Declaration, list[Measures]] = field(default_factory=dict)
    fits: dict[str, list[Measures]] = field(default_factory=dict)
    equal_bits: dict[Declaration, list[float]] = field(default_factory=dict)


def run_cell(cell: Cell, bench: Workbench) -> records.Record:
    """Run one cell to its record. A kernel that raises crashes its own cell alone.

    Args:
        cell: what to run.
        bench: inputs and predictions shared with the other cells of its case.

    Returns:
        The record, whatever happened.
    """
    runner = _Runner(cell, bench)
    try:
        refusal = cell.kernel.refuses(bench.batch(cell.case, cell.fmt, 0).inputs)
        if refusal is not None:
            return runner.record(records.SKIPPED, (refusal,))
        return runner.run()
    except Exception as error:  # the kernel is not ours: whatever it raises belongs into its record
        where = f"kernel {cell.kernel.name}, case {cell.case.name}, seed {bench.settings.seed}"
        return runner.record(records.CRASHED, (f"{where}: {_told(error)}",))


class _Runner:
    """One cell's looks at its data."""

    def __init__(self, cell: Cell, bench: Workbench) -> None:
        self.cell, self.bench = cell, bench
        self.progress = _Progress()
        self.first: AttentionOutput | None = None
        self.repeatable: bool | None = None
        declaration = cell.kernel.declaration
        self.declaration = declaration or UNDECLARED
        self.predictable = declaration is not None and not cell.backend.predicts
        self.tilings = _tilings(self.declaration) if cell.kernel.external else (self.declaration,)
        self.claim = self._claim()
        self.candidates = _candidates(cell) if declaration is None else {}

    def _claim(self) -> Claim | None:
        if self.cell.kernel.external and self.bench.settings.fair and self.cell.case.failure:
            return _FAIR_CLAIM
        # A declared plan of a user's kernel is a prediction to be held to, not an allowance to be biased.
        return self.cell.case.claim_about(self.cell.kernel.declaration, self.cell.fmt)

    def run(self) -> records.Record:
        """Look at ever more heads until everything is settled or the cap is reached."""
        for look in range(LOOKS):
            for index in range(2**look // 2, 2**look):
                self._measure(index)
            if self._settled():
                break
        self.repeatable = self._repeats()
        reasons = self._reasons()
        unsettled = [] if reasons else self._unsettled()
        outcome = records.FELL if reasons else records.INCONCLUSIVE if unsettled else records.HELD
        return self.record(outcome, (*reasons, *unsettled))

    def _measure(self, index: int) -> None:
        batch = self.bench.batch(self.cell.case, self.cell.fmt, index)
        gradients = self.cell.case.gradients and self.cell.kernel.has_backward
        if self.cell.backend.predicts and self.cell.kernel.declaration is not None:
            output, measures = self.bench.emulated(self.cell, index, self.declaration)
        else:
            output = self.cell.backend.run(self.cell.kernel, batch.inputs, gradients=gradients)
            # The bound grows with the number of tiles.
            measures = self.bench.measure(self.cell, index, output, self.tilings[-1])
        self.progress.batches.append(measures)
        if self.first is None:
            self.first = output
        for declaration in self.tilings if self.predictable else ():
            prediction, predicted_measures = self.bench.emulated(self.cell, index, declaration)
            self.progress.predictions.setdefault(declaration, []).append(predicted_measures)
            self.progress.equal_bits.setdefault(declaration, []).append(_equal(output.o.float(), prediction.o))
        for name, declaration in self.candidates.items():
            emulated = self.bench.emulated(self.cell, index, declaration)[1]
            self.progress.fits.setdefault(name, []).append(emulated)

    @property
    def measures(self) -> Measures:
        return merge(self.progress.batches)

    @property
    def judged(self) -> bool:
        """Whether the mean error in ulps says anything in this case."""
        return not self.cell.case.cancels

    def _prediction_met(self) -> bool | None:
        if not self.predictable or not self.judged or self.cell.case.chaotic:
            return True
        (_, prediction), measures = self._prediction(), self.measures
        if measures.nonfinite or prediction.nonfinite:
            return abs(measures.nonfinite - prediction.nonfinite) <= _few(measures)
        return predicted(difference(measures, prediction))

    def _prediction(self) -> tuple[Declaration, Measures]:
        """What is predicted, in the tiles that come nearest: nobody has said in which a user's kernel works."""
        merged = [(declaration, merge(found)) for declaration, found in self.progress.predictions.items()]
        return min(merged, key=lambda pair: _distance(self.measures, pair[1]))

    def _settled(self) -> bool:
        measures = self.measures
        told = self.claim is None or self.claim.expectation.met(measures) is not None
        verdict_told = not self.judged or measures.nonfinite > 0 or judge(measures.bias) is not Verdict.INCONCLUSIVE
        return told and verdict_told and self._prediction_met() is not None and self._fit_told()

    def _fit_told(self) -> bool:
        """Whether the heads drawn tell which known plans an undeclared kernel may follow here.

        They do where it and some plan agree nearly to the bit. A kernel with a random stream of its own agrees with
        none so closely; then every plan that may be its own is to be told.
        """
        measures = self.measures
        found = [difference(measures, merge(emulated)) for _, emulated in self._fits()]
        if any(fit.half_width < MARGIN_ULPS / 4 and predicted(fit) for fit in found):
            return True
        return not any(predicted(fit) is None and abs(fit.mean) <= fit.half_width for fit in found)

    def _reasons(self) -> list[str]:
        """Why the cell falls; empty if it does not."""
        measures, case = self.measures, self.cell.case
        expectation = self.claim.expectation if self.claim else None
        reasons = []
        if measures.nonfinite and (expectation is None or expectation.finite):
            reasons.append(f"{measures.nonfinite} of {measures.elements} elements are NaN or Inf, the reference is not")
        if measures.missed:
            reasons.append(f"{measures.missed} elements are finite where the reference is NaN or Inf")
        if measures.error_over_bound > 1 and (expectation is None or expectation.accurate):
            reasons.append(
                f"largest error is {measures.error_over_bound:.3g} times the bound of plan {self.declaration.plan.name}"
            )
        if self.claim and self.claim.expectation.met(measures) is False:
            reasons.append(f"claim fell: {self.claim.expectation.name} ({self.claim.source}); {_found(measures)}")
        if self._prediction_met() is False:
            _, prediction = self._prediction()
            found = f"{_found(measures)} measured, {_found(prediction)} emulated"
            reasons.append(f"not what {self.declaration.label} predicts: {found}")
        if self.repeatable is False:
            reasons.append(f"not repeatable: two runs on the same input of {case.name} differ in bits")
        return reasons

    def _unsettled(self) -> list[str]:
        measures, heads = self.measures, self._heads()
        unsettled = []
        if self.claim and self.claim.expectation.met(measures) is None:
            told = f"{heads} heads do not settle the claim: {self.claim.expectation.name}"
            unsettled.append(f"{told} ({self.claim.source}); {_found(measures)}; raise --heads")
        if self._prediction_met() is None:
            _, prediction = self._prediction()
            found = f"{_found(measures)} measured, {_found(prediction)} emulated"
            told = f"{heads} heads do not settle whether it is what {self.declaration.label} predicts"
            unsettled.append(f"{told}: {found}; raise --heads")
        return unsettled

    def _repeats(self) -> bool | None:
        """Whether a second run on the same input gives the same bits; None: not run twice."""
        if self.cell.backend.predicts:
            return None  # a unit test shows it once for all of the emulation
        assert self.first is not None
        batch = self.bench.batch(self.cell.case, self.cell.fmt, 0)
        gradients = self.first.gradients is not None
        again = self.cell.backend.run(self.cell.kernel, batch.inputs, gradients=gradients)
        return _equal(again.o.float(), self.first.o.float()) == 1.0

    def _heads(self) -> int:
        return self.bench.settings.heads * len(self.progress.batches)

    def record(self, outcome: str, reasons: tuple[str, ...]) -> records.Record:
        """The record of what has been measured."""
        cell, settings = self.cell, self.bench.settings
        declared = cell.kernel.declaration
        base: dict[str, object] = {}
        if outcome not in (records.SKIPPED, records.CRASHED):
            base = self._results()
        return records.Record(
            id=cell.id,
            backend=cell.backend.name,
            kernel=cell.kernel.name,
            case=cell.case.name,
            case_version=cell.case.version,
            format=cell.fmt.name,
            seed=settings.seed,
            heads=self._heads(),
            outcome=outcome,
            reasons=reasons,
            command=settings.command(cell),
            plan=declared.label if declared else None,
            **base,  # type: ignore[arg-type]
        )

    def _results(self) -> dict[str, object]:
        measures, claim = self.measures, self.claim
        verdict = Verdict.NONFINITE if measures.nonfinite else judge(measures.bias)
        return {
            "verdict": verdict.value if self.judged else None,
            "measures": self._measures_record(measures),
            "claim": claim
            and records.ClaimRecord(claim.expectation.name, claim.source, claim.expectation.met(measures)),
            "prediction": self._prediction_record(measures),
            "fits": {name: _estimate(difference(measures, merge(emulated))) for name, emulated in self._fits()},
            "digest": _digest(self.first),
            "trace": self._trace(),
            "histogram": self._histogram(),
        }

    def _fits(self) -> list[tuple[str, list[Measures]]]:
        told = self.judged and not self.cell.case.chaotic
        return list(self.progress.fits.items()) if told else []

    def _measures_record(self, measures: Measures) -> records.MeasuresRecord:
        gradients: dict[str, float | None] = {}
        if self.first is not None and self.first.gradients is not None:
            batch = self.bench.batch(self.cell.case, self.cell.fmt, 0)
            found = gradient_measures(self.first, batch.inputs, batch.ref)
            gradients = {name: records.finite(value) for name, value in found.items()}
        return records.MeasuresRecord(
            bias=_estimate(measures.bias),
            rms_ulps=records.finite(measures.rms_ulps),
            max_ulps=records.finite(measures.max_ulps),
            error_over_bound=records.finite(measures.error_over_bound),
            gain=records.finite(measures.gain),
            delta_bias=_estimate(measures.delta_bias),
            left_out=measures.left_out,
            nonfinite=measures.nonfinite,
            elements=measures.elements,
            gradients=gradients,
            repeatable=self.repeatable,
        )

    def _prediction_record(self, measures: Measures) -> records.PredictionRecord | None:
        if not self.predictable:
            return None
        declaration, prediction = self._prediction()
        equal_bits = self.progress.equal_bits[declaration]
        return records.PredictionRecord(
            plan=self.declaration.label,
            bias=_estimate(prediction.bias),
            difference=_estimate(difference(measures, prediction)),
            equal_bits=sum(equal_bits) / len(equal_bits),
            met=self._prediction_met(),
        )

    def _trace(self) -> records.TraceRecord | None:
        declaration = self.cell.kernel.declaration
        if not (self.cell.case.traced and self.cell.backend.predicts and declaration):
            return None
        batch = self.bench.batch(self.cell.case, self.cell.fmt, 0)
        found = trace(declaration, batch.inputs, batch.ref)
        return records.TraceRecord(tuple(map(records.finite, found.error.tolist())), tuple(found.at_one))

    def _histogram(self) -> records.HistogramRecord | None:
        """Signed errors of the first batch, where the case is traced."""
        if not self.cell.case.traced or self.first is None:
            return None
        batch = self.bench.batch(self.cell.case, self.cell.fmt, 0)
        error = signed_error_ulps(self.first.o.float(), batch.ref.o, self.cell.fmt)
        error = error[torch.isfinite(error)]
        counts = torch.histc(error, _BINS, -_REACH_ULPS, _REACH_ULPS).int().tolist()
        return records.HistogramRecord(-_REACH_ULPS, 2 * _REACH_ULPS / _BINS, tuple(counts), len(error) - sum(counts))


def _told(error: Exception) -> str:
    """One line: what was raised and, unless a broken contract says it all, the line of code that raised it."""
    text = (str(error).strip().splitlines() or ["no message"])[0]
    if isinstance(error, ContractError):
        return f"{type(error).__name__}: {text}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text} ({Path(frame.filename).name}, line {frame.lineno})"


def _candidates(cell: Cell) -> dict[str, Declaration]:
    """The plans that an undeclared kernel may turn out to follow, in the declared tiles and in one tile.

    Not those that leave O in fp32: a kernel returns O in the format of its inputs.
    """
    tiled: dict[str, Declaration] = {}
    for kernel in cell.backend.kernels():
        found = kernel.declaration
        if found is not None and (found.plan.o.narrows or cell.fmt == FP32):
            tiled[kernel.name if kernel.name in DEFAULT_ROSTER else f"{PLAIN}@{found.plan.name}"] = found
    flash = {name: found for name, found in tiled.items() if found.algorithm == "flash"}
    return tiled | {f"{name}{ONE_TILE}": replace(found, block=_ONE_TILE) for name, found in flash.items()}


def _tilings(declaration: Declaration) -> tuple[Declaration, ...]:
    """The tiles that a user's kernel may work in, the smallest last; where O-bar is rounded they change its bias."""
    if declaration.algorithm != "flash":
        return (declaration,)
    blocks = (declaration.block, _ONE_TILE, Block(64, 64), Block(32, 32))
    return tuple(replace(declaration, block=block) for block in blocks)


def _distance(ours: Measures, theirs: Measures) -> float:
    """How far apart two biases are; a difference that is no number is farther than any."""
    mean = abs(difference(ours, theirs).mean)
    return mean if math.isfinite(mean) else math.inf


def _estimate(interval: Interval) -> records.Estimate:
    return records.Estimate.of(interval.mean, interval.half_width)


def _found(measures: Measures) -> str:
    if measures.nonfinite:
        return f"{measures.nonfinite} elements NaN or Inf"
    return f"bias {measures.bias.mean:+.3f} +- {measures.bias.half_width:.3f} ulp"


def _few(measures: Measures) -> int:
    """Elements that may differ in being finite: underflow sits on an edge that the exponential's last bit decides."""
    return measures.elements // 100


def _equal(ours: Tensor, theirs: Tensor) -> float:
    """Share of elements that agree to the bit, NaN counting as equal to NaN."""
    same = (ours == theirs) | (torch.isnan(ours) & torch.isnan(theirs))
    return same.double().mean().item()


def _digest(output: AttentionOutput | None) -> str | None:
    """A digest of the bits of O."""
    if output is None:
        return None
    return hashlib.sha256(output.o.float().contiguous().numpy().tobytes()).hexdigest()[:16]
