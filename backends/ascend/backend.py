"""The backend `ascend`: an Ascend NPU as it is, with torch operations of its own and the vendor's kernels."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from tiebreak.backends.ascend.device import TorchNpu, deterministic, first_line, remedies
from tiebreak.backends.backend import Backend, to_device, unusable
from tiebreak.backends.probes import arithmetic_probes, fingerprint, p_cast, softmax_errors
from tiebreak.backends.torch_arithmetic import TorchArithmetic
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import Kernel
from tiebreak.kernels.npu import INNER_PRECISE, LAYOUTS, FusionAttention, every_fusion_attention, npu_kernels
from tiebreak.kernels.triton.loading import missing
from tiebreak.kernels.triton.roster import triton_kernels

_Probe = Callable[[], Mapping[str, str | float]]


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
