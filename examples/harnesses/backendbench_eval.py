"""BackendBench (commit 66e0dbc): tests of attention operators that also ask tiebreak.

Import this file before `BackendBench.eval` is used. Its own check comes first: `eval.py:68`, assert_close at 1e-2.
"""

from BackendBench import eval as backend_bench

import tiebreak
from tiebreak.reports.errors import UsageError

OPERATOR = "scaled_dot_product"  # in the name of every attention operator of ATen
upstream = backend_bench.eval_correctness_test
verdicts = {}  # by implementation: an operator has many tests


def eval_correctness_test(op, impl, test):
    result = upstream(op, impl, test)
    if not result.is_correct or OPERATOR not in str(op):
        return result

    def attention(q, k, v, is_causal=False, scale=None):
        returned = impl(q, k, v, is_causal=is_causal, scale=scale)
        return returned[0] if isinstance(returned, tuple) else returned

    try:
        if impl not in verdicts:
            verdicts[impl] = tiebreak.check(attention, device=test.args[0].device, budget="60s", in_process=True)
        if not verdicts[impl].ok:
            result.is_correct, result.error_type, result.error_msg = False, "tiebreak", str(verdicts[impl])
    except UsageError as error:
        result.is_correct, result.error_type, result.error_msg = False, "tiebreak", str(error)
    return result


backend_bench.eval_correctness_test = eval_correctness_test
