"""`python -m tiebreak.studies.reinforce`: Train by REINFORCE what one kernel samples and another trains.

The fixture's model writes text by decode with a cache, through the sampler's attention. Its reward is the share of
characters of the same class as the first one, which the text gives: vowels, other letters, or neither. Every batch has
something to learn from, and more than the commonest class takes attention to the first character. The policy gradient,
its baseline the batch's mean reward, goes through the trainer's attention, forward and backward. Prompts and random
numbers depend on seed and step alone: a pair and its control, one kernel for both, differ in nothing but attention.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean, stdev

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from tiebreak.backends.backend import EMULATION
from tiebreak.cases.gpt2 import scripting
from tiebreak.cases.gpt2.attention import HeadKernel
from tiebreak.cases.gpt2.data import Batches, corpus
from tiebreak.cases.gpt2.fixture import CONFIGURATION, SEQUENCES, fixture
from tiebreak.cases.gpt2.model import CLIP, GPT2, PRESETS, adamw, everywhere
from tiebreak.cases.gpt2.scripting import Script
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.formats import FP16
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import Kernel, run_forward
from tiebreak.kernels.plans import Cast
from tiebreak.kernels.sdpa import cpu_sdpa_flash
from tiebreak.reports.cli import positive
from tiebreak.studies.bounds import student
from tiebreak.studies.language_model import draws, sampled
from tiebreak.studies.pages import read_rows, table, write_rows
from tiebreak.studies.study import Study

FROZEN = Path(__file__).with_name("reinforce.csv")
STEPS, TOKENS = 30, 24  # of a run; of a sequence, the first from the text
LAST, RATE = 10, 2e-3  # steps whose mean is a run's final reward; of AdamW
TRUNCATED_AT = 2.0  # ms-swift's default (modelscope/ms-swift PR 6678), after fengyao.notion.site/off-policy-rl
NEAR = 1.01  # where no ratio is above, weights are not tried: hardly a gradient of a token would change by 1 %
OUTSIDE = 0.2  # of a ratio from 1: where PPO clips (arXiv 1707.06347)
CONFIDENCE = 0.95
_STREAM = 39  # of random numbers: this study's
CONTROL = "control"


class Weighting(Enum):
    """What a token's gradient is multiplied by beside its advantage: its importance ratio, trainer over sampler."""

    NONE = "none"
    RATIO = "ratio"
    TRUNCATED = "truncated"  # at TRUNCATED_AT (Ionides, Truncated Importance Sampling, 2008)

    def of(self, log_ratios: Tensor) -> Tensor:
        """Weights of log-ratios, of the same shape; no gradient passes them."""
        if self is Weighting.NONE:
            return torch.ones_like(log_ratios)
        return log_ratios.detach().exp().clamp(max=TRUNCATED_AT if self is Weighting.TRUNCATED else math.inf)


@dataclass(frozen=True)
class Pair:
    """What samples, and what trains."""

    sampler: HeadKernel
    trainer: HeadKernel
    control: str = CONTROL  # the pair with the trainer's kernel for both
    failing: bool = False  # whether it starts from the head that is scripted into the paper's failure state


@dataclass(frozen=True)
class Task:
    """One run."""

    pair: str  # a name of `pairs()`
    weighting: Weighting
    seed: int  # of prompts and random numbers; of the weights too, where they are scripted


@dataclass(frozen=True)
class Step:
    """What one step measured, before its update."""

    reward: float  # mean over the sequences
    rms: float  # of the log-ratios, nats
    k3: float  # mean of r - 1 - log r: an estimate of KL(sampler, trainer), nats
    outside: float  # share of the tokens whose ratio is not within 1 +- OUTSIDE
    largest: float  # ratio
    gradient: float  # norm, before it is clipped
    entropy: float  # of the trainer's policy, nats a token


@dataclass(frozen=True)
class Row:
    """A row of the frozen file: one run, the means of its steps; rewards of the first and of the last LAST."""

    pair: str
    weighting: str
    seed: int
    first: float
    final: float
    rms: float
    k3: float
    outside: float
    largest: float  # of all
    gradient: float
    entropy: float  # of the last LAST


