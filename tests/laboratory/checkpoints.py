"""Checkpoints of a training run: written whole or not at all, and refused if they are of another run."""

import os
import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

CHECKPOINT = "checkpoint.pt"


class CheckpointError(Exception):
    """A checkpoint that can't be resumed from; the message names the file and the field, in one line."""


@dataclass(frozen=True)
class Checkpoint:
    """All that a run needs to go on to the bit; batches and noise follow from the step."""

    step: int  # steps done
    run: dict[str, str | int | float]  # what the run was told: a checkpoint of another run is refused
    model: dict[str, Any]  # the model's state
    optimizers: list[dict[str, Any]]  # of each optimiser
    watch: tuple[float, int]  # lowest loss so far, steps in a row far above it


def save(checkpoint: Checkpoint, folder: Path) -> None:
    """Replace the folder's checkpoint; a kill in between leaves the former.

    Raises:
        CheckpointError: it can't be written, the disk is full for instance; the former is left.
    """
    partial = folder / f"{CHECKPOINT}.partial"
    try:
        torch.save(vars(checkpoint), partial)
    except (RuntimeError, OSError) as error:  # torch's writer raises the former on a full disk
        partial.unlink(missing_ok=True)
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{partial}: can't be written ({reason}); the last checkpoint is kept") from error
    os.replace(partial, folder / CHECKPOINT)


def load(folder: Path, run: dict[str, str | int | float]) -> Checkpoint:
    """The folder's checkpoint, for a run that is told the same.

    Args:
        folder: where `save` put it.
        run: what this run is told.

    Raises:
        CheckpointError: none there, cut short, not a checkpoint, or of a run that was told otherwise.
    """
    path = folder / CHECKPOINT
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; start without --resume")
    try:
        checkpoint = Checkpoint(**torch.load(path, map_location="cpu", weights_only=True))
    except (RuntimeError, EOFError, OSError, TypeError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"{path}: not a whole checkpoint ({type(error).__name__}); start without --resume"
        ) from error
    for name, value in run.items():
        if checkpoint.run.get(name) != value:
            raise CheckpointError(f"{path}: was written with {name} = {checkpoint.run.get(name)}, not {value}")
    return checkpoint
