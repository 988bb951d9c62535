"""KernelBench (commit 423217d): `eval_kernel_against_ref` of attention, such as level1/97, that also asks tiebreak.

Its own check comes first: `eval.py:804`, allclose at 1e-4 (fp32) or 1e-2 (fp16, bf16) on uniform random numbers.
The kernel is run in processes of its own: what it breaks stays there.
"""

import tempfile
from pathlib import Path

import torch
from kernelbench.eval import KernelExecResult, eval_kernel_against_ref, get_torch_dtype_from_string

import tiebreak
from tiebreak.reports.errors import UsageError

FUNCTION = """

def attention(q, k, v):
    import torch
    return ModelNew().to(q.device, q.dtype)(q, k, v)
"""


def eval_attention_against_ref(original_model_src, custom_model_src, precision="bf16", **options) -> KernelExecResult:
    device = torch.device(options.get("device", "cuda"))
    options["precision"] = get_torch_dtype_from_string(precision)
    result = eval_kernel_against_ref(original_model_src, custom_model_src, **options)
    if not result.correctness:
        return result
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "submission.py"
        file.write_text(custom_model_src + FUNCTION)
        try:
            verdict = tiebreak.check(f"{file}:attention", device=device, dtype=precision, budget="60s")
            result.correctness, result.metadata["tiebreak"] = verdict.ok, str(verdict)
        except UsageError as error:
            result.correctness, result.metadata["tiebreak"] = False, str(error)
    return result
