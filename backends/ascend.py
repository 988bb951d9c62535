"""The backend `ascend`: an Ascend NPU as it is, with its own torch operations and the vendor's kernels."""

import importlib
import importlib.util
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from packaging.requirements import Requirement
from torch import Tensor

from tiebreak.backends.backend import to_device
from tiebreak.backends.emulation.rounding import round_to
from tiebreak.backends.platform import read
from tiebreak.backends.torch_arithmetic import TorchArithmetic
from tiebreak.backends.torch_device import TorchDevice, answers
from tiebreak.kernels.formats import BF16, Formats, ulp
from tiebreak.kernels.inputs import AttentionInputs
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
from tiebreak.kernels.probe_inputs import tied_p_bar
from tiebreak.kernels.reference import reference
from tiebreak.kernels.triton.loading import missing
from tiebreak.kernels.triton.roster import triton_kernels

GUIDE = "docs/devices.md"
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
DETERMINISTIC = "HCCL_DETERMINISTIC"
# The driver's libraries; all others come with CANN.
_DRIVER_LIBRARIES = ("libascend_hal", "libdrv", "libdcmi", "libmmpa_drv")
_NOT_FOUND = re.compile(r"(lib[\w+.-]+\.so[\w.]*): cannot open shared object file")
_P_HEADS = 16  # of either parity, with ties of P-bar
_DRIVER = "usr/local/Ascend/driver/version.info"


