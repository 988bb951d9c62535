"""flashinfer-bench (0.1.2; commit 40e6ca7): an evaluator of ragged prefill that also asks tiebreak.

Import this file before a benchmark starts. Its own check comes first: an element fails only where its absolute *and*
its relative error are above 1e-2 (`bench/utils.py:113`).
"""

import torch
from flashinfer_bench.bench.evaluators import DefaultEvaluator, registry
from flashinfer_bench.bench.utils import make_eval
from flashinfer_bench.data import EvaluationStatus
from torch.nn.functional import pad

import tiebreak


class TiebreakEvaluator(DefaultEvaluator):
    @classmethod
    def can_evaluate(cls, definition):
        return list(definition.inputs) == ["q", "k", "v", "qo_indptr", "kv_indptr", "sm_scale"]

    @classmethod
    def check_correctness(cls, definition, sol_runnable, inputs, ref_outputs, cfg, log_path, device):
        theirs = super().check_correctness(definition, sol_runnable, inputs, ref_outputs, cfg, log_path, device)

        @tiebreak.kernel(layout="nhd", takes="gqa", backward="none")
        def attention(q, k, v, is_causal, sm_scale):
            if not is_causal:  # it always is: every row is then the last of a sequence
                rows = (pad(row, (0, 0, 0, 0, len(k) - 1, 0)) for row in q.split(1))
                return torch.cat([attention(row, k, v, True, sm_scale)[-1:] for row in rows])
            ends = (torch.tensor([0, len(x)], dtype=torch.int32, device=x.device) for x in (q, k))
            out = (torch.full_like(q, torch.nan), torch.empty(q.shape[:2], device=q.device))
            writes = sol_runnable.metadata.destination_passing_style
            returned = sol_runnable(q, k, v, *ends, sm_scale, *(out if writes else ()))
            return (out if writes else returned)[0]

        if theirs[1] is None:
            verdict = tiebreak.check(attention, device=device, budget="60s", in_process=True)
            print(verdict)
            if not verdict.ok:
                return theirs[0], make_eval(EvaluationStatus.INCORRECT_NUMERICAL, device, log_path, theirs[0])
        return theirs


registry._EVALUATORS.insert(0, TiebreakEvaluator)
