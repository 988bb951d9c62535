"""Runs the README's backend on the torch device of `abacus.py`, and on the CPU; prints what came of both as JSON."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import abacus  # type: ignore[import-not-found]
import torch
from msgspec import to_builtins
from torch import Tensor

from tiebreak.backends.backend import CPU, Backend
from tiebreak.cases.gpt2.fixture import log_probabilities_of
from tiebreak.cases.gpt2.snippets import SNIPPETS
from tiebreak.cases.gpt2.variants import VARIANTS
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.kernels.formats import BF16
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.experiments.call import OneCall
from tiebreak.matrix.experiments.training import TrainingRun, trained_kernel
from tiebreak.matrix.run import run_cell
from tiebreak.matrix.workbench import Settings, Workbench

STEPS = 3  # of a training run


def experiments(backend: Backend) -> dict[str, Any]:
    """One experiment of every kind: its outcome and what it measured."""
    bench = Workbench(Settings(seed=1, heads=16))
    case = next(case for case in SCRIPTED if case.name == "random_causal")
    call = run_cell(Cell(backend, backend.kernel("flash@paper"), OneCall(case), BF16), bench)
    snippet = replace(SNIPPETS["train_drift"], steps=STEPS)
    kernel = trained_kernel(VARIANTS["fair@train"])
    training = run_cell(Cell(backend, kernel, TrainingRun(snippet), BF16), bench)
    assert call.measures, call.reasons
    assert training.measures, training.reasons
    logits = torch.linspace(-3.0, 3.0, 24).view(1, 4, 6).to(backend.device)  # of a model that would take long to train
    return {
        "call": [call.outcome, call.digest, to_builtins(call.measures)],
        "losses": training.digest,
        "monitors": dict(training.measures),
        "log_probabilities": log_probabilities_of(logits, torch.arange(4)[None]).tolist(),
        "fingerprint": dict(backend.fingerprint()),
    }


def main(example: Path) -> None:
    """Print what the backend called MPS in a file does on the stand-in, and what it does on the CPU."""
    abacus.load()
    names: dict[str, Any] = {}
    exec(example.read_text(encoding="utf-8"), names)
    mps = replace(names["MPS"], unavailable=lambda: None)
    refused = []
    operations: tuple[Callable[[Tensor], Tensor], ...] = (lambda x: x.double(), lambda x: x + torch.ones(2))
    for operation in operations:
        try:
            operation(torch.ones(2).to(abacus.NAME))
        except (TypeError, RuntimeError) as error:
            refused.append(str(error))
    results = {"refused": refused, "device": experiments(replace(mps, device=abacus.NAME)), "cpu": experiments(CPU)}
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
