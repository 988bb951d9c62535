"""flashinfer-bench (0.1.2; commit 40e6ca7): an evaluator of ragged prefill that also asks tiebreak.

Import this file before a benchmark starts. Its own check comes first: an element fails only where its absolute *and*
its relative error are above 1e-2 (`bench/utils.py:113`).
"""

import torch
from flashinfer_bench.bench.evaluators import DefaultEvaluator, registry
from flashinfer_bench.bench.utils import make_eval
from flashinfer_bench.data import EvaluationStatus

import tiebreak


class TiebreakEvaluator(DefaultEvaluator):
    @classmethod
    def can_evaluate(cls, definition):
        return list(definition.inputs) == ["q", "k", "v", "qo_indptr", "kv_indptr", "sm_scale"]

    @classmethod
    def check_correctness(cls, definition, sol_runnable, inputs, ref_outputs, cfg, log_path, device):
        theirs = super().check_correctness(definition, sol_runnable, inputs, ref_outputs, cfg, log_path, device)

        @tiebreak.kernel(layout="nhd", takes="gqa", causal="always", out="out")
        def attention(q, k, v, sm_scale, out):
            ends = (torch.tensor([0, len(x)], dtype=torch.int32, device=x.device) for x in (q, k))
            if not sol_runnable.metadata.destination_passing_style:
                return out.copy_(sol_runnable(q, k, v, *ends, sm_scale)[0])
            return sol_runnable(q, k, v, *ends, sm_scale, out, torch.empty(q.shape[:2], device=q.device))

        if theirs[1] is None:
            verdict = tiebreak.check(attention, device=device, budget="60s", in_process=True)
            print(verdict)
            if not verdict.ok:
                return theirs[0], make_eval(EvaluationStatus.INCORRECT_NUMERICAL, device, log_path, theirs[0])
        return theirs


registry._EVALUATORS.insert(0, TiebreakEvaluator)