@cache
def pairs() -> Mapping[str, Pair]:
    """All, by name."""
    fused, paper, standard, fp8 = (
        HeadKernel(parse_declaration(name))
        for name in ("flash@fused", "flash@paper", "standard,s=input", "flash@fused_fp8")
    )
    fused_16, paper_16 = (replace(head, inputs=Cast(FP16)) for head in (fused, paper))
    return {
        CONTROL: Pair(fused, fused),
        "flash@paper": Pair(paper, fused),
        "standard,s=input": Pair(standard, fused),
        "SDPA": Pair(HeadKernel(cpu_sdpa_flash()), fused),
        "control, fp16": Pair(fused_16, fused_16, "control, fp16"),
        "flash@paper, fp16": Pair(paper_16, fused_16, "control, fp16"),
        "flash@fused_fp8": Pair(fp8, fused),
        "control, failing head": Pair(fused, fused, "control, failing head", failing=True),
        "flash@paper, failing head": Pair(paper, fused, "control, failing head", failing=True),
        "wrong: scale 1 % off": Pair(_scaled(1.01), fused),
        "wrong: scale 10 % off": Pair(_scaled(1.1), fused),
        "wrong: no scale": Pair(_scaled(math.sqrt(CONFIGURATION.d)), fused),
    }


def _scaled(factor: float) -> HeadKernel:
    """Plain fused attention, its scale so many times as large."""

    def compute(inputs: AttentionInputs, arithmetic: Arithmetic, gradients: bool) -> AttentionOutput:
        del gradients  # it samples
        return run_forward(declaration, replace(inputs, softmax_scale=factor * inputs.scale), arithmetic)

    declaration = parse_declaration("flash@fused")
    return HeadKernel(Kernel(f"scale * {factor}", compute, None, has_backward=False))


def start(pair: Pair, seed: int) -> GPT2:
    """The model at the start of a run: the fixture's, or one whose head is scripted to fail."""
    configuration = PRESETS["tiny"] if pair.failing else CONFIGURATION
    model = GPT2(configuration, everywhere(pair.trainer, configuration), EMULATION.arithmetic, seed)
    if pair.failing:
        scripting.apply(Script(), model, seed)
    else:
        model.load_state_dict({name: weight.float() for name, weight in fixture().weights.items()})
    return model


def surrogate(chosen: Tensor, sampled: Tensor, rewards: Tensor, weighting: Weighting) -> Tensor:
    """What has the negative policy gradient, a scalar: REINFORCE with the batch's mean reward as its baseline.

    Args:
        chosen: log-probabilities of the tokens that were drawn, by the trainer, (sequences, tokens), differentiable.
        sampled: the same by the sampler.
        rewards: (sequences,).
        weighting: of each token.
    """
    advantages = rewards - rewards.mean()
    return -(weighting.of(chosen - sampled) * advantages[:, None] * chosen).mean()


@cache
def _classes() -> Tensor:
    """Of each token: 0 a vowel, 1 another letter, 2 neither; a model may know tokens that the text does not have."""
    classes = [0 if character in "aeiouAEIOU" else 1 if character.isalpha() else 2 for character in corpus().vocabulary]
    return torch.tensor(classes + [-1] * (PRESETS["tiny"].vocabulary - len(classes)))


def rewards_of(tokens: Tensor) -> Tensor:
    """Share of the tokens behind the first that are of its class, (sequences,), of (sequences, tokens)."""
    classes = _classes()[tokens]
    return (classes[:, 1:] == classes[:, :1]).double().mean(1)


def train(pair: Pair, weighting: Weighting, seed: int, steps: int = STEPS, tokens: int = TOKENS) -> Iterator[Step]:
    """Yield what each step of a run measured."""
    model, prompts = start(pair, seed), Batches(corpus().tokens, SEQUENCES, tokens, seed)
    optimizer = adamw(list(model.parameters()), RATE)
    for step in range(steps):
        model.kernels = everywhere(pair.sampler, model.configuration)
        first, uniform = prompts.batch(step)[0][:, :1], draws((_STREAM, seed, step), tokens)
        drawn, by_sampler = sampled(model, first, uniform, step)
        model.kernels = everywhere(pair.trainer, model.configuration)
        every = log_softmax(model(drawn[:, :-1], step).double(), -1)
        chosen, rewards = every.gather(-1, drawn[:, 1:, None])[..., 0], rewards_of(drawn)
        optimizer.zero_grad()
        surrogate(chosen, by_sampler, rewards, weighting).backward()  # type: ignore[no-untyped-call]
        gradient = nn.utils.clip_grad_norm_(model.parameters(), CLIP).item()
        optimizer.step()
        yield measured(every.detach(), chosen.detach() - by_sampler, rewards, gradient)


def measured(every: Tensor, log_ratios: Tensor, rewards: Tensor, gradient: float) -> Step:
    """What a step measured, from the trainer's log-probabilities of all tokens and the log-ratios of those drawn."""
    ratios = log_ratios.exp()
    return Step(
        reward=rewards.mean().item(),
        rms=log_ratios.square().mean().sqrt().item(),
        k3=(ratios - 1 - log_ratios).mean().item(),
        outside=((ratios - 1).abs() > OUTSIDE).double().mean().item(),
        largest=ratios.max().item(),
        gradient=gradient,
        entropy=-(every.exp() * every).sum(-1).mean().item(),
    )


