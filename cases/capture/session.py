"""The context manager that a training loop is put into."""

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field
from itertools import accumulate
from pathlib import Path
from types import TracebackType

import torch
from tabulate import tabulate
from torch import Tensor, nn

from tiebreak.cases.capture.folder import MB, Folder, Kept
from tiebreak.cases.capture.interest import Candidate, Findings, candidate, measuring
from tiebreak.cases.capture.watch import AttentionCall, AttentionModule, CaptureError, ModelWatch, NotHeldError, Place

_UNLIKE = 0.1  # an O further from softmax(scale q k^T) v than this is that of another function
_SHOWN = 5  # files in the summary
#: What a file tells of its most telling layer, and what the summary calls it.
_COLUMNS = {
    "name": "layer",
    "repeated": "maximum repeats",
    "largest": "largest logit",
    "sinks": "P > 0.9",
    "delta_bias": "bias of delta",
    "bias": "flash's bias (ulp)",
    "worst": "worst head",
}


@dataclass(eq=False, repr=False)
class Capture:
    """A context manager that keeps q, k, v, O and dO of the most telling calls of attention as a model trains.

    Use it as a context manager around the loop, and call its `step()` at the end of every optimiser step::

        with capture(model, "captured", every=50, budget_mb=256) as captured:
            for batch in loader:
                train(model, batch)
                captured.step()

    Seen are calls of `torch.nn.functional.scaled_dot_product_attention`, Hugging Face's attention functions, and the
    modules that are named. Every `every`-th step is looked at: a few rows of every head show how many repeat their
    maximum, how many have one P above 0.9, how biased delta = rowsum(dO * O) is, the largest logit, and the bias that
    plain flash attention would have. The first forward pass of such a step counts, not what gradient accumulation or
    activation checkpointing repeats; of a call without a graph, as under `torch.no_grad`, dO is missing. Sequences of
    a padded batch are cut to their own tokens. Calls that the captured format can't hold (dropout, other masks than
    causal ones and padding, biases) are counted and named, not kept. The model's numbers stay the same to the bit.
    There are no collective calls: under DDP and FSDP every process writes its own files, named for its rank, under its
    share of the budget. One run at a time writes into a folder.

    Raises:
        CaptureError: on entry, where an argument or the folder can't be used or safetensors is missing; in the first
            step that is looked at, where the budget is too small for a single head.
    """

    #: Any whose submodules are called in training, not compiled. Its tensors are (batch, heads, tokens, d), key heads
    #: perhaps fewer than heads; Hugging Face's functions return O as (batch, tokens, heads, d).
    model: nn.Module
    folder: str | Path  # of `inputs-STEP.safetensors`; a second run into it keeps to its budget and overwrites nothing
    _: KW_ONLY
    every: int = 50  # steps from one that is looked at to the next; those whose number it divides
    budget_mb: float = 256  # of all captures in the folder, 10^6 bytes each: the least telling give way
    heads: int = 16  # key heads of a layer that are kept, each with its query heads, over all batch entries
    layers: int = 4  # of one step that are kept at most
    tokens: int = 1024  # queries of a head that are kept at most, the first; under a causal mask their keys alone
    memory_mb: float = 256  # of the device, for what is looked at in one step: layers beyond it wait for a later
    start: int | None = None  # the number of the first step; None: the one after the folder's last capture, or 0
    #: Names or globs of modules whose forward takes q, k and v and returns O, and what can't be seen of them.
    modules: Mapping[str, AttentionModule] = field(default_factory=dict)
    quiet: bool = False  # whether no summary is printed at the end; `summary()` gives it

    steps: int = field(default=0, init=False)  # in all
    looked: int = field(default=0, init=False)  # steps that were looked at
    calls: Counter[str] = field(default_factory=Counter, init=False)  # by what became of them
    written: list[Path] = field(default_factory=list, init=False)  # files
    _undo: ExitStack = field(default_factory=ExitStack, init=False)
    _layers: dict[Place, int] = field(default_factory=dict, init=False)  # by the order of the first forward pass
    _first: int = field(default=0, init=False)  # the layer from which on a step looks

    def __post_init__(self) -> None:
        for name in ("every", "heads", "layers", "tokens", "budget_mb", "memory_mb"):
            if not getattr(self, name) > 0:
                raise CaptureError(f"{name}={getattr(self, name)}: expected a positive number")
        if self.start is not None and self.start < 0:
            raise CaptureError(f"start={self.start}: expected a step's number, 0 or more")

    def __enter__(self) -> "Capture":
        for name, module in self.model.named_modules():
            if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
                reason = f"{name or 'model'} is compiled, which hides its calls"
                raise CaptureError(f"{reason}; give capture the model before torch.compile")
        self._watch = ModelWatch(self.model, self.modules, self._seen)
        self._folder = Folder(Path(self.folder), int(self.budget_mb * MB), *_ranks())
        last = self._folder.last_step
        self._number = (0 if last is None else last + 1) if self.start is None else self.start  # of the running step
        self._undo.enter_context(self._watch.installed())
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop, also after Ctrl-C: every written file is complete."""
        if kind is None and not self.steps and any(not copied.trained for copied in self._candidates):
            self.step()  # a forward pass alone: there is no optimiser whose step could end
        self._undo.close()
        self._candidates.clear()
        if not self.quiet and _ranks()[0] == 0:
            print(self.summary(), file=sys.stderr, flush=True)

    def step(self) -> None:
        """End a step of the optimiser; call it once a step, after the backward pass."""
        if self._watch.looking:
            self.looked += 1
            self._keep()
        self.steps += 1
        self._number += 1
        self._begin()

    def _begin(self) -> None:
        self._done: dict[Place, bool] = {}  # calls of this step that were looked at: whether with a graph
        self._candidates: list[Candidate] = []
        self._left: list[int] = []  # layers that this step had no memory for
        looking = self._number % self.every == 0
        if looking or self._watch.looking:
            self._watch.look(looking)

    def _seen(
        self, place: Place, call: Callable[[], AttentionCall], out: Tensor, to_heads: Callable[[Tensor], Tensor]
    ) -> None:
        """Look at one call; a repetition of it in this step does not count."""
        layer = self._layers.setdefault(place, len(self._layers))
        # Without a graph: an evaluation, or the first pass of a checkpoint, whose second pass takes its place.
        before = self._done.get(place)
        if before or before is out.requires_grad:
            return
        self._done[place] = out.requires_grad
        self._candidates = [copied for copied in self._candidates if copied.layer != layer]
        full = sum(copied.bytes for copied in self._candidates) > self.memory_mb * MB
        if full:
            self._left.append(layer)
        if full or layer < self._first:
            self.calls["left for another step (memory_mb)"] += 1
            return
        try:
            attention_call = call()
            if out.dtype not in (attention_call.q.dtype, torch.float32):
                raise NotHeldError("O in another format than q")
            with measuring(out.device):
                how = (self.heads, self.tokens, self._number // self.every)
                copied = candidate(place.module, layer, attention_call, to_heads(out.detach()), *how)
                copied.trained = out.requires_grad
        except NotHeldError as reason:
            self.calls[f"with {reason}"] += 1
            return
        self._candidates.append(copied)
        if not copied.trained:
            return

        def hook(gradient: Tensor) -> None:
            with measuring(gradient.device):
                copied.take(to_heads(gradient.detach()))

        out.register_hook(hook)  # type: ignore[no-untyped-call]

    def _keep(self) -> None:
        """Write the most telling layers of the step that ends, if they are more telling than those kept."""
        self._first = min(self._left, default=0)
        ended = [part for part in self._candidates if part.do is not None or not part.trained]
        self.calls["without a gradient of O"] += len(self._candidates) - len(ended)
        if not ended:
            return
        with measuring(ended[0].o.device):
            summaries = [part.summary() for part in ended]
            numbers = torch.stack([summary.to(summaries[0].device) for summary in summaries]).tolist()
        good: list[Candidate] = []
        for part, row in zip(ended, numbers, strict=True):
            part.findings = findings = Findings(*row)
            self.calls["looked at"] += 1
            if not findings.is_finite:
                self.calls["with NaN or Inf"] += 1
            elif findings.unlike > _UNLIKE and not part.call.sure:
                self.calls["whose O is not softmax(scale q k^T) v of their arguments"] += 1
            else:
                good.append(part)
        if good:
            self._write(sorted(good, key=lambda part: -part.findings.telling)[: self.layers])

    def _write(self, layers: list[Candidate]) -> None:
        """Write the first of these layers, as many as fit; where none fits, heads of the very first."""
        fitting = sum(total <= self._folder.room for total in accumulate(layer.bytes for layer in layers))
        narrowed = layers[0].within(self._folder.room)
        if narrowed is None:
            size, budget = layers[0].bytes / layers[0].o.shape[0] / MB, self._folder.budget / MB
            reason = f"one head of {layers[0].name} takes {size:.2f} MB, and the budget is {budget:.2f} MB"
            raise CaptureError(f"budget_mb: {reason} of this process; raise it")
        chosen = layers[:fitting] or [narrowed]
        try:
            path = self._folder.write(self._number, chosen)
        except FileExistsError:
            self.calls["of a step that the folder has already"] += len(chosen)
        else:
            self.written += [] if path is None else [path]

    def summary(self) -> str:
        """Return counts of calls and files, a table of the most telling layers, and the next command."""
        folder = self._folder
        looked = f"looked at {self.looked} of {self.steps} steps"
        lines = [f"capture: {looked}, {self.calls['looked at']} calls of attention"]
        if not self._layers and self.looked:
            seen = "torch's scaled_dot_product_attention, Hugging Face's attention functions and modules=... are seen"
            lines.append(f"no call was seen: {seen}")
        lines += [f"not kept: {count} calls {why}" for why, count in self.calls.items() if count and why != "looked at"]
        size = f"{folder.bytes / MB:.1f} of {folder.budget / MB:.1f} MB"
        lines.append(f"{len(folder.kept)} files, {size}, in {folder.path}")
        if folder.kept:
            lines += [*_table(folder.kept), f"next: python -m pytest -n auto tests/matrix --captured {folder.path}"]
        return "\n".join(lines)


def _table(kept: Mapping[Path, Kept]) -> list[str]:
    """Return the most telling layer of each of the most telling files as lines of a table."""
    ranked = sorted(kept.items(), key=lambda item: -item[1].telling)[:_SHOWN]
    rows = [[path.name, f"{file.telling:.2f}", *map(file.shown, _COLUMNS)] for path, file in ranked]
    return tabulate(rows, headers=["file", "telling", *_COLUMNS.values()], disable_numparse=True).splitlines()


capture = Capture


def _ranks() -> tuple[int, int]:
    """Return this process's number, and how many there are, without communication."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