@dataclass(frozen=True)
class Ascend(TorchDevice):
    """The NPUs that torch-npu finds. A test derives a class with a replacement of them."""

    root: Path = Path("/")  # the file system's root
    operators: Operators = torch_npu_operators  # where the vendor's operators come from

    def module(self) -> Any:
        """Return torch-npu's functions for the device."""
        return _module().npu

    def kernel(self, name: str) -> Kernel:
        """Return the kernel called `name`, also an npu_fusion_attention that a default run leaves out."""
        more = {kernel.name: kernel for kernel in every_fusion_attention(self.operators)}
        return more[name] if name in more else super().kernel(name)

    @contextmanager
    def in_use(self) -> Iterator[Collection[str]]:
        """Run a kernel by deterministic algorithms where torch-npu has any; other backends keep torch's setting."""
        before = torch.get_deterministic_debug_mode()
        torch.set_deterministic_debug_mode("warn")
        try:
            with super().in_use() as assumed:
                yield assumed
        finally:
            torch.set_deterministic_debug_mode(before)

    def set_up(self) -> None:
        """Take the NPU of this worker, and ask for deterministic collectives."""
        os.environ.setdefault(DETERMINISTIC, "true")  # HCCL reads it once, as it starts
        super().set_up()

    def describe(self) -> dict[str, Any]:
        """Return the SoC and its software's versions: empty where unknown, an error where they can't be queried."""
        return super().describe() | answers({"torch_npu": self._versions})

    def _versions(self) -> Mapping[str, str]:
        home = Path(os.environ.get("ASCEND_HOME_PATH") or "/nowhere")
        records = sorted(
            record for depth in ("", "*/", "*/*/") for record in home.glob(f"{depth}ascend_*_install.info")
        )
        version_of = getattr(self.module().utils, "get_cann_version", lambda part: "")
        return {
            "torch_npu": str(_module().__version__),
            "cann": str(version_of("CANN")) or _version(*records[:1]),
            "driver": str(version_of("DRIVER")) or _version(self.root / _DRIVER),
        }

    def fingerprint(self) -> dict[str, str | float]:
        """Return the probes' answers, settings, and the vendor kernel's answers to the probes of a kernel."""
        probes = {"settings failed": self._settings, "probes of the vendor's kernel failed": self._vendor_probes}
        return {**super().fingerprint(), **answers(probes)}

    def _settings(self) -> Mapping[str, str | float]:
        npu = self.module()
        return {
            "npu": float(npu.current_device()),
            "hf32_allowed": str(bool(getattr(npu.matmul, "allow_hf32", False))),
            **{name: os.environ.get(name, "") for name in (DETERMINISTIC, VISIBLE)},
        }

    def _vendor_probes(self) -> Mapping[str, str | float]:
        attention = FusionAttention(LAYOUTS[0], INNER_PRECISE[0], self.operators)

        def output(inputs: AttentionInputs) -> Tensor:
            computed = attention(to_device(inputs, self.device), self.arithmetic, False)
            return to_device(computed, "cpu").o.float()

        def statistics(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
            forward = attention.forward(to_device(inputs, self.device))
            return forward["softmax_max"].cpu(), forward["softmax_sum"].cpu()

        return {"p_cast": p_cast(output), **softmax_errors(statistics)}


def _missing(root: Path) -> str | None:
    """Return None, or what is missing: package, fitting torch, driver, CANN, NPU, in this order.

    torch_npu, which changes torch in many places when imported, is not imported where there is no driver.
    """
    return _package_missing() or _driver_missing(root) or _import_failure() or _none_visible()


def _driver_missing(root: Path) -> str | None:
    # The container runtime brings the devices, a plain container at least the folder.
    if any(root.glob("dev/*davinci*")) or (root / _DRIVER).exists():
        return None
    return f"no Ascend driver: install it, or pass /dev/davinci_manager and the NPUs into the container ({GUIDE})"


def _version(*files: Path) -> str:
    """Return the field `version`, in any case, of a file of `name=value` lines; empty if it has none."""
    fields = (line.partition("=") for file in files for line in read(file).splitlines())
    values = (value.strip().strip("[]") for name, _, value in fields if name.strip().lower() == "version")
    return next(values, "")


def _package_missing() -> str | None:
    """Return None, or why no torch-npu fits this torch: none is installed, or it was built for another."""
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
    """Return None, or what to do about the error that importing torch_npu raises, in one line."""
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
    """Return None, or why torch-npu sees no NPU."""
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


def ascend(root: Path = Path("/"), operators: Operators = torch_npu_operators) -> Ascend:
    """Return the backend on the NPUs of a file system."""
    return Ascend(
        name="ascend",
        about="an Ascend NPU as it is: native torch operations and the vendor's kernels",
        device="npu",
        arithmetic=TorchArithmetic(has_fp64=False),
        unavailable=partial(_missing, root),
        vendor_kernels=partial(_kernels, operators),
        bits="bits on this NPU",
        root=root,
        operators=operators,
    )


def _kernels(operators: Operators) -> tuple[Kernel, ...]:
    """Return torch-npu's operators, and the Triton kernels where triton-ascend, imported as triton, is installed."""
    compiled = triton_kernels(interpreted=False) if missing() is None else ()
    return (*npu_kernels(operators), *compiled)


def p_cast(run: Callable[[AttentionInputs], Tensor]) -> str:
    """Return how a kernel casts P-bar to bf16 where it is halfway between two neighbours.

    `run` is the kernel, from inputs to O, both on the host. On random scores that happens once in 2^16, and does not
    show in the bias of O. Here every P-bar but the maximum's is a tie, in half of the heads above a neighbour with an
    even last bit, in the other half above an odd one. It is `rne`, `rtna` or `rtz`; `not seen` where the exponential
    misses the ties; `none known` else.
    """
    odd = torch.tensor([[False], [True]]).expand(2, _P_HEADS)
    inputs = tied_p_bar(np.random.Generator(np.random.Philox(1)), odd)
    o = reference(inputs).o
    biases = ((run(inputs).double() - o) / ulp(o, BF16)).flatten(1).mean(1)
    # A mean error of 1,024 elements is within 0.05 by chance: 0.29 / 32 ulp, five times over.
    signs = tuple((biases.sign() * (biases.abs() >= 0.05)).tolist())
    names = {(-1.0, 1.0): "rne", (1.0, 1.0): "rtna", (-1.0, -1.0): "rtz", (0.0, 0.0): "not seen"}
    return names.get(signs, "none known")


def softmax_errors(run: Callable[[AttentionInputs], tuple[Tensor, Tensor]]) -> Mapping[str, float]:
    """Return how far a kernel's row maxima and row sums are from the reference, on random scores.

    `run` gives both on the host, (batch, heads, N, copies), from inputs there.

    Returns:
        `softmax_max_error`: largest |error| of the maximum of the scores; `softmax_sum_error`: largest relative error
        of the row sum of exp(S - maximum).
    """
    rng = np.random.Generator(np.random.Philox(2))
    q, k, v = (round_to(torch.from_numpy(rng.standard_normal((1, 4, 48, 64), np.float32)), BF16) for _ in "qkv")
    inputs = AttentionInputs(q, k, v, torch.ones_like(q), Formats.of(BF16))
    s = reference(inputs).s
    row_max = s.amax(-1, keepdim=True)
    row_sum = torch.exp(s - row_max).sum(-1, keepdim=True)
    kernel_max, kernel_sum = run(inputs)
    return {
        "softmax_max_error": (kernel_max.double() - row_max).abs().max().item(),
        "softmax_sum_error": ((kernel_sum.double() - row_sum).abs() / row_sum).max().item(),
    }


ASCEND = ascend()