def run(task: Task) -> list[Step]:
    """Run one task, to its steps."""
    return list(train(pairs()[task.pair], task.weighting, task.seed))


STUDY = Study("reinforce", run, seconds=5.0, gib=1.0)


def row(task: Task, steps: Sequence[Step]) -> Row:
    """What is frozen of a run."""
    figures = {each.name: fmean(getattr(step, each.name) for step in steps) for each in fields(Step)[1:]}
    rewards = [step.reward for step in steps]
    figures |= {"first": fmean(rewards[:LAST]), "final": fmean(rewards[-LAST:])}
    figures |= {"largest": max(step.largest for step in steps), "entropy": fmean(s.entropy for s in steps[-LAST:])}
    return Row(task.pair, task.weighting.value, task.seed, **{name: float(f"{x:.6g}") for name, x in figures.items()})


def interval(values: Sequence[float], comparisons: int = 1) -> float:
    """Half of Student's two-sided interval of a mean, at CONFIDENCE over so many comparisons (Bonferroni)."""
    quantile = student(len(values) - 1, (1 - CONFIDENCE) / 2 / comparisons)
    return quantile * stdev(values) / math.sqrt(len(values))


def lines(rows: Iterable[Row]) -> Iterator[str]:
    """Yield the table: a row for each pair and weighting; in bold what all comparisons together call a difference."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for each in rows:
        groups.setdefault((each.pair, each.weighting), []).append(each)
    head = ("sampler", "weights", "log-ratio, rms", "k3", "outside", "largest ratio", "gradient", "entropy")
    comparisons, cells = sum(pairs()[name].control != name for name, _ in groups), list[tuple[str, ...]]()
    for (name, weighting), group in groups.items():
        control = groups[pairs()[name].control, Weighting.NONE.value]
        cells.append((name, weighting, *_figures(group), *_reward(group, control, comparisons)))
    yield from table((*head, "reward at first", "at the end", "less the control's"), cells)


def _figures(group: Sequence[Row]) -> tuple[str, ...]:
    mean = {each.name: fmean(getattr(row, each.name) for row in group) for each in fields(Row)[2:]}
    return (
        *(f"{mean[name]:.1e}" for name in ("rms", "k3")),
        f"{mean['outside']:.2%}",
        f"{max(each.largest for each in group):.3g}",
        *(f"{mean[name]:.2f}" for name in ("gradient", "entropy", "first")),
    )


def _reward(group: Sequence[Row], control: Sequence[Row], comparisons: int) -> tuple[str, str]:
    """At the end, and how far from the control's, seed by seed."""
    own, theirs = ({row.seed: row.final for row in rows} for rows in (group, control))
    final, apart = list(own.values()), [own[seed] - theirs[seed] for seed in own]
    bold = "**" if abs(fmean(apart)) > interval(apart, comparisons) else ""
    told = f"{bold}{fmean(apart):+.3f} ± {interval(apart):.3f}{bold}"
    return f"{fmean(final):.3f} ± {interval(final):.3f}", told if own != theirs else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, freeze a row a run, print the table; return 0, 2 for bad usage, 130 after Ctrl-C."""
    parser = STUDY.parser(__doc__)
    parser.add_argument("--seeds", type=positive, default=8, metavar="N", help="from 1, 2 or more (default: 8)")
    options = parser.parse_args(arguments)
    if options.seeds < 2:
        parser.error("--seeds 1: an interval takes two seeds or more")
    tasks = [Task(name, Weighting.NONE, seed) for seed in range(1, options.seeds + 1) for name in pairs()]
    steps = STUDY.results(tasks, options)
    # Where no ratio is above TRUNCATED_AT, truncation would give the run with ratios again, to the bit.
    for weighting, bound in ((Weighting.RATIO, NEAR), (Weighting.TRUNCATED, TRUNCATED_AT)):
        beyond = {task.pair for task in tasks if max(step.largest for step in steps[task]) > bound}
        tasks = [replace(task, weighting=weighting) for task in tasks if task.pair in beyond]
        steps |= STUDY.results(tasks, options)
    every = (Task(name, *how) for name in pairs() for how in product(Weighting, range(1, options.seeds + 1)))
    write_rows(FROZEN, [row(task, steps[task]) for task in every if task in steps])
    print("\n".join(lines(read_rows(FROZEN, Row))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
