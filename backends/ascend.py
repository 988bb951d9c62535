"""The backend `ascend`: an Ascend NPU as it is, with torch operations of its own and the vendor's kernels."""

import importlib
import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement
from torch import Tensor

from tiebreak.backends.backend import Backend, to_device, unusable
from tiebreak.backends.platform import read
from tiebreak.backends.probes import arithmetic_probes, fingerprint, p_cast, softmax_errors
from tiebreak.backends.torch_arithmetic import TorchArithmetic
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import Kernel, first_line
from tiebreak.kernels.npu import (
    INNER_PRECISE,
    LAYOUTS,
    FusionAttention,
    Operators,
    every_fusion_attention,
    npu_kernels,
    torch_npu_operators,
)
from tiebreak.kernels.triton.loading import missing
from tiebreak.kernels.triton.roster import triton_kernels

GUIDE = "docs/devices.md"
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
DETERMINISTIC = "HCCL_DETERMINISTIC"
_SEED = 0  # of the NPU's own generator, which nothing of the matrix draws from
# What the driver brings; all other libraries come with CANN.
_DRIVER_LIBRARIES = ("libascend_hal", "libdrv", "libdcmi", "libmmpa_drv")
_NOT_FOUND = re.compile(r"(lib[\w+.-]+\.so[\w.]*): cannot open shared object file")
_DRIVER = "usr/local/Ascend/driver/version.info"
_Probe = Callable[[], Mapping[str, str | float]]


class DeviceError(RuntimeError):
    """The NPU can't run the kernel; the message has the remedy, in one line."""


@dataclass(frozen=True)
class TorchNpu:
    """The NPUs that torch-npu finds. A test derives what it puts in their place."""

    root: Path = Path("/")  # the file system's root
    backend: str = "ascend"  # name of the backend that runs on them
    device: str = "npu"  # torch's name of the device
    operators: Operators = torch_npu_operators  # where the vendor's operators come from

    def missing(self) -> str | None:
        """None, or what is missing: package, fitting torch, driver, CANN, NPU, in this order.

        torch_npu, which changes torch in many places as it is imported, is left alone where there is no driver.
        """
        return _package_missing() or self._driver_missing() or _import_failure() or _none_visible()

    def _driver_missing(self) -> str | None:
        # The container runtime brings the devices, a plain container at least the folder.
        if any(self.root.glob("dev/*davinci*")) or (self.root / _DRIVER).exists():
            return None
        return f"no Ascend driver: install it, or pass /dev/davinci_manager and the NPUs into the container ({GUIDE})"

    def start(self) -> None:
        """Take the NPU of this worker, seeded, and ask for deterministic collectives."""
        _start()

    def synchronize(self) -> None:
        """Wait for all work of this process; errors of it are raised here."""
        _module().npu.synchronize()

    def describe(self) -> Mapping[str, str]:
        """SoC, torch-npu, CANN and driver; empty what is unknown."""
        npu = _module().npu
        home = Path(os.environ.get("ASCEND_HOME_PATH") or "/nowhere")
        records = sorted(
            record for depth in ("", "*/", "*/*/") for record in home.glob(f"{depth}ascend_*_install.info")
        )
        told = getattr(npu.utils, "get_cann_version", lambda part: "")
        return {
            "soc": str(npu.get_device_name(npu.current_device())),
            "torch_npu": str(_module().__version__),
            "cann": str(told("CANN")) or _version(*records[:1]),
            "driver": str(told("DRIVER")) or _version(self.root / _DRIVER),
        }

    def facts(self) -> Mapping[str, str | float]:
        """The number of the NPU that this process has taken, and the settings that change numbers."""
        npu = _module().npu
        return {
            "npu": float(npu.current_device()),
            "hf32_allowed": str(bool(getattr(npu.matmul, "allow_hf32", False))),
            DETERMINISTIC: os.environ.get(DETERMINISTIC, ""),
            VISIBLE: os.environ.get(VISIBLE, ""),
        }


