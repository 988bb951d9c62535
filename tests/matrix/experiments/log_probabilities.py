"""A kernel as all attention of a small language model: the change of its tokens' log-probabilities."""

import hashlib
import math
from dataclasses import dataclass
from typing import ClassVar

from tiebreak.cases.gpt2 import fixture
from tiebreak.kernels.formats import Format
from tiebreak.matrix.experiment import Cell, Experiment, Kind
from tiebreak.matrix.pairs import Side
from tiebreak.matrix.pairs.through_model import SuiteModel, difference
from tiebreak.matrix.result import Result
from tiebreak.matrix.workbench import Workbench
from tiebreak.reports.pairs.log_probabilities import MEASURES, number
from tiebreak.reports.records import record as records

_MEASURED = {name: f"nats_{name}" for name in ("mean", "rms", "largest", "k3")}
_KEPT = 8  # every so many-th token's is kept: of 508, an rms within 5 %
_DECIMALS = 9  # of what is kept, in nats


@dataclass(frozen=True)
class LogProbabilities(Experiment):
    """The experiment with a kernel as all attention of a small language model."""

    kind: ClassVar[str] = "log_probabilities"
    time_limit: ClassVar[float] = 300.0
    name: ClassVar[str] = "log_probabilities"
    version: ClassVar[int] = fixture.VERSION

    def described(self) -> records.CaseRecord:
        return records.CaseRecord("a small GPT-2, the same everywhere, with the kernel in all layers", "this suite")

    def group(self, fmt: Format) -> str:
        """Return the model's name: it takes seconds to make."""
        return self.name

    def run(self, cell: Cell, bench: Workbench) -> Result:
        side = Side(cell.kernel.name, cell.backend, cell.kernel, cell.kernel.declaration, known=False)
        exact, read = fixture.exact(), SuiteModel().read(side, cell.fmt)
        measured, errors = difference(exact, read), read.log_probabilities - exact.log_probabilities
        numbers = {
            own: math.nan if (value := number(measured, name)) is None else value for name, own in _MEASURED.items()
        }
        kept = tuple(records.finite(round(error, _DECIMALS)) for error in errors.flatten()[::_KEPT].tolist())
        return Result(
            measures=numbers,
            shown=records.Shown.of(_MEASURED["rms"], numbers[_MEASURED["rms"]], spec=".2e"),
            external=cell.kernel.external,
            # In fp32, as the logits are: log-softmax in fp64 has another last bit at each instruction-set level.
            digest=hashlib.sha256(read.log_probabilities.float().numpy().tobytes()).hexdigest()[:16],
            evidence={records.NUMBERS: records.NumbersRecord(_ABOUT, "nats", fixture.fixture().digest, kept)},
        )


_ABOUT = "log-probabilities through a small GPT-2, less those with exact attention"
KIND = Kind(
    LogProbabilities.kind,
    records.ExperimentRecord(
        "a small language model with the kernel as all its attention",
        "rms error of its tokens' log-probabilities in nats.",
    ),
    experiments=(LogProbabilities(),),
    measured={
        own: records.MeasureRecord(
            f"{MEASURES[name].about}: with exact attention, then the kernel", MEASURES[name].unit, column=True
        )
        for name, own in _MEASURED.items()
    },
    on_request=True,
)
