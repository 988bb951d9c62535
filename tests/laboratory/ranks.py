"""The processes of one run, as torchrun starts them: each computes its part of every batch.

Gradients are added up by `Ranks.add`, not by DistributedDataParallel. The latter regroups its buckets after a process'
first step, which changes the order of the sums: with 3 ranks or more a resumed run would leave the uninterrupted one.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Ranks:
    """This process among those of its run."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Return whether this process writes the files and talks."""
        return self.rank == 0

    def share(self, parts: int) -> range:
        """Return which parts of a batch are this process'; `parts` is a multiple of the processes."""
        mine = parts // self.size
        return range(self.rank * mine, (self.rank + 1) * mine)

    def add(self, tensor: Tensor) -> None:
        """Make the tensor the sum of all processes'."""
        if self.size > 1:
            dist.all_reduce(tensor)

    def gather(self, value: _Value) -> list[_Value]:
        """Return the values of all processes, in the order of their ranks."""
        if self.size == 1:
            return [value]
        values: list[_Value | None] = [None] * self.size
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]


@contextmanager
def joined() -> Iterator[Ranks]:
    """Join the other processes of the run, if torchrun started any; ValueError: not by torchrun's environment."""
    if "WORLD_SIZE" not in os.environ:
        yield Ranks()
        return
    dist.init_process_group()
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def take_device(device: str) -> None:
    """Under torchrun, work on the device numbered as this process' place on its machine; all share a `cpu`.

    Raises:
        ValueError: more processes than devices on this machine.
    """
    if device == "cpu" or "LOCAL_RANK" not in os.environ:
        return
    place, there = int(os.environ["LOCAL_RANK"]), torch.accelerator.device_count()
    if place >= there:
        raise ValueError(f"torchrun started more processes than the {there} {device} devices of this machine")
    torch.accelerator.set_device_index(place)
