"""Training at toy size: resumed to the bit, stopped by itself, refused in one line; and its optimisers by hand."""

import io
import json
import math
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from tiebreak.backends.backend import CPU
from tiebreak.cases.gpt2.attention import HeadKernel, LayerCall, Observation, attend
from tiebreak.cases.gpt2.model import GPT2, Configuration, adamw, everywhere
from tiebreak.cases.gpt2.monitors import View
from tiebreak.kernels.roster import composed_kernel
from tiebreak.laboratory.train import COLLAPSED_REPORTS, main
from tiebreak.laboratory.training import (
    CHECKPOINT,
    EXPLODED,
    EXPLOSION_STEPS,
    KEPT_STEPS,
    LARGEST_LOGIT,
    LOG,
    LOGITS,
    NOT_FINITE,
    Captures,
    Divergence,
    Schedule,
    optimizers,
)

SIZES = Configuration(layers=2, heads=2, width=32, context=8, vocabulary=64, tied=True)
RATE = 1e-3
TOY = ["--sequences", "2", "--report-every", "2", "--checkpoint-every", "2", "--warm-up", "2", "--kernel", "fair"]


def _train(out: Path, *arguments: str, steps: int = 6) -> int:
    return main([*TOY, "--steps", str(steps), "--out", str(out), *arguments])


def _log(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / LOG).read_text().splitlines()]


def _weights(out: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = torch.load(out / CHECKPOINT, weights_only=True)["model"]
    return weights


def _same_end(first: Path, other: Path) -> bool:
    """Whether two runs ended in the same log and the same weights, to the bit."""
    a, b = _weights(first), _weights(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) and _log(first) == _log(other)


Loss = Callable[[Tensor, int], Tensor]  # of the loss as it is and the step, the loss as a test wants it


@contextmanager
def _loss(change: Loss) -> Iterator[None]:
    """Within, a step's loss is changed, or its step is interrupted."""
    loss = GPT2.loss
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GPT2, "loss", lambda self, tokens, targets, now: change(loss(self, tokens, targets, now), now))
        yield


def _killed_at(step: int) -> Loss:
    def until(loss: Tensor, now: int) -> Tensor:
        if now == step:
            raise KeyboardInterrupt
        return loss

    return until


@dataclass(frozen=True)
class Straight:
    """A run of six steps that nothing stopped."""

    out: Path
    printed: list[str]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    out, printed = tmp_path_factory.mktemp("straight") / "run", io.StringIO()
    with redirect_stdout(printed):
        assert _train(out, "--checkpoint-every", "4") == 0
    return Straight(out, printed.getvalue().splitlines())