def _version(*files: Path) -> str:
    """The field `version`, in any case, of a file of `name=value` lines; empty if it has none."""
    fields = (line.partition("=") for file in files for line in read(file).splitlines())
    values = (value.strip().strip("[]") for name, _, value in fields if name.strip().lower() == "version")
    return next(values, "")


def _package_missing() -> str | None:
    """None, or why no torch-npu fits this torch: none is installed, or it was built for another."""
    ours = torch.__version__
    if importlib.util.find_spec("torch_npu") is None:
        return f"torch-npu is not installed: pip install torch-npu=={ours.partition('+')[0]} ({GUIDE})"
    try:
        version, requires = metadata.version("torch-npu"), metadata.requires("torch-npu") or []
    except metadata.PackageNotFoundError:  # a folder on the path without metadata: the import will show
        return None
    for needs in map(Requirement, requires):
        if needs.name == "torch" and not needs.specifier.contains(ours, prereleases=True):
            either = f"install the one or the other ({GUIDE})"
            return f"torch-npu {version} is built for {needs}, this is torch {ours}: {either}"
    return None


@cache
def _import_failure() -> str | None:
    """None, or what to do about the error that importing torch_npu raises, in one line."""
    try:
        _module()
    except Exception as error:  # whatever it raises, other backends are to run
        text = " ".join(first_line(error).split())
        library = _NOT_FOUND.search(text)
        if library is not None and library[1].startswith(_DRIVER_LIBRARIES):
            return f"no Ascend driver: its library {library[1]} can't be found; install it ({GUIDE})"
        if library is not None:
            return f"CANN's library {library[1]} can't be found: install CANN and source its set_env.sh ({GUIDE})"
        if "undefined symbol" in text:
            return f"torch-npu does not fit this CANN or this torch: {text.rpartition('/')[2]}; {GUIDE} has what fits"
        return f"torch_npu can't be imported: {type(error).__name__}: {text}"
    return None


def _none_visible() -> str | None:
    """None, or why torch-npu has no NPU for us."""
    try:
        count = int(_module().npu.device_count())
    except RuntimeError as error:
        return f"torch-npu can't count NPUs: {first_line(error)}"
    if count:
        return None
    if VISIBLE in os.environ:
        return f"no NPU: {VISIBLE}={os.environ[VISIBLE]!r} leaves none; unset it or name one that npu-smi info lists"
    return f"no NPU: torch-npu finds none; `npu-smi info` lists what the driver finds ({GUIDE})"


def _module() -> Any:
    return importlib.import_module("torch_npu")


@cache
def _start() -> None:
    npu = _module().npu
    # HCCL reads it once, as it starts.
    os.environ.setdefault(DETERMINISTIC, "true")
    worker = re.fullmatch(r"gw(\d+)", os.environ.get("PYTEST_XDIST_WORKER", ""))
    npu.set_device((int(worker[1]) if worker else 0) % int(npu.device_count()))
    npu.manual_seed_all(_SEED)


@contextmanager
def remedies(device: str) -> Iterator[None]:
    """Turn the errors of an NPU that have a remedy into one line with it.

    Raises:
        DeviceError: the NPU is out of memory, or has no float64.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "out of memory" in text.lower():
            reason = f"{device} out of memory: fewer workers (-n) or --heads; {first_line(error)}"
        elif "DT_DOUBLE" in text or "float64" in text.lower():
            reason = f"{device} has no float64, and the kernel asks for it: compute in float32"
        else:
            raise
        raise DeviceError(reason) from error


@contextmanager
def deterministic() -> Iterator[None]:
    """torch's deterministic algorithms where there are any, within the block alone: other backends keep theirs."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


