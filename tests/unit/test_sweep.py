"""The sweep: runs that a stop loses, that repeat to the bit, that diverge, and what the stabilisers change."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs
from torch import Tensor

from tiebreak.cases.gpt2.attention import HeadKernel, attend
from tiebreak.kernels.formats import FP32, TF32
from tiebreak.laboratory import sweep as program
from tiebreak.laboratory.reduced import Reduction
from tiebreak.laboratory.sweep import Task, batches, parse, run, settings
from tiebreak.laboratory.sweep_store import RUNS, Place, SweepRun, read_sweep
from tiebreak.reports.cli import main

SMALL = "--layers 3 --heads 2 --width 8 --context 8 --sequences 2 --warm-up 1 --attention same --steps 3 --workers 1"
QUICK = [*SMALL.split(), "--formats", "E8M7", "--kernels", "flash@paper", "--lr", "1e-2"]


def task(fmt: str = "E8M4", rate: float = 1e-2, stabiliser: str = "none", steps: int = 2, seed: int = 1) -> Task:
    options = parse([*QUICK, "--steps", str(steps)])
    return Task(Place(fmt, rate, "flash@paper", stabiliser, seed), options, batches(options, 1).digest(1))


def test_a_stop_loses_the_run_in_hand_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[int] = []

    def stopped(task: Task) -> SweepRun:
        ran.append(task.place.seed)
        if task.place.seed == 2 and len(ran) == 2:
            raise KeyboardInterrupt
        return run(task)

    monkeypatch.setattr(program, "run", stopped)
    sweep = ["lab", "sweep", *QUICK, "--seeds", "2", "--out", str(tmp_path)]
    assert main(sweep) == 130
    assert "has the 1 run done, and the same command goes on" in capsys.readouterr().err
    first = (tmp_path / RUNS / read_sweep(tmp_path).runs[0].place.file).read_bytes()
    assert main(sweep) == 0
    output = capsys.readouterr().out
    assert "1 run kept, 1 to run, 1 at a time here: about 0 h 0 min to go" in output
    assert "0/2 (0 to 66 %)" in output
    assert (tmp_path / RUNS / read_sweep(tmp_path).runs[0].place.file).read_bytes() == first
    assert main(sweep) == 0  # nothing left
    assert ran == [1, 2, 2]
    recipe = read_sweep(tmp_path).settings.recipe
    assert (recipe["steps"], recipe["width"], recipe["vocabulary"]) == (3, 8, 128)
    assert settings(parse([*QUICK, "--steps", "7"])).recipe == {**recipe, "steps": 7}


def test_a_run_is_the_same_to_the_bit_wherever_its_data_are() -> None:
    one, again, other = (structs.replace(run(task(seed=seed)), seconds=0.0) for seed in (1, 1, 2))
    assert one == again
    assert one.loss != other.loss
    with pytest.raises(Exception, match="other data here than where the sweep began"):
        run(replace(task(), digest="0" * 64))


@pytest.mark.parametrize(
    ("stabiliser", "attention", "linear"),
    # A block has six linear layers, the head is one more; a product has six masks, forward and backward.
    [
        ("none", ["E8M4"] * 3, {"E8M4": 19 * 6}),
        ("tf32_first", [TF32.name, TF32.name, "E8M4"], {"E8M4": 7 * 6, TF32.name: 12 * 6}),
        ("fp32_first", [FP32.name, FP32.name, "E8M4"], {"E8M4": 7 * 6}),
        ("head_unmasked", ["E8M4"] * 3, {"E8M4": 18 * 6}),
    ],
)
def test_masks_are_off_where_a_stabiliser_says(
    monkeypatch: pytest.MonkeyPatch, stabiliser: str, attention: list[str], linear: dict[str, int]
) -> None:
    attended, masked, mask = list[str](), list[str](), Reduction.mask

    def told(self: Reduction, x: Tensor) -> Tensor:
        masked.append(self.fmt.name)
        return mask(self, x)

    def attending(q: Tensor, k: Tensor, v: Tensor, kernels: Sequence[HeadKernel], call: object) -> Tensor:
        attended.append(kernels[0].inputs.fmt.name)
        return attend(q, k, v, kernels, call)  # type: ignore[arg-type]

    monkeypatch.setattr(Reduction, "mask", told)
    monkeypatch.setattr("tiebreak.cases.gpt2.model.attend", attending)
    run(task(stabiliser=stabiliser, steps=1))
    assert attended == attention
    assert {name: masked.count(name) for name in set(masked)} == linear


def test_a_stabiliser_changes_the_model() -> None:
    assert len({run(task("E8M7", stabiliser=name, steps=3)).loss for name in ("none", "qk_norm", "gated")}) == 3


def test_a_run_that_diverges_ends_there_and_qk_clip_keeps_logits_at_what_it_may_have() -> None:
    plain, clipped = (run(task("E8M7", 0.5, name, steps=40)) for name in ("none", "qk_clip"))
    assert (plain.diverged, clipped.diverged) == ("logits", None)
    assert plain.steps < clipped.steps == 40
    assert plain.max_logit is not None
    assert clipped.max_logit is not None
    assert plain.max_logit > 1000 > clipped.max_logit
