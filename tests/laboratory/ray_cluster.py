"""Work on a Ray cluster: Ray finds the machines, places the work and runs it again where a node dies."""

import contextlib
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, TypeVar

from tiebreak.reports.errors import UsageError
from tiebreak.reports.tables.run import counted

_ADDRESS = re.compile(r"(?:ray://)?[\w.-]+:[0-9]{1,5}")
_Task = TypeVar("_Task")
_Result = TypeVar("_Result")

ANSWER_SECONDS = 10.0  # for a cluster to answer; Ray itself would try for two minutes
RETRIES = 5  # of a task whose node or process has died
_TOLD_EVERY = 1.0  # seconds in which Ctrl-C is heard


@dataclass(frozen=True)
class Node:
    id: str  # Ray's
    cpus: float
    gpus: float
    accelerator: str | None  # its type, by Ray's name
    labels: Mapping[str, str] = field(hash=False)  # as its owner gave them


@dataclass(frozen=True)
class Cluster:
    ray: ModuleType

    @property
    def nodes(self) -> list[Node]:
        """Return the machines that are alive and have cores, in the order of their ids."""
        nodes = []
        for entry in self.ray.nodes():
            has: Mapping[str, float] = entry["Resources"]
            types = [name.partition(":")[2] for name in has if name.startswith("accelerator_type:")]
            labels = {name: value for name, value in entry.get("Labels", {}).items() if not name.startswith("ray.io/")}
            if entry["Alive"] and has.get("CPU", 0.0) >= 1:
                accelerator = types[0] if types else None
                nodes.append(Node(entry["NodeID"], has["CPU"], has.get("GPU", 0.0), accelerator, labels))
        return sorted(nodes, key=lambda node: node.id)

    @property
    def about(self) -> str:
        nodes = self.nodes
        gpus = sum(node.gpus for node in nodes)
        accelerators = f", {counted(int(gpus), 'GPU')}" if gpus else ""
        return f"{counted(len(nodes), 'node')}, {counted(int(sum(node.cpus for node in nodes)), 'core')}{accelerators}"

    def slots(self, gpus: float) -> int:
        """Return how many tasks of one core and this share of GPUs it runs at a time; UsageError: none."""
        each = [min(int(node.cpus), int(node.gpus / gpus)) if gpus else int(node.cpus) for node in self.nodes]
        if not sum(each):
            raise UsageError(f"the cluster ({self.about}) has no node with a core and {gpus:g} of a GPU for a run")
        return sum(each)

    def run(self, function: Callable[[_Task], _Result], tasks: Sequence[_Task], *, gpus: float) -> Iterator[_Result]:
        """Run tasks wherever there is room, and give each result as it comes; one whose node dies is run again.

        The nodes import the function: they need the same tiebreak. `gpus` is each task's share. UsageError: some did
        not finish; those that did have been given.
        """
        remote = self.ray.remote(function).options(num_cpus=1, num_gpus=gpus, max_retries=RETRIES)
        lost = []
        for _, result in self.finished([remote.remote(task) for task in tasks]):
            if isinstance(result, Exception):
                lost.append(first_line(result))
            else:
                yield result
        if lost:
            raise UsageError(f"{counted(len(lost), 'run')} did not finish: {lost[0]}; the same command tries again")

    def start(self, function: Callable[..., Any], node: Node, *words: Any) -> Any:
        """Run a function on one machine with all its cores and GPUs; return a reference to its result."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        pinned = NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)
        options = {"num_cpus": node.cpus, "num_gpus": node.gpus, "max_retries": 0, "scheduling_strategy": pinned}
        return self.ray.remote(function).options(**options).remote(*words)

    def finished(self, waiting: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield references as they end, each with its result or with the error that it ended in."""
        left = list(waiting)
        while left:
            ended, left = self.ray.wait(left, timeout=_TOLD_EVERY)
            for reference in ended:
                try:
                    yield reference, self.ray.get(reference)
                except self.ray.exceptions.RayError as error:
                    yield reference, error


def address_of(on: str) -> str | None:
    """Return the address that --on says; None: Ray on this machine alone. UsageError: it can be none of a cluster."""
    if on != "ray" and _ADDRESS.fullmatch(on) is None:
        raise UsageError(f"--on {on}: expected ray, ray://HOST:PORT or HOST:PORT")
    return None if on == "ray" else on


@contextlib.contextmanager
def connected(address: str | None, cpus: int | None = None) -> Iterator[Cluster]:
    """Be connected to the cluster that `address_of` gave, or to Ray on this machine alone, for so many tasks at a time.

    UsageError: Ray is not installed, or no cluster answers.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before Ray is imported: it would report to its makers
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import grpc
        import ray
    except ImportError as error:
        raise UsageError(f"--on: Ray is not installed: pip install 'tiebreak[ray]' ({error})") from None
    if address is not None:
        with grpc.insecure_channel(address.removeprefix("ray://")) as channel:
            try:
                grpc.channel_ready_future(channel).result(ANSWER_SECONDS)
            except grpc.FutureTimeoutError:
                raise UsageError(f"--on {address}: no Ray cluster answers there") from None
    # Without "local" Ray would join whatever cluster was started here before.
    own: dict[str, Any] = {"num_cpus": cpus, "include_dashboard": False} if address is None else {}
    token = "" if "RAY_AUTH_MODE" in os.environ else "; a cluster that asks for a token wants RAY_AUTH_MODE=token"
    try:
        try:
            with warnings.catch_warnings(action="ignore"):  # that it does not answer is told once, below
                ray.init(address or "local", **own, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise UsageError(f"--on {address or 'ray'}: no connection: {first_line(error)}{token}") from None
        yield Cluster(ray)
    finally:
        ray.shutdown()


def first_line(error: BaseException) -> str:
    """Return what an error says, in a line; Ray's own end with what their cause said."""
    cause = getattr(error, "cause", None)
    text = str(cause if isinstance(cause, BaseException) else error).strip()
    return text.splitlines()[0] if text else type(error).__name__
