"""Whether the calls of a question agree: to the size of their errors, or without a bias."""

from tiebreak.matrix.checks import Check
from tiebreak.matrix.questions import within_error, without_bias

USAGE = Check(
    within_error.KIND,
    "the same numbers have the same answer in other strides, after other calls and beside what is not to be read",
    lambda result: result.agreement.get(within_error.KIND),
    wrong=True,
)
INVARIANCE = Check(
    without_bias.KIND,
    "a call that is changed in what should not matter has the same bits, or others without a bias",
    lambda result: result.agreement.get(without_bias.KIND),
    judges=True,
)
