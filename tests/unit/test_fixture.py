"""The language model that every machine makes alike, and the ways in which its tokens go through it."""

from dataclasses import replace
from importlib.resources import files
from io import BytesIO
from typing import NoReturn

import numpy as np
import pytest
import torch

from tiebreak.backends.backend import CPU, EMULATION
from tiebreak.cases.gpt2.attention import HeadKernel
from tiebreak.cases.gpt2.fixture import CONFIGURATION, CONTEXT, SEQUENCES, Way, exact, fixture, read
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.formats import FP16
from tiebreak.kernels.plans import Cast
from tiebreak.studies.language_model import keep, sampled_by, trained

FUSED = parse_declaration("flash@fused")


#: Weights and tokens after 5 steps more than the warm-up has, of a rate that falls to the last step.
FIRST_STEPS, OF_FIRST_STEPS = 25, "5c9e918a86c4b480"


def test_weights_and_tokens_have_the_same_bits_on_every_machine() -> None:
    # With one thread and with two, at the levels default, AVX2 and AVX-512 of an x86 CPU: so have those of all steps,
    # which take a quarter of a minute, and are in the file.
    assert trained(FIRST_STEPS).digest == OF_FIRST_STEPS
    made, file = sampled_by(fixture().weights), BytesIO()
    assert made.digest == fixture().digest
    keep(made, file)
    file.seek(0)
    with files("tiebreak.cases.gpt2").joinpath("fixture.npz").open("rb") as kept:
        ours, theirs = np.load(file), np.load(kept)
        assert list(ours) == list(theirs), "keep(trained(), file) makes it anew"
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert fixture().tokens.shape == (SEQUENCES, CONTEXT)


def test_the_model_has_learned() -> None:
    assert exact().log_probabilities.mean() > -torch.tensor(float(CONFIGURATION.vocabulary)).log() / 1.5


@pytest.mark.parametrize("way", [Way.CHUNKS, Way.DECODE, Way.ALONE])
def test_a_plan_has_the_same_bits_whichever_way_the_tokens_go(way: Way) -> None:
    prefill, other = (read(HeadKernel(FUSED), EMULATION.arithmetic, "cpu", each) for each in (Way.PREFILL, way))
    # Attention has the same bits; the products around it, in fp32, are added up in another order.
    apart = (other.log_probabilities - prefill.log_probabilities).abs().max().item()
    assert apart < 1e-2 * (prefill.log_probabilities - exact().log_probabilities).abs().max().item()


def test_a_kernel_errs_as_its_format_and_its_layers_do() -> None:
    bf16, fp16 = (
        read(HeadKernel(FUSED, Cast(fmt)), EMULATION.arithmetic, "cpu").log_probabilities - exact().log_probabilities
        for fmt in (HeadKernel(FUSED).inputs.fmt, FP16)
    )
    ratio = (bf16.square().mean() / fp16.square().mean()).sqrt().item()
    assert 6 < ratio < 11  # three bits: 8


def test_only_random_bits_differ_between_two_draws() -> None:
    fair, plain = (HeadKernel(parse_declaration(name)) for name in ("fair", "flash@fused"))
    for head, same in ((fair, False), (plain, True)):
        one, two = (read(head, CPU.arithmetic, "cpu", draw=draw).log_probabilities for draw in (0, 1))
        assert torch.equal(one, two) is same


def test_a_kernel_that_raises_is_heard() -> None:
    def broken(*_: object) -> NoReturn:
        raise RuntimeError("no")

    kernel = replace(CPU.vendor_kernels()[0], compute=broken)
    with pytest.raises(RuntimeError, match="no"):
        read(HeadKernel(kernel), CPU.arithmetic, "cpu")
