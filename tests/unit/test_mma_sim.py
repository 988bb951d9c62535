"""The comparison with a checkout of MMA-Sim, with a stand-in for MMA-Sim's instructions."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tiebreak.backends.emulation.targets import OPERANDS, TARGETS, core_of
from tiebreak.backends.emulation.tensor_cores import TensorCore, tensor_core_matmul
from tiebreak.programs.pages import mma_sim


@dataclass
class StandIn:
    """An instruction as MMA-Sim has them: operands in their own types."""

    core: TensorCore
    k: int  # products of one instruction
    dtypes: tuple[torch.dtype, torch.dtype]  # of the operands
    off: float = 0.0  # added to one element

    def __call__(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        assert (a.dtype, b.dtype, a.shape[-1]) == (*self.dtypes, self.k)
        d = tensor_core_matmul(a.float(), b.float(), c, self.core)
        d[3, 4] += self.off
        return d


def _stand_in(instruction: Any, off: float = 0.0) -> StandIn:
    core = core_of(instruction.target, instruction.a, instruction.b)
    return StandIn(core, 2 * core.products, (mma_sim.DTYPES[instruction.a], mma_sim.DTYPES[instruction.b]), off)


def test_every_core_but_of_a_target_that_is_anothers_twin_is_compared() -> None:
    compared = {(instruction.target, instruction.a, instruction.b) for instruction in mma_sim.INSTRUCTIONS}
    assert set(mma_sim.DTYPES) == set(OPERANDS)
    for target in set(TARGETS) - {"sm_86"}:
        for a in OPERANDS:
            for b in OPERANDS:
                try:
                    core_of(target, a, b)
                except ValueError:
                    assert (target, a, b) not in compared
                else:
                    assert (target, a, b) in compared
    assert all(core_of("sm_86", name) == core_of("sm_80", name) for name in ("fp16", "bf16", "tf32"))


@pytest.mark.parametrize("kind", mma_sim.KINDS)
@pytest.mark.parametrize("index", range(0, len(mma_sim.INSTRUCTIONS), 4))
def test_equal_bits_are_equal_and_of_the_formats(index: int, kind: str) -> None:
    instruction = mma_sim.INSTRUCTIONS[index]
    assert mma_sim.compare(instruction, _stand_in(instruction), kind, seed=1) == 0


def test_an_element_that_differs_is_counted_and_a_sign_of_zero_too() -> None:
    instruction = mma_sim.INSTRUCTIONS[0]
    assert mma_sim.compare(instruction, _stand_in(instruction, off=1.0), "normal", seed=1) == 1
    nan = torch.tensor([float("nan"), 0.0])
    assert mma_sim.differing(nan, -nan) == 1


def test_a_folder_that_is_not_mma_sim_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mma_sim.py", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        mma_sim.main()
    assert end.value.code == 2
    assert capsys.readouterr().err == f"mma_sim.py: {tmp_path} is no checkout of MMA-Sim: it has no mmasim/simulator\n"
