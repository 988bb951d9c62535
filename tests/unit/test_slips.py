"""Mistakes that no planted defect makes, as changes of the inputs: against attention with the mistake, written out."""

import torch

from tiebreak.cases.slips import slips
from tiebreak.kernels.formats import BF16, Formats
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.reference import reference


def test_a_cap_before_the_scale_is_another_cap() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v, do = (torch.randn(1, 2, 5, 16, generator=generator).bfloat16().float() for _ in range(4))
    inputs = AttentionInputs(q=q, k=k, v=v, do=do, formats=Formats.of(BF16), softcap=3.0)
    slip = next(slip for slip in slips(inputs) if slip.about == "scores are capped before they are scaled")
    scores = 3.0 * torch.tanh(q.double() @ k.double().mT / 3.0) * 16**-0.5
    torch.testing.assert_close(reference(slip.inputs).o, scores.softmax(-1) @ v.double(), rtol=1e-12, atol=0.0)
