"""The Triton kernels beside PyTorch's flash attention and cuDNN's, in one run on one GPU: TFLOP/s.

Run with ``make bench-gpu``. Not run on a GPU yet.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tiebreak.backends.cuda import describe_gpu, unavailable
from tiebreak.kernels.formats import BF16, Formats
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.triton import launch
from tiebreak.kernels.triton.loading import missing
from tiebreak.kernels.triton.roster import DECLARATIONS

REASON = unavailable() or missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

SHAPES = [(4, 16, 4096, 64), (4, 16, 4096, 128)]  # batch, heads, N, d
OURS = ("triton_flash", "triton_stabilized", "triton_dithered", "triton_fair")
THEIRS = {"sdpa_flash": SDPBackend.FLASH_ATTENTION, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION}
ROUNDS = 10  # of turns, so that a clock that drifts does so for all kernels
TURN_MS = 10  # that a kernel is timed for, at least once
LONG = (1, 1, 65536, 128)
BACKWARD_PRODUCTS = 2.5  # for each of the forward pass: S again, dP, dV, dQ and dK beside S and P V

Pass = Callable[[], object]


def _sdpa(backend: SDPBackend, causal: bool, tensors: Sequence[Tensor]) -> tuple[Pass, Pass]:
    """Forward and backward pass, of which the latter needs one of the former."""
    q, k, v = leaves = [tensor.detach().requires_grad_() for tensor in tensors[:3]]

    def forward() -> Tensor:
        with sdpa_kernel([backend]):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    o = forward()
    return torch.no_grad()(forward), lambda: torch.autograd.grad(o, leaves, tensors[3], retain_graph=True)


def _triton(name: str, causal: bool, tensors: Sequence[Tensor]) -> tuple[Pass, Pass]:
    q, k, v, do = (tensor.detach() for tensor in tensors)
    inputs = AttentionInputs(q, k, v, do, Formats.of(BF16), causal=causal, noise_seed=1)
    call = launch.TritonCall.from_inputs(inputs, DECLARATIONS[name])
    o, lse = launch.forward(call)
    assert o.isfinite().all()
    return partial(launch.forward, call), partial(launch.backward, call, o, lse, do)


def _contenders(causal: bool, tensors: Sequence[Tensor]) -> dict[str, tuple[Pass, Pass]]:
    theirs = {name: _sdpa(backend, causal, tensors) for name, backend in THEIRS.items()}
    return theirs | {name: _triton(name, causal, tensors) for name in OURS}


def _tensors(shape: tuple[int, int, int, int]) -> tuple[Tensor, ...]:
    """q, k, v and dO."""
    generator = torch.Generator("cuda").manual_seed(1)
    return tuple(torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(4))


def _side_by_side(calls: Mapping[str, Pass]) -> dict[str, float]:
    """Milliseconds of each call, the L2 cache overwritten before it: the median of its turns."""
    from triton.testing import do_bench

    timed = {name: partial(do_bench, call, warmup=1, rep=TURN_MS, return_mode="median") for name, call in calls.items()}
    turns = [{name: turn() for name, turn in timed.items()} for _ in range(ROUNDS)]
    return {name: median(turn[name] for turn in turns) for name in calls}


def _flops(batch: int, heads: int, n: int, d: int, *, causal: bool) -> float:
    """Of the forward pass as FlashAttention's papers count them: two products, without the half that is masked."""
    return 4.0 * batch * heads * n * n * d / (2.0 if causal else 1.0)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention(capsys: pytest.CaptureFixture[str], shape: tuple[int, int, int, int], causal: bool) -> None:
    contenders = _contenders(causal, _tensors(shape))
    forward, backward = ({name: passes[at] for name, passes in contenders.items()} for at in (0, 1))
    flops = _flops(*shape, causal=causal)
    passes = {
        "forward": (_side_by_side(forward), flops),
        "backward": (_side_by_side(backward), BACKWARD_PRODUCTS * flops),
    }
    with capsys.disabled():
        print(f"\n{_machine()}\n(batch, heads, N, d) {shape}, bf16, {'causal' if causal else 'full'}")
        for name, (milliseconds, flops) in passes.items():
            print("\n".join(_rows(name, milliseconds, flops)))


def _machine() -> str:
    gpu = describe_gpu()
    names = {"gpu_driver": "driver", "cuda": "CUDA", "hip": "HIP", "cudnn": "cuDNN", "triton": "triton"}
    versions = ", ".join(f"{name} {gpu[key]}" for key, name in names.items() if gpu[key] is not None)
    return f"{gpu['gpu']} ({gpu['gpu_arch']}), torch {torch.__version__}, {versions}"


def _rows(name: str, milliseconds: Mapping[str, float], flops: float) -> list[str]:
    plain = milliseconds["sdpa_flash"]
    return [
        f"{name:9}{kernel:18}{time:9.3f} ms{flops / time / 1e9:9.1f} TFLOP/s{plain / time:7.2f} x sdpa_flash"
        for kernel, time in milliseconds.items()
    ]


def test_long_rows_take_memory_for_the_rows_alone() -> None:
    tensors = _tensors(LONG)
    tensor_bytes = tensors[0].nbytes
    torch.cuda.reset_peak_memory_stats()
    _, backward = _triton("triton_flash", True, tensors)
    backward()
    # Tensors of q's size are 8, and some are copied; a matrix of scores in bf16 would be 512.
    assert torch.cuda.max_memory_allocated() < 64 * tensor_bytes
