"""Four kernels that are no attention, or a poor one, and who passes them: the judges of public harnesses, and tiebreak.

    python examples/harnesses/zeros.py

Each harness' rule is written out from its source and asked on inputs drawn as its source draws them, with fewer heads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from tabulate import tabulate
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import tiebreak
from tiebreak.kernels.formats import BF16
from tiebreak.laboratory.acceptance import RULES, ComparedTensor

BUDGET = "60s"
HEADS = 4  # of a harness' inputs

Kernel = Callable[..., Tensor]


def zeros(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Zeros."""
    return q.new_zeros(*q.shape[:3], v.shape[3])


def mean_of_v(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The mean of V: as if all scores were equal."""
    return v.mean(2, keepdim=True).expand(-1, -1, q.shape[2], -1).clone()


def sums_in_bf16(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention whose sum P V is carried in bf16, from one tile of 16 keys to the next."""
    p = (q.float() @ k.float().mT * q.shape[3] ** -0.5).softmax(-1)
    o = q.new_zeros(*q.shape[:3], v.shape[3], dtype=torch.bfloat16)
    for tile in range(0, k.shape[2], 16):
        o = (o.float() + p[..., tile : tile + 16] @ v[:, :, tile : tile + 16].float()).bfloat16()
    return o.to(q.dtype)


def last_row_of_v(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """V's last row."""
    return v[:, :, -1:].expand(-1, -1, q.shape[2], -1).clone()


KERNELS: tuple[Kernel, ...] = (zeros, mean_of_v, sums_in_bf16, last_row_of_v)


@dataclass(frozen=True)
class Judge:
    """A harness, and how it judges attention."""

    name: str  # with the commit of its source
    rule: str  # in short, and where its source has it
    passes: Callable[[Tensor, Tensor], bool]  # of what a kernel returned, and the reference in the same format
    shape: tuple[int, int, int]  # queries, keys, head dimension
    dtype: torch.dtype = torch.bfloat16
    draw: Callable[..., Tensor] = torch.randn

    def verdict(self, kernel: Kernel) -> str:
        """On one call, with the largest difference."""
        generator = torch.Generator().manual_seed(42)
        queries, keys, d = self.shape
        q, k, v = (self.draw(1, HEADS, n, d, generator=generator).to(self.dtype) for n in (queries, keys, keys))
        out, reference = kernel(q, k, v), scaled_dot_product_attention(q, k, v)
        return f"{'passes' if self.passes(out, reference) else 'fails'}, {(out - reference).abs().max():.2g}"


def by_rule(out: Tensor, reference: Tensor, name: str) -> bool:
    """A rule that the suite has written out, in bf16."""
    exact = reference.double()
    return RULES[name].ask(ComparedTensor(out.double(), exact, BF16, exact, exact)).passed is True


def mostly(out: Tensor, reference: Tensor) -> bool:
    """At most 5 % of the elements may be off."""
    return float((~torch.isclose(out, reference, rtol=0.1, atol=0.1)).float().mean()) <= 0.05


def close(out: Tensor, reference: Tensor, rtol: float) -> bool:
    """Elements may be off by 1e-2 and a share of their size."""
    return torch.allclose(out, reference, atol=1e-2, rtol=rtol)


JUDGES = (
    Judge("KernelBench 423217d", "allclose 1e-2, level1/97 (eval.py:99, :804)", partial(by_rule, name="kernel_bench"),
          (512, 512, 1024), draw=torch.rand),
    Judge("kernels 8ac69fc", "allclose atol 1e-2 (cli/benchmark.py:528)", partial(close, rtol=1e-5),
          (512, 512, 64), torch.float16),
    Judge("flashinfer-bench 40e6ca7", "both errors above 1e-2 (bench/utils.py:113)",
          partial(by_rule, name="flashinfer_bench"), (1, 4096, 128)),
    Judge("BackendBench 66e0dbc", "assert_close 1e-2 (eval.py:68)", partial(close, rtol=1e-2), (512, 512, 64)),
    Judge("gpu-mode f83cb92", "0.1, 5 % may be off, MLA (amd_202602/utils.py:146)", mostly, (1, 8192, 576)),
)  # fmt: skip


def ours(kernel: Kernel) -> str:
    """The verdict of tiebreak, with the checks that failed."""
    verdict = tiebreak.check(kernel, budget=BUDGET, experiments="call")
    failed = next((finding.text for finding in verdict.findings if finding.name == "failed"), "")
    checks = sorted({each.split(" in ")[0] for each in failed.split("; ") if each})
    if not verdict.ok and not checks:
        return verdict.headline.partition(": ")[2]  # on a busy machine, that its budget had no room
    return "passes" if verdict.ok else f"fails: {', '.join(checks)}"


def table() -> list[dict[str, str]]:
    """A row a judge: its rule, and what it says of each kernel."""
    rows = [
        {"judge": judge.name, "rule": judge.rule} | {kernel.__name__: judge.verdict(kernel) for kernel in KERNELS}
        for judge in JUDGES
    ]
    return [
        *rows,
        {"judge": "tiebreak", "rule": f"--budget {BUDGET}"} | {each.__name__: ours(each) for each in KERNELS},
    ]


if __name__ == "__main__":
    print(tabulate(table(), headers="keys"))
    print("\nBeside a verdict the largest difference from PyTorch's attention on those inputs.")