@pytest.fixture
def heeding_ctrl_c() -> Iterator[None]:
    """Ctrl-C as on a terminal, also where a shell has put the tests into the background, which ignores it."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


def test_a_run_tells_of_its_progress(straight: Straight) -> None:
    assert torch.load(straight.out / CHECKPOINT, weights_only=True)["step"] == 6  # the last has one too
    log, lines = _log(straight.out), straight.printed
    assert [entry["step"] for entry in log] == [2, 4, 6]
    assert lines[0].startswith("tiny: 2 layers, 4 heads, width 64, 119,104 parameters; fair on cpu")
    assert "on 1 process;" in lines[0]
    assert lines[1].startswith("step 2  loss ")
    assert all(word in lines[1] for word in ("max logit", "drift", "sign diversity", "s a step", "tokens/s"))
    assert lines[-1] == f"done: 6 steps; {straight.out / CHECKPOINT}"
    assert log[-1]["loss"] < log[0]["loss"]
    assert all(math.isfinite(value) for entry in log for value in entry.values())
    assert 0 <= log[0]["sign_diversity"] <= 1


# A SIGKILL of a process is in test_ranks.
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_interrupted_run_resumes_to_the_bit(tmp_path: Path, straight: Straight, optimizer: str) -> None:
    whole, killed = straight.out, tmp_path / "killed"
    if optimizer == "muon":
        assert _train(whole := tmp_path / "whole", "--optimizer", optimizer) == 0
    with _loss(_killed_at(5)), pytest.raises(KeyboardInterrupt):  # the last checkpoint is of step 4
        _train(killed, "--optimizer", optimizer)
    later = '{"step": 5, "loss": 1.0}\n{"step'  # than the checkpoint, and cut
    (killed / LOG).open("a").write(later)
    assert _train(killed, "--resume", "--optimizer", optimizer) == 0
    assert _same_end(whole, killed)


@pytest.mark.usefixtures("heeding_ctrl_c")
def test_ctrl_c_ends_the_step_and_leaves_a_checkpoint(
    tmp_path: Path, straight: Straight, capsys: pytest.CaptureFixture[str]
) -> None:
    def pressed(loss: Tensor, now: int) -> Tensor:
        if now == 2:
            signal.raise_signal(signal.SIGINT)
        return loss

    with _loss(pressed):
        assert _train(tmp_path / "stopped", "--checkpoint-every", "100") == 130
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert last_line == f"interrupted after step 3; {tmp_path / 'stopped' / CHECKPOINT} has it all: go on with --resume"
    assert _train(tmp_path / "stopped", "--resume") == 0
    assert _same_end(straight.out, tmp_path / "stopped")


@pytest.mark.usefixtures("heeding_ctrl_c")
def test_a_second_ctrl_c_interrupts_at_once(tmp_path: Path) -> None:
    def pressed(loss: Tensor, now: int) -> Tensor:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not interrupted")

    with _loss(pressed), pytest.raises(KeyboardInterrupt):
        _train(tmp_path / "run")


def test_a_resumed_run_remembers_the_lowest_loss(tmp_path: Path) -> None:
    """Five high losses in a row are an explosion, also with a kill between the second and the third."""
    values = (3.0, 3.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0)
    with _loss(lambda loss, now: loss * 0 + values[now]):
        with _loss(_killed_at(4)), pytest.raises(KeyboardInterrupt):
            _train(tmp_path, steps=8)
        assert _train(tmp_path, "--resume", steps=8) == 1
    assert _log(tmp_path)[-1]["step"] == 7


@pytest.mark.parametrize("full", [False, True], ids=["kill", "full disk"])
def test_a_checkpoint_that_can_not_be_written_leaves_the_former(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], full: bool
) -> None:
    save = torch.save

    def cut(state: dict[str, Any], path: Path) -> None:
        save(state, path)
        if state["step"] == 4:
            path.write_bytes(path.read_bytes()[:1000])
            raise RuntimeError("writer failed: no space\nmore") if full else KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, nullcontext() if full else pytest.raises(KeyboardInterrupt):
        patch.setattr(torch, "save", cut)
        assert _train(tmp_path) == 2
        error = capsys.readouterr().err
        assert "can't be written (writer failed: no space)" in error
        assert error.count("\n") == 1
        assert sorted(path.name for path in tmp_path.iterdir()) == [CHECKPOINT, LOG]
    assert torch.load(tmp_path / CHECKPOINT, weights_only=True)["step"] == 2
    assert _train(tmp_path, "--resume") == 0


def test_a_batch_in_parts_is_the_same_step(tmp_path: Path) -> None:
    for name, at_once in (("whole", "4"), ("parts", "1")):
        arguments = ("--sequences", "4", "--at-once", at_once, "--kernel", "flash@paper")
        assert _train(tmp_path / name, *arguments, steps=4) == 0
    logs = _log(tmp_path / "whole"), _log(tmp_path / "parts")
    assert [entry["loss"] for entry in logs[0]] == pytest.approx([entry["loss"] for entry in logs[1]], rel=1e-5)
    assert [entry["drift"] for entry in logs[0]] == pytest.approx([entry["drift"] for entry in logs[1]], rel=0.1)
    assert logs[0][0]["max_logit"] == pytest.approx(logs[1][0]["max_logit"], rel=1e-2)


def test_monitors_look_at_the_reported_steps_only_and_each_part_has_noise_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []

    def view(observation: Observation, head: int | None) -> View:
        seeds.append(observation.inputs.noise_seed)
        return View(observation, head)

    monkeypatch.setattr("tiebreak.cases.gpt2.monitors.View", view)
    assert _train(tmp_path / "run", "--at-once", "1", steps=3) == 0
    assert len(seeds) == len(set(seeds)) == 2 * 2 * 2  # reports, parts, layers


def test_bf16_rounds_the_linear_layers_but_neither_weights_nor_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, dtypes = nn.Linear.forward, set()

    def linear(self: nn.Linear, x: Tensor) -> Tensor:
        out = forward(self, x)
        dtypes.add((self.weight.dtype, out.dtype))
        return out

    def view(observation: Observation, head: int | None) -> View:
        q, k, v = (getattr(observation.inputs, name).double() for name in ("q", "k", "v"))
        exact = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        # A product that autocast rounds would be off by 1e-3.
        assert (observation.output.o - exact).abs().max() < 1e-5 * exact.abs().max()
        return View(observation, head)

    monkeypatch.setattr(nn.Linear, "forward", linear)
    monkeypatch.setattr("tiebreak.cases.gpt2.monitors.View", view)
    assert _train(tmp_path / "run", "--precision", "bf16", "--kernel", "flash@fp32", steps=2) == 0
    assert dtypes == {(torch.float32, torch.bfloat16)}
    assert {weight.dtype for weight in _weights(tmp_path / "run").values()} == {torch.float32}


def test_gradients_are_clipped_and_the_rate_follows_the_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, seen = type(adamw([nn.Parameter(torch.ones(1))])), list[float]()
    step = used.step

    def look(self: torch.optim.AdamW) -> None:
        gradients = [weight.grad.flatten() for weight in self.param_groups[0]["params"]]
        seen.extend((torch.cat(gradients).norm().item(), self.param_groups[0]["lr"]))
        step(self)

    monkeypatch.setattr(used, "step", look)
    with _loss(lambda loss, now: 1000 * loss):
        assert _train(tmp_path, steps=2) == 0
    assert seen == pytest.approx([1.0, 5e-4, 1.0, 1e-3], rel=1e-4)  # warmed up in two steps


def test_a_lasting_collapse_of_the_sign_diversity_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dip = [0.01] * (COLLAPSED_REPORTS - 1) + [1.0]
    readings = iter([*dip, *dip, *([0.01] * (COLLAPSED_REPORTS + 2))])
    steps = 3 * COLLAPSED_REPORTS + 2
    monkeypatch.setattr("tiebreak.laboratory.training.sign_diversity", lambda weight, x: next(readings))
    assert _train(tmp_path, "--report-every", "1", "--layers", "1", steps=steps) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [number for number, line in enumerate(lines) if line.startswith("early warning")] == [steps - 1]


def test_an_explosion_ends_the_run_and_keeps_its_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _train(tmp_path / "run", "--rate", "30", "--seed", "3", steps=40) == 1
    last = _log(tmp_path / "run")[-1]["step"]
    assert f"the loss exploded at step {last}" in capsys.readouterr().out
    assert EXPLOSION_STEPS <= last < 40
    files = sorted(path.name for path in (tmp_path / "run").glob("inputs-*"))
    steps = range(max(1, last - KEPT_STEPS + 1), last + 1)
    assert files == [f"inputs-{step:06d}.safetensors" for step in steps]
    with safe_open(tmp_path / "run" / files[-1], framework="pt") as file:
        names = file.keys()
        assert sorted(names) == [f"layer{layer}.{name}" for layer in (0, 1) for name in ("do", "k", "q", "v")]
        told = {"layers": "2", "causal": "true", "kernel": "fair", "preset": "tiny", "seed": "3"}
        assert file.metadata() == {"step": str(last), **told}
        tensors = {name: file.get_tensor(name) for name in names}
    assert {tuple(tensor.shape) for tensor in tensors.values()} == {(2, 4, 64, 16)}
    dtypes = {name: tensor.dtype for name, tensor in tensors.items() if name.startswith("layer1")}
    assert dtypes == {f"layer1.{name}": torch.bfloat16 for name in "qkv"} | {"layer1.do": torch.float32}


def test_kernels_are_chosen_by_layer_and_by_head(tmp_path: Path) -> None:
    """Fair in every layer one by one is fair everywhere; one head of another kernel is not."""
    for name, options in {
        "everywhere": [],
        "one by one": ["--kernel", "standard", "--in-layers", "1=fair,2=fair"],
        "but one": ["--in-layers", "2.3=flash@fp32"],
    }.items():
        assert _train(tmp_path / name, *options, steps=2) == 0
    assert _same_end(tmp_path / "everywhere", tmp_path / "one by one")
    assert not _same_end(tmp_path / "everywhere", tmp_path / "but one")


def test_heads_of_several_kernels_are_kept_in_their_order(tmp_path: Path) -> None:
    captures, kernels = Captures(), [HeadKernel(composed_kernel(name)) for name in ("fair", "flash@paper")]
    captures.begin(1)
    tensors = torch.arange(3.0)[None, :, None, None].expand(1, 3, 2, 8)  # each head holds its own number
    call = LayerCall(CPU.arithmetic, 0, 1, (captures,), torch.zeros(1, 2, 8))
    leaf = tensors.clone().requires_grad_()
    attend(leaf, tensors, tensors, (kernels[0], kernels[1], kernels[0]), call).sum().backward()  # type: ignore[no-untyped-call]
    (path,) = captures.write(tmp_path, {})
    with safe_open(path, framework="pt") as file:
        assert file.get_tensor("layer0.q")[0, :, 0, 0].tolist() == [0.0, 1.0, 2.0]


def test_a_loss_that_is_no_number_ends_the_run_without_its_inputs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with _loss(lambda loss, now: loss * (math.nan if now == 3 else 1.0)):
        assert _train(tmp_path / "fourth") == 1
    kept = [f"inputs-{step:06d}.safetensors" for step in (1, 2, 3)]
    assert sorted(path.name for path in (tmp_path / "fourth").glob("inputs-*")) == kept
    assert _log(tmp_path / "fourth")[-1]["step"] == 4
    with _loss(lambda loss, now: loss * math.nan):
        assert _train(tmp_path / "first") == 2
    assert "the loss of the first step is nan" in capsys.readouterr().err


def test_a_users_kernel_trains_and_a_preset_is_written_with_either_dash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "mine.py"
    source.write_text(
        "import torch\n"
        "def attention(q, k, v, *, causal=False, scale=None):\n"
        "    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)\n"
    )
    small = ["--layers", "1", "--heads", "2", "--width", "4", "--context", "4", "--steps", "1", "--sequences", "2"]
    given = ["--kernel", f"{source}:attention", "--preset", "gpt2-small", *small, "--out", str(tmp_path / "run")]
    assert main(given) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("gpt2_small: 1 layers, 2 heads, width 4, ")
    assert "linear layers in bf16" in printed


def test_checkpoints_of_another_run_or_cut_short_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _train(tmp_path, steps=2) == 0
    for flag, name, value in (("--seed", "seed = 0", "1"), ("--layers", "layers = 2", "1")):
        assert _train(tmp_path, "--resume", flag, value, steps=2) == 2
        assert f"was written with {name}, not {value}" in capsys.readouterr().err
    assert _train(tmp_path, steps=2) == 2
    assert "holds a run already" in capsys.readouterr().err
    np.arange(200, dtype="<u2").__mod__(43).tofile(tmp_path / "train.bin")
    assert _train(tmp_path, "--resume", "--data", str(tmp_path), steps=2) == 2
    assert "was written with data = " in capsys.readouterr().err
    whole = (tmp_path / CHECKPOINT).read_bytes()
    for size in (0, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / CHECKPOINT).write_bytes(whole[:size])
        assert _train(tmp_path, "--resume", steps=2) == 2
        assert "not a whole checkpoint" in capsys.readouterr().err


def test_a_run_diverges_by_a_loss_that_stays_high_or_is_no_number_and_by_its_logits_where_a_limit_is_set() -> None:
    watch = Divergence()
    losses = (9.0, 4.0, 6.5, 6.5, 6.5, 6.5, 5.0, 6.5, 6.5, 6.5, 6.5)
    assert [watch.after(loss) for loss in losses] == [None] * len(losses)
    assert watch.after(6.5) == EXPLODED
    assert Divergence().after(math.nan) == Divergence().after(math.inf) == NOT_FINITE
    watch = Divergence(limit=LARGEST_LOGIT)
    logits = (LARGEST_LOGIT, math.nan, 2 * LARGEST_LOGIT)
    assert [watch.after(3.0, logit) for logit in logits] == [None, None, LOGITS]
    assert Divergence().after(3.0, 2 * LARGEST_LOGIT) is None


@pytest.fixture
def model() -> GPT2:
    declared = composed_kernel("flash@fp32").declaration
    assert declared is not None
    made = GPT2(SIZES, everywhere(HeadKernel(declared), SIZES), CPU.arithmetic, 0)
    for index, weight in enumerate(made.parameters()):
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(index))
    return made


def _changes(model: GPT2, name: str) -> dict[str, torch.Tensor]:
    """What one step at RATE adds to every weight."""
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for optimizer in optimizers(name, model):
        for group in optimizer.param_groups:
            group["lr"] = RATE
        optimizer.step()
    return {name: weight.detach() - before[name] for name, weight in model.named_parameters()}


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest(model: GPT2) -> None:
    changes = _changes(model, "muon")
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        by_sign = torch.allclose(changes[name], -RATE * weight.grad.sign(), rtol=0, atol=2e-6)
        assert by_sign == (not name.startswith("blocks.") or weight.dim() == 1), name


def test_muon_decays_the_matrices_by_a_hundredth_of_the_rate(model: GPT2) -> None:
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    before = model.block(0).wq.weight.detach().clone()
    changes = _changes(model, "muon")
    torch.testing.assert_close(changes["blocks.0.wq.weight"], -RATE * 0.01 * before, rtol=1e-3, atol=1e-8)
    assert not changes["tokens.weight"].any()


def test_an_optimizer_that_is_not_there_is_told(model: GPT2, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="unknown optimizer 'sgd': known are adamw, muon"):
        optimizers("sgd", model)
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ValueError, match=r"has no Muon: 2\.9 and newer do"):
        optimizers("muon", model)


def test_the_schedule_warms_up_and_fails_to_a_hundredth() -> None:
    schedule = Schedule(steps=110, rate=1.0, warm_up=10)
    assert [schedule.at(step) for step in (0, 9, 10)] == pytest.approx([0.1, 1.0, 1.0])
    assert schedule.at(60) == pytest.approx(0.505)
    assert schedule.at(110) == pytest.approx(0.01)


def test_an_optimiser_imports_no_compiler(monkeypatch: pytest.MonkeyPatch, model: GPT2) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    (optimizer,) = optimizers("adamw", model)
    before = model.head.weight.detach().clone()
    model.head.weight.grad = torch.ones_like(before)
    optimizer.step()
    assert not torch.equal(model.head.weight, before)
    optimizer.zero_grad()
    assert model.head.weight.grad is None