@dataclass(frozen=True)
class Ascend(Backend):
    """A backend on NPUs."""

    npu: TorchNpu = field(default_factory=TorchNpu)  # which NPUs

    def kernel(self, name: str) -> Kernel:
        """The kernel called `name`, also an npu_fusion_attention that a default run leaves out."""
        more = {kernel.name: kernel for kernel in every_fusion_attention(self.npu.operators)}
        return more[name] if name in more else super().kernel(name)

    def run(self, kernel: Kernel, inputs: AttentionInputs, *, gradients: bool) -> AttentionOutput:
        """Run a kernel on the NPU, deterministically where torch-npu can, and bring its output back to the host.

        Raises:
            DeviceError: out of memory, or no float64.
            Exception: whatever else the kernel raises.
        """
        with remedies(self.device), deterministic():
            output = kernel.compute(to_device(inputs, self.device), self.arithmetic, gradients)
            self.npu.synchronize()  # work is queued: an error of it shall be this kernel's
            return to_device(output, "cpu")

    def set_up(self) -> None:
        """Take an NPU, by the worker's number: a process works on one from its first operation on."""
        self.npu.start()

    def describe(self) -> dict[str, Any]:
        """SoC, CANN, driver and torch-npu; an error stands for what can't be queried."""
        return _answers({"soc": self.npu.describe})

    def poisoned(self) -> bool:
        """Whether waiting for the NPU fails again and again."""
        return unusable(self.npu.synchronize)

    def fingerprint(self) -> Mapping[str, str | float]:
        """How the NPU is set and what its arithmetic and the vendor's kernel do, for the record of a run.

        Returns:
            The facts of `TorchNpu.facts` and the answers of `tiebreak.backends.probes`, those about a kernel as
            npu_fusion_attention answers them. A probe that the device can't run is answered by its error.
        """
        probes: tuple[_Probe, ...] = (
            self.npu.facts,
            lambda: fingerprint(self.arithmetic, self.device),
            lambda: arithmetic_probes(self.arithmetic, self.device),
            self._vendor_probes,
        )
        return _answers({f"probe {number} failed": probe for number, probe in enumerate(probes)})

    def _vendor_probes(self) -> Mapping[str, str | float]:
        attention = FusionAttention(LAYOUTS[0], INNER_PRECISE[0], self.npu.operators)

        def output(inputs: AttentionInputs) -> Tensor:
            computed = attention(to_device(inputs, self.device), self.arithmetic, False)
            return to_device(computed, "cpu").o.float()

        def statistics(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
            forward = attention.forward(to_device(inputs, self.device))
            return forward["softmax_max"].cpu(), forward["softmax_sum"].cpu()

        return {"p_cast": p_cast(output), **softmax_errors(statistics)}


def _answers(probes: Mapping[str, _Probe]) -> dict[str, str | float]:
    """What all probes answer, and in the place of one that fails its error under the probe's name."""
    answers: dict[str, str | float] = {}
    for name, probe in probes.items():
        try:
            answers |= probe()
        except Exception as error:  # one operation that a device lacks must not cost the records of a whole run
            answers[name] = f"{type(error).__name__}: {first_line(error)}"
    return answers


def ascend(npu: TorchNpu) -> Ascend:
    """A backend on these NPUs."""
    return Ascend(
        name=npu.backend,
        about="an Ascend NPU as it is: native torch operations and the vendor's kernels",
        device=npu.device,
        arithmetic=TorchArithmetic(has_fp64=False),
        unavailable=npu.missing,
        vendor_kernels=partial(_kernels, npu),
        bits="bits on this NPU",
        npu=npu,
    )


def _kernels(npu: TorchNpu) -> tuple[Kernel, ...]:
    """torch-npu's operators, and the Triton kernels where triton-ascend, which goes by triton's name, is installed."""
    compiled = triton_kernels(interpreted=False) if missing() is None else ()
    return (*npu_kernels(npu.operators), *compiled)


ASCEND = ascend(TorchNpu())
