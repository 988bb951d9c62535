"""The common part of the kernels of PyTorch and others: how they are called, and what they declare."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tiebreak.kernels.algorithms import FLASH_ATTENTION
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.flash import BLOCK, Block
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionInputs, AttentionOutput, Gradients
from tiebreak.kernels.kernel import Declaration
from tiebreak.kernels.plans import FUSED, Exponential
from tiebreak.kernels.shift_rules import SHIFT_RULES

# (inputs, and their q, k, v in the inputs' format, all (batch, heads, N, d)) to O, differentiable
Call = Callable[[AttentionInputs, Tensor, Tensor, Tensor], Tensor]


def fused_on_gpu(block: Block = BLOCK) -> Declaration:
    """Return the plan of fused GPU kernels by their source: `fused`, the exponential in base two with the scale in it.

    The tiles are those at a head dimension of 64; the suite's own where none are documented.
    """
    plan = replace(FUSED, exponential=Exponential(base_two=True))
    return Declaration(FLASH_ATTENTION, plan, SHIFT_RULES["safe"], block)


def through_autograd(call: Call, inputs: AttentionInputs, arithmetic: Arithmetic, gradients: bool) -> AttentionOutput:
    """Return O of a kernel that torch can differentiate, in the inputs' format, and if asked for the gradients.

    q, k, v and dO are on the device; if they are in their format already, the kernel gets the same memory. The kernel
    uses its own arithmetic, and its errors are raised.
    """
    del arithmetic
    started = StartedCall.of(call, inputs, gradients=gradients)
    return started.finished(inputs.do) if gradients else AttentionOutput(started.o)


@dataclass(frozen=True)
class StartedCall:
    """A call whose forward pass has been run, and whose backward pass may follow at any time."""

    o: Tensor
    leaves: tuple[Tensor, ...]  # q, k, v and the sink, if there is one, that it is differentiated by

    @classmethod
    def of(cls, call: Call, inputs: AttentionInputs, *, gradients: bool = True) -> "StartedCall":
        """Run the forward pass, with a graph where there are to be `gradients`."""
        dtype = TORCH_DTYPES[inputs.formats.inputs]
        # The leaves of a graph are new tensors, also where nothing is copied.
        leaves = [tensor.to(dtype).detach().requires_grad_(gradients) for tensor in (inputs.q, inputs.k, inputs.v)]
        with exact_products(), torch.set_grad_enabled(gradients):
            if inputs.sink is not None:
                leaves.append(inputs.sink.clone().requires_grad_(gradients))
                inputs = replace(inputs, sink=leaves[3])
            return cls(call(inputs, *leaves[:3]), tuple(leaves))

    def finished(self, do: Tensor) -> AttentionOutput:
        """Return O and the gradients of this dO."""
        with exact_products(), torch.enable_grad():
            # By a number's gradient, which is dO exactly: given dO itself, torch imports sympy, which takes a second.
            number = (self.o * do.to(self.o.dtype)).sum()
            dq, dk, dv, *dsink = torch.autograd.grad(number, self.leaves, allow_unused=len(self.leaves) > 3)
        return AttentionOutput(self.o.detach(), gradients=Gradients(dq, dk, dv, dsink=dsink[0] if dsink else None))


def empty(inputs: AttentionInputs) -> str | None:
    """Return None, or that there is no query or no key, in one line."""
    if inputs.q.numel() and inputs.k.numel():
        return None
    return f"nothing to attend to: q {tuple(inputs.q.shape)}, k {tuple(inputs.k.shape)}"


# Switches of `torch.backends.cuda.matmul`; the last is there from PyTorch 2.7 on.
_REDUCED = (
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


@contextmanager
def exact_products() -> Iterator[None]:
    """Switch off all that lets a GPU compute a matrix product in less than the requested precision.

    Products of fp32 operands are fp32's, not tf32's, and those of bf16 and fp16 are summed in fp32 throughout: by
    default cuBLAS may add up the parts of a split product in the narrow format. The switches belong to the process, and
    a user's kernel may set them, so they are restored afterwards. On a CPU they change nothing.
    """
    cuda = torch.backends.cuda
    # PyTorch 2.9 has a new switch for tf32, and reading the old one raises where a user's code has touched the new one.
    new = hasattr(cuda.matmul, "fp32_precision")
    switches: dict[str, object] = {"fp32_precision": "ieee"} if new else {"allow_tf32": False}
    switches |= {name: False for name in _REDUCED if hasattr(cuda.matmul, name)}
    with ExitStack() as undo:
        for name, value in switches.items():
            undo.callback(setattr, cuda.matmul, name, getattr(cuda.matmul, name))
            setattr(cuda.matmul, name, value)
        reduced_math: bool = cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
        undo.callback(cuda.allow_fp16_bf16_reduction_math_sdp, reduced_math)
        cuda.allow_fp16_bf16_reduction_math_sdp(False)
        yield
